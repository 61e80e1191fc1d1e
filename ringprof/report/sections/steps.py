"""Ring steps: what each block took, what should have hidden behind it, and what did not."""

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

_SOURCES = {
    "ringprof": "as ringprof's strategies named them",
    "annotation": "as the trace names them",
    "order": "from the order of hops and attention kernels",
}


COLUMNS = (
    Column(""), Column("block", "time"), Column("step", "time", 2), Column("hops", drop=1), Column("wait", "time"),
    Column("wire", "time"), Column("exposed", "time"), Column("of it\nwire", "time", 3), Column("bound by"),
)  # fmt: skip
WORST = (Column("worst\nrank", "count"), Column("it\nexposes", "time"))


def terminal(found: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """A row a step with means over ranks and calls and the rank that exposes most; or a row a rank and step."""
    steps = found.steps
    if not steps:
        if found.attribution.on_cpu:
            return [style.wrap("ring steps: a CPU trace does not tell when a transfer ran, so none are told")]
        nothing = "none found; neither annotations nor the order of hops and attention tell them"
        return [style.wrap(f"ring steps: {nothing}")]
    ranks = len({step.rank for step in steps})
    groups: dict[str, list[Step]] = defaultdict(list)
    several = any(step.call for step in steps)
    for step in steps:
        whose = f"rank {step.rank} " + (f"call {step.call} " if several else "") if listing.everything else ""
        groups[f"{whose}{step.phase} {step.step}"].append(step)
    worst = WORST if ranks > 1 and not listing.everything else ()
    rows = [[name, *_means(mine), *(_worst(mine) if worst else ())] for name, mine in groups.items()]
    title = f"ring steps, mean of {ranks} ranks" if worst else "ring steps"
    notes = [f"steps {_SOURCES[steps[0].source]}"]
    if worst:
        notes.append("means over ranks and calls; what most are bound by, and how many of them; every rank's: --all")
    made = Table(title, (*COLUMNS, *worst), rows, "--all").listed(style, listing)
    return [made + "\n" + style.wrap("\n".join(notes), "dim")]


def _worst(steps: Sequence[Step]) -> tuple[int, float]:
    """The rank that exposes most in these steps, and how much in one of them."""
    by_rank: dict[int, list[int]] = defaultdict(list)
    for step in steps:
        by_rank[step.rank].append(step.exposed_ns)
    means = {rank: fmean(times) for rank, times in by_rank.items()}
    rank = max(means, key=lambda one: means[one])
    return rank, means[rank]


def _means(steps: Sequence[Step]) -> list[Any]:
    hops = {step.hops for step in steps}
    bounds = [step.bound or "-" for step in steps]
    most = max(dict.fromkeys(bounds), key=bounds.count)
    return [
        mean([step.block_ns for step in steps]),
        mean([step.end_ns - step.start_ns for step in steps]),
        hops.pop() if len(hops) == 1 else f"{min(hops)}-{max(hops)}",
        mean([step.wait_ns for step in steps]),
        mean([step.wire_ns for step in steps]),
        mean([step.exposed_ns for step in steps]),
        mean([step.exposed_wire_ns for step in steps]),
        most if len(set(bounds)) == 1 else f"{most} {bounds.count(most) / len(bounds):.0%}",
    ]


def json(found: Findings) -> ReportParts:
    """A rank and step an item; none of very many ranks."""
    return {"steps": [msgspec.to_builtins(step) for step in found.steps] if found.lists_steps else []}


def html(found: Findings, page: PageContext) -> Content | None:
    """The drawn waits, and a row a rank and step; None where there are no steps, and of very many ranks."""
    if not found.lists_steps or not found.steps:
        return None
    columns = (
        Column("rank", "count"), Column("pass"), Column("call", "count"), Column("step", "count"),
        Column("block", "time"), Column("step", "time"), Column("hops", "count"), Column("MB", "bytes"),
        Column("wait", "time"), Column("wire", "time"), Column("exposed", "time"), Column("bound by"),
    )  # fmt: skip
    rows = [
        [one.rank, one.phase, one.call, one.step, one.block_ns, one.end_ns - one.start_ns, one.hops, one.bytes,
         one.wait_ns, one.wire_ns, one.exposed_ns, one.bound or "not known"]
        for one in found.steps
    ]  # fmt: skip
    heat = page.figures.waiting(found.steps, [rank.rank for rank in found.attribution.ranks])
    table = Table("", columns, rows, "run.steps()").page()
    return Content(heat, [table], [MEANINGS["waiting"]] if heat else [])
