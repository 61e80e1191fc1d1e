"""Decoding of NVTX payloads that NCCL attaches to its calls: communicator, bytes and peer, as a `CommRecord`.

NCCL (``src/include/nvtx_payload_schemas.h``) names each field of a payload; Nsight Systems lists its offset and type.
Nsight Systems puts 32 bytes before the payload: its domain, schema and size, 64 bits each, and 64 further bits.
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
"""Upper bound on the bytes of a payload; those of NCCL have at most 80, including the header."""
_FIELDS = {
    "NCCL communicator ID": "communicator", "Message size [bytes]": "size_bytes", "Bytes": "size_bytes",
    "Peer rank": "peer", "No. of ranks": "ranks", "Rank": "rank",
}  # fmt: skip
_INT, _UINT, _LONG, _ULONG = Struct("<i"), Struct("<I"), Struct("<q"), Struct("<Q")
# NVTX_PAYLOAD_ENTRY_TYPE_... of NVTX, with the sizes of 64-bit Linux.
_TYPES = {
    5: _INT, 6: _UINT, 7: _LONG, 8: _ULONG, 9: _LONG, 10: _ULONG,
    15: _INT, 16: _UINT, 17: _LONG, 18: _ULONG, 22: _ULONG,
}  # fmt: skip

Layouts = dict[int, dict[str, tuple[int, Struct] | None]]
"""Offset and type of each field in the payload, by schema and field; None where the export contradicts itself."""


def add_entries(layouts: Layouts, entries: Iterable[tuple[Any, ...]]) -> None:
    """Add rows of ``NVTX_PAYLOAD_SCHEMA_ENTRIES``: schema, name, type, offset. Fields unknown to NCCL are skipped."""
    for schema, name, kind, offset in entries:
        field, offset = _FIELDS.get(name) if isinstance(name, str) else None, 0 if offset is None else offset
        if field and isinstance(schema, int) and isinstance(offset, int) and 0 <= offset < LONGEST_PAYLOAD:
            layout = (offset, _TYPES[kind]) if isinstance(kind, int) and kind in _TYPES else None
            known = layouts.setdefault(schema, {})
            known[field] = layout if known.get(field, layout) == layout else None


def decode(data: object, layouts: Layouts) -> dict[str, int]:
    """Return the fields of a payload by name (`_FIELDS`); empty if bytes are missing or the schema is unknown."""
    if not isinstance(data, bytes) or not _HEADER.size <= len(data) <= LONGEST_PAYLOAD:
        return {}
    _, schema, size, _ = _HEADER.unpack_from(data)
    end = _HEADER.size + size
    if end > len(data):
        return {}
    return {
        field: layout[1].unpack_from(data, _HEADER.size + layout[0])[0]
        for field, layout in layouts.get(schema, {}).items()
        if layout is not None and _HEADER.size + layout[0] + layout[1].size <= end
    }


class NcclCall(msgspec.Struct, frozen=True):
    """One NCCL call, as described by its NVTX range."""

    name: str
    """Lower case, without ``nccl``: ``send``, ``allreduce``, ``comminitrank`` ..."""
    communicator: int
    size_bytes: int | None = None
    peer: int | None = None
    """Rank of the other side within the communicator."""
    ranks: int | None = None
    """Number of ranks of the communicator."""
    rank: int | None = None
    """Rank of the caller within the communicator."""


def nccl_call(name: str, fields: Mapping[str, int]) -> NcclCall | None:
    """Build a call from the name of its NVTX range and its payload; None if it is not NCCL's or has no communicator."""
    if not name.startswith("nccl") or not fields.get("communicator"):
        return None
    return NcclCall(name.removeprefix("nccl").lower(), **fields)


def communicator_members(calls: Iterable[tuple[NcclCall, int]]) -> dict[int, tuple[int, ...]]:
    """Return the processes of each communicator in rank order, from calls with their processes.

    Only calls that state rank and size count: those that create and destroy a communicator. One is left out unless
    every rank belongs to exactly one process, and every process to one rank.
    """
    sizes: dict[int, set[int]] = {}
    processes_of: dict[int, dict[int, set[int]]] = {}
    for call, process in calls:
        if call.ranks is not None and call.rank is not None and 0 <= call.rank < call.ranks <= RANKS_LIMIT:
            sizes.setdefault(call.communicator, set()).add(call.ranks)
            processes_of.setdefault(call.communicator, {}).setdefault(call.rank, set()).add(process)
    members = {}
    for communicator, by_rank in processes_of.items():
        processes = tuple(min(by_rank[rank]) for rank in sorted(by_rank))
        unique = all(len(candidates) == 1 for candidates in by_rank.values())
        if unique and len(set(processes)) == len(by_rank) and sizes[communicator] == {len(by_rank)}:
            members[communicator] = processes
    return members


def record_of_call(call: NcclCall, ranks: tuple[int, ...]) -> CommRecord | None:
    """Build the communication record of a call; None if it has no message.

    ``ranks``: global ranks of the communicator, in the order of its own ranks.
    """
    size, n = call.size_bytes, len(ranks)
    if size is None or size < 0 or size * n > ELEMENTS_LIMIT:
        return None
    peer = ranks[call.peer] if call.peer is not None and 0 <= call.peer < n else None
    # NCCL reports the bytes that one rank receives in a reduce-scatter, and the bytes per peer in an all-to-all.
    in_bytes = size * n if call.name in ("reducescatter", "alltoall") else size
    return CommRecord(
        name=call.name, group=f"{call.communicator % 2**64:#018x}", group_description=None, group_ranks=ranks,
        group_size=n, in_elements=in_bytes, out_elements=size, dtype="byte",
        source_rank=peer if call.name == "recv" else None, destination_rank=peer if call.name == "send" else None,
    )  # fmt: skip
