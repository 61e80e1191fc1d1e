"""Shares of the time that the log's author printed about a kernel table, held against the table."""

from __future__ import annotations

from dataclasses import dataclass

from ringprof.kernel_tables.kernels import CountedRow, CountedRows
from ringprof.kernel_tables.rows import StatedShare, TableRow

_KINDS = {"flash": ("flash_fwd", "flash_bwd"), "send_recv": ("send_recv", "all_to_all")}
_READ_UNITS = ("us", "ms")


@dataclass(frozen=True)
class CheckedShare:
    """One printed share, the table's own, and how the one came out of the other."""

    stated: StatedShare
    share: float
    """Of the summed kernel time, 0..1, from every row."""
    partial_share: float
    """The same from the rows printed in us and ms alone."""
    missing: tuple[TableRow, ...]
    """Rows printed in s."""
    agrees: bool
    causes: tuple[str, ...]
    """``seconds_dropped`` and ``fraction_as_percent``, whichever explain the printed figure; empty: unexplained."""
    listed: bool
    """Whether the author's own list names exactly the rows printed in us and ms."""


def check_share(stated: StatedShare, counted: CountedRows, total_ns: int) -> CheckedShare:
    """A printed share beside the table's, whose rows have ``total_ns`` together."""
    rows = [row for row in counted.rows if row.kind in _KINDS[stated.subject]]
    dropped = [row for row in rows if row.row.unit not in _READ_UNITS]
    share = sum(row.time_ns for row in rows) / total_ns
    partial = share - sum(row.time_ns for row in dropped) / total_ns
    scale = 100 if stated.percent else 1
    readings = (
        (share * scale, ()),
        (share, ("fraction_as_percent",)),
        (partial * scale, ("seconds_dropped",)),
        (partial, ("seconds_dropped", "fraction_as_percent")),
    )
    # A share of nothing reads the same as a fraction and in percent.
    fitting = [causes for value, causes in readings if _rounds_to(stated.printed, value)]
    return CheckedShare(
        stated, share, max(partial, 0.0), tuple(row.row for row in dropped), () in fitting, next(iter(fitting), ()),
        _lists_the_rest(stated, rows),
    )  # fmt: skip


def _rounds_to(printed: str, value: float) -> bool:
    """Whether ``value`` rounds to the figure as it was printed."""
    half = 0.5 * 10.0 ** -len(printed.partition(".")[2])
    return abs(float(printed) - value) <= half + 1e-9


def _lists_the_rest(stated: StatedShare, rows: list[CountedRow]) -> bool:
    read = [row.row.device_share or 0.0 for row in rows if row.row.unit in _READ_UNITS]
    return stated.parts is not None and [round(x, 6) for x in read] == [round(part, 6) for part in stated.parts]
