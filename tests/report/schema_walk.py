"""Fields of a JSON report that its schema does not describe."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

SCHEMA: dict[str, Any] = json.loads(
    files("ringprof.report").joinpath("schema/report-1.schema.json").read_text(encoding="utf-8")
)


def alternatives(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a node of the schema and what it refers to or combines."""
    yield node
    if "$ref" in node:
        yield from alternatives(SCHEMA["$defs"][node["$ref"].removeprefix("#/$defs/")])
    for key in ("anyOf", "oneOf", "allOf"):
        for other in node.get(key, ()):
            yield from alternatives(other)


def undescribed(value: Any, node: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield the path of every field in ``value`` that ``node`` has no property with a description for."""
    nodes = list(alternatives(node))
    if isinstance(value, list):
        items = [other["items"] for other in nodes if isinstance(other.get("items"), dict)]
        for item in value:
            yield from undescribed(item, {"anyOf": items}, f"{path}[]")
    elif isinstance(value, dict):
        for key, field in value.items():
            inside = f"{path}.{key}" if path else key
            properties = [other["properties"][key] for other in nodes if key in other.get("properties", ())]
            by_key = [other["additionalProperties"] for other in nodes
                      if isinstance(other.get("additionalProperties"), dict)]  # fmt: skip
            if not any("description" in other for other in properties) and not by_key:
                yield inside
            yield from undescribed(field, {"anyOf": properties or by_key}, inside)


def properties_without_description(node: Any, path: str = "") -> Iterator[str]:
    """Yield the path of every property in the schema that has no description."""
    if isinstance(node, list):
        for item in node:
            yield from properties_without_description(item, path)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key == "properties":
                yield from (f"{path}.{name}" for name, field in value.items() if "description" not in field)
            yield from properties_without_description(value, f"{path}.{key}")
