"""Interactive figures of a page, as Bokeh models. Bar charts are in `ringprof.report.page.bars`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
from bokeh.layouts import column
from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, LinearColorMapper, RangeTool
from bokeh.models.annotations import BoxAnnotation, Label, Span
from bokeh.palettes import Viridis256
from bokeh.plotting import figure

from ringprof.analysis.findings.stretches import EXPOSED
from ringprof.analysis.steps.steps import Step
from ringprof.report import palette
from ringprof.report.page.document import TimeSpan
from ringprof.report.palette import Interval
from ringprof.report.terms import LABELS
from ringprof.report.text import LONGEST_KERNEL, clean, short_count
from ringprof.report.timeline import CATEGORY_ORDER, IDLE, DrawnTimeline, label_and_colour, lanes_of

MAX_LABELS = 32
"""Number of ranks up to which each has a label beside an axis."""
NARROW_SCREEN_PIXELS = 375
"""Width in pixels of a figure on the narrowest screen, a telephone."""
LEGEND_ROW_PIXELS = 24
"""Height in pixels of a row of a legend."""
LETTER_PIXELS = 7.2
"""Approximate width in pixels of a letter of `FONT_SIZE`, in a wide font."""
LANE_PIXELS, MIN_LANE_PIXELS, RANK_GAP = 22, 5, 0.5
"""Height in pixels of a lane of a timeline, of one among very many, and the gap between two ranks in lanes."""
MAX_TIMELINE_PIXELS, MAX_OVERVIEW_PIXELS = 1100, 96
"""Approximate largest height in pixels of a timeline and of its overview."""
LABEL_PIXELS = 64
"""Width in pixels of the labels beside a timeline."""
FONT, FONT_SIZE = "system-ui, 'Segoe UI', Roboto, sans-serif", "12px"
"""Font of the page (``page.css``)."""
INK = "#555d66"
"""Colour of text in figures; the script of the page replaces it on a dark background, as no colour suits both."""
_GREY = "#757575"
"""Colour of axes and grids, on white and on near-black."""


def _new_plot(title: str, height: int, tools: str = "xpan,box_zoom,reset", **options: Any) -> Any:
    plot: Any = figure(
        title=title, height=height, sizing_mode="stretch_width", tools=tools,
        toolbar_location="above" if tools else None, background_fill_alpha=0, border_fill_alpha=0,
        outline_line_color=None, **options,
    )  # fmt: skip
    plot.toolbar.logo = None
    plot.title.text_color, plot.title.text_font, plot.title.text_font_size = INK, FONT, "14px"
    for axis in plot.axis:
        axis.major_label_text_color = axis.axis_label_text_color = INK
        axis.major_label_text_font = axis.axis_label_text_font = FONT
        axis.major_label_text_font_size = axis.axis_label_text_font_size = FONT_SIZE
        axis.axis_line_color, axis.major_tick_line_color = _GREY, _GREY
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


def timelines(runs: Sequence[tuple[DrawnTimeline, Sequence[int]]], names: Sequence[str]) -> Any:
    """Draw the timelines of several runs below each other, on one time axis."""
    plots = [timeline(run, ranks) for run, ranks in runs]
    longest = max(run_plot.x_range.end for run_plot in plots)
    for run_plot, title in zip(plots, names, strict=True):
        run_plot.title.text = clean(title)
        run_plot.x_range = plots[0].x_range
    plots[0].x_range.end = longest
    return column(*plots, sizing_mode="stretch_width")


def _place_legend(plot: Any) -> None:
    if not plot.legend:
        return
    plot.add_layout(plot.legend[0], "below")
    columns = _legend_columns(plot)
    plot.legend.orientation, plot.legend.ncols, plot.legend.location = "horizontal", columns, "left"
    # A legend takes its rows from the plot's height: make the plot higher, so that the bars keep theirs.
    plot.height += LEGEND_ROW_PIXELS * (-(-len(plot.legend[0].items) // columns) - 1)
    plot.legend.background_fill_alpha, plot.legend.border_line_color = 0, None
    plot.legend.label_text_color = INK
    plot.legend.label_text_font, plot.legend.label_text_font_size = FONT, FONT_SIZE
    plot.legend.click_policy = "hide"


def _legend_columns(plot: Any) -> int:
    """Return how many columns of the legend fit on a narrow screen beside the axis labels."""
    labels = [item.label.value for item in plot.legend[0].items]
    available = (
        NARROW_SCREEN_PIXELS
        - LETTER_PIXELS * max(map(len, plot.yaxis[0].major_label_overrides.values()), default=6)
        - 15
    )
    widths = {
        count: sum(28 + LETTER_PIXELS * max(map(len, labels[column::count])) for column in range(count))
        for count in range(len(labels), 1, -1)
    }
    return next((count for count, width in widths.items() if width <= available), 1)


def timeline(timeline_data: DrawnTimeline, ranks: Sequence[int], marks: Sequence[tuple[str, TimeSpan]] = ()) -> Any:
    """Draw one lane per stream, computation above communication, with every other ring step shaded.

    ``marks`` are stretches of exposed communication and idle time. With marks, an overview that selects the times to be
    drawn comes first. The script of the page zooms, selects and shows details; the first tag has what it needs.
    """
    lanes = lanes_of(timeline_data.bars)
    bottom, height = _rank_bands(lanes, ranks)
    end, lowest = max((bar.end_ns for bar in timeline_data.bars), default=1) / 1e6, min(bottom.values(), default=0)
    lane_pixels = min(LANE_PIXELS, max(MIN_LANE_PIXELS, MAX_TIMELINE_PIXELS / (1 - lowest)))
    plot = _new_plot(
        "", round(50 - lane_pixels * lowest), x_axis_label="ms from the first activity", x_range=(0, end),
        y_range=(lowest - RANK_GAP, 0), tools="", output_backend="canvas",
    )  # fmt: skip
    _shade_steps(plot, timeline_data, bottom, height)
    texts = _TextTable()
    for category in CATEGORY_ORDER:
        bars = [bar for bar in timeline_data.bars if bar.category == category]
        if not bars:
            continue
        label, colour = label_and_colour(category)
        lane = [bottom[bar.rank] + height[bar.rank] - lanes[bar.rank, bar.lane, bar.stream] - 0.5 for bar in bars]
        source = ColumnDataSource({
            "left": np.array([bar.start_ns for bar in bars]) / 1e6,
            "right": np.array([bar.end_ns for bar in bars]) / 1e6,
            "y": np.array(lane, np.float32),
            "rank": np.array([bar.rank for bar in bars], np.int32),
            "stream": np.array([bar.stream if category != IDLE else -1 for bar in bars], np.int32),
            "count": np.array([bar.activities for bar in bars], np.int32),
            **{
                column: np.array([texts.index(text) for text in values], np.int32)
                for column, values in (
                    ("kind", [LABELS.get(bar.kind, bar.kind) for bar in bars]),
                    ("step", [bar.step for bar in bars]),
                    ("sent", [bar.sent for bar in bars]),
                    ("name", [clean(bar.name, LONGEST_KERNEL) for bar in bars]),
                )
            },
        })  # fmt: skip
        plot.hbar(
            y="y", left="left", right="right", height=0.88, color=colour, source=source, name=label,
            nonselection_fill_alpha=0.2, nonselection_line_alpha=0.2,
        )  # fmt: skip
    plot.add_layout(BoxAnnotation(
        name="selection", visible=False, level="overlay", fill_color=palette.BLUE, fill_alpha=0.12,
        line_color=palette.BLUE,
    ))  # fmt: skip
    plot.tags = [{"timeline": True, "texts": texts.texts, "end": end}]
    _label_ranks(plot, {rank: bottom[rank] + height[rank] / 2 for rank in ranks if rank in bottom})
    if not marks:
        return plot
    ends: dict[int, tuple[int, int]] = {}
    for bar in timeline_data.bars:
        start_ns, end_ns = ends.get(bar.rank, (bar.start_ns, bar.end_ns))
        ends[bar.rank] = min(start_ns, bar.start_ns), max(end_ns, bar.end_ns)
    spans = [TimeSpan(rank, ends[rank][0] / 1e6, ends[rank][1] / 1e6) for rank in ranks if rank in ends]
    return column(_overview(plot, spans, marks), plot, sizing_mode="stretch_width")


class _TextTable:
    """Texts that bars refer to by number, each stored once."""

    def __init__(self) -> None:
        self._number: dict[str, int] = {}

    def index(self, text: str) -> int:
        """Return the number of a text."""
        return self._number.setdefault(text, len(self._number))

    @property
    def texts(self) -> list[str]:
        return list(self._number)


def _overview(plot: Any, ranks: Sequence[TimeSpan], marks: Sequence[tuple[str, TimeSpan]]) -> Any:
    """Draw a row per rank from its first to its last activity, with stretches without computation.

    A box selects the times that ``plot`` shows.
    """
    height = min(16 * len(ranks), max(MAX_OVERVIEW_PIXELS, len(ranks)))
    bar_height = 0.8 if height >= 4 * len(ranks) else 1.0
    row_of = {span.rank: -row for row, span in enumerate(ranks)}
    end = plot.x_range.end
    overview = _new_plot(
        "", height + 30, x_range=(0, end), y_range=(0.5 - len(ranks), 0.5), tools="",
        output_backend="canvas",
    )  # fmt: skip
    overview.tags = [{"overview": True}]
    overview.hbar(
        y=list(row_of.values()), left=[span.start_ms for span in ranks], right=[span.end_ms for span in ranks],
        height=bar_height, color=palette.BUSY, line_color=None,
    )  # fmt: skip
    for what in (IDLE, EXPOSED):
        # Shorter ones would be less than half a pixel wide on most screens.
        spans = [span for kind, span in marks if kind == what and span.end_ms - span.start_ms > end / 3000]
        if spans:
            overview.hbar(
                y=[row_of[span.rank] for span in spans], left=[span.start_ms for span in spans],
                right=[span.end_ms for span in spans], height=bar_height, color=palette.STRETCH_COLOURS[what],
                line_width=0.5,
            )  # fmt: skip
    tool = RangeTool(x_range=plot.x_range)
    # Older Bokeh moves and resizes the box only.
    if "start_gesture" in RangeTool.properties():
        tool.start_gesture = "pan"
    tool.overlay.fill_color, tool.overlay.fill_alpha, tool.overlay.line_color = palette.BLUE, 0.1, palette.BLUE
    overview.add_tools(tool)
    _label_ranks(overview, {rank: float(row) for rank, row in row_of.items()}, MAX_OVERVIEW_PIXELS // 12)
    return overview


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


def _label_ranks(plot: Any, middles: Mapping[int, float], most: int = MAX_LABELS) -> None:
    """Label each rank at its middle; where there are more than ``most``, only every n-th."""
    ranks = list(middles)[:: -(-len(middles) // most) or 1]
    plot.yaxis.ticker = FixedTicker(ticks=[middles[rank] for rank in ranks])
    plot.yaxis.major_label_overrides = {middles[rank]: f"rank {rank}" for rank in ranks}
    plot.ygrid.grid_line_color = None
    # Overview and timeline have one time axis: labels of both take this width.
    plot.min_border_left, plot.min_border_right = LABEL_PIXELS, 12


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
    plot = _new_plot("", min(900, 20 * len(ranks) + 130), x_axis_label="ring step", tools="pan,box_zoom,reset")
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
            width=10,
            title="ms exposed",
            background_fill_alpha=0,
            major_label_text_color=INK,
            title_text_color=INK,
            major_label_text_font=FONT,
            title_text_font=FONT,
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
            text_align="right" if text_on_left else "left", text=label, text_color=INK,
            text_font=FONT, text_font_size=FONT_SIZE,
        ))  # fmt: skip
    _place_legend(plot)
    return plot
