"""A printed kernel table explained: time by kind, what it proves about overlap, and what is odd about it.

Times are integer nanoseconds, shares and ratios 0..1. A table holds sums over all calls and streams, so shares
are of summed kernel time, not of a wall time, and overlap is known only as an interval.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringprof.analysis.kinds.kinds import COMMUNICATION, COMPUTE, KINDS
from ringprof.analysis.kinds.operators import kind_of_collective
from ringprof.kernel_tables.claims import ClaimCheck, check_claims
from ringprof.kernel_tables.iterations import Iterations, count_iterations
from ringprof.kernel_tables.kernels import Chosen, LeftOut, choose_rows, kind_of_row, slack_ns
from ringprof.kernel_tables.rows import KernelTable, TableRow
from ringprof.trace.columns import Caveat

ASSUMPTIONS = (
    "compute kernels do not overlap one another",
    "communication kernels do not overlap one another",
    "all of them ran within the wall time",
)
_SEND_RECV_KINDS = ("send_recv", "all_to_all", "comm_other")


@dataclass(frozen=True)
class KindTime:
    """One kind's rows added up."""

    kind: str
    time_ns: int
    calls: int
    per_iteration_ns: float | None
    """None where the number of iterations is not known."""

    @property
    def average_ns(self) -> float | None:
        """Time of one call."""
        return self.time_ns / self.calls if self.calls else None


@dataclass(frozen=True)
class Overlap:
    """The least and the most of the communication that can have been hidden behind compute."""

    least: float | None
    most: float | None
    wall_ns: int | None
    wall_source: str | None
    """``given``, ``iteration_time`` (the log's time of one iteration) or ``cpu_total`` (the footer's)."""
    comm_ns: float
    """Communication in `wall_ns`: of one iteration where that is the wall."""
    compute_ns: float
    reason: str | None
    """Why the interval is null."""


@dataclass(frozen=True)
class TableReport:
    """Everything that a report of one table shows."""

    table: KernelTable
    chosen: Chosen
    total_ns: int
    """Sum of the rows that count."""
    kinds: tuple[KindTime, ...]
    """Largest first."""
    difference_ns: int | None
    """`total_ns` minus the footer's total; None without a footer."""
    slack_ns: int
    """How large the difference can be by rounding of the printed times alone."""
    iterations: Iterations | None
    overlap: Overlap
    claims: tuple[ClaimCheck, ...]
    warnings: tuple[Caveat, ...]

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """Rows with device time that repeat the time of kernels."""
        return self.chosen.left_out

    @property
    def kinds_ns(self) -> dict[str, int]:
        """Time by kind, largest first."""
        return {kind.kind: kind.time_ns for kind in self.kinds}


def analyse_table(table: KernelTable, wall_ns: int | None = None, iterations: int | None = None) -> TableReport:
    """Add up and judge one table.

    ``wall_ns`` is the wall time of the profiled window, ``iterations`` how many iterations it holds; where they
    are not given, the log's own figures are used and named. Raises nothing: what is odd is a warning.
    """
    chosen = choose_rows(table)
    counted = count_iterations(table, chosen, iterations)
    kinds, split = _kinds(table, chosen, counted)
    total = sum(kind.time_ns for kind in kinds)
    footer = table.self_cpu_total_ns if chosen.basis == "cpu" else table.self_device_total_ns
    difference = total - footer if footer is not None else None
    slack = slack_ns(chosen.rows, table)
    warnings = [*table.warnings, *_row_warnings(table, chosen), *split]
    if difference is not None and chosen.basis == "kernels" and abs(difference) > slack:
        warnings.append(_off_footer(table, difference, slack))
    if counted is not None and counted.leak:
        warnings.append(_leak(counted))
    claims = check_claims(table.context.claims, chosen, total)
    overlap = _overlap(table, chosen, kinds, counted, wall_ns)
    return TableReport(table, chosen, total, kinds, difference, slack, counted, overlap, tuple(claims), tuple(warnings))


# --- kinds ------------------------------------------------------------------------------------------


def _kinds(table: KernelTable, chosen: Chosen, counted: Iterations | None) -> tuple[tuple[KindTime, ...], list[Caveat]]:
    time = dict.fromkeys(KINDS, 0)
    calls = dict.fromkeys(KINDS, 0)
    each = dict.fromkeys(KINDS, 0.0)
    for row in chosen.rows:
        kind = kind_of_row(row.name)
        time[kind] += chosen.time_of(row)
        calls[kind] += row.calls or 0
        each[kind] += chosen.time_of(row) / counted.of(row) if counted else 0.0
    warnings = _split_send_recv(table, chosen, time, calls, each)
    kinds = [
        KindTime(kind, time[kind], calls[kind], each[kind] if counted else None)
        for kind in sorted(KINDS, key=lambda kind: -time[kind])
        if calls[kind] or time[kind]
    ]
    return tuple(kinds), warnings


