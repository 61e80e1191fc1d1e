"""Which kind each activity is, and what says so: the strongest source of evidence that speaks.

1. ``metadata``: the collective's own record on the kernel.
2. ``cpu_records``: what the CPU recorded about the launch. A batched send/recv kernel carries no metadata: its
   messages are the ``record_param_comms`` rows on the launching thread since the communication launch before it.
   For compute, an operator that the launch happened in and that says what runs in it: attention, whatever the
   kernel's name; an embedding table, a norm, an optimizer or a matrix product where the name says less.
3. ``annotation``: a range that the launch happened in (``nccl:...``, ``ringprof::.../merge``,
   ``Optimizer.step#AdamW.step``).
4. ``name``: `ringprof.analysis.kinds.rules`; of a SendRecv kernel whose launch was cut off, what the others of its
   ``stream`` are.

A rule of the user's own (``user_rule``) stands before all but a communication call's own record.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from ringprof.analysis import intervals
from ringprof.analysis.kinds.kinds import ATTENTION, CODE, COMMUNICATION, COMPUTE, KINDS, are
from ringprof.analysis.kinds.operators import (
    ENCLOSING,
    kind_enclosing,
    kind_of_attention_operator,
    kind_of_collective,
    kind_of_its_kernel,
)
from ringprof.analysis.kinds.rules import Rule, rule_for, tells_no_pass
from ringprof.trace.columns import MEMCPY, MEMSET, NONE, CommRecord, Int8, Int64, Ranges, Trace, distinct, launch_rows

EVIDENCE = ("metadata", "cpu_records", "annotation", "name", "none", "user_rule", "stream")
"""A column of evidence holds indices into this tuple; ``none`` marks what no source knows (kind ``other``)."""
METADATA, CPU_RECORDS, ANNOTATION, NAME, NO_EVIDENCE, USER_RULE, STREAM = range(len(EVIDENCE))

_MERGE_RANGE = re.compile(r"ringprof::(.*/)?merge\b")
_COMM_RANGE = re.compile(r"(?:nccl|gloo|c10d)::?(\w+)")


Calls = tuple[CommRecord, ...]
"""The communication calls that one kernel carries out, in order."""


class Classified(msgspec.Struct, frozen=True):
    """The kinds of one trace's activities; arrays as long as ``trace.activities``."""

    trace: Trace
    kind: Int8
    """Index into `KINDS`."""
    evidence: Int8
    """Index into `EVIDENCE`."""
    launch: Int64
    """Index into ``trace.launches`` of the CPU call that launched the activity, or `NONE`."""
    calls: dict[int, Calls]
    """Activity -> the communication calls that it carries out; missing where no record tells. Activities that carry
    out the same records share one tuple."""
    attention: tuple[str, ...]
    """Families of the attention kernels that ran, most frequent first."""

    def of(self, *kinds: str) -> npt.NDArray[np.bool_]:
        """Whether each activity is one of these kinds."""
        return are(self.kind, *kinds)


def classify(trace: Trace, own_rules: Sequence[Rule] = ()) -> Classified:
    """Decide every activity of a trace; ``own_rules`` are the user's."""
    launch = launches_of(trace)
    rules = {index: rule_for(trace.names[index], own_rules) for index in distinct(trace.activities.name).tolist()}
    kind, evidence = _by_name(trace, rules, own_rules)
    _by_launch(trace, launch, kind, evidence)
    _by_operator(trace, launch, kind, evidence, rules)
    calls = {}
    kinds: dict[int, str] = {}
    for activity, found, source in _calls(trace, launch, kind):
        calls[activity] = found
        if id(found) not in kinds:
            kinds[id(found)] = _kind_of_calls(found, trace.rank)
        kind[activity], evidence[activity] = CODE[kinds[id(found)]], source
    _by_comm_annotation(trace, launch, kind, evidence)
    _by_stream(trace, launch, kind, evidence)
    return Classified(trace, kind, evidence, launch, calls, _families(trace, rules))


