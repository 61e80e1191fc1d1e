"""Whole pages: of a run or its traces, of a comparison, and of a sweep."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from msgspec.structs import replace

from ringprof.analysis.findings.changes import Change
from ringprof.analysis.findings.comparison import Comparison, Difference
from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.metric import WATERFALL_PREFIX, Measurement, Recordings
from ringprof.analysis.findings.metric_table import METRICS
from ringprof.analysis.findings.parts import WATERFALL_LABELS
from ringprof.analysis.findings.recording_spread import SAME_SESSION
from ringprof.analysis.findings.time_table import USUAL_PARTS
from ringprof.analysis.findings.uncertainty import ratio_interval, significantly_different
from ringprof.analysis.findings.waterfall import ATTENTION_PARTS
from ringprof.common.formatting import milliseconds, percent, significant
from ringprof.errors import UsageError, nearest
from ringprof.report import palette
from ringprof.report.comparison import differing_settings, merged_notice, spread_notices, verdict_lines, work_notices
from ringprof.report.page import bars
from ringprof.report.page.document import (
    BarChart,
    Cell,
    Content,
    Document,
    PageContext,
    PageSection,
    PageTable,
    number,
    text,
)
from ringprof.report.page.html import drawing
from ringprof.report.sections import SECTIONS
from ringprof.report.sections.run import describe_run
from ringprof.report.sweep import COLUMNS
from ringprof.report.tables import Column, Table
from ringprof.report.terminal import header_of
from ringprof.report.terms import LABELS, MEANINGS
from ringprof.report.text import LONGEST_SENTENCE, binary_size, clean, duration, rate, short_count
from ringprof.report.timeline import legend_of, timeline_of
from ringprof.trace.columns import NOTES

_DEFAULT_SECTIONS = ("timeline", "waterfall")
"""Sections that a part of a page shows where none are named."""
_FIRST_SECTIONS = ("breakdown", "timeline", "waterfall")
"""Sections that answer where the time went; the others follow in the order of `SECTIONS`."""
_OPEN_SECTIONS = (*_FIRST_SECTIONS, "rates")
"""Sections that are open on a run's page; the others show their headings until a reader opens them."""


def run_document(findings: Findings, paths: Sequence[str], name: str) -> Document:
    """Build the whole page of a run; ``paths`` are the files that were read."""
    page, sections = PageContext(drawing(), paths), []
    for section in SECTIONS:
        content = section.html(findings, page) if section.html else None
        if content is not None:
            folded = section.name not in _OPEN_SECTIONS
            sections.append(PageSection(section.name, section.title, section.meaning, content, folded))
    attribution = findings.attribution
    first: tuple[str, ...] = _FIRST_SECTIONS
    if any(warning.code not in NOTES for warning in attribution.warnings):
        # Warnings come first: they change how everything after them is to be read.
        first = ("warnings", *first)
        sections = [section if section.anchor != "warnings" else replace(section, folded=False) for section in sections]
    sections.sort(key=lambda shown: first.index(shown.anchor) if shown.anchor in first else len(first))
    header = header_of(attribution, findings.summary)
    subtitle = f"{describe_run(attribution.run, in_title=True)} · {header}" if attribution.run else header
    return Document(clean(name), subtitle, findings.verdict, _tiles(findings), sections, _headline(findings))


def _headline(findings: Findings) -> str:
    """Return the largest loss, what to do about it and what that gains; without a loss, the verdict's first line."""
    step, waterfall = findings.next_step, findings.waterfall
    if step is None:
        return clean(findings.verdict[0], LONGEST_SENTENCE) if findings.verdict else ""
    line = clean(step.text, LONGEST_SENTENCE)
    # Of attention, the sentence says what a faster kernel saves; of a bounded part, what free communication gains.
    says_gain = step.part in ATTENTION_PARTS or step.time_ns < waterfall.of(step.part)
    gain = f" By itself it is worth at most {milliseconds(step.time_ns)}, {percent(step.share)} of the time."
    return line if says_gain else line + gain


