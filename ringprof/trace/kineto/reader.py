"""Reader of one Kineto trace: reads it in pieces, collects the events, and returns a `Trace` with warnings."""

from __future__ import annotations

import os

import msgspec
import numpy as np

from ringprof.common.limits import MemoryBudget
from ringprof.errors import TraceFormatError
from ringprof.trace.checks import overlap_warnings, validate_trace, without_repeats
from ringprof.trace.columns import NO_DEVICE_ACTIVITIES, Notice, Trace, has_launch_id
from ringprof.trace.kineto.byte_source import ByteSource
from ringprof.trace.kineto.collectives import with_group
from ringprof.trace.kineto.event_list import UNREADABLE, Event, EventStream, Piece, decode_events, decode_fields
from ringprof.trace.kineto.event_tables import Collector
from ringprof.trace.kineto.fields import (
    Metadata,
    close_head,
    metadata_of,
    read_fields,
    read_tail,
    repeated_at_ends,
    repeated_keys,
)
from ringprof.trace.kineto.recover import Recovery
from ringprof.trace.kineto.tracks import ON_DEVICE
from ringprof.trace.memory import bytes_of_text, take_analysis
from ringprof.trace.one_run import rank_in_name


def read_trace(path: str | os.PathLike[str], budget: MemoryBudget | None = None) -> Trace:
    """Read one rank's trace: JSON, plain or compressed with gzip or zstd; the suffix of the file does not matter.

    All times of the result are int64 nanoseconds of Unix time. Oddities that did not prevent reading are listed in
    ``Trace.warnings``. Raises `InputError` if the file cannot be read or exceeds a limit, `TraceFormatError` if it is
    not a Kineto trace or has nothing to analyse, and `MissingExtraError` if zstd is needed but not installed.
    """
    name = os.fspath(path)
    return _read(name, name, budget or MemoryBudget())


def parse_trace(data: bytes, name: str = "-", budget: MemoryBudget | None = None) -> Trace:
    """Parse the bytes of one rank's trace; ``name`` is used in messages and to find the rank.

    Raises the errors of `read_trace`.
    """
    return _read(data, name, budget or MemoryBudget())


class _PassResult(msgspec.Struct):
    """Result of one pass over the file: the collected events, and counts and offsets of damage."""

    collector: Collector
    metadata: Metadata = msgspec.field(default_factory=Metadata)
    repaired: int = 0
    gaps: int = 0
    skipped: int = 0
    first_damage: int | None = None
    cut_at: int | None = None
    """Offset at which the event list ends too early; None if it is closed."""
    cut_events: int = 0
    """1 if the list ends with an incomplete event, which is also counted in ``skipped``; else 0."""
    stopped_early: bool = False
    """Whether reading stopped early because a large piece had no readable event."""
    fields_sound: bool = True
    lacks_device: bool = False
    """Whether the run used a GPU but the trace has no device activities."""
    second_list: bool = False
    """Whether another list of events, or another document, follows the first list."""
    repeated: set[str] = msgspec.field(default_factory=set)
    """Keys found twice in one object, with different values."""
    damage: str | None = None
    """Description of damage in the compressed data; None if it is intact."""


def _read(source: str | bytes, name: str, budget: MemoryBudget) -> Trace:
    """Read a trace; a CPU trace is read twice, because it needs all operators."""
    budget_left = budget.left
    reading = _read_once(source, name, budget, every_operator=False)
    collector = reading.collector
    if collector.has_operators and not collector.has_device_activities and not collector.every_operator:
        # Only the end of the first pass shows that this is a CPU trace, which needs every operator.
        budget.left = budget_left
        reading = _read_once(source, name, budget, every_operator=True)
    return take_analysis(validate_trace(_trace(reading, name)), budget)


def _read_once(source: str | bytes, name: str, budget: MemoryBudget, *, every_operator: bool) -> _PassResult:
    """Read all pieces of the file once, with the metadata before and behind the event list."""
    byte_source = ByteSource(source, name, budget.limits.expanded_bytes)
    stream = EventStream(byte_source, name, budget.limits.memory_bytes)
    head_values, head_sound = read_fields(close_head(stream.head))
    is_cpu_trace = head_values.get("deviceProperties") == []
    collector = Collector(lambda size: budget.take(size, name), every_operator=every_operator or is_cpu_trace)
    reading = _PassResult(collector)
    tail = b""
    for piece in stream.pieces():
        end = _collect_piece(piece, stream, reading)
        if end is not None:
            tail = piece.data[end + 1 :] + (b"" if piece.last else stream.remainder())
            break
        if reading.stopped_early:
            break
    collector.flush()
    tail_values, tail_sound, reading.second_list = read_tail(tail, bare_list=stream.list_root)
    values = head_values | tail_values if tail_sound else tail_values | head_values
    reading.metadata = metadata_of(values)
    for text in (close_head(stream.head), b"{" + tail.strip().removeprefix(b",")):
        reading.repeated |= repeated_keys(text)
    reading.repeated |= {key for key in tail_values if head_values.get(key, values[key]) != values[key]}
    used_device = collector.calls_a_device or reading.metadata.on_gpu or any(map(ON_DEVICE.search, collector.unread))
    reading.lacks_device = used_device and not collector.has_device_activities
    reading.fields_sound = head_sound and tail_sound
    reading.damage = byte_source.damage
    return reading