def launches_of(trace: Trace) -> Int64:
    """Index into ``trace.launches`` for each activity, by correlation; `NONE` where no launch was recorded."""
    return launch_rows(trace.activities.correlation, trace.launches.correlation)


# --- names ----------------------------------------------------------------------------------------


Rules = dict[int, "Rule | None"]
"""For each name of an activity, as its index into ``trace.names``: the rule that fits it."""


def _by_name(trace: Trace, rules: Rules, own_rules: Sequence[Rule]) -> tuple[Int8, Int8]:
    """Kinds from the name rules; copies and sets from their category."""
    code = np.full(max(len(trace.names), 1), CODE["other"], np.int8)
    for index, rule in rules.items():
        code[index] = CODE[rule.kind] if rule else CODE["other"]
    kind = code[trace.activities.name]
    evidence = np.where(_rows_whose_rule(trace, rules, bool), NAME, NO_EVIDENCE).astype(np.int8)
    for category, name in ((MEMCPY, "memcpy"), (MEMSET, "memset")):
        rows = trace.activities.category == category
        kind[rows], evidence[rows] = CODE[name], NAME
    peer_copy = trace.names_that(lambda name: re.search("PtoP|PeerToPeer|P2P", name))[trace.activities.name]
    kind[(trace.activities.category == MEMCPY) & peer_copy] = CODE["copy_engine"]
    if own_rules:
        rows = _rows_whose_rule(trace, rules, lambda rule: rule in own_rules)
        kind[rows], evidence[rows] = code[trace.activities.name[rows]], USER_RULE
    return kind, evidence


def _rows_whose_rule(trace: Trace, rules: Rules, fit: Callable[[Rule | None], object]) -> npt.NDArray[np.bool_]:
    """Which activities have a name whose rule fits."""
    fitting = np.zeros(max(len(trace.names), 1), np.bool_)
    fitting[[index for index, rule in rules.items() if fit(rule)]] = True
    return fitting[trace.activities.name]


def _families(trace: Trace, rules: Rules) -> tuple[str, ...]:
    counts = np.bincount(trace.activities.name, minlength=len(trace.names))
    seen: dict[str, int] = {}
    for index, rule in rules.items():
        if rule is not None and rule.family and rule.kind in ATTENTION:
            seen[rule.family] = seen.get(rule.family, 0) + int(counts[index])
    return tuple(sorted(seen, key=lambda family: (-seen[family], family)))


# --- the launch: operators and ringprof's own ranges --------------------------------------------------


def _by_launch(trace: Trace, launch: Int64, kind: Int8, evidence: Int8) -> None:
    """Compute kernels launched inside an attention operator or a merge range, where their name is no better proof."""
    kernel = (trace.activities.category != MEMCPY) & (trace.activities.category != MEMSET)
    named_flash = are(kind, *ATTENTION) & ~trace.names_that(tells_no_pass)[trace.activities.name]
    kernel &= evidence != USER_RULE
    open_to_change = kernel & ~named_flash & ~are(kind, *COMMUNICATION)
    for name in ATTENTION:
        wanted = {text for text in trace.names if kind_of_attention_operator(text) == name}
        rows = open_to_change & launched_inside(trace, launch, trace.operators, wanted.__contains__)
        kind[rows], evidence[rows] = CODE[name], CPU_RECORDS
        open_to_change &= ~rows
    rows = open_to_change & launched_inside(trace, launch, trace.annotations, _MERGE_RANGE.match)
    kind[rows], evidence[rows] = CODE["merge"], ANNOTATION


