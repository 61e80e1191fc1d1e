"""Discrete-event simulator: start and end of each operation of each rank, on ranks with streams.

A rank has its compute streams and one stream per communicator. Three effects make the result more than a sum:

* A hop is a rendezvous: a rank's data moves when the kernels of both ends run, and a rank's kernel ends when the data
  that it sends and receives has arrived. Flows that share a link share its rate (see `flows`).
* A flash kernel that is one wave of persistent blocks fills the device: a later transfer kernel starts when it drains.
  An earlier one keeps its multiprocessors, waiting or sending, and the flash kernel has the rest.
* If a hop and a block become ready together, chance decides which starts first.

Times are nanoseconds as floats, from the start of the iteration.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate, count
from typing import Protocol

from ringprof.dryrun.schedule import CommStart, CommWait, ComputeOp, MemoryOp, Op, Program, StreamWait

RINGS = ("send_recv", "copy")
"""Operations in which every member sends to the next one; in other operations all members exchange data."""


@dataclass(frozen=True)
class BlockTime:
    """Time of one compute operation on an otherwise idle device."""

    total_ns: float
    lead_ns: float = 0.0
    """Time at the start with small helper kernels, during which other kernels can start."""
    tail_ns: float = 0.0
    """Time at the end in which the device drains, so that other kernels can start."""
    fills: bool = False
    """Whether the call fills the device between lead and tail."""


@dataclass(frozen=True)
class LinkTransfer:
    """Data that one member of a ring sends to the next."""

    size_bytes: float
    cap: float
    """Highest rate in bytes per nanosecond."""
    latency_ns: float
    links: tuple[Hashable, ...]


class Machine(Protocol):
    """Interface of the machine that `simulate` runs on.

    Ranks are global; ``op_index`` is an operation's index in its rank's program.
    """

    handover_ns: float
    """Nanoseconds from an event on one stream to the start of another stream that waited for it."""

    def compute_time(self, rank: int, op_index: int, block: ComputeOp) -> BlockTime:
        """Return the time of an operation of an attention kernel, or of a recurrence's."""

    def memory_op_ns(self, rank: int, op_index: int, op: MemoryOp) -> float:
        """Return the nanoseconds of a memory operation."""

    def host_ns_per_op(self, program: Program) -> Sequence[float]:
        """Return the host's nanoseconds per operation of a rank, before the device can start the operation."""

    def transfer(self, comm_op: CommStart, sender: int, receiver: int) -> LinkTransfer:
        """Return the transfer of one hop from ``sender`` to ``receiver``."""

    def collective_ns(self, comm_op: CommStart) -> float:
        """Return the nanoseconds of a collective from the last member's arrival."""

    def device_share(self, comm_op: CommStart) -> float:
        """Return the fraction of the device's rate that a transfer kernel takes from a block; 0 for copy engines."""

    def capacity(self, link: Hashable) -> float:
        """Return the bytes per nanosecond of a link that a `LinkTransfer` names."""

    def hop_starts_first(self, rank: int, op_index: int) -> bool:
        """Return whether a hop starts before a block that became ready at the same time."""


@dataclass
class Timeline:
    """Start and end times of one rank's operations."""

    ops: list[tuple[float, float]]
    """(start, end) per operation on its stream: of a `CommStart` the moment it is reached, of a `CommWait` the time
    waited."""
    kernels: dict[int, tuple[float, float, float]]
    """(start, time when all peers have started, end) of each transfer kernel, by the index of its `CommStart`."""

    @property
    def end_ns(self) -> float:
        return max((end for _, end in self.ops), default=0.0)


def simulate(programs: Sequence[Program], machine: Machine, *, lead_ns: float = math.inf) -> list[Timeline]:
    """Simulate an iteration of every rank; all start together, and hosts began to issue it ``lead_ns`` earlier.

    A rank without a program is assumed to start its transfers when its peers do.
    """
    simulator = Simulator(machine, {program.rank for program in programs})
    ranks = [_Rank(simulator, program, lead_ns) for program in programs]
    for rank in ranks:
        rank.start()
    simulator.run()
    for rank in ranks:
        if rank.blocked:
            raise RuntimeError(f"rank {rank.number} waits for a transfer that its peers never post")
    return [rank.timeline for rank in ranks]


