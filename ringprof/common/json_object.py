"""Untyped JSON values that other programs read or write, and their text."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec

JsonObject = dict[str, Any]
"""A JSON object: a part of a report, an event of a trace, a row of a table."""
Params = dict[str, Any]
"""A strategy's own parameters by name: strings from the command line until `resolve` has converted them."""
Options = dict[str, Any]
"""Values of a command's options by their names."""


def json_text(value: object) -> str:
    """Format a value as indented JSON in ASCII, which every locale can print. NaN and infinity become null."""
    plain = json.loads(json.dumps(msgspec.to_builtins(value)), parse_constant=lambda _: None)
    return json.dumps(plain, indent=1) + "\n"


def rows_json(schema: str, rows: object) -> str:
    """Format the rows of a listing as JSON, with the name of their schema (docs/file-formats.md)."""
    return json_text({"schema": schema, "rows": rows})


_Value = TypeVar("_Value")


def to_json(value: object) -> bytes:
    """Encode structs as JSON, for `from_json`. msgspec's own encoder refuses file names that are not UTF-8."""
    return json.dumps(msgspec.to_builtins(value)).encode()


def from_json(data: bytes, kind: type[_Value]) -> _Value:
    """Decode a value of type ``kind`` that `to_json` has encoded."""
    return msgspec.convert(json.loads(data), kind)
