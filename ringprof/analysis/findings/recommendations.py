"""Recommendations for the parts of a waterfall: one short clause, chosen by the part, its cause and the program.

A function that takes `Facts` is named after the part in `ringprof.analysis.findings.parts` that it belongs to.

A recommendation must be possible for the program. For example, zigzag is not recommended to a run that uses it, nor
recording all ranks where all have traces. CUDA graphs are not recommended for hops by copy engine, nor fewer merges to
a program without merges.
"""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import pairwise
from statistics import fmean

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.claim import Claim
from ringprof.analysis.findings.idle_text import (
    PREFETCH,
    host_recommendation,
    largest_host_cause,
    total_idle_causes,
)
from ringprof.analysis.findings.producers import graphs_advice, producer_of
from ringprof.analysis.findings.summary import Communication, Summary
from ringprof.analysis.findings.waterfall import Facts
from ringprof.analysis.kinds.kinds import COMPUTE_PARTS, MEMORY, in_a_sentence
from ringprof.analysis.transfers.hops import OTHER_HOST
from ringprof.run import StrategyUsed
from ringprof.trace.columns import PAGE_MIGRATION

UNBALANCED = 1.5
"""Smallest ratio of two ranks' work that counts as unbalanced.

If attention time rises with the rank, to this ratio between the last and the first, it suggests a causal mask.
"""
SLOW_LINK = 3.0
"""Ratio of the fastest rank's wire rate to a rank's from which on the rank's link counts as slow."""
_MIN_IDLE_SHARE = 0.02
"""Smallest share of a rank's wall time for which its idle time is named."""
_MAX_WORK_RATIO = 1.02
"""Largest ratio between two ranks' FLOPs, or times of computation, at which their work counts as equal."""
_MORE_TOKENS = "more tokens per rank"
MIN_LATE_SHARE = 0.2
"""Smallest share of all waiting that a rank must cause to be named."""


def has_hops(attribution: Attribution) -> bool:
    """Return whether the program exchanges pieces of a sequence: a recorded strategy, or ranks with send/recv hops."""
    return _strategy(attribution) is not None or any(rank.hop_totals.count for rank in attribution.ranks)


def _more_tokens_clause(attribution: Attribution) -> str:
    """Recommend more tokens per rank, to be appended; empty for decode and for programs without hops."""
    run = attribution.run
    decodes = run is not None and run.workload is not None and run.workload.phase == "decode"
    return f", {_MORE_TOKENS}" if has_hops(attribution) and not decodes else ""


def attention(facts: Facts) -> str:
    """Recommend what may shorten attention that is not compared with a peak."""
    return f"a faster attention kernel{_more_tokens_clause(facts.attribution)}"


def another_kernel(facts: Facts) -> str:
    """Recommend to look for another kernel, or longer blocks."""
    return f"another kernel (ringprof calibrate --rates){_more_tokens_clause(facts.attribution)}"


def kernel_limit(facts: Facts) -> str:
    """Recommend what may bring attention nearer to a matrix product: longer blocks, or to look for another kernel."""
    if not facts.waterfall.work.kernels.fastest_known:
        return another_kernel(facts)
    gains = facts.waterfall.work.kernels.gains_with_tokens
    return _more_tokens_clause(facts.attribution).removeprefix(", ") if gains else ""


def repeated(facts: Facts) -> str:
    """Recommend a way to avoid repeated work."""
    run = facts.attribution.run
    layer = run.workload.layer if run and run.workload else None
    checkpoints = run is not None and (run.captured or (layer is not None and layer.checkpoint))
    return "less activation checkpointing" if checkpoints else "a strategy that computes nothing twice"


def slowdown(facts: Facts) -> str:
    """Recommend a way to slow attention kernels less by communication."""
    strategy = _strategy(facts.attribution)
    if strategy is None or strategy.hops == "copy":
        return ""
    return f"{_copy_hops_option(facts.attribution, suffix=', ')}fewer NCCL channels"


def _copy_hops_option(attribution: Attribution, *, suffix: str) -> str:
    """Return the option for hops by copy engine, followed by ``suffix``; empty where the option is not possible.

    Copy engines need GPUs of one host, and hops that the recorder's communicator sends, which it counts.
    """
    run = attribution.run
    if run is None or run.strategy is None or run.captured or attribution.on_cpu or attribution.recurrent:
        return ""
    sends = any(entry.operation == "send_recv" for work in run.work or () for entry in work.sent or ())
    possible = sends and len(set(run.topology.hosts)) == 1
    return f"--hops copy{suffix}" if possible and run.strategy.hops != "copy" and not run.strategy.cuda_graph else ""


