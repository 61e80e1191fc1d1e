"""Analysis of a printed kernel table: time by kind, bounds on the overlap, stated shares, and inconsistencies.

Times are integer nanoseconds, shares and ratios are 0..1. A table holds sums over all calls and streams. So shares are
relative to the summed kernel time, not to a wall time, and overlap is known only as an interval.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from ringprof.analysis.kinds.kinds import COMMUNICATION, COMPUTE, KINDS
from ringprof.analysis.kinds.operators import kind_of_collective
from ringprof.printed.tables.kernels import (
    CountedRows,
    Iterations,
    count_iterations,
    rounding_slack_ns,
    select_counted_rows,
)
from ringprof.printed.tables.rows import KernelTable, StatedShare, TableRow
from ringprof.report.text import duration
from ringprof.trace.columns import Notice

ASSUMPTIONS = (
    "compute kernels do not overlap one another",
    "communication kernels do not overlap one another",
    "all of them ran within the wall time",
)
_SHARE_STEP = 1e-4
"""Value of one unit in the last digit of a printed share: 0.01 %."""
_LEAST_SHARE = 0.01
"""Smallest share from which the total is computed: smaller ones have too few digits, and are not always rounded."""
_SEND_RECV_KINDS = ("send_recv", "all_to_all", "comm_other")
_SHARE_KINDS = {"flash": ("flash_fwd", "flash_bwd"), "send_recv": ("send_recv", "all_to_all")}
_READ_UNITS = ("us", "ms")

WallSource = Literal["given", "iteration_time", "cpu_total"]
"""Source of a wall time: the user, the log's time of one iteration, or the footer's CPU total."""


@dataclass(frozen=True)
class KindSum:
    """Sum of all rows of one kind."""

    kind: str
    time_ns: int
    calls: int
    per_iteration_ns: float | None
    """Time per iteration; None where the number of iterations is not known."""

    def add(self, time_ns: int, calls: int, per_iteration_ns: float) -> KindSum:
        """Return the sum with further time and calls added."""
        total_per_iteration = None if self.per_iteration_ns is None else self.per_iteration_ns + per_iteration_ns
        return KindSum(self.kind, self.time_ns + time_ns, self.calls + calls, total_per_iteration)

    @property
    def average_ns(self) -> float | None:
        """Average time of one call; None without calls."""
        return self.time_ns / self.calls if self.calls else None


@dataclass(frozen=True)
class OverlapBounds:
    """Bounds on the share of communication that was hidden behind compute."""

    least: float | None
    """Lower bound, 0..1; None where it is not known."""
    most: float | None
    """Upper bound, 0..1; None where it is not known."""
    wall_ns: int | None
    wall_source: WallSource | None
    comm_ns: float
    """Communication time within `wall_ns`; per iteration where `wall_ns` is the time of one iteration."""
    compute_ns: float
    """Compute time within `wall_ns`, like `comm_ns`."""
    reason: str | None
    """Reason why the bounds are not known."""


UNKNOWN_OVERLAP = OverlapBounds(None, None, None, None, 0, 0, "the table has no kernels")


@dataclass(frozen=True)
class CheckedShare:
    """One share that the log's author printed, the share by the table, and the causes of a difference."""

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


@dataclass(frozen=True)
class TableReport:
    """Analysis of one table, with everything that its report shows."""

    table: KernelTable
    counted: CountedRows
    kinds: tuple[KindSum, ...]
    """Sums by kind, largest first."""
    slack_ns: int
    """Largest difference from the footer that rounding of the printed times explains."""
    iterations: Iterations | None
    overlap: OverlapBounds = UNKNOWN_OVERLAP
    shares: tuple[CheckedShare, ...] = ()
    warnings: tuple[Notice, ...] = ()

    @property
    def total_ns(self) -> int:
        """Sum of the times of the counted rows."""
        return sum(kind.time_ns for kind in self.kinds)

    @property
    def footer_ns(self) -> int | None:
        """The footer's total that corresponds to `total_ns`: device time, or CPU time in a table without a device."""
        return self.table.self_cpu_total_ns if self.counted.basis == "cpu" else self.table.self_device_total_ns

    @property
    def difference_ns(self) -> int | None:
        """Difference of `total_ns` and the footer's total; None without a footer."""
        return None if self.footer_ns is None else self.total_ns - self.footer_ns

    @property
    def missing_ns(self) -> int:
        """Time of kernels without a row in the table, by the footer or the printed shares; 0 if neither shows any."""
        if self.counted.basis != "kernels":
            return 0
        expected_ns, slack = self.footer_ns, self.slack_ns
        if expected_ns is None:
            expected_ns, slack = total_from_shares(self.table)
        return expected_ns - self.total_ns if expected_ns is not None and expected_ns - self.total_ns > slack else 0

    @property
    def whole_ns(self) -> int:
        """Time that shares refer to: `total_ns`, plus the known time of kernels without a row in the table."""
        return self.total_ns + self.missing_ns

    @property
    def kinds_ns(self) -> dict[str, int]:
        """Time by kind, largest first."""
        return {kind.kind: kind.time_ns for kind in self.kinds}


