"""The line of evidence of each part of a waterfall."""

from __future__ import annotations

from statistics import fmean

import msgspec

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.summary import Summary
from ringprof.analysis.kinds.kinds import COMPUTE_PARTS, MEMORY
from ringprof.analysis.rank import Rank
from ringprof.devices import Peak
from ringprof.formatting import milliseconds, three_digits
from ringprof.workload_checks import workload_fits


class AttentionWork(msgspec.Struct, frozen=True):
    """The attention work of the window over all ranks, and the rates it is held against."""

    peak: Peak | None
    needed: int
    """FLOPs of the workload, from its exact mask area."""
    done: int | None
    """FLOPs of the blocks that were computed; None where the run did not count them."""
    solo_tflops: float | None
    """Rate of the same blocks with nothing sent; None where it was not measured."""


def evidence_of(attribution: Attribution, summary: Summary, work: AttentionWork | None) -> dict[str, str]:
    """The words for every part."""
    return {
        "attention": _attention(attribution, work),
        **_work_words(attribution, work),
        "imbalance": _imbalance(attribution),
        "exposed_wire": _wire(summary),
        "peer_wait": "waiting beyond what the ranks' computation differs by",
        "exposed_unsplit": _unsplit(attribution),
        "other_groups": "communication of groups that were not asked for, with nothing beside it",
        **{part: _beside(summary, kinds) for part, kinds in COMPUTE_PARTS.items()},
        "merge_and_copies": _beside(summary, (*COMPUTE_PARTS["merge_and_copies"], *MEMORY)),
        "background": "other work of the device runs, launched outside the window",
        "launch_gaps": _HOST_BOUND if not attribution.on_cpu else "neither computing nor blocked",
        "blocked": "nothing ran on the device, although the next activity had been launched, or no launch is recorded",
    }


_HOST_BOUND = "nothing ran on the device before the next activity was launched, and in gaps below 5 us"


def _attention(attribution: Attribution, work: AttentionWork | None) -> str:
    mean = fmean(rank.breakdown.flash_ns for rank in attribution.ranks)
    if attribution.on_cpu:
        return f"attention operators, mean {milliseconds(mean)}"
    reason = "the traces do not tell the work" if work is None else "no peak is known that fits"
    if attribution.run is not None and not workload_fits(attribution.run):
        reason = "the stated workload does not fit the counted FLOPs"
    return f"union of the attention kernels; {reason}: not held against a peak"


def _work_words(attribution: Attribution, work: AttentionWork | None) -> dict[str, str]:
    if work is None or work.peak is None:
        return {}
    count = len(attribution.ranks)
    spent = sum(rank.breakdown.flash_ns for rank in attribution.ranks)
    done = work.done or work.needed
    rate = done / spent / 1e3 if spent else 0.0
    peak = work.peak
    words = {
        "peak": f"{work.needed / count / 1e12:,.1f} TFLOP a device at {peak.tflops:g} TFLOP/s ({peak.source})",
        "repeated": f"blocks of {done / work.needed:.4f} times the work that the mask needs",
    }
    if work.solo_tflops:
        share = work.solo_tflops / peak.tflops
        words["kernel"] = f"the same blocks alone: {work.solo_tflops:,.1f} TFLOP/s, {share:.0%} of peak"
        words["slowdown"] = f"{rate:,.1f} TFLOP/s in the run against {work.solo_tflops:,.1f} alone"
    else:
        merged = "" if work.done is not None else " repeated work and"
        words["kernel"] = (
            f"{rate:,.1f} TFLOP/s in the run; no solo rate:{merged} slow-down beside communication is in it"
        )
    return words


def _imbalance(attribution: Attribution) -> str:
    ranks = attribution.ranks
    least = min(ranks, key=lambda rank: rank.breakdown.compute_ns)
    most = max(ranks, key=lambda rank: rank.breakdown.compute_ns)
    return f"{_computes(least)}, {_computes(most)}"


def _computes(rank: Rank) -> str:
    return f"rank {rank.rank} computes {milliseconds(rank.breakdown.compute_ns)}"


def _wire(summary: Summary) -> str:
    rates = [
        f"{row.kind} {three_digits(row.wire_gbps)} GB/s" for row in summary.communication if row.wire_gbps is not None
    ]
    return f"on the wire with no computation beside it; {', '.join(rates[:3]) or 'rates not known'}"


def _unsplit(attribution: Attribution) -> str:
    if attribution.on_cpu:
        return "blocked in wait: on CPU wire, peer wait and imbalance are not told apart"
    return "its kernels have no wait and wire (see warnings): exposed wire, peer wait and imbalance in one"


def _beside(summary: Summary, kinds: tuple[str, ...]) -> str:
    listed = [f"{row.kind} {milliseconds(row.time_ns)}" for row in summary.kinds if row.kind in kinds]
    return f"not beside attention; mean of all: {', '.join(listed) or 'none'}"
