"""Classify each activity into a kind and record the evidence. The strongest evidence wins:

1. ``metadata``: the communication record on the kernel itself.
2. ``cpu_records``: CPU records around the launch. A batched send/recv kernel carries no metadata: its messages are the
   ``record_param_comms`` rows on the launching thread since the communication launch before it.
   For compute, the operator around the launch decides. An attention operator gives its kind to all kernels inside,
   except those whose own names say which attention pass they are. Operators of embedding tables, norms, optimizers and
   matrix products decide where the kernel name is less specific.
3. ``annotation``: a range around the launch (``nccl:...``, ``ringprof::.../merge``, ``Optimizer.step#AdamW.step``).
4. ``name``: the kernel name (`ringprof.analysis.kinds.rules`). A SendRecv kernel whose launch record is missing takes
   the kind of the other kernels of its ``stream``.

A rule of the user (``user_rule``) outranks everything except the kernel's own communication record.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from ringprof.analysis import intervals
from ringprof.analysis.kinds.kinds import ATTENTION, CODE, COMMUNICATION, COMPUTE, KINDS, is_kind
from ringprof.analysis.kinds.operators import (
    ENCLOSING,
    kind_of_attention_operator,
    kind_of_collective,
    kind_of_enclosed_kernels,
    kind_of_own_kernel,
)
from ringprof.analysis.kinds.rules import Rule, lacks_pass_word, rule_for
from ringprof.trace.columns import MEMCPY, MEMSET, NONE, CommRecord, Int8, Int64, Ranges, Trace, distinct, launch_rows

EVIDENCE = ("metadata", "cpu_records", "annotation", "name", "none", "user_rule", "stream")
"""Sources of evidence. An evidence column holds indices into this tuple; ``none`` marks an unknown kind (``other``)."""
METADATA, CPU_RECORDS, ANNOTATION, NAME, NO_EVIDENCE, USER_RULE, STREAM = range(len(EVIDENCE))

_MERGE_RANGE = re.compile(r"ringprof::(.*/)?merge\b")
_COMM_RANGE = re.compile(r"(?:nccl|gloo|c10d)::?(\w+)")


_KNOWN_CALL = re.compile("reduce|gather|scatter|all_?to_?all|broadcast|send|recv|barrier")


Calls = tuple[CommRecord, ...]
"""The communication calls that one kernel executes, in order."""


class Classified(msgspec.Struct, frozen=True):
    """Kinds of one trace's activities; the arrays have one element per row of ``trace.activities``."""

    trace: Trace
    kind: Int8
    """Index into `KINDS`."""
    evidence: Int8
    """Index into `EVIDENCE`."""
    launch: Int64
    """Index into ``trace.launches`` of the CPU call that launched the activity, or `NONE`."""
    calls: dict[int, Calls]
    """Activity -> the communication calls that it executes; missing where no record exists. Activities with the same
    records share one tuple."""
    attention: tuple[str, ...]
    """Families of the attention kernels that ran, most frequent first."""

    def of(self, *kinds: str) -> npt.NDArray[np.bool_]:
        """Return a mask of the activities that are one of these kinds."""
        return is_kind(self.kind, *kinds)


def classify(trace: Trace, user_rules: Sequence[Rule] = ()) -> Classified:
    """Classify every activity of a trace; ``user_rules`` come before the built-in rules."""
    launch = launches_of(trace)
    device = next((device.name for device in trace.devices), "")
    used = distinct(trace.activities.name).tolist()
    rules = {index: rule_for(trace.names[index], user_rules, device) for index in used}
    kind, evidence = _classify_by_name(trace, rules, user_rules)
    _classify_by_launch(trace, launch, kind, evidence)
    _classify_by_operator(trace, launch, kind, evidence, rules)
    calls = {}
    kind_by_calls: dict[int, str] = {}
    for activity, activity_calls, source in _calls_by_activity(trace, launch, kind):
        calls[activity] = activity_calls
        if id(activity_calls) not in kind_by_calls:
            kind_by_calls[id(activity_calls)] = _kind_of_calls(activity_calls, trace.rank)
        # Of a call with an unknown name, the kernel's own name says more.
        named = all(_KNOWN_CALL.search(call.name) for call in activity_calls)
        if named or not is_kind(kind[activity], *COMMUNICATION):
            kind[activity], evidence[activity] = CODE[kind_by_calls[id(activity_calls)]], source
    _classify_by_comm_annotation(trace, launch, kind, evidence)
    _classify_by_stream(trace, launch, kind, evidence)
    counts = np.bincount(trace.activities.name, minlength=len(trace.names))
    activity_count: dict[str, int] = {}
    for index, rule in rules.items():
        if rule is not None and rule.family and rule.kind in ATTENTION:
            activity_count[rule.family] = activity_count.get(rule.family, 0) + int(counts[index])
    families = tuple(sorted(activity_count, key=lambda family: (-activity_count[family], family)))
    return Classified(trace, kind, evidence, launch, calls, families)


