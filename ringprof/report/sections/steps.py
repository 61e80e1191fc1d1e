"""Ring steps: the time of each block, the hops it should hide, and what stayed exposed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import msgspec

from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.steps.steps import Step
from ringprof.analysis.transfers.hops import mean
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


COLUMNS = (
    Column(""), Column("block", "time"), Column("step", "time", 2), Column("hops", drop=1), Column("wait", "time"),
    Column("wire", "time"), Column("exposed", "time"), Column("of it\nwire", "time", 3), Column("bound by"),
)  # fmt: skip
WORST = (Column("worst\nrank", "count"), Column("it\nexposes", "time"))


def terminal(findings: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """List one step per row, as means over ranks and calls, with the rank that exposes most.

    With ``listing.everything``, list one rank and step per row.
    """
    steps = findings.steps
    if not steps and any(rank.recurrence for rank in findings.attribution.ranks):
        return [style.wrap("ring steps: a recurrence has none; its parts are listed above")]
    if not steps:
        if findings.attribution.on_cpu:
            return [style.wrap("ring steps: a CPU trace does not tell when a transfer ran, so none are listed")]
        nothing = "none found; neither annotations nor the order of hops and attention identify them"
        return [style.wrap(f"ring steps: {nothing}")]
    ranks = len({step.rank for step in steps})
    groups: dict[str, list[Step]] = defaultdict(list)
    several_calls = any(step.call for step in steps)
    for step in steps:
        prefix = f"rank {step.rank} " + (f"call {step.call} " if several_calls else "") if listing.everything else ""
        groups[f"{prefix}{step.phase} {step.step}"].append(step)
    worst = WORST if ranks > 1 and not listing.everything else ()
    rows = [
        [name, *_means(steps_of_row), *(_most_exposed(steps_of_row) if worst else ())]
        for name, steps_of_row in groups.items()
    ]
    title = f"ring steps, mean of {ranks} ranks" if worst else "ring steps"
    notes = [f"steps {_SOURCE_NOTES[steps[0].source]}"]
    if worst:
        notes.append("means over ranks and calls; what most are bound by, and how many of them; every rank's: --all")
    table = Table(title, (*COLUMNS, *worst), rows, "--all").listed(style, listing)
    return [table + "\n" + style.wrap("\n".join(notes), "dim")]


def _most_exposed(steps: Sequence[Step]) -> tuple[int, float]:
    """Return the rank that exposes most in these steps, and its mean exposed time per step."""
    by_rank: dict[int, list[int]] = defaultdict(list)
    for step in steps:
        by_rank[step.rank].append(step.exposed_ns)
    means = {rank: fmean(times) for rank, times in by_rank.items()}
    rank = max(means, key=lambda candidate: means[candidate])
    return rank, means[rank]


def _means(steps: Sequence[Step]) -> list[Any]:
    hops = {step.hops for step in steps}
    bounds = [step.bound or "-" for step in steps]
    most_common = max(dict.fromkeys(bounds), key=bounds.count)
    return [
        mean([step.block_ns for step in steps]),
        mean([step.end_ns - step.start_ns for step in steps]),
        hops.pop() if len(hops) == 1 else f"{min(hops)}-{max(hops)}",
        mean([step.wait_ns for step in steps]),
        mean([step.wire_ns for step in steps]),
        mean([step.exposed_ns for step in steps]),
        mean([step.exposed_wire_ns for step in steps]),
        most_common if len(set(bounds)) == 1 else f"{most_common} {bounds.count(most_common) / len(bounds):.0%}",
    ]


def json(findings: Findings) -> ReportParts:
    """Build the ``steps`` of the JSON report, one per rank and step; empty for very many ranks."""
    return {"steps": [msgspec.to_builtins(step) for step in findings.steps] if findings.lists_steps else []}


def html(findings: Findings, page: PageContext) -> Content | None:
    """Build a heat map of exposed time and a table of steps; None without steps and for very many ranks."""
    if not findings.lists_steps or not findings.steps:
        return None
    columns = (
        Column("rank", "count"), Column("pass"), Column("call", "count"), Column("step", "count"),
        Column("block", "time"), Column("step", "time"), Column("hops", "count"), Column("MB", "bytes"),
        Column("wait", "time"), Column("wire", "time"), Column("exposed", "time"), Column("bound by"),
    )  # fmt: skip
    rows = [
        [step.rank, step.phase, step.call, step.step, step.block_ns, step.end_ns - step.start_ns, step.hops, step.bytes,
         step.wait_ns, step.wire_ns, step.exposed_ns, step.bound or "not known"]
        for step in findings.steps
    ]  # fmt: skip
    heat_map = page.figures.waiting(findings.steps, [rank.rank for rank in findings.attribution.ranks])
    origin = origins_of(findings.attribution)
    spans = [span_of(step.rank, step.start_ns, step.end_ns, origin) for step in findings.steps]
    table = Table("", columns, rows, "run.steps()").page("span", spans)
    return Content(heat_map, [table], [MEANINGS["waiting"]] if heat_map else [])
