"""What a trace says about itself: rank, groups, devices, base time; from the text before and behind the events."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import PurePath
from typing import Any

from ringprof.trace.collectives import RANKS_LIMIT, whole_number
from ringprof.trace.columns import Device
from ringprof.trace.events import UNREADABLE, UTF8_MARK, decode_fields
from ringprof.trace.times import LARGEST_NS

_LENIENT = json.JSONDecoder(strict=False)

_USED = ("traceEvents", "deviceProperties", "distributedInfo", "baseTimeNanoseconds", "trace_id", "traceName")
_SALVAGED = (*_USED[1:], "host_name", "schemaVersion", "displayTimeUnit")
_SHORT = 4096
_USED_BYTES = 16 << 20
_SALVAGED_CHARACTERS = 4 << 20
_ATTEMPTS = 3
"""So often a field is looked for in damaged text: each attempt may read to the end."""


@dataclass(frozen=True)
class Metadata:
    """The facts about a trace that are not events."""

    base_ns: int = 0
    rank: int | None = None
    world_size: int | None = None
    backend: str | None = None
    host: str | None = None
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    devices: list[Device] = field(default_factory=list)
    on_gpu: bool = False
    """Whether devices are listed or, where there is no list at all, the backend is theirs; gloo alone runs on CPU."""
    trace_id: str | None = None
    other: dict[str, Any] = field(default_factory=dict)


def read_fields(head: bytes, tail: bytes) -> tuple[dict[str, Any], bool]:
    """The top-level fields around the event list, and whether all of that text was sound JSON.

    ``head`` ends before the key of the event list, ``tail`` begins behind its closing bracket.
    """
    values: dict[str, Any] = {}
    sound = True
    for text in (_closed(head, b"}"), _opened(tail)):
        if text is None:
            continue
        try:
            fields = decode_fields(text).items()
            values.update((key, json.loads(bytes(raw))) for key, raw in fields if len(bytes(raw)) <= _most_bytes(key))
        except UNREADABLE:
            sound = False
            values.update(_salvaged(text.decode("utf-8", "replace")))
    return values, sound


def _closed(head: bytes, bracket: bytes) -> bytes | None:
    head = head.removeprefix(UTF8_MARK).strip().removesuffix(b",")
    return head + bracket if head else None


def _opened(tail: bytes) -> bytes | None:
    tail = tail.strip().removeprefix(b",").lstrip()
    return b"{" + tail if tail not in (b"", b"}") else None


def _most_bytes(key: str) -> int:
    return _USED_BYTES if key in _USED else _SHORT


def _salvaged(text: str) -> dict[str, Any]:
    """The fields that matter, each read by itself."""
    values: dict[str, Any] = {}
    text = text[:_SALVAGED_CHARACTERS]
    for key in _SALVAGED:
        for found in islice(re.finditer(rf'"{key}"\s*:\s*', text), _ATTEMPTS):
            try:
                values[key], _ = _LENIENT.raw_decode(text, found.end())
            except UNREADABLE:
                continue
            break
    if "distributedInfo" not in values:
        values["distributedInfo"] = dict(re.findall(r'"(rank|world_size|backend)"\s*:\s*"?(\w+)', text))
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
        backend=info["backend"] if isinstance(info.get("backend"), str) else None,
        host=host if isinstance(host, str) and host else None,
        groups=_groups(info.get("pg_config")),
        devices=_devices(values.get("deviceProperties")),
        on_gpu=_on_gpu(values.get("deviceProperties"), str(info.get("backend"))),
        trace_id=values["trace_id"] if isinstance(values.get("trace_id"), str) else None,
        other={key: value for key, value in values.items() if key not in _USED and len(repr(value)) <= _SHORT},
    )


def _on_gpu(devices: object, backend: str) -> bool:
    if isinstance(devices, list):
        return bool(devices) and backend not in ("gloo", "mpi")
    return "nccl" in backend


def _natural(value: object) -> int | None:
    number = whole_number(value)
    return number if number is not None and 0 <= number < 2**31 else None


def _rank(value: object) -> int | None:
    number = _natural(value)
    return number if number is not None and number < RANKS_LIMIT else None


def _groups(config: object) -> dict[str, tuple[int, ...]]:
    groups: dict[str, tuple[int, ...]] = {}
    described: dict[str, set[tuple[int, ...]]] = {}
    for entry in config if isinstance(config, list) else []:
        if not isinstance(entry, dict) or "pg_name" not in entry or not isinstance(entry.get("ranks"), list):
            continue
        ranks = [_rank(rank) for rank in entry["ranks"][:RANKS_LIMIT]]
        known = tuple(rank for rank in ranks if rank is not None)
        # An empty list is how PyTorch writes the group of all ranks in some versions.
        size = _natural(entry.get("pg_size"))
        if known and (size is None or size == len(known)):
            groups[str(entry["pg_name"])] = known
            described.setdefault(str(entry.get("pg_desc") or ""), set()).add(known)
    # A description that is one group's stands for it, too: people know their groups by it.
    return {text: next(iter(ranks)) for text, ranks in described.items() if text and len(ranks) == 1} | groups


def _devices(listed: object) -> list[Device]:
    devices: list[Device] = []
    for entry in listed if isinstance(listed, list) else []:
        if isinstance(entry, dict):
            index = _natural(entry.get("id"))
            name = entry.get("name")
            devices.append(
                Device(
                    index=len(devices) if index is None else index,
                    name=name if isinstance(name, str) else "",
                    memory_bytes=whole_number(entry.get("totalGlobalMem")),
                    multiprocessors=whole_number(entry.get("numSms")),
                )
            )
    return devices


_RANK_NAMES = (
    re.compile(r"rank[\s_.=\-]*(\d{1,7})", re.IGNORECASE),
    re.compile(r"(?:^|[_.\-])(?:worker|gpu|proc|r)[_.\-]?(\d{1,7})(?=[_.\-]|$)", re.IGNORECASE),
    re.compile(r"^(?:trace[_.\-]?)?(\d{1,7})(?=[_.\-]|$)", re.IGNORECASE),
)


def rank_in_name(path: str) -> int | None:
    """The rank that a file's name tells ("rank3.json.gz", "trace_r3.json", "rank_3/trace.json"), else None."""
    parts = PurePath(path).parts
    for pattern in _RANK_NAMES:
        found = pattern.search(parts[-1]) if parts else None
        if found:
            return _rank(int(found.group(1)))
    found = _RANK_NAMES[0].search(parts[-2]) if len(parts) > 1 else None
    return _rank(int(found.group(1))) if found else None
