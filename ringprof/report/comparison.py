"""Comparisons as text, Markdown, JSON and CSV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ringprof.analysis.findings.comparison import Comparison, Difference
from ringprof.analysis.findings.metric import WATERFALL_PREFIX, Metric
from ringprof.analysis.findings.recording_spread import MOST_RECORDINGS
from ringprof.analysis.findings.same_work import missing_setting_text
from ringprof.analysis.findings.uncertainty import own_interval
from ringprof.common.json_object import JsonObject, json_text
from ringprof.report.tables import Column, table_width, text_table
from ringprof.report.text import LONGEST_SENTENCE, TextStyle, clean, csv_text

_SCHEMA = "ringprof.compare/1"
_LARGE_RATIO = 10.0
"""Ratio to the base above which a change is reported as a multiple instead of a percentage."""
_SIGNS = {"better": "+", "worse": "-", "noise": "~", "same": "=", "differs": " "}


def differing_settings(comparison: Comparison) -> dict[str, list[str]]:
    """Return the settings that differ, by name, with a text for every entry."""
    return {
        name: [
            value or missing_setting_text(name, entry.settings)
            for value, entry in zip(values, comparison.entries, strict=True)
        ]
        for name, values in comparison.differing.items()
    }


def as_dict(comparison: Comparison) -> JsonObject:
    """Build the JSON form (schema ``ringprof.compare/1``)."""
    report: JsonObject = msgspec.to_builtins(
        {
            "schema": _SCHEMA,
            "entries": [
                {
                    "label": entry.label,
                    "source": entry.source,
                    "settings": dict(entry.settings),
                    "figures": {
                        name: {
                            "value": f.value,
                            "unit": f.unit,
                            **dict(zip(("low", "high"), _interval_ends(f), strict=True)),
                        }
                        for name, f in entry.figures.items()
                    },
                    "recordings": max(1, len(entry.created)),
                    "warnings": entry.warnings,
                    "work": work,
                }
                for entry, work in zip(comparison.entries, (None, *comparison.work), strict=True)
            ],
            "differing": comparison.differing,
            "differences": comparison.differences,
            "changes": comparison.changes,
            "merged_parts": comparison.merged,
        }
    )
    return report


def render_json(comparison: Comparison, **further: Any) -> str:
    """Render the comparison as JSON text (schema ``ringprof.compare/1``), with ``further`` fields."""
    return json_text({**as_dict(comparison), **further})


def render_csv(comparison: Comparison) -> str:
    """Render the comparison as CSV, one row per figure and entry."""
    titles = ("label", "source", "figure", "unit", "value", "low", "high", "difference", "ratio", "verdict",
              "ratio_low", "ratio_high")  # fmt: skip
    against = {(d.figure, d.entry): d for d in comparison.differences}
    rows = []
    for index, entry in enumerate(comparison.entries):
        for name, f in entry.figures.items():
            d = against.get((name, index), Difference(name, index, None, None, "base"))
            measured = (f.unit, f.value, *_interval_ends(f))
            rows.append([entry.label, entry.source, name, *measured, d.difference, d.ratio, d.verdict, d.low, d.high])
    return csv_text(titles, rows)


def render_markdown(comparison: Comparison) -> str:
    """Render the comparison for a pull request: what changed in one or two lines, then a table."""
    names = _column_names(comparison)
    entries = zip(names, comparison.entries, strict=True)
    rows = [["figure", *names], ["---", *["---:"] * len(names)]]
    for figure in _shown_figures(comparison):
        name, *cells = _figure_row(comparison, figure)
        rows.append([(WATERFALL_PREFIX if figure.startswith(WATERFALL_PREFIX) else "") + name, *map(str.strip, cells)])
    blocks = [
        [f"**{clean(line, LONGEST_SENTENCE)}**  " for line in (*work_notices(comparison), *verdict_lines(comparison))],
        [f"- {name}: {_as_code(entry.label)}" for name, entry in entries],
        [f"- {_as_code(name)}: {', '.join(map(_as_code, values))}"
         for name, values in differing_settings(comparison).items()],
        ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows],
        _legend_lines(comparison),
    ]  # fmt: skip
    return "\n\n".join("\n".join(lines) for lines in blocks if lines) + "\n"


def _as_code(name: str) -> str:
    return f"`{clean(name).replace('`', chr(39))}`"


def _interval_ends(figure: Metric) -> tuple[float | None, float | None]:
    return own_interval(figure.recordings) or (None, None)


def render(comparison: Comparison, style: TextStyle) -> str:
    """Render the comparison for the terminal: notices and verdicts, the settings that differ, then the figures.

    Each table has one line per figure, or one line per entry where columns do not fit.
    """
    notices = [clean(line, LONGEST_SENTENCE) for line in work_notices(comparison)]
    lines = [*map(style.wrap, notices), ""] if notices else []
    names = _column_names(comparison)
    lines += [style.wrap(f"{name}: {clean(entry.label)} ({entry.source})")
             for name, entry in zip(names, comparison.entries, strict=True)]  # fmt: skip
    messages = verdict_lines(comparison)
    warned = [(name, text) for name, entry in zip(names, comparison.entries, strict=True) for text in entry.warnings]
    messages += ["", "warnings", *(f"{name}: {clean(text)}" for name, text in warned)] if warned else []
    lines += ["", *map(style.wrap, messages)] if messages else []
    if comparison.differing:
        rows = [[clean(name), *map(clean, values)] for name, values in differing_settings(comparison).items()]
        lines += ["", _table_that_fits("what differs", rows, comparison, style)]
    parts = [name for name in _shown_figures(comparison) if name.startswith(WATERFALL_PREFIX)]
    rows = [_figure_row(comparison, name) for name in _shown_figures(comparison) if name not in parts]
    if rows:
        lines += ["", _table_that_fits(_figures_heading(comparison), rows, comparison, style)]
    if parts:
        rows = [_figure_row(comparison, name) for name in parts]
        lines += ["", _table_that_fits("waterfall: parts of the slowest rank's wall", rows, comparison, style)]
    lines += ["", *map(style.wrap, _legend_lines(comparison))]
    return style.finish("\n".join(lines))


def _shown_figures(comparison: Comparison) -> list[str]:
    """List the figures to show: all that are not withheld."""
    return [name for name in comparison.figures if name not in comparison.withheld]


def _figures_heading(comparison: Comparison) -> str:
    """Return the heading of the figures: what the times refer to, per entry where entries differ."""
    entries = dict(zip(_column_names(comparison), comparison.entries, strict=True))
    wordings = dict.fromkeys(entry.times_are_of for entry in entries.values())
    if len(wordings) == 1:
        return f"figures, of {next(iter(wordings))}"
    names = ("/".join(name for name, entry in entries.items() if entry.times_are_of == wording) for wording in wordings)
    return "figures: " + "; ".join(f"{name} of {wording}" for name, wording in zip(names, wordings, strict=True))


def _table_that_fits(title: str, rows: list[list[str]], comparison: Comparison, style: TextStyle) -> str:
    """Format a table with one row per name and one column per entry, or transposed where that is too wide."""
    heading = style.paint(title, "bold")
    columns = [*map(Column, ("", *_column_names(comparison)))]
    if table_width(columns, rows) <= style.table_width:
        return f"{heading}\n{text_table(columns, rows, style)}"
    headings = [Column("", folds=True), *(Column(row[0].replace("_", "_\n").replace(" ", "\n")) for row in rows)]
    transposed = [list(cells) for cells in zip(*(row[1:] for row in rows), strict=True)]
    labels = [clean(entry.label) for entry in comparison.entries]
    lines = [[label, *map(str.strip, cells)] for label, cells in zip(labels, transposed, strict=True)]
    return f"{heading}\n{text_table(headings, lines, style)}"


_SPEED_FIGURES = (
    ("iteration_ms", ("slower", "faster")),
    ("profiled_iteration_ms", ("slower", "faster")),
    ("tflops", ("more TFLOP/s", "fewer TFLOP/s")),
    ("wall_ms", ("mean wall longer", "mean wall shorter")),
)
"""Figures that decide which entry is faster, in order of preference, with words for more and for less.
The first figure that both entries have is used."""


_MAX_NAMED = 4
"""Number of entries up to which each is listed; more are counted."""


def work_notices(comparison: Comparison) -> list[str]:
    """State which entries' times are not compared with the base's, why, and what to do about it; at most two lines."""
    indices_by_reason: dict[bool, list[int]] = {True: [], False: []}
    for index, match in enumerate(comparison.work, 1):
        if not match.same:
            indices_by_reason[match.by == "settings"].append(index)
    lines = []
    for known_to_differ, indices in indices_by_reason.items():
        if indices:
            first = comparison.work[indices[0] - 1].text
            reason = f"Different work ({first})" if known_to_differ else f"Work not known to be the same ({first})"
            advice = "" if known_to_differ else " If it is the same, add --same-work."
            scope = f" of {_list_entries(indices)}" if len(comparison.work) > 1 else ""
            lines.append(f"{reason}: times and memory{scope} are not compared.{advice}")
    return lines


def _list_entries(indices: Sequence[int]) -> str:
    """Join the indices of a few entries, or count many."""
    if len(indices) > _MAX_NAMED:
        return f"{len(indices)} entries"
    *first, last = map(str, indices)
    return f"{', '.join(first)} and {last}" if first else last


def verdict_lines(comparison: Comparison, names: Sequence[str] | None = None) -> list[str]:
    """State for each entry how much slower or faster than the base it is, and on what evidence the work is the same."""
    lines = []
    for index, name in enumerate(names or _column_names(comparison)):
        for figure, words in _SPEED_FIGURES:
            difference = comparison.against_base(figure, index)
            if difference is not None and difference.ratio is not None:
                lines.append(f"{name}: {_describe(difference, *words)}")
                break
        match = comparison.work[index - 1] if index and comparison.work else None
        if match is not None and match.same and match.by == "traces":
            lines.append(f"{name}: taken as the same work: {match.text}")
    explanation = comparison.changes.sentence() if comparison.changes else ""
    return [*lines, f"of the base's profiled wall: {explanation}"] if explanation else lines


def _describe(difference: Difference, more: str, less: str) -> str:
    """Format a difference whose ratio is known, for example ``slower by 9.8 % (9.5 to 10.1)``."""
    assert difference.ratio is not None
    direction = 1 if difference.ratio >= 1 else -1
    change = f"{more if direction > 0 else less} by {100 * direction * (difference.ratio - 1):.1f} %"
    if difference.verdict == "same":
        return "the same"
    if difference.ratio > _LARGE_RATIO:
        # A large percentage is hard to read.
        return f"{more}, {difference.ratio:,.1f} times"
    if difference.low is None or difference.high is None:
        return f"{change}, measured once"
    low, high = sorted((100 * direction * (difference.low - 1), 100 * direction * (difference.high - 1)))
    if difference.verdict == "noise":
        # Where each side is a single recording, more would show the difference.
        needed = needed_recordings(difference.recordings_to_decide)
        advice = (
            f"; showing {100 * abs(difference.ratio - 1):.1f} % takes {needed}" if difference.assumed_spread else ""
        )
        return f"no difference proved: {change} ({low:.1f} to {high:.1f}){advice}"
    return f"{change} ({low:.1f} to {high:.1f})"


def needed_recordings(count: int | None) -> str:
    """Say how many recordings per side are needed; None stands for more than are worth advising."""
    return f"about {count} recordings per side" if count else f"more than {MOST_RECORDINGS} recordings per side"


def _column_names(comparison: Comparison) -> list[str]:
    return ["base", *(str(index) for index in range(1, len(comparison.entries)))]


def _figure_row(comparison: Comparison, name: str) -> list[str]:
    against = {d.entry: d for d in comparison.differences if d.figure == name}
    unit = next(entry.figures[name].unit for entry in comparison.entries if name in entry.figures)
    cells = []
    for index, entry in enumerate(comparison.entries):
        figure = entry.figures.get(name)
        cells.append("-" if figure is None else _format_value(figure) + _ratio_cell(against.get(index)))
    suffix = {"share": " %", "TFLOP/s": " TFLOP/s"}.get(unit, "")
    return [name.removeprefix(WATERFALL_PREFIX) + suffix, *cells]


def _format_value(figure: Metric) -> str:
    value = 100 * figure.value if figure.unit == "share" else figure.value
    # A rate of CPU ranks may be a thousandth of a TFLOP/s.
    small = figure.unit == "TFLOP/s" and abs(value) < 0.1
    return f"{value:.3g}" if small else f"{value:,.3f}" if abs(value) < 100 else f"{value:,.1f}"


def _ratio_cell(difference: Difference | None) -> str:
    if difference is None:
        return "        "
    if difference.verdict == "not comparable":
        return "  (work)"
    if difference.ratio is None:
        return "        "
    # Small ratios get more digits, so that 0.004 is not shown as 0.
    digits = 3 if difference.ratio < 0.095 else 2 if difference.ratio < 100 else 0
    return f" {difference.ratio:5.{digits}f}x{_SIGNS[difference.verdict]}"


def _legend_lines(comparison: Comparison) -> list[str]:
    seen = {difference.verdict for difference in comparison.differences}
    lines = ["beside each figure: its ratio to the base; + better, - worse, = the same; no sign: measured once"]
    if "noise" in seen:
        lines.append("~ noise: the measurements do not prove that there is a difference (95 % interval, rank test)")
    lines += spread_notices(comparison)
    if comparison.withheld:
        count = len(comparison.withheld)
        lines.append(f"figures left out, as they depend on the work: {count} (--format json has them)")
    elif "not comparable" in seen:
        lines.append("(work): not compared with the base, as the work is not the same or not known to be")
    lines += merged_notice(comparison)
    return lines


def spread_notices(comparison: Comparison) -> list[str]:
    """State what the intervals of single recordings assume, a line for each source of the assumption."""
    shares_by_source: dict[str, list[float]] = {}
    for difference in comparison.differences:
        if difference.assumed_spread is not None:
            shares_by_source.setdefault(difference.assumed_spread.source, []).append(difference.assumed_spread.share)
    lines = []
    for source, shares in shares_by_source.items():
        spread = " to ".join(dict.fromkeys(f"{100 * share:.1f}" for share in (min(shares), max(shares))))
        lines.append(
            "one recording on a side: the intervals assume that recordings of one program differ by "
            f"{spread} % (standard deviation; {source})"
        )
    return lines


def merged_notice(comparison: Comparison) -> list[str]:
    """Name the parts of the waterfall that are shown as one because not every entry separates them."""
    wholes = [
        whole
        for whole in dict.fromkeys(comparison.merged.values())
        if f"{WATERFALL_PREFIX}{whole}_ms" in _shown_figures(comparison)
    ]
    parts = [
        f"{whole} holds {', '.join(part for part, into in comparison.merged.items() if into == whole)}"
        for whole in wholes
    ]
    return [f"waterfall: {'; '.join(parts)}: not every entry tells these apart"] if parts else []
