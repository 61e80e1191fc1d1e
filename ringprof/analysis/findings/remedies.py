"""What would shorten each part of this run's waterfall, in few words.

Words follow from what was run: nobody is told to choose zigzag who has, or to record ranks that are there.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.summary import Communication, Summary
from ringprof.analysis.transfers.hops import OTHER_HOST
from ringprof.digits import milliseconds, three_digits
from ringprof.run import StrategyUsed

UNBALANCED = 1.5
"""How many times longer one rank must compute than another, rising with the rank, to look like a causal mask."""
SLOW_LINK = 3.0
"""A rank is at a slow link where its wire rate is this many times below the fastest rank's."""
_SAME_WORK = 1.02
"""How many times another's work is still the same."""
_LONGER = "longer pieces a rank"


def remedies_of(attribution: Attribution, summary: Summary) -> dict[str, str]:
    """For parts of a waterfall; nothing for those that nothing is known to shorten."""
    used = _strategy(attribution)
    found = {
        "kernel": f"another kernel (ringprof kernels), {_LONGER}",
        "attention": f"a faster kernel, {_LONGER}",
        "repeated": "a strategy that computes nothing twice",
        "slowdown": "" if used and used.hops == "copy" else "--hops copy, fewer channels of NCCL",
        "imbalance": _imbalance(attribution),
        "exposed_wire": _wire(attribution, longest_on_wire(summary)),
        "peer_wait": _wait(attribution, summary),
        "exposed_unsplit": _unsplit(attribution),
        "other_groups": "other groups' work beside this one's",
        "merge_and_copies": f"fewer merges, {_LONGER}",
        "launch_gaps": _gaps(attribution),
    }
    return {part: words for part, words in found.items() if words}


def known_contiguous(attribution: Attribution) -> bool:
    """Whether the run's ranks have contiguous pieces under a plain causal mask: work that rises with the rank."""
    run = attribution.run
    if run is None or run.strategy is None or run.workload is None or not run.workload.causal:
        return False
    if run.workload.documents or run.workload.window:
        return False  # their work is not a triangle
    return run.strategy.layout == "contiguous"


def rises_with_rank(attribution: Attribution) -> bool:
    """Whether traces of an unknown program look like that."""
    if attribution.run is not None and attribution.run.strategy is not None:
        return False
    times = [rank.breakdown.flash_ns for rank in attribution.ranks]
    rising = all(later > earlier for earlier, later in pairwise(times))
    return len(times) > 2 and rising and times[-1] >= UNBALANCED * times[0]


def slow_between_hosts(summary: Summary) -> Communication | None:
    """What moves between hosts, where that is slower than within one, or all there is."""
    rows = [row for row in summary.communication if row.wire_gbps is not None]
    between = next((row for row in rows if row.link == OTHER_HOST), None)
    within = max((row.wire_gbps or 0.0 for row in rows if row.link != OTHER_HOST), default=None)
    if between is None or (within is not None and within < SLOW_LINK * (between.wire_gbps or 0.0)):
        return None
    return between


def slow_senders(attribution: Attribution) -> dict[int, float]:
    """Ranks whose hops are far slower on the wire than the fastest's, with their GB/s: the two ends of slow links."""
    rates = {rank.rank: rank.hop_totals.wire_gbps or 0.0 for rank in attribution.ranks}
    return {rank: rate for rank, rate in rates.items() if 0 < rate * SLOW_LINK < max(rates.values())}


def longest_on_wire(summary: Summary) -> Communication | None:
    """The kind and link whose bytes take longest."""
    rows = [row for row in summary.communication if row.wire_gbps and row.sent_bytes]
    return max(rows, key=lambda row: (row.sent_bytes or 0) / (row.wire_gbps or 1), default=None)


def rate_to_hide(attribution: Attribution, row: Communication | None) -> str:
    """At which rate these bytes would take no longer than all computation: the least that could hide them."""
    computes = fmean(rank.breakdown.compute_ns for rank in attribution.ranks)
    if row is None or not row.sent_bytes or not row.wire_gbps or not computes:
        return ""
    needed = row.sent_bytes / len(attribution.ranks) / computes
    if needed <= row.wire_gbps:
        return ""
    return f"; {milliseconds(computes)} of computation can hide these bytes from {three_digits(needed)} GB/s a rank on"


def _strategy(attribution: Attribution) -> StrategyUsed | None:
    return attribution.run.strategy if attribution.run else None


def _imbalance(attribution: Attribution) -> str:
    run = attribution.run
    if known_contiguous(attribution):
        return "zigzag or stripe (the same causal work for all)"
    if rises_with_rank(attribution):
        return "the same causal work for every rank, as zigzag has"
    if run and run.workload and run.workload.documents:
        return "another layout (ringprof balance compares them)"
    flops = run.block_flops() if run else None
    if flops and max(flops.values()) <= _SAME_WORK * min(flops.values()):
        return "look at the GPUs' clocks (same work, other speed)"
    return "the same work for every rank"


def _wire(attribution: Attribution, row: Communication | None) -> str:
    used = _strategy(attribution)
    if used is None:
        return "fewer bytes, more computation beside them"
    if used.name in ("allgather", "ulysses"):
        return "zigzag, burst or usp (hops beside blocks)"
    if row is not None and row.link == OTHER_HOST:
        return _between_hosts(used)
    carried = [] if used.hops == "copy" else ["--hops copy"]
    return ", ".join([*carried, _fewer_bytes(used), _LONGER])


def _between_hosts(used: StrategyUsed) -> str:
    if used.name in ("double-ring", "usp") or used.params.get("double_ring"):
        return f"faster links, {_fewer_bytes(used)}, {_LONGER}"
    return "double-ring, burst or usp (less between hosts)"


def _fewer_bytes(used: StrategyUsed) -> str:
    return "-p grad_wire=input" if used.params.get("grad_wire") in ("exact", "fp32") else "fewer bytes"


def _wait(attribution: Attribution, summary: Summary) -> str:
    if slow_between_hosts(summary) or slow_senders(attribution):
        # Who waits, waits for hops, not for computation.
        used = _strategy(attribution)
        return _wire(attribution, longest_on_wire(summary)) if used else "faster links, fewer bytes over the slow ones"
    waits = {rank.rank: rank.hop_totals.wait_ns for rank in attribution.ranks if rank.hop_totals.wait_ns is not None}
    late = f"rank {min(waits, key=lambda rank: waits[rank])}" if len(waits) > 1 else "the late rank"
    return f"find what holds {late} up (--steps)"


def _unsplit(attribution: Attribution) -> str:
    if not attribution.on_cpu:
        return "record all ranks to tell wire from wait"
    used, run = _strategy(attribution), attribution.run
    if used and run and len(set(run.topology.hosts)) > 1:
        return _between_hosts(used)
    return "faster links, fewer bytes"


def _gaps(attribution: Attribution) -> str:
    used = _strategy(attribution)
    if attribution.on_cpu:
        return _LONGER
    if used is None or used.cuda_graph:
        return "fewer and longer kernels" if used else "CUDA graphs, fewer and longer kernels"
    return f"--cuda-graph, {_LONGER}"