def known_contiguous(attribution: Attribution) -> bool:
    """Return whether the run has contiguous pieces under a plain causal mask, so that the work rises with the rank."""
    run = attribution.run
    if run is None or run.strategy is None or run.workload is None or not run.workload.causal or run.workload.recurrent:
        return False
    if run.workload.documents or run.workload.window or run.workload.phase != "training":
        return False  # their work is not a triangle
    # After an all-to-all from sequence to heads, every rank has the same work.
    return run.strategy.layout == "contiguous" and not _same_work(attribution)


def _same_work(attribution: Attribution) -> bool:
    """Return whether the attention blocks of all ranks have about the same FLOPs by the recorder's count."""
    flops = attribution.run.block_flops() if attribution.run else None
    return flops is not None and max(flops.values()) <= _MAX_WORK_RATIO * min(flops.values())


def rises_with_rank(attribution: Attribution) -> bool:
    """Return whether attention time in traces of an unknown program rises with the rank, as under a causal mask."""
    if attribution.run is not None and attribution.run.strategy is not None:
        return False
    times = [rank.breakdown.flash_ns for rank in attribution.ranks]
    rising = all(later > earlier for earlier, later in pairwise(times))
    return len(times) > 2 and rising and times[-1] >= UNBALANCED * times[0]


def slow_between_hosts(summary: Summary) -> Communication | None:
    """Return the communication between hosts; None where there is none, or it is not slower than within a host.

    Where there is no communication within a host to compare with, it is returned, too.
    """
    rows = [row for row in summary.communication if row.wire_gbps is not None]
    between_hosts = next((row for row in rows if row.link == OTHER_HOST), None)
    within_host = max((row.wire_gbps or 0.0 for row in rows if row.link != OTHER_HOST), default=None)
    if between_hosts is None or (
        within_host is not None and within_host < SLOW_LINK * (between_hosts.wire_gbps or 0.0)
    ):
        return None
    return between_hosts


def slow_senders(attribution: Attribution) -> dict[int, float]:
    """Return the ranks whose hops are far slower on the wire than the fastest rank's, with their GB/s.

    Both ends of a slow link are among them.
    """
    rates = {rank.rank: rank.hop_totals.wire_gbps or 0.0 for rank in attribution.ranks}
    return {rank: rate for rank, rate in rates.items() if 0 < rate * SLOW_LINK < max(rates.values())}


def longest_on_wire(summary: Summary) -> Communication | None:
    """Return the communication (kind and link) whose bytes take longest; None where no rate is known."""
    rows = [row for row in summary.communication if row.wire_gbps and row.sent_bytes]
    return max(rows, key=lambda row: (row.sent_bytes or 0) / (row.wire_gbps or 1), default=None)


def rate_to_hide(attribution: Attribution, summary: Summary) -> str:
    """State the lowest rate at which the computation could hide the bytes that take longest on the wire.

    Empty where they are that fast already.
    """
    row, is_only = longest_on_wire(summary), len(summary.communication) == 1
    compute_ns = fmean(rank.breakdown.compute_ns for rank in attribution.ranks)
    if row is None or not row.sent_bytes or not row.wire_gbps or not compute_ns:
        return ""
    needed_gbps = row.sent_bytes / len(attribution.ranks) / compute_ns
    if needed_gbps <= row.wire_gbps:
        return ""
    whose = "these bytes" if is_only else f"the bytes of {in_a_sentence(row.kind)} alone"
    template = "; {mean(compute):ms} of computation can hide {} from {rate_to_hide:3} GB/s per rank on"
    return Claim(template, compute_ns, whose, needed_gbps)


def _strategy(attribution: Attribution) -> StrategyUsed | None:
    """Return the recorded strategy; None where there is none."""
    return attribution.run.strategy if attribution.run else None


def imbalance(facts: Facts) -> str:
    """Recommend a way to balance the ranks, or where to look for the cause."""
    attribution, run = facts.attribution, facts.attribution.run
    if known_contiguous(attribution):
        return "zigzag or stripe (the same causal work for all)"
    if rises_with_rank(attribution):
        return "the same causal work for every rank, as zigzag has"
    if attribution.recurrent:
        # Every rank has as many tokens, and each costs the same.
        return "" if attribution.on_cpu else "compare what ranks compute (--show kernels)"
    if run and run.workload and run.workload.documents:
        return "another layout (ringprof advise compares them)"
    if not _same_work(attribution):
        return Claim("the same work for every rank{}", _longest_computing_clause(attribution))
    if attribution.on_cpu:
        return ""
    by_time = sorted((rank.breakdown for rank in attribution.ranks), key=lambda breakdown: breakdown.compute_ns)
    least, most = by_time[0], by_time[-1]
    if 2 * (most.flash_ns - least.flash_ns) >= most.compute_ns - least.compute_ns:
        longest = _longest_computing_clause(attribution)
        return Claim("look at the GPUs' clocks (same work, other speed){}", longest)
    return "compare what ranks compute beside attention (--show kernels)"


