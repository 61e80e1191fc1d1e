"""Predicted time of a recorded run with something changed.

First the run is replayed: its own blocks without the time lost to concurrent hops, and its own hops at their measured
rates, in their recorded order. The replay's error says how far to trust the rest. Then one thing is changed and the run
is replayed again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, quantiles
from typing import Any

import msgspec

from ringprof.common.json_object import JsonObject
from ringprof.dryrun.schedule import AttentionOp, CommStart, ComputeOp, MemoryOp, Program
from ringprof.errors import UsageError
from ringprof.prediction.calibration import Calibration
from ringprof.prediction.fit import Observed, contended_ns, memory_op_bytes
from ringprof.prediction.machine import curves_of
from ringprof.prediction.network import Cluster, Links
from ringprof.prediction.predict import time_breakdown
from ringprof.prediction.query import uses_legacy_schedule
from ringprof.prediction.simulator import BlockTime, LinkTransfer, simulate

_SCHEMA = "ringprof.what-if/1"
_LINKS = ("same_host", "other_host")
_DRAWS = 15
"""Number of machines drawn for the range of a prediction."""
HOPS_SPREAD = 0.029
"""Root mean square of the log errors for another transport of hops, over both directions of the recorded pairs that
differ in it alone. `tests/prediction/test_what_if_interval.py` computes it from the recordings."""
_Z_80 = 1.2816
"""Standard deviations from the middle of a normal distribution to the ends of its 80 % interval."""


@dataclass(frozen=True)
class Changes:
    """Differences from the recorded run; with all defaults there are none."""

    links: Mapping[str, float] = field(default_factory=dict)
    """Speedup per link class, ``same_host`` or ``other_host``."""
    slow: Mapping[int, float] = field(default_factory=dict)
    """Factor on the time of a rank's blocks, per rank."""
    kernel_speed: float = 1.0
    kernel: str | None = None
    """Attention kernel; blocks take as much more or less time as by the machine's curves of both kernels."""
    hops: str | None = None
    """Intra-node transport: ``copy`` for copy engines, ``nccl`` for NCCL kernels."""
    hosts_of: int | None = None
    """Number of neighbouring ranks per host; hops that then cross hosts use the machine's rate between hosts."""
    kv_heads: int | None = None
    """Number of heads of keys and values; blocks take as long as before."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the strategy, such as its placement."""

    @property
    def hops_alone(self) -> bool:
        """Whether only the transport of hops differs: recorded pairs show how far such a prediction is off."""
        return self.hops is not None and self == Changes(hops=self.hops)

    @property
    def changes_program(self) -> bool:
        """Whether ranks run other operations than recorded, not only at another speed."""
        return bool(self.hops or self.hosts_of or self.kv_heads or self.params)


@dataclass(frozen=True)
class WhatIf:
    """Nanoseconds of the slowest rank."""

    recorded_ns: int
    """Recorded time of the profiled iteration."""
    replayed_ns: float
    changed_ns: float
    balanced_ns: float
    """Time without any waiting: compute time averaged over the ranks."""
    range_ns: tuple[float, float]
    """`changed_ns` with the error of the replay, and with the spread of the machine's figures (see `what_if`)."""
    is_interval: bool
    """Whether the range is an 80 % interval, with the errors of recorded pairs in it (`HOPS_SPREAD`)."""
    parts_ns: Mapping[str, float]
    """Change of the slowest rank's time per part of `time_breakdown`; their sum is the whole change."""

    @property
    def replay_error(self) -> float:
        return self.replayed_ns / self.recorded_ns - 1

    @property
    def gain(self) -> float:
        """Relative reduction of the time against the replay; negative if the changed run is longer."""
        return 1 - self.changed_ns / self.replayed_ns

    def as_dict(self) -> JsonObject:
        """Return the times as a dict of schema ``ringprof.what-if/1``."""
        return {
            "schema": _SCHEMA, "predicted": True, "recorded_ms": self.recorded_ns / 1e6,
            "replayed_ms": round(self.replayed_ns / 1e6, 4), "replay_error": round(self.replay_error, 5),
            "changed_ms": round(self.changed_ns / 1e6, 4), "change": round(-self.gain, 5),
            "range_ms": [round(end_ns / 1e6, 4) for end_ns in self.range_ns],
            "is_80_percent_interval": self.is_interval,
            "parts_ms": {part: round(ns / 1e6, 4) for part, ns in self.parts_ns.items()},
        }  # fmt: skip


