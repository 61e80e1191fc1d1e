"""Work outside attention over all ranks: matrix products by shape, and communication by kind, group and size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.timeline.products import Shape
from ringprof.analysis.transfers.collectives import CollectiveTotals, sum_collectives
from ringprof.workload.devices import peak_of


class Gemm(NamedTuple):
    """Matrix products of one shape over all ranks."""

    shape: Shape
    calls: int
    time_ns: int
    share: float
    """``time_ns`` as a share of the time of all matrix products, 0..1."""
    flops: int | None
    """None where the shape is not known."""
    tflops: float | None
    """TFLOP/s per device while the kernels ran; None where the shape is not known, or the window cuts activities."""
    of_peak: float | None
    """``tflops`` as a share of the device's peak; None where that is not known."""

    @property
    def mean_ns(self) -> float:
        """Mean time per call."""
        return self.time_ns / self.calls


def gemms_of(attribution: Attribution) -> tuple[Gemm, ...]:
    """Sum up the matrix products of all ranks by shape, longest time first; empty without recorded shapes."""
    sums: dict[Shape, list[int]] = {}
    for rank in attribution.ranks:
        for product in rank.products:
            sums[product.shape] = [a + b for a, b in zip(sums.get(product.shape, [0, 0, 0]), product[1:], strict=True)]
    total_ns = sum(time for _, time, _ in sums.values()) or 1
    devices = {rank.device for rank in attribution.ranks}
    device = devices.pop() if len(devices) == 1 else None
    rows = [_gemm(shape, counts, total_ns, device, attribution) for shape, counts in sums.items()]
    return tuple(sorted(rows, key=lambda row: -row.time_ns))


def _gemm(shape: Shape, counts: Sequence[int], total_ns: int, device: str | None, attribution: Attribution) -> Gemm:
    calls, time_ns, flops = counts
    known = shape.m is not None
    rate = flops / time_ns / 1e3 if known and time_ns and not attribution.partial_window else None
    peak = peak_of(device, shape.dtype)
    of_peak = rate / peak.tflops if rate is not None and peak else None
    return Gemm(shape, calls, time_ns, time_ns / total_ns, flops if known else None, rate, of_peak)


def collectives_of_run(attribution: Attribution) -> tuple[CollectiveTotals, ...]:
    """Sum up the communication of all ranks by kind, group, size and link, longest time first; empty on CPU."""
    return sum_collectives(row for rank in attribution.ranks for row in rank.collectives)
