"""Contents of each communication activity: its messages with peers and bytes, and its process group."""

from __future__ import annotations

import msgspec
import numpy as np

from ringprof.analysis.kinds.classify import EVIDENCE, Calls, Classified, single_peer
from ringprof.analysis.kinds.kinds import COMMUNICATION, KINDS, is_kind
from ringprof.trace.columns import NONE, CommRecord, Int64, Message, Trace

_ELEMENT_BYTES = {
    "byte": 1, "char": 1, "bool": 1, "short": 2, "int": 4, "long": 8,
    "half": 2, "bfloat16": 2, "float": 4, "double": 8, "complexfloat": 8, "complexdouble": 16,
}  # fmt: skip

Group = tuple[str | None, tuple[int, ...]]
"""A process group, equal on all its ranks: its name, and its global ranks where known."""


# Not visited by the garbage collector, for the reason of `ringprof.trace.columns.Message`.
class Transfer(msgspec.Struct, frozen=True, gc=False):
    """One communication kernel, or one peer-to-peer copy, of one rank."""

    rank: int
    activity: int
    """Index into the trace's activities."""
    kind: str
    start_ns: int
    end_ns: int
    stream: int
    launched: int
    """Index in the launch order of the rank's device work, or `NONE`."""
    group: Group
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    sent_bytes: int | None
    """Bytes that leave this rank: for a collective, by its ring or pairwise algorithm; for a copy, all bytes."""
    source: str
    """Evidence for the messages: ``metadata``, ``cpu_records``, ``run`` (counts from the recorder), ``copy`` (size of
    the copy) or ``ends`` (`ringprof.analysis.transfers.match_by_end`); ``none`` without evidence."""

    @property
    def duration_ns(self) -> int:
        """Length of the transfer."""
        return self.end_ns - self.start_ns


_Content = tuple[Group, tuple[Message, ...], tuple[Message, ...], int | None]
"""Group, sends, receives and bytes sent of a transfer, which all transfers with the same calls share."""


def transfers_of(classified: Classified, activities: Int64, rank: int) -> list[Transfer]:
    """Return the communication kernels and peer-to-peer copies among ``activities`` (ascending indices), by start."""
    trace, rows = classified.trace, classified.trace.activities
    chosen = activities[is_kind(classified.kind[activities], *COMMUNICATION)]
    start = rows.start_ns[chosen]
    columns = (
        chosen, classified.kind[chosen], classified.evidence[chosen], start, np.maximum(rows.end_ns[chosen], start),
        rows.stream[chosen], _launch_order(classified)[chosen], rows.size_bytes[chosen],
    )  # fmt: skip
    contents: dict[tuple[int, int], _Content] = {}
    result = []
    for activity, code, evidence, begin, end, stream, launched, size in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        kind, calls = KINDS[code], classified.calls.get(activity, ())
        content: _Content
        if kind == "copy_engine":
            content, source = ((None, ()), (), (), size if size != NONE else None), "copy"
        else:
            # Equal batches share one calls object (`classify`), which lives as long as ``classified``.
            if (id(calls), code) not in contents:
                sends, receives = _messages(calls, kind, rank)
                sent_bytes = _sent_bytes(calls, kind, sends, rank)
                contents[id(calls), code] = _group_of(trace, calls), sends, receives, sent_bytes
            content, source = contents[id(calls), code], EVIDENCE[evidence] if calls else "none"
        result.append(Transfer(rank, activity, kind, begin, end, stream, launched, *content, source))
    return result


def _launch_order(classified: Classified) -> Int64:
    """Return the position of each activity's launch among all launches of activities; `NONE` where unknown."""
    order = np.full(len(classified.launch), NONE, np.int64)
    launched = np.flatnonzero(classified.launch != NONE)
    order[launched[np.argsort(classified.launch[launched], kind="stable")]] = np.arange(len(launched))
    return order


def _group_of(trace: Trace, calls: Calls) -> Group:
    """Return the process group of the first call; without calls, an unknown group."""
    for call in calls:
        ranks = call.group_ranks or trace.groups.get(call.group or "", ())
        return call.group, tuple(ranks)
    return None, ()


def _messages(calls: Calls, kind: str, rank: int) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Return the sends and receives of a send/recv kernel."""
    sends, receives = [], []
    for call in calls if kind == "send_recv" else ():
        rotation = single_peer(call, rank)
        if rotation:
            sends.append(Message(rotation[0], size_bytes_of(call, call.in_elements)))
            receives.append(Message(rotation[1], size_bytes_of(call, call.out_elements)))
        elif "send" in call.name and call.destination_rank is not None:
            sends.append(Message(call.destination_rank, size_bytes_of(call, call.in_elements)))
        elif "recv" in call.name and call.source_rank is not None:
            receives.append(Message(call.source_rank, size_bytes_of(call, call.out_elements)))
    return tuple(sends), tuple(receives)


def size_bytes_of(call: CommRecord, elements: int | None) -> int | None:
    """Return the bytes of a call's elements; None where number or data type is unknown."""
    if elements is None or call.dtype is None:
        return None
    name = call.dtype.lower()
    element = 1 if name.startswith("float8") else _ELEMENT_BYTES.get(name)
    return None if element is None else elements * element


def _sent_bytes(calls: Calls, kind: str, sends: tuple[Message, ...], rank: int) -> int | None:
    """Return the bytes that leave the rank; None where a size is unknown."""
    sizes = (
        [message.size_bytes for message in sends]
        if kind == "send_recv"
        else [_collective_sent_bytes(call, kind, rank) for call in calls]
    )
    has_unknown_peer = kind == "send_recv" and any(
        "send" in call.name and call.destination_rank is None for call in calls
    )
    if not calls or has_unknown_peer or any(size is None for size in sizes):
        return None
    return sum(size for size in sizes if size is not None)


def _collective_sent_bytes(call: CommRecord, kind: str, rank: int) -> int | None:
    """Return the bytes that one rank sends in a collective, by its ring or pairwise algorithm."""
    size, group_size = size_bytes_of(call, call.in_elements), call.group_size or len(call.group_ranks or ())
    if kind == "all_to_all" and call.name in ("send", "recv"):
        return size if call.name == "send" and call.destination_rank != rank else 0
    if size is None or group_size < 1:
        return None
    if kind == "all_gather":
        return size * (group_size - 1)
    if kind == "all_reduce":
        return 2 * size * (group_size - 1) // group_size
    rows: int = sum(call.in_split)
    if kind == "all_to_all" and rows and call.group_ranks and rank in call.group_ranks:
        own_rows = call.in_split[call.group_ranks.index(rank)] if len(call.in_split) == group_size else 0
        return size * (rows - own_rows) // rows
    if kind in {"all_to_all", "reduce_scatter"}:
        return size * (group_size - 1) // group_size
    return None
