"""Selection of the rows of a printed kernel table that are device kernels, and the number of iterations in them.

The other rows with device time repeat the time of kernels. A table mixes operators, CPU calls, annotations and
kernels. A kernel has device time and no CPU time, but so has the device side of an annotation. Most annotations are
recognised by their names, more by a CPU row of the same name, and the rest by the footer, which adds up only kernels.

The number of iterations follows from launch calls and kernels. The CPU rows cover the profiled iterations; the device
rows cover the work that *ran* in the window, which can include work launched before it. Then a kernel has more calls
than its launch, and every device time is too large for the profiled iterations.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations
from typing import Literal

from ringprof.analysis.kinds.kinds import ATTENTION, COMMUNICATION, COMPUTE
from ringprof.analysis.kinds.operators import (
    kind_of_attention_operator,
    kind_of_collective,
    kind_of_enclosed_kernels,
    kind_of_own_kernel,
)
from ringprof.analysis.kinds.rules import rule_for
from ringprof.printed.tables.rows import CUT_MARKS, KernelTable, TableRow

_LONGEST_NAME = 1024
"""Number of characters of a name that are searched by the rules; torch's own names are shorter."""

_ANNOTATION = re.compile(
    r"ProfilerStep|(?:nccl|gloo|mpi|ucc|hccl):|ringprof::|autograd::|Optimizer\.|DistributedDataParallel\.|##"
    r"|enumerate\(DataLoader|FullyShardedDataParallel|FSDP::|Torch-Compiled Region|record_param_comms|detach$"
)
_OPERATOR = re.compile(r"[A-Za-z_]\w*::\w+(?:\.\w+)?")
_MAX_DOUBTFUL = 10
_COMMON_WORDS = set(COMPUTE) - {*ATTENTION, "merge", "gemm"}

Reason = Literal["operator", "annotation", "same_name_on_cpu", "footer"]
"""Reason why a row with device time is not counted; ``footer``: without it the rows add up to the footer's total."""


@dataclass(frozen=True, slots=True)
class CountedRow:
    """A row whose time is counted."""

    row: TableRow
    kind: str
    time_ns: int

    @property
    def calls(self) -> int:
        """Number of calls; 0 where the table does not count them."""
        return self.row.calls or 0

    @property
    def may_be_annotation(self) -> bool:
        """Whether the row may be an annotation by its name: free text that only the rules for common words match."""
        if any(mark in self.row.name for mark in "(<"):
            return False
        rule = rule_for(self.row.name)
        return self.kind in _COMMON_WORDS or (rule is not None and rule.loose)

    @property
    def generic(self) -> bool:
        """Whether the name was cut so early that every kernel of a template library has the same beginning."""
        return self.kind == "other" and self.row.cut and ("cutlass" in self.row.name or "flash" in self.row.name)


@dataclass(frozen=True)
class CountedRows:
    """The rows whose times add up to the device's work, and the rows that are left out."""

    rows: tuple[CountedRow, ...]
    left_out: tuple[tuple[TableRow, Reason], ...]
    basis: Literal["kernels", "operators", "cpu"]
    """Kind of the counted rows: ``operators`` without kernel rows (torch before 1.8), ``cpu`` without a device."""


# Words of kernel names that a narrow column may cut before the rules recognise their kind.
_COLLECTIVES = ("SendRecv", "AllGather", "ReduceScatter", "AllReduce", "Broadcast")
_KERNEL_WORDS = (
    "flash_fwd_kernel",
    "flash_fwd_splitkv_kernel",
    "flash_bwd_dq_dk_dv_loop_kernel",
    "flash_bwd_dot_do_o_kernel",
    "flash_bwd_convert_dq_kernel",
    *(f"nccl{dev}Kernel_{collective}" for dev in ("", "Dev") for collective in _COLLECTIVES),
    "FlashAttnFwdSm90",
    "FlashAttnBwdSm90",
    "FlashAttentionForwardSm90",
    "FlashAttentionBackwardSm90",
)
_LAST_WORD = re.compile(r"\w{8,80}$")
"""Last word of a name; shorter ones are beginnings of too many words."""


