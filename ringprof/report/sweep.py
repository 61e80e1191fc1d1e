"""The rows of a sweep as a table, Markdown, CSV and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ringprof.report.text import clean, csv_text

# title, key of the row's figures, format, factor
COLUMNS: tuple[tuple[str, str, str, float], ...] = (
    ("Dtype", "dtype", "", 1),
    ("B", "batch", "", 1),
    ("Seq Len", "seq", "", 1),
    ("strategy", "strategy", "", 1),
    ("parameters", "params", "", 1),
    ("kernel", "kernel", "", 1),
    ("FWD ms", "forward_ms", ",.2f", 1),
    ("FWD+BWD ms", "forward_backward_ms", ",.2f", 1),
    ("Memory MB", "memory_mib", ",.0f", 1),
    ("TFLOPs/s", "tflops", ",.2f", 1),
    ("flash %", "flash_share", ".1f", 100),
    ("ring %", "comm_share", ".1f", 100),
    ("overlap %", "overlap_ratio", ".1f", 100),
    ("exposed ms", "exposed_comm_ms", ",.2f", 1),
    ("% of kernel rate", "of_kernel_rate", ".1f", 100),
)
_WIDTHS = (5, 2, 8, 11, 20, 10, 10, 11, 9, 9, 7, 6, 9, 10, 16)
_LEFT = {"strategy", "parameters", "kernel"}


def header() -> str:
    """The table's head, a line."""
    return _line([title for title, *_ in COLUMNS])


def line(row: Mapping[str, Any]) -> str:
    """One row; what failed says so in place of its figures."""
    cells = _cells(row)
    if row["status"] != "ok":
        return f"{_line(cells[:6])}  {_failure(row)}"
    return _line(cells)


def _failure(row: Mapping[str, Any]) -> str:
    return f"{row['status'].upper()}: {clean(row['reason'] or '')}"


def render_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table."""
    lines = [[title for title, *_ in COLUMNS], ["---"] * len(COLUMNS)]
    for row in rows:
        cells = _cells(row)
        if row["status"] != "ok":
            cells[6] = _failure(row)
        lines.append([cell.replace("|", "\\|") for cell in cells])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def render_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """CSV with the figures' own names and full precision."""
    keys = [*(key for _, key, _, _ in COLUMNS), "status", "reason"]
    return csv_text(keys, ([row.get(key) for key in keys] for row in rows))


def render_json(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as JSON (schema ``ringprof.bench/1``)."""
    return json.dumps({"schema": "ringprof.bench/1", "rows": [dict(row) for row in rows]}, indent=1) + "\n"


def _cells(row: Mapping[str, Any]) -> list[str]:
    cells = []
    for _, key, form, factor in COLUMNS:
        value = row.get(key)
        cells.append("-" if value is None else clean(str(value)) if not form else format(value * factor, form))
    return cells


def _line(cells: Sequence[str]) -> str:
    titles = [title for title, *_ in COLUMNS]
    padded = [
        cell.ljust(width) if title in _LEFT else cell.rjust(width)
        for cell, width, title in zip(cells, _WIDTHS, titles, strict=False)
    ]
    return "  ".join(padded).rstrip()
