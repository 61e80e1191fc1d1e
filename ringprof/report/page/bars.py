"""Bar charts of a page as elements of the page itself: its fonts and colours, and text that wraps on narrow screens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ringprof.analysis.findings.changes import Change
from ringprof.analysis.findings.parts import WATERFALL_LABELS
from ringprof.analysis.findings.time_table import PARTS
from ringprof.analysis.findings.waterfall import Waterfall, WaterfallPart
from ringprof.common.formatting import percent, significant
from ringprof.report import palette
from ringprof.report.page.document import Bar, BarChart, BarRow
from ringprof.report.palette import Interval
from ringprof.report.terms import LABELS
from ringprof.report.text import LONGEST_SENTENCE, clean, rate

_TICKS = 6
"""Approximate number of labels of an axis."""
MIN_BAR_SHARE = 0.0005
"""Least share of the wall that gets a bar in a waterfall or a chart of changes."""
_SMALL_SHARE = 0.1
"""Share of the wall below which a part of a waterfall is drawn again, in a panel of its own scale."""
_ROOM = 1.02
"""Length of an axis, as a multiple of its largest value."""


class _Axis:
    """A linear axis from ``low`` to ``high``."""

    def __init__(self, low: float, high: float) -> None:
        self._low, self._length = low, (high - low) or 1.0
        step = 10 ** math.floor(math.log10(self._length / _TICKS))
        step *= next(factor for factor in (1, 2, 5, 10) if self._length <= factor * step * _TICKS)
        decimals = max(0, -math.floor(math.log10(step)))
        first = math.ceil(low / step)
        values = [index * step for index in range(first, math.floor((low + self._length) / step) + 1)]
        self.ticks = [(self._position(value), f"{value + 0.0:,.{decimals}f}") for value in values]

    def _position(self, value: float) -> float:
        return round(100 * (value - self._low) / self._length, 4)

    def bar(self, start: float, end: float, colour: str, tooltip: str, form: str = "bar") -> Bar:
        """Return a bar between two values, in either order."""
        left, right = sorted((self._position(start), self._position(end)))
        return Bar(left, round(right - left, 4), colour, tooltip, form)


def stacked(
    names: Sequence[str], parts: Mapping[str, tuple[str, Sequence[float]]], unit: str, values: Sequence[str] = (),
    *, of_ranks: bool = False,
) -> BarChart:  # fmt: skip
    """Return one stacked bar per name; each part is (colour, one value per name).

    ``values``: text beside each bar; by default the bar's sum. ``of_ranks``: whether the names are ranks.
    """
    sums = [sum(numbers) for numbers in zip(*(numbers for _, numbers in parts.values()), strict=True)] or [0.0] * len(
        names
    )
    axis = _Axis(0.0, _ROOM * max(sums, default=0.0))
    rows = []
    for row, name in enumerate(names):
        bars, left = [], 0.0
        for part, (colour, numbers) in parts.items():
            if numbers[row]:
                tooltip = f"{clean(name)}: {clean(part)} {significant(numbers[row])} {unit}"
                bars.append(axis.bar(left, left + numbers[row], colour, tooltip))
                left += numbers[row]
        rows.append(BarRow(clean(name), bars, values[row] if values else significant(sums[row])))
    legend = [(clean(part), colour) for part, (colour, _) in parts.items()] if len(parts) > 1 else []
    return BarChart(rows, axis.ticks, unit, legend, of_ranks=of_ranks)


def breakdown(ranks: Sequence[Mapping[str, Any]]) -> BarChart:
    """Return one stacked bar per rank, with what is exposed and idle beside it; ``ranks`` are the JSON report's."""
    parts = {}
    for part in PARTS[:-1]:
        times = [(rank.get(f"{part}_ns") or 0) / 1e6 for rank in ranks]
        if any(times):
            parts[LABELS[part]] = palette.PART_COLOURS[part], times
    losses = [f"exposed {_share(rank, 'exposed_comm_ns')}, idle {_share(rank, 'idle_ns')}" for rank in ranks]
    return stacked([f"rank {rank['rank']}" for rank in ranks], parts, "ms", losses, of_ranks=True)


def _share(rank: Mapping[str, Any], name: str) -> str:
    return percent((rank[name] or 0) / rank["wall_ns"] if rank["wall_ns"] else 0.0)


