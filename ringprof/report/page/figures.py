"""The interactive figures of a page, as Bokeh models: zoom with the wheel, pan by dragging, hover for the figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from textwrap import shorten
from typing import Any

from bokeh.layouts import column
from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, LinearColorMapper
from bokeh.models.annotations import Label, Span
from bokeh.palettes import Viridis256
from bokeh.plotting import figure

from ringprof.analysis.findings.changes import Change
from ringprof.analysis.findings.summary import PARTS
from ringprof.analysis.findings.waterfall import WATERFALL_LABELS, Waterfall, WaterfallPart
from ringprof.analysis.steps.steps import Step
from ringprof.report import palette
from ringprof.report.palette import Interval
from ringprof.report.terms import LABELS
from ringprof.report.text import clean, rate, short_count
from ringprof.report.timeline import IDLE, ORDER, Bar, DrawnTimeline, drawn_as, lanes_of

_LONGEST_REMEDY = 60
"""Characters of a remedy above a bar, which fit a narrow window; the box under the pointer has the whole."""
MOST_LABELS = 32
"""Ranks up to which each has a label of its own beside an axis."""
TELEPHONE = 375
"""Pixels that a figure has on the narrowest screen."""
LEGEND_ROW = 24
"""Pixels that a row takes."""
LETTER = 5.3
"""Pixels that a letter takes, about."""
LANE_PIXELS, BETWEEN_RANKS = 22, 0.5
"""Height of a lane of a timeline, and, in lanes, the room between two ranks."""
WORTH_A_BAR = 0.0005
"""The least share of the wall that a waterfall draws."""
_INK = "#757575"
"""Of axes and labels: readable on white and on near-black."""


def _plain(title: str, height: int, tools: str = "xpan,xwheel_zoom,box_zoom,reset", **options: Any) -> Any:
    made: Any = figure(
        title=title, height=height, sizing_mode="stretch_width", tools=tools, toolbar_location="above",
        background_fill_alpha=0, border_fill_alpha=0, outline_line_color=None, **options,
    )  # fmt: skip
    made.toolbar.logo = None
    made.title.text_color = made.xaxis.axis_label_text_color = made.yaxis.axis_label_text_color = _INK
    for axis in made.axis:
        axis.major_label_text_color, axis.axis_line_color, axis.major_tick_line_color = _INK, _INK, _INK
        axis.minor_tick_line_color = None
        axis.axis_label_text_font_style = "normal"
    made.grid.grid_line_color, made.grid.grid_line_alpha = _INK, 0.2
    return made


def _hover(made: Any, renderers: list[Any], *rows: tuple[str, str]) -> None:
    made.add_tools(HoverTool(renderers=renderers, tooltips=list(rows)))


def _named_rows(made: Any, names: Sequence[str]) -> None:
    """Label whole numbers 0, -1, -2, ... with names, thinned where they are many."""
    step = -(-len(names) // MOST_LABELS)
    shown = range(0, len(names), step)
    made.yaxis.ticker = FixedTicker(ticks=[-place for place in shown])
    made.yaxis.major_label_overrides = {-place: clean(names[place]) for place in shown}
    made.ygrid.grid_line_color = None


def waterfall(found: Waterfall) -> Any:
    """Bars that begin where the one before ended, each under what it costs and what would shorten it.

    A loss that is negative goes back; parts that take nothing are left to the table.
    """
    left, at = {}, 0
    for part in found.parts:
        left[part.part] = at
        at += part.time_ns
    parts = [part for part in found.parts if abs(part.time_ns) >= WORTH_A_BAR * (found.wall_ns or 1)]
    made = _plain("", 58 * len(parts) + 90, x_axis_label="ms of the slowest rank's wall")
    source = ColumnDataSource({
        "y": [-place for place in range(len(parts))],
        "left": [left[part.part] / 1e6 for part in parts],
        "right": [(left[part.part] + part.time_ns) / 1e6 for part in parts],
        "colour": [palette.WATERFALL_COLOURS[part.part] for part in parts],
        "part": [WATERFALL_LABELS[part.part] for part in parts],
        "time": [f"{part.time_ns / 1e6:,.3f} ms" for part in parts],
        "share": [f"{100 * part.share:.1f} %" for part in parts],
        "speed": ["-" if part.tflops is None else rate(part.tflops) for part in parts],
        "action": [part.remedy for part in parts],
        "shown": [shorten(part.remedy, _LONGEST_REMEDY, placeholder=" …") for part in parts],
        "line": [_waterfall_line(part) for part in parts],
        "offset": [-24 if part.remedy else -11 for part in parts],
    })  # fmt: skip
    bars = made.hbar(y="y", left="left", right="right", height=0.32, color="colour", source=source)
    for text, offset in (("line", "offset"), ("shown", -11)):
        made.text(x=0, y="y", text=text, y_offset=offset, text_font_size="12px", text_color=_INK, source=source)
    _hover(made, [bars], ("part", "@part"), ("time", "@time"), ("of wall", "@share"), ("speed after it", "@speed"),
           ("shorter by", "@action"))  # fmt: skip
    made.yaxis.visible, made.ygrid.grid_line_color = False, None
    made.y_range.start, made.y_range.end = -len(parts) + 0.6, 0.7
    made.x_range.start = 0
    return made


def _waterfall_line(part: WaterfallPart) -> str:
    line = f"{WATERFALL_LABELS[part.part]}: {part.time_ns / 1e6:,.1f} ms"
    if part.tflops is not None:
        line += f", {rate(part.tflops)} after it"
    return line


def changes(found: Sequence[Change], labels: Mapping[str, str]) -> Any:
    """Bars to the left for what takes less than in the base, to the right for what takes more."""
    shown = [one for one in found if abs(one.share) >= WORTH_A_BAR] or list(found[:1])
    made = _plain("", 34 * len(shown) + 90, x_axis_label="ms more than the base")
    source = ColumnDataSource({
        "y": [-place for place in range(len(shown))],
        "right": [(one.other_ns - one.base_ns) / 1e6 for one in shown],
        "colour": [palette.WATERFALL_COLOURS[one.what] for one in shown],
        "part": [labels[one.what] for one in shown],
        "change": [f"{(one.other_ns - one.base_ns) / 1e6:+,.3f} ms" for one in shown],
        "share": [f"{100 * one.share:+.1f} %" for one in shown],
    })  # fmt: skip
    bars = made.hbar(y="y", left=0, right="right", height=0.7, color="colour", source=source)
    _hover(made, [bars], ("part", "@part"), ("change", "@change"), ("of the base's wall", "@share"))
    _named_rows(made, [f"{labels[one.what]} {100 * one.share:+.1f} %" for one in shown])
    return made


def timelines(found: Sequence[tuple[DrawnTimeline, Sequence[int]]], names: Sequence[str]) -> Any:
    """Several runs' timelines, one below the other, on one axis of time."""
    drawn = [timeline(one, ranks) for one, ranks in found]
    longest = max(one.x_range.end for one in drawn)
    for made, name in zip(drawn, names, strict=True):
        made.title.text = clean(name)
        made.x_range = drawn[0].x_range
    drawn[0].x_range.end = longest
    return column(*drawn, sizing_mode="stretch_width")


