"""Plots with matplotlib. Each function draws on ``ax``, or on a new figure where it is None, and returns the axes.

No plot is shown automatically. Text from traces is drawn literally: no dollar sign starts a formula.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from ringprof.analysis.findings.comparison import Comparison
from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.metric import Measurement
from ringprof.analysis.findings.parts import WATERFALL_LABELS
from ringprof.analysis.findings.time_table import PARTS
from ringprof.analysis.findings.uncertainty import own_interval
from ringprof.analysis.findings.waterfall import LIMITS, NEEDED_WORK
from ringprof.analysis.steps.steps import Step
from ringprof.analysis.timeline.idle import causes_of_ranks
from ringprof.common.formatting import percent, significant
from ringprof.errors import UsageError, nearest
from ringprof.report import palette
from ringprof.report.palette import Interval
from ringprof.report.sections.idle import PEER_LABEL, class_label, known_idle, stacked_parts, time_by_class
from ringprof.report.sections.run import describe_run
from ringprof.report.terms import LABELS
from ringprof.report.text import clean, duration, short_count
from ringprof.report.timeline import CATEGORY_ORDER, label_and_colour, timeline_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer

STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "font.size": 10,
    "grid.color": "#D5DAE0",
    "legend.frameon": False,
    "savefig.bbox": "tight",
    "savefig.dpi": 150,
    "svg.fonttype": "none",
}
"""Style shared by all plots."""
INCHES_PER_ROW = 0.32
MAX_INCHES = 14.0
POINTS_PER_LABEL = 12.0
"""Height in points that a row's label needs."""
LABEL_MARGIN = 0.2
"""Margin for the figure at the end of the longest bar, as a share of that bar."""
LABEL_ROOM = 0.24
"""Room that the text beside a bar needs, as a share of the axis."""
TITLE_WIDTH = 88
MAX_NUMBERED_CELLS = 256
"""Number of cells up to which a heat map shows numbers; with more they would not be readable."""
MARKERS = "osD^"


class PlotSet:
    """Plots of one result; each is a method, and can be named: ``result.plot("timeline")``."""

    def __call__(self, kind: str = "", ax: Axes | None = None) -> Axes:
        """Draw the plot ``kind``, by default the first. Raises `UsageError` for a plot that there is not."""
        kinds = [name for name in vars(type(self)) if not name.startswith("_")]
        if kind and kind not in kinds:
            raise UsageError(f"no plot {kind!r}{nearest(kind, kinds)}; there are: {', '.join(kinds)}")
        axes: Axes = getattr(self, kind or kinds[0])(ax)
        return axes