def _split_send_recv(
    table: KernelTable, chosen: Chosen, time: dict[str, int], calls: dict[str, int], each: dict[str, float]
) -> list[Caveat]:
    """Sends, receives and all-to-alls run in kernels of one name: the annotations' times share it out."""
    named: dict[str, tuple[int, int]] = {}
    for row in table.rows:
        kind = _kind_of_annotation(row)
        if kind is not None:
            before = named.get(kind, (0, 0))
            named[kind] = before[0] + (row.self_device_ns or 0), before[1] + (row.calls or 0)
    whole, count, one = time["send_recv"], calls["send_recv"], each["send_recv"]
    if chosen.basis != "kernels" or not whole or not named or set(named) == {"send_recv"}:
        return []
    times = _shared_out(whole, {kind: part for kind, (part, _) in named.items()})
    counts = _shared_out(count, {kind: part for kind, (_, part) in named.items()})
    time["send_recv"] = calls["send_recv"] = 0
    each["send_recv"] = 0.0
    for kind, part in times.items():
        time[kind] += part
        calls[kind] += counts[kind]
        each[kind] += one * part / whole
    annotated = sum(part for part, _ in named.values())
    parts = ", ".join(f"{kind} {100 * named[kind][0] / annotated:.1f} %" for kind in sorted(named))
    message = f"SendRecv kernels carry more than hops: their time is shared out as their annotations' is ({parts})"
    return [Caveat("send_recv_split", message)]


def _shared_out(whole: int, weights: dict[str, int]) -> dict[str, int]:
    """``whole`` in integers by weight; what division leaves over goes to the heaviest."""
    heaviest = max(weights, key=lambda kind: weights[kind])
    parts = {kind: whole * weight // max(1, sum(weights.values())) for kind, weight in weights.items()}
    parts[heaviest] += whole - sum(parts.values())
    return parts


def _kind_of_annotation(row: TableRow) -> str | None:
    """What an ``nccl:`` row on the device says that SendRecv kernels did; None for other rows."""
    if not row.name.startswith("nccl:") or not row.self_device_ns or row.self_cpu_ns or row.cpu_total_ns:
        return None
    # Point-to-point calls are batched as "coalesced".
    kind = "send_recv" if row.name.startswith("nccl:coalesced") else kind_of_collective(row.name.split(" ")[0])
    return kind if kind in _SEND_RECV_KINDS else None


# --- overlap ----------------------------------------------------------------------------------------


def _overlap(
    table: KernelTable,
    chosen: Chosen,
    kinds: tuple[KindTime, ...],
    counted: Iterations | None,
    given_ns: int | None,
) -> Overlap:
    """From |C| + |K| - wall at least, and the smaller of |C| and |K| at most, of |C|."""
    if chosen.basis != "kernels":
        return Overlap(None, None, None, None, 0, 0, "the table has no kernels")
    per_iteration = given_ns is None and table.context.iteration_ns is not None and counted is not None
    comm = _sum(kinds, COMMUNICATION, per_iteration)
    compute = _sum(kinds, COMPUTE, per_iteration)
    wall, source = given_ns, "given"
    if per_iteration:
        wall, source = table.context.iteration_ns, "iteration_time"
    elif given_ns is None:
        wall, source = table.self_cpu_total_ns, "cpu_total"
    reason = None
    if not comm:
        reason = "there is no communication"
    elif not wall or wall <= 0:
        wall, reason = None, "no wall time is known"
    elif source == "cpu_total" and counted is not None and counted.leak:
        reason = "the device rows hold work from before the window that the CPU total covers"
    elif max(comm, compute) > wall:
        side = "communication" if comm > compute else "compute"
        reason = f"{side} alone exceeds the wall time, so its kernels overlap one another or ran outside it"
    if reason is not None or wall is None:
        return Overlap(None, None, wall, source if wall else None, comm, compute, reason)
    least = max(0.0, comm + compute - wall) / comm
    return Overlap(least, min(1.0, compute / comm), wall, source, comm, compute, None)


def _sum(kinds: tuple[KindTime, ...], wanted: tuple[str, ...], per_iteration: bool) -> float:
    return sum((k.per_iteration_ns or 0.0) if per_iteration else k.time_ns for k in kinds if k.kind in wanted)


# --- warnings ---------------------------------------------------------------------------------------


def _row_warnings(table: KernelTable, chosen: Chosen) -> list[Caveat]:
    found = []
    if chosen.basis == "cpu":
        found.append(Caveat("table_cpu_only", "the table has no device columns: self CPU times are added up"))
    if chosen.basis == "operators":
        text = "the table has no kernel rows: the operators' own device times are added up"
        found.append(Caveat("table_operators_only", text))
    generic = [row for row in chosen.rows if row.cut and kind_of_row(row.name) == "other" and "cutlass" in row.name]
    if generic:
        text = f"{len(generic)} rows are cut to a generic CUTLASS name and counted as other: they may be attention"
        found.append(Caveat("table_names_cut", text, count=len(generic)))
    doubtful = [out for out in chosen.left_out if out.reason == "footer"]
    if doubtful:
        text = f"{len(doubtful)} rows are left out as annotations: without them the rows add up to the footer's total"
        found.append(Caveat("table_annotations_by_footer", text, count=len(doubtful)))
    return found


def _off_footer(table: KernelTable, difference: int, slack: int) -> Caveat:
    less = difference < 0
    why = "rows are missing (row_limit) or were left out wrongly" if less else "rows that are no kernels were counted"
    text = (
        f"the kernels add up to {abs(difference) / 1e6:.3f} ms {'less' if less else 'more'} than the footer's total "
        f"(line {table.line} on; rounding explains {slack / 1e6:.3f} ms): {why}"
    )
    return Caveat("table_off_footer", text)


def _leak(counted: Iterations) -> Caveat:
    pairs = ", ".join(f"{c.launch} {c.launched:,} to {c.ran:,}" for c in counted.counts if c.ratio > 1)
    low, high = counted.device_range
    text = (
        f"device rows hold {low:.1f} to {high:.1f} iterations against {counted.cpu} in the CPU rows"
        f" ({counted.source.replace('_', ' ')}): work launched before the window ran on into it"
        f" (launches to device calls: {pairs})"
    )
    return Caveat("warmup_in_window", text)
