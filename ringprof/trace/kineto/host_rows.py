"""Storage of CPU operators, ranges and CUDA calls that may explain idle time; dropped if memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np

from ringprof.common.limits import MemoryLimitError
from ringprof.trace.columns import NONE, Int8, Int32, Int64, enclosing_rows
from ringprof.trace.host_events import Columns, rows_in_idle
from ringprof.trace.kineto.event_list import Event
from ringprof.trace.kineto.times import NOT_A_TIME, to_ns
from ringprof.trace.memory import bytes_of_rows, bytes_of_text

LONGEST_NAME = 200
"""Characters kept of a host event's name."""


class HostRows:
    """Host events as columns, with a separate list of names: in the end, most events and names are not needed."""

    def __init__(self, take: Callable[[int], None]) -> None:
        """``take`` charges bytes to the memory budget and raises `MemoryLimitError`; negative sizes are refunds."""
        self.dropped = False
        """Whether memory ran out, so that no host events are kept."""
        self._take = take
        self._charged = 0
        self._names: dict[str, int] = {}
        self._chunks: list[tuple[Int64, Int64, Int32, Int64, Int8]] = []

    def drop(self) -> bool:
        """Drop all host events and refund their memory; return False if there was none to refund."""
        charged, self._charged, self.dropped = self._charged, 0, True
        self._names, self._chunks = {}, []
        if charged:
            self._take(-charged)
        return bool(charged)

    def keep(self, events: Sequence[Event], threads: Int64, categories: Int8) -> None:
        """Add events with their threads and `HostEvents.category`; events without usable times are left out."""
        if self.dropped or not events:
            return
        start, duration = to_ns([event.ts for event in events]), to_ns([event.dur for event in events])
        known = len(self._names)
        names = [self._names.setdefault((e.name or "")[:LONGEST_NAME], len(self._names)) for e in events]
        new_names = islice(reversed(self._names), len(self._names) - known)
        size = bytes_of_rows("host_events", len(events)) + sum(map(bytes_of_text, new_names))
        self._charged += size
        try:
            self._take(size)
        except MemoryLimitError:
            self.drop()
            return
        valid = (start != NOT_A_TIME) & (duration > 0)
        columns = (start, np.where(valid, start + duration, 0), np.array(names, np.int32), threads, categories)
        self._chunks.append(tuple(column[valid] for column in columns))

    def columns(
        self, base_ns: int, activities: Columns, launches: Columns, name_index: Callable[[str], int]
    ) -> dict[str, Int64]:
        """Select the rows that explain idle time, sorted by start; ``name_index`` returns a name's index in the trace.

        ``base_ns`` is added to all times, as it is to those of ``activities`` and ``launches``.
        """
        if not self._chunks:
            return {}
        start, end, name, thread, category = (np.concatenate(column) for column in zip(*self._chunks, strict=True))
        order = np.argsort(start, kind="stable")
        rows = {"start_ns": start + base_ns, "end_ns": end + base_ns, "name": name, "thread": thread}
        rows = {key: column[order] for key, column in {**rows, "category": category}.items()}
        selected = rows_in_idle(rows, activities, launches)
        rows = {key: column[selected] for key, column in rows.items()}
        texts = list(self._names)
        used, inverse = np.unique(rows["name"], return_inverse=True)
        rows["name"] = np.array([name_index(texts[index]) for index in used.tolist()], np.int32)[inverse.ravel()]
        return rows


# --- arrows of torch.profiler from a forward operator to the autograd node that it created, run in the backward pass -
FORWARD_ARROW = "fwdbwd"
"""Category of the two events of such an arrow."""
_BYTES = 3 * 4 * 8


class ForwardArrows:
    """Both ends of all forward-to-backward arrows of one trace, collected event by event."""

    def __init__(self, take: Callable[[int], None]) -> None:
        """``take`` charges bytes to the memory budget."""
        self._take = take
        self._chunks: list[tuple[Int64, Int64, Int64, Int64]] = []

    def keep(self, events: Sequence[Event]) -> None:
        """Add events of phase ``s`` (forward operator) or ``f`` (call of the node); incomplete ones are left out."""
        whole = [event for event in events if type(event.id) is int and type(event.tid) is int]
        whole = [event for event in whole if abs(event.id) < 2**63 and abs(event.tid) < 2**63]  # type: ignore[arg-type]
        if not whole:
            return
        self._take(_BYTES * len(whole))
        time = to_ns([event.ts for event in whole])
        columns = (
            np.array([event.id for event in whole], np.int64),
            time,
            np.array([event.tid for event in whole], np.int64),
            np.array([event.ph == "f" for event in whole], np.int64),
        )
        self._chunks.append(tuple(column[time != NOT_A_TIME] for column in columns))

    def columns(self, base_ns: int, calls: dict[str, Int64]) -> dict[str, Int64]:
        """Return time and thread of the forward operator of each call of a node: ``forward_ns``, ``forward_thread``.

        ``calls`` has the columns ``start_ns``, ``end_ns`` and ``thread``, sorted by start. An arrow belongs to the
        innermost call around its end; calls without one get `NONE`. ``base_ns`` is added to the arrows' times.
        """
        forward_ns, forward_thread = (np.full(len(calls["start_ns"]), NONE, np.int64) for _ in range(2))
        if self._chunks:
            number, time, thread, is_end = (np.concatenate(column) for column in zip(*self._chunks, strict=True))
            tails, heads = np.flatnonzero(is_end == 0), np.flatnonzero(is_end)
            tails = tails[np.argsort(number[tails], kind="stable")]
            position = np.searchsorted(number[tails], number[heads])
            position = np.minimum(position, max(len(tails) - 1, 0))
            heads, position = (heads, position) if len(tails) else (heads[:0], position[:0])
            paired = number[tails[position]] == number[heads]
            heads, tails = heads[paired], tails[position[paired]]
            # The profiler puts the end of an arrow at the node's own first operator, before any nested call of a node.
            rows = calls["start_ns"], calls["end_ns"], calls["thread"]
            call = enclosing_rows(rows, time[heads] + base_ns, thread[heads])
            inside = call != NONE
            forward_ns[call[inside]] = time[tails[inside]] + base_ns
            forward_thread[call[inside]] = thread[tails[inside]]
        return {"forward_ns": forward_ns, "forward_thread": forward_thread}
