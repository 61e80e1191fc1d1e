"""Functions that a user's own program calls on its ranks: `capture` profiles a block, `check` checks an attention."""

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

    Every rank also writes a reduced form of its trace, which makes reports of many ranks fast. Raises
    `MissingExtraError` without torch.
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
    """Check whether an attention over several ranks equals dense attention over the whole sequence.

    All ranks of ``group`` (a process group or a DeviceMesh of one dimension; None: the world) call this with the same
    arguments, for example in a program started by torchrun. All get the same answer. ``check.equal`` is the verdict.
    ``print(check)`` shows the error of each tensor, the first wrong rank and token, the bytes sent, and what a wrong
    result equals instead.

    ``attention(q, k, v)`` receives this rank's tokens: q of shape (B, S/N, H, D), k and v of shape (B, S/N, Hkv, D)
    with ``tensor_format`` ``bshd``; ``bhsd`` and ``sbhd`` are the other orders of these dimensions. It returns the
    output in the shape of q, alone or first in a tuple, and must be differentiable unless ``backward`` is False. It
    must itself apply the mask and ``softmax_scale`` (None: 1/√D).

    ``documents`` are the lengths of the packed documents, none of which may attend to another. If the function has an
    argument ``cu_seqlens`` or ``documents``, it receives their cumulative lengths (int32, from 0). ``window_size`` is
    the number of keys that a token attends to, its own included. With ``prefix``, it also attends to the first
    ``prefix`` tokens of its document; without a window and without ``causal`` this is the mask of a prefix LM.

    ``layout`` says which tokens a rank holds: ``contiguous``, ``zigzag``, ``stripe``, or this rank's positions in the
    sequence in local order (as for RoPE). ``seq`` is the length over all ranks; the default is 64 tokens per rank on
    CPU and 256 on GPU, at most 8192 in total. Each of the ``calls`` has new random inputs, and all are compared.
    ``dtype`` is ``bf16``, ``fp16`` or ``fp32``; fp32 has the tightest tolerance.

    Raises `UsageError` for unsupported arguments and `MissingExtraError` without torch. Raises `RecordError`, on every
    rank that can still act, if a call fails on some rank or returns more than ``time_limit`` seconds after the others.
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
