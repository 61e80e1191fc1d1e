"""What a user's own program calls on its ranks: profile a part of it, check its attention against dense attention."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ringprof.record.check.result import CALLS, TIME_LIMIT_S, Check, CheckRequest
from ringprof.record.request import require_packages
from ringprof.run import Workload
from ringprof.trace.reduced import reduce_file

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ringprof.strategies.base import Strategy


def capture(
    folder: str | os.PathLike[str],
    workload: Workload | None = None,
    *,
    name: str | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    strategy: Strategy | Sequence[Strategy] | None = None,
    record_shapes: bool = False,
) -> AbstractContextManager[None]:
    """Profile a block of your own program on every rank that runs it; see `ringprof.record.capture.capture`.

    Every rank also reduces its own trace, so that reports of many ranks are quick. Raises `MissingExtraError` without
    torch.
    """
    require_packages("torch")
    from ringprof.record.capture import capture as profile  # here, because it imports torch

    return profile(
        folder, workload, name=name, group=group, strategy=strategy, record_shapes=record_shapes, reduce=reduce_file
    )


def check(
    attention: Callable[..., Any],
    layout: str | torch.Tensor | Sequence[int],
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    batch: int = 1,
    seq: int | None = None,
    heads: int = 8,
    kv_heads: int | None = None,
    head_dim: int = 64,
    dtype: str | torch.dtype = "bf16",
    causal: bool = True,
    documents: Sequence[int] | None = None,
    window_size: int | None = None,
    prefix: int | None = None,
    softmax_scale: float | None = None,
    backward: bool = True,
    tensor_format: str = "bshd",
    calls: int = CALLS,
    time_limit: float = TIME_LIMIT_S,
) -> Check:
    """Whether an attention computes, over all ranks, what dense attention over the whole sequence does.

    All ranks of ``group`` (a process group or a DeviceMesh of one dimension; None: the world) call this with the same
    arguments, in a program that torchrun started, say; all get the same answer. ``check.equal`` is the verdict,
    ``print(check)`` shows how far off each tensor is, on which rank and at which token first, what was sent, and what a
    wrong result equals instead.

    ``attention(q, k, v)`` gets this rank's tokens: q (B, S/N, H, D), k and v (B, S/N, Hkv, D) with ``tensor_format``
    ``bshd``; ``bhsd`` and ``sbhd`` are the other orders of these dimensions. It returns the output, as q, alone or
    first in a tuple, and must be differentiable unless ``backward`` is False. It must itself apply what the rest says:
    the mask, and ``softmax_scale`` (None: 1/√D). ``documents`` are the lengths of those that the sequence packs: none
    may see another. Where the function has an argument ``cu_seqlens`` or ``documents`` it is given their cumulative
    lengths (int32, from 0). ``window_size`` is how many keys a token sees, its own counted; beside them it sees the
    first ``prefix`` of its document; with neither window nor ``causal`` the mask is that of a prefix LM.

    ``layout`` says which tokens a rank holds: ``contiguous``, ``zigzag``, ``stripe``, or this rank's positions in the
    sequence, in local order (as for RoPE). ``seq`` is the length over all ranks: by default 64 tokens a rank on CPU,
    256 on GPU, at most 8192 in all. Inputs are drawn anew for each of the ``calls``, all of which are compared.
    ``dtype`` is ``bf16``, ``fp16`` or ``fp32``: the bound of fp32 is the tightest.

    Raises `UsageError` for arguments that do not fit, `RecordError` on every rank that can still act where a call fails
    on some rank or does not return within ``time_limit`` seconds of the others', `MissingExtraError` without torch.
    """
    require_packages("torch")
    from torch import as_tensor  # here, because it takes seconds

    from ringprof.record.check.on_ranks import check_on_ranks

    named = isinstance(layout, str)
    request = CheckRequest(
        layout=str(layout) if named else "positions", batch=batch, seq=seq, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, dtype=_dtype_name(dtype), causal=causal, softmax_scale=softmax_scale, backward=backward,
        documents=None if documents is None else tuple(map(int, documents)), window=window_size,
        prefix=prefix, tensor_format=tensor_format, calls=calls, time_limit=time_limit,
    )  # fmt: skip
    return check_on_ranks(attention, request, None if named else as_tensor(layout), group)


def _dtype_name(dtype: Any) -> str:
    known = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
    return known.get(str(dtype), str(dtype))