@lru_cache(maxsize=4096)
def kind_of_row(name: str) -> str:
    """Return the kind of a kernel, copy or operator, by its name in a table, whose end may be cut off."""
    cut = name.endswith(CUT_MARKS)
    stem = name.removesuffix("...").removesuffix("…")[:_LONGEST_NAME]
    bare = stem.lower().removeprefix("[cuda ").removeprefix("[")
    if bare.startswith(("memcpy", "hipmemcpy")):
        return "copy_engine" if "PtoP" in stem or "peer" in bare else "memcpy"
    if bare.startswith("memset"):
        return "memset"
    if kind := kind_of_attention_operator(stem) or kind_of_enclosed_kernels(stem) or kind_of_own_kernel(stem):
        return kind
    if stem.startswith(("c10d::", "nccl:")):
        return kind_of_collective(stem) or "other"
    if cut and (match := _LAST_WORD.search(stem[-80:])):
        # The name was cut inside a known word; its kind is known if all possible words are of one kind.
        kinds = {rule.kind for full in _KERNEL_WORDS if full.startswith(match[0]) and (rule := rule_for(full))}
        if len(kinds) == 1:
            return kinds.pop()
    rule = rule_for(stem)
    return rule.kind if rule else "other"


def select_counted_rows(table: KernelTable) -> CountedRows:
    """Select the rows whose times add up to the device's work; list the other rows with device time, with reasons."""
    if table.device is None:
        timed_on_cpu = [row for row in table.rows if row.self_cpu_ns]
        return CountedRows(tuple(_counted_row(row, row.self_cpu_ns) for row in timed_on_cpu), (), "cpu")
    timed = [row for row in table.rows if (row.self_device_ns or 0) > 0]
    launchers = [row for row in timed if row.on_cpu]
    if launchers and len(launchers) == len(timed):
        return CountedRows(tuple(_counted_row(row, row.self_device_ns) for row in launchers), (), "operators")
    device_times_by_cpu_name: dict[str, list[int | None]] = {}
    for row in table.rows:
        if row.on_cpu:
            device_times_by_cpu_name.setdefault(row.name, []).append(row.self_device_ns)
    rows: list[CountedRow] = []
    left_out: list[tuple[TableRow, Reason]] = [(row, "operator") for row in launchers]
    for candidate in [_counted_row(row, row.self_device_ns) for row in timed if not row.on_cpu]:
        row, cpu_row_times = candidate.row, device_times_by_cpu_name.get(candidate.row.name, [])
        if _ANNOTATION.match(row.name):
            left_out.append((row, "annotation"))
        elif not row.cut and _OPERATOR.fullmatch(row.name):
            left_out.append((row, "operator"))
        # The CPU row of an operator that launches a kernel of its own name has that kernel's device time. That of an
        # annotation has no device time, or the sum of the kernels inside it, which is less than its span on the device.
        elif cpu_row_times and candidate.may_be_annotation and row.self_device_ns not in cpu_row_times:
            left_out.append((row, "same_name_on_cpu"))
        else:
            rows.append(candidate)
    beyond_footer: tuple[CountedRow, ...] = ()
    if table.self_device_total_ns is not None:
        # The fewest possible annotations without which the rest adds up to the footer.
        slack = rounding_slack_ns(rows, table)
        excess = sum(row.time_ns for row in rows) - table.self_device_total_ns
        if excess > slack:
            beyond_footer = _rows_adding_up_to(excess, slack, [row for row in rows if row.may_be_annotation])
    left_out += [(candidate.row, "footer") for candidate in beyond_footer]
    left_out.sort(key=lambda out: out[0].line)
    with_kinds = _kinds_from_operators([candidate for candidate in rows if candidate not in beyond_footer], launchers)
    return CountedRows(tuple(with_kinds), tuple(left_out), "kernels")


def _counted_row(row: TableRow, time_ns: int | None) -> CountedRow:
    return CountedRow(row, kind_of_row(row.name), time_ns or 0)


def rounding_slack_ns(rows: Iterable[CountedRow], table: KernelTable) -> int:
    """Return the largest difference between the sum of printed times and the printed total that rounding explains."""
    return (sum(row.row.step_ns for row in rows) + table.total_step_ns) // 2 + 1


def _rows_adding_up_to(time_ns: int, slack: int, rows: Sequence[CountedRow]) -> tuple[CountedRow, ...]:
    """Return the fewest rows that add up to a time within rounding; empty unless there is exactly one such choice."""
    candidates = rows[:_MAX_DOUBTFUL]
    for count in range(1, len(candidates) + 1):
        choices = combinations(candidates, count)
        matches = [chosen for chosen in choices if abs(sum(row.time_ns for row in chosen) - time_ns) <= slack]
        if matches:
            return matches[0] if len(matches) == 1 else ()
    return ()


# --- kinds by operator ------------------------------------------------------------------------------

_GEMM_OPERATOR = re.compile(r"aten::(?:_scaled_|_grouped_|_scaled_grouped_)?(?:mm|bmm|addmm|baddbmm|addbmm)")


