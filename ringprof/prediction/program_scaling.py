"""Programs of a strategy at another sequence length, from its programs at one length and a few of its ranks at the
other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from ringprof.record.dryrun.schedule import AttentionOp, CommStart, CommWait, MemoryOp, Op, Program, StreamWait

_KINDS: dict[type, tuple[str, ...]] = {
    AttentionOp: (
        "phase", "batch", "q", "kv", "heads", "kv_heads", "head_dim", "causal", "pairs", "sequences", "stream", "calls"
    ),
    MemoryOp: ("name", "bytes", "strided", "stream", "calls"),
    CommStart: ("channel", "phase", "operation", "messages", "stream", "calls"),
    CommWait: ("stream", "calls"), StreamWait: ("stream", "after", "calls"),
}  # fmt: skip
"""Fields of an operation other than its label, its number and its members."""
_Key = tuple[object, ...]


def rescaled(programs: Mapping[int, Program], examples: Sequence[Program]) -> Callable[[int], Program] | None:
    """Return a function from a rank to its program at the examples' length; None if no such function is known.

    ``programs`` are those of all ranks at one length, ``examples`` those of a few ranks at another. The examples say
    which operations of a ring step at one length become which ones at the other, where merges may take other kernels.
    That must be unambiguous, and turn each example's program into exactly the example. The function raises `KeyError`
    for a rank with a step that no example has. Work and peak memory are those of the example that holds most: ranks
    differ in them.
    """
    templates: dict[_Key, list[Op]] = {}
    for example in examples:
        steps, example_steps = (list(_steps(ops)) for ops in (programs[example.rank].ops, example.ops))
        if len(steps) != len(example_steps):
            return None
        for step, example_step in zip(steps, example_steps, strict=True):
            templates.setdefault(_key(step), example_step)

    def ops_of(rank: int) -> list[Op]:
        return [op for step in _steps(programs[rank].ops) for op in _at_other_length(step, templates[_key(step)])]

    if any(ops_of(example.rank) != example.ops for example in examples):
        return None
    largest = max(examples, key=lambda example: example.peak_bytes)
    return lambda rank: msgspec.structs.replace(largest, rank=rank, ops=ops_of(rank))


def _steps(ops: Sequence[Any]) -> Iterator[list[Any]]:
    """Split a program into its ring steps; an operation that names none belongs to the step before it."""
    step: list[Any] = []
    current = ""
    for op in ops:
        name = _step_name(getattr(op, "label", ""))
        if name and name != current:
            if step:
                yield step
            step, current = [], name
        step.append(op)
    if step:
        yield step


def _key(step: Sequence[Any]) -> _Key:
    """Return what the operations of a step are, whatever its number, its rank and the numbers of its transfers."""
    return tuple(
        (type(op), _without_numbers(getattr(op, "label", "")), *(getattr(op, name) for name in _KINDS[type(op)]))
        for op in step
    )


def _at_other_length(step: Sequence[Any], template: Sequence[Any]) -> Iterator[Op]:
    """Yield a step's operations at another length, where a step of the same key has those of ``template``."""
    own = {kind: iter([op for op in step if type(op) is kind]) for kind in (CommStart, CommWait)}
    number = next(filter(None, (_step_name(getattr(op, "label", "")) for op in step)), "")
    for op in template:
        label = getattr(op, "label", "")
        changes: dict[str, Any] = {}
        if _step_name(label):
            changes["label"] = number + label[len(_step_name(label)):]
        if isinstance(op, CommStart | CommWait):
            transfer = next(own[type(op)], op)
            changes["id"] = transfer.id
            if isinstance(op, CommStart):
                changes |= {"members": transfer.members, "communicator": transfer.communicator}
        yield msgspec.structs.replace(op, **changes) if changes else op


@lru_cache(maxsize=4096)
def _step_name(label: str) -> str:
    """Return phase and number of a label's ring step, such as ``bwd/step=3``; empty if it has none."""
    match = re.match(r".*step=\d+", label)
    return match[0] if match else ""


@lru_cache(maxsize=4096)
def _without_numbers(label: str) -> str:
    return re.sub(r"\d+", "", label)