def launches_of(trace: Trace) -> Int64:
    """Return each activity's index into ``trace.launches``, joined by correlation; `NONE` without a launch record."""
    return launch_rows(trace.activities.correlation, trace.launches.correlation)


# --- names ----------------------------------------------------------------------------------------


Rules = dict[int, "Rule | None"]
"""Index into ``trace.names`` -> the rule that matches the name; None where no rule matches."""


def _classify_by_name(trace: Trace, rules: Rules, user_rules: Sequence[Rule]) -> tuple[Int8, Int8]:
    """Classify by the name rules; copies and sets by their category. Returns the columns of kinds and evidence."""
    code = np.full(max(len(trace.names), 1), CODE["other"], np.int8)
    for index, rule in rules.items():
        code[index] = CODE[rule.kind] if rule else CODE["other"]
    kind = code[trace.activities.name]
    evidence = np.where(_activities_with_rule(trace, rules, bool), NAME, NO_EVIDENCE).astype(np.int8)
    for category, name in ((MEMCPY, "memcpy"), (MEMSET, "memset")):
        rows = trace.activities.category == category
        kind[rows], evidence[rows] = CODE[name], NAME
    peer_copy = trace.names_that(lambda name: re.search("PtoP|PeerToPeer|P2P", name))[trace.activities.name]
    kind[(trace.activities.category == MEMCPY) & peer_copy] = CODE["copy_engine"]
    if user_rules:
        rows = _activities_with_rule(trace, rules, lambda rule: rule in user_rules)
        kind[rows], evidence[rows] = code[trace.activities.name[rows]], USER_RULE
    return kind, evidence


def _activities_with_rule(
    trace: Trace, rules: Rules, predicate: Callable[[Rule | None], object]
) -> npt.NDArray[np.bool_]:
    """Return a mask of the activities whose name's rule satisfies ``predicate``."""
    matching = np.zeros(max(len(trace.names), 1), np.bool_)
    matching[[index for index, rule in rules.items() if predicate(rule)]] = True
    return matching[trace.activities.name]


# --- the launch: operators and ringprof's own ranges --------------------------------------------------


def _classify_by_launch(trace: Trace, launch: Int64, kind: Int8, evidence: Int8) -> None:
    """Reclassify kernels launched inside an attention operator or a range named as a merge.

    Kernels whose own name says flash attention and the pass, or communication, keep their kind.
    """
    kernel = (trace.activities.category != MEMCPY) & (trace.activities.category != MEMSET)
    named_flash = is_kind(kind, *ATTENTION) & ~trace.names_that(lacks_pass_word)[trace.activities.name]
    kernel &= evidence != USER_RULE
    open_to_change = kernel & ~named_flash & ~is_kind(kind, *COMMUNICATION)
    for name in ATTENTION:
        wanted = {text for text in trace.names if kind_of_attention_operator(text) == name}
        rows = open_to_change & launched_inside(trace, launch, trace.operators, wanted.__contains__)
        kind[rows], evidence[rows] = CODE[name], CPU_RECORDS
        open_to_change &= ~rows
    rows = open_to_change & launched_inside(trace, launch, trace.annotations, _MERGE_RANGE.match)
    kind[rows], evidence[rows] = CODE["merge"], ANNOTATION


