"""Whose trace is this, and are several the ranks of one run? Answered from a few facts of each, not from all traces."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import PurePath

import msgspec

from ringprof.errors import InputError
from ringprof.trace.checks import RANKS_LIMIT
from ringprof.trace.columns import CUT_OFF, Notice, Trace

OF_THE_RUN = frozenset({"mixed_runs", "assumed_ranks", "left_out", "profiler_cycles"})
"""Codes of warnings that one trace carries for all."""


class TraceFacts(msgspec.Struct, frozen=True):
    """What is known of a trace before its activities are looked at."""

    path: str
    rank: int | None
    world_size: int | None
    host: str | None
    largest_peer: int
    """The largest rank of any group that it names, 0 where it names none."""
    span_ns: tuple[int, int] | None
    """First start and last end of its activities (on CPU: operators), unix time; None where there are none."""
    warnings: tuple[Notice, ...] = ()
    other_cycle: bool = False
    """Whether the same process wrote another trace, of another profiler cycle, that is reported in its place."""


def facts_of(trace: Trace) -> TraceFacts:
    """The facts of one trace."""
    rows = trace.activities if len(trace.activities.start_ns) else trace.operators
    return TraceFacts(
        path=trace.path,
        rank=trace.rank,
        world_size=trace.world_size,
        host=trace.host,
        largest_peer=max((rank for ranks in trace.groups.values() for rank in ranks), default=0),
        span_ns=(int(rows.start_ns[0]), int(rows.end_ns.max())) if len(rows.start_ns) else None,
        warnings=tuple(trace.warnings),
    )


def checked_facts(facts: Sequence[TraceFacts], problems: Sequence[InputError] = ()) -> list[TraceFacts]:
    """Return the facts in the order given, each with its rank and with warnings about its place among the others.

    ``problems``: why other traces of the run could not be read.
    """
    checked = _of_one_cycle(facts)
    reported = [place for place, one in enumerate(checked) if not one.other_cycle]
    if len(reported) > 1:
        if all(checked[place].rank is None for place in reported):
            for rank, place in enumerate(reported):
                checked[place] = msgspec.structs.replace(checked[place], rank=rank)
            note = Notice("assumed_ranks", "no trace names its rank: ranks are given in the order of the files")
            checked[reported[0]] = _with(checked[reported[0]], note)
        checked = [_with(one, *_place_warnings(one)) for one in checked]
    first = min(reported, key=lambda place: order(checked[place]))
    warnings = [*_run_warnings([checked[place] for place in reported]), *_left_out(problems)]
    checked[first] = _with(checked[first], *warnings, *_cycles(checked))
    return checked


_CYCLE = re.compile(r"(?P<process>.+_[0-9]+)\.(?P<time>[0-9]{10,20})\.pt\.trace\.json(\.\w+)?")
"""How torch.profiler's `tensorboard_trace_handler` names a trace: host and process id, then the time."""


def _of_one_cycle(facts: Sequence[TraceFacts]) -> list[TraceFacts]:
    """Mark the traces of all profiler cycles but one, so that no process counts as two ranks."""
    written: dict[tuple[PurePath, str], list[tuple[int, int]]] = {}
    for place, one in enumerate(facts):
        path = PurePath(one.path)
        match = _CYCLE.fullmatch(path.name)
        process = (path.parent, match["process"]) if match else (path, str(place))
        written.setdefault(process, []).append((int(match["time"]) if match else 0, place))
    cycles: list[list[int]] = []
    for traces in written.values():
        places = [place for _, place in sorted(traces)]
        cycles += [places] if _in_turn(facts, places) else [[place] for place in places]
    if len(cycles) == len(facts):
        return list(facts)
    reported = _newest_cycle(facts, cycles)
    return [msgspec.structs.replace(one, other_cycle=place not in reported) for place, one in enumerate(facts)]


def _in_turn(facts: Sequence[TraceFacts], places: Sequence[int]) -> bool:
    """Return whether traces can be of one process: of one rank, each begun after the one before has ended."""
    spans = [span for place in places if (span := facts[place].span_ns)]
    ranks = {facts[place].rank for place in places}
    return len(ranks) == 1 and all(one[1] <= following[0] for one, following in pairwise(spans))


def _newest_cycle(facts: Sequence[TraceFacts], cycles: Sequence[Sequence[int]]) -> set[int]:
    """Choose a trace of each process: the newest that overlap in time, else the newest of each."""
    for reference in reversed(min(cycles, key=len)):
        chosen = {next((p for p in reversed(places) if _overlap(facts[p], facts[reference])), -1) for places in cycles}
        if -1 not in chosen:
            return chosen
    return {places[-1] for places in cycles}


