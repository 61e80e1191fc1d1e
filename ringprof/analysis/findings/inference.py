"""Prefill and decode: time and bytes a token, how fast the cache is read, and what bounds a step."""

from __future__ import annotations

from statistics import fmean

import msgspec

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.summary import Summary
from ringprof.devices import bandwidth_of


class Inference(msgspec.Struct, frozen=True):
    """Of one step through one attention layer; a token is a new one of one sequence."""

    phase: str
    new_tokens: int
    """Of all sequences."""
    step_ns: float
    """Median of the slowest rank's, without the profiler."""
    tokens_per_second: float
    sent_bytes_per_token: float | None
    """By all ranks."""
    cache_bytes: int | None
    """Keys and values that a rank reads in a step of decode, mean over ranks."""
    read_gbps: float | None
    """These over the time of the attention kernels, mean over ranks."""
    of_bandwidth: float | None
    """That as a share of the memory's rate by its vendor; None where that is not known."""
    bound_by: str
    """What takes most of the wall: ``cache``, ``attention``, ``link``, ``launch`` or ``other``."""
    shares: dict[str, float]
    """Of the mean wall, by what could bound it; they sum to 1."""


def inference_of(attribution: Attribution, summary: Summary) -> Inference | None:
    """The figures of a recording of prefill or decode; None for anything else."""
    run = attribution.run
    if run is None or run.workload is None or run.workload.kv_length is None or attribution.partial_window:
        return None
    work, step_ns = run.workload, summary.rates.slowest_median_ns
    if not step_ns:
        return None
    tokens, size = work.batch * work.seq, run.topology.world_size
    sent = [None if one.sent is None else sum(part.sent_bytes for part in one.sent) for one in run.work or ()]
    known = [one for one in sent if one is not None]
    cache = work.cache_bytes() // size if work.phase == "decode" else None
    times = [rank.breakdown.flash_ns / len(rank.iteration_ns) for rank in attribution.ranks if rank.iteration_ns]
    gbps = fmean(cache / time for time in times) if cache and times and all(times) else None
    peak = None if attribution.on_cpu else bandwidth_of(next(iter(summary.devices), None))
    shares = _shares(attribution, "attention" if cache is None else "cache")
    return Inference(
        phase=work.phase,
        new_tokens=tokens,
        step_ns=step_ns,
        tokens_per_second=tokens / step_ns * 1e9,
        sent_bytes_per_token=sum(known) / tokens if len(known) == size else None,
        cache_bytes=cache,
        read_gbps=gbps,
        of_bandwidth=gbps / peak if gbps and peak else None,
        bound_by=max(shares, key=lambda name: shares[name]),
        shares=shares,
    )


def _shares(attribution: Attribution, attention: str) -> dict[str, float]:
    """The wall of all ranks: attention kernels, exposed communication, nothing at all, and the rest."""
    parts = [rank.breakdown for rank in attribution.ranks]
    wall = sum(part.wall_ns for part in parts) or 1
    found = {
        attention: sum(part.flash_ns for part in parts) / wall,
        "link": sum(part.exposed_comm_ns for part in parts) / wall,
        "launch": sum(part.idle_ns for part in parts) / wall,
    }
    return {**found, "other": 1.0 - sum(found.values())}
