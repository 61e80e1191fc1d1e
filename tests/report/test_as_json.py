"""Tests of the JSON report against its schema, and of its figures against each other."""

from __future__ import annotations

import json

import jsonschema
import pytest

from ringprof.analysis.findings.findings import findings_in_memory
from ringprof.analysis.findings.metric_table import METRICS, Use
from ringprof.analysis.findings.time_table import TIMES
from ringprof.common.json_object import json_text
from ringprof.report import as_json
from ringprof.scale.pipeline import attribute
from tests.analysis.build import FLASH, NCCL, Builder
from tests.analysis.findings.test_controls import CONTROLS
from tests.analysis.findings.test_summary import ring_with_compute
from tests.analysis.recorded import recorded_run
from tests.analysis.test_real_runs import NVLINK, TWO_HOSTS, attribution_of
from tests.analysis.timeline.test_cpu import example as cpu_example
from tests.paths import ROOT
from tests.report.schema_walk import SCHEMA, properties_without_description, undescribed


def report_of(attribution):
    findings = findings_in_memory(attribution)
    text = json_text(as_json.as_dict(findings, source="trace", paths=["x.json"]))
    assert text.isascii()
    return json.loads(text)


def traced(*builders, run=None):
    return attribute([b.trace() for b in builders], run)


CASES = {
    "nvlink": lambda: attribution_of(NVLINK),
    "two hosts": lambda: attribution_of(TWO_HOSTS, 4),
    "a run": lambda: traced(*ring_with_compute(), run=recorded_run()),
    "a run without measurements": lambda: traced(
        *ring_with_compute(),
        run=recorded_run(timings=None, profiled=None, work=None, verification=None, workload=None, strategy=None),
    ),
    "a controlled run": lambda: traced(*ring_with_compute(), run=recorded_run(controls=CONTROLS)),
    "ranks missing": lambda: traced(*ring_with_compute()[:2]),
    "one gpu": lambda: traced(Builder(world_size=1).run(FLASH, 0, 10, launched=1)),
    "no records": lambda: traced(Builder(world_size=1).run(NCCL, 0, 10, launched=1)),
    "nothing but zero time": lambda: traced(Builder(world_size=1).run(FLASH, 5, 5, launched=1)),
    "cpu": lambda: traced(cpu_example()),
}


def test_report_schema_is_valid_and_describes_every_field():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert list(properties_without_description(SCHEMA)) == []


def test_a_field_without_description_is_found():
    report = report_of(traced(cpu_example()))
    assert list(undescribed(report, SCHEMA)) == []
    report["ranks"][0]["speed"] = report["summary"]["clocks"]["drift"] = 1
    assert list(undescribed(report, SCHEMA)) == ["summary.clocks.drift", "ranks[].speed"]


def test_every_metric_is_in_the_schema_and_in_the_documents():
    described = SCHEMA["properties"]["summary"]["properties"]
    assert [row.name for row in METRICS if Use.JSON in row.use and row.name not in described] == []
    text = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    conditions = [row.name for row in METRICS if row.use & (Use.CONDITIONS | Use.COMPARISONS)]
    assert [name for name in conditions if f"`{name}`" not in text] == []
    assert [row.name for row in TIMES if f"`{row.name}_ns`" not in text] == []


@pytest.mark.parametrize("case", CASES)
def test_every_report_matches_the_schema(case):
    jsonschema.Draft202012Validator(SCHEMA).validate(report_of(CASES[case]()))


@pytest.mark.parametrize("case", CASES)
def test_the_parts_of_every_rank_sum_to_its_wall(case):
    for rank in report_of(CASES[case]())["ranks"]:
        parts = ("compute_ns", "exposed_comm_ns", "exposed_memory_ns", "idle_ns")
        assert sum(rank[part] for part in parts) == rank["wall_ns"]
        if rank["overlapped_ns"] is not None:
            assert rank["comm_ns"] == rank["overlapped_ns"] + rank["exposed_comm_ns"]


def test_top_level_keys_follow_the_contract():
    assert list(report_of(attribution_of(NVLINK))) == [
        "schema", "source", "summary", "ranks", "steps", "waterfall", "run", "table", "warnings",
    ]  # fmt: skip


def test_a_rank_of_the_nvlink_run():
    rank = report_of(attribution_of(NVLINK))["ranks"][5]
    assert (rank["rank"], rank["host"], rank["wall_ns"]) == (5, None, 163_122_749)
    assert rank["hops"]["count"] == 22
    assert rank["hops"]["wait_ns"] + rank["hops"]["wire_ns"] == rank["kinds_ns"]["send_recv"]
    assert rank["waits"]["send_recv"] == {key: rank["hops"][key] for key in ("wait_ns", "wire_ns")}
    assert rank["hops"]["wire_gbps"] == pytest.approx(rank["hops"]["bytes"] / rank["hops"]["wire_ns"])


def test_each_time_bound_has_its_own_key():
    """Ranks compute from 500 to 1500, 1600, 1700 and 1800; their hops wait until 1500 and end at 2500."""
    bounds = report_of(traced(*ring_with_compute()))["summary"]["bounds_ns"]
    # Free: the longest computation. Balanced: the wall, as no rank waits without computing. Hidden: the mean of the
    # ranks' computation, which is longer than the 1000 that a wire is busy.
    assert bounds == {"free_communication": 1300, "balanced": 2000, "all_hidden": 1150}


def test_unknown_values_are_null():
    (rank,) = report_of(traced(cpu_example()))["ranks"]
    assert [rank[key] for key in ("overlapped_ns", "overlap_ratio", "waits", "hops")] == [None] * 4
    alone = report_of(traced(*ring_with_compute()[:1]))["ranks"][0]
    assert alone["waits"] is None
    assert (alone["hops"]["bytes"], alone["hops"]["wait_ns"], alone["hops"]["wire_gbps"]) == (4000, None, None)


def test_report_of_a_run_includes_its_verification():
    run = report_of(traced(*ring_with_compute(), run=recorded_run()))["run"]
    assert (run["name"], run["strategy"]["name"], run["verification"]["passed"]) == ("burst-1024", "burst", True)
