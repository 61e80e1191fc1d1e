"""FLOPs of operator events whose shapes are recorded (``record_shapes=True``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ringprof.trace.kineto.event_list import EMPTY, UNREADABLE, Event
from ringprof.trace.memory import bytes_of_text
from ringprof.trace.operator_flops import Call, OperatorFlops, Sizes, flops_of

_LONGEST_ARGUMENTS = 1 << 14
"""Largest size in bytes of the arguments of one operator that are read; PyTorch writes hundreds of bytes."""
_CACHE_SIZE = 1 << 12


class _ShapeArgs(msgspec.Struct, gc=False):
    """Recorded arguments of an operator as raw text: most calls repeat the arguments of an earlier call."""

    dims: msgspec.Raw = msgspec.field(default=EMPTY, name="Input Dims")
    old_dims: msgspec.Raw = msgspec.field(default=EMPTY, name="Input dims")
    types: msgspec.Raw = msgspec.field(default=EMPTY, name="Input type")
    values: msgspec.Raw = msgspec.field(default=EMPTY, name="Concrete Inputs")


_decode = msgspec.json.Decoder(_ShapeArgs).decode
_Texts = tuple[bytes, bytes, bytes]


def has_shapes(event: Event) -> bool:
    """Return whether the arguments of an operator event include shapes."""
    return b'"Input ' in bytes(event.args)


class ShapeReader:
    """Counter of the FLOPs of operator events; parses equal arguments once. ``take`` charges bytes to the budget."""

    def __init__(self, take: Callable[[int], None]) -> None:
        self._take = take
        self._cache: dict[tuple[str, _Texts], OperatorFlops | None] = {}

    def flops_of(self, event: Event) -> OperatorFlops | None:
        """Count the FLOPs of an operator; None if its shapes are not recorded or do not determine them."""
        if event.args is EMPTY:
            return None
        try:
            args = _decode(event.args)
        except UNREADABLE:
            return None
        dims = args.dims if args.dims is not EMPTY else args.old_dims
        texts = (bytes(dims), bytes(args.types), bytes(args.values))
        if not texts[0] or sum(map(len, texts)) > _LONGEST_ARGUMENTS:
            return None
        key = event.name or "", texts
        if key in self._cache:
            return self._cache[key]
        dimensions, types, values = map(_list, texts)
        call = Call([*map(_sizes, dimensions)], [*map(_text, types)], [*map(_text, values)])
        flops = flops_of(key[0], call)
        if len(self._cache) < _CACHE_SIZE:
            self._take(sum(bytes_of_text(text.decode("latin-1")) for text in texts))
            self._cache[key] = flops
        return flops


def _list(text: bytes) -> list[Any]:
    """Decode a JSON list; empty if the text is not one."""
    try:
        return msgspec.json.decode(text, type=list[Any]) if text else []
    except UNREADABLE:
        return []


def _sizes(value: object) -> Sizes:
    """Return the shape of a tensor; empty for a list of tensors and for any other value."""
    is_shape = isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)
    return tuple(value) if is_shape else ()  # type: ignore[arg-type]


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
