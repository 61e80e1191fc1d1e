"""Plots with matplotlib: each function draws on ``ax`` (a new figure's where None), returns the axes, shows nothing.

Text from traces is drawn as it is: no dollar sign starts a formula.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ringprof.analysis.findings.comparison import Comparison
from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.summary import PARTS
from ringprof.analysis.steps.steps import Step
from ringprof.report import palette
from ringprof.report.terms import LABELS
from ringprof.report.terms import WATERFALL as WATERFALL_LABELS
from ringprof.report.text import clean
from ringprof.report.timeline import drawn_as, timeline_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


class Plots:
    """``run.plot``: the plots of one run."""

    def __init__(self, found: Findings) -> None:
        self._found = found

    def waterfall(self, ax: Axes | None = None) -> Axes:
        """From the device's peak down to the speed achieved, ms of the slowest rank's wall."""
        parts = self._found.waterfall.parts
        ax = _axes(ax, len(parts))
        at = 0
        for place, part in enumerate(parts):
            ax.barh(place, part.time_ns / 1e6, left=at / 1e6, color=palette.WATERFALL[part.part], height=0.7)
            at += part.time_ns
        _rows(ax, [WATERFALL_LABELS[part.part] for part in parts])
        return _finish(ax, "ms of the slowest rank's wall")

    def breakdown(self, ax: Axes | None = None) -> Axes:
        """One stacked bar a rank, ms."""
        ranks = self._found.attribution.ranks
        ax = _axes(ax, len(ranks))
        parts = {}
        for name in PARTS[:-1]:
            times = [(getattr(rank.breakdown, f"{name}_ns") or 0) / 1e6 for rank in ranks]
            if any(times):
                parts[LABELS[name]] = palette.PARTS[name], times
        _stack(ax, parts, len(ranks))
        _rows(ax, [f"rank {rank.rank}" for rank in ranks])
        return _finish(ax, "ms", legend=True)

    def timeline(self, ax: Axes | None = None) -> Axes:
        """Two lanes a rank: computation above, communication below, split into waiting and wire where known."""
        ranks = [rank.rank for rank in self._found.attribution.ranks if not rank.on_cpu]
        drawn = timeline_of(self._found.attribution, self._found.steps)
        ax = _axes(ax, len(ranks) * 1.6)
        place = {rank: at for at, rank in enumerate(ranks)}
        for what in dict.fromkeys(bar.what for bar in drawn.bars):
            label: str | None
            label, colour = drawn_as(what)
            for rank in ranks:
                mine = [bar for bar in drawn.bars if bar.rank == rank and bar.what == what]
                if mine:
                    spans = [(bar.start_ns / 1e6, (bar.end_ns - bar.start_ns) / 1e6) for bar in mine]
                    low = place[rank] - 0.4 if mine[0].lane == "compute" else place[rank] + 0.02
                    ax.broken_barh(spans, (low, 0.38), facecolors=colour, label=label)
                    label = None
        _rows(ax, [f"rank {rank}" for rank in ranks])
        return _finish(ax, "ms from the first activity", legend=True)

    def steps(self, ax: Axes | None = None) -> Axes:
        """Ring steps, mean over ranks and calls: what the block took, and what of the step's hops was exposed, ms."""
        groups = _by_step(self._found.steps)
        ax = _axes(ax, len(groups))
        block = [_mean([one.block_ns for one in steps]) for steps in groups.values()]
        exposed = [_mean([one.exposed_ns for one in steps]) for steps in groups.values()]
        parts = {"attention block": (palette.BLUE, block), "exposed communication": (palette.WIRE, exposed)}
        _stack(ax, parts, len(groups))
        _rows(ax, list(groups))
        return _finish(ax, "ms, mean over ranks", legend=True)

    def waiting(self, ax: Axes | None = None) -> Axes:
        """Heat map of what hops waited, rank by ring step, ms."""
        import numpy as np

        ranks = [rank.rank for rank in self._found.attribution.ranks]
        groups = _by_step(self._found.steps)
        ax = _axes(ax, len(ranks))
        grid = np.full((len(ranks), max(1, len(groups))), np.nan)
        for column, steps in enumerate(groups.values()):
            for row, rank in enumerate(ranks):
                known = [one.wait_ns for one in steps if one.rank == rank and one.wait_ns is not None]
                if known:
                    grid[row, column] = sum(known) / 1e6
        image = ax.imshow(grid, aspect="auto", cmap="viridis", vmin=0)
        ax.figure.colorbar(image, ax=ax, label="ms waited")
        _rows(ax, [f"rank {rank}" for rank in ranks])
        step = -(-len(groups) // 24) or 1
        ax.set_xticks(range(0, len(groups), step), list(groups)[::step], rotation=45, ha="right")
        return _finish(ax, "ring step", grid=False)


def comparison(found: Comparison, ax: Axes | None = None) -> Axes:
    """One bar an entry: TFLOP/s per device, with the 95 % interval of its median."""
    entries = [entry for entry in found.entries if "tflops" in entry.figures]
    ax = _axes(ax, len(entries))
    for place, entry in enumerate(entries):
        figure = entry.figures["tflops"]
        low, high = figure.interval() or (figure.value, figure.value)
        colour = palette.LINES[place % len(palette.LINES)]
        ends = [[max(0.0, figure.value - low)], [max(0.0, high - figure.value)]]
        ax.barh(place, figure.value, xerr=ends, color=colour, height=0.7)
    _rows(ax, [clean(entry.label) for entry in entries])
    return _finish(ax, "TFLOP/s per device; whiskers: where the median lies, to 95 %")


def scaling(found: Comparison, ax: Axes | None = None) -> Axes:
    """TFLOP/s per device over tokens, a line a strategy; the attention kernels' own rate is dashed."""
    ax = _axes(ax, 12)
    speed: dict[str, dict[int, float]] = {}
    ceiling: dict[int, float] = {}
    for entry in found.entries:
        seq, figures = entry.settings.get("seq"), entry.figures
        if seq is None or "tflops" not in figures:
            continue
        name = f"{entry.settings.get('strategy')}{' (copied hops)' if entry.settings.get('hops') == 'copy' else ''}"
        speed.setdefault(name, {})[int(seq)] = figures["tflops"].value
        top = figures.get("solo_tflops") or figures.get("block_tflops")
        if top is not None:
            ceiling[int(seq)] = max(top.value, ceiling.get(int(seq), 0.0))
    for place, (name, points) in enumerate(speed.items()):
        x, y = zip(*sorted(points.items()), strict=True)
        ax.plot(x, y, "o-", color=palette.LINES[place % len(palette.LINES)], label=_literal(clean(name)))
    if ceiling:
        x, y = zip(*sorted(ceiling.items()), strict=True)
        ax.plot(x, y, "--", color=palette.GREY, label="the kernels' own rate")
    ticks = sorted({seq for points in speed.values() for seq in points})
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    ax.minorticks_off()
    ax.set_ylim(bottom=0)
    ax.set_ylabel("TFLOP/s per device")
    return _finish(ax, "tokens", legend=True)


# --- the style --------------------------------------------------------------------------------------


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
    height = ax.figure.bbox.height / ax.figure.dpi * 72 * 0.7
    step = max(1, -(-len(names) * POINTS_A_LABEL // height))
    shown = range(0, len(names), int(step))
    ax.set_yticks(list(shown), [_literal(clean(names[place])) for place in shown])


def _literal(text: str) -> str:
    """Text that matplotlib does not read as a formula."""
    return text.replace("$", r"\$")


def _stack(ax: Axes, parts: Mapping[str, tuple[str, Sequence[float]]], count: int) -> None:
    left = [0.0] * count
    for label, (colour, values) in parts.items():
        ax.barh(range(count), values, left=left, color=colour, height=0.8, label=label)
        left = [a + b for a, b in zip(left, values, strict=True)]


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
