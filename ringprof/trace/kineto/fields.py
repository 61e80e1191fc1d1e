"""Metadata of a trace (rank, groups, devices, base time), from the text before and behind the events."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import msgspec

from ringprof.common.json_object import JsonObject
from ringprof.trace.checks import LARGEST_NS, RANKS_LIMIT
from ringprof.trace.columns import Device
from ringprof.trace.kineto.collectives import whole_number
from ringprof.trace.kineto.event_list import BOUNDARY, EMPTY, LIST_KEY, UNREADABLE, UTF8_MARK, last_boundary

_LENIENT = json.JSONDecoder(strict=False)

MOST_DEVICES = 1 << 12
"""Upper bound on the devices of a host; further entries are ignored."""

_NEXT_DOCUMENT = re.compile(rb"\}\s*(?=[{\[])")
"""Pattern of the boundary between two concatenated documents. Valid JSON has it only inside strings."""

_SALVAGED_CHARACTERS = 4 << 20
_LOOKED_AT = 1 << 13
"""Bytes at each end of a piece of the event list in which repeated keys are looked for."""
_ATTEMPTS = 3
"""Number of attempts to find a field in damaged text; each attempt may read to the end."""


class _Fields(msgspec.Struct):
    """Top-level fields that are read; all others are ignored."""

    deviceProperties: msgspec.Raw = EMPTY
    distributedInfo: msgspec.Raw = EMPTY
    baseTimeNanoseconds: msgspec.Raw = EMPTY
    host_name: msgspec.Raw = EMPTY
    traceEvents: msgspec.Raw = EMPTY


_WANTED = _Fields.__struct_fields__[:-1]
_decode = msgspec.json.Decoder(_Fields).decode


class Metadata(msgspec.Struct, frozen=True):
    """Metadata of a trace, apart from its events."""

    base_ns: int = 0
    rank: int | None = None
    world_size: int | None = None
    host: str | None = None
    groups: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)
    devices: list[Device] = msgspec.field(default_factory=list)
    on_gpu: bool = False
    """Whether the run used GPUs: devices are listed and the backend is not gloo or MPI, or the list is missing and the
    backend is NCCL."""


def read_fields(text: bytes) -> tuple[JsonObject, bool]:
    """Read the fields of a JSON object; from damaged text, those that can be recovered.

    Return the values by key, and whether the whole text was valid JSON.
    """
    try:
        raw_fields = msgspec.structs.asdict(_decode(text))
        values = {key: json.loads(bytes(raw_fields[key])) for key in _WANTED if raw_fields[key] is not EMPTY}
        return values, True
    except UNREADABLE:
        # Python's decoder accepts NaN and Infinity, and control characters in strings; no UTF-8 holds lone surrogates.
        with suppress(*UNREADABLE):
            fields = _LENIENT.decode(text.decode())
            json.dumps(fields, ensure_ascii=False).encode()
            return {key: fields[key] for key in _WANTED if key in fields}, True
        return _salvage_fields(text.decode("utf-8", "replace")), False


def repeated_keys(text: bytes) -> set[str]:
    """Return the keys that stand twice in one object of a JSON text with different values; none where it is damaged."""
    repeated: set[str] = set()

    def fields_of(pairs: list[tuple[str, Any]]) -> JsonObject:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            repeated.update(key for key, value in pairs if fields[key] != value)
        return fields

    with suppress(*UNREADABLE):
        json.loads(text, object_pairs_hook=fields_of)
    return repeated


def repeated_at_ends(events: bytes) -> set[str]:
    """Return `repeated_keys` of a piece's events, of those in its first and last `_LOOKED_AT` bytes."""
    if len(events) <= 2 * _LOOKED_AT:
        return repeated_keys(b"[" + events + b"]")
    end, start = last_boundary(events[:_LOOKED_AT]), BOUNDARY.search(events, len(events) - _LOOKED_AT)
    first = repeated_keys(b"[" + events[: end[0]] + b"]") if end else set()
    return first | (repeated_keys(b"[" + events[start.end() :] + b"]") if start else set())


def close_head(head: bytes) -> bytes:
    """Complete the text before the key of the event list to a JSON object."""
    head = head.removeprefix(UTF8_MARK).strip().removesuffix(b",")
    return head + b"}" if head else b"{}"


