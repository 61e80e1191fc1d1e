"""Work outside attention over all ranks: matrix products by shape, and communication by kind, group and size."""

from __future__ import annotations

from typing import NamedTuple

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.timeline.layers import OUTSIDE, LayerTime
from ringprof.analysis.timeline.products import ProductShape
from ringprof.analysis.transfers.collectives import CollectiveTotals, sum_collectives
from ringprof.workload.devices import peak_of


class Gemm(NamedTuple):
    """Matrix products of one shape over all ranks."""

    shape: ProductShape
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
    sums: dict[ProductShape, list[int]] = {}
    for rank in attribution.ranks:
        for product in rank.products:
            sums[product.shape] = [a + b for a, b in zip(sums.get(product.shape, [0, 0, 0]), product[1:], strict=True)]
    total_ns = sum(time for _, time, _ in sums.values()) or 1
    devices = {rank.device for rank in attribution.ranks}
    device = devices.pop() if len(devices) == 1 else None
    rows = []
    for shape, (calls, time_ns, flops) in sums.items():
        known, peak = shape.m is not None, peak_of(device, shape.dtype)
        rate = flops / time_ns / 1e3 if known and time_ns and not attribution.partial_window else None
        of_peak = rate / peak.tflops if rate is not None and peak else None
        rows.append(Gemm(shape, calls, time_ns, time_ns / total_ns, flops if known else None, rate, of_peak))
    return tuple(sorted(rows, key=lambda row: -row.time_ns))


def collectives_of_run(attribution: Attribution) -> tuple[CollectiveTotals, ...]:
    """Sum up the communication of all ranks by kind, group, size and link, longest time first; empty on CPU."""
    return sum_collectives(row for rank in attribution.ranks for row in rank.collectives)


# --- times by layer of the model over all ranks ---


class LayerTotals(NamedTuple):
    """Times of one layer, summed over all ranks, and the rank that exposes most communication in it."""

    time: LayerTime
    """Sums over all ranks; read waiting and wire time from the fields below."""
    wait_ns: int | None
    """Part of the exposed time spent waiting; None if part of any layer's exposed time is neither waiting nor wire."""
    wire_ns: int | None
    """Part of the exposed time with bytes on the wire; None where ``wait_ns`` is."""
    worst_rank: int
    """Rank with the most exposed communication in the layer."""
    worst_exposed_ns: int
    """Exposed communication of that rank in the layer."""


def layers_of_run(attribution: Attribution) -> tuple[LayerTotals, ...]:
    """Sum the times of all ranks by layer, in the order of the layers; empty where no trace names layers.

    The last item holds times outside of all layers, if there are any. All times of a rank whose trace names no layers
    count there, so that the sums over the layers are those of the run.
    """
    ranks = attribution.ranks
    if not any(rank.layers for rank in ranks):
        return ()
    rows: dict[str, list[tuple[int, LayerTime]]] = {}
    for rank in ranks:
        parts = rank.breakdown
        without_layers = LayerTime(
            OUTSIDE,
            parts.flash_ns,
            parts.comm_ns,
            parts.exposed_comm_ns,
            0,
            rank.exposed.wait_ns,
            rank.exposed.wire_ns,
            parts.compute_ns,
        )
        for time in rank.layers or (without_layers,):
            rows.setdefault(time.layer, []).append((rank.rank, time))
    outside = rows.pop(OUTSIDE, None)
    if outside:
        rows[OUTSIDE] = outside
    totals = []
    for layer, times_by_rank in rows.items():
        times = [time for _, time in times_by_rank]
        total = LayerTime(layer, *(sum(column) for column in zip(*(time[1:] for time in times), strict=True)))
        worst_rank, worst = max(times_by_rank, key=lambda item: item[1].exposed_ns)
        totals.append((total, worst_rank, worst.exposed_ns))
    # Where part of the exposed time cannot be split, a layer's waiting would be too small.
    known = all(total.exposed_ns == total.wait_ns + total.wire_ns for total, _, _ in totals)
    return tuple(
        LayerTotals(total, total.wait_ns if known else None, total.wire_ns if known else None, rank, exposed_ns)
        for total, rank, exposed_ns in totals
    )