def part_document(findings: Findings, paths: Sequence[str], name: str, wanted: Sequence[str] = ()) -> Document:
    """Build a page of some sections below the run's header; by default those that are drawn over time.

    Raises `UsageError` for a section that the page does not have.
    """
    page = run_document(findings, paths, name)
    by_name = {section.anchor: section for section in page.sections}
    shown = wanted or [section for section in _DEFAULT_SECTIONS if section in by_name]
    for section in shown:
        if section not in by_name:
            raise UsageError(f"no section {section!r}{nearest(section, by_name)}; there are: {', '.join(by_name)}")
    opened = [replace(by_name[section], folded=False) for section in shown]
    return Document(page.title, page.subtitle, (), (), opened)


_TILE_FORMATS: dict[str, Callable[[Any], str]] = {"TFLOP/s": rate, "share": percent, "bytes": binary_size}


def _tiles(findings: Findings) -> list[tuple[str, str]]:
    summary, run = findings.summary, findings.attribution.run
    values = [(row, row.value(findings)) for row in METRICS if row.tile]
    # A peak memory of 0 bytes says nothing: the program allocated none by torch.
    tiles = [
        (_TILE_FORMATS[row.unit](value), row.tile)
        for row, value in values
        if value is not None and (value or row.unit != "bytes")
    ]
    if run and run.predicted:
        tiles = [(value, label.replace("achieved", "predicted")) for value, label in tiles]
    wall = duration(summary.slowest_wall_ns), f"wall of rank {summary.slowest_rank}, the slowest"
    tiles.insert(0 if summary.rates.tflops is None else 1, wall)
    return tiles


def comparison_document(comparison: Comparison) -> Document:
    """Build the page of a comparison: speed, time, memory, and every figure with its ratio to the first entry."""
    figures = drawing()

    names = [entry.label for entry in comparison.entries]
    sections = _change_sections(comparison, figures)
    speeds = [(entry.label, entry.figures["tflops"].value) for entry in comparison.entries if "tflops" in entry.figures]
    if speeds:
        chart = bars.stacked(
            [name for name, _ in speeds], _single_part("TFLOP/s", [value for _, value in speeds]), "TFLOP/s"
        )
        sections.append(PageSection("speed", "Speed", MEANINGS["tflops"], Content(charts=[chart])))
    entries_with_times = [
        entry for entry in comparison.entries if all(f"{name}_ms" in entry.figures for name in USUAL_PARTS)
    ]
    if entries_with_times:
        content = Content(charts=[_share_chart(entries_with_times)])
        sections.append(PageSection("shares", "Where the time went", MEANINGS["parts"], content))
    entries_with_memory = [entry for entry in comparison.entries if "peak_memory_mib" in entry.figures]
    if entries_with_memory:
        values = _single_part("MiB", [entry.figures["peak_memory_mib"].value for entry in entries_with_memory])
        chart = bars.stacked([entry.label for entry in entries_with_memory], values, "MiB")
        sections.append(PageSection("memory", "Peak memory", MEANINGS["peak_memory"], Content(charts=[chart])))
    all_figures = Content(
        tables=[figure_table(comparison)], lines=[*merged_notice(comparison), *spread_notices(comparison)]
    )
    sections.append(PageSection("figures", "Every figure", MEANINGS["comparison"], all_figures))
    rows = [[text(name), *map(text, values)] for name, values in differing_settings(comparison).items()]
    differing = Content(tables=[PageTable(["setting", *map(clean, names)], rows)])
    sections.append(PageSection("differences", "What differs in settings", "", differing))
    warnings = [clean(f"{entry.label}: {text}") for entry in comparison.entries for text in entry.warnings]
    subtitle = " · ".join(f"{index or 'base'}: {clean(name)}" for index, name in enumerate(names))
    verdict = [*work_notices(comparison), *warnings, *verdict_lines(comparison, [clean(name) for name in names])]
    return _answered(
        Document("Comparison", subtitle, [clean(line, LONGEST_SENTENCE) for line in verdict], [], sections)
    )


def _answered(document: Document) -> Document:
    """Return a document with the first line of its verdict as the headline."""
    first, *rest = document.verdict or ("",)
    return replace(document, headline=first, verdict=rest)


