"""The report as data: ``ringprof report --format json``, schema ``ringprof.report/1``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.summary import Communication, Summary
from ringprof.analysis.findings.waterfall import Waterfall, WaterfallPart
from ringprof.analysis.kinds.kinds import OTHER_GROUPS
from ringprof.analysis.rank import Rank
from ringprof.analysis.transfers.clocks import UNKNOWN_NS
from ringprof.run import Run
from ringprof.trace.columns import Caveat

REPORT_SCHEMA = "ringprof.report/1"


def render(report: dict[str, Any]) -> str:
    """The report as JSON text, in ASCII so that no locale can spoil it."""
    return json.dumps(report, indent=1, ensure_ascii=True, allow_nan=False) + "\n"


def as_dict(found: Findings, *, source: str, paths: Sequence[str]) -> dict[str, Any]:
    """The whole report; ``source`` is ``run`` or ``trace``, ``paths`` the files that were read."""
    attribution = found.attribution
    return whole_report(
        source,
        paths,
        attribution.warnings,
        summary=_summary(found.summary) | _explanation(found) | {"partial_window": attribution.partial_window},
        ranks=[_rank(rank) for rank in attribution.ranks],
        steps=[msgspec.to_builtins(step) for step in found.steps] if found.lists_steps else [],
        waterfall=[_part(part) for part in found.waterfall.parts],
        run=_run(attribution.run) if attribution.run else None,
    )


def whole_report(source: str, paths: Sequence[str], warnings: Iterable[Caveat], **parts: Any) -> dict[str, Any]:
    """A report with every part that the schema asks for; those not given are empty."""
    empty: dict[str, Any] = {"summary": None, "ranks": [], "steps": [], "waterfall": None, "run": None, "table": None}
    return {
        "schema": REPORT_SCHEMA,
        "source": {"type": source, "paths": list(paths)},
        **empty,
        **parts,
        "warnings": [_warning(warning) for warning in warnings],
    }


def _summary(summary: Summary) -> dict[str, Any]:
    rates = summary.rates
    return {
        "tflops": rates.tflops,
        "tflops_quantiles": rates.tflops_quantiles,
        "iterations_timed": rates.iterations_timed,
        "block_tflops": rates.block_tflops,
        "solo_tflops": rates.solo_tflops,
        "controls": msgspec.to_builtins(rates.controls),
        "profiler_overhead": rates.profiler_overhead,
        "exposed_comm_share": {
            "mean": summary.exposed_mean,
            "worst": summary.exposed_worst,
            "rank": summary.exposed_worst_rank,
        },
        "overlap_ratio": summary.overlap_ratio,
        "other_share": summary.other_share,
        "iterations": summary.iterations,
        "slowest_rank": {"rank": summary.slowest_rank, "wall_ns": summary.slowest_wall_ns},
        "parts_ns": {
            part.name: {"mean": part.mean_ns, "min": part.min_ns, "max": part.max_ns} for part in summary.parts
        },
        "communication": [_communication(row) for row in summary.communication],
        "devices": list(summary.devices),
        "attention": list(summary.attention),
    }


def _explanation(found: Findings) -> dict[str, Any]:
    """What explains the sums: the verdict, what could be gained, and what the waterfall starts from."""
    waterfall, clocks = found.waterfall, found.attribution.clocks
    residual = None if clocks.residual_ns >= UNKNOWN_NS else clocks.residual_ns
    return {
        "verdict": list(found.verdict),
        "steps_listed": found.lists_steps,
        "bounds_ns": _bounds(waterfall),
        "peak": {"tflops": waterfall.peak.tflops, "source": waterfall.peak.source} if waterfall.peak else None,
        "clocks": {
            "hosts": len(set(clocks.host.values())),
            "residual_ns": residual,
            "offsets_ns": {str(rank): offset for rank, offset in clocks.offset_ns.items()},
        },
    }


def _bounds(waterfall: Waterfall) -> dict[str, int]:
    bounds = waterfall.bounds
    return {"free_communication": bounds.free_ns, "balanced": bounds.balanced_ns, "all_hidden": bounds.hidden_ns}


def _part(part: WaterfallPart) -> dict[str, Any]:
    return {
        "part": part.part,
        "time_ns": part.time_ns,
        "share": part.share,
        "tflops": part.tflops,
        "evidence": part.evidence,
    }


def _communication(row: Communication) -> dict[str, Any]:
    return {
        "kind": row.kind,
        "link": row.link,
        "count": row.kernels,
        "bytes": row.sent_bytes,
        "wait_share": row.wait_share,
        "wire_share": row.wire_share,
        "wire_gbps": row.wire_gbps,
        "best_gbps": row.best_gbps,
    }


def _rank(rank: Rank) -> dict[str, Any]:
    b = rank.breakdown
    return {
        "rank": rank.rank,
        "host": rank.host,
        "wall_ns": b.wall_ns,
        "compute_ns": b.compute_ns,
        "comm_ns": b.comm_ns,
        "overlapped_ns": b.overlapped_ns,
        "exposed_comm_ns": b.exposed_comm_ns,
        "exposed_memory_ns": b.exposed_memory_ns,
        "idle_ns": b.idle_ns,
        **({"exposed_other_groups_ns": b.exposed_other_groups_ns} if OTHER_GROUPS in b.kinds else {}),
        **({"background_ns": b.background_ns} if b.background_ns else {}),
        "overlap_ratio": b.overlap_ratio,
        "kinds_ns": {kind: figures.time_ns for kind, figures in b.kinds.items()},
        "waits": _waits(rank),
        "hops": _hops(rank),
    }


def _waits(rank: Rank) -> dict[str, dict[str, int]] | None:
    """Wait and wire by kind; kinds with a kernel whose split is not known are left out."""
    waits = {}
    for kind in dict.fromkeys(row.kind for row in rank.carried):
        rows = [row for row in rank.carried if row.kind == kind]
        if all(row.timed == row.kernels for row in rows):
            waits[kind] = {"wait_ns": sum(row.wait_ns for row in rows), "wire_ns": sum(row.wire_ns for row in rows)}
    return waits or None


def _hops(rank: Rank) -> dict[str, Any] | None:
    totals = rank.hop_totals
    if not totals.count:
        return None
    return {
        "count": totals.count,
        "bytes": totals.sent_bytes,
        "wait_ns": totals.wait_ns,
        "wire_ns": totals.wire_ns,
        "wire_gbps": totals.wire_gbps,
    }


def _warning(warning: Caveat) -> dict[str, Any]:
    return {
        "code": warning.code,
        "message": warning.message,
        "rank": warning.rank,
        "count": warning.count,
        "byte_offset": warning.byte_offset,
    }


def _run(run: Run) -> dict[str, Any]:
    """What was run and measured, without the times of every iteration: those are in the ``run.json``."""
    plain: dict[str, Any] = msgspec.to_builtins(run)
    kept = ("name", "created", "workload", "topology", "strategy", "kernel", "verification", "peak_memory_bytes")
    return {key: plain[key] for key in kept}