def _by_operator(trace: Trace, launch: Int64, kind: Int8, evidence: Int8, rules: Rules) -> None:
    """Kernels whose names say little: what they were launched in says more."""
    named = evidence == NAME
    unknown = (evidence == NO_EVIDENCE) | (named & _rows_whose_rule(trace, rules, lambda rule: rule and rule.guessed))
    loose = unknown | (named & _rows_whose_rule(trace, rules, lambda rule: rule and rule.loose))
    loose &= are(kind, *COMPUTE) & ~are(kind, *ATTENTION)
    for kind_of, rows in ((kind_enclosing, loose), (kind_of_its_kernel, loose & unknown)):
        for name, ranges, source, wanted in _ranges_that_tell(trace, kind_of):
            inside = rows & launched_inside(trace, launch, ranges, wanted.__contains__)
            kind[inside], evidence[inside] = CODE[name], source
            rows &= ~inside
            loose &= ~inside


def _ranges_that_tell(
    trace: Trace, kind_of: Callable[[str], str | None]
) -> Iterator[tuple[str, Ranges, int, set[str]]]:
    """(kind, operators or annotations, evidence, their names) in the order in which they are asked."""
    found: dict[str, list[tuple[Ranges, int, set[str]]]] = {}
    for ranges, source in ((trace.operators, CPU_RECORDS), (trace.annotations, ANNOTATION)):
        names: dict[str, set[str]] = {}
        for index in distinct(ranges.name).tolist():
            if told := kind_of(trace.names[index]):
                names.setdefault(told, set()).add(trace.names[index])
        for name, wanted in names.items():
            found.setdefault(name, []).append((ranges, source, wanted))
    for name in sorted(found, key=lambda one: [*ENCLOSING, *KINDS].index(one)):
        for ranges, source, wanted in found[name]:
            yield name, ranges, source, wanted


def launched_inside(
    trace: Trace, launch: Int64, ranges: Ranges, wanted: Callable[[str], object]
) -> npt.NDArray[np.bool_]:
    """Whether each activity was launched inside a range of a wanted name, on the range's own thread."""
    inside = np.zeros(len(launch), np.bool_)
    rows = trace.names_that(wanted)[ranges.name]
    joined = launch != NONE
    if not rows.any() or not joined.any():
        return inside
    at = np.where(joined, launch, 0)
    for thread in distinct(ranges.thread[rows]):
        mine = rows & (ranges.thread == thread)
        spans = intervals.union(ranges.start_ns[mine], ranges.end_ns[mine])
        here = joined & (trace.launches.thread[at] == thread)
        inside |= here & intervals.contains(spans, trace.launches.start_ns[at])
    return inside


# --- communication records ------------------------------------------------------------------------


def _calls(trace: Trace, launch: Int64, kind: Int8) -> Iterator[tuple[int, Calls, int]]:
    """(activity, the calls it carries out, evidence) for every activity that a communication record speaks of."""
    own = np.flatnonzero(trace.activities.collective != NONE)
    known: dict[tuple[int, ...], Calls] = {}

    def calls_of(records: tuple[int, ...]) -> Calls:
        if records not in known:
            found = (trace.collectives[record] for record in records)
            known[records] = tuple(record for record in found if kind_of_collective(record.name) is not None)
        return known[records]

    for activity, number in zip(own.tolist(), trace.activities.collective[own].tolist(), strict=True):
        if calls := calls_of((number,)):
            yield activity, calls, METADATA
    communication = are(kind, *COMMUNICATION)
    communication[own] = True
    bare = communication & (trace.activities.collective == NONE) & (launch != NONE)
    # All nodes of a CUDA graph share one launch, which was preceded by no record of theirs.
    bare &= (trace.activities.graph_node == NONE) & _launched_alone(launch)
    for activity, numbers in _records_before(trace, launch, communication, bare):
        if calls := calls_of(numbers):
            yield activity, calls, CPU_RECORDS


def _launched_alone(launch: Int64) -> npt.NDArray[np.bool_]:
    counts = np.bincount(launch + 1, minlength=1)
    alone: npt.NDArray[np.bool_] = counts[launch + 1] == 1
    return alone


