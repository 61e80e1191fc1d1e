"""Number of iterations in a window, and metrics per iteration for any number of captured iterations."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ringprof.analysis.findings.changes import changes_between
from ringprof.analysis.findings.comparison import compare_measurements
from ringprof.analysis.findings.findings import Findings, findings_in_memory
from ringprof.analysis.findings.measurements import measurement_of_run
from ringprof.analysis.timeline.window import Focus
from ringprof.report import as_json
from ringprof.report.comparison import render
from ringprof.report.terminal import render as report
from ringprof.report.text import TextStyle
from ringprof.run import Run, Work
from ringprof.scale.pipeline import attribute
from ringprof.workload.workload import Workload
from tests.analysis.build import FLASH, MAIN, Builder
from tests.analysis.recorded import recorded_run

ADAM = "Optimizer.step#AdamW.step"
STEP = 1000
WORKLOAD = Workload(seq=128, heads=1, kv_heads=1, head_dim=64)
FLOPS = 4 * (128 * 129 // 2) * 64 * 7 // 2
"""Forward and backward over that sequence."""


def program(steps: int, *optimizers: str, first: int = 100, rank: int = 0, world_size: int = 1) -> Builder:
    """Return a trace with a step every 1000 ns: attention for 600 ns, then 10 ns per optimizer."""
    b = Builder(rank=rank, world_size=world_size)
    for begin in range(first, first + steps * STEP, STEP):
        b.run(FLASH, begin + 50, begin + 650, launched=begin + 10)
        for index, name in enumerate(optimizers):
            start = begin + 700 + 20 * index
            b.mark(name, start, start + 10).run(
                f"multi_tensor_apply_kernel{index}", start + 100, start + 105, launched=start + 2
            )
    return b


def capture_of(steps: int, *optimizers: str, rank: int = 0, world_size: int = 1) -> Builder:
    """Mark the program as `capture` does: one range around all steps, inside a step of its own profiler."""
    b = program(steps, *optimizers, rank=rank, world_size=world_size)
    return b.mark("ProfilerStep#1", 10, 200 + steps * STEP).mark("ringprof::iteration", 50, 150 + steps * STEP)


def profiled(steps: int) -> Builder:
    """Mark the program as torch.profiler does: a range around each step."""
    b = program(steps, ADAM)
    for number in range(steps):
        b.mark(f"ProfilerStep#{number + 3}", 100 + number * STEP, 95 + (number + 1) * STEP)
    return b


def captured_run(workload: Workload | None = None, counted_flops: int | None = None, world_size: int = 1) -> Run:
    flops_per_rank = None if counted_flops is None else counted_flops // world_size
    work = [Work(block_flops=flops_per_rank, block_calls={}, sent=[])] * world_size
    return recorded_run(world_size, timings=None, workload=workload, work=work, workload_ranks=workload and world_size)


def findings_of(*builders: Builder, run: Run | None = None, **focus: Any) -> Findings:
    return findings_in_memory(attribute([b.trace() for b in builders], run, None, Focus(**focus)))


def iterations_of(*builders: Builder, run: Run | None = None, **focus: Any) -> tuple[int | None, str]:
    attribution = findings_of(*builders, run=run, **focus).attribution
    return attribution.window_iterations, attribution.times_are_of


# --- how many -----------------------------------------------------------------------------------------


def test_steps_of_the_optimizer_are_the_iterations_of_a_captured_block() -> None:
    assert iterations_of(capture_of(3, ADAM), run=captured_run()) == (3, "one iteration (3 captured)")
    assert iterations_of(capture_of(1, ADAM), run=captured_run()) == (1, "one iteration")
    # The traces alone show the same.
    assert iterations_of(capture_of(3, ADAM)) == (3, "one iteration (3 captured)")


def test_profiler_steps_take_precedence_over_optimizer_steps() -> None:
    b = capture_of(4, ADAM)
    for start in (100, 2100):
        b.mark(f"ProfilerStep#{start}", start, start + 1900)
    assert iterations_of(b, run=captured_run())[0] == 2


def test_optimizers_that_step_together_are_one_iteration() -> None:
    both = ADAM, "Optimizer.step#Muon.step"
    assert iterations_of(capture_of(2, *both), run=captured_run())[0] == 2
    # Work between them makes them two: a generator's and a discriminator's.
    apart = capture_of(2, *both)
    for begin in (100, 1100):
        apart.run(FLASH, begin + 900, begin + 910, launched=begin + 715)
    assert iterations_of(apart, run=captured_run())[0] == 4
    # Unless the workload states fewer, and its FLOPs are right.
    assert iterations_of(apart, run=captured_run(replaced(steps=2), 2 * FLOPS))[0] == 2


def test_steps_in_the_backward_pass_are_not_iterations() -> None:
    """One optimizer for each parameter, stepped by hooks: on autograd's thread, on CPU inside its operators."""
    b = program(2).mark("ringprof::iteration", 50, 2150)
    for begin in (100, 1100):
        for start in (begin + 200, begin + 300):
            b.mark(ADAM, start, start + 10, thread=MAIN + 1)
            b.operate("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", start + 95, start + 195)
            b.mark(ADAM, start + 100, start + 110)
    assert iterations_of(b, run=captured_run()) == (None, "the captured block")


