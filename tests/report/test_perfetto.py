"""The merged trace: valid by its schema, on one clock, with every activity, and arrows from send to receive."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from typing import Any

import jsonschema
import pytest

from ringprof import cli
from ringprof.report.perfetto import EXPOSED, STEPS, events_of
from tests.loaded import analysis
from tests.paths import ROOT

RUN = ROOT / "traces" / "h200x4-zigzag-65536"
NUMBER, TEXT, WHOLE = {"type": "number"}, {"type": "string"}, {"type": "integer", "minimum": 0}
LENGTH = {"type": "number", "minimum": 0}
PLACE = {"pid": WHOLE, "tid": WHOLE, "name": TEXT}
# The Trace Event Format (Google, 2016): what each phase must have.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "traceEvents": {
            "type": "array",
            "items": {
                "oneOf": [
                    {"properties": {"ph": {"const": "X"}, **PLACE, "ts": NUMBER, "dur": LENGTH},
                     "required": ["ph", "pid", "tid", "name", "ts", "dur"]},
                    {"properties": {"ph": {"const": "M"}, **PLACE, "args": {"type": "object"}},
                     "required": ["ph", "pid", "tid", "name", "args"]},
                    {"properties": {"ph": {"enum": ["s", "f"]}, **PLACE, "ts": NUMBER, "id": WHOLE, "cat": TEXT},
                     "required": ["ph", "pid", "tid", "name", "ts", "id", "cat"]},
                ]
            },
        }
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("merged") / "merged.json.gz"
    assert cli.run(["export", str(RUN), "-o", str(path)]) == 0
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return found


def test_it_is_a_valid_trace(merged):
    jsonschema.validate(merged, SCHEMA)


def test_every_activity_is_a_slice_with_its_own_time(merged):
    slices = [event for event in merged["traceEvents"] if event["ph"] == "X" and event["tid"] > EXPOSED]
    for rank in analysis(RUN).attribution.ranks:
        mine = [event for event in slices if event["pid"] == rank.rank]
        assert len(mine) == len(rank.window.activities())
        total = sum(kind.time_ns for kind in rank.breakdown.kinds.values())
        assert sum(event["dur"] for event in mine) == pytest.approx(total / 1e3)
    assert min(event["ts"] for event in slices) == 0


def test_exposed_stretches_sum_to_the_reports_figure(merged):
    for rank in analysis(RUN).attribution.ranks:
        found = [
            e["dur"] for e in merged["traceEvents"] if e["ph"] == "X" and (e["pid"], e["tid"]) == (rank.rank, EXPOSED)
        ]
        assert sum(found) == pytest.approx(rank.breakdown.exposed_comm_ns / 1e3)


def test_each_ring_step_is_a_slice(merged):
    slices = [e for e in merged["traceEvents"] if e["ph"] == "X" and e["tid"] == STEPS]
    assert len(slices) == len(analysis(RUN).findings.steps)
    assert {e["name"] for e in slices if e["pid"] == 0} >= {"fwd 0", "fwd 3", "bwd 0", "bwd 4"}


def test_arrows_go_from_a_rank_to_the_next_and_touch_their_slices(merged):
    ends: dict[int, dict[str, Any]] = defaultdict(dict)
    for event in merged["traceEvents"]:
        if event["ph"] in "sf":
            ends[event["id"]][event["ph"]] = event
    hops = sum(len(rank.hops) for rank in analysis(RUN).attribution.ranks)
    # A hop of zigzag sends two messages, K and V or dK and dV.
    assert len(ends) == 2 * hops
    slices = [e for e in merged["traceEvents"] if e["ph"] == "X"]
    for pair in ends.values():
        assert pair["f"]["pid"] == (pair["s"]["pid"] + 1) % 4
        assert pair["f"]["bp"] == "e"
        for event in pair.values():
            assert any(
                one["ts"] <= event["ts"] <= one["ts"] + one["dur"]
                for one in slices
                if (one["pid"], one["tid"]) == (event["pid"], event["tid"])
            )


def test_hosts_are_put_on_one_clock():
    run = analysis(ROOT / "tests" / "data" / "h200x8-zigzag-131072", ranks_per_host=4)
    offsets = run.clocks().offset_ns
    starts = {rank.rank: rank.breakdown.start_ns + offsets[rank.rank] for rank in run.attribution.ranks}
    first = min(starts.values())
    slices: dict[int, list[float]] = defaultdict(list)
    for event in events_of(run.findings):
        if event["ph"] == "X" and event["tid"] > EXPOSED:
            slices[event["pid"]].append(event["ts"])
    assert len(slices) == 8
    for rank, start in starts.items():
        assert min(slices[rank]) == pytest.approx((start - first) / 1e3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([str(RUN), "-o", "out.txt"], "written as .json or .json.gz"),
        ([str(RUN), "-o", "/no/such/out.json"], "cannot be written"),
    ],
)
def test_what_cannot_be_exported_is_one_line(arguments, message, capsys):
    assert cli.run(["export", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_the_trace_processor_reads_it(merged, tmp_path):
    processor = pytest.importorskip("perfetto.trace_processor", reason="Perfetto's trace processor is not installed")
    path = tmp_path / "merged.json"
    path.write_text(json.dumps(merged))
    with processor.TraceProcessor(trace=str(path)) as opened:
        (row,) = opened.query("select count(*) as count from slice")
    assert row.count == sum(event["ph"] == "X" for event in merged["traceEvents"])