def _overlap(one: TraceFacts, other: TraceFacts) -> bool:
    (start, end), (other_start, other_end) = one.span_ns or (0, -1), other.span_ns or (0, -1)
    return max(start, other_start) <= min(end, other_end)


def _cycles(facts: Sequence[TraceFacts]) -> list[Notice]:
    others = [one.path for one in facts if one.other_cycle]
    if not others:
        return []
    message = (
        f"processes wrote several traces, one per profiler cycle: the newest cycle is reported, "
        f"{len(others)} other traces are left out, such as {others[0]}"
    )
    return [Notice("profiler_cycles", message, count=len(others))]


def order(one: TraceFacts) -> tuple[bool, int]:
    """Sorts by rank, those without one last."""
    return one.rank is None, one.rank or 0


def _with(one: TraceFacts, *warnings: Notice) -> TraceFacts:
    return msgspec.structs.replace(one, warnings=(*one.warnings, *warnings)) if warnings else one


def _place_warnings(one: TraceFacts) -> list[Notice]:
    if one.rank is not None:
        return []
    return [Notice("unknown_rank", f"{one.path} does not name its rank, in the file or its name")]


def _left_out(problems: Sequence[InputError]) -> list[Notice]:
    if not problems:
        return []
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    return [Notice("left_out", f"traces that cannot be read are left out: {problems[0]}{more}")]


def _run_warnings(facts: Sequence[TraceFacts]) -> list[Notice]:
    """What shows that the traces are not all the ranks of one run."""
    found = []
    sizes = {one.world_size for one in facts if one.world_size is not None}
    if len(sizes) > 1:
        listed = ", ".join(str(size) for size in sorted(sizes))
        found.append(Notice("mixed_runs", f"the traces come from runs of different world sizes ({listed})"))
    apart = _first_apart(facts)
    if apart:
        one, other = (each.path for each in apart)
        which = f"{one} and {other}" if one != other else f"{one}: two of its processes"
        found.append(Notice("mixed_runs", f"{which} have no moment in common: are they of one run?"))
    return found


def _first_apart(facts: Sequence[TraceFacts]) -> tuple[TraceFacts, TraceFacts] | None:
    """Two traces of one clock whose times do not overlap at all, such as none of one run have."""
    # What is left of a trace that is cut off may end before others begin.
    whole = [one for one in facts if not CUT_OFF & {warning.code for warning in one.warnings}]
    by_host: dict[str | None, list[tuple[int, int, TraceFacts]]] = {}
    for one in sorted(whole or facts, key=order):
        if one.span_ns:
            by_host.setdefault(one.host, []).append((*one.span_ns, one))
    for spans in by_host.values():
        earliest_end = min(spans, key=lambda span: span[1])
        latest_start = max(spans, key=lambda span: span[0])
        if latest_start[0] > earliest_end[1]:
            return earliest_end[2], latest_start[2]
    return None


def one_after_another(facts: Sequence[TraceFacts]) -> list[list[TraceFacts]]:
    """The recordings that the traces are of, where each has the same ranks and begins after the one before has ended,
    as a profiler's schedule that repeats writes them; else none."""
    found: list[list[TraceFacts]] = []
    reached = -1
    for one in sorted((one for one in facts if one.span_ns), key=lambda one: one.span_ns or ()):
        first, last = one.span_ns or (0, 0)
        if first > reached:
            found.append([])
        found[-1].append(one)
        reached = max(reached, last)
    ranks = [sorted(map(order, recording)) for recording in found]
    alike = all(each == ranks[0] and len(set(each)) == len(each) for each in ranks)
    return found if alike and len(found) > 1 else []


_RANK_NAMES = (
    re.compile(r"rank[\s_.=\-]*([0-9]{1,7})", re.IGNORECASE),
    re.compile(r"(?:^|[_.\-])(?:worker|gpu|proc|r)[_.\-]?([0-9]{1,7})(?=[_.\-]|$)", re.IGNORECASE),
    re.compile(r"^(?:trace[_.\-]?)?([0-9]{1,7})(?=[_.\-]|$)", re.IGNORECASE),
)


def rank_in_name(path: str) -> int | None:
    """The rank that a file's name tells ("rank3.json.gz", "trace_r3.json", "rank_3/trace.json"), else None."""
    parts = PurePath(path).parts
    found = next((match for pattern in _RANK_NAMES if (match := pattern.search(parts[-1]))), None) if parts else None
    if found is None and len(parts) > 1:
        found = _RANK_NAMES[0].search(parts[-2])
    return int(found.group(1)) if found and int(found.group(1)) < RANKS_LIMIT else None