def _longest_computing_clause(attribution: Attribution) -> str:
    """Name the ranks that compute far longer than all others, to be appended; empty unless one or two stand out."""
    times = sorted((rank.breakdown.compute_ns, rank.rank) for rank in attribution.ranks)
    # The widest gap between two ranks' times, in order, separates those that stand out.
    gap, index = max(((later[0] - times[i][0], i + 1) for i, later in enumerate(times[1:])), default=(0, 0))
    others, longest = times[:index], times[index:]
    stand_out = 0 < len(longest) <= min(2, len(others) - 1) and 2 * gap >= times[-1][0] - times[0][0]
    if not stand_out or longest[0][0] <= _MAX_WORK_RATIO * others[-1][0]:
        return ""
    ranks = Claim(" and ").join(Claim("{rank}", rank) for rank in sorted(rank for _, rank in longest))
    computes = "rank {} computes" if len(longest) == 1 else "ranks {} compute at least"
    template = f": {computes} {{min(named_compute):ms}}, all others at most {{max(others_compute):ms}}"
    return Claim(template, ranks, longest[0][0], others[-1][0])


def exposed_wire(facts: Facts) -> str:
    """Recommend a way to shorten exposed wire time, by the communication that takes longest on the wire."""
    attribution, row = facts.attribution, longest_on_wire(facts.summary)
    strategy = _strategy(attribution)
    if strategy is None:
        return "fewer bytes, more computation beside them"
    if attribution.recurrent:
        return _state_advice(attribution, strategy)
    if strategy.name in ("allgather", "ulysses") and _is_training(attribution):
        return "zigzag, burst or usp (hops beside blocks)"
    if row is not None and row.link == OTHER_HOST:
        return _links_between_hosts_advice(attribution, strategy)
    copy_hops, fewer_bytes = _copy_hops_option(attribution, suffix=", "), _fewer_bytes(attribution, strategy)
    return f"{copy_hops}{fewer_bytes}{_more_tokens_clause(attribution)}"


def _state_advice(attribution: Attribution, strategy: StrategyUsed) -> str:
    """Recommend a way to shorten what a recurrence sends, or the waiting for it."""
    if strategy.name == "state-a2a":
        return "state-scan (messages that do not grow with the sequence)"
    one_after_another = strategy.name == "state-ring" and attribution.world_size > 2
    return "state-scan (about log2(N) hops in place of N - 1)" if one_after_another else _MORE_TOKENS


def _links_between_hosts_advice(attribution: Attribution, strategy: StrategyUsed) -> str:
    """Recommend a strategy that moves less between hosts, or faster links for strategies that do so already."""
    if attribution.recurrent:
        return _state_advice(attribution, strategy)
    if strategy.name in ("double-ring", "usp") or strategy.params.get("double_ring") or not _is_training(attribution):
        return f"faster links, {_fewer_bytes(attribution, strategy)}{_more_tokens_clause(attribution)}"
    alternatives = [name for name in ("double-ring", "burst", "usp") if name != strategy.name]
    return f"{', '.join(alternatives[:-1])} or {alternatives[-1]} (less between hosts)"


def _is_training(attribution: Attribution) -> bool:
    """Return whether the workload is training, which every strategy can run except those over a key-value cache."""
    run = attribution.run
    return run is None or run.workload is None or run.workload.phase == "training"


def _fewer_bytes(attribution: Attribution, strategy: StrategyUsed) -> str:
    """Recommend a way to send fewer bytes: the option for gradients where it applies."""
    run = attribution.run
    backward = run is not None and run.workload is not None and run.workload.backward
    return "-p grad_wire=input" if backward and strategy.params.get("grad_wire") in ("exact", "fp32") else "fewer bytes"


def late_ranks(attribution: Attribution) -> dict[int, float]:
    """Return the ranks that others wait for most, with their share of all waiting, largest first.

    These are the ranks with at least `MIN_LATE_SHARE`, or the one with the largest share where there is none.
    """
    caused_ns: dict[int, int] = defaultdict(int)
    for rank in attribution.ranks:
        for peer, time in rank.exposed.waited_for.items():
            caused_ns[peer] += time
    total = sum(caused_ns.values())
    ordered = sorted(caused_ns, key=lambda rank: (-caused_ns[rank], rank))
    shares = {rank: caused_ns[rank] / total for rank in ordered if caused_ns[rank]}
    late = {rank: share for rank, share in shares.items() if share >= MIN_LATE_SHARE}
    return late or dict(list(shares.items())[:1])


