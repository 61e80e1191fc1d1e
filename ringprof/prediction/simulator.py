"""When each operation of each rank begins and ends: an event at a time, on ranks with streams.

A rank has its compute streams and one stream for each communicator. Three things make it more than a sum:

* A hop is a rendezvous: what a rank sends moves when the kernels of both ends run, and a rank's kernel ends when what
  it sends and what it receives have arrived. Flows that share a link share its rate (see `flows`).
* A flash kernel that is one wave of persistent blocks fills the device: a kernel of a hop that comes later starts when
  it drains. One that came first keeps its multiprocessors, waiting or sending, and the flash kernel has the rest.
* Of a hop and a block that become ready together, chance says which comes first.

Times are nanoseconds as floats, from the start of the iteration.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate, count
from typing import Protocol

from ringprof.prediction.flows import Flow, Flows
from ringprof.record.dryrun.schedule import AttentionOp, CommStart, CommWait, MemoryOp, Op, Program, StreamWait

RINGS = ("send_recv", "copy")
"""Operations in which every member sends to the next; in others all members trade with all."""


@dataclass(frozen=True)
class BlockTime:
    """One attention call on a device that has nothing else to do."""

    total_ns: float
    lead_ns: float = 0.0
    """Of it, at the beginning: small kernels, beside which others find room."""
    tail_ns: float = 0.0
    """Of it, at the end: the device drains, and others find room again."""
    fills: bool = False
    """Whether it fills the device between."""


@dataclass(frozen=True)
class Transfer:
    """What one member of a ring sends to the next."""

    size_bytes: float
    cap: float
    """Most bytes a nanosecond."""
    latency_ns: float
    links: tuple[Hashable, ...]


class Machine(Protocol):
    """What `simulate` asks. Ranks are global, ``place`` is an operation's place in its rank's program."""

    handover_ns: float
    """From an event on one stream to another stream that waited for it."""

    def block(self, rank: int, place: int, block: AttentionOp) -> BlockTime: ...

    def touch(self, rank: int, place: int, touch: MemoryOp) -> float:
        """Nanoseconds."""

    def host(self, program: Program) -> Sequence[float]:
        """Nanoseconds that the host needs for each operation of a rank before the device can begin it."""

    def leg(self, post: CommStart, sender: int, receiver: int) -> Transfer: ...

    def collective(self, post: CommStart) -> float:
        """Nanoseconds from the last member's arrival."""

    def share(self, post: CommStart) -> float:
        """Part of the device's rate that the transfer's kernel takes from a block; 0 for copy engines."""

    def capacity(self, link: Hashable) -> float:
        """Bytes a nanosecond of a link that a `Leg` names."""

    def hop_is_first(self, rank: int, place: int) -> bool:
        """Whether a hop begins before the block that it became ready together with."""


@dataclass
class Timeline:
    """One rank's times, start and end, by the operation's place in the program."""

    ops: list[tuple[float, float]]
    """On its stream; of a post the moment it was reached, of a wait the time stood still."""
    kernels: dict[int, tuple[float, float, float]]
    """By the place of its post: a transfer's kernel: start, when its peers were there too, end."""

    @property
    def end_ns(self) -> float:
        return max((end for _, end in self.ops), default=0.0)


def simulate(programs: Sequence[Program], machine: Machine, *, lead_ns: float = math.inf) -> list[Timeline]:
    """Every rank's iteration; all start together, and hosts began to issue it ``lead_ns`` before.

    A rank without a program is taken to do what those do that trade with it, when they do it.
    """
    world = Simulator(machine, {program.rank for program in programs})
    ranks = [_Rank(world, program, lead_ns) for program in programs]
    for rank in ranks:
        rank.start()
    world.run()
    for rank in ranks:
        if rank.stuck:
            raise RuntimeError(f"rank {rank.number} waits for a transfer that its peers never post")
    return [rank.timeline for rank in ranks]


class Simulator:
    """What ranks share: the events to come, the links, and the transfers."""

    def __init__(self, machine: Machine, ranks: set[int]) -> None:
        self.machine, self.ranks = machine, ranks
        self.flows = Flows(machine.capacity, self.at)
        self._transfers: dict[tuple[str, int], _RunningTransfer] = {}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()

    def at(self, time_ns: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time_ns, next(self._numbers), what))

    def run(self) -> None:
        while self._events:
            time_ns, _, what = heapq.heappop(self._events)
            what(time_ns)

    def transfer(self, post: CommStart, number: int) -> _RunningTransfer:
        """The ``number``-th of a communicator, which all members post in one order."""
        key = (post.communicator, number)
        if key not in self._transfers:
            self._transfers[key] = _RunningTransfer(self, post)
        return self._transfers[key]


# --- the device -------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Running:
    """A block under way."""

    left_ns: float
    """What is left of it at full rate."""
    since: float
    times: BlockTime
    done: Callable[[float], None]
    rate: float = 1.0
    draining: bool = False
    version: int = 0
    """An event that was planned for another version does not come."""


