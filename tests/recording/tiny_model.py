"""A small transformer in pure torch (RoPE, grouped-query attention, gated MLP), and its attention functions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ringprof
from ringprof.proof.result import ModelCheck

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 64, 32, 4, 2, 8
Attention = Callable[..., Tensor]


def visible(
    positions: Tensor, documents: Tensor | None = None, window: int | None = None, padding: Tensor | None = None
) -> Tensor:
    """Return the mask (B or 1, 1, S, S) of causal attention; ``documents`` (S) numbers the document of each token."""
    rows, columns = positions[:, None], positions[None, :]
    mask = columns <= rows
    if documents is not None:
        mask &= documents[:, None] == documents[None, :]
    if window is not None:
        mask &= columns > rows - window
    mask = mask[None, None]
    if padding is not None:
        # A padded query sees itself, so that no row is empty.
        mask = mask & padding[:, None, None, :].bool() | torch.eye(len(positions), dtype=torch.bool)
    return mask


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Compute attention of (B, S, H, D) on one device, causal where there is no mask."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return out.transpose(1, 2)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Apply rotary embeddings to (B, S, H, D) at positions (B, S) or (S)."""
    half = x.shape[-1] // 2
    angles = positions.double()[..., None] * 100.0 ** -(torch.arange(half, device=positions.device).double() / half)
    angles = (angles if angles.dim() == 3 else angles[None])[:, :, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.q = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, positions: Tensor, attention: Attention, **mask: Any) -> Tensor:
        h = self.norm(x)
        q, k, v = (part(h).unflatten(-1, (-1, HEAD_DIM)) for part in (self.q, self.k, self.v))
        out = attention(rotate(q, positions), rotate(k, positions), v, **mask)
        x = x + self.o(out.flatten(2))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        down: Tensor = self.down(silu(gate) * up)
        return x + down


class Model(nn.Module):
    """``attention(q, k, v, **mask)`` gets the keyword arguments of `forward` that are not positions."""

    def __init__(self, attention: Attention, *, layers: int = 2, recompute: bool = False) -> None:
        super().__init__()
        self.attention, self.recompute = attention, recompute
        self.embedding, self.layers = nn.Embedding(VOCAB, HIDDEN), nn.ModuleList(Layer() for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **mask: Any) -> Tensor:
        positions = torch.arange(input_ids.shape[1]) if position_ids is None else position_ids
        x = self.embedding(input_ids)
        for layer in self.layers:
            if self.recompute:
                x = checkpoint(layer, x, positions, self.attention, use_reentrant=False, **mask)
            else:
                x = layer(x, positions, self.attention, **mask)
        logits: Tensor = self.head(self.norm(x))
        return logits


def shifted(ids: Tensor) -> Tensor:
    """Return the labels of next-token prediction: those of the last token are ignored."""
    return torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)


def total_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


# --- a plain training loop over data-parallel and context-parallel ranks, and six mistakes that trainers have made ---


def in_ddp(
    setup: Callable[[Any], tuple[Attention, Callable[..., Any]]], batch: Tensor, targets: Tensor, dtype: torch.dtype, *,
    attention: Attention | None = None, truth: Attention | None = None, local_positions: bool = False,
    local_labels: bool = False, scale: float = 1.0, own_mean: bool = False, reduced_over: str | None = None,
) -> ModelCheck:  # fmt: skip
    """Check a loop over pairs of context-parallel ranks in which DDP averages over all, with one part of it replaced.

    ``setup`` takes the mesh of a pair; it returns the attention, and a function of tokens, labels and positions whose
    context has a rank's shard of them. ``targets`` are labels, negative where no loss counts them.
    """
    device = batch.device
    mesh = init_device_mesh(device.type, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "cp"))
    own_attention, sharded = setup(mesh["cp"])
    torch.manual_seed(0)
    mine = Model(attention or own_attention).to(device, dtype)
    reference = Model(truth or (lambda q, k, v: dense(q, k, v, None))).to(device, dtype)
    reference.load_state_dict(mine.state_dict())
    model = DistributedDataParallel(mine, process_group=mesh[reduced_over].get_group() if reduced_over else None)
    count, all_positions = int((targets >= 0).sum()), torch.arange(batch.shape[1], device=device)

    def own_rows(x: Tensor) -> Tensor:
        return x.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()].clone()

    def step(batch: Tensor) -> Tensor:
        with sharded(own_rows(batch), own_rows(targets), all_positions.clone()) as (ids, labels, positions):
            if local_positions:
                positions = torch.arange(ids.shape[1], device=device)
            if local_labels:
                labels = torch.where(labels < 0, labels, shifted(ids))
            logits = model(ids, positions)
            if own_mean:
                loss = cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
            else:
                loss = total_loss(logits, labels) / count * dist.get_world_size() * scale
            loss.backward()
        return loss.detach()

    return ringprof.check_model(step, lambda batch: total_loss(reference(batch, all_positions), targets) / count, batch)


def mistakes_in_ddp(seq: int, window: int) -> dict[str, tuple[dict[str, Any], str]]:
    """Return options of `in_ddp`, each with a pattern of its sentence, by the mistake that they make."""

    def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dense(q, k, v, visible(torch.arange(seq, device=q.device), window=window))

    return {
        # `dense` imported torch's function by name, before `context_parallel` replaced it.
        "context parallelism off": (
            {"attention": lambda q, k, v: dense(q, k, v, None)}, "context parallelism is silently off"
        ),
        "averaged over context-parallel ranks": ({"scale": 0.5}, "0.5, 1 / ranks"),
        "mean over own tokens": ({"own_mean": True}, "the ranks' losses are weighted unequally"),
        "labels of the shard": ({"local_labels": True}, "the labels are shifted across shard borders: "),
        "positions of the shard": ({"local_positions": True}, "local positions, which restart on every rank"),
        # In bf16 the first token's difference is within rounding; a later one does not tell a window from documents.
        "window dropped": ({"truth": windowed}, f"the (window of {window} tokens|.* of a window) is dropped"),
    }  # fmt: skip


def check_verdicts(checks: dict[str, ModelCheck], mistakes: dict[str, tuple[dict[str, Any], str]]) -> None:
    """Assert that the check named ``right`` is equal, and that the others name their mistakes."""
    right = checks.pop("right")
    assert right.equal and right.reasons == [] and right.loss_is == "mean", str(right)
    assert checks.keys() == mistakes.keys()
    for name, check in checks.items():
        assert not check.equal and check.reasons and re.search(mistakes[name][1], check.reasons[0]), f"{name}: {check}"
