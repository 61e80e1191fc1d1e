"""The rows of a sweep as a table, Markdown, CSV and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ringprof.json_object import rows_json
from ringprof.report.text import TextStyle, clean, csv_text


class SweepColumn(NamedTuple):
    """A column of a sweep's table."""

    title: str
    key: str
    """Of the row's figures."""
    width: int
    form: str = ""
    factor: float = 1
    drop: int = 0
    """Where a terminal is too narrow, the column with the largest goes first; 0 stays."""


COLUMNS = (
    SweepColumn("Dtype", "dtype", 5, drop=5),
    SweepColumn("B", "batch", 2, drop=4),
    SweepColumn("Seq Len", "seq", 8),
    SweepColumn("strategy", "strategy", 11),
    SweepColumn("parameters", "params", 20, drop=6),
    SweepColumn("kernel", "kernel", 10, drop=7),
    SweepColumn("mask", "mask", 24, drop=3),
    SweepColumn("FWD ms", "forward_ms", 10, ",.2f", drop=3),
    SweepColumn("FWD+BWD ms", "forward_backward_ms", 11, ",.2f"),
    SweepColumn("Memory MiB", "memory_mib", 10, ",.0f", drop=1),
    SweepColumn("TFLOPs/s", "tflops", 9, ",.4g"),
    SweepColumn("flash %", "flash_share", 7, ".1f", 100, drop=8),
    SweepColumn("comm %", "comm_share", 6, ".1f", 100, drop=9),
    SweepColumn("overlap %", "overlap_ratio", 9, ".1f", 100),
    SweepColumn("exposed %", "exposed_comm_share", 9, ".1f", 100),
    SweepColumn("% of kernel rate", "of_kernel_rate", 16, ".1f", 100, drop=2),
)
_LEFT = {"strategy", "parameters", "kernel", "mask"}
PLAIN = "causal"
"""The mask of which a terminal says nothing."""
_BETWEEN = 2


class SweepTable:
    """The table of a sweep, a line at a time: in the terminal as soon as a row is there."""

    def __init__(self, style: TextStyle, masks: Iterable[str] = ()) -> None:
        columns = [one for one in COLUMNS if one.key != "mask" or set(masks) - {PLAIN}]
        shown = list(columns)
        while sum(one.width + _BETWEEN for one in shown) - _BETWEEN > style.table_width and any(o.drop for o in shown):
            shown.remove(max(shown, key=lambda one: one.drop))
        self._shown = shown
        left_out = ", ".join(one.title for one in columns if one not in shown)
        self.header = self._line([one.title for one in shown])
        if left_out:
            self.header += "\n" + style.wrap(f"no room for {left_out}: --format csv has all", "dim")

    def line(self, row: Mapping[str, Any]) -> str:
        """One row; what failed says so in place of its figures."""
        if row["status"] == "ok":
            return self._line([_cell(row, one) for one in self._shown])
        names = [one for one in self._shown if not one.form]
        return f"{self._line([_cell(row, one) for one in names])}  {_failure(row)}"

    def _line(self, cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(one.width) if one.title in _LEFT else cell.rjust(one.width)
            for cell, one in zip(cells, self._shown, strict=False)
        ]
        return (" " * _BETWEEN).join(padded).rstrip()


def _failure(row: Mapping[str, Any]) -> str:
    return f"{row['status'].upper()}: {clean(row['reason'] or '')}"


def render_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table."""
    lines = [[one.title for one in COLUMNS], ["---"] * len(COLUMNS)]
    for row in rows:
        cells = [_cell(row, one) for one in COLUMNS]
        if row["status"] != "ok":
            cells[-1] = _failure(row)
        lines.append([cell.replace("|", "\\|") for cell in cells])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def render_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """CSV with the figures' own names and full precision."""
    keys = [*(one.key for one in COLUMNS), "compute_share", "exposed_comm_ms", "status", "reason"]
    return csv_text(keys, ([row.get(key) for key in keys] for row in rows))


def render_json(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as JSON (schema ``ringprof.bench/1``)."""
    return rows_json("ringprof.bench/1", rows)


def _cell(row: Mapping[str, Any], column: SweepColumn) -> str:
    value = row.get(column.key)
    if value is None:
        return "-"
    return format(value * column.factor, column.form) if column.form else clean(str(value))
