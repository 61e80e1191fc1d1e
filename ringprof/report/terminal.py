"""The terminal report: most important first, every figure with its unit, and parts that sum.

`render` returns text. It decides how figures are written, never their values.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.summary import Summary
from ringprof.analysis.transfers.hops import EMULATED
from ringprof.common.formatting import milliseconds, percent
from ringprof.report.sections import OPTIONAL, SECTIONS
from ringprof.report.tables import Listing
from ringprof.report.text import LONGEST_SENTENCE, TextStyle, captured_in_words, clean, duration


def render(
    findings: Findings,
    style: TextStyle | None = None,
    sections: Sequence[str] = (),
    listing: Listing | None = None,
    path: str = "PATH",
) -> str:
    """Render the whole report as text that ends with a newline.

    ``sections`` are the names of optional sections to add (`sections.OPTIONAL`), ``listing`` orders and limits their
    rows, and ``path`` is the run's path for hints.
    """
    attribution, summary = findings.attribution, findings.summary
    style, listing = style or TextStyle(), listing or Listing()
    blocks = [style.wrap(header_of(attribution, summary), "bold")]
    machine, *always_shown, warnings = (section for section in SECTIONS if section.terminal and not section.option)
    assert machine.terminal is not None
    blocks += machine.terminal(findings, style, listing)
    blocks.append(style.wrap("\n".join(clean(line, LONGEST_SENTENCE) for line in findings.verdict)))
    if findings.next_step:
        blocks.append(style.wrap(clean(findings.next_step.text, LONGEST_SENTENCE), "bold"))
    for section in (*always_shown, *(OPTIONAL[name] for name in sections), warnings):
        assert section.terminal is not None
        blocks += section.terminal(findings, style, listing)
    blocks.append(
        style.wrap(f"next: ringprof report {path} " + " · ".join(_further_options(findings, sections)), "dim")
    )
    return style.finish("\n\n".join(blocks))


def _further_options(findings: Findings, shown: Sequence[str]) -> list[str]:
    """List the options that would show more of this run; kernels first where nothing is communicated."""
    attribution = findings.attribution
    names = [
        name
        for name, section in OPTIONAL.items()
        if name not in shown and (section.on_cpu or not attribution.on_cpu) and section.offered(findings)
    ]
    no_communication = not any(
        rank.breakdown.comm_ns or rank.breakdown.exposed_other_groups_ns for rank in attribution.ranks
    )
    if no_communication and "kernels" in names:
        names = ["kernels", *(name for name in names if name != "kernels")]
    sections = [f"--show {','.join(names)}"] if names else []
    return ["--html report.html", *sections, "--format json"]


_UNEVEN = 1.5
"""Ratio of the longest iteration to the shortest from which on a report's first line states both."""


def header_of(attribution: Attribution, summary: Summary) -> str:
    """Return one line with ranks, hosts, devices and the slowest rank's wall."""
    ranks = attribution.ranks
    world_size = max(attribution.world_size, len(ranks))
    count = (
        f"{len(ranks)} of {world_size} ranks"
        if len(ranks) < world_size
        else f"{world_size} rank{'s' if world_size > 1 else ''}"
    )
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
        times = attribution.slowest_iterations_ns or [0]
        uneven = max(times) >= _UNEVEN * min(times) > 0
        # Sums over a warm-up and short steps are mostly those of the warm-up. Idle time between steps belongs to none.
        spread = f", whose work spans {milliseconds(min(times))} to {milliseconds(max(times))}" if uneven else ""
        fewest = min(len(rank.iteration_ns) for rank in ranks)
        fewer = f"{fewest} to " if fewest < summary.iterations else ""
        parts.append(f"{fewer}{summary.iterations} iterations{spread}")
    return " · ".join(parts)


def _hosts(summary: Summary) -> str:
    if not summary.hosts:
        return "hosts unknown"
    if len(summary.hosts) == 1:
        return clean(f"host {summary.hosts[0]}")
    emulated = "emulated " if all(EMULATED in host for host in summary.hosts) else ""
    return f"{len(summary.hosts)} {emulated}hosts"