class Simulator:
    """State that ranks share: future events, links and running transfers."""

    def __init__(self, machine: Machine, ranks: set[int]) -> None:
        self.machine, self.ranks = machine, ranks
        self.flows = Flows(machine.capacity, self.call_at)
        self._transfers: dict[tuple[str, int], _RunningTransfer] = {}
        self._groups: dict[int, tuple[dict[int, int], dict[int, int], int]] = {}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()

    def call_at(self, time_ns: float, callback: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time_ns, next(self._numbers), callback))

    def run(self) -> None:
        while self._events:
            time_ns, _, callback = heapq.heappop(self._events)
            callback(time_ns)

    def group_of(self, comm_op: CommStart) -> tuple[dict[int, int], dict[int, int], int]:
        """Return the next and the previous member of each member, and how many members are simulated.

        Groups may have thousands of members, and each of their operations asks. So the key is the tuple's identity,
        which lasts as long as the programs.
        """
        key = id(comm_op.members)
        if key not in self._groups:
            self._groups[key] = *_neighbours(comm_op.members), len(self.ranks.intersection(comm_op.members))
        return self._groups[key]

    def running_transfer(self, comm_op: CommStart, number: int) -> _RunningTransfer:
        """Return the ``number``-th transfer of a communicator; all members start them in the same order."""
        key = (comm_op.communicator, number)
        if key not in self._transfers:
            self._transfers[key] = _RunningTransfer(self, comm_op)
        return self._transfers[key]


# --- the device -------------------------------------------------------------------------------------


@dataclass(eq=False)
class _RunningBlock:
    """A running attention block."""

    left_ns: float
    """Nanoseconds left at full rate."""
    since: float
    times: BlockTime
    on_end: Callable[[float], None]
    rate: float = 1.0
    draining: bool = False
    version: int = 0
    """Number of rate changes; an event that was scheduled for an earlier version is ignored."""


class _Device:
    """Blocks and transfer kernels that run concurrently on one device."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self._running: list[_RunningBlock] = []
        self._taken_share = 0.0
        self._waiting: list[Callable[[float], None]] = []

    def when_admitted(self, now: float, begin: Callable[[float], None]) -> None:
        """Call ``begin`` now, or as soon as the block that fills the device drains."""
        for block in self._running:
            if block.times.fills and not block.draining and self._past_lead(block, now):
                self._waiting.append(begin)
                return
        begin(now)

    def run(self, times: BlockTime, now: float, done: Callable[[float], None]) -> None:
        block = _RunningBlock(times.total_ns, now, times, done)
        self._running.append(block)
        self._plan(block, now)

    def take_share(self, share: float, now: float) -> None:
        """Take a share of the device for a kernel; a negative share gives it back."""
        if not share:
            return
        self._taken_share += share
        for block in self._running:
            if not block.draining:
                self._plan(block, now)

    def _past_lead(self, block: _RunningBlock, now: float) -> bool:
        done_ns = block.times.total_ns - block.left_ns + (now - block.since) * block.rate
        return done_ns >= block.times.lead_ns

    def _plan(self, block: _RunningBlock, now: float) -> None:
        block.left_ns -= (now - block.since) * block.rate
        block.since, block.rate = now, max(1.0 - self._taken_share, 0.05)
        block.version += 1
        if block.times.fills:
            drains = now + max(block.left_ns - block.times.tail_ns, 0.0) / block.rate
            self._simulator.call_at(drains, partial(self._drain, block, block.version))
        self._simulator.call_at(now + block.left_ns / block.rate, partial(self._end, block, block.version))

    def _drain(self, block: _RunningBlock, version: int, now: float) -> None:
        if version == block.version:
            block.draining = True
            self._admit(now)

    def _end(self, block: _RunningBlock, version: int, now: float) -> None:
        if version == block.version:
            self._running.remove(block)
            self._admit(now)
            block.on_end(now)

    def _admit(self, now: float) -> None:
        waiting, self._waiting = self._waiting, []
        for begin in waiting:
            self.when_admitted(now, begin)


# --- transfers --------------------------------------------------------------------------------------


@dataclass(eq=False)
class _TransferKernel:
    """A transfer's kernel on one rank."""

    rank: _Rank
    op_index: int
    comm_op: CommStart
    running_transfer: _RunningTransfer
    start_ns: float = 0.0
    ready_ns: float = 0.0
    end_ns: float | None = None
    unfinished: int = 0
    """Number of its flows that have not arrived."""
    waiters: list[Callable[[float], None]] = field(default_factory=list)

    def begin(self, now: float) -> None:
        self.start_ns = now
        self.rank.device.take_share(self.running_transfer.device_share, now)
        self.running_transfer.arrive(self, now)

    def flow_arrived(self, now: float) -> None:
        """Count an arrived flow, or a whole collective; end the kernel after the last one."""
        self.unfinished -= 1
        if self.unfinished:
            return
        self.end_ns = now
        self.rank.kernel_ended(self, now)
        self.rank.device.take_share(-self.running_transfer.device_share, now)
        for resume in self.waiters:
            self.rank.simulator.call_at(now + self.rank.simulator.machine.handover_ns, resume)


