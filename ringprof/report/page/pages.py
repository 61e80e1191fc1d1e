"""The pages: of one run or its traces, of a comparison, of a sweep."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ringprof.analysis.findings.changes import Change
from ringprof.analysis.findings.comparison import WATERFALL_PREFIX, Comparison, Difference, Measurement, Recordings
from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.recording_spread import SAME_SESSION
from ringprof.analysis.findings.uncertainty import ratio_interval, significantly_different
from ringprof.analysis.findings.waterfall import WATERFALL_LABELS
from ringprof.errors import UsageError, nearest
from ringprof.formatting import percent
from ringprof.report import palette
from ringprof.report.comparison import merged_notice, missing, spread_notices, verdict_lines, work_notices
from ringprof.report.page.document import Cell, Content, Document, PageContext, PageSection, PageTable, number, text
from ringprof.report.page.html import drawing
from ringprof.report.sections import SECTIONS
from ringprof.report.sections.run import what_ran
from ringprof.report.sweep import COLUMNS
from ringprof.report.tables import Column, Table
from ringprof.report.terminal import header_of
from ringprof.report.terms import LABELS, MEANINGS
from ringprof.report.text import LONGEST_SENTENCE, binary_size, clean, duration, rate
from ringprof.report.timeline import timeline_of
from ringprof.trace.columns import NOTES

_DRAWN = ("timeline", "waterfall")
"""What a part of the page is of where nobody says."""


def run_document(found: Findings, paths: Sequence[str], name: str) -> Document:
    """The whole page; ``paths``: what was read."""
    page, sections = PageContext(drawing(), paths), []
    for one in SECTIONS:
        content = one.html(found, page) if one.html else None
        if content is not None:
            sections.append(PageSection(one.name, one.title, MEANINGS.get(one.name, ""), content))
    attribution = found.attribution
    if any(warning.code not in NOTES for warning in attribution.warnings):
        # They change how everything after them is to be read.
        sections.sort(key=lambda section: section.anchor != "warnings")
    header = header_of(attribution, found.summary)
    what = f"{what_ran(attribution.run)} · {header}" if attribution.run else header
    step = clean(found.next_step.text, LONGEST_SENTENCE) if found.next_step else ""
    return Document(clean(name), what, found.verdict, _tiles(found), sections, step)


def part_document(found: Findings, paths: Sequence[str], name: str, wanted: Sequence[str] = ()) -> Document:
    """Some sections of the page, under a line that says what was run; without a name those that are drawn over time.

    Raises `UsageError` for a section that there is none of.
    """
    whole = run_document(found, paths, name)
    by_name = {section.anchor: section for section in whole.sections}
    shown = wanted or [section for section in _DRAWN if section in by_name]
    for section in shown:
        if section not in by_name:
            raise UsageError(f"no section {section!r}{nearest(section, by_name)}; there are: {', '.join(by_name)}")
    return Document(whole.title, whole.subtitle, (), (), [by_name[section] for section in shown])


def _tiles(found: Findings) -> list[tuple[str, str]]:
    summary, rates = found.summary, found.summary.rates
    tiles = [(duration(summary.slowest_wall_ns), f"wall of rank {summary.slowest_rank}, the slowest")]
    if rates.tflops is not None:
        how = "predicted" if found.attribution.run and found.attribution.run.predicted else "achieved"
        tiles.insert(0, (rate(rates.tflops), f"{how}, per device"))
    if rates.block_tflops is not None:
        tiles.append((rate(rates.block_tflops), "attention kernels in the run"))
    if rates.solo_tflops is not None:
        tiles.append((rate(rates.solo_tflops), "the same blocks alone"))
    tiles.append((percent(summary.exposed_mean), "exposed communication, of the mean wall"))
    if summary.overlap_ratio is not None:
        tiles.append((percent(summary.overlap_ratio), "of communication hidden"))
    if rates.peak_memory_bytes:
        tiles.append((binary_size(rates.peak_memory_bytes), "peak memory a device"))
    return tiles


_TIMES = ("compute", "exposed_comm", "exposed_memory", "idle")
"""Parts of the time; in figures with ``_ms``."""


def comparison_document(found: Comparison) -> Document:
    """Entries side by side: speed, where the time went, memory, and every figure with its ratio to the first."""
    figures = drawing()

    names = [entry.label for entry in found.entries]
    sections = _changes(found, figures)
    speeds = [(entry.label, entry.figures["tflops"].value) for entry in found.entries if "tflops" in entry.figures]
    if speeds:
        bars = figures.stacked([name for name, _ in speeds], _one("TFLOP/s", [value for _, value in speeds]), "TFLOP/s")
        sections.append(PageSection("speed", "Speed", MEANINGS["tflops"], Content(bars)))
    timed = [entry for entry in found.entries if all(f"{name}_ms" in entry.figures for name in _TIMES)]
    if timed:
        drawn = Content(_shares(timed, figures))
        sections.append(PageSection("shares", "Where the time went", MEANINGS["parts"], drawn))
    kept = [entry for entry in found.entries if "peak_memory_mib" in entry.figures]
    if kept:
        values = _one("MiB", [entry.figures["peak_memory_mib"].value for entry in kept])
        bars = figures.stacked([entry.label for entry in kept], values, "MiB")
        sections.append(PageSection("memory", "Peak memory", MEANINGS["peak_memory"], Content(bars)))
    every = Content(tables=[figure_table(found)], lines=[*merged_notice(found), *spread_notices(found)])
    sections.append(PageSection("figures", "Every figure", MEANINGS["comparison"], every))
    differing = Content(tables=[_settings_table(found)])
    sections.append(PageSection("differences", "What differs in settings", "", differing))
    warnings = [clean(f"{entry.label}: {text}") for entry in found.entries for text in entry.warnings]
    subtitle = " · ".join(f"{place or 'base'}: {clean(name)}" for place, name in enumerate(names))
    verdict = [*work_notices(found), *warnings, *verdict_lines(found, [clean(name) for name in names])]
    return Document("Comparison", subtitle, [clean(line, LONGEST_SENTENCE) for line in verdict], [], sections)


def _changes(found: Comparison, figures: Any) -> list[PageSection]:
    """Of two runs: what became of the time, by part, step and kernel, and both timelines on one axis."""
    if found.changes is None:
        return []
    parts, steps, kernels = found.changes.parts, found.changes.steps, found.changes.kernels
    by_part = _change_table("part", parts, WATERFALL_LABELS)
    drawn = Content(figures.changes(parts, WATERFALL_LABELS), [by_part], merged_notice(found))
    sections = [PageSection("changes", "What changed", MEANINGS["changes"], drawn)]
    timelines = _timelines(found, figures)
    if timelines is not None:
        sections.append(PageSection("timelines", "Both timelines", MEANINGS["timelines"], Content(timelines)))
    for anchor, title, rows in (("steps", "By ring step", steps), ("kernels", "By kernel", kernels)):
        if rows:
            table = Content(tables=[_change_table(anchor.removesuffix("s"), rows, {})])
            sections.append(PageSection(f"changed-{anchor}", title, MEANINGS[f"changed_{anchor}"], table))
    return sections


def _timelines(found: Comparison, figures: Any) -> Any | None:
    """One above the other; None where a run has no device activities or too many ranks."""
    if any(run.attribution.on_cpu or not run.lists_steps for run in found.runs):
        return None
    drawn = [
        (timeline_of(run.attribution, run.steps, run.finder.by_activity), [rank.rank for rank in run.attribution.ranks])
        for run in found.runs
    ]
    return figures.timelines(drawn, [entry.label for entry in found.entries])


def _change_table(title: str, rows: Sequence[Change], labels: Mapping[str, str]) -> PageTable:
    columns = (Column(title), Column("base", "time"), Column("other", "time"), Column("change", "time"),
               Column("of the base's wall", "share"))  # fmt: skip
    shown = [
        [labels.get(one.what, one.what), one.base_ns, one.other_ns, one.other_ns - one.base_ns, one.share]
        for one in rows
    ]
    return Table("", columns, shown, "compare --format json").page()


def _one(name: str, values: Sequence[float]) -> dict[str, tuple[str, Sequence[float]]]:
    return {name: (palette.BLUE, values)}


def _shares(entries: Sequence[Measurement], figures: Any) -> Any:
    parts = {}
    for name in _TIMES:
        values = []
        for entry in entries:
            whole = sum(entry.figures[f"{part}_ms"].value for part in _TIMES) or 1.0
            values.append(100 * entry.figures[f"{name}_ms"].value / whole)
        parts[LABELS[name]] = (palette.PART_COLOURS[name], values)
    return figures.stacked([entry.label for entry in entries], parts, "%")


def figure_table(found: Comparison) -> PageTable:
    """Every figure, each entry's with its ratio to the first entry's."""
    against = {(one.figure, one.entry): one for one in found.differences}
    titles = ["figure", "unit"]
    for place, entry in enumerate(found.entries):
        titles += [entry.label] if place == 0 else [entry.label, "to the first", "95 %", ""]
    rows = []
    for name in found.figures:
        known = [entry.figures[name] for entry in found.entries if name in entry.figures]
        percent = known[0].unit == "share"
        row: list[Cell] = [text(_label(name)), text("%" if percent else known[0].unit)]
        for place, entry in enumerate(found.entries):
            figure = entry.figures.get(name)
            row.append(number(None if figure is None else figure.value * (100 if percent else 1)))
            if place:
                row += _against(against.get((name, place)))
        rows.append(row)
    return PageTable([clean(title) for title in titles], rows)


def _label(name: str) -> str:
    if name.startswith(WATERFALL_PREFIX):
        return "waterfall: " + WATERFALL_LABELS[name.removeprefix(WATERFALL_PREFIX).removesuffix("_ms")]
    plain = name.removesuffix("_ms").removesuffix("_mib")
    return LABELS.get(plain, plain.replace("_", " "))


def _against(one: Difference | None) -> list[Cell]:
    interval = number(None)
    if one is not None and one.low is not None and one.high is not None:
        interval = Cell(f"{one.low:.3f} to {one.high:.3f}", one.low, numeric=True)
    return [number(None if one is None else one.ratio), interval, text("" if one is None else one.verdict)]


def _settings_table(found: Comparison) -> PageTable:
    rows = [
        [text(name), *(text(value or missing(name)) for value in values)] for name, values in found.differing.items()
    ]
    return PageTable(["setting", *(clean(entry.label) for entry in found.entries)], rows)


Series = list[tuple[float, float]]


def sweep_document(rows: Sequence[Mapping[str, Any]], name: str) -> Document:
    """All rows of a sweep: speed over sequence length under the kernels' own rate, shares, memory, the table."""
    figures = drawing()

    done = [row for row in rows if row["status"] == "ok"]
    sections = []
    if done:
        speed: defaultdict[str, Series] = defaultdict(list)
        memory: defaultdict[str, Series] = defaultdict(list)
        ceiling: dict[float, float] = {}
        for row in done:
            speed[_series(row)].append((row["seq"], row["tflops"]))
            if row["memory_mib"] is not None:
                memory[_series(row)].append((row["seq"], row["memory_mib"]))
            if row["of_kernel_rate"]:
                ceiling[row["seq"]] = max(ceiling.get(row["seq"], 0.0), row["tflops"] / row["of_kernel_rate"])
        top = "the kernel's own rate"
        lines = {**speed, **({top: list(ceiling.items())} if ceiling else {})}
        peers = {_series(row) for row in done if row.get("peer")}
        drawn = Content(figures.lines(*_in_flops(lines), top, peers))
        sections.append(PageSection("speed", "Speed", MEANINGS["sweep_speed"], drawn))
        drawn = Content(_sweep_shares(done, figures))
        sections.append(PageSection("shares", "Where the time went", MEANINGS["shares"], drawn))
        if memory:
            drawn = Content(figures.lines("MiB", memory, "", peers))
            sections.append(PageSection("memory", "Peak memory", MEANINGS["peak_memory"], drawn))
    sections.append(PageSection("rows", "Every row", MEANINGS["sweep"], Content(tables=[_row_table(rows)])))
    counts = f"{len(rows)} rows, {len(rows) - len(done)} of them without a result"
    return Document(clean(name), counts, _fastest(done), [], sections)