def what_if(observed: Observed, machine: Calibration, changes: Changes) -> WhatIf:
    """Replay a run, and replay it with changes. Raises `UsageError` for a change that does not apply to it.

    The range has two sources. The replay of the unchanged run is off by a known factor, and the changed run may be off
    by as much in either direction. What is not taken from the run comes from the machine's figures: both replays are
    repeated with `_DRAWS` machines, whose figures are drawn by their spreads, and the middle 80 % of the ratios count.
    For another kernel, the spread of both kernels' curves is added in quadrature. For another transport of hops alone,
    the errors of recorded pairs are added instead, which makes the range an 80 % interval.
    """
    _check_changes(observed, machine, changes)
    recorded = max(rank.wall_ns for rank in observed.ranks)
    variants = [(variant, _programs(observed, variant)) for variant in (Changes(), changes)]

    def replay(drawn_machine: Calibration) -> list[dict[str, float]]:
        """Return the time per part of the slowest rank of each variant."""
        return [_slowest_parts(programs, _Replay(observed, drawn_machine, variant, programs))
                for variant, programs in variants]  # fmt: skip

    before, after = replay(machine)
    replayed_ns, changed_ns = sum(before.values()), sum(after.values())
    generator = random.Random(0)
    ratios = [sum(parts[1].values()) / sum(parts[0].values())
              for parts in (replay(_drawn(machine, generator)) for _ in range(_DRAWS))]  # fmt: skip
    tenths = quantiles([*ratios, changed_ns / replayed_ns], n=10)
    error = 1 + abs(replayed_ns / recorded - 1)
    low, high = min(tenths[0], changed_ns / replayed_ns) / error, max(tenths[-1], changed_ns / replayed_ns) * error
    kernel_share = after.get("kernel", 0.0) / changed_ns
    spread = HOPS_SPREAD if changes.hops_alone else kernel_share * _kernel_spread(observed, machine, changes)
    low, high = (
        changed_ns / replayed_ns
        * math.exp(math.copysign(math.hypot(math.log(end * replayed_ns / changed_ns), _Z_80 * spread), sign))
        for end, sign in ((low, -1), (high, 1))
    )  # fmt: skip
    return WhatIf(
        recorded, replayed_ns, changed_ns,
        fmean(sum(block.end_ns - block.start_ns for block in rank.blocks.values()) for rank in observed.ranks),
        (replayed_ns * low, replayed_ns * high),
        changes.hops_alone, {part: after.get(part, 0.0) - before.get(part, 0.0) for part in before | after},
    )  # fmt: skip


def _slowest_parts(programs: Sequence[Program], replay: _Replay) -> dict[str, float]:
    """Simulate the programs and return the slowest rank's time per part."""
    timelines = simulate(programs, replay)
    slowest = max(range(len(programs)), key=lambda index: timelines[index].end_ns)
    breakdown = time_breakdown(programs[slowest], timelines[slowest], replay.cluster)
    parts = {part: breakdown.total(part) for part in (*breakdown.forward, *breakdown.backward)}
    # The host and what no operation covers.
    parts["host"] = parts.get("host", 0.0) + timelines[slowest].end_ns - sum(parts.values())
    return parts


def _kernel_spread(observed: Observed, machine: Calibration, changes: Changes) -> float:
    """Return the log standard deviation of the ratio of both kernels' curves over all blocks; 0 for the same kernel."""
    if changes.kernel in (None, observed.run.kernel):
        return 0.0
    both = [curves_of(machine, name or "") for name in (observed.run.kernel, changes.kernel)]
    blocks = [op for rank in observed.ranks for op in rank.program.ops if isinstance(op, AttentionOp)]
    estimates = [[curves.estimate(block) for curves in both] for block in blocks]
    total_ns = sum(changed.ns for _, changed in estimates)
    return sum(changed.ns * math.hypot(recorded.spread, changed.spread) for recorded, changed in estimates) / total_ns


def _drawn(machine: Calibration, generator: random.Random) -> Calibration:
    """Return the machine with each figure drawn from its spread, except the curves of kernels, which no replay uses."""

    def drawn(figures: Any) -> Any:
        if isinstance(figures, dict) and {"value", "spread"} <= figures.keys():
            return {**figures, "value": figures["value"] * math.exp(generator.gauss(0.0, figures["spread"]))}
        return {key: drawn(value) for key, value in figures.items()} if isinstance(figures, dict) else figures

    changed = msgspec.convert(drawn(msgspec.to_builtins(machine)), Calibration)
    contention = msgspec.structs.replace(changed.contention, value=min(1.0, changed.contention.value))
    return msgspec.structs.replace(changed, contention=contention)