def waterfall(waterfall_data: Waterfall) -> list[BarChart]:
    """Return bars that each start where the previous one ended; small parts follow in a panel of their own scale.

    A negative loss goes back to the left; parts that take no time are left to the table.
    """
    start_of, start_ns = {}, 0
    for part in waterfall_data.parts:
        start_of[part.part] = start_ns
        start_ns += part.time_ns
    wall_ns = waterfall_data.wall_ns or 1
    parts = [part for part in waterfall_data.parts if abs(part.time_ns) >= MIN_BAR_SHARE * wall_ns]
    small = [part for part in parts if abs(part.time_ns) < _SMALL_SHARE * wall_ns]
    ends = [start_of[part.part] + part.time_ns for part in parts]
    axis = _Axis(0.0, _ROOM * max([wall_ns, *ends]) / 1e6)
    charts = [_waterfall_chart(parts, start_of, axis, "")]
    if small and len(small) < len(parts):
        axis = _Axis(
            min(0.0, *(part.time_ns / 1e6 for part in small)), _ROOM * max(part.time_ns for part in small) / 1e6
        )
        title = f"The parts below {percent(_SMALL_SHARE, 0)} of the wall, longest first"
        small.sort(key=lambda part: -part.time_ns)
        charts.append(_waterfall_chart(small, {}, axis, title))
    return charts


def _waterfall_chart(parts: Sequence[WaterfallPart], start_of: Mapping[str, int], axis: _Axis, title: str) -> BarChart:
    rows = []
    for part in parts:
        start = start_of.get(part.part, 0)
        speed = "" if part.tflops is None else f"; {rate(part.tflops)} after it"
        remedy = f"; shorter by: {part.remedy}" if part.remedy else ""
        text = f"{WATERFALL_LABELS[part.part]}: {significant(part.time_ns / 1e6)} ms{speed}{remedy}"
        bar = axis.bar(
            start / 1e6,
            (start + part.time_ns) / 1e6,
            palette.WATERFALL_COLOURS[part.part],
            clean(text, LONGEST_SENTENCE),
        )
        value = f"{significant(part.time_ns / 1e6)} ms, {percent(part.share)}"
        rows.append(BarRow(WATERFALL_LABELS[part.part], [bar], value))
    return BarChart(rows, axis.ticks, "ms of the slowest rank's wall" if start_of else "ms", title=title)


def changes(changes_by_part: Sequence[Change], labels: Mapping[str, str]) -> BarChart:
    """Return one bar per part: to the left for less time than in the base, to the right for more."""
    shown = [change for change in changes_by_part if abs(change.share) >= MIN_BAR_SHARE] or list(changes_by_part[:1])
    differences = [(change.other_ns - change.base_ns) / 1e6 for change in shown]
    axis = _Axis(min(0.0, *differences), max(0.0, *differences)) if differences else _Axis(0.0, 1.0)
    rows = []
    for change, difference in zip(shown, differences, strict=True):
        sign = "+" if difference > 0 else ""
        value = f"{sign}{significant(difference)} ms, {100 * change.share:+.1f} %"
        bar = axis.bar(0.0, difference, palette.WATERFALL_COLOURS[change.what], f"{labels[change.what]}: {value}")
        rows.append(BarRow(labels[change.what], [bar], value))
    return BarChart(rows, axis.ticks, "ms more than the base")


def intervals(names: Sequence[str], values: Sequence[Interval], axis_label: str) -> BarChart:
    """Return a dot and its interval for each name."""
    low, high = min(low for low, _, _ in values), max(high for _, _, high in values)
    margin = 0.03 * (high - low or high)
    axis, rows = _Axis(max(0.0, low - margin), high + margin), []
    for name, (start, middle, end) in zip(names, values, strict=True):
        text = f"{significant(middle)} ({significant(start)} to {significant(end)})"
        tooltip = f"{clean(name)}: {text}"
        bars = [
            axis.bar(start, end, palette.BLUE, tooltip, "range"),
            axis.bar(middle, middle, palette.BLUE, tooltip, "dot"),
        ]
        rows.append(BarRow(clean(name), bars, text))
    return BarChart(rows, axis.ticks, axis_label)
