"""Content of one rank's communication log: operations, with those of their times that the log knows."""

from __future__ import annotations

import msgspec

from ringprof.trace.columns import Message, Notice

COMPLETED, STARTED, SCHEDULED = "completed", "started", "scheduled"
HOPS = ("send_recv", "send", "recv")
"""Names of operations that are hops: batches of sends and receives, and single ones."""
SYNCHRONISING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""Collectives that end on no rank before every rank has begun."""
ELEMENT_BYTES = {
    "Byte": 1, "Char": 1, "Bool": 1, "Short": 2, "Half": 2, "BFloat16": 2, "Int": 4, "Float": 4, "Long": 8,
    "Double": 8, "ComplexHalf": 4, "ComplexFloat": 8, "ComplexDouble": 16, "UInt16": 2, "UInt32": 4, "UInt64": 8,
    "Float8_e4m3fn": 1, "Float8_e5m2": 1, "Float8_e4m3fnuz": 1, "Float8_e5m2fnuz": 1, "Float8_e8m0fnu": 1,
}  # fmt: skip
"""Bytes of one element by the name that torch gives a type; other types have no size here."""


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One collective, or one hop: a batch of sends and receives that runs as one kernel.

    Times are nanoseconds since 1970 on the clock of the rank's host; None where the log does not know them.
    """

    rank: int
    group: str
    """Key of the process group; equal on all its ranks."""
    name: str
    """``send_recv``, ``send`` or ``recv`` for a hop, else the collective, such as ``all_reduce``."""
    sequence: int
    """Sequence number that the log gives the operation within its group."""
    state: str
    """``completed``, ``started`` or ``scheduled`` (posted on the host; the device has not been seen to begin)."""
    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    size_bytes: int | None = None
    """Size of a collective in bytes by the convention of nccl-tests: all ranks' data of a gather or scatter."""
    equal: str = ""
    """Elements and types of a collective that must be equal on all ranks, as ``1,024 BFloat16``; empty: unknown, or may
    differ."""
    posted_ns: int | None = None
    """Time at which the host posted the operation; the device cannot have begun earlier."""
    started_by_ns: int | None = None
    """Time at which the operation was seen to run; it began then or earlier."""
    completed_by_ns: int | None = None
    """Time at which the operation was seen to be over; it ended then or earlier."""
    least_ns: int | None = None
    """Lower bound on the time of the operation on the device."""
    most_ns: int | None = None
    """Upper bound on the time of the operation on the device."""
    shown_ns: int | None = None
    """Time on the device that the log states, by which ranks can be compared where nothing else is known."""
    timed_out: bool = False
    """Whether the process group gave up on the operation."""
    location: str = ""
    """Innermost line of the user's program that posted the operation, as ``file.py:123 function``."""

    @property
    def is_hop(self) -> bool:
        """Whether this is a send, a receive or a batch of them, not a collective."""
        return self.name in HOPS

    @property
    def sent_bytes(self) -> int | None:
        """Bytes that a hop sends; those that it receives where it sends nothing; None where a size is unknown."""
        sizes = [message.size_bytes for message in self.sends or self.receives]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    @property
    def counted_bytes(self) -> int | None:
        """Bytes that rates count: `sent_bytes` of a hop, `size_bytes` of a collective; None where unknown."""
        return self.sent_bytes if self.is_hop else self.size_bytes


class Group(msgspec.Struct, frozen=True):
    """A process group or communicator."""

    label: str
    """Name for reports."""
    ranks: tuple[int, ...] = ()
    """Members by their rank in the job, in the group's order; empty where the log does not tell."""
    size: int = 0
    """Number of members; 0 where the log does not tell."""


class RankLog(msgspec.Struct, kw_only=True):
    """Communication log of one rank."""

    path: str
    source: str
    """``flight_recorder`` or ``nccl_inspector``."""
    rank: int
    operations: list[Operation]
    groups: dict[str, Group]
    versions: tuple[str, ...] = ()
    """Versions of the format and of the communication library, for the title of a report."""
    host: str | None = None
    from_start: bool = True
    """Whether the log begins with the first operation of the process: nothing was overwritten or left out."""
    missing: int = 0
    """Number of operations that a gap in the sequence numbers shows to be missing."""
    notices: list[Notice] = []
    own_ranks: dict[str, int] = {}
    """Rank of the process within its groups, where these are all that the log states."""
    process: int | None = None
    """Process id."""


def bytes_of(sizes: list[list[int]], types: list[str]) -> int | None:
    """Return the bytes of tensors of these shapes and types, named as in `ELEMENT_BYTES`.

    Returns None where a type is missing or not in `ELEMENT_BYTES`, or where a tensor has 2^62 bytes or more.
    """
    total = 0
    for index, shape in enumerate(sizes):
        element = ELEMENT_BYTES.get(types[index]) if index < len(types) else None
        if element is None:
            return None
        for length in shape:
            element *= length
            if element >= 1 << 62:
                return None
        total += element
    return total
