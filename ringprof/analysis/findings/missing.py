"""What of the run the traces do not hold, and whose lack no figure shows: said before any figure."""

from __future__ import annotations

from ringprof.analysis.attribution import Attribution
from ringprof.trace.columns import CUT_OFF


def missing_in_words(attribution: Attribution) -> str:
    """One line; empty where the traces hold what the figures are of."""
    if attribution.lacks_device:
        return (
            "Missing: all that ran on the GPU. The times are the CPU's, which launches it and waits for it "
            "(no_device_activities)."
        )
    codes = {warning.code for warning in attribution.warnings}
    known = {rank.rank for rank in attribution.ranks}
    cut = [warning for warning in attribution.warnings if warning.code in CUT_OFF]
    said = []
    if any(warning.rank is None or warning.rank in known for warning in cut):
        said.append("the end of what is cut off, so that all figures are of what comes before")
    said += [words for code, words in _SAID.items() if code in codes]
    return f"Missing: {'; '.join(said)} (see warnings)." if said else ""


_SAID = {
    "left_out": "traces that are left out",
    "mixed_runs": "a moment that all traces have in common",
    "window_empty": "anything launched in the marked iterations; the whole trace is shown",
}
