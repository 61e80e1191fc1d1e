"""What would shorten each part of a waterfall: one short sentence, chosen from the part, its cause and the program.

Nobody is told to choose zigzag who has, to record ranks that are there, to capture hops by copy engine in a CUDA graph,
or to merge less in a program that merges nothing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from statistics import fmean

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.idle_text import (
    blocked_recommendation,
    host_recommendation,
    largest_host_cause,
    total_idle_causes,
)
from ringprof.analysis.findings.summary import Communication, Summary
from ringprof.analysis.kinds.kinds import COMPUTE_PARTS, MEMORY
from ringprof.analysis.transfers.hops import OTHER_HOST
from ringprof.formatting import milliseconds, percent, three_digits
from ringprof.run import Run, StrategyUsed

UNBALANCED = 1.5
"""How many times longer one rank must compute than another, rising with the rank, to look like a causal mask."""
SLOW_LINK = 3.0
"""A rank is at a slow link where its wire rate is this many times below the fastest rank's."""
_WORTH = 0.02
"""The least share of a rank's wall that is worth looking at."""
_SAME_WORK = 1.02
"""How many times another's work is still the same."""
_MORE_TOKENS = "more tokens per rank"
LATE = 0.2
"""A rank is named where at least this share of all waiting is for it."""


def recommendations_of(attribution: Attribution, summary: Summary) -> dict[str, str]:
    """Name for each part of a waterfall what would shorten it in this program; parts without a remedy are left out."""
    found = {
        "kernel": f"another kernel (ringprof kernels){_longer(attribution)}",
        "attention": f"a faster attention kernel{_longer(attribution)}",
        "repeated": _repeated(attribution),
        "slowdown": _slowdown(attribution),
        "imbalance": _imbalance(attribution),
        "exposed_wire": _wire(attribution, longest_on_wire(summary)),
        "peer_wait": _wait(attribution, summary),
        "exposed_unsplit": _unsplit(attribution),
        "other_groups": "other groups' communication beside computation",
        "merge_and_copies": _copies(attribution, summary),
        "launch_gaps": _not_launched(attribution),
        "blocked": "" if attribution.on_cpu else blocked_recommendation(attribution),
    }
    return {part: words for part, words in found.items() if words}


def has_hops(attribution: Attribution) -> bool:
    """Whether the program passes pieces of a sequence around: a recorded strategy, or ranks with send/recv hops."""
    return _strategy(attribution) is not None or any(rank.hop_totals.count for rank in attribution.ranks)


def _longer(attribution: Attribution) -> str:
    run = attribution.run
    decodes = run is not None and run.workload is not None and run.workload.phase == "decode"
    return f", {_MORE_TOKENS}" if has_hops(attribution) and not decodes else ""


def _repeated(attribution: Attribution) -> str:
    run = attribution.run
    layer = run.workload.layer if run and run.workload else None
    again = run is not None and (run.captured or (layer is not None and layer.checkpoint))
    return "less activation checkpointing" if again else "a strategy that computes nothing twice"


def _slowdown(attribution: Attribution) -> str:
    used = _strategy(attribution)
    if used is None or used.hops == "copy":
        return ""
    return f"{_copy_hops(attribution, before=', ')}fewer NCCL channels"


def _copy_hops(attribution: Attribution, *, before: str) -> str:
    """The option that has copy engines carry the hops, where that is possible: on GPUs of one host, recorded here.

    Only hops that the recorder's communicator sends can change; it counts what it sends.
    """
    run = attribution.run
    if run is None or run.strategy is None or run.captured or attribution.on_cpu:
        return ""
    sends = any(entry.operation == "send_recv" for work in run.work or () for entry in work.sent or ())
    possible = sends and len(set(run.topology.hosts)) == 1
    return f"--hops copy{before}" if possible and run.strategy.hops != "copy" and not run.strategy.cuda_graph else ""


def known_contiguous(attribution: Attribution) -> bool:
    """Whether the run's ranks have contiguous pieces under a plain causal mask: work that rises with the rank."""
    run = attribution.run
    if run is None or run.strategy is None or run.workload is None or not run.workload.causal:
        return False
    if run.workload.documents or run.workload.window or run.workload.phase != "training":
        return False  # their work is not a triangle
    # An all-to-all from sequence to heads leaves every rank the same work.
    return run.strategy.layout == "contiguous" and not _same_work(attribution)


def _same_work(attribution: Attribution) -> bool:
    """Whether the attention blocks of all ranks have the same FLOPs, as the recorder counted them."""
    flops = attribution.run.block_flops() if attribution.run else None
    return flops is not None and max(flops.values()) <= _SAME_WORK * min(flops.values())


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
    return (
        f"; {milliseconds(computes)} of computation can hide these bytes from {three_digits(needed)} GB/s per rank on"
    )


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
    if not _same_work(attribution):
        return "the same work for every rank"
    if attribution.on_cpu:
        return ""
    by_time = sorted((rank.breakdown for rank in attribution.ranks), key=lambda one: one.compute_ns)
    least, most = by_time[0], by_time[-1]
    if 2 * (most.flash_ns - least.flash_ns) >= most.compute_ns - least.compute_ns:
        return "look at the GPUs' clocks (same work, other speed)"
    return "compare what ranks compute beside attention (--kernels)"


def _wire(attribution: Attribution, row: Communication | None) -> str:
    used = _strategy(attribution)
    if used is None:
        return "fewer bytes, more computation beside them"
    if used.name in ("allgather", "ulysses") and _trains(attribution):
        return "zigzag, burst or usp (hops beside blocks)"
    if row is not None and row.link == OTHER_HOST:
        return _between_hosts(attribution, used)
    return f"{_copy_hops(attribution, before=', ')}{_fewer_bytes(attribution, used)}{_longer(attribution)}"


