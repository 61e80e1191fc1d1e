"""Interactive figures of a page, as Bokeh models: wheel to zoom, drag to pan, hover to see values."""

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
from ringprof.analysis.findings.time_table import PARTS
from ringprof.analysis.findings.waterfall import WATERFALL_LABELS, Waterfall, WaterfallPart
from ringprof.analysis.steps.steps import Step
from ringprof.report import palette
from ringprof.report.palette import Interval
from ringprof.report.terms import LABELS
from ringprof.report.text import clean, rate, short_count
from ringprof.report.timeline import CATEGORY_ORDER, IDLE, Bar, DrawnTimeline, label_and_colour, lanes_of

_MAX_REMEDY_LENGTH = 60
"""Characters of a remedy above a bar, which fit a narrow window; the tooltip has the whole text."""
MAX_LABELS = 32
"""Number of ranks up to which each has a label beside an axis."""
NARROW_SCREEN_PIXELS = 375
"""Width in pixels of a figure on the narrowest screen, a telephone."""
LEGEND_ROW_PIXELS = 24
"""Height in pixels of a row of a legend."""
LETTER_PIXELS = 5.3
"""Approximate width in pixels of a letter."""
LANE_PIXELS, RANK_GAP = 22, 0.5
"""Height in pixels of a lane of a timeline, and the gap between two ranks in lanes."""
MIN_BAR_SHARE = 0.0005
"""Least share of the wall that gets a bar in a waterfall or a chart of changes."""
_GREY = "#757575"
"""Colour of axes and labels: readable on white and on near-black."""


def _new_plot(title: str, height: int, tools: str = "xpan,xwheel_zoom,box_zoom,reset", **options: Any) -> Any:
    plot: Any = figure(
        title=title, height=height, sizing_mode="stretch_width", tools=tools, toolbar_location="above",
        background_fill_alpha=0, border_fill_alpha=0, outline_line_color=None, **options,
    )  # fmt: skip
    plot.toolbar.logo = None
    plot.title.text_color = plot.xaxis.axis_label_text_color = plot.yaxis.axis_label_text_color = _GREY
    for axis in plot.axis:
        axis.major_label_text_color, axis.axis_line_color, axis.major_tick_line_color = _GREY, _GREY, _GREY
        axis.minor_tick_line_color = None
        axis.axis_label_text_font_style = "normal"
    plot.grid.grid_line_color, plot.grid.grid_line_alpha = _GREY, 0.2
    return plot


def _add_hover(plot: Any, renderers: list[Any], *rows: tuple[str, str]) -> None:
    plot.add_tools(HoverTool(renderers=renderers, tooltips=list(rows)))


