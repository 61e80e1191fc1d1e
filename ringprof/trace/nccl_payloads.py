"""What NCCL says of its calls to NVTX: communicator, bytes and peer, from the bytes of a payload to a `CommRecord`.

NCCL (``src/include/nvtx_payload_schemas.h``) names each field of a payload; Nsight Systems lists where a field lies and
of what type it is, and puts 32 bytes before the payload: its domain, schema and size, 64 bits each, and 64 bits more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from struct import Struct
from typing import Any

import msgspec

from ringprof.trace.checks import ELEMENTS_LIMIT, RANKS_LIMIT
from ringprof.trace.columns import CommRecord

_HEADER = Struct("<QQQQ")
LONGEST_PAYLOAD = 256
"""NCCL's have at most 80 bytes, the header among them."""
_FIELDS = {
    "NCCL communicator ID": "communicator", "Message size [bytes]": "size_bytes", "Bytes": "size_bytes",
    "Peer rank": "peer", "No. of ranks": "ranks", "Rank": "place",
}  # fmt: skip
_INT, _UINT, _LONG, _ULONG = Struct("<i"), Struct("<I"), Struct("<q"), Struct("<Q")
# Of NVTX's NVTX_PAYLOAD_ENTRY_TYPE_..., by the sizes of 64-bit Linux.
_TYPES = {
    5: _INT, 6: _UINT, 7: _LONG, 8: _ULONG, 9: _LONG, 10: _ULONG,
    15: _INT, 16: _UINT, 17: _LONG, 18: _ULONG, 22: _ULONG,
}  # fmt: skip

Layouts = dict[int, dict[str, tuple[int, Struct] | None]]
"""Schema -> field -> where it lies in the payload; None where the export contradicts itself."""


def add_entries(layouts: Layouts, entries: Iterable[tuple[Any, ...]]) -> None:
    """Add rows of ``NVTX_PAYLOAD_SCHEMA_ENTRIES``: schema, name, type, offset. What is none of NCCL's is left out."""
    for schema, name, kind, offset in entries:
        field, offset = _FIELDS.get(name) if isinstance(name, str) else None, 0 if offset is None else offset
        if field and isinstance(schema, int) and isinstance(offset, int) and 0 <= offset < LONGEST_PAYLOAD:
            found = (offset, _TYPES[kind]) if isinstance(kind, int) and kind in _TYPES else None
            known = layouts.setdefault(schema, {})
            known[field] = found if known.get(field, found) == found else None


def decode(data: object, layouts: Layouts) -> dict[str, int]:
    """The fields of a payload, by our names; none where the bytes are not whole or their schema is not known."""
    if not isinstance(data, bytes) or not _HEADER.size <= len(data) <= LONGEST_PAYLOAD:
        return {}
    _, schema, size, _ = _HEADER.unpack_from(data)
    end = _HEADER.size + size
    if end > len(data):
        return {}
    return {
        field: place[1].unpack_from(data, _HEADER.size + place[0])[0]
        for field, place in layouts.get(schema, {}).items()
        if place is not None and _HEADER.size + place[0] + place[1].size <= end
    }


class NcclCall(msgspec.Struct, frozen=True):
    """One call of NCCL's."""

    name: str
    """Lower case, without ``nccl``: ``send``, ``allreduce``, ``comminitrank`` ..."""
    communicator: int
    size_bytes: int | None = None
    peer: int | None = None
    """Place in the communicator."""
    ranks: int | None = None
    """How many the communicator has."""
    place: int | None = None
    """Of the caller in it."""


def nccl_call(name: str, fields: Mapping[str, int]) -> NcclCall | None:
    """A call by the name of its NVTX range; None where that is none of NCCL's, or no communicator is told."""
    if not name.startswith("nccl") or not fields.get("communicator"):
        return None
    return NcclCall(name.removeprefix("nccl").lower(), **fields)


class CommunicatorPlaces:
    """Which process has which place in each communicator, as the calls tell that make and destroy it."""

    def __init__(self) -> None:
        self._sizes: dict[int, set[int]] = {}
        self._places: dict[int, dict[int, set[int]]] = {}

    def add(self, call: NcclCall, process: int) -> None:
        """Take what a call tells."""
        if call.ranks is None or call.place is None or not 0 <= call.place < call.ranks <= RANKS_LIMIT:
            return
        self._sizes.setdefault(call.communicator, set()).add(call.ranks)
        self._places.setdefault(call.communicator, {}).setdefault(call.place, set()).add(process)

    def members(self) -> dict[int, tuple[int, ...]]:
        """The processes of each communicator by place; only of those whose every place is one process's, and its only
        one."""
        found = {}
        for communicator, places in self._places.items():
            processes = tuple(min(places[place]) for place in sorted(places))
            alone = all(len(one) == 1 for one in places.values()) and len(set(processes)) == len(places)
            if alone and self._sizes[communicator] == {len(places)}:
                found[communicator] = processes
        return found


def record_of_call(call: NcclCall, ranks: tuple[int, ...]) -> CommRecord | None:
    """The record of a call that carries a message; ``ranks``: global ranks of its communicator by place."""
    size, n = call.size_bytes, len(ranks)
    if size is None or size < 0 or size * n > ELEMENTS_LIMIT:
        return None
    peer = ranks[call.peer] if call.peer is not None and 0 <= call.peer < n else None
    # NCCL tells what one rank receives of a reduce-scatter, and what goes to one rank of an all-to-all.
    whole = size * n if call.name in ("reducescatter", "alltoall") else size
    return CommRecord(
        name=call.name,
        group=f"{call.communicator % 2**64:#018x}",
        group_description=None,
        group_ranks=ranks,
        group_size=n,
        in_elements=whole,
        out_elements=size,
        dtype="byte",
        source_rank=peer if call.name == "recv" else None,
        destination_rank=peer if call.name == "send" else None,
    )
