"""What a rank sends in a call, as torch's profiler sees it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.profiler import profile

from ringprof.record.check.result import SentInCall
from ringprof.record.measure import profiler_is_busy

_GLOO_BYTES = {"double": 8, "long int": 8, "float": 4, "int": 4, "c10::BFloat16": 2, "c10::Half": 2, "short": 2}
_NCCL_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "BFloat16": 2, "Half": 2}
_SEND_NOTHING = ("recv", "barrier")


@contextmanager
def sent_meanwhile(found: list[SentInCall]) -> Iterator[None]:
    """Append what this rank sends in the block; nothing where another profiler runs, for there can be but one."""
    if profiler_is_busy():
        yield
        return
    # Not torch.profiler's own, which imports the compiler: seconds.
    device = "cuda" if torch.cuda.is_available() else None
    recording: Any = profile(use_device=device, record_shapes=True, use_kineto=True)
    with recording:
        yield
    found.append(_sent(recording.kineto_results.events()))


def _sent(events: list[Any]) -> SentInCall:
    operations: Counter[str] = Counter()
    sizes: list[int | None] = []
    for event in events:
        backend, _, operation = event.name().partition(":")
        if backend == "c10d":
            # ``c10d::alltoall_base_``, whatever carries it.
            name = operation.strip(":_")
            operations[name] += not name.startswith(_SEND_NOTHING)
        elif backend == "gloo" and not operation.startswith(_SEND_NOTHING):
            sizes.append(_gloo_bytes(event))
        elif backend == "record_param_comms":
            sizes.append(_nccl_bytes(event))
        elif backend.startswith("Memcpy PtoP"):
            # Copy engines, past torch.distributed.
            operations["copies between GPUs"] += 1
            sizes.append(event.nbytes())
    known = [size for size in sizes if size is not None]
    return SentInCall(operations=dict(+operations), size_bytes=sum(known) if known or not +operations else None)


def _gloo_bytes(event: Any) -> int:
    """Of the tensors that a gloo operation was given."""
    pairs = [pair for pair in zip(event.shapes(), event.dtypes(), strict=False) if pair[0]]
    return sum(int(math.prod(shape)) * _GLOO_BYTES.get(dtype, 1) for shape, dtype in pairs)


def _nccl_bytes(event: Any) -> int | None:
    """Of the tensors that an NCCL operation was given; None for one that sends nothing."""
    said = event.extra_meta() if hasattr(event, "extra_meta") else {}
    if said.get("Collective name", "recv").strip('"').startswith(_SEND_NOTHING):
        return None
    return int(said.get("In msg nelems", 0)) * _NCCL_BYTES.get(said.get("dtype", "").strip('"'), 1)