class Plots(PlotSet):
    """Plots of one run, available as ``run.plot``."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings

    def waterfall(self, ax: Axes | None = None) -> Axes:
        """Plot the waterfall from the device's peak to the achieved speed, in ms of the slowest rank's wall."""
        parts = [part for part in self._findings.waterfall.parts if part.time_ns]
        ax = _axes_or_new(ax, len(parts))
        end_ns = 0
        for row, part in enumerate(parts):
            colour = palette.WATERFALL_COLOURS[part.part]
            ax.barh(row, part.time_ns / 1e6, left=end_ns / 1e6, color=colour, height=0.7)
            span = end_ns / 1e6, (end_ns + part.time_ns) / 1e6
            text = f"{significant(part.time_ns / 1e6, 3)} ms, {percent(part.share)}"
            _label_bar(ax, row, span, text, self._findings.waterfall.wall_ns / 1e6)
            end_ns += part.time_ns
        ax.margins(x=0.02)
        _label_rows(ax, [WATERFALL_LABELS[part.part] for part in parts])
        no_losses = {*LIMITS, *NEEDED_WORK}
        losses = [part for part in parts if part.part not in no_losses]
        largest_loss = max(losses, key=lambda part: part.time_ns, default=None)
        answer = f"of {duration(end_ns)} most is lost to: {WATERFALL_LABELS[largest_loss.part]}" if largest_loss else ""
        return self._titled(_finish(ax, "ms of the slowest rank's wall"), answer)

    def breakdown(self, ax: Axes | None = None) -> Axes:
        """Plot one stacked bar per rank in ms, labelled with its share of exposed communication."""
        ranks = self._findings.attribution.ranks
        ax = _axes_or_new(ax, len(ranks))
        parts = {}
        for name in PARTS[:-1]:
            times = [(getattr(rank.breakdown, f"{name}_ns") or 0) / 1e6 for rank in ranks]
            if any(times):
                parts[LABELS[name]] = palette.PART_COLOURS[name], times
        last = _stack(ax, parts, len(ranks))
        if last is not None and _labels_fit(ax, len(ranks)):
            ax.bar_label(last, [f"{percent(rank.breakdown.exposed_comm_share)} exposed" for rank in ranks], padding=4)
            ax.margins(x=LABEL_MARGIN)
        _label_rows(ax, [f"rank {rank.rank}" for rank in ranks])
        worst = max(ranks, key=lambda rank: rank.breakdown.exposed_comm_share)
        share = percent(worst.breakdown.exposed_comm_share)
        answer = (
            f"{percent(self._findings.summary.exposed_mean)} exposed communication; most on rank {worst.rank}, {share}"
        )
        return self._titled(_finish(ax, "ms", legend=True), answer)

    def idle(self, ax: Axes | None = None) -> Axes:
        """Plot idle time by class, one stacked bar per rank, in ms.

        The hatched part is time blocked on a peer, which is communication.
        """
        ranks = known_idle(self._findings)
        ax = _axes_or_new(ax, len(ranks))
        parts = stacked_parts(ranks)
        last = _stack(ax, parts, len(ranks))
        if last is not None and PEER_LABEL in parts:
            for patch in last:
                patch.set(hatch="///", edgecolor="white", linewidth=0)
        _label_rows(ax, [f"rank {rank.rank}" for rank, _ in ranks])
        causes, wall = (
            causes_of_ranks([causes for _, causes in ranks]),
            sum(rank.breakdown.wall_ns for rank, _ in ranks),
        )
        times = time_by_class(causes)
        longest = max(times, key=lambda name: times[name], default="")
        share = percent(causes.total_ns / wall) if wall else "0 %"
        answer = f"{share} of the mean wall is idle" + (f"; longest: {class_label(longest)}" if longest else "")
        return self._titled(_finish(ax, "ms", legend=True), answer)

    def timeline(self, ax: Axes | None = None) -> Axes:
        """Plot two lanes per rank: computation above, communication below, split into waiting and wire where known."""
        ranks = [rank.rank for rank in self._findings.attribution.ranks if not rank.on_cpu]
        drawn = timeline_of(self._findings.attribution, self._findings.steps)
        ax = _axes_or_new(ax, len(ranks) * 1.6)
        row_of = {rank: row for row, rank in enumerate(ranks)}
        labels: dict[str, list[str]] = {}
        for category in sorted({bar.category for bar in drawn.bars}, key=CATEGORY_ORDER.index):
            name, colour = label_and_colour(category)
            labels.setdefault(colour, []).append(name)
            for rank in ranks:
                bars = [bar for bar in drawn.bars if bar.rank == rank and bar.category == category]
                if bars:
                    spans = [(bar.start_ns / 1e6, (bar.end_ns - bar.start_ns) / 1e6) for bar in bars]
                    bottom = row_of[rank] - 0.4 if bars[0].lane == "compute" else row_of[rank] + 0.02
                    ax.broken_barh(spans, (bottom, 0.38), facecolors=colour)
        for colour, names in labels.items():
            ax.barh(0, 0, color=colour, label=" / ".join(names))
        _label_rows(ax, [f"rank {rank}" for rank in ranks])
        return self._titled(_finish(ax, "ms from the first activity", legend=True))

    def steps(self, ax: Axes | None = None) -> Axes:
        """Plot the attention block and the exposed communication of each ring step, in ms.

        Times are means over ranks and calls.
        """
        groups = _by_step(self._findings.steps)
        ax = _axes_or_new(ax, len(groups))
        block = [_mean([step.block_ns for step in steps]) for steps in groups.values()]
        exposed = [_mean([step.exposed_ns for step in steps]) for steps in groups.values()]
        parts = {"attention block": (palette.BLUE, block), "exposed communication": (palette.WIRE, exposed)}
        last = _stack(ax, parts, len(groups))
        if last is not None and _labels_fit(ax, len(groups)):
            ax.bar_label(last, [f"{time:,.2f} ms exposed" for time in exposed], padding=4)
            ax.margins(x=LABEL_MARGIN)
        _label_rows(ax, list(groups))
        most_exposed = max(zip(exposed, groups, strict=True), default=(0.0, ""))
        answer = (
            f"most exposed: {most_exposed[1]}, {duration(most_exposed[0] * 1e6)}"
            if most_exposed[0]
            else "nothing exposed"
        )
        return self._titled(_finish(ax, "ms, mean over ranks", legend=True), answer)

    def waiting(self, ax: Axes | None = None) -> Axes:
        """Plot a heat map of exposed communication in ms, rank by ring step.

        Waiting that is hidden behind computation costs nothing and is not shown.
        """
        ranks = [rank.rank for rank in self._findings.attribution.ranks]
        groups = _by_step(self._findings.steps)
        ax = _axes_or_new(ax, len(ranks))
        grid = np.full((len(ranks), max(1, len(groups))), np.nan)
        for column, steps in enumerate(groups.values()):
            for step in steps:
                cell = ranks.index(step.rank), column
                grid[cell] = np.nansum([grid[cell], step.exposed_ns / 1e6])
        image = ax.imshow(grid, aspect="auto", cmap="OrRd", vmin=0)
        ax.figure.colorbar(image, ax=ax, label="exposed, ms")
        _label_rows(ax, [f"rank {rank}" for rank in ranks])
        stride = -(-len(groups) // 24) or 1
        ax.set_xticks(range(0, len(groups), stride), list(groups)[::stride], rotation=45, ha="right")
        if grid.size <= MAX_NUMBERED_CELLS and _labels_fit(ax, len(ranks)):
            _write_numbers(ax, grid)
        answer = ""
        if np.nanmax(grid, initial=0) > 0:
            row, column = (int(cell) for cell in np.unravel_index(np.nanargmax(grid), grid.shape))
            answer = f"most exposed: rank {ranks[row]} in {list(groups)[column]}, {duration(grid[row, column] * 1e6)}"
        return self._titled(_finish(ax, "exposed communication by ring step", grid=False), answer)

    def _titled(self, ax: Axes, answer: str = "") -> Axes:
        """Set the title: what ran, and the plot's main result."""
        attribution = self._findings.attribution
        devices = ", ".join(dict.fromkeys(clean(rank.device or "CPU") for rank in attribution.ranks))
        count = len(attribution.ranks)
        where = f"{count} rank{'s' if count > 1 else ''}, {devices}"
        description = f"{describe_run(attribution.run, in_title=True)} · {where}" if attribution.run else where
        return _set_title(ax, [*_title_lines(description), *([answer] if answer else [])])


