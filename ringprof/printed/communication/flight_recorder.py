"""Reader of the dumps of PyTorch's Flight Recorder, as pickles or JSON, versions 2.0 to 2.x.

Source: ``torch/csrc/distributed/c10d/FlightRecorder.hpp`` and ``torch/distributed/flight_recorder`` of PyTorch.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from ringprof.common.decoding import UNREADABLE, decode_json, reason
from ringprof.common.json_object import JsonObject
from ringprof.common.limits import MemoryBudget, MemoryLimitError
from ringprof.errors import InputError
from ringprof.printed.communication.operations import (
    COMPLETED,
    SCHEDULED,
    STARTED,
    Group,
    Operation,
    RankLog,
    bytes_of,
)
from ringprof.printed.communication.pickle_values import decode_values, is_pickle
from ringprof.trace.columns import Message, Notice

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
_Sizes = list[Annotated[list[_Size], msgspec.Meta(max_length=64)]]
_Types = list[Annotated[str, msgspec.Meta(max_length=64)]]
_Text = Annotated[str, msgspec.Meta(max_length=4096)]
_WHAT = "a Flight Recorder dump"


class _Entry(msgspec.Struct, kw_only=True):
    record_id: _Count
    process_group: tuple[_Text, _Text]
    collective_seq_id: _Count
    p2p_seq_id: _Count
    profiling_name: _Text
    time_created_ns: _Count
    input_sizes: _Sizes = []
    input_dtypes: _Types = []
    output_sizes: _Sizes = []
    output_dtypes: _Types = []
    state: str
    time_discovered_started_ns: _Count | None = None
    time_discovered_completed_ns: _Count | None = None
    duration_ms: float | None = None
    retired: bool = False
    is_p2p: bool = False
    frames: list[Any] = []
    """Call stack, innermost frame first; entries share frames, which are read where they are needed."""


class _GroupConfig(msgspec.Struct):
    desc: _Text = ""
    ranks: str = ""


class _Dump(msgspec.Struct):
    version: _Text
    pg_config: dict[str, _GroupConfig] = {}
    comm_lib_version: _Text = ""
    nccl_version: _Text = ""
    entries: list[_Entry] = []


def parse_dump(data: bytes, name: str, rank: int, budget: MemoryBudget) -> RankLog:
    """Parse the content of one rank's dump, a pickle or JSON; ``name`` is the file's name in messages.

    Raises `InputError` that names the file and the field that is wrong, and where ``budget`` does not suffice.
    """
    if is_pickle(data):
        values = decode_values(data, name, budget.left)
        _refuse_expansion(values, name, budget)
        try:
            dump = msgspec.convert(values, _Dump)
        except UNREADABLE as problem:
            raise InputError(f"{name}: not {_WHAT}: {reason(problem)}") from None
    else:
        dump = decode_json(data, _Dump, name, _WHAT)
    if not re.fullmatch(r"2\.[0-9]{1,4}", dump.version):
        raise InputError(f"{name}: $.version is {dump.version[:20]!r}: only versions 2.x of {_WHAT} are read")
    groups = _groups(dump, name, budget)
    entries, notices = dump.entries, []
    from_start = not entries or entries[0].record_id == 0
    if not from_start:
        text = f"rank {rank}: {entries[0].record_id:,} earlier entries are not in the dump: overwritten by newer ones"
        why = "TORCH_FR_BUFFER_SIZE sets how many are kept, or left out of a dump of active operations"
        notices.append(Notice("overwritten", f"{text} ({why})", rank))
    if not entries:
        text = f"rank {rank}: the dump holds no operation: the rank posted none, or its Flight Recorder was off"
        notices.append(Notice("no_operations", f"{text} (TORCH_FR_BUFFER_SIZE)", rank))
    used = (groups[name] for name in dict.fromkeys(entry.process_group[0] for entry in entries))
    foreign = next((group for group in used if group.ranks and rank not in group.ranks), None)
    if foreign is not None:
        listed = ", ".join(map(str, foreign.ranks[:8])) + ", ..." * (len(foreign.ranks) > 8)
        text = f"{name}: rank {rank} by the file's name, but its group {foreign.label} has ranks {listed}"
        notices.append(Notice("wrong_rank", f"{text}: rename the file after the rank in the job", rank))
    library = dump.comm_lib_version or dump.nccl_version
    backend = entries[0].profiling_name.partition(":")[0] if entries else ""
    batches = sorted(_batches(entries), key=lambda batch: batch[1].record_id if not batch[0] else batch[0][0].record_id)
    locations: dict[int, str] = {}
    operations = [_operation(members, timed, groups, rank, locations) for members, timed in batches]
    return RankLog(
        path=name, source="flight_recorder", rank=rank, operations=operations,
        groups=groups, versions=tuple(text for text in (
            f"PyTorch Flight Recorder {dump.version}",
            f"{'NCCL ' if backend == 'nccl' else ''}{library}" if library else backend,
        ) if text),
        from_start=from_start, notices=notices,
    )  # fmt: skip


_LISTS = ("input_sizes", "output_sizes", "input_dtypes", "output_dtypes", "frames")
_VALUE_BYTES, _LENGTH_BYTES = 100, 40
_ENTRY_BYTES = 1_500
_RANK_BYTES = 60
"""Memory for a character of a list of ranks, while it is split."""


def _refuse_expansion(values: Any, name: str, budget: MemoryBudget) -> None:
    """Raise `MemoryLimitError` for a dump that refers to the same lists so often that their copies fill the memory."""
    entries = values.get("entries") if type(values) is dict else None
    total = 0
    for entry in entries if type(entries) is list else ():
        if type(entry) is dict:
            lists = [value for key in _LISTS if type(value := entry.get(key)) is list]
            shapes = [entry.get(key) for key in ("input_sizes", "output_sizes")]
            lengths = sum(len(shape) for sizes in shapes if type(sizes) is list for shape in sizes
                          if type(shape) is list)  # fmt: skip
            total += _ENTRY_BYTES + _VALUE_BYTES * sum(map(len, lists)) + _LENGTH_BYTES * lengths
        if total > budget.left:
            raise MemoryLimitError(
                f"{name}: needs more than {budget.left:,} bytes of memory; if you trust the file, raise the limit with"
                " --max-memory"
            )


def _groups(dump: _Dump, file: str, budget: MemoryBudget) -> dict[str, Group]:
    """Return the process groups by their names, with descriptions as labels where these are unambiguous.

    Raises `MemoryLimitError` where their ranks exceed ``budget``.
    """
    names: dict[str, str] = {name: config.desc for name, config in dump.pg_config.items()}
    names |= {entry.process_group[0]: entry.process_group[1] for entry in dump.entries}
    uses = Counter(names.values())
    groups = {}
    ranks_of: dict[str, tuple[int, ...]] = {"": ()}  # Groups of a pickle can share one long text.
    for name, label in names.items():
        text = dump.pg_config[name].ranks if name in dump.pg_config else ""
        if text not in ranks_of:
            budget.take(_RANK_BYTES * len(text), file)
            ranks_of[text] = tuple(int(digits) for digits in re.findall(r"[0-9]{1,7}", text))
        ranks = ranks_of[text]
        clear = label not in ("", "undefined") and uses[label] == 1
        groups[name] = Group(
            "world" if label == "default_pg" else label if clear else f"group {name}", ranks, len(ranks)
        )
    return groups


def _batches(entries: Iterable[_Entry]) -> Iterator[tuple[list[_Entry], _Entry]]:
    """Yield the entries of each operation, with the entry that has its times.

    The sends and receives of a batch are recorded one by one and without times; an entry named ``coalesced`` that
    follows has the times of all. Other entries stand for themselves.
    """
    batches: dict[tuple[str, bool], list[_Entry]] = {}
    for entry in entries:
        _, _, name = entry.profiling_name.partition(":")
        key = (entry.process_group[0], entry.is_p2p or name.startswith(("send ", "recv ")))
        kind = name.partition(" ")[0]
        if kind.endswith("coalesced"):
            members = [*batches.pop((key[0], True), []), *batches.pop((key[0], False), [])]
            alike = [member for member in members if _same_batch(member, entry)]
            yield from (([member], member) for member in members if member not in alike)
            yield alike or [entry], entry
            continue
        if entry.time_discovered_completed_ns or entry.time_discovered_started_ns or entry.retired:
            yield from (([member], member) for member in batches.pop(key, []))
            yield [entry], entry
            continue
        earlier = batches.setdefault(key, [])
        if earlier and not _same_batch(earlier[-1], entry):
            yield from (([member], member) for member in earlier)
            earlier = batches[key] = []
        earlier.append(entry)
    for members in batches.values():
        yield from (([member], member) for member in members)


def _same_batch(entry: _Entry, other: _Entry) -> bool:
    return entry.p2p_seq_id == other.p2p_seq_id and entry.collective_seq_id == other.collective_seq_id


_NAMES = {
    "_all_gather_base": "all_gather", "all_gather_into_tensor_coalesced": "all_gather", "allgather": "all_gather",
    "all_gather_single": "all_gather", "all_gather_v": "all_gather", "ALLGATHER_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter", "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter", "reduce_scatter_v": "reduce_scatter",
    "REDUCE_SCATTER_coalesced": "reduce_scatter", "allreduce": "all_reduce", "allreduce_coalesced": "all_reduce",
    "all_reduce_barrier": "barrier", "all_to_all_single": "all_to_all", "all_to_all_v_single": "all_to_all",
    "_broadcast_oop": "broadcast", "_reduce_oop": "reduce",
}  # fmt: skip
"""Names of PyTorch's variants of a collective."""


