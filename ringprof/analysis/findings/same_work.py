"""Decide whether two entries of a comparison did the same work, and name the evidence.

Evidence, strongest first: the user's statement, workloads that both sides state, and what the traces of both show per
iteration. Traces as read here hold neither shapes nor masks. From traces alone, work is the same where every rank runs
the same number of computation calls of each kind and, where both sides record them, sends and copies from the host
the same bytes. Communication calls and kernel names may differ: a transport and an autotuner choose them.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from ringprof.analysis.findings.comparison import Entry
    from ringprof.analysis.findings.findings import Findings

WORK = ("seq", "batch", "heads", "kv_heads", "head_dim", "causal", "dtype", "world_size", "passes")
"""Settings that say how much work was done, and by how many."""
_UNLESS_STATED = ("layers", "steps", "mask", "v_head_dim", "scores", "phase", "kv_length", "sequences", "layer")
"""Settings that add to these. Unless stated: one layer and step, causal or full, v heads as large as those of q and k,
plain scores, no key-value cache, one sequence length, attention alone."""


class RankEvidence(msgspec.Struct, frozen=True):
    """Evidence of one rank's work in its trace, over the whole window."""

    rank: int
    calls: Mapping[str, int]
    """Computation calls by kind, as the kind is labelled; in traces without any, all calls."""
    sent_bytes: int | None = None
    """None where the size of a message is not recorded."""
    from_host_bytes: int | None = None
    """Copied from the host's memory to the GPU; None where the size of a copy is not recorded."""


class WorkEvidence(msgspec.Struct, frozen=True):
    """Evidence of the work of one entry in its traces."""

    iterations: int
    world_size: int
    """Ranks of the run, with a trace here or not."""
    ranks: tuple[RankEvidence, ...]
    """By rank."""
    kernels: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Calls of each computation kernel by name, over all ranks; empty on CPU."""
    computes: bool = True
    """Whether the traces show any computation."""


class WorkMatch(msgspec.Struct, frozen=True):
    """Whether an entry did the base's work."""

    same: bool
    """False where that is not known, too."""
    by: str
    """What decides: ``user``, ``settings``, ``traces``, or ``nothing`` where a side has no evidence."""
    text: str = ""
    """The evidence of ``traces``, or how the work differs; else empty."""


def evidence_of(found: Findings, iterations: int) -> WorkEvidence | None:
    """Collect what traces of this many iterations show of their work; None where they show no call."""
    from ringprof.analysis.kinds.kinds import COMPUTE, KIND  # here: logs are read without numpy

    computes = any(kind in COMPUTE for rank in found.attribution.ranks for kind in rank.breakdown.kinds)
    counted = COMPUTE if computes else KIND
    ranks = tuple(
        RankEvidence(
            rank.rank,
            {KIND[kind].label: time.calls for kind, time in rank.breakdown.kinds.items() if kind in counted},
            rank.bytes_moved.sent_bytes,
            rank.bytes_moved.from_host_bytes,
        )
        for rank in found.attribution.ranks
    )
    if not any(rank.calls for rank in ranks):
        return None
    kernels: dict[str, int] = {}
    for kernel in found.attribution.kernels:
        if kernel.kind in COMPUTE:
            kernels[kernel.name] = kernels.get(kernel.name, 0) + kernel.calls
    return WorkEvidence(iterations, found.attribution.world_size, ranks, kernels, computes)


def match_work(base: Entry, other: Entry, *, did_same_work: bool = False) -> WorkMatch:
    """Decide whether ``other`` did the work of ``base``; ``did_same_work``: the user says so."""
    if did_same_work:
        return WorkMatch(same=True, by="user")
    stated = [all(entry.settings.get(name) is not None for name in WORK) for entry in (base, other)]
    names = [name for name in (*WORK, *_UNLESS_STATED) if base.settings.get(name) != other.settings.get(name)]
    if not all(stated):
        names = [name for name in names if None not in (base.settings.get(name), other.settings.get(name))]
    if names:
        return WorkMatch(same=False, by="settings", text=", ".join(_stated(name, base, other) for name in names))
    if all(stated):
        return WorkMatch(same=True, by="settings")
    if base.evidence is None or other.evidence is None:
        # A table and a log have no calls by rank.
        lacking = next(entry for entry, known in zip((base, other), stated, strict=True) if not known)
        unstated = [name for name in WORK if lacking.settings.get(name) is None]
        what = "its workload" if len(unstated) == len(WORK) else ", ".join(unstated)
        return WorkMatch(same=False, by="nothing", text=f"{lacking.label} does not state {what}")
    difference = _difference(base.evidence, other.evidence)
    if difference:
        return WorkMatch(same=False, by="traces", text=difference)
    return WorkMatch(same=True, by="traces", text=_in_common(base.evidence, other.evidence))


