"""Evidence for each part of a waterfall: the metrics that the part is computed from, in one line each."""

from __future__ import annotations

from statistics import fmean

import msgspec

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.summary import Summary
from ringprof.analysis.kinds.kinds import COMPUTE_PARTS, MEMORY
from ringprof.analysis.rank import Rank
from ringprof.common.formatting import milliseconds, three_digits
from ringprof.workload.devices import Peak
from ringprof.workload_checks import workload_fits


class AttentionWork(msgspec.Struct, frozen=True):
    """Attention work of the window over all ranks, and the rates that it is compared with."""

    peak: Peak | None
    needed: int
    """FLOPs that the workload needs, from its exact mask area."""
    done: int | None
    """FLOPs of the computed blocks; None where the run did not count them."""
    solo_tflops: float | None
    """TFLOP/s of the same blocks without communication; None where they were not measured."""


def part_evidence(attribution: Attribution, summary: Summary, work: AttentionWork | None) -> dict[str, str]:
    """Return the line of evidence for every part, by its name."""
    return {
        "attention": _attention_evidence(attribution, work),
        **_work_evidence(attribution, work),
        "imbalance": _imbalance_evidence(attribution),
        "exposed_wire": _wire_evidence(summary),
        "peer_wait": "waiting beyond what the ranks' computation differs by",
        "exposed_unsplit": _unsplit_evidence(attribution),
        "other_groups": "communication of groups that were not asked for, with nothing beside it",
        **{part: _compute_evidence(summary, kinds) for part, kinds in COMPUTE_PARTS.items()},
        "merge_and_copies": _compute_evidence(summary, (*COMPUTE_PARTS["merge_and_copies"], *MEMORY)),
        "background": "other work of the device runs, launched outside the window",
        "launch_gaps": _HOST_BOUND if not attribution.on_cpu else "neither computing nor blocked",
        "blocked": "nothing ran on the device, although the next activity had been launched, or no launch is recorded",
    }


_HOST_BOUND = "nothing ran on the device before the next activity was launched, and in gaps below 5 us"


def _attention_evidence(attribution: Attribution, work: AttentionWork | None) -> str:
    """Say why attention is not split: no known work, or no peak that fits; on CPU give its mean time."""
    mean_ns = fmean(rank.breakdown.flash_ns for rank in attribution.ranks)
    if attribution.on_cpu:
        return f"attention operators, mean {milliseconds(mean_ns)}"
    reason = "the traces do not tell the work" if work is None else "no peak is known that fits"
    if attribution.run is not None and not workload_fits(attribution.run):
        reason = "the stated workload does not fit the counted FLOPs"
    return f"union of the attention kernels; {reason}: not held against a peak"


def _work_evidence(attribution: Attribution, work: AttentionWork | None) -> dict[str, str]:
    """Return the evidence for the parts that compare attention with the peak; empty where no peak is known."""
    if work is None or work.peak is None:
        return {}
    rank_count = len(attribution.ranks)
    attention_ns = sum(rank.breakdown.flash_ns for rank in attribution.ranks)
    done_flops = work.done or work.needed
    rate_tflops = done_flops / attention_ns / 1e3 if attention_ns else 0.0
    peak = work.peak
    words = {
        "peak": f"{work.needed / rank_count / 1e12:,.1f} TFLOP a device at {peak.tflops:g} TFLOP/s ({peak.source})",
        "repeated": f"blocks of {done_flops / work.needed:.4f} times the work that the mask needs",
    }
    if work.solo_tflops:
        share = work.solo_tflops / peak.tflops
        words["kernel"] = f"the same blocks alone: {work.solo_tflops:,.1f} TFLOP/s, {share:.0%} of peak"
        words["slowdown"] = f"{rate_tflops:,.1f} TFLOP/s in the run against {work.solo_tflops:,.1f} alone"
    else:
        other_cause = "" if work.done is not None else " repeated work and"
        words["kernel"] = (
            f"{rate_tflops:,.1f} TFLOP/s in the run; no solo rate:{other_cause} slow-down beside communication is in it"
        )
    return words


def _imbalance_evidence(attribution: Attribution) -> str:
    """Give the shortest and the longest computation time of a rank."""
    ranks = attribution.ranks
    least = min(ranks, key=lambda rank: rank.breakdown.compute_ns)
    most = max(ranks, key=lambda rank: rank.breakdown.compute_ns)
    return f"{_compute_time(least)}, {_compute_time(most)}"


def _compute_time(rank: Rank) -> str:
    """Give the computation time of a rank."""
    return f"rank {rank.rank} computes {milliseconds(rank.breakdown.compute_ns)}"


def _wire_evidence(summary: Summary) -> str:
    """Give the rates on the wire of the three longest kinds of communication."""
    rates = [
        f"{row.kind} {three_digits(row.wire_gbps)} GB/s" for row in summary.communication if row.wire_gbps is not None
    ]
    return f"on the wire with no computation beside it; {', '.join(rates[:3]) or 'rates not known'}"


def _unsplit_evidence(attribution: Attribution) -> str:
    """Say why wire, waiting and imbalance are not separated."""
    if attribution.on_cpu:
        return "blocked in wait: on CPU wire, peer wait and imbalance are not told apart"
    return "its kernels have no wait and wire (see warnings): exposed wire, peer wait and imbalance in one"


def _compute_evidence(summary: Summary, kinds: tuple[str, ...]) -> str:
    """Give the mean time of each kind that a part consists of."""
    times = [f"{row.kind} {milliseconds(row.time_ns)}" for row in summary.kinds if row.kind in kinds]
    return f"not beside attention; mean of all: {', '.join(times) or 'none'}"
