"""Tests of the GPUs' state in a report: before any percentage, in words, as data and on the page."""

from __future__ import annotations

import jsonschema

from ringprof.analysis.findings.findings import findings_in_memory
from ringprof.report import as_json
from ringprof.report.page.document import Content, PageContext
from ringprof.report.sections import machine
from ringprof.report.terminal import render
from ringprof.run import DeviceState
from ringprof.scale.pipeline import attribute
from tests.analysis.recorded import recorded_run
from tests.analysis.transfers.test_hops import ring
from tests.report.schema_walk import SCHEMA

STATES = [
    DeviceState(looks=9, sm_clock_mhz=1900, least_sm_clock_mhz=1800, rated_sm_clock_mhz=1980, power_w=650.0,
                power_limit_w=700.0, hottest_celsius=60, held_back={"power cap": 1 / 3}),
    DeviceState(looks=9, sm_clock_mhz=1500, least_sm_clock_mhz=1400, rated_sm_clock_mhz=1980),
    None,
    None,
]  # fmt: skip


NO_FIGURES = PageContext(None, ["run.json"])
"""Page context for a section that draws no figures."""


def test_gpu_state_is_shown_before_the_verdict_on_page_and_in_json() -> None:
    run = recorded_run(4, device_states=STATES)
    traces = [builder.trace() for builder in ring([1000] * 4, [2000] * 4)]
    findings = findings_in_memory(attribute(traces, run))
    blocks = render(findings).split("\n\n")
    assert (
        blocks[1].splitlines()[0].startswith("GPUs while they were timed (9 samples each in 9 ms): SM clock 1,500 to")
    )
    assert "rank 1's clock is 21.1 % below rank 0's" in blocks[1]
    report = as_json.as_dict(findings, source="run", paths=["run.json"])
    assert [state and state["sm_clock_mhz"] for state in report["run"]["device_states"]] == [1900, 1500, None, None]
    jsonschema.validate(report, SCHEMA)
    content = machine.html(findings, NO_FIGURES)
    assert isinstance(content, Content)
    assert [[cell.text for cell in row] for row in content.tables[0].rows] == [
        ["0", "9", "1,900", "1,800", "1,980", "650", "700", "60", "power cap 33 %"],
        ["1", "9", "1,500", "1,400", "1,980", "-", "-", "-", "nothing"],
    ]


def test_report_without_gpu_state_omits_it() -> None:
    traces = [builder.trace() for builder in ring([1000] * 4, [2000] * 4)]
    findings = findings_in_memory(attribute(traces, recorded_run(4)))
    assert "GPUs while" not in render(findings) and machine.html(findings, NO_FIGURES) is None
