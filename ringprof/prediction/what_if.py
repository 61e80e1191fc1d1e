"""What a recorded run would have taken, had something been different.

First the run is replayed: its own blocks, as long as each took without the hops beside it, its own hops at the rates
that they had on the wire, in the order in which they began. How far the replay is from the run says how far to trust
what follows. Then one thing is changed and the rest replayed.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ringprof.errors import UsageError
from ringprof.json_object import JsonObject
from ringprof.prediction.calibration import Calibration
from ringprof.prediction.fit import Observed, lost_ns
from ringprof.prediction.network import Cluster, Links
from ringprof.prediction.observed_schedule import touch_bytes
from ringprof.prediction.query import is_older
from ringprof.prediction.simulator import BlockTime, Transfer, simulate
from ringprof.record.dryrun.schedule import AttentionOp, CommStart, MemoryOp, Program

_SCHEMA = "ringprof.what-if/1"
_LINKS = ("same_host", "other_host")


@dataclass(frozen=True)
class Changes:
    """What is to be different; everything at its default is the run as it was."""

    links: Mapping[str, float] = field(default_factory=dict)
    """``same_host`` or ``other_host`` -> how many times as fast."""
    slow: Mapping[int, float] = field(default_factory=dict)
    """Rank -> how many times as long its blocks take."""
    kernel_speed: float = 1.0
    hops: str | None = None
    """``copy``: hops inside hosts by copy engines; ``nccl``: by NCCL's kernels."""
    hosts_of: int | None = None
    """So many neighbouring ranks to a host; hops that then cross go at the machine's rate between hosts."""
    kv_heads: int | None = None
    """Keys and values of so many heads; blocks take as long as before."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """The strategy's own, such as its placement."""

    @property
    def other_program(self) -> bool:
        """Whether ranks do something else than they did, not only at another speed."""
        return bool(self.hops or self.hosts_of or self.kv_heads or self.params)


@dataclass(frozen=True)
class WhatIf:
    """Times of the slowest rank, in nanoseconds."""

    recorded_ns: int
    """Of the profiled iteration."""
    replayed_ns: float
    changed_ns: float
    balanced_ns: float
    """With nothing to wait for: the mean over ranks of what they compute."""

    @property
    def replay_error(self) -> float:
        return self.replayed_ns / self.recorded_ns - 1

    @property
    def gain(self) -> float:
        """How much shorter the changed run is than the replay; below 0 it is longer."""
        return 1 - self.changed_ns / self.replayed_ns

    def as_dict(self) -> JsonObject:
        """Schema ``ringprof.what-if/1``."""
        return {
            "schema": _SCHEMA, "predicted": True, "recorded_ms": self.recorded_ns / 1e6,
            "replayed_ms": round(self.replayed_ns / 1e6, 4), "replay_error": round(self.replay_error, 5),
            "changed_ms": round(self.changed_ns / 1e6, 4), "change": round(-self.gain, 5),
        }  # fmt: skip


def what_if(observed: Observed, machine: Calibration, changes: Changes) -> WhatIf:
    """Replay a run, and replay it changed. Raises `UsageError` for a change that does not apply to it."""
    _refuse(observed, machine, changes)
    recorded = max(rank.wall_ns for rank in observed.ranks)
    ends = []
    for changed in (Changes(), changes):
        programs = _programs(observed, changed)
        ends.append(max(one.end_ns for one in simulate(programs, _Replay(observed, machine, changed, programs))))
    busy = [sum(b.end_ns - b.start_ns for b in rank.blocks.values()) for rank in observed.ranks]
    return WhatIf(recorded, ends[0], ends[1], sum(busy) / len(busy))


def _refuse(observed: Observed, machine: Calibration, changes: Changes) -> None:
    for name in changes.links:
        if name not in _LINKS:
            raise UsageError(f"--link {name}: write same_host or other_host")
    if "other_host" in changes.links and (changes.hosts_of or observed.links.cluster.hosts) == 1:
        raise UsageError("--link other_host: the run has one host")
    known = {rank.program.rank for rank in observed.ranks}
    for rank in changes.slow:
        if rank not in known:
            raise UsageError(f"--slow {rank}: the run has no such rank with a trace")
    if changes.hops == "copy" and machine.same_host.copy_gb_s is None:
        raise UsageError(f"--hops copy: machine {machine.name!r} has no rate of copied hops")
    if changes.hosts_of is not None and machine.other_host.total_gb_s.origin == "assumed":
        raise UsageError(f"--ranks-per-host: machine {machine.name!r} does not say how hosts are joined")


def _programs(observed: Observed, changes: Changes) -> list[Program]:
    """What the ranks do. Raises `UsageError` where that is other blocks than were recorded."""
    before = [rank.program for rank in observed.ranks]
    if not changes.other_program:
        return before
    from ringprof.prediction.schedules import schedule

    run = observed.run
    assert run.strategy and run.workload and run.kernel
    workload = msgspec.structs.replace(run.workload, kv_heads=changes.kv_heads or run.workload.kv_heads)
    changed = schedule(
        run.strategy.name, workload, run.topology.world_size, kernel=run.kernel,
        ranks_per_host=changes.hosts_of or run.topology.ranks_per_host, hops=changes.hops or run.strategy.hops,
        params={**run.strategy.params, **changes.params}, ranks=[program.rank for program in before],
        older=is_older(run),
    )  # fmt: skip
    for one, other in zip(before, changed.programs, strict=True):
        if [_shape(block) for block in _blocks(one)] != [_shape(block) for block in _blocks(other)]:
            raise UsageError("so changed, ranks compute other blocks than were recorded: ask `ringprof predict`")
    return changed.programs


