"""A printed kernel table explained: time by kind, what it proves about overlap, and what is odd about it.

Times are integer nanoseconds, shares and ratios 0..1. A table holds sums over all calls and streams, so shares
are of summed kernel time, not of a wall time, and overlap is known only as an interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from ringprof.analysis.kinds.kinds import COMMUNICATION, COMPUTE, KINDS
from ringprof.analysis.kinds.operators import kind_of_collective
from ringprof.kernel_tables.iterations import Iterations, count_iterations
from ringprof.kernel_tables.kernels import CountedRows, counted_rows, slack_ns
from ringprof.kernel_tables.rows import KernelTable, TableRow
from ringprof.kernel_tables.stated_shares import CheckedShare, check_share
from ringprof.report.text import duration
from ringprof.trace.columns import Notice

ASSUMPTIONS = (
    "compute kernels do not overlap one another",
    "communication kernels do not overlap one another",
    "all of them ran within the wall time",
)
_SHARE_STEP = 1e-4
"""Worth of the last digit of a printed share: 0.01 %."""
_LEAST_SHARE = 0.01
"""Shares below this are printed with too few digits to tell the whole, and not always rounded."""
_SEND_RECV_KINDS = ("send_recv", "all_to_all", "comm_other")

WallSource = Literal["given", "iteration_time", "cpu_total"]
"""Of a wall time: the user, the log's time of one iteration, or the footer's CPU total."""


@dataclass(frozen=True)
class KindSum:
    """One kind's rows added up."""

    kind: str
    time_ns: int
    calls: int
    per_iteration_ns: float | None
    """None where the number of iterations is not known."""

    def plus(self, time_ns: int, calls: int, per_iteration_ns: float) -> KindSum:
        """The sum with one more part."""
        each = None if self.per_iteration_ns is None else self.per_iteration_ns + per_iteration_ns
        return KindSum(self.kind, self.time_ns + time_ns, self.calls + calls, each)

    @property
    def average_ns(self) -> float | None:
        """Time of one call."""
        return self.time_ns / self.calls if self.calls else None


@dataclass(frozen=True)
class OverlapBounds:
    """The least and the most of the communication that can have been hidden behind compute."""

    least: float | None
    most: float | None
    wall_ns: int | None
    wall_source: WallSource | None
    comm_ns: float
    """Communication in `wall_ns`: of one iteration where that is the wall."""
    compute_ns: float
    reason: str | None
    """Why the interval is null."""


UNKNOWN_OVERLAP = OverlapBounds(None, None, None, None, 0, 0, "the table has no kernels")


@dataclass(frozen=True)
class TableReport:
    """Everything that a report of one table shows."""

    table: KernelTable
    counted: CountedRows
    kinds: tuple[KindSum, ...]
    """Largest first."""
    slack_ns: int
    """How large the difference from the footer can be by rounding of the printed times alone."""
    iterations: Iterations | None
    overlap: OverlapBounds
    shares: tuple[CheckedShare, ...]
    warnings: tuple[Notice, ...]

    @property
    def total_ns(self) -> int:
        """Sum of the rows that count."""
        return sum(kind.time_ns for kind in self.kinds)

    @property
    def footer_ns(self) -> int | None:
        """The footer's total of what the rows count: of the CPU where there is no device."""
        return self.table.self_cpu_total_ns if self.counted.basis == "cpu" else self.table.self_device_total_ns

    @property
    def difference_ns(self) -> int | None:
        """`total_ns` minus the footer's total; None without a footer."""
        return None if self.footer_ns is None else self.total_ns - self.footer_ns

    @property
    def missing_ns(self) -> int:
        """Time of kernels that have no row here, by the footer or by the printed shares; 0 where neither tells."""
        if self.counted.basis != "kernels":
            return 0
        whole, slack = (self.footer_ns, self.slack_ns) if self.footer_ns is not None else whole_by_shares(self.table)
        return whole - self.total_ns if whole is not None and whole - self.total_ns > slack else 0

    @property
    def whole_ns(self) -> int:
        """What shares are of: `total_ns`, with the time of kernels that have no row here where that is known."""
        return self.total_ns + self.missing_ns

    @property
    def kinds_ns(self) -> dict[str, int]:
        """Time by kind, largest first."""
        return {kind.kind: kind.time_ns for kind in self.kinds}


