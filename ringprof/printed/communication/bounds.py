"""Bounds on the waiting, the transfer and the rate of an operation, from times of which some are not known.

The definitions are those of reports of traces (docs/metrics.md): an operation is *ready* when the last rank that it
depends on has begun, *waits* until then and is on the *wire* from then to its end. The host posts an operation before
the device begins it, and sees its beginning and its end afterwards; every bound here follows from these two facts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from ringprof.printed.communication.operations import COMPLETED, Operation


class Bounds(msgspec.Struct, frozen=True):
    """Bounds on the times of one operation in ns, and on its rates in bytes per ns (GB/s); None: not bounded."""

    time_least_ns: int | None
    time_most_ns: int | None
    wait_least_ns: int | None
    wait_most_ns: int | None
    wire_least_ns: int | None
    wire_most_ns: int | None
    rate_least: float | None
    """Bytes over the largest time of the operation, waiting included."""
    rate_most: float | None
    """Bytes over its least time; None where no least time above 0 is known."""
    wire_rate_least: float | None
    """Bytes over the largest time on the wire."""
    wire_rate_most: float | None
    """Bytes over the least time on the wire."""


def bounds_of(operation: Operation, last_post_ns: int | None, all_begun_ns: int | None) -> Bounds:
    """Return bounds on the time, the waiting and the rates of an operation.

    ``last_post_ns`` is the latest time at which one of its peers was posted, of those that are known: the operations at
    the other ends of its messages, or the other members of its collective. ``all_begun_ns`` is a time by which all
    of these and their own peers have begun on their devices. Both are None where they are not known, or are not on
    this operation's clock.
    """
    least, most = operation.least_ns, operation.most_ns
    begun_by = begun_by_of(operation)
    wait_least = wait_most = None
    wire_most = most
    if last_post_ns is not None and begun_by is not None:
        wait_least = max(0, last_post_ns - begun_by)
        if operation.state == COMPLETED:
            wait_least = min(wait_least, least or 0)
    if all_begun_ns is not None and operation.posted_ns is not None:
        wait_most = max(0, all_begun_ns - operation.posted_ns)
    if most is not None:
        wait_most = most if wait_most is None else min(wait_most, most)
    if last_post_ns is not None and operation.completed_by_ns is not None and most is not None:
        after_post = operation.completed_by_ns - last_post_ns
        wire_most = min(most, after_post) if after_post > 0 else most
    wire_least = max(0, least - wait_most) if least is not None and wait_most is not None else None
    size = operation.counted_bytes
    rates = (size / time if size and time else None for time in (most, least, wire_most, wire_least))
    return Bounds(least, most, wait_least, wait_most, wire_least, wire_most, *rates)


def begun_by_of(operation: Operation) -> int | None:
    """Return a time by which an operation has begun on its device; None where none is known."""
    times = [operation.started_by_ns]
    if operation.completed_by_ns is not None:
        times.append(operation.completed_by_ns - (operation.least_ns or 0))
    known = [time for time in times if time is not None]
    return min(known) if known else None


def sum_if_known(values: Iterable[int | None]) -> int | None:
    """Return the sum of values; None if one of them is None, or there are none."""
    listed = [*values]
    return None if not listed or None in listed else sum(value for value in listed if value is not None)


BUS_FACTORS: Mapping[str, tuple[int, int]] = {
    "all_reduce": (2, -2), "all_gather": (1, -1), "reduce_scatter": (1, -1), "broadcast": (1, 0), "reduce": (1, 0),
}  # fmt: skip
"""Bus bandwidth over algorithmic bandwidth, as (a, b) of (a * ranks + b) / ranks, by nccl-tests' doc/PERFORMANCE.md.

An all-to-all has none: the logs do not say how much of it goes to whom."""


def bus_factor(name: str, ranks: int) -> float | None:
    """Return bus bandwidth over algorithmic bandwidth of a collective, named as in `Operation`, on ``ranks`` ranks.

    Returns None for hops, all-to-alls and other names without a factor in `BUS_FACTORS`.
    """
    if name not in BUS_FACTORS or ranks < 1:
        return None
    scale, shift = BUS_FACTORS[name]
    return (scale * ranks + shift) / ranks
