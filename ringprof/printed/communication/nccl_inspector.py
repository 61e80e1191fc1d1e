"""Reader of the files of NCCL's Inspector plugin: one JSON object per line and completed operation, format v4.

Source: ``plugins/profiler/inspector`` of NCCL (``ext-profiler/inspector`` before 2.29).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import msgspec

from ringprof.common.decoding import decode_json
from ringprof.common.json_object import JsonObject
from ringprof.common.limits import MemoryBudget
from ringprof.errors import InputError
from ringprof.printed.communication.operations import COMPLETED, Group, Operation, RankLog
from ringprof.trace.columns import Message, Notice

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Micros = Annotated[int, msgspec.Meta(ge=0, le=1 << 52)]
_Rank = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]
_Text = Annotated[str, msgspec.Meta(max_length=512)]
_WHAT = "a line of NCCL Inspector"
_LINE_BYTES = 3_000
"""Memory in bytes that one decoded line takes at most where it has few channels."""


class _Header(msgspec.Struct):
    id: _Text
    rank: _Rank
    n_ranks: _Rank
    nnodes: _Rank = 0
    comm_name: _Text = ""


class _Metadata(msgspec.Struct):
    inspector_output_format_version: _Text
    dump_timestamp_us: _Micros = 0
    hostname: _Text = ""
    pid: _Count = 0
    git_rev: _Text = ""


class _Channel(msgspec.Struct):
    kernel_start_ts: _Micros = 0
    kernel_stop_ts: _Micros = 0


class _Times(msgspec.Struct):
    coll_start_ts: _Micros = 0
    p2p_start_ts: _Micros = 0
    kernel_events: list[_Channel] = []


class _Collective(msgspec.Struct):
    coll: _Text
    coll_sn: _Count
    coll_msg_size_bytes: _Count
    coll_exec_time_us: _Micros
    coll_timing_source: _Text = ""
    event_trace_ts: _Times | None = None


class _P2p(msgspec.Struct):
    p2p: _Text
    p2p_sn: _Count
    p2p_peer: _Rank
    p2p_msg_size_bytes: _Count
    p2p_exec_time_us: _Micros
    p2p_timing_source: _Text = ""
    event_trace_ts: _Times | None = None


class _Line(msgspec.Struct):
    header: _Header
    metadata: _Metadata
    coll_perf: _Collective | None = None
    p2p_perf: _P2p | None = None


def parse_inspector(data: bytes, name: str, budget: MemoryBudget) -> RankLog:
    """Parse the content of one process's file, which messages call ``name``.

    The rank of the result is that in the widest communicator; `with_job_ranks` makes it the rank in the job. An
    incomplete last line, as of a process that was killed, is left out with a warning. Raises `InputError` that names
    the file, the line and the field, and where ``budget`` does not suffice.
    """
    lines, notices = [], []
    rows = data.split(b"\n")
    for number, row in enumerate(rows, 1):
        if not row.strip():
            continue
        budget.take(_LINE_BYTES + 4 * len(row), name)
        try:
            lines.append(decode_json(row, _Line, f"{name}:{number}", _WHAT))
        except InputError:
            if number < len(rows) or not lines:
                raise
            notices.append(Notice("truncated", f"{name}: its last line is cut off and left out"))
    if not lines:
        raise InputError(f"{name}: no operation of NCCL Inspector in this file")
    version = lines[0].metadata.inspector_output_format_version
    if not version.startswith("v4."):
        raise InputError(f"{name}:1: $.metadata.inspector_output_format_version is {version[:20]!r}: only v4.x is read")
    widest = max(lines, key=lambda line: line.header.n_ranks).header
    rank, groups = widest.rank, _groups(lines)
    operations = [operation for line in lines if (operation := _operation(line, rank)) is not None]
    missing = _missing(lines)
    if missing:
        text = f"{name}: gaps in the sequence numbers show that {missing:,} operations beside these {len(operations):,}"
        why = "those below NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES, or all but the newest at each dump (NCCL 2.28)"
        notices.append(Notice("sampled", f"{text} are not in the file: {why}", count=missing))
    return RankLog(
        path=name, source="nccl_inspector", rank=rank, operations=operations, groups=groups,
        versions=(f"NCCL Inspector {version}",), host=lines[0].metadata.hostname or None, from_start=not missing,
        missing=missing, notices=notices, own_ranks={line.header.id: line.header.rank for line in lines},
        process=lines[0].metadata.pid,
    )  # fmt: skip


def _groups(lines: Iterable[_Line]) -> dict[str, Group]:
    """Return the communicators by their ids; `with_job_ranks` adds their members."""
    headers = {line.header.id: line.header for line in lines}
    names = [header.comm_name for header in headers.values()]
    return {
        key: Group(
            header.comm_name if header.comm_name not in ("", "unknown") and names.count(header.comm_name) == 1
            else f"communicator {key}",
            size=header.n_ranks,
        )
        for key, header in headers.items()
    }  # fmt: skip


def with_job_ranks(logs: Sequence[RankLog]) -> tuple[list[RankLog], list[Notice]]:
    """Number the processes as ranks of the job, and the members and peers of every communicator by these numbers.

    A file states ranks within communicators only. The rank in the widest is taken as the rank in the job; where two
    processes have the same, no communicator spans the job, and processes are numbered by host and process id. Raises
    `InputError` for two files of one process.
    """
    notices = []
    files: dict[tuple[str, int], str] = {}
    for log in logs:
        for communicator in log.own_ranks.items():
            if (other := files.setdefault(communicator, log.path)) != log.path:
                key, own = communicator
                text = f"{log.path}: rank {own} of communicator {key[:40]} again, as in {other}"
                raise InputError(f"{text}: give each process's file once")
    if len({log.rank for log in logs}) < len(logs):
        logs = sorted(logs, key=lambda log: (log.host or "", log.process or 0, log.path))
        numbers = [*range(len(logs))]
        text = "no communicator spans the job: ranks are numbered by host and process"
        notices.append(Notice("ranks_numbered", text))
    else:
        numbers = [log.rank for log in logs]
    members: dict[str, dict[int, int]] = defaultdict(dict)
    for number, log in zip(numbers, logs, strict=True):
        for key, own in log.own_ranks.items():
            members[key].setdefault(own, number)
    changed = []
    for number, log in zip(numbers, logs, strict=True):
        groups = {}
        for key, group in log.groups.items():
            known = members[key]
            whole = len(known) == group.size and [*sorted(known)] == [*range(group.size)]
            ranks = tuple(known[own] for own in range(group.size)) if whole else ()
            groups[key] = msgspec.structs.replace(group, ranks=ranks)
        operations = [_renumbered(operation, number, members) for operation in log.operations]
        changed.append(msgspec.structs.replace(log, rank=number, groups=groups, operations=operations))
    return changed, notices


def _renumbered(operation: Operation, rank: int, members: Mapping[str, Mapping[int, int]]) -> Operation:
    """Set an operation's rank, and its peers by their ranks in the job; -1 for a peer that has no file."""
    known = members[operation.group]
    sends, receives = (
        tuple(msgspec.structs.replace(message, peer=known.get(message.peer, -1)) for message in messages)
        for messages in (operation.sends, operation.receives)
    )
    return msgspec.structs.replace(operation, rank=rank, sends=sends, receives=receives)


