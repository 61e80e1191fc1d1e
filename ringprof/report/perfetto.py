"""All ranks in one Chrome trace for Perfetto.

One clock; tracks named by host and rank; ring steps and exposed stretches as slices of their own; an arrow from each
send to where it is received.

Format: the trace-event format's X (slice), M (name), s and f (flow start and end) events, times in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.exposure import exposure_of
from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.rank import Rank
from ringprof.analysis.steps.steps import Step
from ringprof.analysis.timeline.rows import rows_of
from ringprof.analysis.transfers.from_run import fill_from_run
from ringprof.analysis.transfers.matching import match
from ringprof.analysis.transfers.transfers import Transfer, transfers_of
from ringprof.report.terms import LABELS
from ringprof.report.text import clean
from ringprof.report.timeline import activities_of, origins_of
from ringprof.run import Run

STEPS, EXPOSED, STREAMS = 1, 2, 100
"""Track numbers inside a rank's process: ring steps, exposed communication, and a stream's number plus this."""


def events_of(found: Findings) -> Iterator[dict[str, Any]]:
    """Every event of the merged trace."""
    attribution = found.attribution
    origin = origins_of(attribution)
    for rank in attribution.ranks:
        yield from _names(rank)
        if rank.on_cpu:
            continue
        yield from _activities(rank, origin[rank.rank])
        yield from _exposed(rank, origin[rank.rank])
    for step in found.steps:
        yield _step(step, origin[step.rank])
    yield from _arrows(attribution, origin)


def _slice(rank: int, track: int, name: str, start_ns: int, end_ns: int, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X", "pid": rank, "tid": track, "name": clean(name), "ts": start_ns / 1e3,
        "dur": max(0, end_ns - start_ns) / 1e3, "args": args,
    }  # fmt: skip


def _names(rank: Rank) -> Iterator[dict[str, Any]]:
    host = f"{clean(rank.host)} " if rank.host else ""
    yield _named("process_name", rank.rank, 0, name=f"{host}rank {rank.rank}")
    yield _named("process_sort_index", rank.rank, 0, sort_index=rank.rank)
    for track, name in ((STEPS, "ring steps"), (EXPOSED, "exposed communication")):
        yield _named("thread_name", rank.rank, track, name=name)
    for stream in sorted({one.stream for one in activities_of(rank.detail)}):
        yield _named("thread_name", rank.rank, STREAMS + stream, name=f"stream {stream}")


def _named(what: str, rank: int, track: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": track, "name": what, "args": args}


def _activities(rank: Rank, origin: int) -> Iterator[dict[str, Any]]:
    for one in activities_of(rank.detail):
        start, end = one.start_ns - origin, one.end_ns - origin
        yield _slice(rank.rank, STREAMS + one.stream, one.name, start, end, kind=LABELS[one.kind])


def _exposed(rank: Rank, origin: int) -> Iterator[dict[str, Any]]:
    detail = rank.detail
    exposure = exposure_of(detail, detail.rows())
    parts = (("exposed wire", exposure.wire), ("exposed wait", exposure.wait), ("exposed, not split", exposure.unknown))
    for name, spans in parts:
        for start, end in zip(spans.start_ns.tolist(), spans.end_ns.tolist(), strict=True):
            yield _slice(rank.rank, EXPOSED, name, start - origin, end - origin)


def _step(step: Step, origin: int) -> dict[str, Any]:
    name = f"{step.phase} {step.step}" + (f" of call {step.call}" if step.call else "")
    figures = {"bound": step.bound or "not known", "exposed_ms": step.exposed_ns / 1e6, "hops": step.hops}
    return _slice(step.rank, STEPS, name, step.start_ns - origin, step.end_ns - origin, **figures)


def _arrows(attribution: Attribution, origin: dict[int, int]) -> Iterator[dict[str, Any]]:
    """From the middle of what sends to the middle of what receives: an arrow must touch the slices it joins."""
    found = match({rank.rank: _transfers(rank, attribution.run) for rank in attribution.ranks})
    drawn = {rank.rank: {one.row: one for one in activities_of(rank.detail)} for rank in attribution.ranks}
    for number, pair in enumerate(zip(found.sender.tolist(), found.receiver.tolist(), strict=True)):
        ends = [found.transfers[place] for place in pair]
        if any(end.activity not in drawn[end.rank] for end in ends):
            continue
        for phase, end in zip("sf", ends, strict=True):
            one = drawn[end.rank][end.activity]
            middle = (one.start_ns + one.end_ns) // 2 - origin[end.rank]
            event = {
                "ph": phase, "id": number, "cat": "hop", "name": "hop", "pid": end.rank,
                "tid": STREAMS + one.stream, "ts": middle / 1e3,
            }  # fmt: skip
            yield event | ({"bp": "e"} if phase == "f" else {})


def _transfers(rank: Rank, run: Run | None) -> list[Transfer]:
    """Those of the whole window: cut at times, ranks would count different ones, and the wrong two be joined."""
    detail = rank.detail
    if detail.window.between_ns is None:
        return [part.transfer for part in detail.splits]
    whole = rows_of(detail.classified, detail.window.activities(), detail.device, None)
    return fill_from_run(transfers_of(detail.classified, whole.activity, rank.rank), run, rank.rank)
