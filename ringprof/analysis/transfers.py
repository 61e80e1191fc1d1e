"""What each communication kernel carried: its messages with peers and bytes, and its process group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringprof.analysis.classify import EVIDENCE, Classified, single_peer
from ringprof.analysis.rules import CODE, COMMUNICATION, KINDS
from ringprof.trace.columns import NONE, Collective, Int64, Trace

_ELEMENT_BYTES = {
    "byte": 1, "char": 1, "bool": 1, "short": 2, "int": 4, "long": 8,
    "half": 2, "bfloat16": 2, "float": 4, "double": 8, "complexfloat": 8, "complexdouble": 16,
}  # fmt: skip

Group = tuple[str | None, tuple[int, ...]]
"""A process group as all its ranks name it: its name, and its global ranks where they are known."""


@dataclass(frozen=True)
class Message:
    """One send or one receive within a kernel."""

    peer: int
    """Global rank."""
    size_bytes: int | None


@dataclass(frozen=True)
class Transfer:
    """One communication kernel of one rank."""

    rank: int
    activity: int
    """Index into the trace's activities."""
    kind: str
    start_ns: int
    end_ns: int
    stream: int
    launched: int
    """Place in the launch order of the rank's device work, or `NONE`."""
    group: Group
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    sent_bytes: int | None
    """Bytes that leave this rank: of a collective, by its ring or pairwise algorithm."""
    source: str
    """Which evidence the messages come from: ``metadata`` or ``cpu_records``; ``none`` where nothing tells."""

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


def transfers_of(classified: Classified, activities: Int64, rank: int) -> list[Transfer]:
    """The communication kernels among ``activities``, by start; copies by the copy engine are not among them."""
    trace = classified.trace
    carried = np.isin(classified.kind, [CODE[kind] for kind in COMMUNICATION if kind != "copy_engine"])
    order = _launch_order(classified)
    result = []
    for activity in activities[carried[activities]].tolist():
        calls = classified.calls.get(activity, ())
        kind = KINDS[classified.kind[activity]]
        sends, receives = _messages(calls, kind, rank)
        result.append(
            Transfer(
                rank=rank,
                activity=activity,
                kind=kind,
                start_ns=int(trace.activities.start_ns[activity]),
                end_ns=max(int(trace.activities.end_ns[activity]), int(trace.activities.start_ns[activity])),
                stream=int(trace.activities.stream[activity]),
                launched=int(order[activity]),
                group=_group(trace, calls),
                sends=sends,
                receives=receives,
                sent_bytes=_sent(calls, kind, sends, rank),
                source=EVIDENCE[classified.evidence[activity]] if calls else "none",
            )
        )
    return result


def _launch_order(classified: Classified) -> Int64:
    """Position of each activity's launch among all launches that made one, NONE where unknown."""
    order = np.full(len(classified.launch), NONE, np.int64)
    joined = np.flatnonzero(classified.launch != NONE)
    order[joined[np.argsort(classified.launch[joined], kind="stable")]] = np.arange(len(joined))
    return order


def _group(trace: Trace, calls: tuple[Collective, ...]) -> Group:
    for call in calls:
        ranks = call.group_ranks or trace.groups.get(call.group or "", ())
        return call.group, tuple(ranks)
    return None, ()


def _messages(calls: tuple[Collective, ...], kind: str, rank: int) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    sends, receives = [], []
    for call in calls if kind == "send_recv" else ():
        rotation = single_peer(call, rank)
        if rotation:
            sends.append(Message(rotation[0], _size(call, call.in_elements)))
            receives.append(Message(rotation[1], _size(call, call.out_elements)))
        elif "send" in call.name and call.destination_rank is not None:
            sends.append(Message(call.destination_rank, _size(call, call.in_elements)))
        elif "recv" in call.name and call.source_rank is not None:
            receives.append(Message(call.source_rank, _size(call, call.out_elements)))
    return tuple(sends), tuple(receives)


def _size(call: Collective, elements: int | None) -> int | None:
    if elements is None or call.dtype is None:
        return None
    name = call.dtype.lower()
    element = 1 if name.startswith("float8") else _ELEMENT_BYTES.get(name)
    return None if element is None else elements * element


def _sent(calls: tuple[Collective, ...], kind: str, sends: tuple[Message, ...], rank: int) -> int | None:
    """Bytes that leave the rank; None where a size is not known."""
    sizes = [m.size_bytes for m in sends] if kind == "send_recv" else [_leaving(c, kind, rank) for c in calls]
    if not calls or any(size is None for size in sizes):
        return None
    return sum(size for size in sizes if size is not None)


def _leaving(call: Collective, kind: str, rank: int) -> int | None:
    """Bytes one rank sends in a collective of ``n`` ranks: what is not its own, by the ring's or pairwise count."""
    size, n = _size(call, call.in_elements), call.group_size or len(call.group_ranks or ())
    if size is None or n < 1:
        return None
    if kind == "all_gather":
        return size * (n - 1)
    if kind == "all_reduce":
        return 2 * size * (n - 1) // n
    rows: int = sum(call.in_split)
    if kind == "all_to_all" and rows and call.group_ranks and rank in call.group_ranks:
        own = call.in_split[call.group_ranks.index(rank)] if len(call.in_split) == n else 0
        return size * (rows - own) // rows
    if kind in {"all_to_all", "reduce_scatter"}:
        return size * (n - 1) // n
    return None
