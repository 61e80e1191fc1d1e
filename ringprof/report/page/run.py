"""The page of one run, or of the traces of one."""

from __future__ import annotations

from collections.abc import Sequence

from ringprof.analysis.findings.findings import Findings
from ringprof.errors import UsageError, nearest
from ringprof.report.json_report import Report
from ringprof.report.page.document import Document, PageSection
from ringprof.report.page.html import drawing
from ringprof.report.sections import SECTIONS
from ringprof.report.sections.run import what_ran
from ringprof.report.terminal import header_of
from ringprof.report.terms import MEANINGS
from ringprof.report.text import LONGEST_SENTENCE, binary_size, clean, duration, percent, rate
from ringprof.trace.columns import NOTES

_DRAWN = ("timeline", "waterfall")
"""What a part of the page is of where nobody says."""


def run_document(found: Findings, report: Report, name: str) -> Document:
    """The whole page; ``report`` is the JSON report of the same findings."""
    figures, sections = drawing(), []
    for one in SECTIONS:
        content = one.html(found, report, figures) if one.html else None
        if content is not None:
            sections.append(PageSection(one.name, one.title, MEANINGS.get(one.name, ""), content))
    attribution = found.attribution
    if any(warning.code not in NOTES for warning in attribution.warnings):
        # They change how everything after them is to be read.
        sections.sort(key=lambda section: section.anchor != "warnings")
    header = header_of(attribution, found.summary)
    what = f"{what_ran(attribution.run)} · {header}" if attribution.run else header
    step = clean(found.next_step.text, LONGEST_SENTENCE) if found.next_step else ""
    return Document(clean(name), what, found.verdict, _tiles(found), sections, step)


def part_document(found: Findings, report: Report, name: str, wanted: Sequence[str] = ()) -> Document:
    """Some sections of the page, under a line that says what was run; without a name those that are drawn over time.

    Raises `UsageError` for a section that there is none of.
    """
    whole = run_document(found, report, name)
    by_name = {section.anchor: section for section in whole.sections}
    shown = wanted or [section for section in _DRAWN if section in by_name]
    for section in shown:
        if section not in by_name:
            raise UsageError(f"no section {section!r}{nearest(section, by_name)}; there are: {', '.join(by_name)}")
    return Document(whole.title, whole.subtitle, (), (), [by_name[section] for section in shown])


def _tiles(found: Findings) -> list[tuple[str, str]]:
    summary, rates = found.summary, found.summary.rates
    tiles = [(duration(summary.slowest_wall_ns), f"wall of rank {summary.slowest_rank}, the slowest")]
    if rates.tflops is not None:
        how = "predicted" if found.attribution.run and found.attribution.run.predicted else "achieved"
        tiles.insert(0, (rate(rates.tflops), f"{how}, per device"))
    if rates.block_tflops is not None:
        tiles.append((rate(rates.block_tflops), "attention kernels in the run"))
    if rates.solo_tflops is not None:
        tiles.append((rate(rates.solo_tflops), "the same blocks alone"))
    tiles.append((percent(summary.exposed_mean), "exposed communication, of the mean wall"))
    if summary.overlap_ratio is not None:
        tiles.append((percent(summary.overlap_ratio), "of communication hidden"))
    if rates.peak_memory_bytes:
        tiles.append((binary_size(rates.peak_memory_bytes), "peak memory a device"))
    return tiles
