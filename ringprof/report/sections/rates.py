"""FLOPs, rates and MFU computed from recorded shapes."""

from __future__ import annotations

from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.step_rates import (
    MASKS_UNKNOWN,
    MIN_RATED,
    PartRate,
    StepRates,
    flops_in_words,
    label_of,
    shape_coverage_clause,
)
from ringprof.common.formatting import percent
from ringprof.report.page.document import Content, PageContext
from ringprof.report.tables import Listing
from ringprof.report.text import TextStyle


def terminal(findings: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """Return one block of text on FLOPs and MFU; none where no trace holds shapes."""
    return [style.wrap("\n".join(lines))] if (lines := _lines(findings)) else []


def html(findings: Findings, page: PageContext) -> Content | None:
    """Return the lines on FLOPs and MFU for the page; None where no trace holds shapes."""
    return Content(lines=lines) if (lines := _lines(findings)) else None


def _lines(findings: Findings) -> list[str]:
    rates = findings.step_rates
    if rates is None:
        return []
    device = "process" if findings.attribution.on_cpu else "GPU"
    rated = [row for row in rates.parts if row.tflops is not None and row.coverage >= MIN_RATED]
    parts = [f"{label_of(row.part, findings.summary)} at {_rate(row, rates)}" for row in rated]
    work = f"{flops_in_words(rates.flops / 1e12)} per {device} by recorded shapes, recomputed work included"
    lines = [f"{work}: {', '.join(parts)}"] if parts else []
    if rates.mfu is not None:
        others = "".join(f"; {percent(share)} of the FLOPs are {dtype}" for dtype, share in rates.other_dtypes.items())
        lines.append(f"MFU {percent(rates.mfu)} of {rates.peak_tflops:g} TFLOP/s ({rates.peak_source}){others}")
    missing = shape_coverage_clause(rates)
    # Without a rate, the verdict says how few shapes are recorded.
    return [*lines, missing] if missing and lines else lines


def _rate(row: PartRate, rates: StepRates) -> str:
    of_peak = f", {percent(row.tflops / rates.peak_tflops)} of peak" if row.tflops and rates.peak_tflops else ""
    bound = MASKS_UNKNOWN if row.mask_unknown else ""
    return f"{flops_in_words(row.tflops or 0.0, '/s')}{of_peak}{bound}"