def _operation(
    members: list[_Entry], timed: _Entry, groups: Mapping[str, Group], rank: int, locations: dict[int, str]
) -> Operation:
    """Convert the entries of one kernel to an operation; its times are those of the entry ``timed``.

    ``locations``: those of the frames so far, by identity.
    """
    group, _ = timed.process_group
    ranks = groups[group].ranks
    sends: list[Message] = []
    receives: list[Message] = []
    names: list[str] = []
    for member in members:
        name = member.profiling_name.partition(":")[2]
        peers = re.fullmatch(r"(send|recv) ([0-9]{1,7})(?:->|<-)([0-9]{1,7})", name)
        if peers is None:
            names.append(_NAMES.get(name, name))
            continue
        peer = int(peers[3])
        message = Message(ranks[peer] if peer < len(ranks) else peer, bytes_of(*_tensors(member, peers[1])))
        (sends if peers[1] == "send" else receives).append(message)
    is_hop = bool(sends or receives)
    name = "send_recv" if sends and receives else "send" if sends else "recv" if receives else ""
    first = members[0] if members else timed
    times = _times(timed, min((member.time_created_ns for member in members), default=timed.time_created_ns))
    state = COMPLETED if times.get("completed_by_ns") else STARTED if times.get("started_by_ns") else SCHEDULED
    # Backends without events, such as gloo, mark an operation that is over as retired only.
    if timed.retired and not timed.profiling_name.startswith("nccl:"):
        state = COMPLETED
    return Operation(
        rank=rank, group=group, name=name or (names[0] if names else timed.profiling_name.partition(":")[2]),
        sequence=timed.p2p_seq_id if is_hop else timed.collective_seq_id, state=state,
        sends=tuple(sends), receives=tuple(receives), size_bytes=None if is_hop else _collective_bytes(members),
        equal="" if is_hop else _equal_on_all(members),
        timed_out=timed.retired and state != COMPLETED, location=_location(first.frames or timed.frames, locations),
        **times,
    )  # fmt: skip