def same_evidence(one: WorkEvidence | None, other: WorkEvidence | None) -> bool:
    """Whether the traces of two recordings show the same work."""
    return one is not None and other is not None and not _difference(one, other)


def _stated(name: str, base: Entry, other: Entry) -> str:
    one, two = (entry.settings.get(name) or "not stated" for entry in (base, other))
    return f"{name} {two} against {one}"


def _difference(base: WorkEvidence, other: WorkEvidence) -> str:
    """Name the first difference in the work; empty where the traces show none."""
    if base.world_size != other.world_size:
        return f"world size {other.world_size} against {base.world_size}"
    if len(base.ranks) != len(other.ranks):
        return f"traces of {len(other.ranks)} ranks against {len(base.ranks)}"
    for one, two in zip(base.ranks, other.ranks, strict=True):
        for kind in dict.fromkeys([*one.calls, *two.calls]):
            calls = one.calls.get(kind, 0), two.calls.get(kind, 0)
            if calls[0] * other.iterations != calls[1] * base.iterations:
                mine, theirs = _per_iteration(calls[0], base), _per_iteration(calls[1], other)
                return f"rank {two.rank} runs {theirs} calls of kind {kind} per iteration against {mine}"
        for what, moved in _moved(one, two).items():
            if moved[0] * other.iterations != moved[1] * base.iterations:
                mine, theirs = (_size(size / side.iterations) for size, side in zip(moved, (base, other), strict=True))
                return f"rank {two.rank} {what} {theirs} per iteration against {mine}"
    return ""


def _moved(one: RankEvidence, two: RankEvidence) -> dict[str, tuple[int, int]]:
    """Bytes that both ranks record. Nothing recorded as sent may be a transport that records no sizes."""
    both = {
        "sends": (one.sent_bytes, two.sent_bytes),
        "copies from the host": (one.from_host_bytes, two.from_host_bytes),
    }
    known = {what: (a, b) for what, (a, b) in both.items() if a is not None and b is not None}
    return {what: moved for what, moved in known.items() if what != "sends" or all(moved)}


def _in_common(base: WorkEvidence, other: WorkEvidence) -> str:
    """State what both traces show alike, and what they cannot show."""
    calls = sum(sum(rank.calls.values()) for rank in base.ranks)
    what = ("computation kernels" if base.kernels else "computation operators") if base.computes else "calls"
    ranks = f"{len(base.ranks)} ranks" if len(base.ranks) > 1 else "one rank"
    shared = [f"the same {_per_iteration(calls, base)} {what} per iteration on {ranks}, {_named(base, other)}"]
    moved = [_moved(one, two) for one, two in zip(base.ranks, other.ranks, strict=True)]
    for what, words in (("sends", "bytes sent"), ("copies from the host", "bytes copied from the host")):
        if all(what in rank for rank in moved) and any(sum(rank[what]) for rank in moved):
            shared.append(f"the same {words}")
    return f"{', '.join(shared)}; shapes and masks are not compared"


def _named(base: WorkEvidence, other: WorkEvidence) -> str:
    """Say how many of the base's kernels have another name in the other traces."""
    if not base.kernels or not other.kernels:
        return "equal by kind"
    alike = sum(
        min(Fraction(calls, base.iterations), Fraction(other.kernels.get(name, 0), other.iterations))
        for name, calls in base.kernels.items()
    )
    renamed = Fraction(sum(base.kernels.values()), base.iterations) - alike
    return f"equal by kind, {float(renamed):,g} of them with other names" if renamed else "equal by kind and name"


def _per_iteration(calls: int, evidence: WorkEvidence) -> str:
    return f"{calls / evidence.iterations:,.10g}"


def _size(size: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} B"
