"""Which rows of a printed kernel table are device kernels, and which only repeat the time of kernels.

A table mixes operators, CPU calls, annotations and kernels. A kernel has device time and no CPU time; so has the
device side of an annotation. Names tell most of them apart, a CPU row of the same name more, and the footer,
which adds up kernels only, the rest.
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
"""Names are classified by this much of them: torch's own are shorter, and rules search them."""

_ANNOTATION = re.compile(
    r"ProfilerStep|(?:nccl|gloo|mpi|ucc|hccl):|ringprof::|autograd::|Optimizer\.|DistributedDataParallel\.|##"
    r"|enumerate\(DataLoader|FullyShardedDataParallel|FSDP::|Torch-Compiled Region|record_param_comms|detach$"
)
_OPERATOR = re.compile(r"[A-Za-z_]\w*::\w+(?:\.\w+)?")
_MOST_DOUBTFUL = 10
_COMMON_WORDS = set(COMPUTE) - {*ATTENTION, "merge", "gemm"}


Reason = Literal["operator", "annotation", "same_name_on_cpu", "footer"]
"""Why a row with device time is not counted; ``footer``: without it the rows add up to the footer's total."""


@dataclass(frozen=True, slots=True)
class LeftOutRow:
    """A row with device time that is not counted, and why."""

    row: TableRow
    reason: Reason


@dataclass(frozen=True, slots=True)
class CountedRow:
    """A row whose time counts."""

    row: TableRow
    kind: str
    time_ns: int

    @property
    def calls(self) -> int:
        """Zero where the table does not count them."""
        return self.row.calls or 0

    @property
    def in_doubt(self) -> bool:
        """Whether a name without CPU time could be an annotation: free text that no compiler wrote, and that no rule
        knows but those for common words."""
        if any(mark in self.row.name for mark in "(<"):
            return False
        rule = rule_for(self.row.name)
        return self.kind in _COMMON_WORDS or (rule is not None and rule.loose)

    @property
    def generic(self) -> bool:
        """Whether its name was cut where all kernels of a template library are still called the same."""
        return self.kind == "other" and self.row.cut and ("cutlass" in self.row.name or "flash" in self.row.name)


@dataclass(frozen=True)
class CountedRows:
    """The rows whose times add up to what the device did."""

    rows: tuple[CountedRow, ...]
    left_out: tuple[LeftOutRow, ...]
    basis: Literal["kernels", "operators", "cpu"]
    """``operators`` where a table has no kernel rows (torch before 1.8); ``cpu`` without a device."""


@lru_cache(maxsize=4096)
def kind_of_row(name: str) -> str:
    """The kind of a kernel, copy or operator by the name in a table, of which the end may be missing."""
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
    if cut and (kind := _completed_kind(stem)):
        return kind
    rule = rule_for(stem)
    return rule.kind if rule else "other"