def analyse_table(table: KernelTable, wall_ns: int | None = None, iterations: int | None = None) -> TableReport:
    """Analyse one table.

    ``wall_ns`` is the wall time of the profiled window, ``iterations`` the number of iterations in it. Where they are
    None, the log's own figures are used and named. Inconsistencies become warnings; nothing is raised.
    """
    counted = select_counted_rows(table)
    counted_iterations = count_iterations(table, counted, iterations)
    kinds, split_warnings = _sum_by_kind(table, counted, counted_iterations)
    report = TableReport(table, counted, kinds, rounding_slack_ns(counted.rows, table), counted_iterations)
    return replace(
        report,
        overlap=_overlap(report, wall_ns),
        shares=tuple(_check_share(stated, report) for stated in table.shares if report.total_ns),
        warnings=tuple(_warnings(report, split_warnings)),
    )


def total_from_shares(table: KernelTable) -> tuple[int | None, int]:
    """Compute the device's total time from the printed shares, with its uncertainty; (None, 0) where it is unknown."""
    least_ns, most_ns = 0.0, math.inf
    for row in table.rows:
        time_ns, share = row.self_device_ns or 0, row.device_share or 0.0
        if share >= _LEAST_SHARE:
            least_ns = max(least_ns, (time_ns - row.step_ns / 2) / (share + _SHARE_STEP / 2))
            most_ns = min(most_ns, (time_ns + row.step_ns / 2) / (share - _SHARE_STEP / 2))
    if not least_ns <= most_ns < math.inf:
        return None, 0
    return round((least_ns + most_ns) / 2), math.ceil((most_ns - least_ns) / 2)


# --- kinds ------------------------------------------------------------------------------------------


def _sum_by_kind(
    table: KernelTable, counted: CountedRows, iterations: Iterations | None
) -> tuple[tuple[KindSum, ...], list[Notice]]:
    """Add up the counted rows by kind, largest first; return the sums, and warnings."""
    sums = {kind: KindSum(kind, 0, 0, 0.0 if iterations else None) for kind in KINDS}
    for row in counted.rows:
        per_iteration_ns = row.time_ns / iterations.covered_by(row) if iterations else 0.0
        sums[row.kind] = sums[row.kind].add(row.time_ns, row.calls, per_iteration_ns)
    warnings = _split_send_recv(table, sums) if counted.basis == "kernels" else []
    largest_first = sorted(sums.values(), key=lambda kind: -kind.time_ns)
    return tuple(kind for kind in largest_first if kind.calls or kind.time_ns), warnings


def _split_send_recv(table: KernelTable, sums: dict[str, KindSum]) -> list[Notice]:
    """Split the time of SendRecv kernels among the kinds of their annotations; return a warning if it was split.

    Sends, receives and all-to-alls run in kernels of the same name. The annotations' times give the proportions.
    ``sums`` is changed in place.
    """
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for row in table.rows:
        if not row.name.startswith("nccl:") or (row.self_device_ns or 0) <= 0 or row.on_cpu:
            continue
        # Point-to-point calls are batched as "coalesced".
        is_batch = row.name.startswith("nccl:coalesced")
        kind = "send_recv" if is_batch else kind_of_collective(row.name.split(" ")[0])
        if kind in _SEND_RECV_KINDS:
            times[kind] += row.self_device_ns or 0
            calls[kind] += row.calls or 0
    send_recv = sums["send_recv"]
    if not send_recv.time_ns or set(times) <= {"send_recv"}:
        return []
    sums["send_recv"] = KindSum("send_recv", 0, 0, None if send_recv.per_iteration_ns is None else 0.0)
    shared_calls = _divide_by_weight(send_recv.calls, calls)
    for kind, time_ns in _divide_by_weight(send_recv.time_ns, times).items():
        per_iteration_ns = (send_recv.per_iteration_ns or 0.0) * time_ns / send_recv.time_ns
        sums[kind] = sums[kind].add(time_ns, shared_calls[kind], per_iteration_ns)
    percentages = ", ".join(f"{kind} {100 * times[kind] / times.total():.1f} %" for kind in sorted(times))
    message = (
        f"SendRecv kernels carry more than hops: their time is shared out as their annotations' is ({percentages})"
    )
    return [Notice("send_recv_split", message)]