def breakdown(ranks: Sequence[Mapping[str, Any]]) -> Any:
    """One stacked bar a rank; ``ranks`` are those of the JSON report."""
    parts = {}
    for part in PARTS[:-1]:
        times = [(rank.get(f"{part}_ns") or 0) / 1e6 for rank in ranks]
        if any(times):
            parts[LABELS[part]] = palette.PART_COLOURS[part], times
    return stacked([f"rank {rank['rank']}" for rank in ranks], parts, "ms", digits=3)


def _legend(made: Any) -> None:
    if not made.legend:
        return
    made.add_layout(made.legend[0], "below")
    columns = _legend_columns(made)
    made.legend.orientation, made.legend.ncols, made.legend.location = "horizontal", columns, "left"
    # It takes its rows from the plot's height, of which the bars are to lose nothing.
    made.height += LEGEND_ROW * (-(-len(made.legend[0].items) // columns) - 1)
    made.legend.background_fill_alpha, made.legend.border_line_color = 0, None
    made.legend.label_text_color, made.legend.label_text_font_size = _INK, "9pt"
    made.legend.click_policy = "hide"


def _legend_columns(made: Any) -> int:
    """As many as a telephone has room for beside the labels of the axis."""
    labels = [item.label.value for item in made.legend[0].items]
    room = TELEPHONE - LETTER * max(map(len, made.yaxis[0].major_label_overrides.values()), default=6) - 15
    fits = (count for count in range(len(labels), 1, -1) if _legend_width(labels, count) <= room)
    return next(fits, 1)


def _legend_width(labels: Sequence[str], columns: int) -> float:
    return sum(28 + LETTER * max(map(len, labels[column::columns])) for column in range(columns))


def timeline(found: DrawnTimeline, ranks: Sequence[int]) -> Any:
    """A lane a stream, computation above communication, every other ring step shaded behind them."""
    lanes = lanes_of(found.bars)
    bottom, height = _bands(lanes, ranks)
    end, deepest = max((bar.end_ns for bar in found.bars), default=1) / 1e6, min(bottom.values(), default=0)
    made = _plain(
        "", round(130 - LANE_PIXELS * deepest), x_axis_label="ms from the first activity", x_range=(0, end),
        y_range=(deepest - BETWEEN_RANKS, 0), tools="xpan,pan,xwheel_zoom,wheel_zoom,box_zoom,reset",
        active_scroll="xwheel_zoom", active_drag="xpan", output_backend="canvas",
    )  # fmt: skip
    _shade(made, found, bottom, height)
    for what in ORDER:
        bars = [bar for bar in found.bars if bar.what == what]
        if not bars:
            continue
        low = [bottom[bar.rank] + height[bar.rank] - lanes[bar.rank, bar.lane, bar.stream] - 1 for bar in bars]
        source = ColumnDataSource({
            "left": [round(bar.start_ns / 1e6, 6) for bar in bars],
            "right": [round(bar.end_ns / 1e6, 6) for bar in bars],
            "bottom": [at + 0.06 for at in low],
            "top": [at + 0.94 for at in low],
            "where": [f"rank {bar.rank}" + (f", stream {bar.stream}" if what != IDLE else "") for bar in bars],
            "kind": [LABELS.get(bar.kind, bar.kind) for bar in bars],
            "start": [f"{bar.start_ns / 1e6:,.3f} ms" for bar in bars],
            "time": [f"{(bar.end_ns - bar.start_ns) / 1e6:,.3f} ms" for bar in bars],
            "step": [bar.step or "-" for bar in bars],
            "sent": [bar.sent or "-" for bar in bars],
            "name": [_name(bar) for bar in bars],
        })  # fmt: skip
        label, colour = drawn_as(what)
        quads = made.quad("left", "right", "top", "bottom", color=colour, source=source, legend_label=label)
        rows = [("", "@where"), ("", f"@kind, {label}"), ("start", "@start"), ("time", "@time"), ("step", "@step")]
        if what == IDLE:
            rows = [("", "@where"), ("idle", "@name"), ("start", "@start"), ("time", "@time")]
        sent = [("sent", "@sent")] if bars[0].lane == "communication" else []
        _hover(made, [quads], *rows, *sent, *([("", "@name")] if what != IDLE else []))
    _rank_labels(made, {rank: bottom[rank] + height[rank] / 2 for rank in ranks if rank in bottom})
    _legend(made)
    return made


def _bands(lanes: Mapping[tuple[int, str, int], int], ranks: Sequence[int]) -> tuple[dict[int, float], dict[int, int]]:
    """By rank: where its lanes end below, and how many it has, each one high."""
    bottom: dict[int, float] = {}
    height = {rank: 1 + max((place for (of, *_), place in lanes.items() if of == rank), default=0) for rank in ranks}
    at = 0.0
    for rank in ranks:
        at -= BETWEEN_RANKS + height[rank]
        bottom[rank] = at
    return bottom, height


def _rank_labels(made: Any, middles: Mapping[int, float]) -> None:
    """A tick a rank, thinned where they are many."""
    ranks = list(middles)[:: -(-len(middles) // MOST_LABELS) or 1]
    made.yaxis.ticker = FixedTicker(ticks=[middles[rank] for rank in ranks])
    made.yaxis.major_label_overrides = {middles[rank]: f"rank {rank}" for rank in ranks}
    made.ygrid.grid_line_color = None


def _name(bar: Bar) -> str:
    shown = clean(bar.name)[:80]
    return f"{shown} and {bar.activities - 1} more" if bar.activities > 1 else shown


def _shade(made: Any, found: DrawnTimeline, bottom: Mapping[int, float], height: Mapping[int, int]) -> None:
    steps = [step for step in found.steps if step.step % 2 == 0 and step.rank in bottom]
    source = ColumnDataSource({
        "left": [(step.start_ns - found.origin_ns[step.rank]) / 1e6 for step in steps],
        "right": [(step.end_ns - found.origin_ns[step.rank]) / 1e6 for step in steps],
        "bottom": [bottom[step.rank] - BETWEEN_RANKS / 4 for step in steps],
        "top": [bottom[step.rank] + height[step.rank] + BETWEEN_RANKS / 4 for step in steps],
    })  # fmt: skip
    made.quad("left", "right", "top", "bottom", source=source, color=_INK, alpha=0.18, line_color=None)


def waiting(steps: Sequence[Step], ranks: Sequence[int]) -> Any | None:
    """Rank by ring step, coloured by what it exposes; None where no step knows."""
    columns = list(dict.fromkeys((one.iteration, one.phase, one.call, one.step) for one in steps))
    several = any(one.call for one in steps)
    names = [f"{phase} {f'{call}.' if several else ''}{step}" for _, phase, call, step in columns]
    known = [one for one in steps if one.exposed_ns is not None]
    if not known:
        return None
    place = {rank: -at for at, rank in enumerate(ranks)}
    across = {column: at for at, column in enumerate(columns)}
    most = max(one.exposed_ns / 1e6 for one in known) or 1.0
    made = _plain("", min(900, 20 * len(ranks) + 130), x_axis_label="ring step", tools="pan,wheel_zoom,box_zoom,reset")
    source = ColumnDataSource({
        "x": [across[one.iteration, one.phase, one.call, one.step] for one in known],
        "y": [place[one.rank] for one in known],
        "exposed": [one.exposed_ns / 1e6 for one in known],
        "wait": ["not known" if one.wait_ns is None else f"{one.wait_ns / 1e6:,.3f} ms" for one in known],
        "rank": [one.rank for one in known],
        "step": [names[across[one.iteration, one.phase, one.call, one.step]] for one in known],
        "bound": [one.bound or "not known" for one in known],
    })  # fmt: skip
    mapper = LinearColorMapper(palette=Viridis256, low=0, high=most)
    cells = made.rect(
        "x", "y", 0.96, 0.92, source=source, line_color=None, fill_color={"field": "exposed", "transform": mapper}
    )
    made.add_layout(cells.construct_color_bar(width=10, title="ms exposed", background_fill_alpha=0,
                                              major_label_text_color=_INK, title_text_color=_INK), "right")  # fmt: skip
    _hover(
        made,
        [cells],
        ("rank", "@rank"),
        ("step", "@step"),
        ("exposed", "@exposed{0.000} ms"),
        ("waited", "@wait"),
        ("bound by", "@bound"),
    )
    _named_rows(made, [f"rank {rank}" for rank in ranks])
    step = -(-len(names) // MOST_LABELS)
    made.xaxis.ticker = FixedTicker(ticks=list(range(0, len(names), step)))
    made.xaxis.major_label_overrides = {at: names[at] for at in range(0, len(names), step)}
    made.xaxis.major_label_orientation = 0.9
    made.xgrid.grid_line_color = None
    return made


def lines(unit: str, series: Mapping[str, Iterable[tuple[float, float]]], ceiling: str, peers: Set[str]) -> Any:
    """A line for each name over sequence length; the ceiling's is grey and dashed, those of peers are dotted."""
    made = _plain("", 340, tools="pan,box_zoom,reset", x_axis_type="log", x_axis_label="tokens", y_axis_label=unit)
    ticks: set[float] = set()
    for place, (name, points) in enumerate(series.items()):
        x, y = zip(*sorted(points), strict=True)
        ticks.update(x)
        colour = palette.LINES[place % len(palette.LINES)] if name != ceiling else _INK
        label = clean(name)
        source = ColumnDataSource({"x": x, "y": y, "name": [label] * len(x)})
        style = {"line_dash": "dashed" if name == ceiling else "dotted"} if name in {ceiling, *peers} else {}
        made.line("x", "y", source=source, color=colour, line_width=2, legend_label=label, **style)
        dots = made.scatter("x", "y", source=source, color=colour, size=8, legend_label=label)
        _hover(made, [dots], ("", "@name"), ("tokens", "@x{0,0}"), (unit, "@y{0,0.0}"))
    made.xaxis.ticker = FixedTicker(ticks=sorted(ticks))
    made.xaxis.major_label_overrides = {tick: f"{tick:,.0f}" for tick in ticks}
    made.y_range.start = 0
    _legend(made)
    return made


def memory(series: Mapping[str, Sequence[tuple[float, float]]]) -> Any:
    """A line for each name that stays until the next point."""
    made = _plain("", 320, x_axis_label="ms from the first activity", y_axis_label="MiB allocated")
    for place, (name, points) in enumerate(series.items()):
        source = ColumnDataSource({
            "x": [at for at, _ in points], "y": [size for _, size in points], "name": [name] * len(points),
        })  # fmt: skip
        line = made.step("x", "y", mode="after", source=source, color=palette.LINES[place % len(palette.LINES)],
                         line_width=1.5, legend_label=name)  # fmt: skip
        _hover(made, [line], ("", "@name"), ("from", "@x{0,0.000} ms"), ("allocated", "@y{0,0.0} MiB"))
    made.y_range.start = 0
    _legend(made)
    return made


def stacked(names: Sequence[str], parts: Mapping[str, tuple[str, Sequence[float]]], unit: str, digits: int = 1) -> Any:
    """A bar for each name from parts, each (colour, values)."""
    made = _plain("", min(900, 22 * len(names) + 110), x_axis_label=unit)
    left = [0.0] * len(names)
    for part, (colour, values) in parts.items():
        right = [a + b for a, b in zip(left, values, strict=True)]
        source = ColumnDataSource({
            "y": [-place for place in range(len(names))], "left": left, "right": right,
            "name": [clean(name) for name in names], "shown": [f"{value:,.{digits}f} {unit}" for value in values],
        })  # fmt: skip
        bars = made.hbar(y="y", left="left", right="right", height=0.8, color=colour, source=source, legend_label=part)
        _hover(made, [bars], ("", "@name"), (part, "@shown"))
        left = right
    _named_rows(made, names)
    made.x_range.start = 0
    if len(parts) > 1:
        _legend(made)
    else:
        made.legend.visible = False
        made.text(x="right", y="y", text="shown", x_offset=-6, text_align="right", text_baseline="middle",
                  text_font_size="11px", text_color="white", source=source)  # fmt: skip
    return made


def intervals(names: Sequence[str], values: Sequence[Interval], axis: str) -> Any:
    """A mark and its interval a name."""
    made = _plain("", 26 * len(names) + 100, x_axis_label=axis)
    source = ColumnDataSource({
        "y": [-place for place in range(len(names))],
        "low": [low for low, _, _ in values],
        "middle": [middle for _, middle, _ in values],
        "high": [high for _, _, high in values],
        "name": list(names),
    })  # fmt: skip
    made.segment(x0="low", x1="high", y0="y", y1="y", line_width=6, color=palette.BLUE, alpha=0.4, source=source)
    marks = made.scatter(x="middle", y="y", size=9, color=palette.BLUE, source=source)
    ends = (("from", "@low{0,0.000}"), ("to", "@high{0,0.000}"))
    _hover(made, [marks], ("", "@name"), (axis, "@middle{0,0.000}"), *ends)
    made.xaxis.ticker.desired_num_ticks = 4
    _named_rows(made, names)
    return made


def bands(
    across: str, up: str, series: Mapping[str, Sequence[tuple[float, Interval]]],
    marks: Sequence[tuple[float, str]] = (),
) -> Any:  # fmt: skip
    """A line and the band around it for each name, over a logarithmic axis; ``marks`` are places across with a word."""
    made = _plain("", 380, x_axis_label=across, y_axis_label=up, x_axis_type="log")
    for place, (name, points) in enumerate(series.items()):
        colour = palette.LINES[place % len(palette.LINES)]
        source = ColumnDataSource({
            "x": [at for at, _ in points],
            "low": [low for _, (low, _, _) in points],
            "middle": [middle for _, (_, middle, _) in points],
            "high": [high for _, (_, _, high) in points],
            "name": [name] * len(points),
        })  # fmt: skip
        made.varea(x="x", y1="low", y2="high", color=colour, alpha=0.2, source=source, legend_label=clean(name))
        made.line(x="x", y="middle", color=colour, line_width=2, source=source, legend_label=clean(name))
        dots = made.scatter(x="x", y="middle", size=7, color=colour, source=source)
        rows = (("", "@name"), (across, "@x{0,0.##}"), (up, "@middle{0,0.000}"), ("from", "@low{0,0.000}"))
        _hover(made, [dots], *rows, ("to", "@high{0,0.000}"))
    ticks = sorted({at for points in series.values() for at, _ in points})
    made.xaxis.ticker = FixedTicker(ticks=ticks)
    made.xaxis.major_label_overrides = {tick: short_count(tick) for tick in ticks}
    for place, (at, word) in enumerate(marks):
        made.add_layout(Span(location=at, dimension="height", line_color=_INK, line_dash="dashed"))
        low = 6 + 14 * place
        # On the side that has more room.
        right = at * at > ticks[0] * ticks[-1]
        made.add_layout(Label(
            x=at, y=low, y_units="screen", x_offset=-4 if right else 4, text_align="right" if right else "left",
            text=word, text_color=_INK, text_font_size="11px",
        ))  # fmt: skip
    _legend(made)
    return made
