"""The report for people: most important first, every figure with its unit, parts that sum.

`render` returns text. It decides how things are written, never what they come to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.summary import Summary
from ringprof.analysis.transfers.hops import EMULATED
from ringprof.formatting import percent
from ringprof.report.sections import OPTIONAL, SECTIONS
from ringprof.report.tables import Listing
from ringprof.report.text import LONGEST_SENTENCE, TextStyle, captured_in_words, clean, duration


def render(
    found: Findings,
    style: TextStyle | None = None,
    sections: Sequence[str] = (),
    listing: Listing | None = None,
    path: str = "PATH",
) -> str:
    """The whole report as text that ends with a newline.

    ``sections``: what to add, of `sections.OPTIONAL`; ``listing``: what of it; ``path``: of the run, for hints.
    """
    attribution, summary = found.attribution, found.summary
    style, listing = style or TextStyle(), listing or Listing()
    blocks = [style.wrap(header_of(attribution, summary), "bold")]
    machine, *always, warnings = (section for section in SECTIONS if section.terminal and not section.option)
    assert machine.terminal is not None
    blocks += machine.terminal(found, style, listing)
    blocks.append(style.wrap("\n".join(clean(line, LONGEST_SENTENCE) for line in found.verdict)))
    if found.next_step:
        blocks.append(style.wrap(clean(found.next_step.text, LONGEST_SENTENCE), "bold"))
    for section in (*always, *(OPTIONAL[name] for name in sections), warnings):
        assert section.terminal is not None
        blocks += section.terminal(found, style, listing)
    blocks.append(style.wrap(f"next: ringprof report {path} " + " · ".join(_next(found, sections)), "dim"))
    return style.finish("\n\n".join(blocks))


WORTH_IDLE = 0.02
"""Least share of the mean wall that is idle for which the last line offers ``--idle``."""


def _next(found: Findings, shown: Sequence[str]) -> list[str]:
    """List the options that would show more of this run; kernels first where nothing is communicated."""
    attribution = found.attribution
    empty = {name for name, holds in _HOLDS.items() if not holds(found)}
    more = [name for name, section in OPTIONAL.items() if section.on_cpu or not attribution.on_cpu]
    options = [f"--{name}" for name in more if name not in shown and name not in empty]
    silent = not any(rank.breakdown.comm_ns or rank.breakdown.exposed_other_groups_ns for rank in attribution.ranks)
    first = ["--kernels"] if silent and "--kernels" in options else []
    return [*first, "--html report.html", *(name for name in options if name not in first), "--format json"]


_HOLDS: dict[str, Callable[[Findings], bool]] = {
    "steps": lambda found: bool(found.exposed_by_step),
    "hops": lambda found: any(rank.hop_totals.count for rank in found.attribution.ranks),
    "idle": lambda found: any(part.name == "idle" and part.share >= WORTH_IDLE for part in found.summary.parts),
}
"""Sections that are offered only where this holds: whether the run has anything to show in them."""


def header_of(attribution: Attribution, summary: Summary) -> str:
    """Ranks, hosts, devices and the slowest rank's wall in a line."""
    ranks = attribution.ranks
    of = max(attribution.world_size, len(ranks))
    count = f"{len(ranks)} of {of} ranks" if len(ranks) < of else f"{of} rank{'s' if of > 1 else ''}"
    parts = [f"{count}, {_hosts(summary)}"]
    parts.extend(clean(device) for device in summary.devices)
    if attribution.on_cpu:
        parts.append("GPU run without device activities" if attribution.lacks_device else "CPU, no device activity")
    if summary.attention:
        parts.append(" and ".join(summary.attention) + " attention")
    wall = duration(summary.slowest_wall_ns)
    if len(ranks) > 1:
        excess = percent(summary.slowest_excess)
        parts.append(f"{wall} on the slowest rank (rank {summary.slowest_rank}, {excess} over the mean)")
    else:
        parts.append(f"{wall} on rank {ranks[0].rank}")
    if attribution.run is not None and attribution.run.captured and not attribution.partial_window:
        parts.append(captured_in_words(summary.window_iterations))
    elif summary.iterations > 1:
        parts.append(f"{summary.iterations} iterations")
    return " · ".join(parts)


def _hosts(summary: Summary) -> str:
    if not summary.hosts:
        return "hosts unknown"
    if len(summary.hosts) == 1:
        return clean(f"host {summary.hosts[0]}")
    emulated = "emulated " if all(EMULATED in host for host in summary.hosts) else ""
    return f"{len(summary.hosts)} {emulated}hosts"
