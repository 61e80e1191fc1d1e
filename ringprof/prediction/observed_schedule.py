"""Match each scheduled operation to its measured start and end in a recorded run's traces.

Blocks and transfers are found by the annotations of ringprof's strategies, which occur in the schedule's order.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.rank import Rank
from ringprof.analysis.transfers.hops import Split
from ringprof.dryrun.schedule import AttentionOp, CommStart, MemoryOp, Program, Schedule
from ringprof.errors import InputError
from ringprof.prediction.simulator import RINGS

_BLOCK = re.compile(r"ringprof::(?:fwd|bwd)/step=[0-9]+/block")
_SEND = re.compile(r"ringprof::send/.+")
_TRANSFER_KINDS = ("send_recv", "copy_engine", "all_to_all", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class ObservedBlock:
    """Measured times of an attention call with its helper kernels."""

    start_ns: int
    end_ns: int
    main_ns: int
    """Start of the longest kernel of the call."""


@dataclass(frozen=True)
class ObservedTransfer:
    """Measured times of a transfer's kernel, or of its copies together."""

    comm_op: CommStart
    """The operation with the messages in the trace; other versions of a strategy may have split them differently."""
    start_ns: int
    end_ns: int
    wire_ns: int | None
    """Nanoseconds from the arrival of the last participating rank; None if the ranks' clocks are not aligned."""


@dataclass(frozen=True)
class ObservedRank:
    """One rank's profiled iteration; times count from its first activity."""

    program: Program
    blocks: dict[int, ObservedBlock]
    """Attention blocks by the index of their operation in the program; `transfers` and `memory_op_ns` have the same
    keys."""
    transfers: dict[int, ObservedTransfer]
    memory_op_ns: dict[int, int]
    """Nanoseconds per memory operation; empty if the traces have a different number of such kernels."""
    memory_total_ns: int
    """Total nanoseconds of all kernels between blocks."""
    wall_ns: int

    def beside_ns(self, op_index: int, transfer_index: int) -> int:
        """Return how long a transfer's kernel ran concurrently with a block."""
        block, transfer = self.blocks[op_index], self.transfers[transfer_index]
        return max(0, min(block.end_ns, transfer.end_ns) - max(block.start_ns, transfer.start_ns))

    @property
    def utilisation(self) -> float:
        """Fraction of the iteration in which the rank computed attention."""
        return sum(block.end_ns - block.start_ns for block in self.blocks.values()) / self.wall_ns


def observe(attribution: Attribution, schedule: Schedule) -> list[ObservedRank]:
    """Match every rank of a run with its program.

    Raises `InputError` if the traces hold other blocks or transfers than the schedule, for example of another version.
    """
    programs = {program.rank: program for program in schedule.programs}
    return [_rank(rank, programs[rank.rank]) for rank in attribution.ranks if rank.rank in programs]


def _rank(rank: Rank, program: Program) -> ObservedRank:
    """Match one rank's activities with its program."""
    classified, rows = rank.classified, rank.window.iterations[0]
    activities = classified.trace.activities
    launch = classified.launch[rows]
    spans = _spans(rank, _BLOCK)
    op_indices = [op_index for op_index, op in enumerate(program.ops) if isinstance(op, AttentionOp)]
    if len(spans) != len(op_indices):
        raise InputError(
            f"{rank.path}: {len(spans)} attention blocks, where the strategy of this version has {len(op_indices)}"
        )
    launched = classified.trace.launches.start_ns[np.maximum(launch, 0)]
    span_index = np.searchsorted([start for start, _ in spans], launched, side="right") - 1
    in_attention = (launch >= 0) & (span_index >= 0)
    in_attention[in_attention] = launched[in_attention] < np.array([end for _, end in spans])[span_index[in_attention]]
    is_transfer, is_flash = classified.of(*_TRANSFER_KINDS)[rows], classified.of("flash_fwd", "flash_bwd")[rows]
    origin = int(activities.start_ns[rows].min())
    blocks = {}
    for number, op_index in enumerate(op_indices):
        kernels = rows[in_attention & (span_index == number) & is_flash]
        begin, end = activities.start_ns[kernels], activities.end_ns[kernels]
        main = int(begin[np.argmax(end - begin)])
        blocks[op_index] = ObservedBlock(int(begin.min()) - origin, int(end.max()) - origin, main - origin)
    other_kernels = rows[~in_attention & ~is_transfer & ~classified.of("all_reduce")[rows]]
    other_kernels = other_kernels[np.argsort(classified.launch[other_kernels], kind="stable")]
    durations = (activities.end_ns[other_kernels] - activities.start_ns[other_kernels]).tolist()
    memory_indices = [op_index for op_index, op in enumerate(program.ops) if isinstance(op, MemoryOp)]
    return ObservedRank(
        program=program,
        blocks=blocks,
        transfers=_transfers(rank, program, origin),
        memory_op_ns=dict(zip(memory_indices, durations, strict=True)) if len(memory_indices) == len(durations) else {},
        memory_total_ns=sum(durations),
        wall_ns=int(activities.end_ns[rows].max()) - origin,
    )


