"""What a trace says about itself: rank, groups, devices, base time; from the text before and behind the events."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from ringprof.json_object import JsonObject
from ringprof.trace.checks import LARGEST_NS, RANKS_LIMIT
from ringprof.trace.columns import Device
from ringprof.trace.kineto.collectives import whole_number
from ringprof.trace.kineto.event_list import EMPTY, LIST_KEY, UNREADABLE, UTF8_MARK

_LENIENT = json.JSONDecoder(strict=False)

MOST_DEVICES = 1 << 12
"""No host has more: the others are passed over."""

_NEXT_DOCUMENT = re.compile(rb"\}\s*(?=[{\[])")
"""Where one document ends and another begins, as in concatenated files. Sound JSON has this only inside strings."""

_SALVAGED_CHARACTERS = 4 << 20
_ATTEMPTS = 3
"""So often a field is looked for in damaged text: each attempt may read to the end."""


class _Fields(msgspec.Struct):
    """What is wanted of the top level; what else is there is passed over."""

    deviceProperties: msgspec.Raw = EMPTY
    distributedInfo: msgspec.Raw = EMPTY
    baseTimeNanoseconds: msgspec.Raw = EMPTY
    host_name: msgspec.Raw = EMPTY
    traceEvents: msgspec.Raw = EMPTY


_WANTED = _Fields.__struct_fields__[:-1]
_decode = msgspec.json.Decoder(_Fields).decode


class Metadata(msgspec.Struct, frozen=True):
    """The facts about a trace that are not events."""

    base_ns: int = 0
    rank: int | None = None
    world_size: int | None = None
    host: str | None = None
    groups: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)
    devices: list[Device] = msgspec.field(default_factory=list)
    on_gpu: bool = False
    """Whether devices are listed or, where there is no list at all, the backend is theirs; gloo alone runs on CPU."""


class Found(NamedTuple):
    """Top-level fields."""

    values: JsonObject
    sound: bool
    """Whether all of the text was sound JSON."""


def read_fields(text: bytes) -> Found:
    """The wanted fields of an object."""
    try:
        given = msgspec.structs.asdict(_decode(text))
        return Found({key: json.loads(bytes(given[key])) for key in _WANTED if given[key] is not EMPTY}, True)
    except UNREADABLE:
        return Found(_salvaged(text.decode("utf-8", "replace")), False)


def closed(head: bytes) -> bytes:
    """What ends before the key of the event list, as an object."""
    head = head.removeprefix(UTF8_MARK).strip().removesuffix(b",")
    return head + b"}" if head else b"{}"


def opened(tail: bytes) -> bytes:
    """What begins behind the event list's closing bracket, as an object."""
    tail = tail.strip().removeprefix(b",").lstrip()
    return b"{" + (tail or b"}")


def read_tail(tail: bytes, *, bare_list: bool) -> tuple[Found, bool]:
    """Read the fields behind the event list, and tell whether another list of events follows.

    Where one does, a field counts only if it stands in the same document as the first list and no other list does:
    else it may be a field of another rank.
    """
    if bare_list and tail.lstrip().startswith((b"[", b"{")):
        return Found({}, True), True
    text = opened(tail)
    found, second = read_fields(text), LIST_KEY.search(tail) is not None
    for end in islice(_NEXT_DOCUMENT.finditer(text), 0 if found.sound else _ATTEMPTS):
        document = text[: end.start() + 1]
        first = read_fields(document)
        if first.sound:
            return (Found({}, True) if LIST_KEY.search(document) else first), True
    return (Found({}, found.sound) if second else found), second


def _salvaged(text: str) -> JsonObject:
    """Read the fields that matter, each by itself; one that is there with several values may be another trace's."""
    text = text[:_SALVAGED_CHARACTERS]
    values: JsonObject = {}
    for key in _WANTED:
        readable = []
        for found in islice(re.finditer(rf'"{key}"\s*:\s*', text), _ATTEMPTS):
            with suppress(*UNREADABLE):
                readable.append(_LENIENT.raw_decode(text, found.end())[0])
        if readable and all(value == readable[0] for value in readable):
            values[key] = readable[0]
    if "distributedInfo" not in values:
        pairs = set(re.findall(r'"(rank|world_size)"\s*:\s*"?(\w+)', text))
        named = Counter(name for name, _ in pairs)
        values["distributedInfo"] = {name: value for name, value in pairs if named[name] == 1}
    return values


def metadata_of(values: Mapping[str, Any]) -> Metadata:
    """The facts, from the top-level fields; whatever has an unexpected shape is left out."""
    info = values.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    base = whole_number(values.get("baseTimeNanoseconds"))
    host = values.get("host_name")
    return Metadata(
        base_ns=base if base is not None and 0 <= base < LARGEST_NS else 0,
        rank=_rank(info.get("rank")),
        world_size=_rank(info.get("world_size")),
        host=_text(host) or None,
        groups=_groups(info.get("pg_config")),
        devices=_devices(values.get("deviceProperties")),
        on_gpu=_on_gpu(values.get("deviceProperties"), _text(info.get("backend"))),
    )


def _on_gpu(devices: object, backend: str) -> bool:
    if isinstance(devices, list):
        return bool(devices) and backend not in ("gloo", "mpi")
    return "nccl" in backend


def _rank(value: object) -> int | None:
    number = whole_number(value)
    return number if number is not None and 0 <= number < RANKS_LIMIT else None


def _groups(config: object) -> dict[str, tuple[int, ...]]:
    groups: dict[str, tuple[int, ...]] = {}
    described: dict[str, set[tuple[int, ...]]] = {}
    for entry in config if isinstance(config, list) else []:
        if not isinstance(entry, dict) or "pg_name" not in entry or not isinstance(entry.get("ranks"), list):
            continue
        known = tuple(rank for rank in map(_rank, entry["ranks"]) if rank is not None)
        # An empty list is how PyTorch writes the group of all ranks in some versions.
        if known and _rank(entry.get("pg_size")) in (None, len(known)):
            groups[_text(entry["pg_name"])] = known
            described.setdefault(_text(entry.get("pg_desc")), set()).add(known)
    # A description that is one group's stands for it, too: people know their groups by it.
    return {text: next(iter(ranks)) for text, ranks in described.items() if text and len(ranks) == 1} | groups


def _devices(listed: object) -> list[Device]:
    entries = [one for one in listed[:MOST_DEVICES] if isinstance(one, dict)] if isinstance(listed, list) else []
    devices = []
    for place, entry in enumerate(entries):
        index = _rank(entry.get("id"))
        devices.append(Device(place if index is None else index, _text(entry.get("name"))))
    return devices


def _text(value: object) -> str:
    """Text without lone surrogates, which no UTF-8 file can hold; empty for what is no text or number."""
    return str(value).encode("utf-8", "replace").decode() if isinstance(value, str | int) else ""