def _between_hosts(attribution: Attribution, used: StrategyUsed) -> str:
    if used.name in ("double-ring", "usp") or used.params.get("double_ring") or not _trains(attribution):
        return f"faster links, {_fewer_bytes(attribution, used)}{_longer(attribution)}"
    others = [name for name in ("double-ring", "burst", "usp") if name != used.name]
    return f"{', '.join(others[:-1])} or {others[-1]} (less between hosts)"


def _trains(attribution: Attribution) -> bool:
    """Whether the workload is one that every strategy can run: the strategies over a cache are others."""
    run = attribution.run
    return run is None or run.workload is None or run.workload.phase == "training"


def _fewer_bytes(attribution: Attribution, used: StrategyUsed) -> str:
    run = attribution.run
    backward = run is not None and run.workload is not None and run.workload.backward
    return "-p grad_wire=input" if backward and used.params.get("grad_wire") in ("exact", "fp32") else "fewer bytes"


def waiting_caused(attribution: Attribution) -> dict[int, float]:
    """Rank -> share of all ranks' waiting that is for it, the largest first."""
    times: dict[int, int] = defaultdict(int)
    for rank in attribution.ranks:
        for peer, time in rank.exposed.waited_for.items():
            times[peer] += time
    whole = sum(times.values())
    return {rank: times[rank] / whole for rank in sorted(times, key=lambda one: (-times[one], one)) if times[rank]}


def late_ranks(attribution: Attribution) -> dict[int, float]:
    """The ranks that others wait for most: those above `LATE` of all waiting, or the first where none is."""
    shares = waiting_caused(attribution)
    late = {rank: share for rank, share in shares.items() if share >= LATE}
    return late or dict(list(shares.items())[:1])


def _wait(attribution: Attribution, summary: Summary) -> str:
    if slow_between_hosts(summary) or slow_senders(attribution):
        # Who waits, waits for hops, not for computation.
        used = _strategy(attribution)
        return _wire(attribution, longest_on_wire(summary)) if used else "faster links, fewer bytes over the slow ones"
    late = late_ranks(attribution)
    if not late:
        return ""
    named = [f"rank {rank} ({percent(share, 0)} of all waiting is for it)" for rank, share in late.items()]
    return f"find what makes {' and '.join(named)} late{_idle_of_late(attribution, late)}"


def _idle_of_late(attribution: Attribution, late: Mapping[int, float]) -> str:
    """How long the late ranks idle themselves, where that is worth looking at."""
    idle = {
        rank.rank: rank.breakdown.idle_ns
        for rank in attribution.ranks
        if rank.rank in late and rank.breakdown.idle_ns >= _WORTH * rank.breakdown.wall_ns
    }
    if not idle:
        return ""
    return ": " + ", ".join(f"rank {rank} idles {milliseconds(time)}" for rank, time in idle.items()) + " (--idle)"


def _unsplit(attribution: Attribution) -> str:
    if not attribution.on_cpu:
        missing = attribution.world_size > len(attribution.ranks)
        return "record all ranks to tell wire from wait" if missing else ""
    used, run = _strategy(attribution), attribution.run
    if used and run and len(set(run.topology.hosts)) > 1:
        return _between_hosts(attribution, used)
    return ""


def _copies(attribution: Attribution, summary: Summary) -> str:
    """Against the kind that takes longest of merges, permutations and memory operations outside attention."""
    rows = [row for row in summary.kinds if row.kind in (*COMPUTE_PARTS["merge_and_copies"], *MEMORY)]
    if not rows:
        return ""
    where = "" if attribution.on_cpu else " on the GPU"
    return {
        "merge": f"fewer merges{_longer(attribution)}",
        "permute": f"fewer permutations and copies{where}",
        "memset": "fewer memory sets",
        "memcpy": _memory_copies(attribution) if where else "fewer copies",
    }[rows[0].kind]


def _memory_copies(attribution: Attribution) -> str:
    """Against the direction of copies that takes longest."""
    times: dict[str, int] = defaultdict(int)
    for kernel in attribution.kernels:
        if kernel.kind == "memcpy":
            host = "host" if _WITH_HOST.search(kernel.name) else "device"
            times["pageable" if "ageable" in kernel.name else host] += kernel.time_ns
    longest = max(times, key=lambda one: times[one], default="device")
    return {
        "pageable": "pinned memory and non_blocking copies, fewer copies from and to the host",
        "host": "fewer copies from and to the host, from pinned memory and beside computation",
        "device": "fewer copies on the GPU",
    }[longest]


_WITH_HOST = re.compile(r"HtoD|DtoH|Host")


def _not_launched(attribution: Attribution) -> str:
    used, run = _strategy(attribution), attribution.run
    longer = _longer(attribution)
    if attribution.on_cpu:
        return longer.removeprefix(", ") if used else ""
    if used is not None and run is not None and run.predicted is not None:
        return f"fewer and longer kernels{longer}"
    if used is None or run is None or run.captured:
        replayed = any(warning.code == "cuda_graph" for warning in attribution.warnings)
        short = f"{'more ' if replayed else ''}CUDA graphs or torch.compile, fewer and longer kernels"
    elif _may_capture(run, used):
        short = f"--cuda-graph{longer}"
    else:
        short = f"fewer and longer kernels{longer}"
    return host_recommendation(largest_host_cause(total_idle_causes(attribution)), short)


def _may_capture(run: Run, used: StrategyUsed) -> bool:
    """Whether `ringprof record --cuda-graph` takes the run, and it was not recorded so."""
    work = run.workload
    refused = work is not None and (work.layer is not None or work.sequences is not None)
    return not used.cuda_graph and used.hops != "copy" and not refused