def _label_rows(plot: Any, names: Sequence[str]) -> None:
    """Label the rows at 0, -1, -2, ... with names; where there are many, only every n-th."""
    stride = -(-len(names) // MAX_LABELS)
    labelled = range(0, len(names), stride)
    plot.yaxis.ticker = FixedTicker(ticks=[-row for row in labelled])
    plot.yaxis.major_label_overrides = {-row: clean(names[row]) for row in labelled}
    plot.ygrid.grid_line_color = None


def waterfall(waterfall_data: Waterfall) -> Any:
    """Draw bars that each start where the previous one ended, under its cost and what would shorten it.

    A negative loss goes back to the left; parts that take no time are left to the table.
    """
    start_of, start_ns = {}, 0
    for part in waterfall_data.parts:
        start_of[part.part] = start_ns
        start_ns += part.time_ns
    parts = [
        part for part in waterfall_data.parts if abs(part.time_ns) >= MIN_BAR_SHARE * (waterfall_data.wall_ns or 1)
    ]
    plot = _new_plot("", 58 * len(parts) + 90, x_axis_label="ms of the slowest rank's wall")
    source = ColumnDataSource({
        "y": [-row for row in range(len(parts))],
        "left": [start_of[part.part] / 1e6 for part in parts],
        "right": [(start_of[part.part] + part.time_ns) / 1e6 for part in parts],
        "colour": [palette.WATERFALL_COLOURS[part.part] for part in parts],
        "part": [WATERFALL_LABELS[part.part] for part in parts],
        "time": [f"{part.time_ns / 1e6:,.3f} ms" for part in parts],
        "share": [f"{100 * part.share:.1f} %" for part in parts],
        "speed": ["-" if part.tflops is None else rate(part.tflops) for part in parts],
        "action": [part.remedy for part in parts],
        "shown": [shorten(part.remedy, _MAX_REMEDY_LENGTH, placeholder=" …") for part in parts],
        "line": [_waterfall_line(part) for part in parts],
        "offset": [-24 if part.remedy else -11 for part in parts],
    })  # fmt: skip
    bars = plot.hbar(y="y", left="left", right="right", height=0.32, color="colour", source=source)
    for text, offset in (("line", "offset"), ("shown", -11)):
        plot.text(x=0, y="y", text=text, y_offset=offset, text_font_size="12px", text_color=_GREY, source=source)
    _add_hover(plot, [bars], ("part", "@part"), ("time", "@time"), ("of wall", "@share"), ("speed after it", "@speed"),
           ("shorter by", "@action"))  # fmt: skip
    plot.yaxis.visible, plot.ygrid.grid_line_color = False, None
    plot.y_range.start, plot.y_range.end = -len(parts) + 0.6, 0.7
    plot.x_range.start = 0
    return plot


def _waterfall_line(part: WaterfallPart) -> str:
    line = f"{WATERFALL_LABELS[part.part]}: {part.time_ns / 1e6:,.1f} ms"
    if part.tflops is not None:
        line += f", {rate(part.tflops)} after it"
    return line


def changes(changes_by_part: Sequence[Change], labels: Mapping[str, str]) -> Any:
    """Draw one bar per part: to the left for less time than in the base, to the right for more."""
    shown = [change for change in changes_by_part if abs(change.share) >= MIN_BAR_SHARE] or list(changes_by_part[:1])
    plot = _new_plot("", 34 * len(shown) + 90, x_axis_label="ms more than the base")
    source = ColumnDataSource({
        "y": [-row for row in range(len(shown))],
        "right": [(change.other_ns - change.base_ns) / 1e6 for change in shown],
        "colour": [palette.WATERFALL_COLOURS[change.what] for change in shown],
        "part": [labels[change.what] for change in shown],
        "change": [f"{(change.other_ns - change.base_ns) / 1e6:+,.3f} ms" for change in shown],
        "share": [f"{100 * change.share:+.1f} %" for change in shown],
    })  # fmt: skip
    bars = plot.hbar(y="y", left=0, right="right", height=0.7, color="colour", source=source)
    _add_hover(plot, [bars], ("part", "@part"), ("change", "@change"), ("of the base's wall", "@share"))
    _label_rows(plot, [f"{labels[change.what]} {100 * change.share:+.1f} %" for change in shown])
    return plot


def timelines(runs: Sequence[tuple[DrawnTimeline, Sequence[int]]], names: Sequence[str]) -> Any:
    """Draw the timelines of several runs below each other, on one time axis."""
    plots = [timeline(run, ranks) for run, ranks in runs]
    longest = max(run_plot.x_range.end for run_plot in plots)
    for run_plot, title in zip(plots, names, strict=True):
        run_plot.title.text = clean(title)
        run_plot.x_range = plots[0].x_range
    plots[0].x_range.end = longest
    return column(*plots, sizing_mode="stretch_width")


def breakdown(ranks: Sequence[Mapping[str, Any]]) -> Any:
    """Draw one stacked bar per rank; ``ranks`` are those of the JSON report."""
    parts = {}
    for part in PARTS[:-1]:
        times = [(rank.get(f"{part}_ns") or 0) / 1e6 for rank in ranks]
        if any(times):
            parts[LABELS[part]] = palette.PART_COLOURS[part], times
    return stacked([f"rank {rank['rank']}" for rank in ranks], parts, "ms", digits=3)


def _place_legend(plot: Any) -> None:
    if not plot.legend:
        return
    plot.add_layout(plot.legend[0], "below")
    columns = _legend_columns(plot)
    plot.legend.orientation, plot.legend.ncols, plot.legend.location = "horizontal", columns, "left"
    # A legend takes its rows from the plot's height: make the plot higher, so that the bars keep theirs.
    plot.height += LEGEND_ROW_PIXELS * (-(-len(plot.legend[0].items) // columns) - 1)
    plot.legend.background_fill_alpha, plot.legend.border_line_color = 0, None
    plot.legend.label_text_color, plot.legend.label_text_font_size = _GREY, "9pt"
    plot.legend.click_policy = "hide"


def _legend_columns(plot: Any) -> int:
    """Return how many columns of the legend fit on a narrow screen beside the axis labels."""
    labels = [item.label.value for item in plot.legend[0].items]
    available = (
        NARROW_SCREEN_PIXELS
        - LETTER_PIXELS * max(map(len, plot.yaxis[0].major_label_overrides.values()), default=6)
        - 15
    )
    fitting_counts = (count for count in range(len(labels), 1, -1) if _legend_width(labels, count) <= available)
    return next(fitting_counts, 1)


def _legend_width(labels: Sequence[str], columns: int) -> float:
    return sum(28 + LETTER_PIXELS * max(map(len, labels[column::columns])) for column in range(columns))


def timeline(timeline_data: DrawnTimeline, ranks: Sequence[int]) -> Any:
    """Draw one lane per stream, computation above communication, with every other ring step shaded."""
    lanes = lanes_of(timeline_data.bars)
    bottom, height = _rank_bands(lanes, ranks)
    end, lowest = max((bar.end_ns for bar in timeline_data.bars), default=1) / 1e6, min(bottom.values(), default=0)
    plot = _new_plot(
        "", round(130 - LANE_PIXELS * lowest), x_axis_label="ms from the first activity", x_range=(0, end),
        y_range=(lowest - RANK_GAP, 0), tools="xpan,pan,xwheel_zoom,wheel_zoom,box_zoom,reset",
        active_scroll="xwheel_zoom", active_drag="xpan", output_backend="canvas",
    )  # fmt: skip
    _shade_steps(plot, timeline_data, bottom, height)
    for category in CATEGORY_ORDER:
        bars = [bar for bar in timeline_data.bars if bar.category == category]
        if not bars:
            continue
        lane_bottoms = [bottom[bar.rank] + height[bar.rank] - lanes[bar.rank, bar.lane, bar.stream] - 1 for bar in bars]
        source = ColumnDataSource({
            "left": [round(bar.start_ns / 1e6, 6) for bar in bars],
            "right": [round(bar.end_ns / 1e6, 6) for bar in bars],
            "bottom": [lane_bottom + 0.06 for lane_bottom in lane_bottoms],
            "top": [lane_bottom + 0.94 for lane_bottom in lane_bottoms],
            "where": [f"rank {bar.rank}" + (f", stream {bar.stream}" if category != IDLE else "") for bar in bars],
            "kind": [LABELS.get(bar.kind, bar.kind) for bar in bars],
            "start": [f"{bar.start_ns / 1e6:,.3f} ms" for bar in bars],
            "time": [f"{(bar.end_ns - bar.start_ns) / 1e6:,.3f} ms" for bar in bars],
            "step": [bar.step or "-" for bar in bars],
            "sent": [bar.sent or "-" for bar in bars],
            "name": [_bar_name(bar) for bar in bars],
        })  # fmt: skip
        label, colour = label_and_colour(category)
        quads = plot.quad("left", "right", "top", "bottom", color=colour, source=source, legend_label=label)
        rows = [("", "@where"), ("", f"@kind, {label}"), ("start", "@start"), ("time", "@time"), ("step", "@step")]
        if category == IDLE:
            rows = [("", "@where"), ("idle", "@name"), ("start", "@start"), ("time", "@time")]
        sent = [("sent", "@sent")] if bars[0].lane == "communication" else []
        _add_hover(plot, [quads], *rows, *sent, *([("", "@name")] if category != IDLE else []))
    _label_ranks(plot, {rank: bottom[rank] + height[rank] / 2 for rank in ranks if rank in bottom})
    _place_legend(plot)
    return plot


def _rank_bands(
    lanes: Mapping[tuple[int, str, int], int], ranks: Sequence[int]
) -> tuple[dict[int, float], dict[int, int]]:
    """Return for each rank the lower edge of its lanes and their number; each lane is 1 high."""
    bottom: dict[int, float] = {}
    height = {
        rank: 1 + max((lane for (owner, *_), lane in lanes.items() if owner == rank), default=0) for rank in ranks
    }
    edge = 0.0
    for rank in ranks:
        edge -= RANK_GAP + height[rank]
        bottom[rank] = edge
    return bottom, height


def _label_ranks(plot: Any, middles: Mapping[int, float]) -> None:
    """Label each rank at its middle; where there are many, only every n-th."""
    ranks = list(middles)[:: -(-len(middles) // MAX_LABELS) or 1]
    plot.yaxis.ticker = FixedTicker(ticks=[middles[rank] for rank in ranks])
    plot.yaxis.major_label_overrides = {middles[rank]: f"rank {rank}" for rank in ranks}
    plot.ygrid.grid_line_color = None


def _bar_name(bar: Bar) -> str:
    name = clean(bar.name)[:80]
    return f"{name} and {bar.activities - 1} more" if bar.activities > 1 else name


def _shade_steps(
    plot: Any, timeline_data: DrawnTimeline, bottom: Mapping[int, float], height: Mapping[int, int]
) -> None:
    steps = [step for step in timeline_data.steps if step.step % 2 == 0 and step.rank in bottom]
    source = ColumnDataSource({
        "left": [(step.start_ns - timeline_data.origin_ns[step.rank]) / 1e6 for step in steps],
        "right": [(step.end_ns - timeline_data.origin_ns[step.rank]) / 1e6 for step in steps],
        "bottom": [bottom[step.rank] - RANK_GAP / 4 for step in steps],
        "top": [bottom[step.rank] + height[step.rank] + RANK_GAP / 4 for step in steps],
    })  # fmt: skip
    plot.quad("left", "right", "top", "bottom", source=source, color=_GREY, alpha=0.18, line_color=None)


def waiting(steps: Sequence[Step], ranks: Sequence[int]) -> Any | None:
    """Draw a heat map of ranks by ring steps, coloured by exposed time; None where no step has one."""
    columns = list(dict.fromkeys((step.iteration, step.phase, step.call, step.step) for step in steps))
    several_calls = any(step.call for step in steps)
    names = [f"{phase} {f'{call}.' if several_calls else ''}{number}" for _, phase, call, number in columns]
    known = [step for step in steps if step.exposed_ns is not None]
    if not known:
        return None
    row_of = {rank: -index for index, rank in enumerate(ranks)}
    column_of = {column: index for index, column in enumerate(columns)}
    largest_ms = max(step.exposed_ns / 1e6 for step in known) or 1.0
    plot = _new_plot(
        "", min(900, 20 * len(ranks) + 130), x_axis_label="ring step", tools="pan,wheel_zoom,box_zoom,reset"
    )
    source = ColumnDataSource({
        "x": [column_of[step.iteration, step.phase, step.call, step.step] for step in known],
        "y": [row_of[step.rank] for step in known],
        "exposed": [step.exposed_ns / 1e6 for step in known],
        "wait": ["not known" if step.wait_ns is None else f"{step.wait_ns / 1e6:,.3f} ms" for step in known],
        "rank": [step.rank for step in known],
        "step": [names[column_of[step.iteration, step.phase, step.call, step.step]] for step in known],
        "bound": [step.bound or "not known" for step in known],
    })  # fmt: skip
    mapper = LinearColorMapper(palette=Viridis256, low=0, high=largest_ms)
    cells = plot.rect(
        "x", "y", 0.96, 0.92, source=source, line_color=None, fill_color={"field": "exposed", "transform": mapper}
    )
    plot.add_layout(
        cells.construct_color_bar(
            width=10, title="ms exposed", background_fill_alpha=0, major_label_text_color=_GREY, title_text_color=_GREY
        ),
        "right",
    )
    _add_hover(
        plot,
        [cells],
        ("rank", "@rank"),
        ("step", "@step"),
        ("exposed", "@exposed{0.000} ms"),
        ("waited", "@wait"),
        ("bound by", "@bound"),
    )
    _label_rows(plot, [f"rank {rank}" for rank in ranks])
    stride = -(-len(names) // MAX_LABELS)
    plot.xaxis.ticker = FixedTicker(ticks=list(range(0, len(names), stride)))
    plot.xaxis.major_label_overrides = {index: names[index] for index in range(0, len(names), stride)}
    plot.xaxis.major_label_orientation = 0.9
    plot.xgrid.grid_line_color = None
    return plot


def lines(unit: str, series: Mapping[str, Iterable[tuple[float, float]]], ceiling: str, peers: Set[str]) -> Any:
    """Draw one line per name over sequence length: grey and dashed for the ceiling, dotted for peers."""
    plot = _new_plot("", 340, tools="pan,box_zoom,reset", x_axis_type="log", x_axis_label="tokens", y_axis_label=unit)
    ticks: set[float] = set()
    for index, (name, points) in enumerate(series.items()):
        x, y = zip(*sorted(points), strict=True)
        ticks.update(x)
        colour = palette.LINES[index % len(palette.LINES)] if name != ceiling else _GREY
        label = clean(name)
        source = ColumnDataSource({"x": x, "y": y, "name": [label] * len(x)})
        style = {"line_dash": "dashed" if name == ceiling else "dotted"} if name in {ceiling, *peers} else {}
        plot.line("x", "y", source=source, color=colour, line_width=2, legend_label=label, **style)
        dots = plot.scatter("x", "y", source=source, color=colour, size=8, legend_label=label)
        _add_hover(plot, [dots], ("", "@name"), ("tokens", "@x{0,0}"), (unit, "@y{0,0.0}"))
    plot.xaxis.ticker = FixedTicker(ticks=sorted(ticks))
    plot.xaxis.major_label_overrides = {tick: f"{tick:,.0f}" for tick in ticks}
    plot.y_range.start = 0
    _place_legend(plot)
    return plot


def memory(series: Mapping[str, Sequence[tuple[float, float]]]) -> Any:
    """Draw one step line per name; each value holds until the next point."""
    plot = _new_plot("", 320, x_axis_label="ms from the first activity", y_axis_label="MiB allocated")
    for index, (name, points) in enumerate(series.items()):
        source = ColumnDataSource({
            "x": [time_ms for time_ms, _ in points], "y": [size for _, size in points], "name": [name] * len(points),
        })  # fmt: skip
        line = plot.step("x", "y", mode="after", source=source, color=palette.LINES[index % len(palette.LINES)],
                         line_width=1.5, legend_label=name)  # fmt: skip
        _add_hover(plot, [line], ("", "@name"), ("from", "@x{0,0.000} ms"), ("allocated", "@y{0,0.0} MiB"))
    plot.y_range.start = 0
    _place_legend(plot)
    return plot


def stacked(names: Sequence[str], parts: Mapping[str, tuple[str, Sequence[float]]], unit: str, digits: int = 1) -> Any:
    """Draw one stacked bar per name; each part is (colour, one value per name)."""
    plot = _new_plot("", min(900, 22 * len(names) + 110), x_axis_label=unit)
    left = [0.0] * len(names)
    for part, (colour, values) in parts.items():
        right = [a + b for a, b in zip(left, values, strict=True)]
        source = ColumnDataSource({
            "y": [-row for row in range(len(names))], "left": left, "right": right,
            "name": [clean(name) for name in names], "shown": [f"{value:,.{digits}f} {unit}" for value in values],
        })  # fmt: skip
        bars = plot.hbar(y="y", left="left", right="right", height=0.8, color=colour, source=source, legend_label=part)
        _add_hover(plot, [bars], ("", "@name"), (part, "@shown"))
        left = right
    _label_rows(plot, names)
    plot.x_range.start = 0
    if len(parts) > 1:
        _place_legend(plot)
    else:
        plot.legend.visible = False
        plot.text(x="right", y="y", text="shown", x_offset=-6, text_align="right", text_baseline="middle",
                  text_font_size="11px", text_color="white", source=source)  # fmt: skip
    return plot


def intervals(names: Sequence[str], values: Sequence[Interval], axis: str) -> Any:
    """Draw a marker and its interval for each name."""
    plot = _new_plot("", 26 * len(names) + 100, x_axis_label=axis)
    source = ColumnDataSource({
        "y": [-row for row in range(len(names))],
        "low": [low for low, _, _ in values],
        "middle": [middle for _, middle, _ in values],
        "high": [high for _, _, high in values],
        "name": list(names),
    })  # fmt: skip
    plot.segment(x0="low", x1="high", y0="y", y1="y", line_width=6, color=palette.BLUE, alpha=0.4, source=source)
    marks = plot.scatter(x="middle", y="y", size=9, color=palette.BLUE, source=source)
    ends = (("from", "@low{0,0.000}"), ("to", "@high{0,0.000}"))
    _add_hover(plot, [marks], ("", "@name"), (axis, "@middle{0,0.000}"), *ends)
    plot.xaxis.ticker.desired_num_ticks = 4
    _label_rows(plot, names)
    return plot


def bands(
    x_label: str, y_label: str, series: Mapping[str, Sequence[tuple[float, Interval]]],
    marks: Sequence[tuple[float, str]] = (),
) -> Any:  # fmt: skip
    """Draw a line and the band around it for each name, over a logarithmic axis.

    ``marks`` are labelled vertical lines, as pairs (x, label).
    """
    plot = _new_plot("", 380, x_axis_label=x_label, y_axis_label=y_label, x_axis_type="log")
    for index, (name, points) in enumerate(series.items()):
        colour = palette.LINES[index % len(palette.LINES)]
        source = ColumnDataSource({
            "x": [x for x, _ in points],
            "low": [label_height for _, (label_height, _, _) in points],
            "middle": [middle for _, (_, middle, _) in points],
            "high": [high for _, (_, _, high) in points],
            "name": [name] * len(points),
        })  # fmt: skip
        plot.varea(x="x", y1="low", y2="high", color=colour, alpha=0.2, source=source, legend_label=clean(name))
        plot.line(x="x", y="middle", color=colour, line_width=2, source=source, legend_label=clean(name))
        dots = plot.scatter(x="x", y="middle", size=7, color=colour, source=source)
        rows = (("", "@name"), (x_label, "@x{0,0.##}"), (y_label, "@middle{0,0.000}"), ("from", "@low{0,0.000}"))
        _add_hover(plot, [dots], *rows, ("to", "@high{0,0.000}"))
    ticks = sorted({x for points in series.values() for x, _ in points})
    plot.xaxis.ticker = FixedTicker(ticks=ticks)
    plot.xaxis.major_label_overrides = {tick: short_count(tick) for tick in ticks}
    for index, (x, label) in enumerate(marks):
        plot.add_layout(Span(location=x, dimension="height", line_color=_GREY, line_dash="dashed"))
        label_height = 6 + 14 * index
        # The label goes to the side with more room.
        text_on_left = x * x > ticks[0] * ticks[-1]
        plot.add_layout(Label(
            x=x, y=label_height, y_units="screen", x_offset=-4 if text_on_left else 4,
            text_align="right" if text_on_left else "left", text=label, text_color=_GREY, text_font_size="11px",
        ))  # fmt: skip
    _place_legend(plot)
    return plot
