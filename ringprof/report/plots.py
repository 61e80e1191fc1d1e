"""Plots with matplotlib: each function draws on ``ax`` (a new figure's where None), returns the axes, shows nothing.

Text from traces is drawn as it is: no dollar sign starts a formula.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from ringprof.analysis.findings.comparison import Comparison, Measurement
from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.summary import PARTS
from ringprof.analysis.findings.waterfall import WATERFALL_LABELS
from ringprof.analysis.steps.steps import Step
from ringprof.analysis.timeline.idle import causes_of_ranks
from ringprof.formatting import percent
from ringprof.report import palette
from ringprof.report.palette import Interval
from ringprof.report.sections.idle import PEER_LABEL, class_label, known_idle, stacked_parts, time_by_class
from ringprof.report.sections.run import what_ran
from ringprof.report.terms import LABELS
from ringprof.report.text import clean, duration, short_count
from ringprof.report.timeline import ORDER, drawn_as, timeline_of

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
"""The one style of all plots."""
ROW_INCHES = 0.32
LARGEST_INCHES = 14.0
POINTS_A_LABEL = 12.0
"""Height that a row's label needs."""
ROOM_FOR_LABELS = 0.16
"""Beside the longest bar, as a share of it, for the figure at its end."""
TITLE_WIDTH = 88
MOST_NUMBERED = 256
"""Cells of a heat map; the numbers of more could not be read."""
MARKERS = "osD^"


