"""The drawn timeline, on the page only."""

from __future__ import annotations

from typing import Any

from ringprof.analysis.findings.findings import Findings
from ringprof.report.page.document import Content
from ringprof.report.timeline import timeline_of

_THINNED = "Neighbouring short activities are drawn as one bar, so that the page stays quick."


def html(found: Findings, report: dict[str, Any], figures: Any) -> Content | None:
    """None on CPU, whose traces hold no device activities, and of very many ranks."""
    attribution = found.attribution
    if attribution.on_cpu or not found.lists_steps:
        return None
    drawn = timeline_of(attribution, found.steps)
    ranks = [rank.rank for rank in attribution.ranks]
    return Content(figures.timeline(drawn, ranks), lines=[_THINNED] if drawn.thinned else [])
