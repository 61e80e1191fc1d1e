"""The check of whole models on a loop with torch's context parallelism: clean it passes, each mistake is named."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("torch", reason="checking needs torch")

import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # what a first backward pass imports: once, and not in every forked rank
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as torchs_ring
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ringprof
from ringprof.proof.result import ModelCheck
from tests.recording.tiny_model import VOCAB, Model, dense, shifted, total_loss, visible
from tests.strategies.gpu_ranks import needs_two_gpus, run_gpu_ranks
from tests.strategies.ranks import run_ranks

# Memory-efficient attention pads its LSE to 32 rows, and torch's ring halves each rank's rows.
SEQ, ROWS = 256, 4


def by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Call the function that `context_parallel` replaces, looked up at the call as its users must."""
    q, k, v = (x.transpose(1, 2) for x in (q, *(x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))))
    out: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    return out


def in_torch_cp(
    device: str, dtype: torch.dtype, *, attention: Any = by_torch, truth: Any = None, local_positions: bool = False,
    local_labels: bool = False, scale: float = 1.0, own_mean: bool = False, reduced_over: str | None = None,
) -> ModelCheck:  # fmt: skip
    """Check a loop of torch's context parallelism over pairs of ranks and DDP over all, with one part replaced."""
    mesh = init_device_mesh(device, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(0)
    mine = Model(attention).to(device, dtype)
    reference = Model(truth or (lambda q, k, v: dense(q, k, v, None))).to(device, dtype)
    reference.load_state_dict(mine.state_dict())
    model = DistributedDataParallel(mine, process_group=mesh[reduced_over].get_group() if reduced_over else None)
    batch = torch.randint(VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(0)).to(device)
    targets = shifted(batch)
    # Rank 0 of a pair holds the first and the last quarter: fewer labels than rank 1.
    targets[:, :40] = -100
    count = int((targets >= 0).sum())
    own = batch.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
    rows = slice(mesh["dp"].get_local_rank() * len(own), (mesh["dp"].get_local_rank() + 1) * len(own))

    def step(batch: Tensor) -> Tensor:
        ids, labels = batch[rows].clone(), targets[rows].clone()
        positions = torch.arange(SEQ, device=device)
        with context_parallel(mesh["cp"], buffers=[ids, labels, positions], buffer_seq_dims=[1, 1, 0]):
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

    return ringprof.check_model(
        step, lambda batch: total_loss(reference(batch, torch.arange(SEQ, device=device)), targets) / count, batch
    )


def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return dense(q, k, v, visible(torch.arange(SEQ, device=q.device), window=200))


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    # `dense` imported the function by name, before `context_parallel` replaced it.
    "context parallelism off": (
        {"attention": lambda q, k, v: dense(q, k, v, None)}, "context parallelism is silently off"
    ),
    "labels of the shard": ({"local_labels": True}, "the labels are shifted across shard borders: "),
    "positions of the shard": ({"local_positions": True}, "local positions, which restart on every rank"),
    # In bf16 the first token's difference is within rounding, and a later one does not tell a window from documents.
    "window dropped": ({"truth": windowed}, "the (window of 200 tokens|.* of a window) is dropped"),
    "averaged over context-parallel ranks": ({"scale": 0.5}, "0.5, 1 / "),
    "mean over own tokens": ({"own_mean": True}, "the ranks' losses are weighted unequally"),
}  # fmt: skip


def loops(rank: int, device: str, dtype: torch.dtype) -> dict[str, ModelCheck]:
    if device == "cpu":
        handlers: dict[Any, Any] = dict.fromkeys(ON_CPU, ring_on_cpu)
        torchs_ring.custom_ops |= handlers
    checks = {"right": in_torch_cp(device, dtype)}
    return checks | {name: in_torch_cp(device, dtype, **options) for name, (options, _) in MISTAKES.items()}


ON_CPU = [
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
]
"""Operators that torch's context parallelism does not replace, as it does those of GPUs."""


def ring_on_cpu(op: Any, args: Any, kwargs: dict[str, Any]) -> object:
    """Send one of `ON_CPU` through torch's ring."""
    mesh = next(x for x in args if isinstance(x, DTensor)).device_mesh
    local: list[Any] = [x.to_local() if isinstance(x, DTensor) else x for x in args]
    if op is ON_CPU[0]:
        q, k, v, _, causal = local
        results = torchs_ring._templated_ring_attention(
            mesh.get_group(), 2, op, q, k, v, is_causal=causal, dropout_p=0.0, **kwargs
        )
    else:
        dout, q, k, v, out, lse, _, causal = local
        results = torchs_ring._templated_ring_attention_backward(
            mesh.get_group(), 2, op, dout, "grad_out", q, k, v, out, lse, is_causal=causal, dropout_p=0.0, **kwargs
        )
    return tuple(DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in results)


def check_verdicts(by_rank: list[dict[str, ModelCheck]]) -> None:
    right = by_rank[0].pop("right")
    assert right.equal and right.reasons == [] and right.loss_is == "mean", str(right)
    for name, check in by_rank[0].items():
        assert not check.equal
        assert check.reasons and re.search(MISTAKES[name][1], check.reasons[0]), f"{name}: {check}"


@pytest.mark.processes
def test_mistakes_around_torchs_ring_on_cpus() -> None:
    check_verdicts(run_ranks(4, loops, "cpu", torch.float32))


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mistakes_around_torchs_context_parallelism(dtype: torch.dtype) -> None:
    check_verdicts(run_gpu_ranks(2, loops, "cuda", dtype))