def _change_sections(comparison: Comparison, figures: Any) -> list[PageSection]:
    """Build the sections on two runs: changes of time by part, step and kernel, and both timelines."""
    if comparison.changes is None:
        return []
    parts, steps, kernels = comparison.changes.parts, comparison.changes.steps, comparison.changes.kernels
    by_part = _change_table("part", parts, WATERFALL_LABELS)
    content = Content(tables=[by_part], lines=merged_notice(comparison), charts=[bars.changes(parts, WATERFALL_LABELS)])
    sections = [PageSection("changes", "What changed", MEANINGS["changes"], content)]
    content_or_none = _timelines(comparison, figures)
    if content_or_none is not None:
        sections.append(PageSection("timelines", "Both timelines", MEANINGS["timelines"], content_or_none))
    for anchor, title, rows in (("steps", "By ring step", steps), ("kernels", "By kernel", kernels)):
        if rows:
            table = Content(tables=[_change_table(anchor.removesuffix("s"), rows, {})])
            sections.append(PageSection(f"changed-{anchor}", title, MEANINGS[f"changed_{anchor}"], table))
    return sections


def _timelines(comparison: Comparison, figures: Any) -> Content | None:
    """Draw the timelines of all runs; None where a run has no device activities or too many ranks."""
    if any(run.attribution.on_cpu or not run.lists_steps for run in comparison.runs):
        return None
    runs = [
        (timeline_of(run.attribution, run.steps, run.finder.by_activity), [rank.rank for rank in run.attribution.ranks])
        for run in comparison.runs
    ]
    legend = legend_of([bar for drawn, _ in runs for bar in drawn.bars])
    return Content(figures.timelines(runs, [entry.label for entry in comparison.entries]), legend=legend)


def _change_table(title: str, rows: Sequence[Change], labels: Mapping[str, str]) -> PageTable:
    columns = (Column(title), Column("base", "time"), Column("other", "time"), Column("change", "time"),
               Column("of the base's wall", "share"))  # fmt: skip
    shown = [
        [
            labels.get(change.what, change.what),
            change.base_ns,
            change.other_ns,
            change.other_ns - change.base_ns,
            change.share,
        ]
        for change in rows
    ]
    return Table("", columns, shown, "compare --format json").page()


def _single_part(name: str, values: Sequence[float]) -> dict[str, tuple[str, Sequence[float]]]:
    return {name: (palette.BLUE, values)}


def _share_chart(entries: Sequence[Measurement]) -> BarChart:
    parts = {}
    for name in USUAL_PARTS:
        values = []
        for entry in entries:
            whole = sum(entry.figures[f"{part}_ms"].value for part in USUAL_PARTS) or 1.0
            values.append(100 * entry.figures[f"{name}_ms"].value / whole)
        parts[LABELS[name]] = (palette.PART_COLOURS[name], values)
    exposed = [f"exposed {significant(value, 3)} %" for value in parts[LABELS["exposed_comm"]][1]]
    return bars.stacked([entry.label for entry in entries], parts, "% of the mean wall", exposed)


def figure_table(comparison: Comparison) -> PageTable:
    """Build a table of every figure, with each entry's value and its ratio to the first entry's."""
    differences = {(difference.figure, difference.entry): difference for difference in comparison.differences}
    titles = ["figure", "unit"]
    for index, entry in enumerate(comparison.entries):
        titles += [entry.label] if index == 0 else [entry.label, "to the first", "95 %", ""]
    rows = []
    for name in comparison.figures:
        known = [entry.figures[name] for entry in comparison.entries if name in entry.figures]
        percent = known[0].unit == "share"
        plain = name.removeprefix(WATERFALL_PREFIX).removesuffix("_ms").removesuffix("_mib")
        label = LABELS.get(plain, plain.replace("_", " "))
        label = f"waterfall: {WATERFALL_LABELS[plain]}" if name.startswith(WATERFALL_PREFIX) else label
        row: list[Cell] = [text(label), text("%" if percent else known[0].unit)]
        for index, entry in enumerate(comparison.entries):
            figure = entry.figures.get(name)
            row.append(number(None if figure is None else figure.value * (100 if percent else 1)))
            if index:
                row += _difference_cells(differences.get((name, index)))
        rows.append(row)
    return PageTable([clean(title) for title in titles], rows)


