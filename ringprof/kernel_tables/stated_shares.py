"""The log author's own summary of a kernel table, held against the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringprof.kernel_tables.kernels import Chosen, kind_of_row
from ringprof.kernel_tables.rows import Claim, TableRow

_KINDS = {"flash": ("flash_fwd", "flash_bwd"), "send_recv": ("send_recv", "all_to_all")}
_READ_UNITS = ("us", "ms")


@dataclass(frozen=True)
class ClaimCheck:
    """One printed figure, the table's own, and how the one came out of the other."""

    claim: Claim
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


def check_claims(claims: Sequence[Claim], chosen: Chosen, total_ns: int) -> list[ClaimCheck]:
    """Each claim beside the table's figure."""
    return [_check(claim, chosen, total_ns) for claim in claims] if total_ns else []


def _check(claim: Claim, chosen: Chosen, total_ns: int) -> ClaimCheck:
    rows = [row for row in chosen.rows if kind_of_row(row.name) in _KINDS[claim.subject]]
    missing = tuple(row for row in rows if row.unit not in _READ_UNITS)
    share = sum(chosen.time_of(row) for row in rows) / total_ns
    partial = share - sum(chosen.time_of(row) for row in missing) / total_ns
    scale = 100 if claim.percent else 1
    agrees = _same(claim.printed, share * scale)
    causes: tuple[str, ...] = ()
    if not agrees:
        tried = (
            (share, ("fraction_as_percent",)),
            (partial * scale, ("seconds_dropped",)),
            (partial, ("seconds_dropped", "fraction_as_percent")),
        )
        # A share of nothing reads the same as a fraction and in percent.
        causes = next((names for value, names in tried if _same(claim.printed, value)), ())
    return ClaimCheck(claim, share, max(partial, 0.0), missing, agrees, causes, _is_listed(claim, rows))


def _same(printed: str, value: float) -> bool:
    """Whether ``value`` rounds to the figure as it was printed."""
    half = 0.5 * 10.0 ** -len(printed.partition(".")[2])
    return abs(float(printed) - value) <= half + 1e-9


def _is_listed(claim: Claim, rows: list[TableRow]) -> bool:
    if claim.parts is None:
        return False
    read = [row.device_share for row in rows if row.unit in _READ_UNITS]
    return [round(share or 0, 6) for share in read] == [round(part, 6) for part in claim.parts]
