"""Model of Perfetto's trace processor reading a JSON trace, by its documented rules.

Events are taken by time from 0 on, those of one time in the order of the file. A slice is put into the open slice of
its track: slices that have ended are closed before, and a slice that would end after the one it began in is dropped. An
arrow joins the slices that were opened last on their tracks; one that ends before it began is dropped. It goes from the
slice that begins earlier to the one that begins later, whatever was meant.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Slice:
    process: int
    track: int
    name: str
    start_ns: int
    end_ns: int
    args: dict[str, Any]
    parent: Slice | None = None


@dataclass
class Arrow:
    category: str
    source: Slice
    target: Slice
    starts_ns: int
    ends_ns: int


@dataclass
class Model:
    slices: list[Slice] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)
    counters: dict[tuple[int, str], list[tuple[int, float]]] = field(default_factory=dict)
    lost: Counter[str] = field(default_factory=Counter)
    """Number of events that would be dropped, by reason."""


def nanoseconds(time_us: float) -> int:
    """Convert a time as the trace processor does: multiply by 1000 and truncate."""
    return int(time_us * 1000.0)


def read(events: list[dict[str, Any]]) -> Model:
    model = Model()
    stacks: dict[tuple[int, int], list[Slice]] = {}
    arrow_starts: dict[tuple[str, str, int], tuple[Slice, int]] = {}
    for event in sorted((e for e in events if e["ph"] != "M"), key=lambda e: nanoseconds(e["ts"])):
        time_ns, stack = nanoseconds(event["ts"]), stacks.setdefault((event["pid"], event["tid"]), [])
        if time_ns < 0:
            model.lost["event before time 0"] += 1
        elif event["ph"] == "X":
            _open_slice(model, stack, event, time_ns)
        elif event["ph"] == "C":
            for unit, value in event["args"].items():
                model.counters.setdefault((event["pid"], f"{event['name']} {unit}"), []).append((time_ns, value))
        else:
            _add_arrow_end(model, stack, event, time_ns, arrow_starts)
    model.lost["arrow without an end"] += len(arrow_starts) - len(model.arrows)
    return model


def _open_slice(model: Model, stack: list[Slice], event: dict[str, Any], start_ns: int) -> None:
    end_ns = start_ns + nanoseconds(event["dur"])
    while stack:
        top = stack[-1]
        both_instant = top.start_ns == top.end_ns and start_ns == end_ns
        if top.end_ns < start_ns or (top.end_ns == start_ns and not both_instant):
            stack.pop()
            continue
        if start_ns < top.end_ns < end_ns:
            model.lost["slice that overlaps another"] += 1
            return
        break
    opened = Slice(
        event["pid"], event["tid"], event["name"], start_ns, end_ns, event["args"], stack[-1] if stack else None
    )
    stack.append(opened)
    model.slices.append(opened)


def _add_arrow_end(
    model: Model,
    stack: list[Slice],
    event: dict[str, Any],
    time_ns: int,
    arrow_starts: dict[tuple[str, str, int], tuple[Slice, int]],
) -> None:
    key = event["cat"], event["name"], event["id"]
    if not stack:
        model.lost["arrow at no slice"] += 1
    elif event["ph"] == "s":
        model.lost["arrow begun twice"] += key in arrow_starts
        arrow_starts[key] = stack[-1], time_ns
    elif key not in arrow_starts:
        model.lost["arrow that ends before it begins"] += 1
    else:
        source, start_ns = arrow_starts[key]
        first, second = sorted((source, stack[-1]), key=lambda candidate: candidate.start_ns)
        model.arrows.append(Arrow(event["cat"], first, second, start_ns, time_ns))