def _check_changes(observed: Observed, machine: Calibration, changes: Changes) -> None:
    """Refuse changes that do not apply to the run. Raises `UsageError`."""
    for name in changes.links:
        if name not in _LINKS:
            raise UsageError(f"--link {name}: write intra-node or inter-node")
    if "other_host" in changes.links and (changes.hosts_of or observed.links.cluster.hosts) == 1:
        raise UsageError("--link inter-node: the run has one node")
    known_ranks = {rank.program.rank for rank in observed.ranks}
    for rank in changes.slow:
        if rank not in known_ranks:
            raise UsageError(f"--slow {rank}: the run has no such rank with a trace")
    if changes.hops == "copy" and machine.same_host.copy_gb_s is None:
        raise UsageError(f"--hops copy: machine {machine.name!r} has no rate of copied hops")
    if changes.kernel is not None:
        machine.kernel(changes.kernel)
        machine.kernel(observed.run.kernel or "")
    if changes.hosts_of is not None and machine.other_host.total_gb_s.origin == "assumed":
        raise UsageError(f"--ranks-per-node: machine {machine.name!r} does not say how nodes are joined")


def _programs(observed: Observed, changes: Changes) -> list[Program]:
    """Return the ranks' programs with the changes. Raises `UsageError` if they contain other blocks than recorded."""
    recorded = [rank.program for rank in observed.ranks]
    if not changes.changes_program:
        return recorded
    from ringprof.prediction.schedules import schedule

    run = observed.run
    assert run.strategy and run.workload and run.kernel
    workload = msgspec.structs.replace(run.workload, kv_heads=changes.kv_heads or run.workload.kv_heads)
    changed = schedule(
        run.strategy.name, workload, run.topology.world_size, kernel=run.kernel,
        ranks_per_host=changes.hosts_of or run.topology.ranks_per_host, hops=changes.hops or run.strategy.hops,
        params={**run.strategy.params, **changes.params}, ranks=[program.rank for program in recorded],
        legacy_schedule=uses_legacy_schedule(run),
    )  # fmt: skip
    for old_program, new_program in zip(recorded, changed.programs, strict=True):
        if _block_shapes(old_program) != _block_shapes(new_program):
            raise UsageError("so changed, ranks compute other blocks than were recorded: ask `ringprof predict`")
    return changed.programs


def _block_shapes(program: Program) -> list[tuple[Any, ...]]:
    return [(op.phase, op.q, op.kv, op.heads, op.causal) for op in program.ops if isinstance(op, AttentionOp)]