def _kinds_from_operators(rows: list[CountedRow], launchers: Sequence[TableRow]) -> list[CountedRow]:
    """Set the kinds of rows whose names were cut too early, from the device times of the operators that launched them.

    This applies to attention and matrix products. A cut row gets the operators' kind where the known kernels take less
    time than the operators, and exactly one choice of cut rows makes up the rest. The number of calls of these rows
    must be a multiple of the operators' calls.
    """
    for kind in ("flash_fwd", "flash_bwd", "gemm"):
        operators = [
            row
            for row in launchers
            if kind == ("gemm" if _GEMM_OPERATOR.fullmatch(row.name) else kind_of_attention_operator(row.name))
        ]
        recognised = [counted for counted in rows if counted.kind == kind]
        calls = sum(row.calls or 0 for row in operators)
        missing = sum(row.self_device_ns or 0 for row in operators) - sum(counted.time_ns for counted in recognised)
        cut = [counted for counted in rows if counted.generic and calls and counted.calls % calls == 0]
        slack = sum(row.step_ns for row in (*operators, *(counted.row for counted in (*recognised, *cut)))) // 2 + 1
        if missing > slack:
            completed = _rows_adding_up_to(missing, slack, cut)
            rows = [replace(counted, kind=kind) if counted in completed else counted for counted in rows]
    return rows


# --- iterations ---------------------------------------------------------------------------------------

LEAK = 1.01
"""Ratio of device calls to launches above which earlier work ran in the window; the window's edges explain less."""

_MAX_RATIO = 2.0
"""Ratio of device calls to launches above which launches start several kernels (CUDA graphs): counts prove nothing."""

_MAX_GUESSES = 10_000
"""Most numbers of attention calls per iteration that are tried."""

_COPIES = {"copy": ("cudaMemcpyAsync",), "set": ("cudaMemsetAsync",)}
_LAUNCHES = {
    "communication": ("cuLaunchKernelEx", "cudaLaunchKernelExC"), "compiled": ("cuLaunchKernel",),
    "kernel": ("cudaLaunchKernel",), **_COPIES,
}  # fmt: skip
IterationSource = Literal["given", "log", "profiler_steps", "inferred"]
"""Source of a number of iterations; ``inferred`` is the greatest common divisor of the launch counts."""
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class LaunchCount:
    """Number of launch calls of one group, with the number of device activities that they started."""

    group: str
    """Key of `_LAUNCHES`, or ``all`` for all kernels together."""
    launch: str
    """Names of the launch calls, joined by ``and``."""
    launched: int
    """Number of launch calls."""
    ran: int
    """Number of kernels, copies or memsets that ran."""

    @property
    def ratio(self) -> float:
        """Device calls per launch."""
        return self.ran / self.launched


@dataclass(frozen=True)
class FlashCount:
    """Number of calls of an attention pass, in total and per iteration."""

    kind: str
    calls: int
    per_iteration: int

    @property
    def iterations(self) -> float:
        """Number of iterations in which the calls were made."""
        return self.calls / self.per_iteration


@dataclass(frozen=True)
class Iterations:
    """Number of iterations in the CPU rows and in the device rows, with the counts that show it."""

    cpu: int
    """Number of iterations in the CPU rows."""
    source: IterationSource
    counts: tuple[LaunchCount, ...]
    flash: tuple[FlashCount, ...]
    leak: bool
    """Whether the device rows hold more work than the CPU rows launched."""

    @property
    def device_range(self) -> tuple[float, float]:
        """Smallest and largest number of iterations that the device rows may hold."""
        if not self.leak:
            return float(self.cpu), float(self.cpu)
        values = [self.cpu * count.ratio for count in self.counts] + [count.iterations for count in self.flash]
        return min(values), max(values)

    @cached_property
    def _by_key(self) -> dict[str, float]:
        """Number of iterations by kind of attention and, where earlier work ran in the window, by launch group."""
        by_group = {count.group: self.cpu * count.ratio for count in self.counts} if self.leak else {}
        return by_group | {count.kind: count.iterations for count in self.flash}

    def covered_by(self, row: CountedRow) -> float:
        """Return the number of iterations that a row's time covers.

        Where the row's calls per iteration are known, the number follows from its calls. Elsewhere it is the number of
        iterations in the CPU rows, times the ratio of device calls to launches where earlier work ran in the window.
        """
        keys = (row.kind, launch_group(row), "all", "kernel")
        return next((self._by_key[key] for key in keys if key in self._by_key), self.cpu)


def launch_group(row: CountedRow) -> str:
    """Return the group of `_LAUNCHES` that launches a device activity, by its kind and name."""
    if row.kind in ("memcpy", "copy_engine"):
        return "copy"
    if row.kind == "memset":
        return "set"
    if row.kind in COMMUNICATION:
        return "communication"
    return "compiled" if _IDENTIFIER.fullmatch(row.row.name) else "kernel"