_NAMES = {
    "AllReduce": "all_reduce", "AllGather": "all_gather", "AllGatherV": "all_gather", "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast", "Reduce": "reduce", "SendRecv": "send_recv", "Send": "send", "Recv": "recv",
    "All2All": "all_to_all",
}  # fmt: skip


def _operation(line: _Line, rank: int) -> Operation | None:
    """Convert a line to an operation; None for a line that holds neither a collective nor a message."""
    header, collective, message = line.header, line.coll_perf, line.p2p_perf
    if collective is not None:
        scale = header.n_ranks if collective.coll in ("AllGather", "AllGatherV", "ReduceScatter") else 1
        return Operation(
            rank=rank, group=header.id, name=_NAMES.get(collective.coll, collective.coll), sequence=collective.coll_sn,
            state=COMPLETED, size_bytes=min(collective.coll_msg_size_bytes * scale, 1 << 62),
            **_times(collective.coll_exec_time_us, collective.coll_timing_source, collective.event_trace_ts),
        )  # fmt: skip
    if message is None:
        return None
    name = _NAMES.get(message.p2p, message.p2p)
    other = (Message(message.p2p_peer, message.p2p_msg_size_bytes),)
    return Operation(
        rank=rank, group=header.id, name=name, sequence=message.p2p_sn, state=COMPLETED,
        sends=other if name == "send" else (), receives=other if name == "recv" else (),
        **_times(message.p2p_exec_time_us, message.p2p_timing_source, message.event_trace_ts),
    )  # fmt: skip


def _times(exec_us: int, source: str, trace: _Times | None) -> JsonObject:
    """Return the times of an operation, in nanoseconds.

    The printed time is that of the slowest channel, by the GPU's clock and with its fraction of a microsecond cut
    off. Times on the host's clock are when a thread of NCCL saw the event.
    """
    by_gpu = source == "kernel_gpu"
    channels = trace.kernel_events if trace else []
    starts = [channel.kernel_start_ts for channel in channels if channel.kernel_start_ts]
    stops = [channel.kernel_stop_ts for channel in channels if channel.kernel_stop_ts]
    posted = ((trace.coll_start_ts or trace.p2p_start_ts) if trace else 0) or None
    return {
        "posted_ns": posted * 1000 if posted else None, "started_by_ns": (min(starts) + 1) * 1000 if starts else None,
        "completed_by_ns": (max(stops) + 1) * 1000 if stops and len(stops) == len(channels) else None,
        "least_ns": exec_us * 1000 if by_gpu else None, "most_ns": (exec_us + 1) * 1000 if by_gpu else None,
        "shown_ns": exec_us * 1000 if by_gpu else None,
    }  # fmt: skip


def _missing(lines: Iterable[_Line]) -> int:
    """Count the operations that gaps in the sequence numbers show to be missing.

    Collectives are numbered by communicator and name, sends and receives together by communicator.
    """
    numbers: dict[tuple[str, str], set[int]] = defaultdict(set)
    for line in lines:
        if line.coll_perf is not None:
            numbers[line.header.id, line.coll_perf.coll].add(line.coll_perf.coll_sn)
        elif line.p2p_perf is not None:
            numbers[line.header.id, "p2p"].add(line.p2p_perf.p2p_sn)
    return sum(max(listed) - min(listed) + 1 - len(listed) for listed in numbers.values())
