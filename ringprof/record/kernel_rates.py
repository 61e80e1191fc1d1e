"""How fast each kernel computes each mask, here and now: one block over a whole sequence, alone on one device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from msgspec.structs import replace

from ringprof.documents import document_lengths
from ringprof.record.resolve import torch_dtype
from ringprof.record.verify import draw_inputs, whole_block
from ringprof.run import Workload
from ringprof.strategies.kernels.builtin import KERNELS, reason_against

WARM_UP, CALLS = 3, 10
DOCUMENTS_A_SEQUENCE = 8
"""The mean length of documents, and the window, are one part in so many of the sequence."""
SOFTCAP = 50.0


@dataclass(frozen=True)
class KernelRate:
    """One kernel on one mask: medians of `CALLS` calls, rates by the mask's exact area; or why there are none."""

    kernel: str
    mask: str
    """``full``, ``causal``, ``documents``, ``window`` (both causal), or ``softcap``, causal."""
    forward_ns: float | None = None
    backward_ns: float | None = None
    forward_tflops: float | None = None
    backward_tflops: float | None = None
    reason: str | None = None


def _masks(workload: Workload) -> dict[str, Workload]:
    """The masks that are measured, each as the problem that it makes."""
    part = max(1, workload.seq // DOCUMENTS_A_SEQUENCE)
    drawn = document_lengths(f"lognormal:mean={part},sigma=1.2,seed=7", workload.seq)
    causal = replace(workload, causal=True, documents=None, window=None)
    return {
        "full": replace(causal, causal=False), "causal": causal, "documents": replace(causal, documents=drawn),
        "window": replace(causal, window=part), "softcap": causal,
    }  # fmt: skip


def kernel_rates(workload: Workload, device: torch.device) -> Iterator[KernelRate]:
    """Of every kernel but the reference, mask after mask, as soon as each is measured."""
    for mask, problem in _masks(workload).items():
        softcap = SOFTCAP if mask == "softcap" else 0.0
        for name in KERNELS:
            if name != "reference":
                yield _rate(name, mask, problem, softcap, device)


def _rate(name: str, mask: str, problem: Workload, softcap: float, device: torch.device) -> KernelRate:
    wants = {"windows": problem.mask().windowed, "softcap": bool(softcap)}
    reason = reason_against(KERNELS[name], device, torch_dtype(problem), problem.head_dim, **wants)
    if reason:
        return KernelRate(name, mask, reason=reason)
    try:
        forward_ns, backward_ns = _times(KERNELS[name](softcap=softcap), problem, device)
    except RuntimeError as error:
        # A build that lacks it, or a device that is too small.
        return KernelRate(name, mask, reason=" ".join(str(error).split())[:200])
    pairs = problem.mask().area(problem.seq) * problem.batch * problem.heads * problem.head_dim
    return KernelRate(name, mask, forward_ns, backward_ns, 4 * pairs / forward_ns / 1e3, 10 * pairs / backward_ns / 1e3)


def _times(kernel: Any, problem: Workload, device: torch.device) -> tuple[float, float]:
    """Medians of a forward and of a backward call, in nanoseconds."""
    full, block = draw_inputs(problem, device), whole_block(problem)
    how = {"scale": problem.head_dim**-0.5, **block}
    out, lse = kernel.forward(full.q, full.k, full.v, **how)
    out, lse = out.contiguous(), lse.contiguous()
    return (
        _median_ns(lambda: kernel.forward(full.q, full.k, full.v, **how), device),
        _median_ns(lambda: kernel.backward(full.dout, full.q, full.k, full.v, lse, out=out, **how), device),
    )


def _median_ns(body: Callable[[], object], device: torch.device) -> float:
    for _ in range(WARM_UP):
        body()
    clock = _on_gpu if device.type == "cuda" else _on_cpu
    return median(clock(body) for _ in range(CALLS))


def _on_cpu(body: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    body()
    return float(time.perf_counter_ns() - start)


def _on_gpu(body: Callable[[], object]) -> float:
    event: Any = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    start.record()
    body()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e6