class _Replay:
    """Machine on which every operation takes as long as it was measured to take."""

    def __init__(self, observed: Observed, machine: Calibration, changes: Changes, programs: Sequence[Program]) -> None:
        """Set up the replay; ``programs`` has the blocks of ``observed`` in their order."""
        self._observed, self._machine, self._changes = observed, machine, changes
        self._ranks = {rank.program.rank: rank for rank in observed.ranks}
        cluster = observed.links.cluster
        if changes.hosts_of:
            cluster = Cluster(hosts=cluster.size // changes.hosts_of, gpus_per_host=changes.hosts_of)
        self.cluster = cluster
        self._links = Links(machine, cluster)
        self.device_share = self._links.device_share
        self.handover_ns = machine.handover_us.value * 1e3
        self._curves = curves_of(machine, observed.run.kernel or "")
        self._changed_curves = curves_of(machine, changes.kernel or observed.run.kernel or "")
        self._kernel = self._changed_curves.kernel
        self._memory = {
            number: memory_op_bytes(rank.program) / max(rank.memory_total_ns, 1) for number, rank in self._ranks.items()
        }
        self._observed_transfers = {
            (rank.program.rank, transfer.comm_op.id): transfer
            for rank in observed.ranks for transfer in rank.transfers.values()
        }  # fmt: skip
        self._programs = {program.rank: program for program in programs}
        self._observed_indices = {
            program.rank: dict(zip(
                (op_index for op_index, op in enumerate(program.ops) if isinstance(op, AttentionOp)),
                self._ranks[program.rank].blocks, strict=True,
            ))
            for program in programs
        }  # fmt: skip

    def compute_time(self, rank: int, op_index: int, block: ComputeOp) -> BlockTime:
        assert isinstance(block, AttentionOp)
        observed_index = self._observed_indices[rank][op_index]
        observed_block = self._ranks[rank].blocks[observed_index]
        lost_ns = self._machine.contention.value * contended_ns(self._observed, self._ranks[rank], observed_index)
        total_ns = observed_block.end_ns - observed_block.start_ns - lost_ns
        total_ns *= self._changes.slow.get(rank, 1.0) / self._changes.kernel_speed
        if self._changed_curves is not self._curves:
            total_ns *= self._changed_curves.estimate(block).ns / self._curves.estimate(block).ns
        lead_ns = self._kernel.lead.value * total_ns if block.phase == "backward" else 0.0
        return BlockTime(total_ns, lead_ns, self._kernel.tail.value * total_ns, self._kernel.fills(block.phase))

    def memory_op_ns(self, rank: int, op_index: int, op: MemoryOp) -> float:
        return op.bytes / self._memory[rank]

    def host_ns_per_op(self, program: Program) -> list[float]:
        return [0.0] * len(program.ops)

    def transfer(self, comm_op: CommStart, sender: int, receiver: int) -> LinkTransfer:
        total_bytes = sum(comm_op.messages)
        same_host = self._links.cluster.host(sender) == self._links.cluster.host(receiver)
        speedup = self._changes.links.get("same_host" if same_host else "other_host", 1.0)
        rates = [
            rate
            for rank in (sender, receiver)
            if not (same_host and self._crosses_hosts(rank, comm_op)) and (rate := self._observed_rate(rank, comm_op))
        ]
        if rates and self._crosses_as_before(sender, receiver):
            return LinkTransfer(total_bytes, max(rates) * speedup, 0.0, ())
        transfer = self._links.transfer(comm_op, sender, receiver)
        return LinkTransfer(total_bytes, transfer.cap * speedup, transfer.latency_ns, transfer.links)

    def _observed_rate(self, rank: int, comm_op: CommStart) -> float | None:
        """Return a transfer's measured bytes per nanosecond; None if it was carried otherwise or not seen."""
        transfer = self._observed_transfers.get((rank, comm_op.id))
        if transfer is None or not transfer.wire_ns:
            return None
        recorded_op = transfer.comm_op
        same_members = (recorded_op.operation, recorded_op.members) == (comm_op.operation, comm_op.members)
        return sum(recorded_op.messages) / transfer.wire_ns if same_members else None

    def _crosses_hosts(self, rank: int, comm_op: CommStart) -> bool:
        """Return whether a transfer's kernel also served a link between hosts, which then determined its end."""
        position, size = comm_op.members.index(rank), len(comm_op.members)
        neighbours = (comm_op.members[position - 1], rank, comm_op.members[(position + 1) % size])
        return self._observed.links.cluster.hosts_of(neighbours) > 1

    def _crosses_as_before(self, *ranks: int) -> bool:
        """Return whether the ranks' links cross hosts exactly as in the recorded run."""
        recorded, changed = self._observed.links.cluster, self._links.cluster
        return (recorded.hosts_of(ranks) > 1) == (changed.hosts_of(ranks) > 1)

    def collective_ns(self, comm_op: CommStart) -> float:
        crosses_hosts = self._links.cluster.hosts_of(comm_op.members) > 1
        speedup = self._changes.links.get("other_host" if crosses_hosts else "same_host", 1.0)
        rates = [rate for rank in comm_op.members if (rate := self._observed_rate(rank, comm_op))]
        if rates and self._crosses_as_before(*comm_op.members):
            return sum(comm_op.messages) / max(rates) / speedup
        return self._links.collective_ns(comm_op) / speedup

    def capacity(self, link: Hashable) -> float:
        return self._links.capacity(link) * max(self._changes.links.values(), default=1.0)

    def hop_starts_first(self, rank: int, op_index: int) -> bool:
        """Return whether the recorded hop started before its block was half done."""
        later_blocks = [block for index, block in self._observed_indices[rank].items() if index > op_index]
        comm_op = self._programs[rank].ops[op_index]
        assert isinstance(comm_op, CommStart)
        transfer = self._observed_transfers.get((rank, comm_op.id))
        if not later_blocks or transfer is None:
            return True
        block = self._ranks[rank].blocks[min(later_blocks)]
        return transfer.start_ns < (block.start_ns + block.end_ns) / 2