def test_workload_states_iterations_where_no_steps_are_traced() -> None:
    forward = msgspec.structs.replace(WORKLOAD, backward=False, steps=4)
    assert iterations_of(capture_of(4), run=captured_run()) == (None, "the captured block")
    assert iterations_of(capture_of(4), run=captured_run(forward)) == (4, "one iteration (4 captured)")
    assert iterations_of(capture_of(4)) == (None, "one ringprof::iteration range")
    # Not where its FLOPs are known to be others than were computed.
    assert iterations_of(capture_of(4), run=captured_run(WORKLOAD, 4 * FLOPS)) == (None, "the captured block")


@pytest.mark.parametrize(
    ("stated", "flops", "iterations"),
    [(2, None, 2), (1, None, 2), (8, None, 2), (2, 2 * FLOPS, 2), (1, FLOPS, 1), (1, 2 * FLOPS, 2)],
    ids=["agree", "not stated", "gradients accumulated", "counted, too", "two optimizers", "stated wrong"],
)
def test_counted_steps_take_precedence_over_stated_ones(stated: int, flops: int | None, iterations: int) -> None:
    run = captured_run(msgspec.structs.replace(WORKLOAD, steps=stated), flops)
    assert iterations_of(capture_of(2, ADAM), run=run)[0] == iterations


def test_iterations_are_unknown_where_ranks_show_different_steps() -> None:
    builders = [capture_of(2, *[ADAM] * count, rank=rank, world_size=2) for rank, count in enumerate((1, 0))]
    assert iterations_of(*builders, run=captured_run(world_size=2)) == (None, "the captured block")


def test_marked_iterations_are_counted() -> None:
    assert iterations_of(profiled(3)) == (3, "one iteration")
    b = program(2).mark("ringprof::iteration", 100, 1050).mark("ringprof::iteration", 1100, 2050)
    assert iterations_of(b, run=recorded_run(1)) == (2, "one iteration")


def test_number_of_iterations_is_unknown_for_a_window() -> None:
    assert iterations_of(program(3, ADAM)) == (None, "the whole trace")
    assert iterations_of(profiled(3), between_ns=(0, 1500)) == (None, "one chosen range")
    assert iterations_of(capture_of(3, ADAM), run=captured_run(), between_ns=(0, 1500)) == (None, "the chosen window")
    assert iterations_of(program(3).mark("part", 50, 3150), window="part") == (None, "the chosen window")


def test_more_steps_than_stated_are_a_warning_without_flops() -> None:
    def codes(stated: int, steps: int, flops: int | None = None) -> list[str]:
        run = captured_run(msgspec.structs.replace(WORKLOAD, steps=stated), flops)
        return [warning.code for warning in findings_of(capture_of(steps, ADAM), run=run).attribution.warnings]

    assert codes(1, 2) == ["workload_steps_differ"]
    assert codes(2, 2) == codes(8, 2) == codes(1, 2, FLOPS) == []
    assert codes(1, 2, 2 * FLOPS) == ["workload_flops_differ"]


# --- what is divided by it ------------------------------------------------------------------------------


def test_a_capture_compares_with_a_profile_of_the_same_program() -> None:
    """Both have two steps of 600 ns of attention; the window ends 5 ns after the last optimizer's start, 100 later."""
    base, other = findings_of(profiled(2)), findings_of(capture_of(2, ADAM), run=captured_run())
    entries = [measurement_of_run("torch", base), measurement_of_run("capture", other)]
    for entry in entries:
        assert entry.figures["flash_fwd_ms"].value * 1e6 == pytest.approx(600)
        assert entry.figures["wall_ms"].value * 1e6 == pytest.approx((STEP + 755) / 2)
        assert entry.figures["waterfall.attention_ms"].value * 1e6 == pytest.approx(600)
    comparison = compare_measurements(entries, (base, other), did_same_work=True)
    ratios = {
        difference.figure: difference.ratio for difference in comparison.differences if difference.ratio is not None
    }
    assert ratios and set(ratios.values()) == {1.0}
    assert not any(difference.share for difference in changes_between(base, other).parts)
    text = render(comparison, TextStyle(width=100))
    assert "figures: base of one iteration; 1 of one iteration (2 captured)" in text
    both = compare_measurements([entries[1], msgspec.structs.replace(entries[1], label="again")], did_same_work=True)
    assert "figures, of one iteration (2 captured)" in render(both, TextStyle(width=100))


