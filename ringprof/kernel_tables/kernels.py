"""Selection of the rows of a printed kernel table that are device kernels.

The other rows with device time repeat the time of kernels. A table mixes operators, CPU calls, annotations and
kernels. A kernel has device time and no CPU time, but so has the device side of an annotation. Most annotations are
recognised by their names, more by a CPU row of the same name, and the rest by the footer, which adds up only kernels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from typing import Literal

from ringprof.analysis.kinds.kinds import ATTENTION, COMPUTE
from ringprof.analysis.kinds.operators import (
    kind_of_attention_operator,
    kind_of_collective,
    kind_of_enclosed_kernels,
    kind_of_own_kernel,
)
from ringprof.analysis.kinds.rules import rule_for
from ringprof.kernel_tables.rows import CUT_MARKS, KernelTable, TableRow

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
class LeftOutRow:
    """A row with device time that is not counted, with the reason."""

    row: TableRow
    reason: Reason


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
    left_out: tuple[LeftOutRow, ...]
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
    left_out = [LeftOutRow(row, "operator") for row in launchers]
    for candidate in [_counted_row(row, row.self_device_ns) for row in timed if not row.on_cpu]:
        row, cpu_row_times = candidate.row, device_times_by_cpu_name.get(candidate.row.name, [])
        if _ANNOTATION.match(row.name):
            left_out.append(LeftOutRow(row, "annotation"))
        elif not row.cut and _OPERATOR.fullmatch(row.name):
            left_out.append(LeftOutRow(row, "operator"))
        # The CPU row of an operator that launches a kernel of its own name has that kernel's device time. That of an
        # annotation has no device time, or the sum of the kernels inside it, which is less than its span on the device.
        elif cpu_row_times and candidate.may_be_annotation and row.self_device_ns not in cpu_row_times:
            left_out.append(LeftOutRow(row, "same_name_on_cpu"))
        else:
            rows.append(candidate)
    beyond_footer: tuple[CountedRow, ...] = ()
    if table.self_device_total_ns is not None:
        # The fewest possible annotations without which the rest adds up to the footer.
        slack = rounding_slack_ns(rows, table)
        excess = sum(row.time_ns for row in rows) - table.self_device_total_ns
        if excess > slack:
            beyond_footer = _rows_adding_up_to(excess, slack, [row for row in rows if row.may_be_annotation])
    left_out += [LeftOutRow(candidate.row, "footer") for candidate in beyond_footer]
    left_out.sort(key=lambda out: out.row.line)
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