def count_iterations(table: KernelTable, counted: CountedRows, user_count: int | None) -> Iterations | None:
    """Count the iterations in the CPU rows and in the device rows.

    ``user_count`` is the number that the user stated, if any. None where neither the log nor its launches show one.
    """
    counts = _launch_counts(table, counted.rows) if counted.basis == "kernels" else ()
    steps = sum(row.calls or 0 for row in table.rows if row.name.startswith("ProfilerStep") and row.cpu_total_ns)
    divisor = math.gcd(*(count.launched for count in counts)) if len(counts) > 1 else 0
    candidates: tuple[tuple[int | None, IterationSource], ...] = (
        (user_count, "given"),
        (table.iterations, "log"),
        (steps, "profiler_steps"),
        (divisor if divisor > 1 else None, "inferred"),
    )
    cpu, source = next(((count, source) for count, source in candidates if count), (0, None))
    if source is None:
        return None
    leak = any(count.ratio > LEAK for count in counts) and all(count.ratio < _MAX_RATIO for count in counts)
    flash = _flash_counts(table, counted.rows, cpu, counts) if leak else ()
    return Iterations(cpu, source, counts, flash, leak)


def _launch_counts(table: KernelTable, rows: Iterable[CountedRow]) -> tuple[LaunchCount, ...]:
    """Count launches and device activities per group; all kernels form one group where groups do not match."""
    if any(row.name.startswith(("cudaGraphLaunch", "hipGraphLaunch")) for row in table.rows):
        return ()
    cpu = {row.name: row.calls or 0 for row in table.rows if row.self_cpu_ns is not None}
    ran: Counter[str] = Counter()
    for row in rows:
        ran[launch_group(row)] += row.calls
    counts = {group: _launch_count(group, names, cpu, ran[group]) for group, names in _LAUNCHES.items()}
    by_group = {group: count for group, count in counts.items() if count is not None}
    kernel_counts = [count for group, count in by_group.items() if group not in _COPIES]
    kernels = sum(calls for group, calls in ran.items() if group not in _COPIES)
    launches = sorted(name for group, names in _LAUNCHES.items() if group not in _COPIES for name in names)
    together = _launch_count("all", launches, cpu, kernels)
    if together is None:
        return tuple(by_group.values())
    sums = sum(c.ran for c in kernel_counts), sum(c.launched for c in kernel_counts)
    explained = sums == (together.ran, together.launched)
    # Newer libraries launch some of their kernels by another call; then only the sums can be compared.
    if explained and all(abs(count.ratio / together.ratio - 1) < 0.1 for count in kernel_counts):
        return tuple(by_group.values())
    return (together, *(count for group, count in by_group.items() if group in _COPIES))


def _launch_count(group: str, names: Iterable[str], cpu: dict[str, int], ran: int) -> LaunchCount | None:
    """Count one group by the names of its launch calls; None where nothing was launched or nothing ran."""
    present = [name for name in names if name in cpu]
    launched = sum(cpu[name] for name in present)
    return LaunchCount(group, " and ".join(present), launched, ran) if launched and ran else None


def _flash_counts(
    table: KernelTable, rows: Iterable[CountedRow], cpu: int, counts: tuple[LaunchCount, ...]
) -> tuple[FlashCount, ...]:
    """Count the attention calls of both passes; empty unless one number of calls per iteration fits both.

    Ring attention calls the forward and the backward pass equally often.
    """
    calls: dict[str, Counter[str]] = {"flash_fwd": Counter(), "flash_bwd": Counter()}
    for row in rows:
        if row.kind in calls:
            calls[row.kind][re.split(r"[<(]", row.row.name, maxsplit=1)[0]] += row.calls
    forward = calls["flash_fwd"].total()
    # The backward pass has helper kernels; its main kernel comes first in a table sorted by time.
    backward = next(iter(calls["flash_bwd"].values()), 0)
    if not forward or not backward:
        return ()
    low, high = cpu * min(c.ratio for c in counts), cpu * max(c.ratio for c in counts)

    def outside(per_iteration: int) -> float:
        values = (forward / per_iteration, backward / per_iteration)
        return sum(max(low - value, 0.0) + max(value - high, 0.0) for value in values)

    fewest, most = max(1, math.floor(forward / high) - 2), math.ceil(backward / low) + 2
    # With more forward calls than backward calls, rows are missing; with far fewer, the calls are no ring's.
    if not fewest <= most <= fewest + _MAX_GUESSES:
        return ()
    best = min(range(fewest, most + 1), key=lambda n: (outside(n), n != table.world_size))
    if outside(best) > 0.05 * cpu:
        return ()
    return FlashCount("flash_fwd", forward, best), FlashCount("flash_bwd", backward, best)