def _collect_piece(piece: Piece, stream: EventStream, reading: _PassResult) -> int | None:
    """Collect the events of a piece. Returns the offset at which the event list is closed in it, None if it goes on."""
    try:
        end: int | None = None
        if piece.last:
            events, end = _decode_last(piece, list_root=stream.list_root)
        else:
            events = decode_events(piece.framed)
        reading.collector.add(events)
        reading.repeated |= repeated_at_ends(piece.data if end is None else piece.data[:end])
        return end
    except UNREADABLE:
        pass
    recovered = Recovery(piece)
    reading.collector.add(recovered.events)
    if recovered.unfinished:
        stream.push_back(recovered.unfinished)
    _add_damage(reading, piece, stream, recovered)
    return recovered.end


def _decode_last(piece: Piece, *, list_root: bool) -> tuple[list[Event], int]:
    """Decode the last piece; return its events and the end of the list. Raises if any of the text is invalid."""
    if list_root:
        return decode_events(b"[" + piece.data), piece.data.rindex(b"]")
    listed = decode_fields(b"".join((b'{"traceEvents":[', piece.data)))["traceEvents"]
    end = memoryview(listed).nbytes - 2
    if memoryview(listed)[1:] != memoryview(piece.data)[: end + 1]:
        raise ValueError("the key is there twice")
    return decode_events(listed), end


def _add_damage(reading: _PassResult, piece: Piece, stream: EventStream, recovered: Recovery) -> None:
    """Add the damage found in one piece to the result."""
    reading.repaired += recovered.repaired
    reading.gaps += recovered.gaps
    reading.skipped += recovered.skipped
    if reading.first_damage is None:
        reading.first_damage = recovered.first_damage
    # One event a line, without list and commas, has no end that could be missing.
    lines = not stream.list_root and not stream.head and len(recovered.events) - recovered.gaps < 2
    if piece.last and recovered.end is None and not (lines and not recovered.skipped_last):
        # Chrome's format allows a bare list without its closing bracket, but a list that is cut off looks the same.
        reading.cut_at = piece.offset + recovered.last_whole
        reading.cut_events = int(recovered.skipped_last)
    if not recovered.events and len(piece.data) >= stream.event_limit:
        reading.stopped_early = True
        reading.cut_at = piece.offset


# --- building the Trace -------------------------------------------------------------------------------


def _trace(reading: _PassResult, name: str) -> Trace:
    """Build the trace from the result of a pass. Raises `TraceFormatError` if there is nothing to analyse."""
    collector, metadata = reading.collector, reading.metadata
    tables = collector.tables(metadata.base_ns)
    groups = {group: collector.number_lists.shared(ranks) for group, ranks in metadata.groups.items()}
    collector.take(sum(map(bytes_of_text, groups)))
    if not any(len(tables[name].start_ns) for name in ("activities", "operators", "annotations")):
        raise TraceFormatError(f"{name}: {_why_empty(reading)}")
    if collector.is_merged:
        raise TraceFormatError(f"{name}: several ranks, merged into one file: give each rank's own file, all at once")
    # With a second list, the file name may give the rank of the other trace.
    rank_of_name = None if reading.second_list else rank_in_name(name)
    trace = Trace(
        path=name, names=list(collector.names), **tables,
        collectives=[with_group(collective, groups) for collective in collector.collectives],
        devices=metadata.devices or collector.tracks.devices,
        rank=rank_of_name if metadata.rank is None else metadata.rank, world_size=metadata.world_size,
        host=metadata.host, groups=groups, base_ns=metadata.base_ns, producer=collector.tracks.producer,
        events_total=collector.total + reading.skipped,
        events_skipped=reading.skipped, warnings=_warnings(reading),
    )  # fmt: skip
    trace = without_repeats(trace)
    named = has_launch_id(trace.activities.correlation)
    # Some writers other than PyTorch give no correlation at all; that is not damage.
    if named.any() and not named.all():
        count = int(np.count_nonzero(~named))
        trace.warnings.append(Notice("missing_correlation", f"{count} {_NO_LAUNCH}", trace.rank, count))
    trace.warnings.extend(overlap_warnings(trace.activities, metadata.rank))
    return trace


