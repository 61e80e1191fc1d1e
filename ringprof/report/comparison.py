"""A comparison as text, JSON and CSV."""

from __future__ import annotations

from collections.abc import Sequence

from ringprof.analysis.findings.comparison import WATERFALL_PREFIX, Comparison, Difference, Metric
from ringprof.analysis.findings.recording_spread import MOST_RECORDINGS
from ringprof.json_object import JsonObject, json_text
from ringprof.report.tables import Column, table_width, text_table
from ringprof.report.text import LONGEST_SENTENCE, TextStyle, clean, csv_text

_SCHEMA = "ringprof.compare/1"
PARAMETER = "-p "
"""What a setting's name begins with that is a strategy's parameter."""
_MANY = 10.0
"""Times the base from which on a ratio is said as that."""
_SIGNS = {"better": "+", "worse": "-", "noise": "~", "same": "=", "differs": " "}


def missing(name: str) -> str:
    """What stands for a setting that an entry lacks: a strategy has no parameters but its own."""
    return "-" if name.startswith(PARAMETER) else "unknown"


def _as_dict(comparison: Comparison) -> JsonObject:
    """The JSON form (schema ``ringprof.compare/1``)."""
    return {
        "schema": _SCHEMA,
        "entries": [
            {
                "label": entry.label,
                "source": entry.source,
                "settings": dict(entry.settings),
                "figures": {
                    name: {"value": f.value, "unit": f.unit, **dict(zip(("low", "high"), _ends(f), strict=True))}
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


def render_json(comparison: Comparison) -> str:
    """As `_as_dict`, as text."""
    return json_text(_as_dict(comparison))


def render_csv(comparison: Comparison) -> str:
    """A row a figure and entry."""
    titles = ("label", "source", "figure", "unit", "value", "low", "high", "difference", "ratio", "verdict",
              "ratio_low", "ratio_high")  # fmt: skip
    against = {(d.figure, d.entry): d for d in comparison.differences}
    rows = []
    for index, entry in enumerate(comparison.entries):
        for name, f in entry.figures.items():
            d = against.get((name, index), Difference(name, index, None, None, "base"))
            measured = (f.unit, f.value, *_ends(f))
            rows.append([entry.label, entry.source, name, *measured, d.difference, d.ratio, d.verdict, d.low, d.high])
    return csv_text(titles, rows)


def render_markdown(comparison: Comparison) -> str:
    """For a pull request: what changed in a line or two, then a table."""
    names = _columns(comparison)
    entries = zip(names, comparison.entries, strict=True)
    rows = [["figure", *names], ["---", *["---:"] * len(names)]]
    for figure in _shown(comparison):
        name, *cells = _figure_row(comparison, figure)
        rows.append([(WATERFALL_PREFIX if figure.startswith(WATERFALL_PREFIX) else "") + name, *map(str.strip, cells)])
    blocks = [
        [f"**{clean(line, LONGEST_SENTENCE)}**  " for line in (*work_notices(comparison), *verdict_lines(comparison))],
        [f"- {name}: {_code(entry.label)}" for name, entry in entries],
        [f"- {_code(name)}: {', '.join(_code(value or missing(name)) for value in values)}"
         for name, values in comparison.differing.items()],
        ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows],
        _legend(comparison),
    ]  # fmt: skip
    return "\n\n".join("\n".join(lines) for lines in blocks if lines) + "\n"


def _code(name: str) -> str:
    return f"`{clean(name).replace('`', chr(39))}`"


def _ends(figure: Metric) -> tuple[float | None, float | None]:
    return figure.interval() or (None, None)


def render(comparison: Comparison, style: TextStyle) -> str:
    """For the terminal: settings that differ, then figures: a line a figure, or a line an entry where room is short."""
    notices = [clean(line, LONGEST_SENTENCE) for line in work_notices(comparison)]
    lines = [*map(style.wrap, notices), ""] if notices else []
    lines += [style.wrap(f"{name}: {clean(entry.label)} ({entry.source})")
             for name, entry in zip(_columns(comparison), comparison.entries, strict=True)]  # fmt: skip
    said = [*verdict_lines(comparison), *_warnings(comparison)]
    lines += ["", *map(style.wrap, said)] if said else []
    if comparison.differing:
        rows = [[clean(name), *(clean(value or missing(name)) for value in values)]
                for name, values in comparison.differing.items()]  # fmt: skip
        lines += ["", _either_way("what differs", rows, comparison, style)]
    parts = [name for name in _shown(comparison) if name.startswith(WATERFALL_PREFIX)]
    rows = [_figure_row(comparison, name) for name in _shown(comparison) if name not in parts]
    if rows:
        lines += ["", _either_way(_figures_heading(comparison), rows, comparison, style)]
    if parts:
        rows = [_figure_row(comparison, name) for name in parts]
        lines += ["", _either_way("waterfall: parts of the slowest rank's wall", rows, comparison, style)]
    lines += ["", *map(style.wrap, _legend(comparison))]
    return style.finish("\n".join(lines))


def _shown(comparison: Comparison) -> list[str]:
    """List the figures that are compared, or need not be."""
    return [name for name in comparison.figures if name not in comparison.withheld]


def _figures_heading(comparison: Comparison) -> str:
    """Say what times are of: in one word for all entries, or by entry where they differ."""
    entries = dict(zip(_columns(comparison), comparison.entries, strict=True))
    words = dict.fromkeys(entry.times_are_of for entry in entries.values())
    if len(words) == 1:
        return f"figures, of {next(iter(words))}"
    named = ("/".join(name for name, entry in entries.items() if entry.times_are_of == each) for each in words)
    return "figures: " + "; ".join(f"{name} of {each}" for name, each in zip(named, words, strict=True))


def _either_way(title: str, rows: list[list[str]], comparison: Comparison, style: TextStyle) -> str:
    """A row a name with a column an entry or, where that is too wide, a row an entry."""
    heading = style.paint(title, "bold")
    columns = [*map(Column, ("", *_columns(comparison)))]
    if table_width(columns, rows) <= style.table_width:
        return f"{heading}\n{text_table(columns, rows, style)}"
    heads = [Column("", folds=True), *(Column(row[0].replace("_", "_\n").replace(" ", "\n")) for row in rows)]
    turned = [list(cells) for cells in zip(*(row[1:] for row in rows), strict=True)]
    labels = [clean(entry.label) for entry in comparison.entries]
    lines = [[label, *map(str.strip, cells)] for label, cells in zip(labels, turned, strict=True)]
    return f"{heading}\n{text_table(heads, lines, style)}"


_TOLD_FIRST = (
    ("iteration_ms", ("slower", "faster")),
    ("profiled_iteration_ms", ("slower", "faster")),
    ("tflops", ("more TFLOP/s", "fewer TFLOP/s")),
    ("wall_ms", ("mean wall longer", "mean wall shorter")),
)
"""Figures that tell an entry slower or faster, the first that both have, with the words for more and less."""


_MOST_NAMED = 4
"""Entries that are named one by one."""


def work_notices(comparison: Comparison) -> list[str]:
    """State which entries' times are not compared with the base's, why, and what to do about it; at most two lines."""
    apart: dict[bool, list[int]] = {True: [], False: []}
    for index, match in enumerate(comparison.work, 1):
        if not match.same:
            apart[match.by == "settings"].append(index)
    lines = []
    for stated, indices in apart.items():
        if indices:
            first = comparison.work[indices[0] - 1].text
            why = f"Different work ({first})" if stated else f"Work not known to be the same ({first})"
            advice = "" if stated else " If it is the same, add --same-work."
            of = f" of {_some(indices)}" if len(comparison.work) > 1 else ""
            lines.append(f"{why}: times and memory{of} are not compared.{advice}")
    return lines


def _some(indices: Sequence[int]) -> str:
    """Name a few entries, or count many."""
    if len(indices) > _MOST_NAMED:
        return f"{len(indices)} entries"
    *first, last = map(str, indices)
    return f"{', '.join(first)} and {last}" if first else last


def verdict_lines(comparison: Comparison, names: Sequence[str] | None = None) -> list[str]:
    """State per entry by how much it is slower or faster than the base, and on what evidence its work is the same."""
    lines = []
    for index, name in enumerate(names or _columns(comparison)):
        for figure, words in _TOLD_FIRST:
            found = comparison.against_base(figure, index)
            if found is not None and found.ratio is not None:
                lines.append(f"{name}: {_in_words(found, *words)}")
                break
        match = comparison.work[index - 1] if index and comparison.work else None
        if match is not None and match.same and match.by == "traces":
            lines.append(f"{name}: taken as the same work: {match.text}")
    why = comparison.changes.sentence() if comparison.changes else ""
    return [*lines, f"of the base's profiled wall: {why}"] if why else lines


def _in_words(found: Difference, more: str, less: str) -> str:
    """A difference whose ratio is known: ``slower by 9.8 % (9.5 to 10.1)``."""
    assert found.ratio is not None
    sign = 1 if found.ratio >= 1 else -1
    by = f"{more if sign > 0 else less} by {100 * sign * (found.ratio - 1):.1f} %"
    if found.verdict == "same":
        return "the same"
    if found.ratio > _MANY:
        # In percent nobody could read it.
        return f"{more}, {found.ratio:,.1f} times"
    if found.low is None or found.high is None:
        return f"{by}, measured once"
    low, high = sorted((100 * sign * (found.low - 1), 100 * sign * (found.high - 1)))
    if found.verdict == "noise":
        return f"no difference proved: {by} ({low:.1f} to {high:.1f}){_advice(found)}"
    return f"{by} ({low:.1f} to {high:.1f})"


def _advice(found: Difference) -> str:
    """Say how many recordings per side would show the difference, where each side is a single recording."""
    assert found.ratio is not None
    if found.assumed_spread is None:
        return ""
    return f"; showing {100 * abs(found.ratio - 1):.1f} % takes {needed_recordings(found.recordings_to_decide)}"


def needed_recordings(count: int | None) -> str:
    """Say how many recordings per side are needed; None stands for more than are worth advising."""
    return f"about {count} recordings per side" if count else f"more than {MOST_RECORDINGS} recordings per side"


def _warnings(comparison: Comparison) -> list[str]:
    names = _columns(comparison)
    said = [(name, text) for name, entry in zip(names, comparison.entries, strict=True) for text in entry.warnings]
    return ["", "warnings", *(f"{name}: {clean(text)}" for name, text in said)] if said else []


def _columns(comparison: Comparison) -> list[str]:
    return ["base", *(str(index) for index in range(1, len(comparison.entries)))]


def _figure_row(comparison: Comparison, name: str) -> list[str]:
    against = {d.entry: d for d in comparison.differences if d.figure == name}
    unit = next(entry.figures[name].unit for entry in comparison.entries if name in entry.figures)
    cells = []
    for index, entry in enumerate(comparison.entries):
        figure = entry.figures.get(name)
        cells.append("-" if figure is None else _value(figure) + _against(against.get(index)))
    suffix = {"share": " %", "TFLOP/s": " TFLOP/s"}.get(unit, "")
    return [name.removeprefix(WATERFALL_PREFIX) + suffix, *cells]


def _value(figure: Metric) -> str:
    value = 100 * figure.value if figure.unit == "share" else figure.value
    return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.1f}"


def _against(difference: Difference | None) -> str:
    if difference is None:
        return "        "
    if difference.verdict == "not comparable":
        return "  (work)"
    if difference.ratio is None:
        return "        "
    # A ratio of 0.004 is not 0.
    digits = 3 if difference.ratio < 0.095 else 2 if difference.ratio < 100 else 0
    return f" {difference.ratio:5.{digits}f}x{_SIGNS[difference.verdict]}"


def _legend(comparison: Comparison) -> list[str]:
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
    shares: dict[str, list[float]] = {}
    for found in comparison.differences:
        if found.assumed_spread is not None:
            shares.setdefault(found.assumed_spread.source, []).append(found.assumed_spread.share)
    return [
        f"one recording on a side: the intervals assume that recordings of one program differ by {_range(each)} % "
        f"(standard deviation; {source})"
        for source, each in shares.items()
    ]


def _range(shares: Sequence[float]) -> str:
    ends = dict.fromkeys(f"{100 * share:.1f}" for share in (min(shares), max(shares)))
    return " to ".join(ends)


def merged_notice(comparison: Comparison) -> list[str]:
    """Name the parts of the waterfall that are shown as one, as not every entry tells them apart."""
    wholes = [
        whole
        for whole in dict.fromkeys(comparison.merged.values())
        if f"{WATERFALL_PREFIX}{whole}_ms" in _shown(comparison)
    ]
    parts = [
        f"{whole} holds {', '.join(part for part, into in comparison.merged.items() if into == whole)}"
        for whole in wholes
    ]
    return [f"waterfall: {'; '.join(parts)}: not every entry tells these apart"] if parts else []