class Plots:
    """``run.plot``: the plots of one run."""

    def __init__(self, found: Findings) -> None:
        self._found = found

    def waterfall(self, ax: Axes | None = None) -> Axes:
        """From the device's peak down to the speed achieved, ms of the slowest rank's wall."""
        parts = [part for part in self._found.waterfall.parts if part.time_ns]
        ax = _axes(ax, len(parts))
        at = 0
        for place, part in enumerate(parts):
            colour = palette.WATERFALL_COLOURS[part.part]
            bar = ax.barh(place, part.time_ns / 1e6, left=at / 1e6, color=colour, height=0.7)
            ax.bar_label(bar, [f"{part.time_ns / 1e6:,.2f} ms, {percent(part.share)}"], padding=4)
            at += part.time_ns
        ax.margins(x=ROOM_FOR_LABELS)
        _rows(ax, [WATERFALL_LABELS[part.part] for part in parts])
        losses = [part for part in parts if part.part not in ("peak", "attention")]
        loss = max(losses, key=lambda part: part.time_ns, default=None)
        answer = f"of {duration(at)} most is lost to: {WATERFALL_LABELS[loss.part]}" if loss else ""
        return self._titled(_finish(ax, "ms of the slowest rank's wall"), answer)

    def breakdown(self, ax: Axes | None = None) -> Axes:
        """One stacked bar a rank, ms; beside it what of it is exposed communication."""
        ranks = self._found.attribution.ranks
        ax = _axes(ax, len(ranks))
        parts = {}
        for name in PARTS[:-1]:
            times = [(getattr(rank.breakdown, f"{name}_ns") or 0) / 1e6 for rank in ranks]
            if any(times):
                parts[LABELS[name]] = palette.PART_COLOURS[name], times
        last = _stack(ax, parts, len(ranks))
        if last is not None and _fits(ax, len(ranks)):
            ax.bar_label(last, [f"{percent(rank.breakdown.exposed_comm_share)} exposed" for rank in ranks], padding=4)
            ax.margins(x=ROOM_FOR_LABELS)
        _rows(ax, [f"rank {rank.rank}" for rank in ranks])
        worst = max(ranks, key=lambda rank: rank.breakdown.exposed_comm_share)
        share = percent(worst.breakdown.exposed_comm_share)
        answer = (
            f"{percent(self._found.summary.exposed_mean)} exposed communication; most on rank {worst.rank}, {share}"
        )
        return self._titled(_finish(ax, "ms", legend=True), answer)

    def idle(self, ax: Axes | None = None) -> Axes:
        """Idle time by class, one stacked bar per rank, ms; hatched, time blocked on a peer, which is communication."""
        ranks = known_idle(self._found)
        ax = _axes(ax, len(ranks))
        parts = stacked_parts(ranks)
        last = _stack(ax, parts, len(ranks))
        if last is not None and PEER_LABEL in parts:
            for patch in last:
                patch.set(hatch="///", edgecolor="white", linewidth=0)
        _rows(ax, [f"rank {known.rank.rank}" for known in ranks])
        causes, wall = causes_of_ranks([known.causes for known in ranks]), sum(k.rank.breakdown.wall_ns for k in ranks)
        times = time_by_class(causes)
        longest = max(times, key=lambda name: times[name], default="")
        share = percent(causes.total_ns / wall) if wall else "0 %"
        answer = f"{share} of the mean wall is idle" + (f"; longest: {class_label(longest)}" if longest else "")
        return self._titled(_finish(ax, "ms", legend=True), answer)

    def timeline(self, ax: Axes | None = None) -> Axes:
        """Two lanes a rank: computation above, communication below, split into waiting and wire where known."""
        ranks = [rank.rank for rank in self._found.attribution.ranks if not rank.on_cpu]
        drawn = timeline_of(self._found.attribution, self._found.steps)
        ax = _axes(ax, len(ranks) * 1.6)
        place = {rank: at for at, rank in enumerate(ranks)}
        labels: dict[str, list[str]] = {}
        for what in sorted({bar.what for bar in drawn.bars}, key=ORDER.index):
            name, colour = drawn_as(what)
            labels.setdefault(colour, []).append(name)
            for rank in ranks:
                mine = [bar for bar in drawn.bars if bar.rank == rank and bar.what == what]
                if mine:
                    spans = [(bar.start_ns / 1e6, (bar.end_ns - bar.start_ns) / 1e6) for bar in mine]
                    low = place[rank] - 0.4 if mine[0].lane == "compute" else place[rank] + 0.02
                    ax.broken_barh(spans, (low, 0.38), facecolors=colour)
        for colour, names in labels.items():
            ax.barh(0, 0, color=colour, label=" / ".join(names))
        _rows(ax, [f"rank {rank}" for rank in ranks])
        return self._titled(_finish(ax, "ms from the first activity", legend=True))

    def steps(self, ax: Axes | None = None) -> Axes:
        """Ring steps, mean over ranks and calls: what the block took, and what of the step's hops was exposed, ms."""
        groups = _by_step(self._found.steps)
        ax = _axes(ax, len(groups))
        block = [_mean([one.block_ns for one in steps]) for steps in groups.values()]
        exposed = [_mean([one.exposed_ns for one in steps]) for steps in groups.values()]
        parts = {"attention block": (palette.BLUE, block), "exposed communication": (palette.WIRE, exposed)}
        last = _stack(ax, parts, len(groups))
        if last is not None and _fits(ax, len(groups)):
            ax.bar_label(last, [f"{time:,.2f} ms exposed" for time in exposed], padding=4)
            ax.margins(x=ROOM_FOR_LABELS)
        _rows(ax, list(groups))
        worst = max(zip(exposed, groups, strict=True), default=(0.0, ""))
        answer = f"most exposed: {worst[1]}, {duration(worst[0] * 1e6)}" if worst[0] else "nothing exposed"
        return self._titled(_finish(ax, "ms, mean over ranks", legend=True), answer)

    def waiting(self, ax: Axes | None = None) -> Axes:
        """Heat map of the exposed communication, rank by ring step, ms: what waited behind computation cost nothing."""
        ranks = [rank.rank for rank in self._found.attribution.ranks]
        groups = _by_step(self._found.steps)
        ax = _axes(ax, len(ranks))
        grid = np.full((len(ranks), max(1, len(groups))), np.nan)
        for column, steps in enumerate(groups.values()):
            for one in steps:
                place = ranks.index(one.rank), column
                grid[place] = np.nansum([grid[place], one.exposed_ns / 1e6])
        image = ax.imshow(grid, aspect="auto", cmap="OrRd", vmin=0)
        ax.figure.colorbar(image, ax=ax, label="exposed, ms")
        _rows(ax, [f"rank {rank}" for rank in ranks])
        step = -(-len(groups) // 24) or 1
        ax.set_xticks(range(0, len(groups), step), list(groups)[::step], rotation=45, ha="right")
        if grid.size <= MOST_NUMBERED and _fits(ax, len(ranks)):
            _numbered(ax, grid)
        answer = ""
        if np.nanmax(grid, initial=0) > 0:
            at, column = (int(place) for place in np.unravel_index(np.nanargmax(grid), grid.shape))
            answer = f"most exposed: rank {ranks[at]} in {list(groups)[column]}, {duration(grid[at, column] * 1e6)}"
        return self._titled(_finish(ax, "exposed communication by ring step", grid=False), answer)

    def _titled(self, ax: Axes, answer: str = "") -> Axes:
        """What was run, and what the plot says of it."""
        attribution = self._found.attribution
        devices = ", ".join(dict.fromkeys(clean(rank.device or "CPU") for rank in attribution.ranks))
        count = len(attribution.ranks)
        where = f"{count} rank{'s' if count > 1 else ''}, {devices}"
        what = f"{what_ran(attribution.run)} · {where}" if attribution.run else where
        lines = [*textwrap.wrap(what, TITLE_WIDTH), *([answer] if answer else [])]
        ax.set_title(_literal("\n".join(lines)), loc="left", fontsize="medium")
        return ax


def comparison(found: Comparison, ax: Axes | None = None) -> Axes:
    """One bar an entry, fastest first: TFLOP/s per device, with the 95 % interval of its median."""
    entries = [entry for entry in found.entries if "tflops" in entry.figures]
    entries.sort(key=lambda entry: entry.figures["tflops"].value, reverse=True)
    ax = _axes(ax, len(entries))
    for place, entry in enumerate(entries):
        figure = entry.figures["tflops"]
        low, high = figure.interval() or (figure.value, figure.value)
        ends = [[max(0.0, figure.value - low)], [max(0.0, high - figure.value)]]
        bar = ax.barh(place, figure.value, xerr=ends, color=palette.BLUE, height=0.7)
        ax.bar_label(bar, [f"{figure.value:,.1f}" if figure.value >= 10 else f"{figure.value:.3g}"], padding=6)
    ax.margins(x=ROOM_FOR_LABELS)
    _rows(ax, [clean(entry.label) for entry in entries])
    return _finish(ax, "TFLOP/s per device; whiskers: 95 % interval (of one recording: of its iterations)")


def scaling(found: Comparison, ax: Axes | None = None) -> Axes:
    """TFLOP/s per device over tokens, a line for each strategy and what carries it, through the median of runs of one
    length; the attention kernels' own rate is dashed."""
    ax = _axes(ax, 14)
    speed: dict[str, dict[int, list[float]]] = {}
    ceiling: dict[int, float] = {}
    for entry in found.entries:
        seq, figures = entry.settings.get("seq"), entry.figures
        if seq is None or "tflops" not in figures:
            continue
        speed.setdefault(_line_name(entry), {}).setdefault(int(seq), []).append(figures["tflops"].value)
        top = figures.get("solo_tflops") or figures.get("block_tflops")
        if top is not None:
            ceiling[int(seq)] = max(top.value, ceiling.get(int(seq), 0.0))
    if ceiling:
        x, y = zip(*sorted(ceiling.items()), strict=True)
        ax.plot(x, y, "--", color=palette.GREY, label="the kernels' own rate")
    # In the order in which the lines end, so that the legend reads as the plot does.
    order = sorted(speed, key=lambda name: (-max(speed[name]), -median(speed[name][max(speed[name])])))
    for place, name in enumerate(order):
        x, y = zip(*sorted((seq, median(rates)) for seq, rates in speed[name].items()), strict=True)
        marker = MARKERS[place // len(palette.LINES) % len(MARKERS)]
        colour = palette.LINES[place % len(palette.LINES)]
        ax.plot(x, y, f"{marker}-", color=colour, label=_literal(clean(name)), alpha=0.85)
    ticks = sorted({seq for points in speed.values() for seq in points})
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    ax.minorticks_off()
    ax.set_ylim(bottom=0)
    ax.set_ylabel("TFLOP/s per device")
    ax.grid(axis="y")
    return _finish(ax, "tokens", legend=True)


def _line_name(entry: Measurement) -> str:
    """The strategy, and what makes its speed another one: copied hops, and hosts."""
    known = entry.settings
    world, per_host = int(known.get("world_size") or 1), int(known.get("ranks_per_host") or 1)
    ways = ["copied hops"] if known.get("hops") == "copy" else []
    ways += [f"{-(-world // per_host)} hosts"] if world > per_host and known.get("ranks_per_host") else []
    return f"{known.get('strategy')}" + (f" ({', '.join(ways)})" if ways else "")


# --- the style --------------------------------------------------------------------------------------


def intervals(names: Sequence[str], values: Sequence[Interval], unit: str, ax: Axes | None = None) -> Axes:
    """A mark and its interval a name, the first on top."""
    ax = _axes(ax, len(names))
    for place, (low, middle, high) in enumerate(values):
        ax.plot([low, high], [place, place], color=palette.BLUE, alpha=0.4, linewidth=5, solid_capstyle="butt")
        ax.plot(middle, place, "o", color=palette.BLUE, markersize=6)
    _rows(ax, names)
    return _finish(ax, unit)


def bands(
    across: str, up: str, series: Mapping[str, Sequence[tuple[float, Interval]]],
    marks: Sequence[tuple[float, str]] = (), ax: Axes | None = None,
) -> Axes:  # fmt: skip
    """A line and the band around it for each name, over a logarithmic axis; ``marks`` are places across with a word."""
    ax = _axes(ax, 10)
    for place, (name, points) in enumerate(series.items()):
        colour = palette.LINES[place % len(palette.LINES)]
        x = [at for at, _ in points]
        low, middle, high = zip(*(interval for _, interval in points), strict=True)
        ax.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
        ax.plot(x, middle, "o-", color=colour, label=_literal(clean(name)))
    ticks = sorted({at for points in series.values() for at, _ in points})
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [short_count(tick) for tick in ticks])
    for place, (at, word) in enumerate(marks):
        ax.axvline(at, color=palette.GREY, linestyle="--", linewidth=1)
        # On the side that has more room.
        right = at * at > ticks[0] * ticks[-1]
        ax.annotate(word, (at, 0.02 + 0.06 * place), xycoords=("data", "axes fraction"), xytext=(-4 if right else 4, 0),
                    textcoords="offset points", ha="right" if right else "left")  # fmt: skip
    ax.set_ylabel(up)
    return _finish(ax, across, legend=True)


def parts(rows: Mapping[str, Mapping[str, float]], unit: str, ax: Axes | None = None) -> Axes:
    """A stacked bar a row from its parts."""
    ax = _axes(ax, len(rows))
    names = list(dict.fromkeys(part for row in rows.values() for part in row))
    stacked = {
        part: (palette.LINES[place % len(palette.LINES)], [row.get(part, 0.0) for row in rows.values()])
        for place, part in enumerate(names)
    }
    _stack(ax, stacked, len(rows))
    _rows(ax, list(rows))
    return _finish(ax, unit, legend=True)


def _axes(ax: Axes | None, rows: float) -> Axes:
    if ax is not None:
        return ax
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # A figure of its own, in no global list: nothing has to be closed, and nothing is shown.
    with rc_context(STYLE):
        height = min(LARGEST_INCHES, max(2.0, ROW_INCHES * rows + 1.2))
        return Figure(figsize=(9, height), layout="constrained").add_subplot()


def _rows(ax: Axes, names: Sequence[str]) -> None:
    """Label whole numbers downward with names, only as many as fit."""
    ax.set_ylim(len(names) - 0.5, -0.5)
    step = max(1, -(-len(names) * POINTS_A_LABEL // _height_points(ax)))
    shown = range(0, len(names), int(step))
    ax.set_yticks(list(shown), [_literal(clean(names[place])) for place in shown])


def _literal(text: str) -> str:
    """Text that matplotlib does not read as a formula."""
    return text.replace("$", r"\$")


def _fits(ax: Axes, count: int) -> bool:
    """Whether each of so many rows has room for its label."""
    return count * POINTS_A_LABEL <= _height_points(ax)


def _height_points(ax: Axes) -> float:
    figure: Any = ax.figure.figure  # the root, in Matplotlib 3.8 as well
    return float(figure.get_figheight()) * 72 * 0.7


def _numbered(ax: Axes, grid: Any) -> None:
    """The numbers of a heat map, light where the cell is dark."""
    darkest = grid[grid > 0].max(initial=0.0)
    digits = 0 if darkest >= 100 else 1 if darkest >= 10 else 2
    for row, column in zip(*(grid >= 0.5 / 10**digits).nonzero(), strict=True):
        value = grid[row, column]
        colour = "white" if value > 0.65 * darkest else "black"
        ax.text(column, row, f"{value:.{digits}f}", ha="center", va="center", fontsize="small", color=colour)


def _stack(ax: Axes, parts: Mapping[str, tuple[str, Sequence[float]]], count: int) -> BarContainer | None:
    """Stacked bars; the last part's, which end where the whole ends."""
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
    for one in sorted(steps, key=lambda one: (one.phase != "fwd", one.step)):
        groups.setdefault(f"{one.phase} {one.step}", []).append(one)
    return groups


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) / 1e6