class ComparisonPlots(PlotSet):
    """Plots of a comparison, available as ``comparison.plot``."""

    def __init__(self, result: Comparison) -> None:
        self._result = result

    def comparison(self, ax: Axes | None = None) -> Axes:
        """Plot one bar per entry, fastest first: TFLOP/s per device, with the 95 % interval of its median."""
        entries = [entry for entry in self._result.entries if "tflops" in entry.figures]
        entries.sort(key=lambda entry: entry.figures["tflops"].value, reverse=True)
        ax = _axes_or_new(ax, len(entries))
        for row, entry in enumerate(entries):
            figure = entry.figures["tflops"]
            low, high = own_interval(figure.recordings) or (figure.value, figure.value)
            ends = [[max(0.0, figure.value - low)], [max(0.0, high - figure.value)]]
            bar = ax.barh(row, figure.value, xerr=ends, color=palette.BLUE, height=0.7)
            ax.bar_label(bar, [f"{figure.value:,.1f}" if figure.value >= 10 else f"{figure.value:.3g}"], padding=6)
        ax.margins(x=LABEL_MARGIN)
        prefix, names = without_common_prefix([clean(entry.label) for entry in entries])
        _label_rows(ax, names)
        _set_title(ax, [f"Speed of {len(entries)} runs" + (f": {prefix}…" if prefix else "")])
        return _finish(ax, "TFLOP/s per device; whiskers: 95 % interval (of one recording: of its iterations)")

    def scaling(self, ax: Axes | None = None) -> Axes:
        """Plot TFLOP/s per device over tokens, one line per strategy, transport and number of hosts.

        Each line goes through the median of the runs of one length. The dashed line is the attention kernels' own rate.
        """
        lengths = {entry.settings.get("seq") for entry in self._result.entries}
        ax = _axes_or_new(ax, 14 if len(lengths) > 1 else len(self._result.entries))
        speed: dict[str, dict[int, list[float]]] = {}
        ceiling: dict[int, float] = {}
        for entry in self._result.entries:
            seq, figures = entry.settings.get("seq"), entry.figures
            if seq is None or "tflops" not in figures:
                continue
            speed.setdefault(_line_name(entry), {}).setdefault(int(seq), []).append(figures["tflops"].value)
            kernel_rate = figures.get("solo_tflops") or figures.get("block_tflops")
            if kernel_rate is not None:
                ceiling[int(seq)] = max(kernel_rate.value, ceiling.get(int(seq), 0.0))
        if len({seq for points in speed.values() for seq in points}) == 1:
            return _bars_of_one_length(ax, {name: median(*points.values()) for name, points in speed.items()}, ceiling)
        if ceiling:
            x, y = zip(*sorted(ceiling.items()), strict=True)
            ax.plot(x, y, "--", color=palette.GREY, label="the kernels' own rate")
        # Lines are in the order of their right ends, so that the legend has the order of the plot.
        order = sorted(speed, key=lambda name: (-max(speed[name]), -median(speed[name][max(speed[name])])))
        for index, name in enumerate(order):
            x, y = zip(*sorted((seq, median(rates)) for seq, rates in speed[name].items()), strict=True)
            marker = MARKERS[index // len(palette.LINES) % len(MARKERS)]
            colour = palette.LINES[index % len(palette.LINES)]
            ax.plot(x, y, f"{marker}-", color=colour, label=_escape_dollars(clean(name)), alpha=0.85)
        ticks = sorted({seq for points in speed.values() for seq in points})
        ax.set_xscale("log", base=2)
        ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        ax.minorticks_off()
        ax.set_ylim(bottom=0)
        ax.set_ylabel("TFLOP/s per device")
        ax.grid(axis="y")
        return _finish(ax, "tokens", legend=True)


def without_common_prefix(names: Sequence[str]) -> tuple[str, list[str]]:
    """Split names into the prefix of whole words that all of them share and what differs, which is never empty."""
    shared = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    prefix = "".join(letters[0] for letters in shared)
    end = max(prefix.rfind(separator) for separator in "-_/. ") + 1 if len(names) > 1 else 0
    if any(len(name) <= end for name in names):
        return "", [*names]
    return prefix[:end], [name[end:] for name in names]


def _bars_of_one_length(ax: Axes, speed: Mapping[str, float], ceiling: Mapping[int, float]) -> Axes:
    """Plot one bar per name, fastest first, and the kernels' own rate as a dashed line."""
    names = sorted(speed, key=lambda name: -speed[name])
    for row, name in enumerate(names):
        ax.barh(row, speed[name], color=palette.LINES[0], height=0.7)
        # Inside the bar, where the dashed line does not cross it.
        _label_bar(ax, row, (0.0, speed[name]), significant(speed[name], 3), speed[name])
    for rate in ceiling.values():
        ax.axvline(rate, color=palette.GREY, linestyle="--", label="the kernels' own rate")
    _label_rows(ax, names)
    return _finish(ax, "TFLOP/s per device", legend=bool(ceiling))


def _line_name(entry: Measurement) -> str:
    """Name a line by its strategy and what else changes its speed: copied hops and the number of hosts."""
    settings = entry.settings
    world, per_host = int(settings.get("world_size") or 1), int(settings.get("ranks_per_host") or 1)
    qualifiers = ["copied hops"] if settings.get("hops") == "copy" else []
    qualifiers += [f"{-(-world // per_host)} hosts"] if world > per_host and settings.get("ranks_per_host") else []
    return f"{settings.get('strategy')}" + (f" ({', '.join(qualifiers)})" if qualifiers else "")


# --- the style --------------------------------------------------------------------------------------


def intervals(names: Sequence[str], values: Sequence[Interval], unit: str, ax: Axes | None = None) -> Axes:
    """Plot a marker and its interval for each name, the first on top."""
    ax = _axes_or_new(ax, len(names))
    for row, (low, middle, high) in enumerate(values):
        ax.plot([low, high], [row, row], color=palette.BLUE, alpha=0.4, linewidth=5, solid_capstyle="butt")
        ax.plot(middle, row, "o", color=palette.BLUE, markersize=6)
    _label_rows(ax, names)
    return _finish(ax, unit)


def bands(
    x_label: str, y_label: str, series: Mapping[str, Sequence[tuple[float, Interval]]],
    marks: Sequence[tuple[float, str]] = (), ax: Axes | None = None,
) -> Axes:  # fmt: skip
    """Plot a line and the band around it for each name, over a logarithmic axis.

    ``marks`` are labelled vertical lines, as pairs (x, label).
    """
    ax = _axes_or_new(ax, 10)
    for index, (name, points) in enumerate(series.items()):
        colour = palette.LINES[index % len(palette.LINES)]
        xs = [x for x, _ in points]
        low, middle, high = zip(*(interval for _, interval in points), strict=True)
        ax.fill_between(xs, low, high, color=colour, alpha=0.2, linewidth=0)
        ax.plot(xs, middle, "o-", color=colour, label=_escape_dollars(clean(name)))
    ticks = sorted({x for points in series.values() for x, _ in points})
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [short_count(tick) for tick in ticks])
    for index, (x, label) in enumerate(marks):
        ax.axvline(x, color=palette.GREY, linestyle="--", linewidth=1)
        # The label goes to the side with more room.
        text_on_left = x * x > ticks[0] * ticks[-1]
        ax.annotate(label, (x, 0.02 + 0.06 * index), xycoords=("data", "axes fraction"),
                    xytext=(-4 if text_on_left else 4, 0), textcoords="offset points",
                    ha="right" if text_on_left else "left")  # fmt: skip
    ax.set_ylabel(y_label)
    return _finish(ax, x_label, legend=True)