# Words of kernel names that a narrow column cuts before the rules can tell their kind.
_COLLECTIVES = ("SendRecv", "AllGather", "ReduceScatter", "AllReduce", "Broadcast")
_WORDS = (
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
_LEAST_OF_WORD = 8
_LAST_WORD = re.compile(r"\w{1,80}$")


def _completed_kind(stem: str) -> str | None:
    """The kind of a name that was cut inside a known word, where every word it can be is of one kind."""
    match = _LAST_WORD.search(stem[-80:])
    if match is None or len(match[0]) < _LEAST_OF_WORD:
        return None
    kinds = {rule.kind for full in _WORDS if full.startswith(match[0]) and (rule := rule_for(full))}
    return kinds.pop() if len(kinds) == 1 else None


def counted_rows(table: KernelTable) -> CountedRows:
    """The rows whose times add up to what the device did; the rest with device time is listed with the reason."""
    if table.device is None:
        return CountedRows(tuple(_counted(row, row.self_cpu_ns) for row in table.rows if row.self_cpu_ns), (), "cpu")
    timed = [row for row in table.rows if (row.self_device_ns or 0) > 0]
    launchers = [row for row in timed if row.on_cpu]
    if launchers and len(launchers) == len(timed):
        return CountedRows(tuple(_counted(row, row.self_device_ns) for row in launchers), (), "operators")
    launched: dict[str, list[int | None]] = {}
    for row in table.rows:
        if row.on_cpu:
            launched.setdefault(row.name, []).append(row.self_device_ns)
    rows: list[CountedRow] = []
    left_out = [LeftOutRow(row, "operator") for row in launchers]
    for one in (_counted(row, row.self_device_ns) for row in timed if not row.on_cpu):
        reason = _reason_to_leave_out(one, launched.get(one.row.name, []))
        if reason is None:
            rows.append(one)
        else:
            left_out.append(LeftOutRow(one.row, reason))
    beyond_footer = _too_much_for_footer(rows, table)
    left_out += [LeftOutRow(one.row, "footer") for one in beyond_footer]
    left_out.sort(key=lambda out: out.row.line)
    counted = _told_by_operators([one for one in rows if one not in beyond_footer], launchers)
    return CountedRows(tuple(counted), tuple(left_out), "kernels")


def _counted(row: TableRow, time_ns: int | None) -> CountedRow:
    return CountedRow(row, kind_of_row(row.name), time_ns or 0)


def _reason_to_leave_out(one: CountedRow, launched: list[int | None]) -> Reason | None:
    """``launched``: device times of the CPU rows of the same name."""
    row = one.row
    if _ANNOTATION.match(row.name):
        return "annotation"
    if not row.cut and _OPERATOR.fullmatch(row.name):
        return "operator"
    # The CPU row of an operator that launches a kernel of its own name carries that kernel's time; the CPU row of
    # an annotation carries none, or that of the kernels inside it, which its span on the device exceeds.
    return "same_name_on_cpu" if launched and one.in_doubt and row.self_device_ns not in launched else None


def slack_ns(rows: Iterable[CountedRow], table: KernelTable) -> int:
    """How far the sum of printed times can be from the printed total by rounding alone."""
    return (sum(one.row.step_ns for one in rows) + table.total_step_ns) // 2 + 1


def _too_much_for_footer(rows: Sequence[CountedRow], table: KernelTable) -> tuple[CountedRow, ...]:
    """The fewest doubtful rows without which the rest adds up to the footer; none where no choice does."""
    if table.self_device_total_ns is None:
        return ()
    slack = slack_ns(rows, table)
    excess = sum(one.time_ns for one in rows) - table.self_device_total_ns
    if excess <= slack:
        return ()
    return _adding_up_to(excess, slack, [one for one in rows if one.in_doubt])


def _adding_up_to(time_ns: int, slack: int, rows: Sequence[CountedRow]) -> tuple[CountedRow, ...]:
    """The fewest rows that add up to a time within rounding; none where no choice does, or more than one."""
    some = rows[:_MOST_DOUBTFUL]
    for count in range(1, len(some) + 1):
        tried = combinations(some, count)
        fitting = [chosen for chosen in tried if abs(sum(one.time_ns for one in chosen) - time_ns) <= slack]
        if fitting:
            return fitting[0] if len(fitting) == 1 else ()
    return ()


# --- kinds by operator ------------------------------------------------------------------------------

_GEMM_OPERATOR = re.compile(r"aten::(?:_scaled_|_grouped_|_scaled_grouped_)?(?:mm|bmm|addmm|baddbmm|addbmm)")


def _told_by_operators(rows: list[CountedRow], launchers: Sequence[TableRow]) -> list[CountedRow]:
    """Names that were cut too early told by the operators: the device time of one is that of the kernels it launched.

    Of attention and matrix products, where the kernels that are known make less than the operators' time and just one
    choice of cut names makes the rest, called as often or a whole number of times as often.
    """
    for kind in ("flash_fwd", "flash_bwd", "gemm"):
        operators = [row for row in launchers if _kind_of_operator(row.name) == kind]
        known = [one for one in rows if one.kind == kind]
        calls = sum(row.calls or 0 for row in operators)
        missing = sum(row.self_device_ns or 0 for row in operators) - sum(one.time_ns for one in known)
        cut = [one for one in rows if one.generic and calls and one.calls % calls == 0]
        slack = sum(row.step_ns for row in (*operators, *(one.row for one in (*known, *cut)))) // 2 + 1
        if missing > slack:
            told = _adding_up_to(missing, slack, cut)
            rows = [replace(one, kind=kind) if one in told else one for one in rows]
    return rows


def _kind_of_operator(name: str) -> str | None:
    return "gemm" if _GEMM_OPERATOR.fullmatch(name) else kind_of_attention_operator(name)
