"""Times by layer of the model over all ranks."""

from __future__ import annotations

from typing import NamedTuple

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.timeline.layers import OUTSIDE, LayerTime


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