class _Device:
    """What runs on one device beside each other: blocks, and kernels of transfers."""

    def __init__(self, world: Simulator) -> None:
        self._world = world
        self._running: list[_Running] = []
        self._taken = 0.0
        self._held_up: list[Callable[[float], None]] = []

    def when_there_is_room(self, now: float, begin: Callable[[float], None]) -> None:
        """Now, or when the block that fills the device drains."""
        if any(block.times.fills and not block.draining and self._past_lead(block, now) for block in self._running):
            self._held_up.append(begin)
        else:
            begin(now)

    def run(self, times: BlockTime, now: float, done: Callable[[float], None]) -> None:
        block = _Running(times.total_ns, now, times, done)
        self._running.append(block)
        self._plan(block, now)

    def take(self, share: float, now: float) -> None:
        """A kernel takes (or, below 0, gives back) a part of the device."""
        if not share:
            return
        self._taken += share
        for block in self._running:
            if not block.draining:
                self._plan(block, now)

    def _past_lead(self, block: _Running, now: float) -> bool:
        done_ns = block.times.total_ns - block.left_ns + (now - block.since) * block.rate
        return done_ns >= block.times.lead_ns

    def _plan(self, block: _Running, now: float) -> None:
        block.left_ns -= (now - block.since) * block.rate
        block.since, block.rate = now, max(1.0 - self._taken, 0.05)
        block.version += 1
        if block.times.fills:
            drains = now + max(block.left_ns - block.times.tail_ns, 0.0) / block.rate
            self._world.at(drains, partial(self._drain, block, block.version))
        self._world.at(now + block.left_ns / block.rate, partial(self._end, block, block.version))

    def _drain(self, block: _Running, version: int, now: float) -> None:
        if version == block.version:
            block.draining = True
            self._admit(now)

    def _end(self, block: _Running, version: int, now: float) -> None:
        if version == block.version:
            self._running.remove(block)
            self._admit(now)
            block.done(now)

    def _admit(self, now: float) -> None:
        waiting, self._held_up = self._held_up, []
        for begin in waiting:
            self.when_there_is_room(now, begin)


# --- transfers --------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Kernel:
    """A transfer's kernel on one rank."""

    rank: _Rank
    place: int
    post: CommStart
    transfer: _RunningTransfer
    start_ns: float = 0.0
    ready_ns: float = 0.0
    end_ns: float | None = None
    unfinished: int = 0
    """Flows that it sends or receives and that have not arrived."""
    waiting: list[Callable[[float], None]] = field(default_factory=list)

    def begin(self, now: float) -> None:
        self.start_ns = now
        self.rank.device.take(self.transfer.share, now)
        self.transfer.arrive(self, now)

    def arrived(self, now: float) -> None:
        """One of its flows, or the whole collective."""
        self.unfinished -= 1
        if self.unfinished:
            return
        self.end_ns = now
        self.rank.ended(self, now)
        self.rank.device.take(-self.transfer.share, now)
        for go_on in self.waiting:
            self.rank.world.at(now + self.rank.world.machine.handover_ns, go_on)


class _RunningTransfer:
    """One hop of a ring, or one collective, of all its members."""

    def __init__(self, world: Simulator, post: CommStart) -> None:
        self._world, self._post = world, post
        self.share = world.machine.share(post)
        self._kernels: dict[int, _Kernel] = {}
        self._next, self._previous = _neighbours(post.members)
        self._expected = len(world.ranks.intersection(post.members))

    def arrive(self, kernel: _Kernel, now: float) -> None:
        me = kernel.rank.number
        self._kernels[me] = kernel
        if self._post.operation not in RINGS:
            kernel.unfinished = 1
            if len(self._kernels) == self._expected:
                end = now + self._world.machine.collective(self._post)
                for other in self._kernels.values():
                    other.ready_ns = now
                    self._world.at(end, other.arrived)
            return
        kernel.unfinished = 2
        self._send(me, self._next[me], now)
        self._send(self._previous[me], me, now)

    def _send(self, sender: int, receiver: int, now: float) -> None:
        """Where both ends are there."""
        ends = [self._kernels.get(rank) for rank in (sender, receiver) if rank in self._world.ranks]
        if None in ends:
            return
        leg = self._world.machine.leg(self._post, sender, receiver)

        def done(time_ns: float) -> None:
            for kernel in ends:
                assert kernel is not None
                kernel.arrived(time_ns)

        for kernel in ends:
            assert kernel is not None
            kernel.ready_ns = now

        flow = Flow(leg.size_bytes, leg.cap, leg.links, done)
        self._world.at(now + leg.latency_ns, partial(self._world.flows.begin, flow))


