"""What has no type of its own, as it is written for other programs or by them."""

from __future__ import annotations

import json
from typing import Any

import msgspec

JsonObject = dict[str, Any]
"""A JSON object: a part of a report, an event of a trace, a row of a table."""
Params = dict[str, Any]
"""A strategy's own parameters by name: text from the command line until `resolve` has typed them."""
Options = dict[str, Any]
"""What a command was given, by the names of its options."""


def json_text(value: object) -> str:
    """A value as JSON for people and programs, in ASCII so that no locale can spoil it. NaN and infinity are null."""
    plain = json.loads(json.dumps(msgspec.to_builtins(value)), parse_constant=lambda _: None)
    return json.dumps(plain, indent=1) + "\n"


def rows_json(schema: str, rows: object) -> str:
    """The rows of a listing as `json_text`, under the name of their form (docs/metrics.md)."""
    return json_text({"schema": schema, "rows": rows})
