"""Tests of idle time by cause in every form of the report: exact times of synthetic traces, and parts that sum."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ringprof import cli
from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.conditions import metrics_of
from ringprof.analysis.findings.findings import Findings, findings_in_memory
from ringprof.analysis.findings.measurements import measurement_of_run
from ringprof.analysis.timeline.idle import CAUSES
from ringprof.report import palette, plots
from ringprof.report.as_json import as_dict
from ringprof.report.page.document import PageContext
from ringprof.report.page.html import drawing
from ringprof.report.perfetto import EXPOSED, IDLE, events_of
from ringprof.report.sections import idle
from ringprof.report.tables import Listing
from ringprof.report.terminal import render
from ringprof.report.text import TextStyle
from ringprof.report.timeline import BLOCKED_ON_PEER, idle_groups, timeline_of
from ringprof.results.frames import frame_of
from ringprof.scale.pipeline import attribute
from ringprof.trace.columns import RUNTIME_CALL
from ringprof.trace.kineto.reader import parse_trace
from tests.analysis.build import FLASH, Builder
from tests.analysis.findings.test_summary import ring_with_compute
from tests.analysis.timeline.test_cpu import example as cpu_example
from tests.loaded import analysis
from tests.paths import COMMITTED, ROOT
from tests.report.idle_traces import KNOWN_CAUSES, US, copied_hop, hip_free, many_names
from tests.report.perfetto_model import read

SCHEMA = json.loads(files("ringprof.report").joinpath("schema/report-1.schema.json").read_text(encoding="utf-8"))


def findings_of(*builders: Builder) -> Findings:
    return findings_in_memory(attribute([builder.trace() for builder in builders]))


def json_ranks(findings: Findings) -> list[dict[str, Any]]:
    report = as_dict(findings, source="trace", paths=["x"])
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(json.dumps(report, default=str)))
    return report["ranks"]


def terminal(findings: Findings, **listing: Any) -> str:
    return "\n\n".join(idle.terminal(findings, TextStyle(width=120), Listing(**listing)))


# --- JSON ---------------------------------------------------------------------------------------------


def test_time_blocked_on_a_peer_is_exposed_communication_and_not_idle() -> None:
    first, second = json_ranks(findings_of(*copied_hop()))
    assert [rank["blocked_on_peer_ns"] for rank in (first, second)] == [200 * US, 50 * US]
    assert [rank["exposed_comm_ns"] for rank in (first, second)] == [300 * US, 150 * US]
    assert [rank["idle_ns"] for rank in (first, second)] == [2 * US, 4 * US]
    assert first["idle_causes_ns"] == {"host": 0, "gap": 2 * US, "blocked": 0}
    assert first["idle_events"] == [{"class": "gap", "name": "", "time_ns": 2 * US}]


@pytest.mark.parametrize("name", KNOWN_CAUSES)
def test_longest_idle_cause_of_a_known_trace(name: str) -> None:
    make, event_class, event, share = KNOWN_CAUSES[name]
    (rank,) = json_ranks(findings_in_memory(attribute([parse_trace(make())])))
    assert rank["idle_ns"] == 1000 * US == sum(rank["idle_causes_ns"].values())
    assert rank["idle_events"][0] == {"class": event_class, "name": event, "time_ns": round(share * 1000) * US}


def test_launches_count_delays_from_the_start_of_the_call() -> None:
    """The first kernel starts 50 µs after its call of 5 µs, the second 8 µs after one of 5 µs; both run for 100 µs."""
    (rank,) = json_ranks(findings_in_memory(attribute([parse_trace(hip_free())])))
    assert rank["launches"] == {
        "count": 2, "median_delay_ns": 8 * US, "longest_delay_ns": 50 * US, "shorter_than_launch": 0,
        "launch_ns": 10 * US,
    }  # fmt: skip


def test_idle_names_beyond_50_are_one_item_per_class() -> None:
    """The fifty longest of op1 to op60 are op60 to op11; the others take 1 + 2 + ... + 10 µs."""
    (rank,) = json_ranks(findings_of(many_names()))
    names = [event["name"] for event in rank["idle_events"]]
    assert names[:50] == [f"op{number}" for number in range(60, 10, -1)]
    rest = {(event["class"], event["name"]): event["time_ns"] for event in rank["idle_events"][50:]}
    assert rest == {("operator", "(others)"): 55 * US, ("gap", "(others)"): 2 * US}
    assert sum(event["time_ns"] for event in rank["idle_events"]) == rank["idle_ns"] == 1832 * US


def test_cpu_trace_has_no_idle_causes() -> None:
    (rank,) = json_ranks(findings_of(cpu_example()))
    assert [rank[key] for key in ("idle_causes_ns", "idle_events", "launches")] == [None] * 3
    assert rank["blocked_on_peer_ns"] == 0


def test_without_a_launch_record_the_cause_is_blocked() -> None:
    (rank,) = json_ranks(findings_of(Builder(world_size=1).run(FLASH, 0, 10).run(FLASH, 9 * US, 10 * US)))
    assert rank["launches"] is None
    assert rank["idle_events"] == [{"class": "blocked", "name": "no launch record", "time_ns": 9 * US - 10}]


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda path: path.name)
def test_causes_and_events_of_every_committed_run_sum_to_idle(folder: Path) -> None:
    run = analysis(folder)
    frame = run.idle()
    for rank in run.report()["ranks"]:
        if rank["idle_causes_ns"] is None:
            assert frame.empty and rank["idle_events"] is None
            continue
        assert sum(rank["idle_causes_ns"].values()) == rank["idle_ns"]
        assert sum(event["time_ns"] for event in rank["idle_events"]) == rank["idle_ns"]
        assert frame.loc[frame["rank"] == rank["rank"], "time_ns"].sum() == rank["idle_ns"]
        assert rank["blocked_on_peer_ns"] <= rank["exposed_comm_ns"]


# --- frame and figures --------------------------------------------------------------------------------


def test_idle_frame_has_every_name_and_its_share() -> None:
    frame = frame_of(findings_of(many_names()), "idle")
    longest = frame.iloc[0]
    assert (longest["cause"], longest["class"], longest["name"]) == ("host", "operator", "op60")
    assert longest["time_ns"] == 60 * US and longest["share"] == pytest.approx(60 / 1832)
    assert {"op1", "op10"} <= set(frame["name"]) and frame["share"].sum() == pytest.approx(1)
    assert frame_of(findings_of(*copied_hop()), "breakdown")["blocked_on_peer_ns"].tolist() == [200 * US, 50 * US]


def test_idle_figures_are_wall_shares_and_times() -> None:
    """Ranks idle 2 and 4 of 500 µs, all of it gaps, and are blocked on a peer for 200 and 50 µs."""
    figures = metrics_of(findings_of(*copied_hop()))
    assert figures["blocked_on_peer"] == pytest.approx(0.25)
    assert figures["max(blocked_on_peer)"] == pytest.approx(0.4) and figures["min(blocked_on_peer_ns)"] == 50 * US
    assert figures["idle_gap"] == figures["idle"] == pytest.approx(0.006)
    assert (figures["idle_host"], figures["idle_blocked_ns"], figures["max(idle_gap_ns)"]) == (0.0, 0.0, 4 * US)
    assert "idle_host" not in metrics_of(findings_of(cpu_example()))


def test_comparison_has_idle_times_per_iteration() -> None:
    """Two marked iterations: the host takes 20 µs of the first and 10 µs of the second; 10 µs lie between them."""
    b = Builder(world_size=1)
    for number, (start, late) in enumerate(((0, 20), (100, 10))):
        b.mark("ringprof::iteration", (start - 20) * US, (start + 60) * US)
        b.run(FLASH, start * US, (start + 10) * US, launched=(start - 12) * US)
        called = (start + 10 + late) * US - 5
        b.run(FLASH, called + 5, (start + 90) * US, launched=called)
        b.on_host(f"op{number}", (start + 10) * US, called + 5)
    figures = measurement_of_run("a", findings_of(b)).figures
    assert figures["idle_host_ms"].value == pytest.approx(0.015)
    assert figures["idle_blocked_ms"].value == pytest.approx(0.005)
    parts = sum(figures[f"idle_{cause}_ms"].value for cause in CAUSES)
    assert parts == pytest.approx(figures["idle_ms"].value)


@pytest.mark.parametrize(("condition", "code"), [("max(blocked_on_peer) > 0%", 0), ("idle_host > 83%", 1)])
def test_condition_can_name_an_idle_cause(condition: str, code: int, tmp_path: Path) -> None:
    """The device idles for 1000 of 1200 µs: 997 of them until the launch call returns."""
    path = tmp_path / "trace.json"
    path.write_bytes(hip_free())
    assert cli.run(["report", str(path), "--fail-if", condition]) == code


# --- terminal -----------------------------------------------------------------------------------------


def numbers(line: str) -> list[float]:
    return [float(text.replace(",", "")) for text in re.findall(r"(?<= )[\d,]+\.\d+", line)]


@pytest.mark.parametrize("name", ["h200x2-decode-1048576", "h200x4-zigzag-262144-copied"])
def test_printed_idle_parts_sum_to_the_total(name: str) -> None:
    lines = terminal(analysis(ROOT / "traces" / name).findings).splitlines()
    for line in lines[2 : lines.index("")]:
        if line.startswith(("rank ", "mean ")):
            *parts, total_ms, _ = numbers(line)[:5]
            assert sum(parts) == pytest.approx(total_ms, abs=1e-9), line
    start = next(number for number, line in enumerate(lines) if line.startswith("idle by class"))
    classes = lines[start + 1 : lines.index("", start)]
    times, shares = zip(*map(numbers, classes), strict=True)
    assert shares[-1] == 100.0 and classes[-1].startswith("idle ")
    assert [sum(times[:-1]), sum(shares[:-1])] == pytest.approx([times[-1], shares[-1]], abs=1e-9)


def test_time_blocked_on_a_peer_is_shown_as_communication() -> None:
    text = terminal(findings_of(*copied_hop()))
    assert "part of exposed communication, not of idle" in " ".join(text.split())
    row = next(line for line in text.splitlines() if line.startswith("rank 0"))
    assert numbers(row) == [0.0, 2.0, 0.0, 2.0, 0.4, 200.0]
    assert "peer" not in terminal(findings_of(many_names()))


def test_idle_names_are_sorted_and_limited() -> None:
    findings = findings_of(many_names())
    assert [name for name in re.findall(r"^op\d+", terminal(findings, top=3), re.MULTILINE)] == ["op60", "op59", "op58"]
    assert len(re.findall(r"^op\d+", terminal(findings), re.MULTILINE)) == 15 and "more: --all" in terminal(findings)
    assert len(re.findall(r"^op\d+", terminal(findings, everything=True), re.MULTILINE)) == 60


def test_many_ranks_show_the_mean_and_the_longest_idle_rank() -> None:
    builders = []
    for rank in range(20):
        late = (1010 if rank == 7 else 10) * US
        b = Builder(rank=rank, world_size=20).run(FLASH, 0, US, launched=-US)
        builders.append(b.run(FLASH, US + late, 1100 * US, launched=US + late - 5))
    text = terminal(findings_of(*builders))
    assert set(re.findall(r"^rank \d+", text, re.MULTILINE)) == {"rank 7"}
    mean = next(line for line in text.splitlines() if line.startswith("mean of 20 ranks"))
    # (1010 + 19 * 10) / 20 µs, all of it before launch calls return; in ms, as rank 7's is.
    assert numbers(mean)[:4] == [0.06, 0.0, 0.0, 0.06]


def test_cpu_run_reports_idle_causes_as_unknown() -> None:
    text = terminal(findings_of(cpu_example()))
    assert text == "idle: a CPU trace records no device activity, so it cannot tell the causes of idle time"


def last_line(findings: Findings) -> str:
    return render(findings, TextStyle(width=400)).rstrip().splitlines()[-1].partition("PATH ")[2]


def test_last_line_offers_the_sections_of_the_run() -> None:
    """One GPU without communication idles most of its time; the ring has hops and does not idle."""
    alone = last_line(findings_in_memory(attribute([parse_trace(hip_free())])))
    assert alone == "--html report.html · --show kernels,waterfall,idle,annotations · --format json"
    ring = last_line(findings_of(*ring_with_compute()))
    assert "hops" in ring and "idle" not in ring and ring.startswith("--html report.html · ")


@pytest.mark.parametrize(("late", "offered"), [(19, False), (20, True)])
def test_idle_section_is_offered_from_2_percent_of_the_wall(late: int, offered: bool) -> None:
    b = Builder(world_size=1).run(FLASH, 0, 100 * US, launched=-US)
    b.run(FLASH, (100 + late) * US, 1000 * US, launched=US)
    assert ("idle" in last_line(findings_of(b))) is offered


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda path: path.name)
def test_steps_section_is_offered_where_steps_exist(folder: Path) -> None:
    findings = analysis(folder).findings
    assert ("steps" in last_line(findings)) is bool(findings.steps)
    assert ("hops" in last_line(findings)) is any(rank.hops for rank in findings.attribution.ranks if not rank.on_cpu)


# --- drawings -----------------------------------------------------------------------------------------


def test_idle_plot_has_a_part_per_class_and_blocked_time_last() -> None:
    ax: Any = plots.Plots(findings_of(*copied_hop())).idle()
    widths = [round(patch.get_width(), 6) for patch in ax.patches]
    assert widths == [0.002, 0.004, 0.2, 0.05]
    assert [patch.get_hatch() for patch in ax.patches] == [None, None, "///", "///"]
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["gap", "blocked on a peer (communication)"]
    assert ax.get_xlabel() == "ms"


def test_the_command_draws_idle_time_and_refuses_a_cpu_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.png"
    assert cli.run(["plot", "idle", str(ROOT / "traces" / "h200x2-decode-1048576"), "-o", str(path)]) == 0
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert cli.run(["plot", "idle", str(ROOT / "traces" / "cpu4-burst-4096"), "-o", str(path)]) == 2
    assert "records no device activities" in capsys.readouterr().err


def test_every_idle_class_has_its_own_colour() -> None:
    assert tuple(palette.IDLE_COLOURS) == idle.CLASSES
    assert len({*palette.IDLE_COLOURS.values(), palette.WAIT}) == len(idle.CLASSES) + 1
    assert SCHEMA["properties"]["ranks"]["items"]["properties"]["idle_events"]["items"]["properties"]["class"][
        "enum"
    ] == list(idle.CLASSES)


def test_page_shows_the_idle_figures_of_the_json_report() -> None:
    findings = findings_of(*copied_hop())
    content = idle.html(findings, PageContext(drawing(), ["x"]))
    assert content is not None
    by_rank, by_name = content.tables
    assert [[cell.text for cell in row[:7]] for row in by_rank.rows] == [
        ["0", "0", "0.002", "0", "0.002", "0.400", "0.2000"],
        ["1", "0", "0.004", "0", "0.004", "0.800", "0.05"],
    ]
    (gaps,) = by_name.rows
    assert [cell.text for cell in gaps] == ["(gaps between activities)", "gap", "0.003", "100"]
    assert idle.html(findings_of(cpu_example()), PageContext(drawing(), ["x"])) is None


def attribution_of(*builders: Builder) -> Attribution:
    return attribute([builder.trace() for builder in builders])


def test_the_timeline_shows_idle_stretches_with_their_cause() -> None:
    """Operators of 300 and 700 µs, the second with a call of 100 µs inside."""
    b = Builder(world_size=1).run(FLASH, 0, 100 * US, launched=US)
    b.on_host("op", 100 * US, 400 * US).on_host("late", 400 * US, 1100 * US)
    b.on_host("cudaMalloc", 500 * US, 600 * US, RUNTIME_CALL)
    b.run(FLASH, 1100 * US, 1200 * US, launched=1100 * US - 5)
    bars = [bar for bar in timeline_of(attribution_of(b), ()).bars if bar.category == "idle"]
    assert [(bar.name, bar.start_ns // US, bar.end_ns // US, bar.lane) for bar in bars] == [
        ("host, operator: op", 100, 400, "compute"),
        ("host, operator: late", 400, 500, "compute"),
        ("host, allocation or free: cudaMalloc", 500, 600, "compute"),
        ("host, operator: late", 600, 1100, "compute"),
    ]  # fmt: skip


def test_timeline_omits_invisible_idle_and_merges_short_parts() -> None:
    """The second stretch is 99 µs long; the first has parts of 1, 2, 3 µs and so on, and ends with 2 µs of gap."""
    b = many_names(20)
    end = 222 * US + 10 * US
    b.run(FLASH, end + 99 * US, end + 200 * US, launched=0)
    parts, names = attribution_of(b).ranks[0].detail.idle_parts(), b.names
    exact = list(idle_groups(parts))
    assert [parts.main_label(rows, names)[2] for rows in exact][:20] == [f"op{number}" for number in range(1, 21)]
    assert sum(parts.end_ns[rows[-1]] - parts.start_ns[rows[0]] for rows in exact) == 212 * US + 99 * US
    (joined,) = idle_groups(parts, 100 * US)
    assert (parts.start_ns[joined[0]], parts.end_ns[joined[-1]]) == (10 * US, 222 * US)
    assert parts.main_label(joined, names)[2] == "op20" and len(joined) == len(exact) - 1
    labels = [parts.main_label(rows, names) for rows in idle_groups(parts, 15 * US) if len(rows) == 1]
    assert [name for cause, _, name in labels if cause == "host"] == [f"op{number}" for number in range(15, 21)]


def test_timeline_shows_the_peer_that_blocks_a_rank() -> None:
    bars = [bar for bar in timeline_of(attribution_of(*copied_hop()), ()).bars if bar.kind == BLOCKED_ON_PEER]
    assert [(bar.rank, bar.category, bar.start_ns // US, bar.end_ns // US, bar.sent) for bar in bars] == [
        (0, "wait", 100, 250, "peer: rank 1"), (0, "wire", 250, 300, "peer: rank 1"),
        (1, "wire", 350, 400, "peer: rank 0"),
    ]  # fmt: skip
    assert {(bar.lane, bar.stream) for bar in bars} == {("communication", 20)}


def test_the_merged_trace_has_a_track_of_idle_time_and_names_peers() -> None:
    findings = findings_of(*copied_hop())
    model = read(list(events_of(findings)))
    assert not +model.lost
    gaps = [(item.process, item.name, item.start_ns, item.end_ns) for item in model.slices if item.track == IDLE]
    assert gaps == [(0, "gap", 400 * US, 402 * US), (1, "gap", 400 * US, 404 * US)]
    waits = [item for item in model.slices if item.track == EXPOSED and item.name.startswith("blocked on")]
    assert [(item.process, item.name, item.args["part"], item.parent and item.parent.name) for item in waits] == [
        (0, "blocked on rank 1", "wait", "exposed wait"),
        (0, "blocked on rank 1", "wire", "exposed wire"),
        (1, "blocked on rank 0", "wire", "exposed wire"),
    ]  # fmt: skip
    tracks = [event for event in events_of(findings) if event["ph"] == "M" and event["tid"] == IDLE]
    assert {event["args"]["name"] for event in tracks} == {"idle by cause"}


def test_the_idle_track_of_a_recorded_run_sums_to_its_idle_time() -> None:
    findings = analysis(ROOT / "traces" / "h200x2-decode-1048576").findings
    model = read(list(events_of(findings)))
    for rank in findings.attribution.ranks:
        idle_pieces = [piece for piece in model.slices if piece.process == rank.rank and piece.track == IDLE]
        assert sum(piece.end_ns - piece.start_ns for piece in idle_pieces) == rank.breakdown.idle_ns


def test_waiting_for_peer_copies_needs_a_complete_recording(tmp_path: Path) -> None:
    """A rank that waits for a copy idles: one rank's trace without run.json must not call that 0 % of waiting."""
    recording = ROOT / "tests/data/waits-copies"
    trace = next(path for path in recording.iterdir() if path.name.startswith("rank1"))
    (tmp_path / trace.name).write_bytes(trace.read_bytes())

    def sentences(path: Path) -> str:
        return " ".join(render(analysis(path).findings, TextStyle(width=400)).split())

    assert "of peer copy time within a host was waiting for a peer" in sentences(recording)
    alone = sentences(tmp_path / trace.name)
    assert "waiting for a peer" not in alone and "All peer copy time within a host is on the wire" in alone
