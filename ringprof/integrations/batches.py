"""One rank's shard of a language model's batch, in the names of Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringprof.strategies import Unsupported
from ringprof.strategies.base import Strategy

IGNORED = -100
"""Label that no loss counts."""


def shard_batch(batch: Mapping[str, Any], strategy: Strategy, *, pad_token_id: int = 0) -> dict[str, Any]:
    """Return this rank's shard of a batch for a causal language model, as keyword arguments of the model.

    ``input_ids`` (B, S), or ``inputs_embeds`` (B, S, H), is required. ``labels`` (B, S) are shifted before sharding, so
    that a token at the end of a shard has the next rank's token as its label. They become ``shift_labels``, and
    ``num_items_in_batch`` becomes the number of labels over the size of the group: the mean of the ranks' losses, and
    of their gradients as DDP and FSDP compute it, is then that of the whole batch. A ``num_items_in_batch`` of the
    caller, by which the sum of this rank's losses is divided, is kept.

    Packed documents come from ``cu_seq_lens_q``, or else from ``position_ids`` that restart. Without ``position_ids``
    they count from 0. A length that the layout cannot divide is padded at its end with ``pad_token_id`` and ignored
    labels. Raises `Unsupported` for a 4-D or left-padded ``attention_mask``, for a tensor of unknown shape, and for
    batch entries that pack different documents.
    """
    source = batch.get("input_ids", batch.get("inputs_embeds"))
    if source is None:
        raise Unsupported("the batch has neither input_ids nor inputs_embeds")
    length, device = source.shape[1], source.device
    _check_mask(batch.get("attention_mask"))
    positions = batch.get("position_ids")
    if positions is None:
        positions = torch.arange(length, device=device)[None]
    documents = documents_of(batch, positions, length)
    extra = -length % strategy.layout.divisor(strategy.comm.size)
    if extra and documents is not None:
        documents = [*documents, length + extra]

    def local(x: Tensor, value: int) -> Tensor:
        padding = (0, 0) * (x.ndim - 2) + (0, extra)
        return strategy.shard(pad(x, padding, value=value) if extra else x, documents=documents)

    shard: dict[str, Any] = {}
    labels = batch.get("shift_labels")
    if labels is None and batch.get("labels") is not None:
        labels = pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    if labels is not None:
        if documents is not None:
            last = torch.tensor([end - 1 for end in documents[1:] if end <= length], device=device)
            labels = labels.index_fill(1, last, IGNORED)
        shard["labels"] = shard["shift_labels"] = local(labels, IGNORED)
        count = batch.get("num_items_in_batch")
        shard["num_items_in_batch"] = (labels != IGNORED).sum() / strategy.comm.size if count is None else count
    if documents is not None:
        longest = max(end - begin for begin, end in pairwise(documents))
        lengths = torch.tensor(documents, dtype=torch.int32)
        shard |= {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": longest, "max_length_k": longest}
    if extra:
        restart = 0 if documents is not None else length
        tail = torch.arange(restart, restart + extra, device=device)
        positions = torch.cat([positions, tail.expand(positions.shape[0], -1)], 1)
    shard["position_ids"] = strategy.shard(positions, documents=documents)
    handled = {"attention_mask", "labels", "cu_seq_lens_k", "max_length_q", "max_length_k", *shard}
    for name, value in batch.items():
        if name in handled:
            continue
        if isinstance(value, Tensor) and value.ndim >= 2:
            if value.shape[1] != length:
                raise Unsupported(f"{name} {tuple(value.shape)} has no sequence of {length} tokens to shard")
            shard[name] = local(value, pad_token_id if name == "input_ids" else 0)
        else:
            shard[name] = value
    return {"use_cache": False, **shard}


def _check_mask(mask: Tensor | None) -> None:
    """Raise `Unsupported` unless a mask only pads rows at their ends, which a causal mask makes harmless."""
    if mask is None:
        return
    if mask.ndim != 2:
        raise Unsupported(
            f"an attention_mask of {mask.ndim} dimensions is not supported: pack documents by position_ids"
        )
    if bool((mask[:, 1:].bool() & ~mask[:, :-1].bool()).any()):
        raise Unsupported("attention_mask hides tokens before others (left padding): pad on the right")


def documents_of(batch: Mapping[str, Any], positions: Tensor, length: int) -> list[int] | None:
    """Return the cumulative lengths of packed documents, None where there is one document."""
    if batch.get("cu_seq_lens_q") is not None:
        documents = batch["cu_seq_lens_q"].tolist()
        if documents[-1] != length:
            raise Unsupported(f"cu_seq_lens_q ends at {documents[-1]}, and the batch has {length} tokens")
    else:
        if positions.ndim != 2:
            raise Unsupported(f"position_ids of {positions.ndim} dimensions are not supported")
        breaks = positions[:, 1:] != positions[:, :-1] + 1
        if bool((breaks != breaks[:1]).any()):
            raise Unsupported("batch entries pack different documents: use batches of one entry")
        documents = [0, *(breaks[0].nonzero().flatten() + 1).tolist(), length]
    return documents if len(documents) > 2 else None
