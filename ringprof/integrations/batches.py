"""One rank's shard of a language model's batch, in the names of Hugging Face transformers."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import get_worker_info

from ringprof.strategies import Unsupported
from ringprof.strategies.base import Strategy, checksum
from ringprof.strategies.kernels.uncompiled import uncompiled

IGNORED = -100
"""Label that no loss counts."""


_SOURCES = {"input_ids", "inputs_embeds"}
_COMPARED_EVERY = 100
"""Batches from one comparison between the ranks to the next, so that these take less than 1 % of the time."""
_UNUSED = 32
"""Batches that may be sharded before the first is used, while no model with gradients runs (prefetching)."""


@dataclass
class _Watch:
    """Batches of one strategy that this process has sharded."""

    batches: int = 0
    unused: int = 0
    """Latest batches without a call of a strategy after them."""
    calls: int = 0
    """Calls of strategies when the latest batch was sharded."""
    node: int = 0
    """Number of the latest node of autograd then."""


_watches: WeakKeyDictionary[Strategy, _Watch] = WeakKeyDictionary()


def check_batch(strategy: Strategy, batch: Iterable[Any], problem: str = "") -> None:
    """Check that a strategy was called since the last batch, and that all ranks of its group have this ``batch``.

    ``batch`` holds the tensors of the whole batch; the ranks compare a checksum of those of integers for the first two
    batches and every 100th. ``problem`` is why this rank cannot shard it. Worker processes of a data loader check
    nothing, and threads other than the main one compare nothing. Raises `Unsupported`.
    """
    if get_worker_info() is not None:
        if problem:
            raise Unsupported(problem)
        return
    watch = _watches.setdefault(strategy, _Watch())
    with torch.inference_mode(False), torch.enable_grad():
        node: Any = torch.zeros((), device="cpu", requires_grad=True).view(()).grad_fn
    unused = watch.unused if strategy.calls == watch.calls else 0
    number = node._sequence_nr()
    # Between two batches that a loader prefetches, no model runs.
    if unused and (number > watch.node + 1 or unused >= _UNUSED):
        watch.unused = 0
        raise Unsupported(
            "no strategy was called since the last batch was sharded: without it, every rank attends to its own tokens"
            " alone. Give the model the registered attn_implementation, which from_pretrained does not restore; models"
            " that do not use it are not supported"
        )
    if threading.current_thread() is threading.main_thread() and (
        watch.batches < 2 or watch.batches % _COMPARED_EVERY == 0
    ):
        compare_batch(strategy, batch, problem)
    elif problem:
        raise Unsupported(problem)
    watch.batches, watch.unused, watch.calls, watch.node = watch.batches + 1, unused + 1, strategy.calls, number


def compare_batch(strategy: Strategy, batch: Iterable[Any], problem: str = "") -> None:
    """Compare the integer tensors of a whole batch on all ranks of the strategy's group, by a checksum. Collective.

    Raises `Unsupported` on every rank where they differ, and where some rank has a ``problem``.
    """
    try:
        strategy.comm.require_same_call(f"a batch with the checksum {checksum(batch):08x}", problem or None)
    except Unsupported as error:
        advice = ": all ranks of a context-parallel group need the same batches, from a data loader that does not"
        advice += " distribute them over the group (Lightning: use_distributed_sampler=False)"
        raise Unsupported(f"{error}{advice if str(error).count('checksum') == 2 else ''}") from None


@uncompiled
def shard_batch(batch: Mapping[str, Any], strategy: Strategy, *, pad_token_id: int = 0) -> dict[str, Any]:
    """Return this rank's shard of a batch for a causal language model, as keyword arguments of the model.

    ``input_ids`` (B, S), or ``inputs_embeds`` (B, S, H), is required. ``labels`` (B, S) are shifted before sharding, so
    that a token at the end of a shard has the next rank's token as its label. They become ``shift_labels``, and
    ``num_items_in_batch`` becomes the number of labels over the size of the group: the mean of the ranks' losses, and
    of their gradients as DDP and FSDP compute it, is then that of the whole batch (average the loss over the ranks
    before you log it). A ``num_items_in_batch`` of the caller, by which the sum of this rank's losses is divided, is
    kept.

    Packed documents come from ``cu_seq_lens_q``, or else from ``position_ids`` that restart. Without ``position_ids``
    they count from 0. A length that the layout cannot divide is padded at its end with ``pad_token_id`` and ignored
    labels.

    Every rank of the group calls this for every batch: for the first two and every 100th they compare a checksum.

    Raises `Unsupported` for a 4-D or left-padded ``attention_mask``, for a tensor of unknown shape, for batch entries
    that pack different documents, for a batch that is already sharded, for different batches on the ranks, and where a
    model ran on the last batch without calling a strategy.
    """
    source, documents, problem = _source(batch), None, ""
    length, device = source.shape[1], source.device
    positions = batch.get("position_ids")
    try:
        _check_mask(batch.get("attention_mask"))
        documents = documents_of(batch, positions, length)
    except Unsupported as error:
        problem = str(error)
    check_batch(strategy, batch.values(), problem)
    if positions is None:
        positions = torch.arange(length, device=device)[None]
    documents, extra = _padded(documents, length, strategy)

    def local(x: Tensor, value: int) -> Tensor:
        padding = (0, 0) * (x.ndim - 2) + (0, extra)
        return strategy.shard(pad(x, padding, value=value) if extra else x, documents=documents)

    # First, what tells which tokens the model gets.
    shard: dict[str, Any] = {name: None for name in batch if name in _SOURCES}
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
    handled = {"attention_mask", "labels", "cu_seq_lens_k", "max_length_q", "max_length_k", *shard} - _SOURCES
    for name, value in batch.items():
        if name in handled:
            continue
        if isinstance(value, Tensor) and value.ndim >= 2:
            if value.shape[1] != length:
                raise Unsupported(f"{name} {tuple(value.shape)} has no sequence of {length} tokens to shard")
            shard[name] = local(value, pad_token_id if name == "input_ids" else 0)
        else:
            shard[name] = value
    return {**shard, "use_cache": False}


@uncompiled
def unshard_batch(local: Tensor, batch: Mapping[str, Any], strategy: Strategy) -> Tensor:
    """Gather a tensor (B, s, ...) of every rank's tokens, such as logits, into that of the whole ``batch`` (B, S, ...).

    ``batch`` is the whole one, which `shard_batch` took; the padding that it added is removed. Collective, and not
    differentiable. Raises `Unsupported` for tensors of another length than this rank's shard of ``batch``.
    """
    length = _source(batch).shape[1]
    documents, extra = _padded(documents_of(batch, batch.get("position_ids"), length), length, strategy)
    if local.shape[1] * strategy.comm.size != length + extra:
        raise Unsupported(
            f"{local.shape[1]} tokens of each of {strategy.comm.size} ranks are not the {length} of the batch: pass the"
            " whole batch that shard_batch took"
        )
    return strategy.unshard(local, documents=documents)[:, :length]


def _source(batch: Mapping[str, Any]) -> Tensor:
    """Return the tensor with a token per row and column. Raises `Unsupported` where the batch has none."""
    source: Tensor | None = batch.get("input_ids", batch.get("inputs_embeds"))
    if source is None:
        raise Unsupported("the batch has neither input_ids nor inputs_embeds")
    return source


def _padded(documents: list[int] | None, length: int, strategy: Strategy) -> tuple[list[int] | None, int]:
    """Return the documents with padding as one more, and the number of tokens to add so that the layout divides."""
    extra = -length % strategy.layout.divisor(strategy.comm.size)
    return ([*documents, length + extra] if extra and documents else documents), extra


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


def documents_of(batch: Mapping[str, Any], positions: Tensor | None, length: int) -> list[int] | None:
    """Return the cumulative lengths of packed documents, None where there is one document.

    Raises `Unsupported` for positions and lengths of a batch that is already sharded.
    """
    if batch.get("cu_seq_lens_q") is not None:
        documents = [int(end) for end in batch["cu_seq_lens_q"].tolist()]
        if documents[-1] != length:
            raise Unsupported(
                f"the batch is already sharded, or cu_seq_lens_q, which ends at {documents[-1]}, is not that of its"
                f" {length} tokens. Pass the whole batch, once"
            )
    elif positions is None:
        return None
    else:
        if positions.ndim != 2:
            raise Unsupported(f"position_ids of {positions.ndim} dimensions are not supported")
        breaks = positions[:, 1:] != positions[:, :-1] + 1
        from_elsewhere = positions[:, 0].any() | (breaks & (positions[:, 1:] != 0)).any()
        different, sharded = torch.stack([(breaks != breaks[:1]).any(), from_elsewhere]).tolist()
        if different and not sharded:
            raise Unsupported("batch entries pack different documents: use batches of one entry")
        if sharded:
            raise Unsupported(
                "the batch is already sharded, or its position_ids are not those of its tokens: documents begin at"
                " position 0. Pass the whole batch, once"
            )
        documents = [0, *(breaks[0].nonzero().flatten() + 1).tolist(), length]
    return documents if len(documents) > 2 else None
