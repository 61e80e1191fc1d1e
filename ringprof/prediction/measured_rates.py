"""Measured speed of each kernel on each mask: one block over a whole sequence, alone on one device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from msgspec.structs import replace

from ringprof.iteration.resolve import torch_dtype
from ringprof.proof.dense import draw_inputs, whole_block
from ringprof.strategies.kernels.proof import Case, blocks_of, first_problem
from ringprof.strategies.kernels.registry import KERNELS, reason_against
from ringprof.workload.documents import document_lengths
from ringprof.workload.workload import Workload

WARM_UP, CALLS = 3, 10
DOCUMENTS_A_SEQUENCE = 8
"""Sequence length divided by the mean document length; the window has that length, too."""
SOFTCAP = 50.0


@dataclass(frozen=True)
class MaskRate:
    """Speed of one kernel on one mask: medians of `CALLS` calls, and rates by the mask's exact area.

    If the kernel does not support the mask, the figures are None and ``reason`` says why.
    """

    kernel: str
    mask: str
    """Name of the mask: ``full``, ``causal``, ``documents``, ``window`` or ``softcap``; the last three are causal."""
    forward_ns: float | None = None
    backward_ns: float | None = None
    forward_tflops: float | None = None
    backward_tflops: float | None = None
    reason: str | None = None


def kernel_rates(
    workload: Workload, device: torch.device, notify: Callable[[str, int, int], None] = lambda *_: None
) -> Iterator[MaskRate]:
    """Measure every kernel except the reference, mask by mask; yield each rate as soon as it is measured.

    ``notify`` is called before each measurement: what it is of, how many are done, how many there are.
    """
    length = max(1, workload.seq // DOCUMENTS_A_SEQUENCE)
    drawn = document_lengths(f"lognormal:mean={length},sigma=1.2,seed=7", workload.seq)
    causal = replace(workload, causal=True, documents=None, window=None)
    masks = {
        "full": replace(causal, causal=False), "causal": causal, "documents": replace(causal, documents=drawn),
        "window": replace(causal, window=length), "softcap": causal,
    }  # fmt: skip
    cases = [(mask, name) for mask in masks for name in KERNELS if name != "reference"]
    for number, (mask, name) in enumerate(cases):
        notify("kernels", number, len(cases))
        yield _measure_rate(name, mask, masks[mask], SOFTCAP if mask == "softcap" else 0.0, device)


def _measure_rate(name: str, mask: str, workload: Workload, softcap: float, device: torch.device) -> MaskRate:
    mask_of, dtype, size = workload.mask(), torch_dtype(workload), workload.head_dim
    group, kv_heads = workload.heads // workload.kv_heads, workload.kv_heads
    wanted = Case("", dtype, size, size, group, softcap, shape=(workload.batch, kv_heads))
    blocks = blocks_of(causal=workload.causal, several_ranks=False, **mask_of.asks_of_kernels())
    reason = reason_against(KERNELS[name], device, dtype, size, windows=mask_of.windowed, softcap=bool(softcap))
    if reason := reason or first_problem(KERNELS[name], wanted, blocks, device):
        return MaskRate(name, mask, reason=reason)
    try:
        forward_ns, backward_ns = _median_times(KERNELS[name](softcap=softcap), workload, device)
    except RuntimeError as error:
        # The build lacks the kernel, or the device is too small.
        return MaskRate(name, mask, reason=" ".join(str(error).split())[:200])
    pairs = workload.mask().area(workload.seq) * workload.batch * workload.heads * workload.head_dim
    return MaskRate(name, mask, forward_ns, backward_ns, 4 * pairs / forward_ns / 1e3, 10 * pairs / backward_ns / 1e3)


def _median_times(kernel: Any, workload: Workload, device: torch.device) -> tuple[float, float]:
    """Return the median times of a forward and of a backward call, in nanoseconds."""
    full, block = draw_inputs(workload, device), whole_block(workload)
    arguments = {"scale": workload.head_dim**-0.5, **block}
    out, lse = kernel.forward(full.q, full.k, full.v, **arguments)
    out, lse = out.contiguous(), lse.contiguous()
    return (
        _median_ns(lambda: kernel.forward(full.q, full.k, full.v, **arguments), device),
        _median_ns(lambda: kernel.backward(full.dout, full.q, full.k, full.v, lse, out=out, **arguments), device),
    )


def _median_ns(body: Callable[[], object], device: torch.device) -> float:
    for _ in range(WARM_UP):
        body()
    return median(_time_ns(body, device) for _ in range(CALLS))


def _time_ns(body: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start_ns = time.perf_counter_ns()
        body()
        return float(time.perf_counter_ns() - start_ns)
    event: Any = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    start.record()
    body()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e6
