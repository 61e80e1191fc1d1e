"""Every figure of a report by name, for conditions: a mean over ranks, and ``max(...)`` and ``min(...)`` over them.

A name means the same in every report and comparison. ``exposed_comm``, ``idle`` and the other parts of the time are
shares of the wall (0..1); with ``_ns`` they are times over the whole window, with ``_ms`` times of one iteration
(`ringprof.analysis.findings.entries`). What a report does not know has no figure.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.inference import inference_of
from ringprof.analysis.kinds.kinds import KINDS
from ringprof.analysis.rank import Rank

_TIMES = ("compute", "comm", "overlapped", "exposed_comm", "exposed_memory", "background", "idle")


def figures_of(found: Findings) -> dict[str, float]:
    """All figures of a run or traces that are known."""
    attribution, summary = found.attribution, found.summary
    figures: dict[str, float] = {}
    ranks = [_of_rank(rank) for rank in attribution.ranks]
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        values = [rank[name] for rank in ranks if name in rank]
        figures |= {name: fmean(values), f"max({name})": max(values), f"min({name})": min(values)}
    # The report's means are over all the ranks' time, not over their shares.
    figures |= {part.name: part.share for part in summary.parts if part.name != "wall"}
    rates, controls = summary.rates, summary.rates.controls
    known: dict[str, float | None] = {
        "overlap_ratio": summary.overlap_ratio,
        "tflops": rates.tflops,
        "block_tflops": rates.block_tflops,
        "solo_tflops": rates.solo_tflops,
        "of_solo": controls.of_solo if controls else None,
        "ideal_efficiency": controls.ideal_efficiency if controls else None,
        "flash_slowdown": controls.flash_slowdown if controls else None,
        "profiler_overhead": rates.profiler_overhead,
        "peak_memory_bytes": rates.peak_memory_bytes,
        "other_share": summary.other_share,
        "slowest_excess": summary.slowest_excess,
        "warnings": sum(warning.count for warning in attribution.warnings),
    }
    inference = inference_of(attribution, summary)
    if inference is not None:
        known["tokens_per_second"], known["read_gbps"] = inference.tokens_per_second, inference.read_gbps
        known |= {f"bound.{name}": share for name, share in inference.shares.items()}
    figures |= {name: float(value) for name, value in known.items() if value is not None}
    figures |= {f"waterfall.{part.part}": part.share for part in found.waterfall.parts}
    return figures


_NO_SHARES = {
    "tflops",
    "block_tflops",
    "solo_tflops",
    "wire_gbps",
    "read_gbps",
    "tokens_per_second",
    "hops",
    "warnings",
    "iterations",
}


def shares_among(figures: Iterable[str]) -> set[str]:
    """Those of the figures that are shares, 0..1 or more."""
    plain = {name: name.partition("(")[2].rstrip(")") or name for name in figures}
    return {
        name
        for name, one in plain.items()
        if one not in _NO_SHARES and not one.endswith(("_ns", "_ms", "_bytes", "_mib", "_mb"))
    }


def _of_rank(rank: Rank) -> dict[str, float]:
    b = rank.breakdown
    figures: dict[str, float] = {"wall_ns": b.wall_ns}
    for name in _TIMES:
        time = getattr(b, f"{name}_ns")
        if time is not None:
            figures |= {f"{name}_ns": time, name: time / b.wall_ns if b.wall_ns else 0.0}
    if b.overlap_ratio is not None:
        figures["overlap_ratio"] = b.overlap_ratio
    figures |= {f"{kind}_ns": b.kinds[kind].time_ns if kind in b.kinds else 0 for kind in KINDS}
    if rank.hop_totals.count:
        hops = rank.hop_totals
        known = {"wait_share": hops.wait_share, "wire_gbps": hops.wire_gbps, "wait_ns": hops.wait_ns}
        known |= {"wire_ns": hops.wire_ns, "hops": hops.count, "hop_bytes": hops.sent_bytes}
        figures |= {name: value for name, value in known.items() if value is not None}
    return figures