@lru_cache(maxsize=256)
def _neighbours(members: tuple[int, ...]) -> tuple[dict[int, int], dict[int, int]]:
    """By member of a ring, the next and the one before."""
    following = dict(zip(members, (*members[1:], members[0]), strict=True))
    return following, {receiver: sender for sender, receiver in following.items()}


# --- a rank -----------------------------------------------------------------------------------------


class _Rank:
    """One rank's program on its streams."""

    def __init__(self, world: Simulator, program: Program, lead_ns: float) -> None:
        self.world, self.number = world, program.rank
        self.device = _Device(world)
        self.timeline = Timeline([(0.0, 0.0)] * len(program.ops), {})
        self._ops = program.ops
        self._issued = [0.0] * len(program.ops)
        if lead_ns < math.inf:
            self._issued = [max(0.0, ns - lead_ns) for ns in accumulate(world.machine.host(program))]
        self._streams: dict[int, list[int]] = defaultdict(list)
        for place, op in enumerate(program.ops):
            self._streams[op.stream].append(place)
        self._at = dict.fromkeys(self._streams, 0)
        self._posted: dict[int, _Kernel] = {}
        self._counts: dict[str, int] = defaultdict(int)
        self._queues: dict[str, deque[_Kernel]] = defaultdict(deque)
        self._joining: list[tuple[int, Callable[[float], None]]] = []
        """The stream that is waited for, and how to go on."""

    @property
    def stuck(self) -> bool:
        return any(self._at[stream] < len(places) for stream, places in self._streams.items())

    def start(self) -> None:
        for stream in self._streams:
            self._advance(stream, 0.0)

    def _advance(self, stream: int, now: float) -> None:
        """Do what the stream comes to, until something takes time."""
        places = self._streams[stream]
        while self._at[stream] < len(places):
            place = places[self._at[stream]]
            if self._issued[place] > now:
                self.world.at(self._issued[place], partial(self._advance, stream))
                return
            if self._takes_time(stream, place, self._ops[place], now):
                return
            self._past(stream, place, now, now)

    def _past(self, stream: int, place: int, start: float, end: float) -> None:
        self.timeline.ops[place] = (start, end)
        self._at[stream] += 1
        joining, self._joining = self._joining, []
        for other, advance in joining:
            if other == stream:
                self.world.at(end + self.world.machine.handover_ns, advance)
            else:
                self._joining.append((other, advance))

    def _goes_on(self, stream: int, place: int, start: float, now: float) -> None:
        self._past(stream, place, start, now)
        self._advance(stream, now)

    def _takes_time(self, stream: int, place: int, op: Op, now: float) -> bool:
        if isinstance(op, MemoryOp):
            end = now + self.world.machine.touch(self.number, place, op)
            self.world.at(end, partial(self._goes_on, stream, place, now))
        elif isinstance(op, AttentionOp):
            times = self.world.machine.block(self.number, place, op)
            begin = partial(self._begin_block, stream, place, times)
            self.device.when_there_is_room(now, begin)
        elif isinstance(op, CommStart):
            self._post(place, op, now)
            return False
        elif isinstance(op, CommWait):
            kernel = self._posted[op.id]
            if kernel.end_ns is not None:
                return False
            kernel.waiting.append(partial(self._goes_on, stream, place, now))
        else:
            return self._must_join(stream, place, op, now)
        return True

    def _begin_block(self, stream: int, place: int, times: BlockTime, now: float) -> None:
        self.device.run(times, now, partial(self._goes_on, stream, place, now))

    def _must_join(self, stream: int, place: int, op: StreamWait, now: float) -> bool:
        """Whether the other stream is not yet as far as the program was when it asked; then this one looks again."""
        others, at = self._streams[op.after], self._at[op.after]
        if at == len(others) or others[at] > place:
            return False
        self._joining.append((op.after, partial(self._advance, stream)))
        return True

    def _post(self, place: int, post: CommStart, now: float) -> None:
        number = self._counts[post.communicator]
        self._counts[post.communicator] += 1
        kernel = _Kernel(self, place, post, self.world.transfer(post, number))
        self._posted[post.id] = kernel
        queue = self._queues[post.communicator]
        queue.append(kernel)
        if queue[0] is not kernel:
            return
        if self.world.machine.hop_is_first(self.number, place):
            self._begin(kernel, now)
        else:
            self.world.at(now + self.world.machine.handover_ns, partial(self._begin, kernel))

    def _begin(self, kernel: _Kernel, now: float) -> None:
        if kernel.transfer.share:
            self.device.when_there_is_room(now, kernel.begin)
        else:
            kernel.begin(now)

    def ended(self, kernel: _Kernel, now: float) -> None:
        """The next of the communicator begins at once."""
        self.timeline.kernels[kernel.place] = (kernel.start_ns, kernel.ready_ns, now)
        queue = self._queues[kernel.post.communicator]
        queue.popleft()
        if queue:
            self._begin(queue[0], now)