def _records_before(
    trace: Trace, launch: Int64, communication: npt.NDArray[np.bool_], bare: npt.NDArray[np.bool_]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """For each bare kernel the records on its launching thread since the communication launch before its own."""
    records, launches = trace.comm_records, trace.launches
    comm = np.flatnonzero(communication & (launch != NONE))
    comm = comm[np.argsort(launches.start_ns[launch[comm]], kind="stable")]
    for thread in distinct(launches.thread[launch[comm]]):
        mine = comm[launches.thread[launch[comm]] == thread]
        launched = launches.start_ns[launch[mine]]
        rows = np.flatnonzero(records.thread == thread)
        until = np.searchsorted(records.start_ns[rows], launched, side="right")
        since = np.concatenate(([0], until[:-1]))
        ends, numbers = records.end_ns[rows].tolist(), records.collective[rows].tolist()
        columns = (mine, bare[mine], since, until, launched)
        for activity, alone, first, last, at in zip(*(column.tolist() for column in columns), strict=True):
            if alone:
                # A record that the launch lies in is this kernel's own: the ones before it sent nothing here.
                around = tuple([numbers[row] for row in range(first, last) if ends[row] > at])
                yield activity, around or tuple(numbers[first:last])


def _kind_of_calls(calls: Calls, rank: int | None) -> str:
    kinds = {kind_of_collective(call.name) or "comm_other" for call in calls}
    if kinds == {"all_to_all"} and all(single_peer(call, rank) is not None for call in calls):
        return "send_recv"
    # Nobody sends to itself but in an all-to-all, which NCCL carries out as sends and receives.
    to = [call.destination_rank for call in calls if "send" in call.name]
    if kinds == {"send_recv"} and rank is not None and rank in to:
        return "all_to_all"
    return kinds.pop() if len(kinds) == 1 else "comm_other"


def single_peer(call: CommRecord, rank: int | None) -> tuple[int, int] | None:
    """(rank sent to, rank received from) of an all-to-all that is a rotation: its splits have one peer each."""
    if not call.in_split:
        return None
    to = [index for index, size in enumerate(call.in_split) if size]
    source = [index for index, size in enumerate(call.out_split) if size]
    if len(to) != 1 or len(source) != 1:
        return None
    ranks = call.group_ranks or tuple(range(call.group_size or len(call.in_split)))
    if max(to[0], source[0]) >= len(ranks) or rank in (ranks[to[0]], ranks[source[0]]):
        return None
    return ranks[to[0]], ranks[source[0]]


# --- annotations around communication -----------------------------------------------------------------


def _by_comm_annotation(trace: Trace, launch: Int64, kind: Int8, evidence: Int8) -> None:
    """Communication kernels that no record speaks of take the kind that their annotation names, if it names one."""
    rows = (evidence == NAME) & are(kind, *COMMUNICATION)
    rows &= kind != CODE["copy_engine"]
    if not rows.any():
        return
    named = {name: found for name in trace.names if (found := _kind_of_comm_range(name))}
    for name in set(named.values()):
        wanted = {text for text, kind_named in named.items() if kind_named == name}
        inside = rows & launched_inside(trace, launch, trace.annotations, wanted.__contains__)
        kind[inside], evidence[inside] = CODE[name], ANNOTATION


def _by_stream(trace: Trace, launch: Int64, kind: Int8, evidence: Int8) -> None:
    """SendRecv kernels whose launch was cut off are what all others of their stream are, which is one communicator's.

    An all-to-all runs under this name, too, and would be taken as a hop.
    """
    rows = trace.activities
    named = evidence == NAME
    bare = np.flatnonzero(named & (kind == CODE["send_recv"]) & (launch == NONE) & (rows.graph_node == NONE))
    for at in bare.tolist():
        same = (rows.stream == rows.stream[at]) & (rows.device == rows.device[at])
        others = distinct(kind[same & ~named & are(kind, *COMMUNICATION)])
        if len(others) == 1:
            kind[at], evidence[at] = others[0], STREAM


def _kind_of_comm_range(name: str) -> str | None:
    match = _COMM_RANGE.match(name)
    kind = kind_of_collective(match[1]) if match else None
    # nccl:coalesced says that something was batched and not what.
    return None if kind == "comm_other" else kind
