"""Decide whether two measurements did the same work, and name the evidence.

Evidence, strongest first: the user's statement, workloads that both sides state, and the traces of both per iteration.
Traces as read here hold neither shapes nor masks. From traces alone, work is the same where every rank runs the same
number of computation calls of each kind. Where both sides record bytes, each rank must also send the same bytes and
copy the same bytes from the host. Communication calls and kernel names may differ, since a transport and an autotuner
choose them.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING

import msgspec

from ringprof.analysis.findings.metric import Measurement, RankEvidence, WorkEvidence

if TYPE_CHECKING:
    from ringprof.analysis.findings.findings import Findings

WORK = ("seq", "batch", "heads", "kv_heads", "head_dim", "causal", "dtype", "world_size", "passes")
"""Settings that determine the amount of work and the number of ranks."""
_DEFAULTS = {
    "operator": "attention",
    "layers": "1",
    "steps": "1",
    "mask": "plain",
    "v_head_dim": "as head_dim",
    "scores": "plain",
    "conv_width": "none",
    "phase": "training",
    "kv_length": "none",
    "sequences": "one",
    "layer": "none",
}
"""Further settings that determine the work, and what a workload has that does not state them."""
PARAMETER_PREFIX = "-p "
"""Prefix of the name of a setting that is a parameter of a strategy."""


def missing_setting_text(name: str, settings: Mapping[str, str | None]) -> str:
    """Return what stands for a setting that a measurement with these ``settings`` lacks.

    A dash for a strategy's parameter, the default where the workload is stated, else ``unknown``.
    """
    if name.startswith(PARAMETER_PREFIX):
        return "-"
    stated = all(settings.get(setting) is not None for setting in WORK)
    return _DEFAULTS.get(name, "unknown") if stated else "unknown"


class WorkMatch(msgspec.Struct, frozen=True):
    """Decision whether a measurement did the same work as the base."""

    same: bool
    """Whether the work is the same; False where it is not known, too."""
    by: str
    """Source of the decision: ``user``, ``settings``, ``traces``, or ``nothing`` where a side has no evidence."""
    text: str = ""
    """Evidence in the traces, or the difference in the work; else empty."""


def evidence_of(findings: Findings, iterations: int) -> WorkEvidence | None:
    """Collect the evidence of work in traces of this many iterations; None where they show no call."""
    from ringprof.analysis.kinds.kinds import COMPUTE, KIND  # here: logs are read without numpy

    computes = any(kind in COMPUTE for rank in findings.attribution.ranks for kind in rank.breakdown.kinds)
    counted_kinds = COMPUTE if computes else KIND
    ranks = tuple(
        RankEvidence(
            rank.rank,
            {KIND[kind].label: time.calls for kind, time in rank.breakdown.kinds.items() if kind in counted_kinds},
            rank.sent_bytes,
            rank.from_host_bytes,
        )
        for rank in findings.attribution.ranks
    )
    if not any(rank.calls for rank in ranks):
        return None
    kernels: dict[str, int] = {}
    for kernel in findings.attribution.kernels:
        if kernel.kind in COMPUTE:
            kernels[kernel.name] = kernels.get(kernel.name, 0) + kernel.calls
    return WorkEvidence(iterations, findings.attribution.world_size, ranks, kernels, computes)


def match_work(base: Measurement, other: Measurement, *, did_same_work: bool = False) -> WorkMatch:
    """Decide whether ``other`` did the same work as ``base``; ``did_same_work``: whether the user states it."""
    if did_same_work:
        return WorkMatch(same=True, by="user")
    is_stated = [all(entry.settings.get(name) is not None for name in WORK) for entry in (base, other)]
    differing = [name for name in (*WORK, *_DEFAULTS) if base.settings.get(name) != other.settings.get(name)]
    if not all(is_stated):
        differing = [name for name in differing if None not in (base.settings.get(name), other.settings.get(name))]
    if differing:
        return WorkMatch(
            same=False, by="settings", text=", ".join(_setting_difference(name, base, other) for name in differing)
        )
    if all(is_stated):
        return WorkMatch(same=True, by="settings")
    if base.evidence is None or other.evidence is None:
        # A table and a log have no calls per rank.
        lacking = next(entry for entry, is_known in zip((base, other), is_stated, strict=True) if not is_known)
        unstated = [name for name in WORK if lacking.settings.get(name) is None]
        missing = "its workload" if len(unstated) == len(WORK) else ", ".join(unstated)
        return WorkMatch(same=False, by="nothing", text=f"{lacking.label} does not state {missing}")
    difference = _difference(base.evidence, other.evidence)
    if difference:
        return WorkMatch(same=False, by="traces", text=difference)
    return WorkMatch(same=True, by="traces", text=_common_work(base.evidence, other.evidence))


def same_evidence(base: WorkEvidence | None, other: WorkEvidence | None) -> bool:
    """Return whether the traces of two recordings show the same work."""
    return base is not None and other is not None and not _difference(base, other)


def _setting_difference(name: str, base: Measurement, other: Measurement) -> str:
    """State the other's and the base's value of a setting."""
    base_value, other_value = (
        entry.settings.get(name) or missing_setting_text(name, entry.settings) for entry in (base, other)
    )
    return f"{name} {other_value} against {base_value}"


def _difference(base: WorkEvidence, other: WorkEvidence) -> str:
    """Name the first difference in the work; empty where the traces show none."""
    if base.world_size != other.world_size:
        return f"world size {other.world_size} against {base.world_size}"
    if len(base.ranks) != len(other.ranks):
        return f"traces of {len(other.ranks)} ranks against {len(base.ranks)}"
    for base_rank, other_rank in zip(base.ranks, other.ranks, strict=True):
        for kind in dict.fromkeys([*base_rank.calls, *other_rank.calls]):
            calls = base_rank.calls.get(kind, 0), other_rank.calls.get(kind, 0)
            if calls[0] * other.iterations != calls[1] * base.iterations:
                base_text, other_text = _per_iteration(calls[0], base), _per_iteration(calls[1], other)
                return (
                    f"rank {other_rank.rank} runs {other_text} calls of kind {kind} per iteration against {base_text}"
                )
        for description, bytes_moved in _recorded_bytes(base_rank, other_rank).items():
            if bytes_moved[0] * other.iterations != bytes_moved[1] * base.iterations:
                base_text, other_text = (
                    _bytes_in_words(size / side.iterations)
                    for size, side in zip(bytes_moved, (base, other), strict=True)
                )
                return f"rank {other_rank.rank} {description} {other_text} per iteration against {base_text}"
    return ""


def _recorded_bytes(base: RankEvidence, other: RankEvidence) -> dict[str, tuple[int, int]]:
    """Return the bytes of the base and of the other by description, where both ranks record them.

    Sends are left out where a side records 0 bytes, since its transport may not record sizes.
    """
    by_description = {
        "sends": (base.sent_bytes, other.sent_bytes),
        "copies from the host": (base.from_host_bytes, other.from_host_bytes),
    }
    known = {
        description: (base_bytes, other_bytes)
        for description, (base_bytes, other_bytes) in by_description.items()
        if base_bytes is not None and other_bytes is not None
    }
    return {
        description: bytes_moved
        for description, bytes_moved in known.items()
        if description != "sends" or all(bytes_moved)
    }


def _common_work(base: WorkEvidence, other: WorkEvidence) -> str:
    """State the work that the traces of both show alike, and what they cannot show."""
    calls = sum(sum(rank.calls.values()) for rank in base.ranks)
    noun = ("computation kernels" if base.kernels else "computation operators") if base.computes else "calls"
    ranks = f"{len(base.ranks)} ranks" if len(base.ranks) > 1 else "one rank"
    statements = [f"the same {_per_iteration(calls, base)} {noun} per iteration on {ranks}, {_name_match(base, other)}"]
    bytes_moved = [
        _recorded_bytes(base_rank, other_rank) for base_rank, other_rank in zip(base.ranks, other.ranks, strict=True)
    ]
    for noun, words in (("sends", "bytes sent"), ("copies from the host", "bytes copied from the host")):
        if all(noun in rank for rank in bytes_moved) and any(sum(rank[noun]) for rank in bytes_moved):
            statements.append(f"the same {words}")
    return f"{', '.join(statements)}; shapes and masks are not compared"


def _name_match(base: WorkEvidence, other: WorkEvidence) -> str:
    """State whether the kernel calls of both sides are equal by name, or how many of the base's are not.

    Calls are counted per iteration.
    """
    if not base.kernels or not other.kernels:
        return "equal by kind"
    equal = sum(
        min(Fraction(calls, base.iterations), Fraction(other.kernels.get(name, 0), other.iterations))
        for name, calls in base.kernels.items()
    )
    renamed = Fraction(sum(base.kernels.values()), base.iterations) - equal
    return f"equal by kind, {float(renamed):,g} of them with other names" if renamed else "equal by kind and name"


def _per_iteration(calls: int, evidence: WorkEvidence) -> str:
    """Return the calls per iteration as text."""
    return f"{calls / evidence.iterations:,.10g}"


def _bytes_in_words(size_bytes: float) -> str:
    """Return a number of bytes with a decimal unit."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.3g} {unit}"
    return f"{size_bytes:.0f} B"