def _times(entry: _Entry, posted: int) -> JsonObject:
    """Return the times that an entry knows of its kernel. JSON writes 0 for an unknown time.

    The start event of a batch is recorded when its last entry is posted, so the kernel is within the two events.
    """
    started, completed = entry.time_discovered_started_ns or None, entry.time_discovered_completed_ns or None
    known = entry.duration_ms is not None and math.isfinite(entry.duration_ms) and 0 <= entry.duration_ms < 1e12
    # The duration is printed with the seven digits of a 32-bit float.
    time_ns = entry.duration_ms * 1e6 if known and entry.duration_ms is not None else None
    least = None if time_ns is None else math.floor(time_ns * (1 - 1e-6))
    most = None if time_ns is None else math.ceil(time_ns * (1 + 1e-6))
    if most is None and completed is not None:
        most = max(0, completed - posted)
    return {
        "posted_ns": posted, "started_by_ns": started, "completed_by_ns": completed, "least_ns": least,
        "most_ns": most, "shown_ns": None if time_ns is None else round(time_ns),
    }  # fmt: skip


def _tensors(entry: _Entry, kind: str) -> tuple[list[list[int]], list[str]]:
    """Return the shapes and types of the tensors that a send or a receive moves."""
    if kind == "send":
        return entry.input_sizes or entry.output_sizes, entry.input_dtypes or entry.output_dtypes
    return entry.output_sizes or entry.input_sizes, entry.output_dtypes or entry.input_dtypes


