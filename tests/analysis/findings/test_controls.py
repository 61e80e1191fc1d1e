"""Metrics of the baselines, from times that can be checked by hand."""

from __future__ import annotations

import json

import msgspec
import pytest
from msgspec.structs import replace

from ringprof.analysis.findings.conditions import metrics_of
from ringprof.analysis.findings.findings import Findings, findings_in_memory
from ringprof.analysis.findings.summary import summarise
from ringprof.analysis.findings.waterfall import find_waterfall
from ringprof.analysis.timeline.window import Focus
from ringprof.common.json_object import json_text
from ringprof.report import as_json
from ringprof.report.terminal import render
from ringprof.report.text import TextStyle
from ringprof.run import Baselines, Profiled, read_run, write_run
from ringprof.scale.pipeline import attribute
from ringprof.workload.workload import Workload
from tests.analysis.build import FLASH, Builder
from tests.analysis.findings.test_summary import ring_with_compute
from tests.analysis.recorded import recorded_run

# The slowest rank is another one in each iteration: 2000, 2400 and 2200 ns.
ORDINARY = [[2000, 1000, 1000], [1000, 2400, 1000], [1000, 1000, 2200], [500, 500, 500]]
COMPUTE = [[1700, 1800, 1900]] * 4
COMMUNICATION = [[1500, 1500, 1600]] * 4
SOLO = [[900, 800, 2000], [1000, 1000, 1000], [1100, 1100, 1100], [1200, 1100, 1300]]
CONTROLS = Baselines(
    warmup=1, rounds=3, ordinary_ns=ORDINARY, compute_only_ns=COMPUTE, communication_only_ns=COMMUNICATION,
    solo_ns=SOLO, solo_flops=[10**9] * 4,
)  # fmt: skip


def findings_of(focus: Focus | None = None, **changes) -> Findings:
    run = recorded_run(controls=msgspec.structs.replace(CONTROLS, **changes))
    traces = [b.trace() for b in ring_with_compute()]
    attribution = attribute(traces, run) if focus is None else attribute(traces, run, None, focus)
    return findings_in_memory(attribution)


def test_control_figures_equal_their_formulas():
    rates = findings_of().summary.rates
    c = rates.controls
    assert c is not None and (c.rounds, c.iterations) == (3, 3)
    assert (c.iteration_ns, c.compute_only_ns, c.communication_only_ns, c.ideal_ns) == (2200, 1800, 1500, 1800)
    assert c.ideal_efficiency == pytest.approx(1800 / 2200)
    assert c.solo_ns == (900 + 1000 + 1100 + 1200) / 4
    assert rates.solo_tflops == c.solo_tflops == pytest.approx(4e9 / 4200e-9 / 1e12)
    assert c.of_solo == pytest.approx(1050 / 2200)
    # The attention kernels of rank r run for 1000 + 100 r ns.
    assert c.flash_slowdown == pytest.approx(4600 / 4200 - 1)


def test_ideal_is_communication_where_that_takes_longer():
    c = findings_of(communication_only_ns=[[2100] * 3] * 4).summary.rates.controls
    assert c is not None and c.ideal_ns == 2100 and c.ideal_efficiency == pytest.approx(2100 / 2200)


@pytest.mark.parametrize("recorded", [True, False])
def test_one_rank_has_no_communication_only_figure(recorded):
    """Also where the run has these controls, as earlier ones do."""
    run = recorded_run(
        world_size=1,
        controls=Baselines(
            warmup=1, rounds=1, ordinary_ns=[[2000, 2200]], solo_ns=[[900, 1100]], solo_flops=[10**9],
            compute_only_ns=[[1990, 2000]] if recorded else None,
            communication_only_ns=[[100, 100]] if recorded else None,
        ),
    )  # fmt: skip
    builder = Builder(world_size=1).run("flash_fwd", 0, 1000).run("flash_bwd", 1000, 2000)
    findings = findings_in_memory(attribute([builder.trace()], run))
    c = findings.summary.rates.controls
    assert c is not None and (c.iteration_ns, c.solo_ns) == (2100, 1000) and c.of_solo == pytest.approx(1000 / 2100)
    assert (c.compute_only_ns, c.communication_only_ns, c.ideal_ns, c.ideal_efficiency, c.flash_slowdown) == (None,) * 5
    shown = render(findings, TextStyle(), ())
    controls, of_each, _ = shown.partition("controls")[2].partition("of each in 1 round")
    assert of_each and "of the solo rate" in controls and "communication" not in controls


def test_part_of_an_iteration_has_no_controls():
    assert findings_of(Focus(between_ns=(0, 1800))).summary.rates.controls is None


@pytest.mark.parametrize(
    "broken",
    [
        {"solo_ns": []}, {"solo_ns": [[], [], [], []]}, {"solo_ns": [[0]] * 4}, {"solo_flops": []},
        {"solo_ns": [[-5]] * 4},
        {"ordinary_ns": []}, {"ordinary_ns": [[0, 0]] * 4}, {"compute_only_ns": [[]]},
    ],
)  # fmt: skip
def test_incomplete_controls_give_no_figures(broken):
    rates = findings_of(**broken).summary.rates
    assert rates.controls is None and rates.solo_tflops is None and rates.tflops is not None


def test_solo_time_of_one_nanosecond_is_valid():
    controls = findings_of(solo_ns=[[1]] * 4).summary.rates.controls
    assert controls is not None and controls.solo_ns == 1


