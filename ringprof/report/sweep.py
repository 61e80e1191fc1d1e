"""Rows of a sweep as a table, Markdown, CSV and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ringprof.common.json_object import rows_json
from ringprof.report.text import TextStyle, clean, csv_text


class SweepColumn(NamedTuple):
    """A column of a sweep's table."""

    title: str
    key: str
    """Name of the value in a row."""
    width: int
    form: str = ""
    factor: float = 1
    drop: int = 0
    """Rank for leaving columns out on a narrow terminal: the largest goes first; 0 is never left out."""


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
_LEFT_ALIGNED = {"strategy", "parameters", "kernel", "mask"}
DEFAULT_MASK = "causal"
"""Mask that the terminal does not show: the column is there only if a row has another mask."""
_GAP = 2


class SweepTable:
    """Table of a sweep that is printed one line at a time, as soon as each row is complete."""

    def __init__(self, style: TextStyle, masks: Iterable[str] = ()) -> None:
        columns = [column for column in COLUMNS if column.key != "mask" or set(masks) - {DEFAULT_MASK}]
        shown = list(columns)
        while sum(column.width + _GAP for column in shown) - _GAP > style.table_width and any(
            column.drop for column in shown
        ):
            shown.remove(max(shown, key=lambda column: column.drop))
        self._shown = shown
        left_out = ", ".join(column.title for column in columns if column not in shown)
        self.header = self._line([column.title for column in shown])
        if left_out:
            self.header += "\n" + style.wrap(f"no room for {left_out}: --format csv has all", "dim")

    def line(self, row: Mapping[str, Any]) -> str:
        """Format one row; a row that failed has its status and reason instead of figures."""
        if row["status"] == "ok":
            return self._line([_cell(row, column) for column in self._shown])
        text_columns = [column for column in self._shown if not column.form]
        return f"{self._line([_cell(row, column) for column in text_columns])}  {_failure(row)}"

    def _line(self, cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(column.width) if column.title in _LEFT_ALIGNED else cell.rjust(column.width)
            for cell, column in zip(cells, self._shown, strict=False)
        ]
        return (" " * _GAP).join(padded).rstrip()


def _failure(row: Mapping[str, Any]) -> str:
    return f"{row['status'].upper()}: {clean(row['reason'] or '')}"


def render_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Render the rows as a Markdown table."""
    lines = [[column.title for column in COLUMNS], ["---"] * len(COLUMNS)]
    for row in rows:
        cells = [_cell(row, column) for column in COLUMNS]
        if row["status"] != "ok":
            cells[-1] = _failure(row)
        lines.append([cell.replace("|", "\\|") for cell in cells])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def render_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Render the rows as CSV, with the keys of the figures as titles and full precision."""
    keys = [*(column.key for column in COLUMNS), "compute_share", "exposed_comm_ms", "status", "reason"]
    return csv_text(keys, ([row.get(key) for key in keys] for row in rows))


def render_json(rows: Sequence[Mapping[str, Any]]) -> str:
    """Render the rows as JSON (schema ``ringprof.bench/1``)."""
    return rows_json("ringprof.bench/1", rows)


def _cell(row: Mapping[str, Any], column: SweepColumn) -> str:
    value = row.get(column.key)
    if value is None:
        return "-"
    return format(value * column.factor, column.form) if column.form else clean(str(value))