def test_captured_block_is_not_called_one_iteration() -> None:
    entry = measurement_of_run("mine", findings_of(capture_of(2), run=captured_run()))
    assert entry.figures["flash_fwd_ms"].value * 1e6 == pytest.approx(1200)
    text = render(compare_measurements([entry, entry]), TextStyle(width=100))
    assert "figures, of the captured block" in text and "one iteration" not in text


def test_work_per_iteration_is_equal_at_any_number_of_steps() -> None:
    """Two steps against four of the same workload, and data parallel 2 x 2 against a batch of 2."""
    two, four = (
        measurement_of_run(
            str(steps), findings_of(capture_of(steps, ADAM), run=captured_run(replaced(steps=steps), steps * FLOPS))
        )
        for steps in (2, 4)
    )
    (wall,) = [
        difference
        for difference in compare_measurements([two, four]).differences
        if difference.figure == "flash_fwd_ms"
    ]
    assert (wall.ratio, wall.verdict) == (1.0, "same")
    ranks = [capture_of(1, ADAM, rank=rank, world_size=4) for rank in range(4)]
    grouped = msgspec.structs.replace(captured_run(WORKLOAD, 2 * FLOPS, world_size=4), workload_ranks=2)
    whole = captured_run(replaced(batch=2), 2 * FLOPS, world_size=4)
    entries = [measurement_of_run("mine", findings_of(*ranks, run=run)) for run in (grouped, whole)]
    assert [entry.settings["batch"] for entry in entries] == ["2", "2"]
    assert compare_measurements(entries).differing == {}


def replaced(**changes: Any) -> Workload:
    return msgspec.structs.replace(WORKLOAD, **changes)


def test_report_states_the_captured_iterations() -> None:
    known = findings_of(capture_of(2, ADAM), run=captured_run(replaced(steps=2), 2 * FLOPS))
    text = report(known, TextStyle(width=200))
    assert text.splitlines()[0].endswith("· 2 captured iterations")
    assert "per device achieved (2 captured iterations, under the profiler)" in text
    unknown = report(findings_of(capture_of(2), run=captured_run()), TextStyle(width=200))
    assert unknown.splitlines()[0].endswith("· a captured block")
    summaries = [
        as_json.as_dict(findings, source="run", paths=[])["summary"] for findings in (known, findings_of(profiled(3)))
    ]
    assert [(summary["iterations"], summary["window_iterations"]) for summary in summaries] == [(1, 2), (3, 3)]


# --- what the workload needs ------------------------------------------------------------------------------


def test_the_waterfall_needs_the_work_of_every_group() -> None:
    """Data parallel 2 x 2 at the peak of an H200, 989 TFLOP/s: each rank needs half of a workload."""
    ranks = [capture_of(1, ADAM, rank=rank, world_size=4) for rank in range(4)]
    run = msgspec.structs.replace(captured_run(WORKLOAD, 2 * FLOPS, world_size=4), workload_ranks=2)
    waterfall = findings_of(*ranks, run=run).waterfall
    assert waterfall.of("peak") == round(FLOPS / 2 / 989e12 * 1e9)
    assert waterfall.of("repeated") == 0
    assert waterfall.tflops == pytest.approx(FLOPS / 2 / waterfall.wall_ns / 1e3)


def test_contradictory_workload_gives_no_peak_in_the_waterfall() -> None:
    """A second step that the workload does not state is not repeated work."""
    waterfall = findings_of(capture_of(2, ADAM), run=captured_run(WORKLOAD, 2 * FLOPS)).waterfall
    assert (waterfall.work.peak, waterfall.of("repeated"), waterfall.of("attention")) == (None, 0, 1200)
    again = findings_of(capture_of(2, ADAM), run=captured_run(replaced(steps=2), 2 * FLOPS * 9 // 7)).waterfall
    assert again.work.peak is not None and again.of("repeated") > 0
