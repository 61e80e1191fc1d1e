"""The program of one rank: compute, memory and communication operations of one iteration, in the host's order.

`ringprof.dryrun.run` creates one in a dry run; `ringprof.prediction.simulator` computes when each operation
begins and ends on a machine.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ringprof.run import Work
from ringprof.workload.workload import Workload


class AttentionOp(msgspec.Struct, frozen=True, kw_only=True, tag="block"):
    """One attention call: ``q`` queries against ``kv`` keys."""

    label: str
    """Ring step as in a trace, such as ``fwd/step=0/block``; empty if the strategy has no annotation."""
    phase: Literal["forward", "backward"]
    batch: int
    q: int
    kv: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    pairs: int | None = None
    """Number of query-key pairs of a mask other than causal or full; else None.

    With pairs, ``q`` and ``kv`` are the rows of all sequences together, and every entry of the batch counts as one.
    """
    sequences: int = 1
    """Number of documents that the call computes."""
    stream: int = 0
    calls: int = 0
    """Number of torch calls of the host since the previous operation; they take host time, not device time."""

    def flops(self) -> int:
        """Return the FLOPs from the exact mask area: 4 per pair and channel forward, 10 backward."""
        pairs = self.pairs
        if pairs is None:
            pairs = self.q * (self.q + 1) // 2 if self.causal else self.q * self.kv
        return (4 if self.phase == "forward" else 10) * self.batch * self.heads * self.head_dim * pairs


class RecurrenceOp(msgspec.Struct, frozen=True, kw_only=True, tag="recurrence"):
    """One part of a linear recurrence's kernel over the ``tokens`` of a rank (`ringprof.strategies.recurrent`)."""

    label: str
    """Step as in a trace: ``fwd/step=0/local``, ``fwd/step=0/block``, and the same of ``bwd``."""
    phase: Literal["forward", "backward"]
    part: Literal["local", "block"]
    """``local`` needs no state of another rank; ``block`` follows once the state before the rank's tokens is known."""
    operator: Literal["gated_delta_rule", "simple_gla", "gla"]
    """The kernel's recurrence; Mamba-2 is ``simple_gla``."""
    batch: int
    tokens: int
    heads: int
    head_dim: int
    """Size of a head's keys: rows of its state."""
    v_head_dim: int
    """Size of a head's values: columns of its state."""
    receives: bool
    """Whether the first tokens continue from another rank's state."""
    sends: bool
    """Whether the state after the last token is needed."""
    stream: int = 0
    calls: int = 0


class MemoryOp(msgspec.Struct, frozen=True, kw_only=True, tag="touch"):
    """One kernel that only moves memory: a merge, a conversion, a fill or a copy."""

    label: str
    name: str
    """Name of the operation, such as ``ringprof_merge`` or ``aten.copy_``."""
    bytes: int
    """Bytes read and written."""
    strided: bool = False
    """Whether it changes the order in memory, which takes several times as long as a copy."""
    stream: int = 0
    calls: int = 0


class CommStart(msgspec.Struct, frozen=True, kw_only=True, tag="post"):
    """Start of a transfer; the data is ready when the stream reaches this operation."""

    id: int
    channel: str
    phase: str
    """``forward`` or ``backward``."""
    operation: str
    """``send_recv``, ``copy``, ``all_to_all``, ``all_gather``, ``reduce_scatter``, or ``chain``: from the first of two
    members to the second."""
    members: tuple[int, ...]
    """Global ranks of the ring or group, in its order."""
    communicator: str
    """Name of the communicator, the same on all members; its transfers run one after another."""
    messages: tuple[int, ...]
    """Bytes of each message to one peer."""
    label: str = ""
    stream: int = 0
    calls: int = 0


class CommWait(msgspec.Struct, frozen=True, kw_only=True, tag="wait"):
    """Wait of the stream for the end of a transfer."""

    id: int
    label: str = ""
    stream: int = 0
    calls: int = 0


class StreamWait(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """Wait of one stream for the operations queued so far on another."""

    stream: int
    after: int
    calls: int = 0


ComputeOp = AttentionOp | RecurrenceOp
"""Operation of an attention kernel, or of a recurrence's."""
Op = ComputeOp | MemoryOp | CommStart | CommWait | StreamWait


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's iteration."""

    rank: int
    ops: list[Op]
    work: Work
    """Blocks and bytes, counted as in a recording."""
    peak_bytes: int
    """Peak memory in bytes, including the known temporaries of attention kernels."""
    peak_label: str
    """Annotation at the peak."""


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """Programs of some ranks of a strategy."""

    target: str
    params: dict[str, object]
    layout: str | None
    workload: Workload
    programs: list[Program]