def _difference_cells(difference: Difference | None) -> list[Cell]:
    interval = number(None)
    if difference is not None and difference.low is not None and difference.high is not None:
        interval = Cell(f"{difference.low:.3f} to {difference.high:.3f}", difference.low, numeric=True)
    return [
        number(None if difference is None else difference.ratio),
        interval,
        text("" if difference is None else difference.verdict),
    ]


Series = list[tuple[float, float]]
"""Points of a line: (sequence length, value)."""


def sweep_document(rows: Sequence[Mapping[str, Any]], name: str) -> Document:
    """Build the page of a sweep: speed over sequence length, shares of time, memory, and every row.

    The kernels' own rate is drawn above the speeds as their ceiling.
    """
    done = [row for row in rows if row["status"] == "ok"]
    sections = []
    if done:
        speed, memory = _speed_content(done), _memory_content(done)
        sections.append(PageSection("speed", "Speed", MEANINGS["sweep_speed"], speed))
        content = Content(charts=[_sweep_share_chart(done)])
        sections.append(PageSection("shares", "Where the time went", MEANINGS["shares"], content))
        if memory:
            sections.append(PageSection("memory", "Peak memory", MEANINGS["peak_memory"], memory))
    sections.append(PageSection("rows", "Every row", MEANINGS["sweep"], Content(tables=[_row_table(rows)])))
    counts = f"{clean(name)} · {len(rows)} rows, {len(rows) - len(done)} of them without a result"
    return _answered(Document(_sweep_title(rows), counts, _fastest_lines(done), [], sections))


_MOST_NAMED = 4
"""Number of strategies up to which the title of a sweep names each."""


def _sweep_title(rows: Sequence[Mapping[str, Any]]) -> str:
    """Name the strategies and lengths of a sweep."""
    names = list(dict.fromkeys(str(row["strategy"]) for row in rows))
    lengths = sorted({row["seq"] for row in rows})
    which = ", ".join(names) if len(names) <= _MOST_NAMED else f"{len(names)} strategies"
    ends = [short_count(length) for length in (lengths[0], lengths[-1])] if lengths else []
    return clean(f"Benchmark: {which}" + (f" at {' to '.join(dict.fromkeys(ends))} tokens" if ends else ""))


def _speed_content(done: Sequence[Mapping[str, Any]]) -> Content:
    """Draw speed over length below the kernel's own rate; of one length, a bar per strategy."""
    if len({row["seq"] for row in done}) == 1:
        rows = sorted(done, key=lambda row: -row["tflops"])
        of_kernel = [
            f"{rate(row['tflops'])}"
            + (f", {percent(of)} of the kernel's own rate" if (of := row["of_kernel_rate"]) else "")
            for row in rows
        ]
        names = [_series_name(row) for row in rows]
        unit, (values,) = _in_unit_of_speed([[row["tflops"] for row in rows]])
        return Content(charts=[bars.stacked(names, _single_part(unit, values), unit, of_kernel)])
    speed: defaultdict[str, Series] = defaultdict(list)
    ceiling: dict[float, float] = {}
    for row in done:
        speed[_series_name(row)].append((row["seq"], row["tflops"]))
        if row["of_kernel_rate"]:
            ceiling[row["seq"]] = max(ceiling.get(row["seq"], 0.0), row["tflops"] / row["of_kernel_rate"])
    ceiling_name = "the kernel's own rate"
    lines = {**speed, **({ceiling_name: list(ceiling.items())} if ceiling else {})}
    unit, converted = _in_unit_of_speed([[value for _, value in points] for points in lines.values()])
    lines = {
        name: [(seq, value) for (seq, _), value in zip(points, values, strict=True)]
        for (name, points), values in zip(lines.items(), converted, strict=True)
    }
    return Content(drawing().lines(unit, lines, ceiling_name, _peers(done)))


