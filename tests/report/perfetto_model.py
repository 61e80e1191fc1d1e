"""What Perfetto's trace processor makes of a JSON trace, modelled by its documented rules and not by what we write.

Events are taken by time from 0 on, those of one time in the order of the file. A slice is put into what is open on its
track: what has ended by then is closed before, and a slice that would end after the one it began in is dropped. An
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
    """What would be dropped, by why."""


def nanoseconds(time_us: float) -> int:
    """As the trace processor reads a time: multiplied and cut off."""
    return int(time_us * 1000.0)


def read(events: list[dict[str, Any]]) -> Model:
    model = Model()
    stacks: dict[tuple[int, int], list[Slice]] = {}
    begun: dict[tuple[str, str, int], tuple[Slice, int]] = {}
    for event in sorted((e for e in events if e["ph"] != "M"), key=lambda e: nanoseconds(e["ts"])):
        at, stack = nanoseconds(event["ts"]), stacks.setdefault((event["pid"], event["tid"]), [])
        if at < 0:
            model.lost["event before time 0"] += 1
        elif event["ph"] == "X":
            _open(model, stack, event, at)
        elif event["ph"] == "C":
            for unit, value in event["args"].items():
                model.counters.setdefault((event["pid"], f"{event['name']} {unit}"), []).append((at, value))
        else:
            _join(model, stack, event, at, begun)
    model.lost["arrow without an end"] += len(begun) - len(model.arrows)
    return model


def _open(model: Model, stack: list[Slice], event: dict[str, Any], at: int) -> None:
    end = at + nanoseconds(event["dur"])
    while stack:
        top = stack[-1]
        moments = top.start_ns == top.end_ns and at == end
        if top.end_ns < at or (top.end_ns == at and not moments):
            stack.pop()
            continue
        if at < top.end_ns < end:
            model.lost["slice that overlaps another"] += 1
            return
        break
    one = Slice(event["pid"], event["tid"], event["name"], at, end, event["args"], stack[-1] if stack else None)
    stack.append(one)
    model.slices.append(one)


def _join(
    model: Model,
    stack: list[Slice],
    event: dict[str, Any],
    at: int,
    begun: dict[tuple[str, str, int], tuple[Slice, int]],
) -> None:
    key = event["cat"], event["name"], event["id"]
    if not stack:
        model.lost["arrow at no slice"] += 1
    elif event["ph"] == "s":
        model.lost["arrow begun twice"] += key in begun
        begun[key] = stack[-1], at
    elif key not in begun:
        model.lost["arrow that ends before it begins"] += 1
    else:
        source, started = begun[key]
        first, second = sorted((source, stack[-1]), key=lambda one: one.start_ns)
        model.arrows.append(Arrow(event["cat"], first, second, started, at))
