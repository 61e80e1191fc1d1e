"""Rank of each trace, and checks that several traces belong to one run; needs only a few facts of each trace."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import PurePath

import msgspec

from ringprof.errors import InputError
from ringprof.trace.checks import RANKS_LIMIT
from ringprof.trace.columns import CUT_OFF, Notice, Trace

RUN_WARNINGS = frozenset({"mixed_runs", "assumed_ranks", "left_out", "profiler_cycles"})
"""Codes of warnings about the whole run, which are attached to one of its traces."""


class TraceFacts(msgspec.Struct, frozen=True):
    """Facts about one trace: path, rank, host and time span, without its activities."""

    path: str
    rank: int | None
    world_size: int | None
    host: str | None
    largest_peer: int
    """Largest rank in any group of the trace; 0 if it names no group."""
    span_ns: tuple[int, int] | None
    """First start and last end of the activities (operators on CPU), as Unix time in nanoseconds; None without any."""
    warnings: tuple[Notice, ...] = ()
    other_cycle: bool = False
    """Whether this trace is superseded by one that the same process wrote in another profiler cycle."""


def facts_of(trace: Trace) -> TraceFacts:
    """Extract the facts of one trace."""
    rows = trace.activities if len(trace.activities.start_ns) else trace.operators
    return TraceFacts(
        path=trace.path, rank=trace.rank, world_size=trace.world_size, host=trace.host,
        largest_peer=max((rank for ranks in trace.groups.values() for rank in ranks), default=0),
        span_ns=(int(rows.start_ns[0]), int(rows.end_ns.max())) if len(rows.start_ns) else None,
        warnings=tuple(trace.warnings),
    )  # fmt: skip


def checked_facts(facts: Sequence[TraceFacts], problems: Sequence[InputError] = ()) -> list[TraceFacts]:
    """Return the facts of all traces of a run in the given order, with ranks assigned and warnings added.

    ``problems``: the errors of other traces of the run that could not be read.
    """
    checked = _mark_other_cycles(facts)
    reported = [index for index, trace_facts in enumerate(checked) if not trace_facts.other_cycle]
    if len(reported) > 1:
        if all(checked[index].rank is None for index in reported):
            for rank, index in enumerate(reported):
                checked[index] = msgspec.structs.replace(checked[index], rank=rank)
            note = Notice(
                "assumed_ranks",
                "no trace names its rank: ranks are given in the order of the files, and in a file of its devices",
            )
            checked[reported[0]] = _add_warnings(checked[reported[0]], note)
        for index, trace_facts in enumerate(checked):
            if trace_facts.rank is None:
                message = f"{trace_facts.path} does not name its rank, in the file or its name"
                checked[index] = _add_warnings(trace_facts, Notice("unknown_rank", message))
    first = min(reported, key=lambda index: rank_sort_key(checked[index]))
    warnings = _run_warnings([checked[index] for index in reported])
    if problems:
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        warnings.append(Notice("left_out", f"traces that cannot be read are left out: {problems[0]}{more}"))
    superseded = [trace_facts.path for trace_facts in checked if trace_facts.other_cycle]
    if superseded:
        message = (
            f"processes wrote several traces, one per profiler cycle: the newest cycle is reported, "
            f"{len(superseded)} other traces are left out, such as {superseded[0]}"
        )
        warnings.append(Notice("profiler_cycles", message, count=len(superseded)))
    checked[first] = _add_warnings(checked[first], *warnings)
    return checked


_CYCLE = re.compile(r"(?P<process>.+_[0-9]+)\.(?P<time>[0-9]{10,20})\.pt\.trace\.json(\.\w+)?")
"""File name that torch.profiler's `tensorboard_trace_handler` writes: host and process id, then the time."""


def _mark_other_cycles(facts: Sequence[TraceFacts]) -> list[TraceFacts]:
    """Mark the traces of all profiler cycles but one with ``other_cycle``, so that no process counts as two ranks."""
    by_process: dict[tuple[PurePath, str], list[tuple[int, int]]] = {}
    for index, trace_facts in enumerate(facts):
        path = PurePath(trace_facts.path)
        match = _CYCLE.fullmatch(path.name)
        process = (path.parent, match["process"]) if match else (path, str(index))
        by_process.setdefault(process, []).append((int(match["time"]) if match else 0, index))
    cycles: list[list[int]] = []
    for traces in by_process.values():
        indices = [index for _, index in sorted(traces)]
        cycles += [indices] if _are_consecutive(facts, indices) else [[index] for index in indices]
    if len(cycles) == len(facts):
        return list(facts)
    reported = _newest_cycle(facts, cycles)
    return [
        msgspec.structs.replace(trace_facts, other_cycle=index not in reported)
        for index, trace_facts in enumerate(facts)
    ]


def _are_consecutive(facts: Sequence[TraceFacts], indices: Sequence[int]) -> bool:
    """Return whether traces can come from one process: they have one rank, and each starts after the previous end."""
    spans = [span for index in indices if (span := facts[index].span_ns)]
    ranks = {facts[index].rank for index in indices}
    return len(ranks) == 1 and all(previous[1] <= following[0] for previous, following in pairwise(spans))


