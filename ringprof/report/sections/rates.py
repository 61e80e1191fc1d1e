"""FLOPs, rates and MFU by recorded shapes; of prefill and decode, the cost of a token and what bounds a step."""

from __future__ import annotations

from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.inference import Inference
from ringprof.analysis.findings.step_rates import (
    MASKS_UNKNOWN,
    MIN_RATED,
    PartRate,
    StepRates,
    label_of,
)
from ringprof.common.formatting import flops_in_words, percent
from ringprof.report.page.document import Content, PageContext
from ringprof.report.tables import Listing
from ringprof.report.text import TextStyle, binary_size, duration


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
    return lines


def _rate(row: PartRate, rates: StepRates) -> str:
    of_peak = f", {percent(row.tflops / rates.peak_tflops)} of peak" if row.tflops and rates.peak_tflops else ""
    bound = MASKS_UNKNOWN if row.mask_unknown else ""
    return f"{flops_in_words(row.tflops or 0.0, '/s')}{of_peak}{bound}"


# --- prefill and decode -------------------------------------------------------------------------------

_BOUND_LABELS = {
    "cache": "reading the cache",
    "attention": "the attention kernels",
    "link": "exposed communication",
    "launch": "launching: nothing runs on the device",
    "other": "what is neither attention nor communication, such as merges",
}


def inference_terminal(findings: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """Summarize prefill or decode in a block of text; none where neither was recorded."""
    figures = findings.inference
    return [] if figures is None else [style.wrap("\n".join(_summary_lines(figures)))]


def _summary_lines(figures: Inference) -> list[str]:
    """State the time and bytes per token, how fast the cache is read, and what bounds a step."""
    token_ns = figures.step_ns / figures.new_tokens
    plural = "s" * (figures.new_tokens > 1)
    cost = (
        f"{figures.phase}, one attention layer: {duration(figures.step_ns)} per step of {figures.new_tokens:,} new"
        f" token{plural}, {duration(token_ns)} per token ({figures.tokens_per_second:,.0f} tokens/s)"
    )
    if figures.sent_bytes_per_token is not None:
        cost += f"; {figures.sent_bytes_per_token:,.0f} bytes sent per token, by all ranks"
    lines = [cost]
    if figures.cache_bytes is not None and figures.read_gbps is not None:
        size = binary_size(figures.cache_bytes)
        read = f"a rank reads {size} of keys and values per step, at {figures.read_gbps:,.0f} GB/s"
        if figures.of_bandwidth is not None:
            read += f" while its attention kernels run: {percent(figures.of_bandwidth)} of the memory's rate"
        lines.append(read)
    shares = ", ".join(f"{name} {percent(share)}" for name, share in figures.shares.items())
    lines.append(f"bound by {_BOUND_LABELS[figures.bound_by]} ({shares} of the time)")
    return lines


def inference_html(findings: Findings, page: PageContext) -> Content | None:
    """Build the summary of prefill or decode for the page; None where neither was recorded."""
    recorded = findings.inference
    return None if recorded is None else Content(lines=_summary_lines(recorded))