class _RunningTransfer:
    """One hop of a ring, or one collective, of all its members."""

    def __init__(self, simulator: Simulator, comm_op: CommStart) -> None:
        self._simulator, self._comm_op = simulator, comm_op
        self.device_share = simulator.machine.device_share(comm_op)
        self._kernels: dict[int, _TransferKernel] = {}
        self._next, self._previous, self._expected = simulator.group_of(comm_op)

    def arrive(self, kernel: _TransferKernel, now: float) -> None:
        """Register a member's kernel, and start what all its peers are ready for."""
        rank = kernel.rank.number
        self._kernels[rank] = kernel
        if self._comm_op.operation == "chain":
            kernel.unfinished = 1
            sender, receiver = self._comm_op.members
            self._send(sender, receiver, now)
            return
        if self._comm_op.operation not in RINGS:
            kernel.unfinished = 1
            if len(self._kernels) == self._expected:
                end_ns = now + self._simulator.machine.collective_ns(self._comm_op)
                for other in self._kernels.values():
                    other.ready_ns = now
                    self._simulator.call_at(end_ns, other.flow_arrived)
            return
        kernel.unfinished = 2
        self._send(rank, self._next[rank], now)
        self._send(self._previous[rank], rank, now)

    def _send(self, sender: int, receiver: int, now: float) -> None:
        """Start a flow if the kernels of both ends run."""
        ends = [self._kernels.get(rank) for rank in (sender, receiver) if rank in self._simulator.ranks]
        if None in ends:
            return
        transfer = self._simulator.machine.transfer(self._comm_op, sender, receiver)

        def on_arrival(time_ns: float) -> None:
            for kernel in ends:
                assert kernel is not None
                kernel.flow_arrived(time_ns)

        for kernel in ends:
            assert kernel is not None
            kernel.ready_ns = now

        flow = Flow(transfer.size_bytes, transfer.cap, transfer.links, on_arrival)
        self._simulator.call_at(now + transfer.latency_ns, partial(self._simulator.flows.begin, flow))


@lru_cache(maxsize=256)
def _neighbours(members: tuple[int, ...]) -> tuple[dict[int, int], dict[int, int]]:
    """Return the next and the previous member of each member of a ring."""
    following = dict(zip(members, (*members[1:], members[0]), strict=True))
    return following, {receiver: sender for sender, receiver in following.items()}


# --- a rank -----------------------------------------------------------------------------------------