def _in_flops(lines: Mapping[str, Series]) -> tuple[str, Mapping[str, Series]]:
    """The unit that fits the largest, and all in it: a CPU's thousandths are no numbers for an axis."""
    if max(speed for points in lines.values() for _, speed in points) >= 1:
        return "TFLOP/s", lines
    return "GFLOP/s", {name: [(seq, 1e3 * speed) for seq, speed in points] for name, points in lines.items()}


def _fastest(done: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each length, the fastest, by how much, and what the timings do not prove to be slower."""
    lines = []
    for seq in sorted({row["seq"] for row in done}):
        rows = sorted((row for row in done if row["seq"] == seq), key=lambda row: -row["tflops"])
        first = rows[0]
        speed = f"{first['forward_backward_ms']:,.1f} ms, {rate(first['tflops'])}"
        slower = [
            row
            for row in rows[1:]
            if significantly_different(_repeated(first), _repeated(row), spread=_spread(first, row))
        ]
        level = [row for row in rows[1:] if row not in slower]
        line = f"{seq:,} tokens: {_series(first)} {'took the least time' if level else 'is fastest'}, {speed}"
        if first["of_kernel_rate"]:
            line += f", {percent(first['of_kernel_rate'])} of the kernel's own rate"
        if level:
            line += f"; not proved slower: {', '.join(_behind(first, row) for row in level)}"
        if slower:
            line += f"; {'proved slower' if level else 'next'}: {_behind(first, slower[0])}"
        lines.append(clean(line, LONGEST_SENTENCE))
    return lines


def _repeated(row: Mapping[str, Any]) -> Recordings:
    return (row["iterations_ms"],)


def _spread(first: Mapping[str, Any], row: Mapping[str, Any]) -> float:
    """Return the standard deviation assumed of the ratio of two rows of a sweep, each a single recording."""
    return math.hypot(*(SAME_SESSION.share_of(median(each["iterations_ms"] or [0.0])) for each in (first, row)))


def _behind(first: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """By how much a row is slower than the first, with the 95 % interval."""
    found = ratio_interval(_repeated(first), _repeated(row), spread=_spread(first, row))
    sure = f", {100 * (found[0] - 1):.1f} to {100 * (found[1] - 1):.1f}" if found else ""
    return f"{_series(row)} ({percent(first['tflops'] / row['tflops'] - 1)}{sure})"


def _series(row: Mapping[str, Any]) -> str:
    return " ".join(str(part) for part in (row["strategy"], row["params"], row["kernel"]) if part)


def _sweep_shares(rows: Sequence[Mapping[str, Any]], figures: Any) -> Any:
    compute = [100 * (row["compute_share"] or 0.0) for row in rows]
    exposed = [100 * (row["exposed_comm_share"] or 0.0) for row in rows]
    rest = [max(0.0, 100 - a - b) for a, b in zip(compute, exposed, strict=True)]
    parts = {
        "computation": (palette.BLUE, compute),
        "exposed communication": (palette.WIRE, exposed),
        "memory operations and idle": (palette.GREY, rest),
    }
    return figures.stacked([f"{_series(row)} · {row['seq']:,}" for row in rows], parts, "% of the profiled iteration")


def _row_table(rows: Sequence[Mapping[str, Any]]) -> PageTable:
    shown = []
    for row in rows:
        cells = []
        for column in COLUMNS:
            value = row.get(column.key)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                cells.append(Cell(format(value * column.factor, column.form or ","), value, numeric=True))
            else:
                cells.append(text("-" if value in (None, "") else value))
        shown.append([*cells, text(row["status"] if row["status"] == "ok" else f"{row['status']}: {row['reason']}")])
    return PageTable([*(column.title for column in COLUMNS), "status"], shown)