def analyse_table(table: KernelTable, wall_ns: int | None = None, iterations: int | None = None) -> TableReport:
    """Add up and judge one table.

    ``wall_ns`` is the wall time of the profiled window, ``iterations`` how many iterations it holds; where they
    are not given, the log's own figures are used and named. Raises nothing: what is odd is a warning.
    """
    counted = counted_rows(table)
    told = count_iterations(table, counted, iterations)
    kinds, split = _kinds(table, counted, told)
    report = TableReport(table, counted, kinds, slack_ns(counted.rows, table), told, UNKNOWN_OVERLAP, (), ())
    return replace(
        report,
        overlap=_overlap(report, wall_ns),
        shares=tuple(check_share(one, counted, report.total_ns) for one in table.context.shares if report.total_ns),
        warnings=(*table.warnings, *_row_warnings(counted), *split, *_sum_warnings(report)),
    )


def whole_by_shares(table: KernelTable) -> tuple[int | None, int]:
    """(the device's whole time by the shares that are printed beside times, how far it may be off); None: not known."""
    low, high = 0.0, math.inf
    for row in table.rows:
        time_ns, share = row.self_device_ns or 0, row.device_share or 0.0
        if share >= _LEAST_SHARE:
            low = max(low, (time_ns - row.step_ns / 2) / (share + _SHARE_STEP / 2))
            high = min(high, (time_ns + row.step_ns / 2) / (share - _SHARE_STEP / 2))
    return (round((low + high) / 2), math.ceil((high - low) / 2)) if low <= high < math.inf else (None, 0)


# --- kinds ------------------------------------------------------------------------------------------


def _kinds(
    table: KernelTable, counted: CountedRows, told: Iterations | None
) -> tuple[tuple[KindSum, ...], list[Notice]]:
    sums = {kind: KindSum(kind, 0, 0, 0.0 if told else None) for kind in KINDS}
    for row in counted.rows:
        each = row.time_ns / told.of(row) if told else 0.0
        sums[row.kind] = sums[row.kind].plus(row.time_ns, row.calls, each)
    warnings = _split_send_recv(table, sums) if counted.basis == "kernels" else []
    largest_first = sorted(sums.values(), key=lambda one: -one.time_ns)
    return tuple(one for one in largest_first if one.calls or one.time_ns), warnings


def _split_send_recv(table: KernelTable, sums: dict[str, KindSum]) -> list[Notice]:
    """Sends, receives and all-to-alls run in kernels of one name: the annotations' times share it out."""
    times: dict[str, int] = {}
    calls: dict[str, int] = {}
    for row in table.rows:
        if kind := _kind_of_annotation(row):
            times[kind] = times.get(kind, 0) + (row.self_device_ns or 0)
            calls[kind] = calls.get(kind, 0) + (row.calls or 0)
    whole = sums["send_recv"]
    if not whole.time_ns or set(times) <= {"send_recv"}:
        return []
    sums["send_recv"] = KindSum("send_recv", 0, 0, None if whole.per_iteration_ns is None else 0.0)
    shared_calls = _shared_out(whole.calls, calls)
    for kind, part in _shared_out(whole.time_ns, times).items():
        each = (whole.per_iteration_ns or 0.0) * part / whole.time_ns
        sums[kind] = sums[kind].plus(part, shared_calls[kind], each)
    parts = ", ".join(f"{kind} {100 * times[kind] / sum(times.values()):.1f} %" for kind in sorted(times))
    message = f"SendRecv kernels carry more than hops: their time is shared out as their annotations' is ({parts})"
    return [Notice("send_recv_split", message)]