def parts(rows: Mapping[str, Mapping[str, float]], unit: str, ax: Axes | None = None) -> Axes:
    """Plot one stacked bar per row, made of its parts."""
    ax = _axes_or_new(ax, len(rows))
    names = list(dict.fromkeys(part for row in rows.values() for part in row))
    stacked = {
        part: (palette.LINES[index % len(palette.LINES)], [row.get(part, 0.0) for row in rows.values()])
        for index, part in enumerate(names)
    }
    _stack(ax, stacked, len(rows))
    _label_rows(ax, list(rows))
    return _finish(ax, unit, legend=True)


def _axes_or_new(ax: Axes | None, rows: float) -> Axes:
    if ax is not None:
        return ax
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # This figure is in no global list: nothing has to be closed, and nothing is shown.
    with rc_context(STYLE):
        height = min(MAX_INCHES, max(2.0, INCHES_PER_ROW * rows + 1.2))
        return Figure(figsize=(9, height), layout="constrained").add_subplot()


def _label_rows(ax: Axes, names: Sequence[str]) -> None:
    """Label the rows downward with names, only as many as fit."""
    ax.set_ylim(max(1, len(names)) - 0.5, -0.5)  # equal limits are a warning of matplotlib
    stride = max(1, -(-len(names) * POINTS_PER_LABEL // _height_points(ax)))
    labelled = range(0, len(names), int(stride))
    ax.set_yticks(list(labelled), [_escape_dollars(clean(names[row])) for row in labelled])


def _label_bar(ax: Axes, row: int, span: tuple[float, float], text: str, longest: float) -> None:
    """Write a text beside a bar: behind its end, or before its start, or in it, so that the text stays in the axes."""
    left, right = sorted(span)
    room = LABEL_ROOM * longest
    if right + room <= longest:
        ax.annotate(text, (right, row), (4, 0), textcoords="offset points", va="center")
    elif left >= room:
        ax.annotate(text, (left, row), (-4, 0), textcoords="offset points", va="center", ha="right")
    else:
        ax.annotate(text, (right, row), (-4, 0), textcoords="offset points", va="center", ha="right", color="white")


def _title_lines(description: str) -> list[str]:
    """Break a description between its parts, without a separator at the end of a line."""
    lines = [""]
    for part in description.split(" · "):
        joined = f"{lines[-1]} · {part}" if lines[-1] else part
        lines[-1:] = [joined] if len(joined) <= TITLE_WIDTH or not lines[-1] else [lines[-1], part]
    return lines


def _set_title(ax: Axes, lines: Sequence[str]) -> Axes:
    ax.set_title(_escape_dollars("\n".join(lines)), loc="left", fontsize="medium")
    return ax


def _escape_dollars(text: str) -> str:
    """Escape a text so that matplotlib does not read it as a formula."""
    return text.replace("$", r"\$")


def _labels_fit(ax: Axes, count: int) -> bool:
    """Return whether each of ``count`` rows is high enough for its label."""
    return count * POINTS_PER_LABEL <= _height_points(ax)


def _height_points(ax: Axes) -> float:
    figure: Any = ax.figure.figure  # the root figure, also in Matplotlib 3.8
    return float(figure.get_figheight()) * 72 * 0.7


def _write_numbers(ax: Axes, grid: Any) -> None:
    """Write the numbers into a heat map, in white where the cell is dark."""
    darkest = grid[grid > 0].max(initial=0.0)
    digits = 0 if darkest >= 100 else 1 if darkest >= 10 else 2
    for row, column in zip(*(grid >= 0.5 / 10**digits).nonzero(), strict=True):
        value = grid[row, column]
        colour = "white" if value > 0.65 * darkest else "black"
        ax.text(column, row, f"{value:.{digits}f}", ha="center", va="center", fontsize="small", color=colour)


def _stack(ax: Axes, parts: Mapping[str, tuple[str, Sequence[float]]], count: int) -> BarContainer | None:
    """Draw stacked bars; return the bars of the last part, which end where the whole ends."""
    left, last = [0.0] * count, None
    for label, (colour, values) in parts.items():
        last = ax.barh(range(count), values, left=left, color=colour, height=0.8, label=label)
        left = [a + b for a, b in zip(left, values, strict=True)]
    return last


def _finish(ax: Axes, label: str, *, legend: bool = False, grid: bool = True) -> Axes:
    ax.set_xlabel(label)
    if grid:
        ax.grid(axis="x")
    if legend and ax.get_legend_handles_labels()[1]:
        from matplotlib.transforms import ScaledTranslation

        # Half an inch below the axes, whatever their height: under the axis's own labels.
        figure: Any = ax.figure
        below = ax.transAxes + ScaledTranslation(0, -0.5, figure.dpi_scale_trans)
        ax.legend(loc="upper left", bbox_to_anchor=(0, 0), bbox_transform=below, borderaxespad=0, ncols=4)
    return ax


def _by_step(steps: Sequence[Step]) -> dict[str, list[Step]]:
    groups: dict[str, list[Step]] = {}
    for step in sorted(steps, key=lambda step: (step.phase != "fwd", step.step)):
        groups.setdefault(f"{step.phase} {step.step}", []).append(step)
    return groups


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) / 1e6
