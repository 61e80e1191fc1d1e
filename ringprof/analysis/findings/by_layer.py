"""Times by layer of the model over all ranks."""

from __future__ import annotations

from typing import NamedTuple

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.timeline.layers import OUTSIDE, LayerTime


class LayerTotals(NamedTuple):
    """Times of one layer, summed over all ranks, and the rank that exposes most in it."""

    time: LayerTime
    wait_ns: int | None
    """Part of the exposed time spent waiting; None where exposed time of any layer is not known to wait or to send."""
    wire_ns: int | None
    worst_rank: int
    worst_exposed_ns: int


def layers_of_run(attribution: Attribution) -> tuple[LayerTotals, ...]:
    """Sum up the times of all ranks by layer, in the order of the layers; empty where no trace names layers.

    What a rank without layers exposes counts as outside of all layers, so that the sums are those of the run.
    """
    ranks = attribution.ranks
    if not any(rank.layers for rank in ranks):
        return ()
    rows: dict[str, list[tuple[int, LayerTime]]] = {}
    for rank in ranks:
        parts = rank.breakdown
        without_layers = LayerTime(
            OUTSIDE, parts.flash_ns, parts.comm_ns, parts.exposed_comm_ns, 0, rank.exposed.wait_ns, rank.exposed.wire_ns
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