def _memory_content(done: Sequence[Mapping[str, Any]]) -> Content | None:
    """Draw peak memory over length, of one length a bar per strategy; None where no row has it."""
    known = [row for row in done if row["memory_mib"] is not None]
    if len({row["seq"] for row in known}) == 1:
        values = _single_part("MiB", [row["memory_mib"] for row in known])
        return Content(charts=[bars.stacked([_series_name(row) for row in known], values, "MiB")])
    memory: defaultdict[str, Series] = defaultdict(list)
    for row in known:
        memory[_series_name(row)].append((row["seq"], row["memory_mib"]))
    return Content(drawing().lines("MiB", memory, "", _peers(done))) if memory else None


def _peers(done: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names of other people's code, whose lines are dotted."""
    return {_series_name(row) for row in done if row.get("peer")}


def _in_unit_of_speed(lines: Sequence[Sequence[float]]) -> tuple[str, list[list[float]]]:
    """Choose TFLOP/s or GFLOP/s by the largest speed, and convert all values to it.

    GFLOP/s keeps the axis readable for runs on a CPU.
    """
    unit, scale = ("TFLOP/s", 1.0) if max(value for line in lines for value in line) >= 1 else ("GFLOP/s", 1e3)
    return unit, [[scale * value for value in line] for line in lines]


def _fastest_lines(done: Sequence[Mapping[str, Any]]) -> list[str]:
    """State for each length the fastest strategy, its lead, and which others are not proved slower."""
    lines = []
    for seq in sorted({row["seq"] for row in done}):
        rows = sorted((row for row in done if row["seq"] == seq), key=lambda row: -row["tflops"])
        first = rows[0]
        speed = f"{first['forward_backward_ms']:,.1f} ms, {rate(first['tflops'])}"
        slower = [
            row
            for row in rows[1:]
            if significantly_different(_recordings(first), _recordings(row), spread=_assumed_spread(first, row))
        ]
        not_slower = [row for row in rows[1:] if row not in slower]
        line = f"{seq:,} tokens: {_series_name(first)} {'took the least time' if not_slower else 'is fastest'}, {speed}"
        if first["of_kernel_rate"]:
            line += f", {percent(first['of_kernel_rate'])} of the kernel's own rate"
        if not_slower:
            line += f"; not proved slower: {', '.join(_how_much_slower(first, row) for row in not_slower)}"
        if slower:
            line += f"; {'proved slower' if not_slower else 'next'}: {_how_much_slower(first, slower[0])}"
        lines.append(clean(line, LONGEST_SENTENCE))
    return lines


def _recordings(row: Mapping[str, Any]) -> Recordings:
    return (row["iterations_ms"],)


def _assumed_spread(first: Mapping[str, Any], row: Mapping[str, Any]) -> float:
    """Return the standard deviation assumed for the ratio of two rows of a sweep, each a single recording."""
    return math.hypot(*(SAME_SESSION.share_of(median(each["iterations_ms"] or [0.0])) for each in (first, row)))


def _how_much_slower(first: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """Format how much slower a row is than the first, with the 95 % interval."""
    interval = ratio_interval(_recordings(first), _recordings(row), spread=_assumed_spread(first, row))
    interval_text = f", {100 * (interval[0] - 1):.1f} to {100 * (interval[1] - 1):.1f}" if interval else ""
    return f"{_series_name(row)} ({percent(first['tflops'] / row['tflops'] - 1)}{interval_text})"


def _series_name(row: Mapping[str, Any]) -> str:
    return " ".join(str(part) for part in (row["strategy"], row["params"], row["kernel"]) if part)


def _sweep_share_chart(rows: Sequence[Mapping[str, Any]]) -> BarChart:
    compute = [100 * (row["compute_share"] or 0.0) for row in rows]
    exposed = [100 * (row["exposed_comm_share"] or 0.0) for row in rows]
    rest = [max(0.0, 100 - a - b) for a, b in zip(compute, exposed, strict=True)]
    parts = {
        "computation": (palette.BLUE, compute),
        "exposed communication": (palette.WIRE, exposed),
        "memory operations and idle": (palette.GREY, rest),
    }
    names = [f"{_series_name(row)} · {row['seq']:,}" for row in rows]
    return bars.stacked(
        names, parts, "% of the profiled iteration", [f"exposed {significant(a, 3)} %" for a in exposed]
    )


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