def _newest_cycle(facts: Sequence[TraceFacts], cycles: Sequence[Sequence[int]]) -> set[int]:
    """Choose one trace per process: the newest set that overlaps in time, else the newest trace of each."""
    for reference in reversed(min(cycles, key=len)):
        chosen = {
            next((index for index in reversed(indices) if _overlap(facts[index], facts[reference])), -1)
            for indices in cycles
        }
        if -1 not in chosen:
            return chosen
    return {indices[-1] for indices in cycles}


def _overlap(first: TraceFacts, second: TraceFacts) -> bool:
    (start, end), (other_start, other_end) = first.span_ns or (0, -1), second.span_ns or (0, -1)
    return max(start, other_start) <= min(end, other_end)


def rank_sort_key(facts: TraceFacts) -> tuple[bool, int]:
    """Return a sort key by rank; facts without a rank come last."""
    return facts.rank is None, facts.rank or 0


def _add_warnings(facts: TraceFacts, *warnings: Notice) -> TraceFacts:
    return msgspec.structs.replace(facts, warnings=(*facts.warnings, *warnings)) if warnings else facts


def _run_warnings(facts: Sequence[TraceFacts]) -> list[Notice]:
    """Return warnings about traces that seem to come from different runs."""
    warnings = []
    sizes = {trace_facts.world_size for trace_facts in facts if trace_facts.world_size is not None}
    if len(sizes) > 1:
        sizes_text = ", ".join(str(size) for size in sorted(sizes))
        warnings.append(Notice("mixed_runs", f"the traces come from runs of different world sizes ({sizes_text})"))
    disjoint = _first_disjoint(facts)
    if disjoint:
        first, second = (trace_facts.path for trace_facts in disjoint)
        names = f"{first} and {second}" if first != second else f"{first}: two of its processes"
        warnings.append(Notice("mixed_runs", f"{names} do not overlap in time: are they from one run?"))
    return warnings


def _first_disjoint(facts: Sequence[TraceFacts]) -> tuple[TraceFacts, TraceFacts] | None:
    """Find two traces of one host whose times do not overlap, unlike those of one run; None if there are none."""
    # A trace that is cut off may end before others begin.
    complete = [
        trace_facts for trace_facts in facts if not CUT_OFF & {warning.code for warning in trace_facts.warnings}
    ]
    by_host: dict[str | None, list[tuple[int, int, TraceFacts]]] = {}
    for trace_facts in sorted(complete or facts, key=rank_sort_key):
        if trace_facts.span_ns:
            by_host.setdefault(trace_facts.host, []).append((*trace_facts.span_ns, trace_facts))
    for spans in by_host.values():
        earliest_end = min(spans, key=lambda span: span[1])
        latest_start = max(spans, key=lambda span: span[0])
        if latest_start[0] > earliest_end[1]:
            return earliest_end[2], latest_start[2]
    return None


def split_recordings(facts: Sequence[TraceFacts]) -> list[list[TraceFacts]]:
    """Split the traces into consecutive recordings, as a repeating profiler schedule writes them.

    Every recording must have the same ranks and start after the previous one has ended. Returns an empty list if the
    traces are not like this, or form a single recording.
    """
    recordings: list[list[TraceFacts]] = []
    latest_end = -1
    timed = [trace_facts for trace_facts in facts if trace_facts.span_ns]
    for trace_facts in sorted(timed, key=lambda trace_facts: trace_facts.span_ns or ()):
        first, last = trace_facts.span_ns or (0, 0)
        if first > latest_end:
            recordings.append([])
        recordings[-1].append(trace_facts)
        latest_end = max(latest_end, last)
    ranks = [sorted(map(rank_sort_key, recording)) for recording in recordings]
    same_ranks = all(numbers == ranks[0] and len(set(numbers)) == len(numbers) for numbers in ranks)
    return recordings if same_ranks and len(recordings) > 1 else []


_RANK_NAMES = (
    re.compile(r"rank[\s_.=\-]*([0-9]{1,7})", re.IGNORECASE),
    re.compile(r"(?:^|[_.\-])(?:worker|gpu|proc|r)[_.\-]?([0-9]{1,7})(?=[_.\-]|$)", re.IGNORECASE),
    re.compile(r"^(?:trace[_.\-]?)?([0-9]{1,7})(?=[_.\-]|$)", re.IGNORECASE),
)


def rank_in_name(path: str) -> int | None:
    """Return the rank in a file name ("rank3.json.gz", "trace_r3.json", "rank_3/trace.json"); None if there is none."""
    *folders, name = PurePath(path).parts or ("",)
    rank_match = next((match for pattern in _RANK_NAMES if (match := pattern.search(name))), None)
    if rank_match is None and folders:
        rank_match = _RANK_NAMES[0].search(folders[-1])
    return int(rank_match[1]) if rank_match and int(rank_match[1]) < RANKS_LIMIT else None
