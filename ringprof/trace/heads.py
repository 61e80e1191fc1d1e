"""The head of a trace: what tells whose it is, and whether several are of one run, without holding them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ringprof.errors import InputError
from ringprof.trace.columns import Caveat, Trace

OF_THE_RUN = frozenset({"mixed_runs", "assumed_ranks", "left_out"})
"""Codes of warnings that one trace carries for all."""


@dataclass(frozen=True)
class Head:
    """One trace's origin and extent."""

    path: str
    rank: int | None
    world_size: int | None
    host: str | None
    largest_peer: int
    """The largest rank of any group that it names, 0 where it names none."""
    span_ns: tuple[int, int] | None
    """First start and last end of its activities (on CPU: operators), unix time; None where there are none."""
    warnings: tuple[Caveat, ...] = ()


def head_of(trace: Trace) -> Head:
    """The head of one trace."""
    rows = trace.activities if len(trace.activities.start_ns) else trace.operators
    return Head(
        path=trace.path,
        rank=trace.rank,
        world_size=trace.world_size,
        host=trace.host,
        largest_peer=max((rank for ranks in trace.groups.values() for rank in ranks), default=0),
        span_ns=(int(rows.start_ns[0]), int(rows.end_ns.max())) if len(rows.start_ns) else None,
        warnings=tuple(trace.warnings),
    )


def checked_heads(heads: Sequence[Head], problems: Sequence[InputError] = ()) -> list[Head]:
    """The heads, in the order given, each with its rank and with warnings about its place among the others.

    ``problems``: why other traces of the run could not be read.
    """
    heads = _placed(heads)
    if problems:
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        first = min(range(len(heads)), key=lambda at: order(heads[at]))
        message = f"traces that cannot be read are left out: {problems[0]}{more}"
        heads[first] = _with(heads[first], Caveat("left_out", message))
    return heads


def _placed(heads: Sequence[Head]) -> list[Head]:
    if len(heads) < 2:
        return list(heads)
    if all(head.rank is None for head in heads):
        heads = [replace(head, rank=rank) for rank, head in enumerate(heads)]
        note = Caveat("assumed_ranks", "no trace names its rank: ranks are given in the order of the files")
        heads[0] = _with(heads[0], note)
    counts = Counter(head.rank for head in heads)
    heads = [_with(head, *_place_warnings(head, counts[head.rank])) for head in heads]
    first = min(range(len(heads)), key=lambda at: order(heads[at]))
    heads[first] = _with(heads[first], *_run_warnings(heads))
    return heads


def order(head: Head) -> tuple[bool, int]:
    """Sorts by rank, those without one last."""
    return head.rank is None, head.rank or 0


def _with(head: Head, *warnings: Caveat) -> Head:
    return replace(head, warnings=(*head.warnings, *warnings)) if warnings else head


def _place_warnings(head: Head, same_rank: int) -> list[Caveat]:
    if head.rank is None:
        return [Caveat("unknown_rank", f"{head.path} does not name its rank, in the file or its name")]
    if same_rank > 1:
        message = f"{head.path} is one of {same_rank} traces of rank {head.rank}: give the files of one run only"
        return [Caveat("duplicate_rank", message, head.rank)]
    return []


def _run_warnings(heads: Sequence[Head]) -> list[Caveat]:
    """What shows that the traces are not all the ranks of one run."""
    found = []
    sizes = {head.world_size for head in heads if head.world_size is not None}
    if len(sizes) > 1:
        listed = ", ".join(str(size) for size in sorted(sizes))
        found.append(Caveat("mixed_runs", f"the traces come from runs of different world sizes ({listed})"))
    apart = _first_apart(heads)
    if apart:
        message = f"{apart[0].path} and {apart[1].path} have no moment in common: are they of one run?"
        found.append(Caveat("mixed_runs", message))
    return found


def _first_apart(heads: Sequence[Head]) -> tuple[Head, Head] | None:
    """Two traces of one clock whose times do not overlap at all, such as none of one run have."""
    by_host: dict[str | None, list[tuple[int, int, Head]]] = {}
    for head in sorted(heads, key=order):
        if head.span_ns:
            by_host.setdefault(head.host, []).append((*head.span_ns, head))
    for spans in by_host.values():
        earliest_end = min(spans, key=lambda span: span[1])
        latest_start = max(spans, key=lambda span: span[0])
        if latest_start[0] > earliest_end[1]:
            return earliest_end[2], latest_start[2]
    return None