def _blocks(program: Program) -> list[AttentionOp]:
    return [op for op in program.ops if isinstance(op, AttentionOp)]


def _shape(block: AttentionOp) -> tuple[Any, ...]:
    return block.phase, block.q, block.kv, block.heads, block.causal


class _Replay:
    """A machine on which everything takes as long as it was seen to take."""

    def __init__(self, observed: Observed, machine: Calibration, changes: Changes, programs: Sequence[Program]) -> None:
        """``programs`` has the blocks of ``observed``, in their order."""
        self._observed, self._machine, self._changes = observed, machine, changes
        self._ranks = {rank.program.rank: rank for rank in observed.ranks}
        cluster = observed.links.cluster
        if changes.hosts_of:
            cluster = Cluster(hosts=cluster.size // changes.hosts_of, gpus_per_host=changes.hosts_of)
        self._links = Links(machine, cluster)
        self.handover_ns = machine.handover_us.value * 1e3
        self._kernel = machine.kernel(observed.run.kernel or "")
        self._memory = {
            number: touch_bytes(rank.program) / max(rank.touches_ns, 1) for number, rank in self._ranks.items()
        }
        self._seen = {
            (rank.program.rank, transfer.post.id): transfer
            for rank in observed.ranks for transfer in rank.transfers.values()
        }  # fmt: skip
        self._programs = {program.rank: program for program in programs}
        self._places = {
            program.rank: dict(zip(_places(program), self._ranks[program.rank].blocks, strict=True))
            for program in programs
        }

    def block(self, rank: int, place: int, block: AttentionOp) -> BlockTime:
        before = self._places[rank][place]
        seen = self._ranks[rank].blocks[before]
        lost = self._machine.contention.value * lost_ns(self._observed, self._ranks[rank], before)
        total = seen.end_ns - seen.start_ns - lost
        total *= self._changes.slow.get(rank, 1.0) / self._changes.kernel_speed
        lead = self._kernel.lead.value * total if block.phase == "backward" else 0.0
        return BlockTime(total, lead, self._kernel.tail.value * total, self._kernel.fills_device)

    def touch(self, rank: int, place: int, touch: MemoryOp) -> float:
        return touch.bytes / self._memory[rank]

    def host(self, program: Program) -> list[float]:
        return [0.0] * len(program.ops)

    def leg(self, post: CommStart, sender: int, receiver: int) -> Transfer:
        size, same = sum(post.messages), self._links.cluster.host(sender) == self._links.cluster.host(receiver)
        faster = self._changes.links.get("same_host" if same else "other_host", 1.0)
        rates = [
            rate
            for rank in (sender, receiver)
            if not (same and self._trades_across(rank, post)) and (rate := self._seen_rate(rank, post))
        ]
        if rates and self._crosses_as_before(sender, receiver):
            return Transfer(size, max(rates) * faster, 0.0, ())
        leg = self._links.leg(post, sender, receiver)
        return Transfer(size, leg.cap * faster, leg.latency_ns, leg.links)

    def _seen_rate(self, rank: int, post: CommStart) -> float | None:
        """Bytes a nanosecond that the transfer had on the wire; None where it was carried otherwise, or not seen."""
        transfer = self._seen.get((rank, post.id))
        if transfer is None or not transfer.wire_ns:
            return None
        before = transfer.post
        same = (before.operation, before.members) == (post.operation, post.members)
        return sum(before.messages) / transfer.wire_ns if same else None

    def _trades_across(self, rank: int, post: CommStart) -> bool:
        """Whether its kernel, which ends with both directions, also served a slower link: then it tells of that."""
        place, size = post.members.index(rank), len(post.members)
        beside = (post.members[place - 1], rank, post.members[(place + 1) % size])
        return self._observed.links.cluster.hosts_of(beside) > 1

    def _crosses_as_before(self, *ranks: int) -> bool:
        before, now = self._observed.links.cluster, self._links.cluster
        return (before.hosts_of(ranks) > 1) == (now.hosts_of(ranks) > 1)

    def collective(self, post: CommStart) -> float:
        crosses = self._links.cluster.hosts_of(post.members) > 1
        faster = self._changes.links.get("other_host" if crosses else "same_host", 1.0)
        rates = [rate for rank in post.members if (rate := self._seen_rate(rank, post))]
        if rates and self._crosses_as_before(*post.members):
            return sum(post.messages) / max(rates) / faster
        return self._links.collective(post) / faster

    def share(self, post: CommStart) -> float:
        return self._links.share(post)

    def capacity(self, link: Hashable) -> float:
        return self._links.capacity(link) * max(self._changes.links.values(), default=1.0)

    def hop_is_first(self, rank: int, place: int) -> bool:
        """As it was: whether the hop began before the middle of the block after its post."""
        later = [before for now, before in self._places[rank].items() if now > place]
        transfer = self._seen.get((rank, self._number(rank, place)))
        if not later or transfer is None:
            return True
        block = self._ranks[rank].blocks[min(later)]
        return transfer.start_ns < (block.start_ns + block.end_ns) / 2

    def _number(self, rank: int, place: int) -> int:
        post = self._programs[rank].ops[place]
        assert isinstance(post, CommStart)
        return post.id


def _places(program: Program) -> list[int]:
    return [place for place, op in enumerate(program.ops) if isinstance(op, AttentionOp)]
