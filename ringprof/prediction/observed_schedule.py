"""What a recorded run's traces say of each operation of its tape: blocks, transfers, and what ran between.

Blocks and transfers are found by the ranges that ringprof's strategies name, which the tape has in the same order.
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
from ringprof.errors import InputError
from ringprof.prediction.simulator import RINGS
from ringprof.record.dryrun.schedule import AttentionOp, CommStart, MemoryOp, Program, Schedule

_BLOCK = re.compile(r"ringprof::(?:fwd|bwd)/step=[0-9]+/block")
_SEND = re.compile(r"ringprof::send/.+")
_CARRIED = ("send_recv", "copy_engine", "all_to_all", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class ObservedBlock:
    """An attention call with its helpers."""

    start_ns: int
    end_ns: int
    main_ns: int
    """Start of its longest kernel."""


@dataclass(frozen=True)
class ObservedTransfer:
    """A transfer's kernel, or its copies one after the other."""

    post: CommStart
    """With the messages that were seen, which other versions of a strategy may have cut otherwise."""
    start_ns: int
    end_ns: int
    wire_ns: int | None
    """From the arrival of the last rank that it depends on; None where ranks' clocks do not tell."""


@dataclass(frozen=True)
class ObservedRank:
    """One rank's profiled iteration; times count from its first activity."""

    program: Program
    blocks: dict[int, ObservedBlock]
    """By place in the program, as the others."""
    transfers: dict[int, ObservedTransfer]
    touches: dict[int, int]
    """Nanoseconds of the kernels between blocks; empty where the traces have others than the tape."""
    touches_ns: int
    """All their time."""
    wall_ns: int

    def beside_ns(self, place: int, transfer: int) -> int:
        """How long a transfer's kernel ran beside a block."""
        block, other = self.blocks[place], self.transfers[transfer]
        return max(0, min(block.end_ns, other.end_ns) - max(block.start_ns, other.start_ns))

    @property
    def duty(self) -> float:
        """The part of the time in which it computed."""
        return sum(block.end_ns - block.start_ns for block in self.blocks.values()) / self.wall_ns


def observe(attribution: Attribution, schedule: Schedule) -> list[ObservedRank]:
    """Every rank of a run, against its tape.

    Raises `InputError` where the traces hold other blocks or transfers than the tape: another version's strategy, say.
    """
    programs = {program.rank: program for program in schedule.programs}
    return [_rank(rank, programs[rank.rank]) for rank in attribution.ranks if rank.rank in programs]


def _rank(rank: Rank, program: Program) -> ObservedRank:
    classified, rows = rank.classified, rank.window.iterations[0]
    activities = classified.trace.activities
    launch = classified.launch[rows]
    spans = _spans(rank, _BLOCK)
    places = [place for place, op in enumerate(program.ops) if isinstance(op, AttentionOp)]
    if len(spans) != len(places):
        raise InputError(
            f"{rank.path}: {len(spans)} attention blocks, where the strategy of this version has {len(places)}"
        )
    launched = classified.trace.launches.start_ns[np.maximum(launch, 0)]
    found = np.searchsorted([start for start, _ in spans], launched, side="right") - 1
    inside = (launch >= 0) & (found >= 0)
    inside[inside] = launched[inside] < np.array([end for _, end in spans])[found[inside]]
    carried, flash = classified.of(*_CARRIED)[rows], classified.of("flash_fwd", "flash_bwd")[rows]
    origin = int(activities.start_ns[rows].min())
    blocks = {}
    for number, place in enumerate(places):
        mine = rows[inside & (found == number) & flash]
        begin, end = activities.start_ns[mine], activities.end_ns[mine]
        main = int(begin[np.argmax(end - begin)])
        blocks[place] = ObservedBlock(int(begin.min()) - origin, int(end.max()) - origin, main - origin)
    others = rows[~inside & ~carried & ~classified.of("all_reduce")[rows]]
    others = others[np.argsort(classified.launch[others], kind="stable")]
    took = (activities.end_ns[others] - activities.start_ns[others]).tolist()
    touches = [place for place, op in enumerate(program.ops) if isinstance(op, MemoryOp)]
    return ObservedRank(
        program=program,
        blocks=blocks,
        transfers=_transfers(rank, program, origin),
        touches=dict(zip(touches, took, strict=True)) if len(touches) == len(took) else {},
        touches_ns=sum(took),
        wall_ns=int(activities.end_ns[rows].max()) - origin,
    )


def _spans(rank: Rank, name: re.Pattern[str]) -> list[tuple[int, int]]:
    """The ranges of such a name on the host in the first profiled iteration, by start."""
    trace, window = rank.classified.trace, rank.window
    marks = trace.annotations
    chosen = np.flatnonzero(trace.names_that(name.fullmatch)[marks.name])
    first, last = window.span_ns[0] if window.span_ns else (0, marks.end_ns.max(initial=0))
    spans = sorted(zip(marks.start_ns[chosen].tolist(), marks.end_ns[chosen].tolist(), strict=True))
    return [(start, end) for start, end in spans if first <= start <= last]


def _transfers(rank: Rank, program: Program, origin: int) -> dict[int, ObservedTransfer]:
    posts = [(place, op) for place, op in enumerate(program.ops) if isinstance(op, CommStart)]
    spans = _spans(rank, _SEND)
    if len(spans) != len(posts):
        raise InputError(f"{rank.path}: {len(spans)} transfers, where the strategy of this version has {len(posts)}")
    launches, launch = rank.classified.trace.launches.start_ns, rank.classified.launch
    parts: list[list[Split]] = [[] for _ in posts]
    starts = [start for start, _ in spans]
    for split in rank.splits:
        index = int(launch[split.transfer.activity])
        at = bisect_right(starts, int(launches[index])) - 1 if index >= 0 else -1
        if split.transfer.kind in _CARRIED and at >= 0 and launches[index] < spans[at][1]:
            parts[at].append(split)
    if not all(parts):
        raise InputError(f"{rank.path}: a transfer was posted of which the trace shows nothing")
    return {place: _joined(op, part, origin) for (place, op), part in zip(posts, parts, strict=True)}


def _joined(post: CommStart, parts: Sequence[Split], origin: int) -> ObservedTransfer:
    wires = [part.wire_ns for part in parts]
    sent = [part.transfer.sent_bytes for part in parts]
    if post.operation == "send_recv":
        sent = [message.size_bytes for part in parts for message in part.transfer.sends]
    if post.operation in RINGS and sent and None not in sent:
        post = msgspec.structs.replace(post, messages=tuple(size for size in sent if size))
    return ObservedTransfer(
        post,
        min(part.transfer.start_ns for part in parts) - origin,
        max(part.transfer.end_ns for part in parts) - origin,
        None if None in wires else sum(wire for wire in wires if wire is not None),
    )


def touch_bytes(program: Program) -> int:
    """Bytes that the kernels between blocks move."""
    return sum(op.bytes for op in program.ops if isinstance(op, MemoryOp))
