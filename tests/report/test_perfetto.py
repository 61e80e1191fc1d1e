"""Tests of the merged trace: valid by its schema, one clock, every activity, arrows from send to receive.

`tests.report.perfetto_model` models what a viewer reads of it; Perfetto itself reads it where it is installed.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringprof import cli
from ringprof.analysis.findings.findings import findings_in_memory
from ringprof.report.perfetto import EXPOSED, STEPS, STREAMS, Lanes, events_of, microseconds
from ringprof.scale.pipeline import attribute
from tests.analysis.build import FLASH, Builder
from tests.analysis.test_real_runs import NVLINK
from tests.analysis.transfers.test_hops import ring
from tests.loaded import analysis
from tests.paths import DATA, ROOT
from tests.report.perfetto_model import Model, Slice, nanoseconds, read

RUN = ROOT / "traces" / "h200x4-zigzag-65536"
NUMBER, TEXT, WHOLE = {"type": "number"}, {"type": "string"}, {"type": "integer", "minimum": 0}
LENGTH = {"type": "number", "minimum": 0}
TRACK = {"pid": WHOLE, "tid": WHOLE, "name": TEXT}
# The Trace Event Format (Google, 2016): what each phase must have.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "traceEvents": {
            "type": "array",
            "items": {
                "oneOf": [
                    {"properties": {"ph": {"const": "X"}, **TRACK, "ts": NUMBER, "dur": LENGTH},
                     "required": ["ph", "pid", "tid", "name", "ts", "dur"]},
                    {"properties": {"ph": {"const": "M"}, **TRACK, "args": {"type": "object"}},
                     "required": ["ph", "pid", "tid", "name", "args"]},
                    {"properties": {"ph": {"enum": ["s", "f"]}, **TRACK, "ts": NUMBER, "id": WHOLE, "cat": TEXT},
                     "required": ["ph", "pid", "tid", "name", "ts", "id", "cat"]},
                    {"properties": {"ph": {"const": "C"}, **TRACK, "ts": NUMBER,
                                    "args": {"additionalProperties": NUMBER, "minProperties": 1}},
                     "required": ["ph", "pid", "name", "ts", "args"]},
                ]
            },
        }
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("merged") / "merged.json.gz"
    assert cli.run(["export", str(RUN), "-o", str(path)]) == 0
    trace: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return trace


def test_export_is_a_valid_trace(merged):
    jsonschema.validate(merged, SCHEMA)


def test_every_activity_is_a_slice_with_its_own_time(merged):
    slices = [event for event in merged["traceEvents"] if event["ph"] == "X" and "kind" in event["args"]]
    for rank in analysis(RUN).attribution.ranks:
        rank_slices = [event for event in slices if event["pid"] == rank.rank]
        assert len(rank_slices) == len(rank.window.activities())
        total = sum(kind.time_ns for kind in rank.breakdown.kinds.values())
        assert sum(event["dur"] for event in rank_slices) == pytest.approx(total / 1e3)
    assert min(event["ts"] for event in slices) == 0


def test_exposed_stretches_sum_to_the_reports_figure(merged):
    for rank in analysis(RUN).attribution.ranks:
        durations = [
            event["dur"]
            for event in merged["traceEvents"]
            if event["ph"] == "X" and (event["pid"], event["tid"]) == (rank.rank, EXPOSED)
        ]
        assert sum(durations) == pytest.approx(rank.breakdown.exposed_comm_ns / 1e3)


def test_export_has_a_slice_per_ring_step(merged):
    slices = [e for e in merged["traceEvents"] if e["ph"] == "X" and e["tid"] == STEPS]
    assert len(slices) == len(analysis(RUN).findings.steps)
    assert {e["name"] for e in slices if e["pid"] == 0} >= {"fwd 0", "fwd 3", "bwd 0", "bwd 4"}


def test_each_message_has_one_arrow_to_the_next_rank(merged):
    ends: dict[int, dict[str, Any]] = defaultdict(dict)
    for event in merged["traceEvents"]:
        if event["ph"] in "sf":
            assert event["ph"] not in ends[event["id"]]
            ends[event["id"]][event["ph"]] = event
    # A hop of zigzag sends K and V, or dK and dV, in one kernel: one arrow, as there is one kernel to go to.
    assert len(ends) == sum(len(rank.hops) for rank in analysis(RUN).attribution.ranks) == 40
    for pair in ends.values():
        assert pair["f"]["pid"] == (pair["s"]["pid"] + 1) % 4
        assert pair["s"]["ts"] <= pair["f"]["ts"]


def exported_model(*builders: Builder, launches: bool = False) -> Model:
    """Return the model of what a viewer reads of the export of these traces."""
    findings = findings_in_memory(attribute([builder.trace() for builder in builders]))
    return read(list(events_of(findings, launches=launches)))


def stream_slices(model: Model, rank: int) -> list[Slice]:
    return [piece for piece in model.slices if piece.process == rank and piece.track >= STREAMS]


def test_transfer_slice_contains_messages_wait_and_wire() -> None:
    """Rank 3 is 500 late. Its neighbours 0 and 2 wait for it, rank 1 does not; 2000 bytes in 1000 ns are 2 GB/s."""
    model = exported_model(*ring([1000, 1000, 1000, 1500], [2500, 2000, 2500, 2500], tensors=1))
    whole, *inside = stream_slices(model, 0)
    assert (whole.start_ns, whole.end_ns, whole.parent) == (0, 1500, None)
    assert whole.args == {
        "kind": "send/recv", "bytes": 2000, "send to": "rank 1", "receive from": "rank 3", "link": "unknown link",
        "group": "cp", "wait ms": 0.0005, "wire ms": 0.001, "GB/s": 2.0,
    }  # fmt: skip
    assert [(piece.name, piece.start_ns, piece.end_ns) for piece in inside] == [
        ("send to rank 1", 0, 0), ("wait", 0, 500), ("wire", 500, 1500), ("received from rank 3", 1499, 1499),
    ]  # fmt: skip
    assert inside[1].parent is whole and inside[2].parent is whole
    assert model.counters[0, "sent, unknown link GB/s"] == [(500, 2.0), (1500, 0.0)]
    assert model.counters[1, "sent, unknown link GB/s"] == [(0, 2.0), (1000, 0.0)]
    arrows = {(arrow.source.process, arrow.target.process): (arrow.starts_ns, arrow.ends_ns) for arrow in model.arrows}
    assert arrows == {(0, 1): (0, 999), (1, 2): (0, 1499), (2, 3): (0, 1499), (3, 0): (500, 1499)}
    assert {(arrow.source.name, arrow.target.name) for arrow in model.arrows if arrow.source.process == 0} == {
        ("send to rank 1", "received from rank 0")
    }


def test_rates_of_concurrent_transfers_are_summed() -> None:
    """Both transfers use one link: 2000 bytes in 1000 ns from 0 on, and in 500 ns from 600 on."""
    builders = ring([1000] * 4, [2000] * 4, tensors=1)
    for rank, builder in enumerate(builders):
        builder.batch(300, 1600, 2100, to=(rank + 1) % 4, source=(rank - 1) % 4, tensors=1)
        builder.activities[-1] = (*builder.activities[-1][:5], 21, *builder.activities[-1][6:])
    rates = exported_model(*builders).counters[0, "sent, unknown link GB/s"]
    assert rates == [(0, 2.0), (600, 6.0), (1000, 4.0), (1100, 0.0)]


def test_message_ending_before_its_start_has_no_arrow() -> None:
    """Rank 1 is done before rank 0 begins: the times of one of them are wrong."""
    model = exported_model(*ring([5000, 1000, 5000, 5000], [6000, 2000, 6000, 6000], tensors=1))
    assert (0, 1) not in {(arrow.source.process, arrow.target.process) for arrow in model.arrows}
    assert not +model.lost
    (run,) = [piece for piece in model.slices if piece.process == 4]
    assert run.args["arrows left out, as clocks are off"] == 1


def test_overlapping_activities_of_a_stream_are_exported() -> None:
    builder = Builder(world_size=1).run(FLASH, 0, 10, launched=1).run(FLASH, 5, 20, launched=2)
    builder.run(FLASH, 6, 9, launched=3).run(FLASH, 10, 30, launched=4)
    model = exported_model(builder)
    assert not +model.lost
    assert [(piece.start_ns, piece.end_ns, piece.parent) for piece in stream_slices(model, 0)] == [
        (0, 10, None), (5, 20, None), (6, 9, None), (10, 30, None),
    ]  # fmt: skip


def test_launches_are_drawn_on_request_with_an_arrow_to_what_they_launched() -> None:
    builder = Builder(world_size=1).run(FLASH, 100, 110, launched=20).run(FLASH, 120, 130, launched=40)
    builder.mark("my step", 10, 60).run("early_by_its_clock", 30, 35, launched=50)
    assert not exported_model(builder).arrows
    model = exported_model(builder, launches=True)
    assert not +model.lost
    calls = [piece for piece in model.slices if piece.name.startswith("launch of")]
    assert [(piece.start_ns, piece.parent and piece.parent.name) for piece in calls] == [
        (0, "my step"), (20, "my step"), (30, "my step"),
    ]  # fmt: skip
    assert [(arrow.source.start_ns, arrow.target.start_ns) for arrow in model.arrows] == [(0, 80), (20, 100)]


RUNS = [
    "h200x4-zigzag-65536",
    "h200x4-burst-65536-two-hosts",
    "h200x4-double-ring-262144",
    "h200x4-burst-262144-copied",
]


@pytest.mark.parametrize(
    "path", [*(ROOT / "traces" / name for name in RUNS), DATA / NVLINK], ids=lambda path: path.name
)
def test_viewer_reads_every_event_of_a_recorded_run(path: Path) -> None:
    findings = analysis(path).findings
    events = list(events_of(findings, launches=True))
    model = read(events)
    assert not +model.lost
    assert len(model.slices) == sum(event["ph"] == "X" for event in events)
    messages = [arrow for arrow in model.arrows if arrow.category == "message"]
    assert len(messages) == sum(
        hop.parts[0].transfer.kind == "send_recv" for rank in findings.attribution.ranks for hop in rank.hops
    )
    for arrow in messages:
        assert arrow.source.name == f"send to rank {arrow.target.process}"
        assert arrow.target.name == f"received from rank {arrow.source.process}"
    steps = {piece.args["step"] for piece in model.slices if "bytes" in piece.args and "step" in piece.args}
    assert steps >= {"fwd 0", "bwd 0"}


def test_export_of_a_cpu_run_has_operators_and_waits() -> None:
    run = analysis(ROOT / "traces" / "cpu4-burst-4096")
    model = read(list(events_of(run.findings)))
    assert not +model.lost
    for rank in run.attribution.ranks:
        waits = [
            piece for piece in model.slices if piece.process == rank.rank and piece.name.startswith("ringprof::wait")
        ]
        assert sum(piece.end_ns - piece.start_ns for piece in waits) == rank.breakdown.exposed_comm_ns
        assert any(piece.process == rank.rank and piece.name.startswith("aten::") for piece in model.slices)


def test_export_metadata_describes_the_run(merged):
    metadata = merged["otherData"]
    assert (metadata["strategy"], metadata["tokens"], metadata["ranks"]) == ("zigzag", 65536, 4)
    assert metadata["devices"] == "NVIDIA H200" and metadata["torch"].startswith("2.")
    (run,) = [event for event in merged["traceEvents"] if event["ph"] == "X" and event["pid"] == 4]
    assert run["args"]["strategy"] == "zigzag"


@given(st.integers(0, 10**15))
def test_microseconds_keep_nanosecond_times(time_ns: int) -> None:
    assert nanoseconds(json.loads(json.dumps(microseconds(time_ns)))) == time_ns


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20))), st.booleans())
def test_slices_of_a_lane_are_disjoint_or_nested(drawn: list[tuple[int, int]], nested: bool) -> None:
    spans = sorted(((start, start + size) for start, size in drawn), key=lambda span: (span[0], -span[1]))
    lanes = Lanes(nested=nested)
    placed = [(lanes.place(*span), *span) for span in spans]
    for number, (lane, start, end) in enumerate(placed):
        for other, _, other_end in placed[:number]:
            if lane == other:
                assert start >= other_end or (nested and end <= other_end)


def test_export_puts_hosts_on_one_clock():
    run = analysis(ROOT / "tests" / "data" / "h200x8-zigzag-131072", ranks_per_host=4)
    offsets = run.clocks().offset_ns
    starts = {rank.rank: rank.breakdown.start_ns + offsets[rank.rank] for rank in run.attribution.ranks}
    first = min(starts.values())
    slices: dict[int, list[float]] = defaultdict(list)
    for event in events_of(run.findings):
        if event["ph"] == "X" and "kind" in event["args"]:
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
def test_impossible_export_is_a_one_line_error(arguments, message, capsys):
    assert cli.run(["export", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_trace_processor_reads_the_export(merged, tmp_path):
    if shutil.which("trace_processor_shell") is None:
        pytest.skip("Perfetto's trace_processor_shell is not on the path")
    processor = pytest.importorskip("perfetto.trace_processor", reason="the package perfetto is not installed")
    path = tmp_path / "merged.json"
    path.write_text(json.dumps(merged))
    config = processor.TraceProcessorConfig(bin_path=shutil.which("trace_processor_shell"))
    with processor.TraceProcessor(trace=str(path), config=config) as opened:
        (slices,) = opened.query("select count(*) as count from slice")
        (flows,) = opened.query("select count(*) as count from flow")
        lost = [row.name for row in opened.query("select name from stats where severity != 'info' and value > 0")]
    assert slices.count == sum(event["ph"] == "X" for event in merged["traceEvents"])
    assert flows.count == 40 and not lost
