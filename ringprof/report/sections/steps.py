"""Ring steps: the time of each block, the hops it should hide, and what stayed exposed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import msgspec

from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.transfers.hops import mean
from ringprof.common.json_object import JsonObject
from ringprof.report.listing import ITERATION, RANK, SPAN, Field, FieldTable
from ringprof.report.page.document import Content, PageContext, ReportParts
from ringprof.report.tables import Column, Listing, Table
from ringprof.report.terms import MEANINGS
from ringprof.report.text import TextStyle
from ringprof.report.timeline import origins_of, span_of

_SOURCE_NOTES = {
    "ringprof": "as ringprof's strategies named them",
    "annotation": "as the trace names them",
    "order": "from the order of hops and attention kernels",
}


STEPS = FieldTable(
    "steps",
    lambda findings: [
        {**msgspec.structs.asdict(step), "duration_ns": step.end_ns - step.start_ns} for step in findings.steps
    ],
    (
        RANK,
        ITERATION,
        Field("phase", "fwd or bwd", Column("pass")),
        Field("call", "which attention call of the iteration and phase, from 0", Column("call", "count")),
        Field("step", "number of the ring step in its pass, from 0", Column("step", "count")),
        *SPAN,
        Field("block_ns", "union of the step's attention kernels", Column("block", "time")),
        Field("compute_ns", "time in the step in which anything computes"),
        Field("hops", "exchanges that the block should hide", Column("hops", "count")),
        Field("bytes", "bytes that these send", Column("MB", "bytes")),
        Field("wait_ns", "sum of their waits; missing where one's is not known", Column("wait", "time")),
        Field("wire_ns", "sum of their wires; missing where one's is not known", Column("wire", "time")),
        Field("exposed_ns", "communication within the step with no computation beside it", Column("exposed", "time")),
        Field("exposed_wire_ns", "of exposed_ns, with something on the wire"),
        Field("bound", "what the step's length came from: compute, wire or peer", Column("bound by"),
              shown=lambda bound: bound or "not known"),
        Field("source", "what tells the steps: ringprof, annotation or order"),
        Field("duration_ns", "", Column("step", "time"), json=""),
    ),
    ("rank", "phase", "call", "step", "block_ns", "duration_ns", "hops", "bytes", "wait_ns", "wire_ns", "exposed_ns",
     "bound"),
    of_few_ranks=True,
)  # fmt: skip
COLUMNS = (
    Column(""), Column("block", "time"), Column("step", "time", 2), Column("hops", drop=1), Column("wait", "time"),
    Column("wire", "time"), Column("exposed", "time"), Column("of it\nwire", "time", 3), Column("bound by"),
)  # fmt: skip
WORST = (Column("worst\nrank", "count"), Column("it\nexposes", "time"))


def terminal(findings: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """List one step per row, as means over ranks and calls, with the rank that exposes most.

    With ``listing.everything``, list one rank and step per row.
    """
    steps = STEPS.rows(findings)
    if not steps:
        nothing = "none found; neither annotations nor the order of hops and attention identify them"
        if any(rank.recurrence for rank in findings.attribution.ranks):
            nothing = "a recurrence has none; its parts are listed above"
        elif findings.attribution.on_cpu:
            nothing = "a CPU trace does not tell when a transfer ran, so none are listed"
        return [style.wrap(f"ring steps: {nothing}")]
    ranks = len({step["rank"] for step in steps})
    groups: dict[str, list[JsonObject]] = defaultdict(list)
    several_calls = any(step["call"] for step in steps)
    for step in steps:
        call = f"call {step['call']} " if several_calls else ""
        prefix = f"rank {step['rank']} {call}" if listing.everything else ""
        groups[f"{prefix}{step['phase']} {step['step']}"].append(step)
    worst = WORST if ranks > 1 and not listing.everything else ()
    rows = [[name, *_means(group), *(most_exposed(group) if worst else ())] for name, group in groups.items()]
    title = f"ring steps, mean of {ranks} ranks" if worst else "ring steps"
    notes = [f"steps {_SOURCE_NOTES[steps[0]['source']]}"]
    if worst:
        notes.append("means over ranks and calls; what most are bound by, and how many of them; every rank's: --all")
    table = Table(title, (*COLUMNS, *worst), rows, "--all").listed(style, listing)
    return [table + "\n" + style.wrap("\n".join(notes), "dim")]


def most_exposed(rows: Sequence[JsonObject]) -> tuple[int, float]:
    """Return the rank that exposes most in these rows, and its mean exposed time per row."""
    by_rank: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        by_rank[row["rank"]].append(row["exposed_ns"])
    means = {rank: fmean(times) for rank, times in by_rank.items()}
    rank = max(means, key=lambda candidate: means[candidate])
    return rank, means[rank]


def _means(steps: Sequence[JsonObject]) -> list[Any]:
    hops = {step["hops"] for step in steps}
    bounds = [step["bound"] or "-" for step in steps]
    most_common = max(dict.fromkeys(bounds), key=bounds.count)
    bound = most_common if len(set(bounds)) == 1 else f"{most_common} {bounds.count(most_common) / len(bounds):.0%}"
    block, duration, *times = (
        mean([step[key] for step in steps])
        for key in ("block_ns", "duration_ns", "wait_ns", "wire_ns", "exposed_ns", "exposed_wire_ns")
    )
    return [block, duration, hops.pop() if len(hops) == 1 else f"{min(hops)}-{max(hops)}", *times, bound]


def json(findings: Findings) -> ReportParts:
    """Build the ``steps`` of the JSON report, one per rank and step; empty for very many ranks."""
    return {"steps": STEPS.items(findings)}


def html(findings: Findings, page: PageContext) -> Content | None:
    """Build a heat map of exposed time and a table of steps; None without steps and for very many ranks."""
    if not findings.lists_steps or not findings.steps:
        return None
    heat_map = page.figures.waiting(findings.steps, [rank.rank for rank in findings.attribution.ranks])
    origin = origins_of(findings.attribution)
    spans = [span_of(step.rank, step.start_ns, step.end_ns, origin) for step in findings.steps]
    table = STEPS.table(findings).page("span", spans)
    return Content(heat_map, [table], [MEANINGS["waiting"]] if heat_map else [])
