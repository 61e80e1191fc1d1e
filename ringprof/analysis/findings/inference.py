"""Prefill and decode: time and bytes per token, read rate of the cache, and what bounds a step."""

from __future__ import annotations

from statistics import fmean

import msgspec

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.summary import Summary
from ringprof.workload.devices import bandwidth_of


class Inference(msgspec.Struct, frozen=True):
    """Metrics of one inference step through one attention layer; a token is a new token of one sequence."""

    phase: str
    """``prefill`` or ``decode``."""
    new_tokens: int
    """New tokens of all sequences."""
    step_ns: float
    """Median of the slowest rank's time per step, without the profiler."""
    tokens_per_second: float
    sent_bytes_per_token: float | None
    """Bytes that all ranks send per token; None where they are not recorded."""
    cache_bytes: int | None
    """Bytes of keys and values that a rank reads per decode step, mean over ranks; None for prefill."""
    read_gbps: float | None
    """``cache_bytes`` over the time of the attention kernels in GB/s, mean over ranks."""
    of_bandwidth: float | None
    """``read_gbps`` as a share of the vendor's memory bandwidth; None where that is not known."""
    bound_by: str
    """Largest part of the wall time: ``cache``, ``attention``, ``link``, ``launch`` or ``other``."""
    shares: dict[str, float]
    """Share of the mean wall time by possible bound; the shares sum to 1."""


def inference_of(attribution: Attribution, summary: Summary) -> Inference | None:
    """Compute the metrics of a recording of prefill or decode; None for anything else."""
    run = attribution.run
    if run is None or run.workload is None or run.workload.kv_length is None or attribution.partial_window:
        return None
    workload, step_ns = run.workload, summary.rates.slowest_median_ns
    if not step_ns:
        return None
    new_tokens, world_size = workload.batch * workload.seq, run.topology.world_size
    sent_by_rank = [
        None if work.sent is None else sum(part.sent_bytes for part in work.sent) for work in run.work or ()
    ]
    known_sent = [sent for sent in sent_by_rank if sent is not None]
    cache_bytes = workload.cache_bytes() // world_size if workload.phase == "decode" else None
    times = [rank.breakdown.flash_ns / len(rank.iteration_ns) for rank in attribution.ranks if rank.iteration_ns]
    read_gbps = fmean(cache_bytes / time for time in times) if cache_bytes and times and all(times) else None
    bandwidth_gbps = None if attribution.on_cpu else bandwidth_of(next(iter(summary.devices), None))
    shares = _shares(attribution, "attention" if cache_bytes is None else "cache")
    return Inference(
        phase=workload.phase,
        new_tokens=new_tokens,
        step_ns=step_ns,
        tokens_per_second=new_tokens / step_ns * 1e9,
        sent_bytes_per_token=sum(known_sent) / new_tokens if len(known_sent) == world_size else None,
        cache_bytes=cache_bytes,
        read_gbps=read_gbps,
        of_bandwidth=read_gbps / bandwidth_gbps if read_gbps and bandwidth_gbps else None,
        bound_by=max(shares, key=lambda name: shares[name]),
        shares=shares,
    )


def _shares(attribution: Attribution, attention: str) -> dict[str, float]:
    """Split all ranks' wall time into attention kernels, exposed communication, idle time and the rest.

    ``attention``: name of the attention kernels' share.
    """
    breakdowns = [rank.breakdown for rank in attribution.ranks]
    wall_ns = sum(breakdown.wall_ns for breakdown in breakdowns) or 1
    shares = {
        attention: sum(breakdown.flash_ns for breakdown in breakdowns) / wall_ns,
        "link": sum(breakdown.exposed_comm_ns for breakdown in breakdowns) / wall_ns,
        "launch": sum(breakdown.idle_ns for breakdown in breakdowns) / wall_ns,
    }
    return {**shares, "other": 1.0 - sum(shares.values())}