def peer_wait(facts: Facts) -> str:
    """Recommend a way to shorten waiting for peers: for slow links, or else for late ranks."""
    attribution, strategy = facts.attribution, _strategy(facts.attribution)
    if slow_between_hosts(facts.summary) or slow_senders(attribution):
        # Ranks wait for slow hops, not for computation.
        return exposed_wire(facts) if strategy else "faster links, fewer bytes over the slow ones"
    if strategy and strategy.name == "state-ring":
        # Ranks pass the state one after another, so each is waited for by those behind it.
        return _state_advice(attribution, strategy)
    late = late_ranks(attribution)
    if not late:
        return ""
    listed = [Claim("rank {rank} ({waited_for:0%} of all waiting is for it)", *item) for item in late.items()]
    idles = [
        Claim("rank {rank} idles {idle_of_rank:ms}", rank.rank, rank.breakdown.idle_ns)
        for rank in attribution.ranks
        if rank.rank in late and rank.breakdown.idle_ns >= _MIN_IDLE_SHARE * rank.breakdown.wall_ns
    ]
    idle_clause = Claim(": {} (--show idle)", Claim(", ").join(idles)) if idles else ""
    return Claim("find what makes {} late{}", Claim(" and ").join(listed), idle_clause)


def exposed_unsplit(facts: Facts) -> str:
    """Recommend a way to separate wire from waiting, or on CPU to shorten both."""
    attribution = facts.attribution
    if not attribution.on_cpu:
        is_incomplete = attribution.world_size > len(attribution.ranks)
        return "record all ranks to tell wire from wait" if is_incomplete else ""
    strategy, run = _strategy(attribution), attribution.run
    if strategy and run and len(set(run.topology.hosts)) > 1:
        return _links_between_hosts_advice(attribution, strategy)
    return ""


def merge_and_copies(facts: Facts) -> str:
    """Recommend a way to shorten the longest kind among merges, permutations and memory operations."""
    attribution = facts.attribution
    rows = [row for row in facts.summary.kinds if row.kind in (*COMPUTE_PARTS["merge_and_copies"], *MEMORY)]
    if not rows:
        return ""
    place_clause = "" if attribution.on_cpu else " on the GPU"
    return {
        "merge": f"fewer merges{_more_tokens_clause(attribution)}",
        "permute": f"fewer permutations and copies{place_clause}",
        "memset": "fewer memory sets",
        "memcpy": _memory_copies_advice(attribution) if place_clause else "fewer copies",
    }[rows[0].kind]


def _memory_copies_advice(attribution: Attribution) -> str:
    """Recommend a way to shorten memory copies, by the direction that takes longest."""
    times: dict[str, int] = defaultdict(int)
    for kernel in attribution.kernels:
        if kernel.kind == "memcpy":
            direction = "host" if _HOST_COPY.search(kernel.name) else "device"
            direction = "managed" if kernel.name.startswith(PAGE_MIGRATION) else direction
            times["pageable" if "ageable" in kernel.name else direction] += kernel.time_ns
    longest = max(times, key=lambda direction: times[direction], default="device")
    return {
        "pageable": "pinned memory and non_blocking copies, fewer copies from and to the host",
        "host": "fewer copies from and to the host, from pinned memory and beside computation",
        "device": "fewer copies on the GPU",
        "managed": PREFETCH,
    }[longest]


_HOST_COPY = re.compile(r"HtoD|DtoH|Host")


def launch_gaps(facts: Facts) -> str:
    """Recommend a way to shorten idle time before launches."""
    attribution, strategy, run = facts.attribution, _strategy(facts.attribution), facts.attribution.run
    more_tokens = _more_tokens_clause(attribution)
    if attribution.on_cpu:
        return more_tokens.removeprefix(", ") if strategy else ""
    if strategy is not None and run is not None and run.predicted is not None:
        return f"fewer and longer kernels{more_tokens}"
    short_gaps, work = f"fewer and longer kernels{more_tokens}", run.workload if run else None
    # `ringprof record --cuda-graph` refuses layers, changing sizes, and peers, whose names have a slash.
    is_peer = work is not None and work.recurrent and strategy is not None and "/" in strategy.name
    refuses_capture = is_peer or (work is not None and (work.layer is not None or work.sequences is not None))
    if strategy is None or run is None or run.captured:
        short_gaps = Claim(", ").join(filter(None, (graphs_advice(attribution), "fewer and longer kernels")))
    elif not (strategy.cuda_graph or strategy.hops == "copy" or refuses_capture):
        short_gaps = f"--cuda-graph{more_tokens}"
    phases = producer_of(attribution).phases
    return host_recommendation(largest_host_cause(total_idle_causes(attribution)), short_gaps, phases)