def _divide_by_weight(total: int, weights: Counter[str]) -> dict[str, int]:
    """Divide ``total`` into integers in proportion to the weights; the remainder goes to the heaviest."""
    parts = {kind: total * weight // max(1, weights.total()) for kind, weight in weights.items()}
    parts[max(weights, key=weights.__getitem__)] += total - sum(parts.values())
    return parts


# --- overlap ----------------------------------------------------------------------------------------


def _overlap(report: TableReport, user_wall_ns: int | None) -> OverlapBounds:
    """Compute bounds on the hidden share of communication time C, from compute time K and the wall time.

    At least C + K - wall was hidden, and at most the smaller of C and K.
    """
    table, iterations = report.table, report.iterations
    if report.counted.basis != "kernels":
        return UNKNOWN_OVERLAP
    wall: int | None = None
    source: WallSource | None = None
    # Kernels without a row may be communication or compute: for the upper bound, all of them hid communication.
    missing: float = report.missing_ns
    times: dict[str, float] = dict(report.kinds_ns)
    if user_wall_ns is not None:
        wall, source = user_wall_ns, "given"
    elif table.iteration_ns and iterations is not None:
        wall, source = table.iteration_ns, "iteration_time"
        missing /= iterations.device_range[0]
        times = {kind.kind: kind.per_iteration_ns or 0.0 for kind in report.kinds}
    elif (table.self_cpu_total_ns or 0) > 0:
        wall, source = table.self_cpu_total_ns, "cpu_total"
    comm, compute = (sum(time for kind, time in times.items() if kind in wanted) for wanted in (COMMUNICATION, COMPUTE))
    reason = None
    if not comm:
        reason = "there is no communication"
    elif wall is None:
        reason = "no wall time is known"
    elif source == "cpu_total" and iterations is not None and iterations.leak:
        reason = "the device rows hold work from before the window that the CPU total covers"
    elif max(comm, compute) > wall:
        side = "communication" if comm > compute else "compute"
        reason = f"{side} alone exceeds the wall time, so its kernels overlap one another or ran outside it"
    if reason is not None or wall is None:
        return OverlapBounds(None, None, wall, source, comm, compute, reason)
    least = max(0.0, comm + compute - wall) / comm
    return OverlapBounds(least, min(1.0, (compute + missing) / comm), wall, source, comm, compute, None)


def _check_share(stated: StatedShare, report: TableReport) -> CheckedShare:
    """Compare a printed share with the share by the table."""
    total_ns = report.total_ns
    rows = [row for row in report.counted.rows if row.kind in _SHARE_KINDS[stated.subject]]
    read_rows = [row.row for row in rows if row.row.unit in _READ_UNITS]
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
    tolerance = 0.5 * 10.0 ** -len(stated.printed.partition(".")[2]) + 1e-9
    matching = [causes for value, causes in interpretations if abs(float(stated.printed) - value) <= tolerance]
    listed = stated.parts is not None and [round(row.device_share or 0.0, 6) for row in read_rows] == [
        round(part, 6) for part in stated.parts
    ]
    return CheckedShare(
        stated, share, max(partial_share, 0.0), tuple(row.row for row in dropped_rows), () in matching,
        next(iter(matching), ()), listed,
    )  # fmt: skip


# --- warnings ---------------------------------------------------------------------------------------


def _warnings(report: TableReport, split_warnings: list[Notice]) -> list[Notice]:
    """Return the warnings about the selection of rows, about the split of SendRecv, and about the sums."""
    warnings, counted = [*report.table.warnings], report.counted
    if counted.basis == "cpu":
        warnings.append(Notice("table_cpu_only", "the table has no device columns: self CPU times are added up"))
    if counted.basis == "operators":
        text = "the table has no kernel rows: the operators' own device times are added up"
        warnings.append(Notice("table_operators_only", text))
    generic = sum(row.generic for row in counted.rows)
    if generic:
        text = f"{generic} rows are cut to a generic CUTLASS name and counted as other: they may be attention"
        warnings.append(Notice("table_names_cut", text, count=generic))
    doubtful = sum(reason == "footer" for _, reason in counted.left_out)
    if doubtful:
        text = f"{doubtful} rows are left out as annotations: without them the rows add up to the footer's total"
        warnings.append(Notice("table_annotations_by_footer", text, count=doubtful))
    warnings += split_warnings
    difference, iterations = report.difference_ns, report.iterations
    if difference is not None and report.counted.basis == "kernels" and abs(difference) > report.slack_ns:
        direction, why = "more", "rows that are no kernels were counted"
        if difference < 0:
            direction, why = "less", "rows are missing (row_limit) or were left out wrongly"
        text = (
            f"the kernels add up to {abs(difference) / 1e6:.3f} ms {direction} than the footer's total "
            f"(line {report.table.line} on; rounding explains {report.slack_ns / 1e6:.3f} ms): {why}"
        )
        warnings.append(Notice("table_off_footer", text))
    if difference is None and report.missing_ns:
        text = (
            f"by the shares printed beside the times all kernels took {duration(report.whole_ns)}: "
            f"{duration(report.missing_ns)} of it has no row here"
        )
        warnings.append(Notice("table_rows_missing", text))
    if iterations is not None and iterations.leak:
        pairs = ", ".join(f"{c.launch} {c.launched:,} to {c.ran:,}" for c in iterations.counts if c.ratio > 1)
        low, high = iterations.device_range
        text = (
            f"device rows hold {low:.1f} to {high:.1f} iterations against {iterations.cpu} in the CPU rows"
            f" ({iterations.source.replace('_', ' ')}): work launched before the window ran on into it"
            f" (launches to device calls: {pairs})"
        )
        warnings.append(Notice("warmup_in_window", text))
    return warnings