def _classify_by_operator(trace: Trace, launch: Int64, kind: Int8, evidence: Int8, rules: Rules) -> None:
    """Reclassify kernels with unspecific names by the operator or annotation around their launch."""
    named = evidence == NAME
    unknown = (evidence == NO_EVIDENCE) | (
        named & _activities_with_rule(trace, rules, lambda rule: rule and rule.guessed)
    )
    ambiguous = unknown | (named & _activities_with_rule(trace, rules, lambda rule: rule and rule.loose))
    ambiguous &= is_kind(kind, *COMPUTE) & ~is_kind(kind, *ATTENTION)
    for kind_of_name, rows in ((kind_of_enclosed_kernels, ambiguous), (kind_of_own_kernel, ambiguous & unknown)):
        for name, ranges, source, wanted in _ranges_by_kind(trace, kind_of_name):
            inside = rows & launched_inside(trace, launch, ranges, wanted.__contains__)
            kind[inside], evidence[inside] = CODE[name], source
            rows &= ~inside
            ambiguous &= ~inside


def _ranges_by_kind(
    trace: Trace, kind_of_name: Callable[[str], str | None]
) -> Iterator[tuple[str, Ranges, int, set[str]]]:
    """Yield (kind, operators or annotations, evidence, their names), in the order of precedence."""
    sources: dict[str, list[tuple[Ranges, int, set[str]]]] = {}
    for ranges, source in ((trace.operators, CPU_RECORDS), (trace.annotations, ANNOTATION)):
        names: dict[str, set[str]] = {}
        for index in distinct(ranges.name).tolist():
            if range_kind := kind_of_name(trace.names[index]):
                names.setdefault(range_kind, set()).add(trace.names[index])
        for name, wanted in names.items():
            sources.setdefault(name, []).append((ranges, source, wanted))
    for name in sorted(sources, key=lambda kind: [*ENCLOSING, *KINDS].index(kind)):
        for ranges, source, wanted in sources[name]:
            yield name, ranges, source, wanted


def launched_inside(
    trace: Trace, launch: Int64, ranges: Ranges, wanted: Callable[[str], object]
) -> npt.NDArray[np.bool_]:
    """Return a mask of the activities launched inside a range with a wanted name, on the range's own thread."""
    inside = np.zeros(len(launch), np.bool_)
    rows = trace.names_that(wanted)[ranges.name]
    has_launch = launch != NONE
    if not rows.any() or not has_launch.any():
        return inside
    launch_row = np.where(has_launch, launch, 0)
    for thread in distinct(ranges.thread[rows]):
        on_thread = rows & (ranges.thread == thread)
        spans = intervals.union(ranges.start_ns[on_thread], ranges.end_ns[on_thread])
        launched_here = has_launch & (trace.launches.thread[launch_row] == thread)
        inside |= launched_here & intervals.contains(spans, trace.launches.start_ns[launch_row])
    return inside


# --- communication records ------------------------------------------------------------------------


def _calls_by_activity(trace: Trace, launch: Int64, kind: Int8) -> Iterator[tuple[int, Calls, int]]:
    """Yield (activity, its communication calls, evidence) for every activity with a communication record."""
    with_record = np.flatnonzero(trace.activities.collective != NONE)
    calls_by_records: dict[tuple[int, ...], Calls] = {}

    def calls_of(records: tuple[int, ...]) -> Calls:
        if records not in calls_by_records:
            candidates = (trace.collectives[record] for record in records)
            calls_by_records[records] = tuple(
                record for record in candidates if kind_of_collective(record.name) is not None
            )
        return calls_by_records[records]

    for activity, number in zip(with_record.tolist(), trace.activities.collective[with_record].tolist(), strict=True):
        if calls := calls_of((number,)):
            yield activity, calls, METADATA
    communication = is_kind(kind, *COMMUNICATION)
    communication[with_record] = True
    bare = communication & (trace.activities.collective == NONE) & (launch != NONE)
    # All nodes of a CUDA graph share one launch, so the records before that launch belong to none of them.
    bare &= (trace.activities.graph_node == NONE) & (np.bincount(launch + 1, minlength=1)[launch + 1] == 1)
    for activity, numbers in _records_before(trace, launch, communication, bare):
        if calls := calls_of(numbers):
            yield activity, calls, CPU_RECORDS