class _Rank:
    """One rank's program on its streams."""

    def __init__(self, simulator: Simulator, program: Program, lead_ns: float) -> None:
        self.simulator, self.number = simulator, program.rank
        self.device = _Device(simulator)
        self.timeline = Timeline([(0.0, 0.0)] * len(program.ops), {})
        self._ops = program.ops
        self._issue_ns = [0.0] * len(program.ops)
        if lead_ns < math.inf:
            self._issue_ns = [max(0.0, ns - lead_ns) for ns in accumulate(simulator.machine.host_ns_per_op(program))]
        self._streams: dict[int, list[int]] = defaultdict(list)
        for op_index, op in enumerate(program.ops):
            self._streams[op.stream].append(op_index)
        self._next = dict.fromkeys(self._streams, 0)
        self._kernels: dict[int, _TransferKernel] = {}
        self._counts: dict[str, int] = defaultdict(int)
        self._queues: dict[str, deque[_TransferKernel]] = defaultdict(deque)
        self._stream_waits: list[tuple[int, Callable[[float], None]]] = []
        """Stream that is waited for, and the callback that resumes the waiting stream."""

    @property
    def blocked(self) -> bool:
        return any(self._next[stream] < len(op_indices) for stream, op_indices in self._streams.items())

    def start(self) -> None:
        for stream in self._streams:
            self._advance(stream, 0.0)

    def _advance(self, stream: int, now: float) -> None:
        """Process the stream's operations until one takes time."""
        op_indices, positions = self._streams[stream], self._next
        while (position := positions[stream]) < len(op_indices):
            op_index = op_indices[position]
            if self._issue_ns[op_index] > now:
                self.simulator.call_at(self._issue_ns[op_index], partial(self._advance, stream))
                return
            if self._begin_op(stream, op_index, self._ops[op_index], now):
                return
            self._finish(stream, op_index, now, now)

    def _finish(self, stream: int, op_index: int, start: float, end: float) -> None:
        self.timeline.ops[op_index] = (start, end)
        self._next[stream] += 1
        if not self._stream_waits:
            return
        stream_waits, self._stream_waits = self._stream_waits, []
        for other, advance in stream_waits:
            if other == stream:
                self.simulator.call_at(end + self.simulator.machine.handover_ns, advance)
            else:
                self._stream_waits.append((other, advance))

    def _finish_and_advance(self, stream: int, op_index: int, start: float, now: float) -> None:
        self._finish(stream, op_index, start, now)
        self._advance(stream, now)

    def _begin_op(self, stream: int, op_index: int, op: Op, now: float) -> bool:
        """Begin an operation; return whether the stream must wait for it."""
        if isinstance(op, MemoryOp):
            end = now + self.simulator.machine.memory_op_ns(self.number, op_index, op)
            self.simulator.call_at(end, partial(self._finish_and_advance, stream, op_index, now))
        elif isinstance(op, ComputeOp):
            times = self.simulator.machine.compute_time(self.number, op_index, op)
            begin = partial(self._begin_block, stream, op_index, times)
            self.device.when_admitted(now, begin)
        elif isinstance(op, CommStart):
            self._start_comm(op_index, op, now)
            return False
        elif isinstance(op, CommWait):
            kernel = self._kernels[op.id]
            if kernel.end_ns is not None:
                return False
            kernel.waiters.append(partial(self._finish_and_advance, stream, op_index, now))
        else:
            return self._waits_for_stream(stream, op_index, op, now)
        return True

    def _begin_block(self, stream: int, op_index: int, times: BlockTime, now: float) -> None:
        self.device.run(times, now, partial(self._finish_and_advance, stream, op_index, now))

    def _waits_for_stream(self, stream: int, op_index: int, op: StreamWait, now: float) -> bool:
        """Return whether the other stream is behind this operation; if so, check again when it advances."""
        if op.after not in self._streams:
            return False  # no operation was ever put on it
        other_indices, next_position = self._streams[op.after], self._next[op.after]
        if next_position == len(other_indices) or other_indices[next_position] > op_index:
            return False
        self._stream_waits.append((op.after, partial(self._advance, stream)))
        return True

    def _start_comm(self, op_index: int, comm_op: CommStart, now: float) -> None:
        """Queue a transfer's kernel on its communicator and start it if the queue is empty."""
        number = self._counts[comm_op.communicator]
        self._counts[comm_op.communicator] += 1
        kernel = _TransferKernel(self, op_index, comm_op, self.simulator.running_transfer(comm_op, number))
        self._kernels[comm_op.id] = kernel
        queue = self._queues[comm_op.communicator]
        queue.append(kernel)
        if queue[0] is not kernel:
            return
        if self.simulator.machine.hop_starts_first(self.number, op_index):
            self._begin_kernel(kernel, now)
        else:
            self.simulator.call_at(now + self.simulator.machine.handover_ns, partial(self._begin_kernel, kernel))

    def _begin_kernel(self, kernel: _TransferKernel, now: float) -> None:
        if kernel.running_transfer.device_share:
            self.device.when_admitted(now, kernel.begin)
        else:
            kernel.begin(now)

    def kernel_ended(self, kernel: _TransferKernel, now: float) -> None:
        """Record a finished transfer kernel and start the next one of its communicator."""
        self.timeline.kernels[kernel.op_index] = (kernel.start_ns, kernel.ready_ns, now)
        queue = self._queues[kernel.comm_op.communicator]
        queue.popleft()
        if queue:
            self._begin_kernel(queue[0], now)