def read_tail(tail: bytes, *, bare_list: bool) -> tuple[JsonObject, bool, bool]:
    """Read the fields behind the event list like `read_fields`, and return whether another list of events follows.

    If one follows, a field counts only if it is in the same document as the first list and no other list is.
    Otherwise the field may belong to another rank.
    """
    if bare_list and tail.lstrip().startswith((b"[", b"{")):
        return {}, True, True
    # Completed to a JSON object.
    text = b"{" + (tail.strip().removeprefix(b",").lstrip() or b"}")
    values, sound = read_fields(text)
    for boundary in islice(_NEXT_DOCUMENT.finditer(text), 0 if sound else _ATTEMPTS):
        document = text[: boundary.start() + 1]
        first_values, first_sound = read_fields(document)
        if first_sound:
            return {} if LIST_KEY.search(document) else first_values, True, True
    second = LIST_KEY.search(tail) is not None
    return {} if second else values, sound, second


def _salvage_fields(text: str) -> JsonObject:
    """Read each field separately from damaged text; skip a field with several values, which may be another trace's."""
    text = text[:_SALVAGED_CHARACTERS]
    values: JsonObject = {}
    for key in _WANTED:
        readable = []
        for match in islice(re.finditer(rf'"{key}"\s*:\s*', text), _ATTEMPTS):
            with suppress(*UNREADABLE):
                readable.append(_LENIENT.raw_decode(text, match.end())[0])
        if readable and all(value == readable[0] for value in readable):
            values[key] = readable[0]
    if "distributedInfo" not in values:
        pairs = set(re.findall(r'"(rank|world_size)"\s*:\s*"?(\w+)', text))
        counts = Counter(name for name, _ in pairs)
        values["distributedInfo"] = {name: value for name, value in pairs if counts[name] == 1}
    return values


def metadata_of(values: Mapping[str, Any]) -> Metadata:
    """Build the metadata from the top-level fields; values of an unexpected type are ignored."""
    info = values.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    base = whole_number(values.get("baseTimeNanoseconds"))
    devices, backend = values.get("deviceProperties"), _text(info.get("backend"))
    return Metadata(
        base_ns=base if base is not None and 0 <= base < LARGEST_NS else 0,
        rank=_rank(info.get("rank")),
        world_size=_rank(info.get("world_size")),
        host=_text(values.get("host_name")) or None,
        groups=_groups(info.get("pg_config")),
        devices=_devices(devices),
        # gloo and MPI count as CPU even if devices are listed.
        on_gpu=bool(devices) and backend not in ("gloo", "mpi") if isinstance(devices, list) else "nccl" in backend,
    )


def _rank(value: object) -> int | None:
    number = whole_number(value)
    return number if number is not None and 0 <= number < RANKS_LIMIT else None


def _groups(config: object) -> dict[str, tuple[int, ...]]:
    """Return the global ranks of each process group, by name and by unambiguous description."""
    groups: dict[str, tuple[int, ...]] = {}
    described: dict[str, set[tuple[int, ...]]] = {}
    for entry in config if isinstance(config, list) else []:
        if not isinstance(entry, dict) or "pg_name" not in entry or not isinstance(entry.get("ranks"), list):
            continue
        ranks_of_entry = tuple(rank for rank in map(_rank, entry["ranks"]) if rank is not None)
        # Some versions of PyTorch write the group of all ranks as an empty list.
        if ranks_of_entry and _rank(entry.get("pg_size")) in (None, len(ranks_of_entry)):
            groups[_text(entry["pg_name"])] = ranks_of_entry
            described.setdefault(_text(entry.get("pg_desc")), set()).add(ranks_of_entry)
    # Users know their groups by description, so one that belongs to a single group names it as well.
    return {text: next(iter(ranks)) for text, ranks in described.items() if text and len(ranks) == 1} | groups


def _devices(listed: object) -> list[Device]:
    entries = [item for item in listed[:MOST_DEVICES] if isinstance(item, dict)] if isinstance(listed, list) else []
    devices = []
    for position, entry in enumerate(entries):
        index = _rank(entry.get("id"))
        devices.append(Device(position if index is None else index, _text(entry.get("name"))))
    return devices


def _text(value: object) -> str:
    """Return text without lone surrogates, which UTF-8 cannot encode; empty unless ``value`` is text or an integer."""
    return str(value).encode("utf-8", "replace").decode() if isinstance(value, str | int) else ""