def test_without_controls_there_is_no_solo_rate():
    run = recorded_run()
    rates = summarise(attribute([b.trace() for b in ring_with_compute()], run)).rates
    assert run.controls is None and rates.controls is None and rates.solo_tflops is None


def test_conditions_accept_control_figures():
    figures = metrics_of(findings_of())
    assert figures["ideal_efficiency"] == pytest.approx(1800 / 2200)
    assert figures["of_solo"] == pytest.approx(1050 / 2200)
    assert figures["flash_slowdown"] == pytest.approx(4600 / 4200 - 1)


def test_json_report_has_every_control_figure():
    text = json_text(as_json.as_dict(findings_of(), source="run", paths=["run.json"]))
    summary = json.loads(text)["summary"]
    assert summary["controls"]["ideal_ns"] == 1800 and summary["controls"]["solo_tflops"] == summary["solo_tflops"]


def test_terminal_shows_controls_as_times_shares_and_sentence():
    text = " ".join(render(findings_of(), TextStyle(width=100)).split())
    assert "ordinary iteration, interleaved 2.200 µs 100.0 %" in text
    assert "ideal: the larger of the two 1.800 µs 81.8 % compute only" in text
    assert "the same blocks alone 1.050 µs 47.7 % 952.4 TFLOP/s" in text
    assert "The run reaches 81.8 % of its ideal and 47.7 % of the solo rate" in text
    assert "its attention kernels are 9.5 % slower beside communication than alone (3 of each in 3 rounds)." in text


@pytest.mark.parametrize("width", [60, 80])
def test_no_line_is_longer_than_the_terminal(width):
    assert max(map(len, render(findings_of(), TextStyle(width=width)).splitlines())) <= width


def test_profiler_cost_that_rounds_to_zero_is_as_fast():
    def line(profiled_ns: int) -> str:
        run = recorded_run(profiled=Profiled(iterations_ns=[[profiled_ns]] * 4))
        attribution = attribute([b.trace() for b in ring_with_compute()], run)
        return " ".join(render(findings_in_memory(attribution), TextStyle(width=200)).split())

    # The median time without the profiler is 3 ms.
    assert "without the profiler, as fast with it" in line(2_999_000)
    assert "without the profiler, 10.0 % faster with it" in line(2_700_000)
    assert "without the profiler, 10.0 % slower with it" in line(3_300_000)
    assert "without the profiler, 18.3 times as slow with it" in line(54_900_000)


def test_shares_of_a_cpu_run_are_said_to_be_of_a_much_slower_profiled_iteration():
    def text(profiled_ns: int) -> str:
        run = recorded_run(profiled=Profiled(iterations_ns=[[profiled_ns]] * 4))
        builders = [
            Builder(rank=rank).operate("aten::mm", 0, 1000).mark("ringprof::wait", 1000, 2000) for rank in range(4)
        ]
        attribution = attribute([b.mark("ringprof::iteration", 0, 2000).trace() for b in builders], run)
        return " ".join(render(findings_in_memory(attribution), TextStyle(width=200)).split())

    note = "all shares are of the profiled iteration, not of the 3.00 ms without the profiler"
    assert note in text(54_900_000) and note not in text(3_300_000)


def test_controls_survive_a_write_and_a_read(tmp_path):
    run = recorded_run(controls=CONTROLS)
    write_run(run, tmp_path / "run.json")
    assert read_run(tmp_path / "run.json") == run and read_run(tmp_path / "run.json").controls == CONTROLS


def test_run_file_without_controls_is_read(tmp_path):
    write_run(recorded_run(), tmp_path / "run.json")
    old = json.loads((tmp_path / "run.json").read_text())
    del old["controls"]
    (tmp_path / "run.json").write_text(json.dumps(old))
    assert read_run(tmp_path / "run.json") == recorded_run()


def test_waterfall_slowdown_is_attention_time_above_solo_time():
    # So little work that the device's peak takes less time for it than the attention kernels did.
    run = recorded_run(controls=CONTROLS, workload=Workload(seq=16, heads=8, kv_heads=8, head_dim=64))
    attribution = attribute([b.trace() for b in ring_with_compute()], run)
    summary = replace(summarise(attribution), devices=("NVIDIA H200",))
    assert find_waterfall(attribution, summary).of("slowdown") == (4600 - 4200) / 4


def test_slowdown_is_per_iteration_of_two_profiled_iterations():
    builders = [Builder(rank=rank) for rank in range(4)]
    for rank, b in enumerate(builders):
        for begin in (0, 10_000):
            b.mark("ringprof::iteration", begin, begin + 5_000)
            b.run(FLASH, begin + 1_000, begin + 2_000 + 100 * rank, launched=begin + 10)
    attribution = attribute([b.trace() for b in builders], recorded_run(controls=CONTROLS))
    assert [len(rank.iteration_ns) for rank in attribution.ranks] == [2] * 4
    controls = summarise(attribution).rates.controls
    assert controls is not None and controls.flash_slowdown == pytest.approx(9200 / 8400 - 1)


def test_no_slowdown_where_controls_lack_a_rank():
    c = findings_of(solo_ns=SOLO[:3], solo_flops=[10**9] * 3).summary.rates.controls
    assert c is not None and c.flash_slowdown is None and c.solo_ns == 1000