def _spans(rank: Rank, name: re.Pattern[str]) -> list[tuple[int, int]]:
    """Return (start, end) of the host's annotations with a matching name in the first profiled iteration, by start."""
    trace, window = rank.classified.trace, rank.window
    annotations = trace.annotations
    matching = np.flatnonzero(trace.names_that(name.fullmatch)[annotations.name])
    first, last = window.span_ns[0] if window.span_ns else (0, annotations.end_ns.max(initial=0))
    spans = sorted(zip(annotations.start_ns[matching].tolist(), annotations.end_ns[matching].tolist(), strict=True))
    return [(start, end) for start, end in spans if first <= start <= last]


def _transfers(rank: Rank, program: Program, origin: int) -> dict[int, ObservedTransfer]:
    """Match the transfers of a rank with the communication operations of its program."""
    comm_ops = [(op_index, op) for op_index, op in enumerate(program.ops) if isinstance(op, CommStart)]
    spans = _spans(rank, _SEND)
    if len(spans) != len(comm_ops):
        raise InputError(f"{rank.path}: {len(spans)} transfers, where the strategy of this version has {len(comm_ops)}")
    launches, launch = rank.classified.trace.launches.start_ns, rank.classified.launch
    splits: list[list[Split]] = [[] for _ in comm_ops]
    starts = [start for start, _ in spans]
    for split in rank.splits:
        index = int(launch[split.transfer.activity])
        position = bisect_right(starts, int(launches[index])) - 1 if index >= 0 else -1
        if split.transfer.kind in _TRANSFER_KINDS and position >= 0 and launches[index] < spans[position][1]:
            splits[position].append(split)
    if not all(splits):
        raise InputError(f"{rank.path}: a transfer was posted of which the trace shows nothing")
    return {
        op_index: _merge_splits(op, op_splits, origin)
        for (op_index, op), op_splits in zip(comm_ops, splits, strict=True)
    }


def _merge_splits(comm_op: CommStart, splits: Sequence[Split], origin: int) -> ObservedTransfer:
    """Merge a transfer's kernels or copies into one observed transfer."""
    wire_times = [split.wire_ns for split in splits]
    sent_bytes = [split.transfer.sent_bytes for split in splits]
    if comm_op.operation == "send_recv":
        sent_bytes = [message.size_bytes for split in splits for message in split.transfer.sends]
    if comm_op.operation in RINGS and sent_bytes and None not in sent_bytes:
        comm_op = msgspec.structs.replace(comm_op, messages=tuple(size for size in sent_bytes if size))
    return ObservedTransfer(
        comm_op,
        min(split.transfer.start_ns for split in splits) - origin,
        max(split.transfer.end_ns for split in splits) - origin,
        None if None in wire_times else sum(wire for wire in wire_times if wire is not None),
    )


def memory_op_bytes(program: Program) -> int:
    """Return the bytes that the kernels between blocks move."""
    return sum(op.bytes for op in program.ops if isinstance(op, MemoryOp))