def _shared_out(whole: int, weights: dict[str, int]) -> dict[str, int]:
    """``whole`` in integers by weight; what division leaves over goes to the heaviest."""
    heaviest = max(weights, key=lambda kind: weights[kind])
    parts = {kind: whole * weight // max(1, sum(weights.values())) for kind, weight in weights.items()}
    parts[heaviest] += whole - sum(parts.values())
    return parts


def _kind_of_annotation(row: TableRow) -> str | None:
    """What an ``nccl:`` row on the device says that SendRecv kernels did; None for other rows."""
    if not row.name.startswith("nccl:") or (row.self_device_ns or 0) <= 0 or row.on_cpu:
        return None
    # Point-to-point calls are batched as "coalesced".
    kind = "send_recv" if row.name.startswith("nccl:coalesced") else kind_of_collective(row.name.split(" ")[0])
    return kind if kind in _SEND_RECV_KINDS else None


# --- overlap ----------------------------------------------------------------------------------------


def _overlap(report: TableReport, given_ns: int | None) -> OverlapBounds:
    """From |C| + |K| - wall at least, and the smaller of |C| and |K| at most, of |C|."""
    told = report.iterations
    if report.counted.basis != "kernels":
        return UNKNOWN_OVERLAP
    wall, source = _wall(report.table, told, given_ns)
    each = source == "iteration_time"
    comm, compute = (
        _sum(report.kinds, COMMUNICATION, per_iteration=each),
        _sum(report.kinds, COMPUTE, per_iteration=each),
    )
    # Kernels without a row may be of either side: at most, all of them hid communication.
    missing = report.missing_ns / told.device_range[0] if each and told is not None else report.missing_ns
    reason = None
    if not comm:
        reason = "there is no communication"
    elif wall is None:
        reason = "no wall time is known"
    elif source == "cpu_total" and told is not None and told.leak:
        reason = "the device rows hold work from before the window that the CPU total covers"
    elif max(comm, compute) > wall:
        side = "communication" if comm > compute else "compute"
        reason = f"{side} alone exceeds the wall time, so its kernels overlap one another or ran outside it"
    if reason is not None or wall is None:
        return OverlapBounds(None, None, wall, source, comm, compute, reason)
    least = max(0.0, comm + compute - wall) / comm
    return OverlapBounds(least, min(1.0, (compute + missing) / comm), wall, source, comm, compute, None)


def _wall(
    table: KernelTable, told: Iterations | None, given_ns: int | None
) -> tuple[int, WallSource] | tuple[None, None]:
    """The wall time to hold the sums against, and whose it is; the time of one iteration where the log has it."""
    if given_ns is not None:
        return given_ns, "given"
    if table.context.iteration_ns and told is not None:
        return table.context.iteration_ns, "iteration_time"
    if (table.self_cpu_total_ns or 0) > 0:
        return table.self_cpu_total_ns or 0, "cpu_total"
    return None, None


def _sum(kinds: tuple[KindSum, ...], wanted: tuple[str, ...], *, per_iteration: bool) -> float:
    return sum((k.per_iteration_ns or 0.0) if per_iteration else k.time_ns for k in kinds if k.kind in wanted)


# --- warnings ---------------------------------------------------------------------------------------


def _row_warnings(counted: CountedRows) -> list[Notice]:
    found = []
    if counted.basis == "cpu":
        found.append(Notice("table_cpu_only", "the table has no device columns: self CPU times are added up"))
    if counted.basis == "operators":
        text = "the table has no kernel rows: the operators' own device times are added up"
        found.append(Notice("table_operators_only", text))
    generic = sum(one.generic for one in counted.rows)
    if generic:
        text = f"{generic} rows are cut to a generic CUTLASS name and counted as other: they may be attention"
        found.append(Notice("table_names_cut", text, count=generic))
    doubtful = sum(out.reason == "footer" for out in counted.left_out)
    if doubtful:
        text = f"{doubtful} rows are left out as annotations: without them the rows add up to the footer's total"
        found.append(Notice("table_annotations_by_footer", text, count=doubtful))
    return found


def _sum_warnings(report: TableReport) -> list[Notice]:
    found = []
    difference, told = report.difference_ns, report.iterations
    if difference is not None and report.counted.basis == "kernels" and abs(difference) > report.slack_ns:
        more, why = "more", "rows that are no kernels were counted"
        if difference < 0:
            more, why = "less", "rows are missing (row_limit) or were left out wrongly"
        text = (
            f"the kernels add up to {abs(difference) / 1e6:.3f} ms {more} than the footer's total "
            f"(line {report.table.line} on; rounding explains {report.slack_ns / 1e6:.3f} ms): {why}"
        )
        found.append(Notice("table_off_footer", text))
    if difference is None and report.missing_ns:
        text = (
            f"by the shares printed beside the times all kernels took {duration(report.whole_ns)}: "
            f"{duration(report.missing_ns)} of it has no row here"
        )
        found.append(Notice("table_rows_missing", text))
    if told is not None and told.leak:
        pairs = ", ".join(f"{c.launch} {c.launched:,} to {c.ran:,}" for c in told.counts if c.ratio > 1)
        low, high = told.device_range
        text = (
            f"device rows hold {low:.1f} to {high:.1f} iterations against {told.cpu} in the CPU rows"
            f" ({told.source.replace('_', ' ')}): work launched before the window ran on into it"
            f" (launches to device calls: {pairs})"
        )
        found.append(Notice("warmup_in_window", text))
    return found
