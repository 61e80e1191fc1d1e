"""Tests that drawings and listings match the breakdown: cut at the window, on the reported device."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.kinds.kinds import KINDS
from ringprof.analysis.timeline.window import Focus
from ringprof.report.page.document import Content
from ringprof.report.perfetto import EXPOSED, events_of
from ringprof.report.sections import kernels
from ringprof.report.terms import LABELS
from ringprof.report.timeline import BLOCKED_ON_PEER, IDLE, Bar, timeline_of
from ringprof.scale.pipeline import attribute
from tests.analysis.build import FLASH, Builder
from tests.analysis.test_real_runs import NVLINK
from tests.analysis.transfers.test_hops import ring
from tests.loaded import analysis
from tests.paths import DATA, ROOT
from tests.report.test_machine import NO_FIGURES


def bars_of(*builders: Builder, between_ns: tuple[int, int] | None = None) -> list[Bar]:
    attribution = attribute([builder.trace() for builder in builders], focus=Focus(between_ns=between_ns))
    return timeline_of(attribution, ()).bars


def communication_bars(bars: list[Bar], rank: int) -> list[tuple[str, int, int]]:
    return [
        (bar.category, bar.start_ns, bar.end_ns) for bar in bars if bar.rank == rank and bar.lane == "communication"
    ]


def test_split_bar_shows_wait_then_wire() -> None:
    """Ranks 0 to 2 start their hop at 1000 and rank 3 at 1500; all end at 2500. The timeline begins at 1000."""
    bars = bars_of(*ring([1000, 1000, 1000, 1500], [2500] * 4))
    assert communication_bars(bars, 0) == [("wait", 0, 500), ("wire", 500, 1500)]
    assert communication_bars(bars, 3) == [("wire", 500, 1500)]


def test_split_bar_is_clipped_to_the_chosen_times() -> None:
    """The traces begin at 900, with a kernel; 200 to 1200 from there is 1100 to 2100."""
    builders = ring([1200, 1200, 1200, 1700], [2700] * 4)
    for builder in builders:
        builder.run(FLASH, 900, 2400, launched=80)
    bars = bars_of(*builders, between_ns=(200, 1200))
    assert [(bar.category, bar.start_ns, bar.end_ns) for bar in bars if bar.rank == 0] == [
        ("flash_fwd", 0, 1000), ("wait", 100, 600), ("wire", 600, 1000),
    ]  # fmt: skip
    assert max(bar.end_ns for bar in bars) == 1000


def test_only_the_device_that_is_reported_is_drawn() -> None:
    builder = Builder(world_size=1).run(FLASH, 0, 10, launched=1).run(FLASH, 20, 30, launched=2)
    builder.run("elementwise_of_the_other_device", 0, 15, launched=3, device=1)
    assert [(bar.category, bar.start_ns, bar.end_ns) for bar in bars_of(builder)] == [
        ("flash_fwd", 0, 10), ("flash_fwd", 20, 30), ("idle", 10, 20),
    ]  # fmt: skip


BURST = ROOT / "traces" / "h200x4-burst-65536-two-hosts"
CHOSEN: tuple[tuple[Path, dict[str, Any]], ...] = (
    (DATA / NVLINK, {}),
    (DATA / NVLINK, {"between": "10ms,20ms"}),
    (DATA / NVLINK, {"between": "33.3ms,120ms"}),
    (BURST, {"window": "ringprof::bwd*"}),
    (BURST, {"window": "ringprof::bwd*", "between": "200ms,500ms"}),
    (BURST, {"group": "ringprof:read_inner"}),
    (BURST, {"group": "ringprof:read_inner", "between": "20ms,60ms"}),
)


@pytest.mark.parametrize(("path", "options"), CHOSEN, ids=lambda value: str(value)[-60:])
def test_timeline_kernel_table_and_export_agree_with_the_breakdown(path: Path, options: dict[str, Any]) -> None:
    """Calls and times agree by kind and rank, to the nanosecond."""
    run, between = analysis(path, **options), options.get("between")
    ranks = {rank.rank: rank.breakdown for rank in run.attribution.ranks}
    expected = {
        (rank, kind): (figures.calls, figures.time_ns) for rank, b in ranks.items() for kind, figures in b.kinds.items()
    }
    assert {key: spent[1] for key, spent in expected.items()} == _summed_bars(run.findings)
    assert _by_kind(expected) == _kernel_rows(run.findings)
    assert {key: spent[0] for key, spent in expected.items()} == _counted_slices(run.findings)
    if between is not None:
        low, high = (float(time.removesuffix("ms")) for time in between.split(","))
        slices = [
            event
            for event in events_of(run.findings)
            if event["ph"] == "X" and (event["tid"] == EXPOSED or "kind" in event["args"])
        ]
        ends = [event["ts"] + event["dur"] for event in slices]
        assert max(ends) - min(event["ts"] for event in slices) <= (high - low) * 1e3 + 1e-3


def _summed_bars(findings: Findings) -> dict[tuple[int, str], int]:
    times: Counter[tuple[int, str]] = Counter()
    for bar in timeline_of(findings.attribution, ()).bars:
        if bar.kind in (IDLE, BLOCKED_ON_PEER):
            continue
        times[bar.rank, bar.kind] += bar.end_ns - bar.start_ns
    return dict(times)


def _by_kind(expected: dict[tuple[int, str], tuple[int, int]]) -> dict[str, tuple[int, int]]:
    sums: dict[str, tuple[int, int]] = {}
    for (_, kind), (calls, time) in expected.items():
        subtotal = sums.get(kind, (0, 0))
        sums[kind] = subtotal[0] + calls, subtotal[1] + time
    return sums


def _kernel_rows(findings: Findings) -> dict[str, tuple[int, int]]:
    content = kernels.html(findings, NO_FIGURES)
    assert isinstance(content, Content)
    labels = {label: kind for kind, label in LABELS.items() if kind in KINDS}
    sums: dict[str, tuple[int, int]] = {}
    for row in content.tables[0].rows:
        calls, time = sums.get(labels[row[1].text], (0, 0))
        sums[labels[row[1].text]] = calls + int(row[2].key), time + round(1e6 * float(row[3].key))
    return sums


def _counted_slices(findings: Findings) -> dict[tuple[int, str], int]:
    labels = {label: kind for kind, label in LABELS.items() if kind in KINDS}
    activities = (event for event in events_of(findings) if event["ph"] == "X" and "kind" in event["args"])
    return dict(Counter((event["pid"], labels[event["args"]["kind"]]) for event in activities))


@pytest.mark.parametrize("between", ["10ms,20ms", "33.3ms,120ms", "60ms,90ms"])
def test_arrows_of_a_window_equal_those_of_the_whole_run(between: str) -> None:
    """Ranks that are cut at times hold different hops; none may be matched to another hop than its own."""

    def arrows(chosen: str | None) -> set[tuple[int, ...]]:
        run = analysis(DATA / NVLINK, between=chosen)
        ends = [event for event in events_of(run.findings) if event["ph"] in "sf"]
        sends = {event["id"]: event["pid"] for event in ends if event["ph"] == "s"}
        return {(event["id"], sends[event["id"]], event["pid"]) for event in ends if event["ph"] == "f"}

    whole, part = arrows(None), arrows(between)
    assert part and part < whole
