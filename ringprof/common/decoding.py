"""Decoding of JSON from untrusted files: every defect becomes a one-line error.

Every reader of a user's file decodes it here, so no file can end a command with a traceback.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from ringprof.common.files import read_bytes
from ringprof.errors import InputError

UNREADABLE = (ValueError, msgspec.MsgspecError, RecursionError)
"""Errors that decoders raise: bad syntax, values of the wrong type, text that is not UTF-8, values nested too deeply.

msgspec's own errors are ValueErrors from version 0.21 on."""
FILE_BYTES = 16 << 20
"""Maximum size of a file that is read whole where no option sets a limit.

Decoded, a hostile file takes 20 times its size."""
DEEPEST = 64
"""Maximum nesting depth of lists and objects in a value of any type."""
_TOO_DEEP = "its values are nested too deeply"

_Value = TypeVar("_Value")


def decode_json(
    data: bytes | memoryview, kind: type[_Value], name: str, what: str, error: type[InputError] = InputError
) -> _Value:
    """Decode JSON as a value of type ``kind``.

    Raises ``error`` with a message that names the source (``name``) and its expected content (``what``, with its
    article).
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except UNREADABLE as problem:
        raise error(f"{name}: not {what}: {reason(problem)}") from None


def decode_file(name: str, kind: type[_Value], what: str, most: int = FILE_BYTES) -> _Value:
    """Read and decode a JSON file of at most ``most`` bytes. Raises `InputError`."""
    return decode_json(read_small(name, what, most), kind, name, what)


def read_small(name: str, what: str, most: int = FILE_BYTES) -> bytes:
    """Read a file of at most ``most`` bytes. Raises `InputError`."""
    data = read_bytes(name, most + 1)
    if len(data) > most:
        raise InputError(f"{name}: not {what}: larger than {most:,} bytes")
    return data


def reason(problem: Exception) -> str:
    """Say in one line why a value cannot be decoded."""
    if isinstance(problem, RecursionError):
        return _TOO_DEEP
    if isinstance(problem, UnicodeError):
        return "its text is not UTF-8"
    return " ".join(str(problem).split())


def refuse_deep(value: Any) -> None:
    """Raise ValueError if a value is nested deeper than `DEEPEST`: it could not be written again."""
    layer = [value]
    for _ in range(DEEPEST + 1):
        containers = [item for item in layer if isinstance(item, dict | list)]
        if not containers:
            return
        layer = [
            item
            for container in containers
            for item in (container.values() if isinstance(container, dict) else container)
        ]
    raise ValueError(_TOO_DEEP)
