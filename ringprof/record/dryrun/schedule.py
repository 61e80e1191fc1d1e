"""What one rank's program is: the blocks, memory operations, hops and waits of one iteration, in the host's order.

`tape` writes one by running a strategy on shapes; `clock` says when each operation begins and ends on a machine.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ringprof.run import Work, Workload


class AttentionOp(msgspec.Struct, frozen=True, kw_only=True, tag="block"):
    """One attention call: ``q`` queries against ``kv`` keys."""

    label: str
    """The ring step, as in a trace: ``fwd/step=0/block``; empty where the strategy named none."""
    phase: Literal["forward", "backward"]
    batch: int
    q: int
    kv: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    pairs: int | None = None
    """Of a query and a key that it sees, where a mask is more than causal or none; then ``q`` and ``kv`` are the rows
    of all sequences together, every entry of the batch counted as one."""
    sequences: int = 1
    """Documents that one call computes."""
    stream: int = 0
    calls: int = 0
    """Calls into torch that the host made since the operation before: they take its time, not the device's."""

    def flops(self) -> int:
        """FLOPs from the exact mask area: 4 a pair and channel forward, 10 backward."""
        pairs = self.pairs
        if pairs is None:
            pairs = self.q * (self.q + 1) // 2 if self.causal else self.q * self.kv
        return (4 if self.phase == "forward" else 10) * self.batch * self.heads * self.head_dim * pairs


class MemoryOp(msgspec.Struct, frozen=True, kw_only=True, tag="touch"):
    """One kernel that only moves memory: a merge, a conversion, a fill, a copy."""

    label: str
    name: str
    """Of the operation, such as ``ringprof_merge`` or ``aten.copy_``."""
    bytes: int
    """Read and written."""
    strided: bool = False
    """Whether it changes the order in memory, which takes several times as long as a copy."""
    stream: int = 0
    calls: int = 0


class CommStart(msgspec.Struct, frozen=True, kw_only=True, tag="post"):
    """A transfer begun; what it carries is ready when the stream gets here."""

    id: int
    channel: str
    phase: str
    """``forward`` or ``backward``."""
    operation: str
    """``send_recv``, ``copy``, ``all_to_all``, ``all_gather`` or ``reduce_scatter``."""
    members: tuple[int, ...]
    """Global ranks of the ring or group, in its order."""
    communicator: str
    """Transfers of one communicator follow each other; its name is the same on all members."""
    messages: tuple[int, ...]
    """Bytes of each message to one peer."""
    label: str = ""
    stream: int = 0
    calls: int = 0


class CommWait(msgspec.Struct, frozen=True, kw_only=True, tag="wait"):
    """The stream goes on when the transfer has arrived."""

    id: int
    label: str = ""
    stream: int = 0
    calls: int = 0


class StreamWait(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """One stream goes on when another has come this far."""

    stream: int
    after: int
    calls: int = 0


Op = AttentionOp | MemoryOp | CommStart | CommWait | StreamWait


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's iteration."""

    rank: int
    ops: list[Op]
    work: Work
    """Blocks and bytes, as a recording counts them."""
    peak_bytes: int
    """Most memory held, kernels' own scratch not counted."""
    peak_label: str
    """Where in the program."""


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """What a strategy does: the programs of some ranks."""

    target: str
    params: dict[str, object]
    layout: str | None
    workload: Workload
    programs: list[Program]
