"""Check of the shares of time that the log's author printed in addition to a kernel table, against the table."""

from __future__ import annotations

from dataclasses import dataclass

from ringprof.kernel_tables.kernels import CountedRow, CountedRows
from ringprof.kernel_tables.rows import StatedShare, TableRow

_KINDS = {"flash": ("flash_fwd", "flash_bwd"), "send_recv": ("send_recv", "all_to_all")}
_READ_UNITS = ("us", "ms")


@dataclass(frozen=True)
class CheckedShare:
    """One printed share, the share by the table, and the causes of a difference."""

    stated: StatedShare
    share: float
    """Share of the summed kernel time, 0..1, from all rows of the subject."""
    partial_share: float
    """Share from only the rows whose times are printed in us and ms."""
    missing: tuple[TableRow, ...]
    """Rows of the subject whose times are printed in other units, such as s."""
    agrees: bool
    causes: tuple[str, ...]
    """Causes of the difference: ``seconds_dropped``, ``fraction_as_percent``; empty if none explains it."""
    listed: bool
    """Whether the author's own list names exactly the rows printed in us and ms."""


def check_share(stated: StatedShare, counted: CountedRows, total_ns: int) -> CheckedShare:
    """Compare a printed share with the share by the table, whose rows take ``total_ns`` in total."""
    rows = [row for row in counted.rows if row.kind in _KINDS[stated.subject]]
    dropped_rows = [row for row in rows if row.row.unit not in _READ_UNITS]
    share = sum(row.time_ns for row in rows) / total_ns
    partial_share = share - sum(row.time_ns for row in dropped_rows) / total_ns
    scale = 100 if stated.percent else 1
    interpretations = (
        (share * scale, ()),
        (share, ("fraction_as_percent",)),
        (partial_share * scale, ("seconds_dropped",)),
        (partial_share, ("seconds_dropped", "fraction_as_percent")),
    )
    # Several interpretations can match: a share of 0 is the same as a fraction and in percent.
    matching = [causes for value, causes in interpretations if _rounds_to(stated.printed, value)]
    return CheckedShare(
        stated, share, max(partial_share, 0.0), tuple(row.row for row in dropped_rows), () in matching,
        next(iter(matching), ()), _lists_partial_rows(stated, rows),
    )  # fmt: skip


def _rounds_to(printed: str, value: float) -> bool:
    """Return whether ``value`` rounds to the printed figure."""
    half = 0.5 * 10.0 ** -len(printed.partition(".")[2])
    return abs(float(printed) - value) <= half + 1e-9


def _lists_partial_rows(stated: StatedShare, rows: list[CountedRow]) -> bool:
    shares = [row.row.device_share or 0.0 for row in rows if row.row.unit in _READ_UNITS]
    return stated.parts is not None and [round(x, 6) for x in shares] == [round(part, 6) for part in stated.parts]
