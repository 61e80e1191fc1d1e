"""Shapes of operators, as ``record_shapes=True`` writes them, to FLOPs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ringprof.trace.kineto.event_list import EMPTY, UNREADABLE, Event
from ringprof.trace.memory import bytes_of_text
from ringprof.trace.operator_flops import Call, OperatorFlops, Sizes, flops_of

_LONGEST_ARGUMENTS = 1 << 14
"""Bytes of one operator's arguments that are read: PyTorch writes hundreds."""
_MOST_REMEMBERED = 1 << 12


class _ShapeArgs(msgspec.Struct, gc=False):
    """The recorded arguments of an operator, still as text: most calls repeat those of an earlier one."""

    dims: msgspec.Raw = msgspec.field(default=EMPTY, name="Input Dims")
    old_dims: msgspec.Raw = msgspec.field(default=EMPTY, name="Input dims")
    types: msgspec.Raw = msgspec.field(default=EMPTY, name="Input type")
    values: msgspec.Raw = msgspec.field(default=EMPTY, name="Concrete Inputs")


_decode = msgspec.json.Decoder(_ShapeArgs).decode
_Texts = tuple[bytes, bytes, bytes]


def has_shapes(event: Event) -> bool:
    """Whether an operator's arguments hold shapes."""
    return b'"Input ' in bytes(event.args)


class ShapeReader:
    """Counts the FLOPs of operator events; equal arguments are parsed once. ``take`` counts memory."""

    def __init__(self, take: Callable[[int], None]) -> None:
        self._take = take
        self._known: dict[tuple[str, _Texts], OperatorFlops | None] = {}

    def flops_of(self, event: Event) -> OperatorFlops | None:
        """Return the FLOPs of an operator; None where its shapes are not recorded or do not tell them."""
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
        if key in self._known:
            return self._known[key]
        found = flops_of(key[0], _call(texts))
        if len(self._known) < _MOST_REMEMBERED:
            self._take(sum(bytes_of_text(text.decode("latin-1")) for text in texts))
            self._known[key] = found
        return found


def _call(texts: _Texts) -> Call:
    dims, types, values = map(_list, texts)
    return Call([_sizes(one) for one in dims], list(map(_text, types)), list(map(_text, values)))


def _list(text: bytes) -> list[Any]:
    """Return a JSON list; empty where the text is none."""
    try:
        return msgspec.json.decode(text, type=list[Any]) if text else []
    except UNREADABLE:
        return []


def _sizes(value: object) -> Sizes:
    """Return a tensor's shape; empty for a list of tensors and for what is no shape."""
    sound = isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)
    return tuple(value) if sound and isinstance(value, list) else ()


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
