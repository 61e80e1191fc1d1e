"""A comparison as text, JSON and CSV."""

from __future__ import annotations

from collections.abc import Sequence

from ringprof.analysis.findings.comparison import WATERFALL_PREFIX, Comparison, Difference, Figure
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
            }
            for entry in comparison.entries
        ],
        "differing": comparison.differing,
        "differences": comparison.differences,
        "changes": comparison.changes,
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
    for figure in comparison.figures:
        name, *cells = _figure_row(comparison, figure)
        rows.append([(WATERFALL_PREFIX if figure.startswith(WATERFALL_PREFIX) else "") + name, *map(str.strip, cells)])
    blocks = [
        [f"**{clean(line, LONGEST_SENTENCE)}**  " for line in verdict_lines(comparison)],
        [f"- {name}: {_code(entry.label)}" for name, entry in entries],
        [f"- {_code(name)}: {', '.join(_code(value or missing(name)) for value in values)}"
         for name, values in comparison.differing.items()],
        ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows],
        _legend(comparison),
    ]  # fmt: skip
    return "\n\n".join("\n".join(lines) for lines in blocks if lines) + "\n"


def _code(name: str) -> str:
    return f"`{clean(name).replace('`', chr(39))}`"


def _ends(figure: Figure) -> tuple[float | None, float | None]:
    return figure.interval() or (None, None)


def render(comparison: Comparison, style: TextStyle) -> str:
    """For the terminal: settings that differ, then figures: a line a figure, or a line an entry where room is short."""
    lines = [style.wrap(f"{name}: {clean(entry.label)} ({entry.source})")
             for name, entry in zip(_columns(comparison), comparison.entries, strict=True)]  # fmt: skip
    said = [*verdict_lines(comparison), *_warnings(comparison)]
    lines += ["", *map(style.wrap, said)] if said else []
    if comparison.differing:
        rows = [[clean(name), *(clean(value or missing(name)) for value in values)]
                for name, values in comparison.differing.items()]  # fmt: skip
        lines += ["", _either_way("what differs", rows, comparison, style)]
    parts = [name for name in comparison.figures if name.startswith(WATERFALL_PREFIX)]
    rows = [_figure_row(comparison, name) for name in comparison.figures if name not in parts]
    lines += ["", _either_way(_figures_heading(comparison), rows, comparison, style)]
    if parts:
        rows = [_figure_row(comparison, name) for name in parts]
        lines += ["", _either_way("waterfall: parts of the slowest rank's wall", rows, comparison, style)]
    lines += ["", *map(style.wrap, _legend(comparison))]
    return style.finish("\n".join(lines))


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
)
"""Figures that tell an entry slower or faster, the first that both have, with the words for more and less."""


def verdict_lines(comparison: Comparison, names: Sequence[str] | None = None) -> list[str]:
    """A line an entry: by how much it is slower or faster than the base, with the interval."""
    lines = []
    for index, name in enumerate(names or _columns(comparison)):
        for figure, words in _TOLD_FIRST:
            found = comparison.against_base(figure, index)
            if found is not None and found.ratio is not None:
                lines.append(f"{name}: {_in_words(found, *words)}")
                break
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
        return f"no difference proved: {by} ({low:.1f} to {high:.1f})"
    return f"{by} ({low:.1f} to {high:.1f})"


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


def _value(figure: Figure) -> str:
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
    if "not comparable" in seen:
        lines.append("(work): not set against the base, as the work is not the same or not known to be (--same-work)")
    return lines
