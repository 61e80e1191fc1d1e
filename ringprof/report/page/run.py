"""The page of one run, or of the traces of one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.kinds.kinds import KINDS
from ringprof.analysis.steps.steps import Step
from ringprof.report.lanes import timeline_of
from ringprof.report.page.document import Cell, Document, Section, Table, drawing, number, text
from ringprof.report.terms import LABELS, MEANINGS
from ringprof.report.terms import WATERFALL as WATERFALL_LABELS
from ringprof.report.text import binary_size, clean, duration, percent, rate

_THINNED = "Neighbouring short activities are drawn as one bar, so that the page stays quick."
MOST_ROWS = 2_000
"""Rows of a table beyond which the page says how many it leaves out."""


_LEFT_OUT = (
    "Of so many ranks this page leaves out timeline, ring steps, kernels and hops: "
    "report on the files of a few ranks to see those."
)


def run_document(found: Findings, report: dict[str, Any], name: str) -> Document:
    """The whole page; ``report`` is the JSON report of the same findings."""
    figures = drawing()
    from ringprof.report.terminal import header_of

    attribution = found.attribution
    ranks = [rank.rank for rank in attribution.ranks]
    sections = [
        _waterfall(found, figures),
        Section("breakdown", "Breakdown by rank", MEANINGS["breakdown"], figures.breakdown(report["ranks"]),
                [_rank_table(report["ranks"])], [] if found.lists_steps else [_LEFT_OUT]),
    ]  # fmt: skip
    if not attribution.on_cpu and found.lists_steps:
        drawn = timeline_of(attribution, found.steps)
        lines = [_THINNED] if drawn.thinned else []
        sections.append(
            Section("timeline", "Timeline", MEANINGS["timeline"], figures.timeline(drawn, ranks), lines=lines)
        )
    if found.lists_steps and found.steps:
        heat = figures.waiting(found.steps, ranks)
        sections.append(Section("steps", "Ring steps", MEANINGS["steps"], heat, [_step_table(found.steps)],
                                [MEANINGS["waiting"]] if heat else []))  # fmt: skip
    if found.lists_steps:
        sections.append(Section("kernels", "Kernels", MEANINGS["kernels"], tables=[_kernel_table(attribution)]))
    if found.lists_steps and any(rank.hop_totals.count for rank in attribution.ranks):
        sections.append(Section("hops", "Hops and bandwidth", MEANINGS["hops"], tables=_hop_tables(found)))
    sections += [_settings(report), *_warnings(report)]
    return Document(clean(name), header_of(attribution, found.summary), found.verdict, _tiles(found), sections)


def _tiles(found: Findings) -> list[tuple[str, str]]:
    summary, rates = found.summary, found.summary.rates
    tiles = [(duration(summary.slowest_wall_ns), f"wall of the slowest rank ({summary.slowest_rank})")]
    if rates.tflops is not None:
        tiles.insert(0, (rate(rates.tflops), "achieved, per device"))
    if rates.block_tflops is not None:
        tiles.append((rate(rates.block_tflops), "attention kernels in the run"))
    if rates.solo_tflops is not None:
        tiles.append((rate(rates.solo_tflops), "the same blocks alone"))
    tiles.append((percent(summary.exposed_mean), "exposed communication, mean"))
    if summary.overlap_ratio is not None:
        tiles.append((percent(summary.overlap_ratio), "of communication hidden"))
    if rates.peak_memory_bytes:
        tiles.append((binary_size(rates.peak_memory_bytes), "peak memory a device"))
    return tiles


def _waterfall(found: Findings, figures: Any) -> Section:
    waterfall = found.waterfall
    rows = [
        [text(WATERFALL_LABELS[part.part]), number(part.time_ns, 3, 1e6), number(100 * part.share, 1),
         number(part.tflops, 1), text(part.evidence)]
        for part in waterfall.parts
    ]  # fmt: skip
    bounds = waterfall.bounds
    lines = [
        f"Bounds on the wall of {duration(waterfall.wall_ns)}: {duration(bounds.free_ns)} if communication were "
        f"free, {duration(bounds.balanced_ns)} if ranks were balanced, {duration(bounds.hidden_ns)} if they were and "
        "all were hidden that can be."
    ]
    table = Table(["part", "ms", "% of wall", "TFLOP/s after it", "evidence"], rows)
    return Section("waterfall", "Waterfall", MEANINGS["waterfall"], figures.waterfall(waterfall), [table], lines)


def _rank_table(ranks: Sequence[dict[str, Any]]) -> Table:
    titles = ["rank", "host", "wall ms", "compute ms", "exposed comm ms", "exposed memory ms", "idle ms", "overlap %",
              "hop wait ms", "hop wire ms", "wire GB/s"]  # fmt: skip
    rows = []
    for rank in ranks:
        hops = rank["hops"] or {}
        times = [rank[f"{name}_ns"] for name in ("wall", "compute", "exposed_comm", "exposed_memory", "idle")]
        overlap = rank["overlap_ratio"]
        rows.append([
            number(rank["rank"], 0), text(rank["host"] or "unknown"), *(number(time, 3, 1e6) for time in times),
            number(None if overlap is None else 100 * overlap, 1), number(hops.get("wait_ns"), 3, 1e6),
            number(hops.get("wire_ns"), 3, 1e6), number(hops.get("wire_gbps"), 1),
        ])  # fmt: skip
    return Table(titles, rows)


def _step_table(steps: Sequence[Step]) -> Table:
    titles = ["rank", "pass", "call", "step", "block ms", "step ms", "hops", "MB", "wait ms", "wire ms", "exposed ms",
              "bound by"]  # fmt: skip
    rows = [
        [number(one.rank, 0), text(one.phase), number(one.call, 0), number(one.step, 0), number(one.block_ns, 3, 1e6),
         number(one.end_ns - one.start_ns, 3, 1e6), number(one.hops, 0), number(one.bytes, 1, 1e6),
         number(one.wait_ns, 3, 1e6), number(one.wire_ns, 3, 1e6), number(one.exposed_ns, 3, 1e6),
         text(one.bound or "not known")]
        for one in steps[:MOST_ROWS]
    ]  # fmt: skip
    return Table(titles, rows, _left_out(len(steps), "run.steps()"))


def _left_out(count: int, where: str) -> str:
    return f"{count - MOST_ROWS} more rows are left out; {where} has all." if count > MOST_ROWS else ""


def _kernel_table(attribution: Attribution) -> Table:
    count: defaultdict[tuple[str, str], int] = defaultdict(int)
    time: defaultdict[tuple[str, str], int] = defaultdict(int)
    for rank in attribution.ranks:
        trace = rank.classified.trace
        for at in rank.window.activities().tolist() if not rank.on_cpu else ():
            key = trace.names[trace.activities.name[at]], KINDS[rank.classified.kind[at]]
            count[key] += 1
            time[key] += int(trace.activities.end_ns[at] - trace.activities.start_ns[at])
    whole = sum(time.values()) or 1
    rows: list[list[Cell]] = [
        [text(name), text(LABELS[kind]), number(count[name, kind], 0), number(total, 3, 1e6),
         number(total / count[name, kind], 1, 1e3), number(100 * total / whole, 1)]
        for (name, kind), total in sorted(time.items(), key=lambda item: -item[1])
    ]  # fmt: skip
    titles = ["name", "kind", "calls", "ms", "mean µs", "% of all"]
    return Table(titles, rows[:MOST_ROWS], _left_out(len(rows), "--format json"))


def _hop_tables(found: Findings) -> list[Table]:
    links = [
        [text(LABELS[row.kind]), text(row.link), number(row.kernels, 0), number(row.sent_bytes, 1, 1e6),
         number(None if row.wait_share is None else 100 * row.wait_share, 1), number(row.wire_gbps, 1),
         number(row.best_gbps, 1)]
        for row in found.summary.communication
    ]  # fmt: skip
    hops = [hop for rank in found.attribution.ranks for hop in rank.hops]
    first = min(hop.start_ns for hop in hops)
    rows = []
    for hop in hops[:MOST_ROWS]:
        sends = dict.fromkeys(message.peer for part in hop.parts for message in part.transfer.sends)
        size, wire = hop.sent_bytes, hop.wire_ns
        rows.append([
            number(hop.rank, 0), number(hop.number, 0), text(", ".join(map(str, sends)) or "-"), number(size, 1, 1e6),
            number(hop.start_ns - first, 3, 1e6), number(hop.end_ns - hop.start_ns, 3, 1e6),
            number(hop.wait_ns, 3, 1e6), number(wire, 3, 1e6),
            number(size / wire if size is not None and wire else None, 1), number(hop.exposed_ns, 3, 1e6),
        ])  # fmt: skip
    return [
        Table(["kind", "link", "kernels", "MB sent", "% waiting", "GB/s", "best GB/s"], links),
        Table(["rank", "hop", "to", "MB", "start ms", "ms", "wait ms", "wire ms", "GB/s", "exposed ms"], rows,
              _left_out(len(hops), "run.hops()")),
    ]  # fmt: skip


def _settings(report: dict[str, Any]) -> Section:
    rows = [[text("source"), text(", ".join(report["source"]["paths"]))]]
    run = report["run"] or {}
    for group in ("workload", "topology", "strategy", "verification"):
        value = run.get(group) or {}
        rows += [[text(f"{group}: {key}"), text(item)] for key, item in value.items() if item is not None]
    rows += [[text(key), text(run[key])] for key in ("name", "created", "kernel") if run.get(key)]
    return Section(
        "settings", "Settings and environment", MEANINGS["settings"], tables=[Table(["what", "value"], rows)]
    )


def _warnings(report: dict[str, Any]) -> list[Section]:
    rows = [
        [
            text("all" if one["rank"] is None else one["rank"]),
            text(one["code"]),
            text(one["message"]),
            number(one["count"], 0),
        ]
        for one in report["warnings"]
    ]
    return [Section("warnings", "Warnings", tables=[Table(["rank", "code", "what", "times"], rows)])] if rows else []