def _collective_bytes(members: Iterable[_Entry]) -> int | None:
    """Return the size of collectives: the larger of what enters and what leaves one rank."""
    total = 0
    for member in members:
        if not member.input_sizes and not member.output_sizes:
            return None
        into = bytes_of(member.input_sizes, member.input_dtypes)
        out = bytes_of(member.output_sizes, member.output_dtypes)
        if into is None or out is None:
            return None
        total += max(into, out)
    return total


_EQUAL = re.compile(
    "all_?reduce(_coalesced|_barrier)?|barrier|_?broadcast(_oop)?|_?reduce(_oop)?|_?all_?gather_base|_?reduce_scatter_base"
    "|all_gather_(single|into_tensor_coalesced)|reduce_scatter_(single|tensor_coalesced)"
)
"""Collectives whose inputs have equal sizes and types on all ranks; the others may be uneven."""


def _equal_on_all(members: Sequence[_Entry]) -> str:
    """Return the elements and types of the inputs of collectives, for `Operation.equal`."""
    if not all(_EQUAL.fullmatch(member.profiling_name.partition(":")[2]) for member in members):
        return ""
    inputs = [pair for member in members for pair in zip(member.input_sizes, member.input_dtypes, strict=False)]
    return " + ".join(f"{math.prod(shape):,} {dtype}" for shape, dtype in inputs[:_MOST_INPUTS])


_MOST_INPUTS = 100
_MOST_FRAMES = 64
_LIBRARY = ("/torch/", "/site-packages/torch", "<frozen")


def _location(frames: list[Any], locations: dict[int, str]) -> str:
    """Return the innermost frame outside of PyTorch; empty without frames."""
    for frame in frames[:_MOST_FRAMES]:
        if id(frame) not in locations:
            locations[id(frame)] = _location_of(frame)
        if location := locations[id(frame)]:
            return location
    return ""


def _location_of(frame: Any) -> str:
    """Return file, line and function of a frame; empty for one of PyTorch, and for what is no frame."""
    values: list[Any] = [frame.get(key) for key in ("filename", "line", "name")] if type(frame) is dict else []
    if [*map(type, values)] != [str, int, str]:
        return ""
    path, line, name = values
    if not path or path == "??" or any(part in path for part in _LIBRARY):
        return ""
    return f"{path.replace(chr(92), '/').rpartition('/')[2][:80]}:{line % 10**7} {name[:80]}"