def _why_empty(reading: _PassResult) -> str:
    """Explain why a trace has nothing to analyse."""
    if reading.skipped or reading.cut_at is not None:
        return f"no event can be read ({reading.skipped} damaged, {reading.collector.total} ignored)"
    if reading.collector.oddities["begin_end_events"]:
        return "only begin/end events, which PyTorch does not write: export the trace with torch.profiler"
    summary = f"{reading.collector.total} events, none of them a kernel, operator or annotation"
    unread = f"; of {_unread_text(reading.collector)}" if reading.collector.unread else ""
    return f"nothing to analyse: {summary}{unread}"


def _unread_text(collector: Collector) -> str:
    """List the three most frequent categories or processes of unread events, with their counts."""
    return ", ".join(f"{source} ({count:,})" for source, count in collector.unread.most_common(3))


def _keys(keys: set[str]) -> str:
    """List up to five keys in their order."""
    return ", ".join(repr(key[:40]) for key in sorted(keys)[:5])


_ODDITIES = {
    "missing_time": "events without a readable time were left out",
    "zero_timestamp": "events with time 0 were left out",
    "absurd_timestamp": "events days away from the rest of the trace were left out",
    "absurd_duration": "events that claim to last over 7 days were left out",
    "negative_duration": "events with a negative duration count as 0 ns long",
    "missing_duration": "events without a readable duration count as 0 ns long",
    "missing_category": "events without a category were left out",
    "missing_name": "kernels or copies have no name: what kind they are is not known",
    "zero_duration": "kernels or copies are 0 ns long",
    "unreadable_arguments": "events have arguments that cannot be read in full; their times count",
    "begin_end_events": "begin/end events, which PyTorch does not write, were left out",
}


_NO_LAUNCH = "kernels or copies do not say what launched them: they may count to the wrong work"
_NO_DEVICE = (
    "the run used a GPU, and nothing of what ran there is in the trace: device activities were not profiled (not asked "
    "for, or refused to the profiler), or profiling ended before the first kernel"
)
_CUT_BEFORE_DEVICE = "the run used a GPU, and what is left of the file has nothing of what ran there"


_HOST_EVENTS_DROPPED = (
    "the trace has more CPU operators and CUDA calls than fit in memory: what the host did while the GPU was idle is "
    "not named; raise the limit with --max-memory"
)


def _warnings(reading: _PassResult) -> list[Notice]:
    """Return a warning for each kind of damage or oddity in the trace."""
    rank, offset = reading.metadata.rank, reading.first_damage
    damaged, unread = reading.skipped - reading.cut_events, reading.collector.unread.total()
    warnings = []
    if reading.damage:
        warnings.append(Notice("damaged_compression", f"{reading.damage}: read up to there", rank))
    if reading.cut_at is not None:
        message = f"the file is cut off at byte {reading.cut_at}: {reading.collector.total} complete events were read"
        warnings.append(Notice("truncated", message, rank, byte_offset=reading.cut_at))
    if damaged:
        message = f"{damaged} damaged events were left out, the first damage is at byte {offset}"
        warnings.append(Notice("damaged_events", message, rank, damaged, offset))
    if reading.repaired:
        message = f"{reading.repaired} events that are not sound JSON were read all the same, from byte {offset} on"
        warnings.append(Notice("repaired_events", message, rank, reading.repaired, offset))
    if reading.gaps:
        problem = "commas between events are missing or too many"
        message = f"{reading.gaps} {problem}, from byte {offset} on; no event is lost"
        warnings.append(Notice("misplaced_commas", message, rank, reading.gaps, offset))
    if reading.repeated:
        message = f"keys stand twice in one object, and the last value counts: {_keys(reading.repeated)}"
        warnings.append(Notice("repeated_keys", message, rank, len(reading.repeated)))
    if not reading.fields_sound:
        message = "the text around the events is damaged: the rank, groups or base time may be missing"
        warnings.append(Notice("damaged_metadata", message, rank))
    if reading.lacks_device:
        problem = _NO_DEVICE if reading.cut_at is None else _CUT_BEFORE_DEVICE
        message = f"what ran on the device is not read: {_unread_text(reading.collector)}" if unread else problem
        warnings.append(Notice(NO_DEVICE_ACTIVITIES, message, rank))
    elif unread:
        message = f"events that ringprof does not read, and no result counts: {_unread_text(reading.collector)}"
        warnings.append(Notice("unknown_category", message, rank, unread))
    if reading.collector.host_rows.dropped:
        warnings.append(Notice("host_events_dropped", _HOST_EVENTS_DROPPED, rank))
    if reading.second_list:
        message = "the file holds several lists of events, as concatenated traces do: only the first was read: split it"
        warnings.append(Notice("second_event_list", message, rank))
    for code, count in sorted(reading.collector.oddities.items()):
        warnings.append(Notice(code, f"{count} {_ODDITIES[code]}", rank, count))
    return warnings
