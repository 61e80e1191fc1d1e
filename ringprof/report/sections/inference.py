"""Prefill and decode in words: the cost of a token, and what bounds a step."""

from __future__ import annotations

from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.inference import Inference
from ringprof.common.formatting import percent
from ringprof.report.page.document import Content, PageContext
from ringprof.report.tables import Listing
from ringprof.report.text import TextStyle, binary_size, duration

_BOUND_LABELS = {
    "cache": "reading the cache",
    "attention": "the attention kernels",
    "link": "exposed communication",
    "launch": "launching: nothing runs on the device",
    "other": "what is neither attention nor communication, such as merges",
}


def terminal(findings: Findings, style: TextStyle, listing: Listing) -> list[str]:
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


def html(findings: Findings, page: PageContext) -> Content | None:
    """Build the summary of prefill or decode for the page; None where neither was recorded."""
    recorded = findings.inference
    return None if recorded is None else Content(lines=_summary_lines(recorded))
