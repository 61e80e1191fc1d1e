"""Decoder of pickles of plain values: dictionaries with text as keys, lists, tuples, text, numbers, booleans and None.

A pickle is a program for a small machine. Flight Recorder dumps need about thirty of its instructions, none of which
can name a function or a class. Every other instruction is refused here, so an untrusted pickle runs no code. The
standard library's decoder is not used: without its dangerous instructions, too, a pickle of ten bytes can make it
allocate tens of gigabytes.
"""

from __future__ import annotations

import struct
from typing import Any

from ringprof.common.limits import MemoryLimitError
from ringprof.errors import InputError

_MARK = object()
_FIXED = {0x4B: "<B", 0x4D: "<H", 0x4A: "<i", 0x47: ">d"}
"""Opcodes followed by a number of fixed size: BININT1, BININT2, BININT, BINFLOAT."""
_TEXTS = {0x58: "<I", 0x8C: "<B", 0x8D: "<Q"}
"""Opcodes followed by a length and UTF-8 text: BINUNICODE, SHORT_BINUNICODE, BINUNICODE8."""
_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False}
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_GETS, _PUTS = {0x6A: "<I"}, {0x71: "<B", 0x72: "<I"}


def is_pickle(head: bytes) -> bool:
    """Return whether the first bytes of a file begin a pickle of protocol 2 to 5: a dictionary or a frame."""
    return len(head) > 3 and head[0] == 0x80 and 2 <= head[1] <= 5 and (head[2] == 0x7D or head[2] == 0x95)


def decode_values(data: bytes, name: str, most_bytes: int) -> Any:
    """Decode a pickle of plain values that takes at most about ``most_bytes`` of memory beside its text.

    ``name`` is the file's name in messages. Raises `InputError` for damage, for every instruction that could run code,
    and where ``most_bytes`` do not suffice.
    """
    try:
        return _decode(data, name, most_bytes)
    except InputError:
        raise
    except (IndexError, struct.error):
        raise InputError(f"{name}: the pickle is cut off or damaged") from None
    except (TypeError, ValueError, KeyError, AttributeError) as problem:
        text = "its text is not UTF-8" if isinstance(problem, UnicodeError) else "its instructions do not fit together"
        raise InputError(f"{name}: the pickle is damaged: {text}") from None


_ENTRY_BYTES = 120
"""Memory of an empty container, or of a value that is remembered, in bytes: such an instruction has one byte."""


def _decode(data: bytes, name: str, most_bytes: int) -> Any:
    left = most_bytes // _ENTRY_BYTES
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    position = 0

    def number(form: str) -> Any:
        nonlocal position
        (value,) = struct.unpack_from(form, data, position)
        position += struct.calcsize(form)
        return value

    def since_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    def add(keys: list[Any], values: list[Any]) -> None:
        # The hash of a deeply nested tuple overflows the stack, and numbers can be chosen so that their hashes collide.
        if {*map(type, keys)} - {str}:
            raise InputError(f"{name}: a dictionary of the pickle has a key that is no text")
        if type(stack[-1]) is not dict:
            raise TypeError
        stack[-1].update(zip(keys, values, strict=True))

    while True:
        if left < 0:
            raise MemoryLimitError(
                f"{name}: needs more than {most_bytes:,} bytes of memory; if you trust the file, raise the limit with"
                " --max-memory"
            )
        code = data[position]
        position += 1
        if code == 0x68:  # BINGET, most frequent by far
            stack.append(memo[data[position]])
            position += 1
        elif code in _TEXTS:
            size = number(_TEXTS[code])
            if size > len(data) - position:
                raise IndexError
            stack.append(data[position : position + size].decode("utf-8"))
            position += size
        elif code in _PUTS:
            memo[number(_PUTS[code])] = stack[-1]
            left -= 1
        elif code in _GETS:
            stack.append(memo[number(_GETS[code])])
        elif code in _FIXED:
            stack.append(number(_FIXED[code]))
        elif code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
        elif code == 0x8A:  # LONG1
            size = number("<B")
            stack.append(int.from_bytes(data[position : position + size], "little", signed=True))
            position += size
        elif code == 0x28:  # MARK
            marks.append(len(stack))
            left -= 1
        elif code == 0x7D:  # EMPTY_DICT
            stack.append({})
            left -= 1
        elif code == 0x5D:  # EMPTY_LIST
            stack.append([])
            left -= 1
        elif code == 0x75:  # SETITEMS
            items = since_mark()
            add(items[::2], items[1::2])
        elif code == 0x65:  # APPENDS
            items = since_mark()
            _list(stack[-1]).extend(items)
        elif code == 0x73:  # SETITEM
            value, key = stack.pop(), stack.pop()
            add([key], [value])
        elif code == 0x61:  # APPEND
            value = stack.pop()
            _list(stack[-1]).append(value)
        elif code in _TUPLES:
            count = _TUPLES[code]
            if count > len(stack):
                raise IndexError
            stack[-count:] = [tuple(stack[-count:])]
            left -= 1
        elif code == 0x74:  # TUPLE
            stack.append(tuple(since_mark()))
        elif code == 0x29:  # EMPTY_TUPLE
            stack.append(())
        elif code == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
            left -= 1
        elif code == 0x80:  # PROTO
            position += 1
        elif code == 0x95:  # FRAME
            position += 8
        elif code == 0x2E:  # STOP
            return stack.pop()
        else:
            raise InputError(
                f"{name}: a pickle with an instruction ({code:#04x}) that plain values do not need: it is not decoded,"
                " since such a pickle can run code"
            )


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError
    return value
