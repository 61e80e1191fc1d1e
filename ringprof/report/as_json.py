"""The report as JSON data (``ringprof report --format json``, schema ``ringprof.report/1``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.kernel_comparison import NOTHING_KNOWN
from ringprof.analysis.findings.metric_table import METRICS, Use
from ringprof.analysis.transfers.clocks import UNKNOWN_NS
from ringprof.common.json_object import JsonObject
from ringprof.report.page.document import Report, ReportParts
from ringprof.report.sections import SECTIONS
from ringprof.report.sections.listings import LISTINGS
from ringprof.trace.columns import Notice

REPORT_SCHEMA = "ringprof.report/1"


def as_dict(findings: Findings, *, source: str, paths: Sequence[str]) -> Report:
    """Build the whole report; ``source`` is ``run`` or ``trace``, ``paths`` are the files that were read."""
    parts: ReportParts = {"summary": _summary(findings)}
    for section in SECTIONS:
        if section.json:
            parts |= section.json(findings)
    return whole_report(source, paths, findings.attribution.warnings, parts)


def whole_report(source: str, paths: Sequence[str], warnings: Iterable[Notice], parts: ReportParts) -> Report:
    """Assemble a report with every part that the schema requires; parts that are not passed are empty."""
    return {
        "schema": REPORT_SCHEMA,
        "source": {"type": source, "paths": list(paths)},
        "summary": None, "ranks": [], "steps": [], "waterfall": None, "run": None, "table": None, **parts,
        "warnings": [msgspec.structs.asdict(warning) for warning in warnings],
    }  # fmt: skip


def _summary(findings: Findings) -> JsonObject:
    """Build the sums over all ranks, and what explains them: verdict, gains, the waterfall's peak, kernels, clocks."""
    summary = findings.summary
    waterfall, bounds, clocks = findings.waterfall, findings.waterfall.bounds, findings.attribution.clocks
    work, residual = waterfall.work, None if clocks.residual_ns >= UNKNOWN_NS else clocks.residual_ns
    return {
        **{row.name: row.value(findings) for row in METRICS if Use.JSON in row.use},
        "slowest_rank": {"rank": summary.slowest_rank, "wall_ns": summary.slowest_wall_ns},
        "parts_ns": {
            part.name: {"mean": part.mean_ns, "min": part.min_ns, "max": part.max_ns} for part in summary.parts
        },
        "kinds": list(msgspec.to_builtins(summary.kinds)),
        "communication": [
            {"kind": row.kind, "link": row.link, "count": row.kernels, "bytes": row.sent_bytes,
             **{name: getattr(row, name) for name in ("wait_share", "wire_share", "wire_gbps", "best_gbps")}}
            for row in summary.communication
        ],
        "devices": list(summary.devices),
        "attention": list(summary.attention),
        "verdict": [str(line) for line in findings.verdict],
        "next_step": msgspec.to_builtins(findings.next_step, enc_hook=str),
        "claims": [
            {"text": str(claim), "figures": [msgspec.structs.asdict(figure) for figure in claim.figures]}
            for claim in findings.claims
        ],
        "steps_listed": findings.lists_steps,
        "largest_of_other": [
            {name: getattr(kernel, name) for name in ("name", "time_ns", "calls")}
            for kernel in findings.attribution.largest_of_other
        ],
        "bounds_ns": {
            "free_communication": bounds.free_ns,
            "balanced": bounds.balanced_ns,
            "all_hidden": bounds.hidden_ns,
        },
        "peak": {"tflops": work.peak.tflops, "source": work.peak.source} if work.peak else None,
        "other_kernels": msgspec.to_builtins(work.kernels, enc_hook=str) if work.kernels != NOTHING_KNOWN else None,
        **{table.name: table.items(findings) for table in LISTINGS},
        "inference": msgspec.to_builtins(findings.inference),
        "step_rates": msgspec.to_builtins(findings.step_rates),
        "clocks": {
            "hosts": len(set(clocks.host.values())),
            "residual_ns": residual,
            "offsets_ns": {str(rank): offset for rank, offset in clocks.offset_ns.items()},
        },
        "partial_window": findings.attribution.partial_window,
    }  # fmt: skip