# --- flows over shared links: each flow has a cap, and max-min fairness shares a link that cannot carry them all ---

CallAt = Callable[[float, Callable[[float], None]], None]
"""Schedules a function call at a time."""


@dataclass(eq=False)
class Flow:
    """Bytes in transit over ``links``, at a rate of at most ``cap`` bytes per nanosecond."""

    left: float
    cap: float
    links: Sequence[Hashable]
    done: Callable[[float], None]
    rate: float = 0.0
    since: float = 0.0
    version: int = field(default=0)
    """Number of rate changes; an end that was scheduled for an earlier version is ignored."""


class Flows:
    """All active flows; rates are updated whenever a flow begins or ends."""

    def __init__(self, capacity: Callable[[Hashable], float], call_at: CallAt) -> None:
        self._capacity, self._call_at = capacity, call_at
        self._flows_on: dict[Hashable, dict[Flow, None]] = {}

    def begin(self, flow: Flow, now: float) -> None:
        """Start a flow; ``flow.done`` is called when all its bytes have arrived."""
        flow.since = now
        alone = True
        for link in flow.links:
            others = self._flows_on.setdefault(link, {})
            alone = alone and not others
            others[flow] = None
        if alone:
            # Most flows share no link.
            self._set_rate(flow, max_min([flow], self._capacity)[flow], now)
        else:
            self._share([flow], now)

    def _end(self, flow: Flow, version: int, now: float) -> None:
        if version != flow.version:
            return
        neighbours = [other for link in flow.links for other in self._flows_on[link] if other is not flow]
        for link in flow.links:
            del self._flows_on[link][flow]
        if neighbours:
            self._share(neighbours, now)
        flow.done(now)

    def _share(self, changed: Iterable[Flow], now: float) -> None:
        """Update the rates of all flows that share a link with a changed one, directly or through other flows."""
        reached = dict.fromkeys(changed)
        queue = list(reached)
        for flow in queue:
            for link in flow.links:
                for other in self._flows_on[link]:
                    if other not in reached:
                        reached[other] = None
                        queue.append(other)
        for flow, rate in max_min(queue, self._capacity).items():
            if rate != flow.rate or not flow.version:
                self._set_rate(flow, rate, now)

    def _set_rate(self, flow: Flow, rate: float, now: float) -> None:
        flow.left -= flow.rate * (now - flow.since)
        flow.since, flow.rate = now, rate
        flow.version += 1
        self._call_at(now + max(flow.left, 0.0) / rate, partial(self._end, flow, flow.version))


def max_min(flows: Sequence[Flow], capacity: Callable[[Hashable], float]) -> Mapping[Flow, float]:
    """Return the max-min fair rate of each of ``flows``, which share links with no other flows."""
    if len(flows) == 1:
        return {flow: min([flow.cap, *map(capacity, flow.links)]) for flow in flows}
    free: dict[Hashable, float] = {}
    flow_counts: dict[Hashable, int] = {}
    for flow in flows:
        for link in flow.links:
            free.setdefault(link, capacity(link))
            flow_counts[link] = flow_counts.get(link, 0) + 1
    rates: dict[Flow, float] = {}
    open_flows = list(flows)
    while open_flows:
        fair = {
            flow: min((free[link] / flow_counts[link] for link in flow.links), default=flow.cap) for flow in open_flows
        }
        rate = min(min(flow.cap, share) for flow, share in fair.items())
        unfinished = []
        for flow in open_flows:
            if min(flow.cap, fair[flow]) > rate * (1 + 1e-9):
                unfinished.append(flow)
                continue
            rates[flow] = rate
            for link in flow.links:
                free[link] = max(0.0, free[link] - rate)
                flow_counts[link] -= 1
        open_flows = unfinished
    return rates