def _records_before(
    trace: Trace, launch: Int64, communication: npt.NDArray[np.bool_], bare: npt.NDArray[np.bool_]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield for each bare kernel the records on its launching thread since the previous communication launch."""
    records, launches = trace.comm_records, trace.launches
    comm = np.flatnonzero(communication & (launch != NONE))
    comm = comm[np.argsort(launches.start_ns[launch[comm]], kind="stable")]
    for thread in distinct(launches.thread[launch[comm]]):
        of_thread = comm[launches.thread[launch[comm]] == thread]
        launched_ns = launches.start_ns[launch[of_thread]]
        rows = np.flatnonzero(records.thread == thread)
        until = np.searchsorted(records.start_ns[rows], launched_ns, side="right")
        since = np.concatenate(([0], until[:-1]))
        ends, numbers = records.end_ns[rows].tolist(), records.collective[rows].tolist()
        columns = (of_thread, bare[of_thread], since, until, launched_ns)
        for activity, is_bare, first, last, launch_ns in zip(*(column.tolist() for column in columns), strict=True):
            if is_bare:
                # A record around the launch belongs to this kernel: the records before it sent nothing here.
                enclosing = tuple([numbers[row] for row in range(first, last) if ends[row] > launch_ns])
                yield activity, enclosing or tuple(numbers[first:last])


def _kind_of_calls(calls: Calls, rank: int | None) -> str:
    """Return the kind of a kernel from its communication calls."""
    kinds = {kind_of_collective(call.name) or "comm_other" for call in calls}
    if kinds == {"all_to_all"} and all(single_peer(call, rank) is not None for call in calls):
        return "send_recv"
    # No rank sends to itself except in an all-to-all, which NCCL runs as sends and receives.
    destinations = [call.destination_rank for call in calls if "send" in call.name]
    if kinds == {"send_recv"} and rank is not None and rank in destinations:
        return "all_to_all"
    return kinds.pop() if len(kinds) == 1 else "comm_other"


def single_peer(call: CommRecord, rank: int | None) -> tuple[int, int] | None:
    """Return (destination, source) of an all-to-all that is a rotation: each split has one peer. Else return None."""
    if not call.in_split:
        return None
    send_indices = [index for index, size in enumerate(call.in_split) if size]
    receive_indices = [index for index, size in enumerate(call.out_split) if size]
    if len(send_indices) != 1 or len(receive_indices) != 1:
        return None
    ranks = call.group_ranks or tuple(range(call.group_size or len(call.in_split)))
    if max(send_indices[0], receive_indices[0]) >= len(ranks) or rank in (
        ranks[send_indices[0]],
        ranks[receive_indices[0]],
    ):
        return None
    return ranks[send_indices[0]], ranks[receive_indices[0]]


# --- annotations around communication -----------------------------------------------------------------


def _classify_by_comm_annotation(trace: Trace, launch: Int64, kind: Int8, evidence: Int8) -> None:
    """Reclassify communication kernels without a record by the annotation around them, where it names a kind."""
    rows = (evidence == NAME) & is_kind(kind, *COMMUNICATION)
    rows &= kind != CODE["copy_engine"]
    if not rows.any():
        return
    named_call = {name: match[1] for name in trace.names if (match := _COMM_RANGE.match(name))}
    kind_of_range = {name: kind_of_collective(call) or "comm_other" for name, call in named_call.items()}
    # nccl:coalesced marks a batch of calls without naming them.
    for name in set(kind_of_range.values()) - {"comm_other"}:
        wanted = {text for text, kind_named in kind_of_range.items() if kind_named == name}
        inside = rows & launched_inside(trace, launch, trace.annotations, wanted.__contains__)
        kind[inside], evidence[inside] = CODE[name], ANNOTATION


def _classify_by_stream(trace: Trace, launch: Int64, kind: Int8, evidence: Int8) -> None:
    """Give SendRecv kernels without a launch record the kind of all other kernels on their stream.

    A stream belongs to one communicator. An all-to-all also runs under the name SendRecv and must not count as a hop.
    """
    rows = trace.activities
    named = evidence == NAME
    bare = np.flatnonzero(named & (kind == CODE["send_recv"]) & (launch == NONE) & (rows.graph_node == NONE))
    if not len(bare):
        return
    others = ~named & is_kind(kind, *COMMUNICATION)
    kinds_of: dict[tuple[int, int], list[int]] = {}
    columns = (rows.device[others], rows.stream[others], kind[others])
    for device, stream, code in np.unique(np.column_stack(columns), axis=0).tolist():
        kinds_of.setdefault((device, stream), []).append(code)
    for activity in bare.tolist():
        codes = kinds_of.get((int(rows.device[activity]), int(rows.stream[activity])), [])
        if len(codes) == 1:
            kind[activity], evidence[activity] = codes[0], STREAM
