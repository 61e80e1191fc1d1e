"""Which rows of a printed kernel table are device kernels, and which only repeat the time of kernels.

A table mixes operators, CPU calls, annotations and kernels. A kernel has device time and no CPU time; so has the
device side of an annotation. Names tell most of them apart, a CPU row of the same name more, and the footer,
which adds up kernels only, the rest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

from ringprof.analysis.kinds.kinds import ATTENTION, COMPUTE
from ringprof.analysis.kinds.operators import (
    kind_enclosing,
    kind_of_attention_operator,
    kind_of_collective,
    kind_of_its_kernel,
)
from ringprof.analysis.kinds.rules import rule_for
from ringprof.kernel_tables.rows import KernelTable, TableRow

_LONGEST_NAME = 1024
"""Names are classified by this much of them: torch's own are shorter, and rules search them."""

_ANNOTATION = re.compile(
    r"ProfilerStep|(?:nccl|gloo|mpi|ucc|hccl):|ringprof::|autograd::|Optimizer\.|DistributedDataParallel\.|##"
    r"|enumerate\(DataLoader|FullyShardedDataParallel|FSDP::|Torch-Compiled Region|record_param_comms|detach$"
)
_OPERATOR = re.compile(r"[A-Za-z_]\w*::\w+(?:\.\w+)?")
_MOST_DOUBTFUL = 10
_COMMON_WORDS = set(COMPUTE) - {*ATTENTION, "merge", "gemm"}


@dataclass(frozen=True)
class LeftOut:
    """A row with device time that is not counted, and why."""

    row: TableRow
    reason: str
    """``operator``, ``annotation``, ``same_name_on_cpu`` or ``footer``."""


@dataclass(frozen=True)
class Chosen:
    """The rows that count."""

    rows: tuple[TableRow, ...]
    left_out: tuple[LeftOut, ...]
    basis: str
    """``kernels``; ``operators`` where a table has no kernel rows (torch before 1.8); ``cpu`` without a device."""

    def time_of(self, row: TableRow) -> int:
        """The time by which a row counts."""
        return (row.self_cpu_ns if self.basis == "cpu" else row.self_device_ns) or 0


@lru_cache(maxsize=4096)
def kind_of_row(name: str) -> str:
    """The kind of a kernel, copy or operator by the name in a table, of which the end may be missing."""
    stem = name.removesuffix("...")[:_LONGEST_NAME]
    bare = stem.lower().removeprefix("[cuda ").removeprefix("[")
    if bare.startswith(("memcpy", "hipmemcpy")):
        return "copy_engine" if "PtoP" in stem or "peer" in bare else "memcpy"
    if bare.startswith("memset"):
        return "memset"
    if kind := kind_of_attention_operator(stem) or kind_enclosing(stem) or kind_of_its_kernel(stem):
        return kind
    if stem.startswith(("c10d::", "nccl:")):
        return kind_of_collective(stem) or "other"
    if name.endswith("...") and (kind := _completed_kind(stem)):
        return kind
    rule = rule_for(stem)
    return rule.kind if rule else "other"


# Words of kernel names that a narrow column cuts before the rules can tell their kind.
_WORDS = (
    "flash_fwd_kernel",
    "flash_fwd_splitkv_kernel",
    "flash_bwd_dq_dk_dv_loop_kernel",
    "flash_bwd_dot_do_o_kernel",
    "flash_bwd_convert_dq_kernel",
    *(f"nccl{dev}Kernel_{op}" for dev in ("", "Dev") for op in ("SendRecv", "AllGather", "ReduceScatter")),
    *(f"nccl{dev}Kernel_{op}" for dev in ("", "Dev") for op in ("AllReduce", "Broadcast")),
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
    word = match[0] if match else ""
    if len(word) < _LEAST_OF_WORD:
        return None
    kinds = {rule.kind for full in _WORDS if full.startswith(word) and (rule := rule_for(full))}
    return kinds.pop() if len(kinds) == 1 else None


def choose_rows(table: KernelTable) -> Chosen:
    """The rows whose times add up to what the device did; the rest with device time is listed with the reason."""
    if table.device is None:
        return Chosen(tuple(row for row in table.rows if row.self_cpu_ns), (), "cpu")
    timed = [row for row in table.rows if (row.self_device_ns or 0) > 0]
    launchers = [row for row in timed if _has_cpu_time(row)]
    rows = [row for row in timed if not _has_cpu_time(row)]
    if launchers and not rows:
        return Chosen(tuple(launchers), (), "operators")
    left_out = [LeftOut(row, "operator") for row in launchers]
    for row in list(rows):
        reason = _reason_to_leave_out(row, table)
        if reason is not None:
            rows.remove(row)
            left_out.append(LeftOut(row, reason))
    for row in _too_much_for_footer(rows, table):
        rows.remove(row)
        left_out.append(LeftOut(row, "footer"))
    return Chosen(tuple(rows), tuple(sorted(left_out, key=lambda out: out.row.line)), "kernels")


def _has_cpu_time(row: TableRow) -> bool:
    return bool(row.self_cpu_ns or row.cpu_total_ns)


def _reason_to_leave_out(row: TableRow, table: KernelTable) -> str | None:
    if _ANNOTATION.match(row.name):
        return "annotation"
    if not row.cut and _OPERATOR.fullmatch(row.name):
        return "operator"
    if not _in_doubt(row):
        return None
    twins = [other for other in table.rows if other.name == row.name and _has_cpu_time(other)]
    # The CPU row of an operator that launches a kernel of its own name carries that kernel's time; the CPU row of
    # an annotation carries none, or that of the kernels inside it, which its span on the device exceeds.
    if twins and not any(twin.self_device_ns == row.self_device_ns for twin in twins):
        return "same_name_on_cpu"
    return None


def _in_doubt(row: TableRow) -> bool:
    """Whether a name without CPU time could be an annotation: free text that no compiler wrote, and that no rule
    knows but those for common words."""
    if any(mark in row.name for mark in "(<"):
        return False
    rule = rule_for(row.name)
    return kind_of_row(row.name) in _COMMON_WORDS or (rule is not None and rule.loose)


def slack_ns(rows: list[TableRow] | tuple[TableRow, ...], table: KernelTable) -> int:
    """How far the sum of printed times can be from the printed total by rounding alone."""
    return (sum(row.step_ns for row in rows) + table.total_step_ns) // 2 + 1


def _too_much_for_footer(rows: list[TableRow], table: KernelTable) -> tuple[TableRow, ...]:
    """The fewest doubtful rows without which the rest adds up to the footer; none where no choice does."""
    if table.self_device_total_ns is None:
        return ()
    slack = slack_ns(rows, table)
    excess = sum(row.self_device_ns or 0 for row in rows) - table.self_device_total_ns
    doubtful = [row for row in rows if _in_doubt(row)][:_MOST_DOUBTFUL]
    if excess <= slack:
        return ()
    for count in range(1, len(doubtful) + 1):
        fitting = [
            some
            for some in combinations(doubtful, count)
            if abs(sum(row.self_device_ns or 0 for row in some) - excess) <= slack
        ]
        if fitting:
            return fitting[0] if len(fitting) == 1 else ()
    return ()
