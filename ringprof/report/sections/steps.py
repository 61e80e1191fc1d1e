"""Ring steps: what each block took, what should have hidden behind it, and what did not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.steps.steps import Step
from ringprof.analysis.transfers.hops import total
from ringprof.report.page.document import Content
from ringprof.report.tables import Column, Table
from ringprof.report.terms import MEANINGS
from ringprof.report.text import TextStyle

MOST_STEPS_LISTED = 100
"""Rows up to which every rank's step is shown; beyond, one row a step over all ranks."""

_SOURCES = {
    "ringprof": "as ringprof's strategies named them",
    "annotation": "as the trace names them",
    "order": "from the order of hops and attention kernels",
}


_COLUMNS = (
    Column("block", "time"), Column("step", "time", 2), Column("hops", drop=1), Column("wait", "time"),
    Column("wire", "time"), Column("exposed", "time"), Column("of it\nwire", "time", 3), Column("bound by"),
)  # fmt: skip


def terminal(found: Findings, style: TextStyle) -> list[str]:
    """A row a rank and step, or a row a step where they are many."""
    steps = found.steps
    if not steps:
        if found.attribution.on_cpu:
            return [style.wrap("ring steps: a CPU trace does not tell when a transfer ran, so none are told")]
        nothing = "none found; neither annotations nor the order of hops and attention tell them"
        return [style.wrap(f"ring steps: {nothing}")]
    groups: dict[str, list[Step]] = defaultdict(list)
    listed = len(steps) <= MOST_STEPS_LISTED
    several = any(step.call for step in steps)
    for step in steps:
        call = f"call {step.call} " if several else ""
        whose = f"rank {step.rank} {call}" if listed else ""
        groups[f"{whose}{step.phase} {step.step}"].append(step)
    made = Table("ring steps", (Column(""), *_COLUMNS), [[name, *_means(mine)] for name, mine in groups.items()])
    notes = [f"steps {_SOURCES[steps[0].source]}"]
    if not listed:
        notes.append("means over ranks and calls; what most are bound by, and how many of them")
    return [made.text(style) + "\n" + style.wrap("\n".join(notes), "dim")]


def _means(steps: Sequence[Step]) -> list[Any]:
    hops = {step.hops for step in steps}
    bounds = [step.bound or "-" for step in steps]
    most = max(dict.fromkeys(bounds), key=bounds.count)
    return [
        _mean([step.block_ns for step in steps]),
        _mean([step.end_ns - step.start_ns for step in steps]),
        hops.pop() if len(hops) == 1 else f"{min(hops)}-{max(hops)}",
        _mean([step.wait_ns for step in steps]),
        _mean([step.wire_ns for step in steps]),
        _mean([step.exposed_ns for step in steps]),
        _mean([step.exposed_wire_ns for step in steps]),
        most if len(set(bounds)) == 1 else f"{most} {bounds.count(most) / len(bounds):.0%}",
    ]


def _mean(values: list[int | None]) -> float | None:
    whole = total(values)
    return None if whole is None else whole / len(values)


def json(found: Findings) -> dict[str, Any]:
    """A rank and step an item; none of very many ranks."""
    return {"steps": [msgspec.to_builtins(step) for step in found.steps] if found.lists_steps else []}


def html(found: Findings, report: dict[str, Any], figures: Any) -> Content | None:
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
    heat = figures.waiting(found.steps, [rank.rank for rank in found.attribution.ranks])
    table = Table("", columns, rows).page("run.steps()")
    return Content(heat, [table], [MEANINGS["waiting"]] if heat else [])
