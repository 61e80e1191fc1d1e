"""Changes between two runs, compared with the two runs' own reports."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

import ringprof
from ringprof.analysis.findings.changes import Change, RunChanges
from tests.loaded import analysis
from tests.paths import TRACES

PAIR = ("h200x4-zigzag-65536", "h200x4-zigzag-65536-copied")


def changes(*names: str) -> RunChanges:
    run_changes = ringprof.compare(*(analysis(TRACES / name) for name in names)).changes
    assert run_changes is not None
    return run_changes


def test_changes_below_one_percent_are_not_in_the_sentence():
    parts = tuple(Change(what, 100, 101, share) for what, share in (("attention", 0.01), ("other_compute", 0.0099)))
    assert RunChanges(parts, (), ()).sentence().startswith("+1.0 %")
    assert "," not in RunChanges(parts, (), ()).sentence()
    assert RunChanges(parts[1:], (), ()).sentence() == ""


def test_parts_sum_to_the_change_of_the_slowest_ranks_wall():
    walls = [max(rank["wall_ns"] for rank in analysis(TRACES / name).report()["ranks"]) for name in PAIR]
    parts = changes(*PAIR).parts
    assert sum(part.base_ns for part in parts) == walls[0]
    assert sum(part.other_ns for part in parts) == walls[1]
    assert sum(part.share for part in parts) == pytest.approx(walls[1] / walls[0] - 1)
    assert [abs(part.share) for part in parts] == sorted((abs(part.share) for part in parts), reverse=True)


def test_steps_and_kernels_are_those_of_the_reports():
    run_changes = changes(*PAIR)
    for side, name in enumerate(PAIR):
        report = analysis(TRACES / name).report()
        exposed: dict[str, float] = defaultdict(float)
        for step in report["steps"]:
            exposed[f"{step['phase']} {step['step']}"] += step["exposed_ns"] / len(report["ranks"])
        times = {change.what: (change.base_ns, change.other_ns)[side] for change in run_changes.steps}
        assert times == pytest.approx(dict(exposed))
        kernels: dict[str, float] = defaultdict(float)
        for kernel in report["summary"]["kernels"]:
            kernels[kernel["name"]] += kernel["time_ns"] / len(report["ranks"])
        times = {change.what: (change.base_ns, change.other_ns)[side] for change in run_changes.kernels}
        assert {name: time for name, time in times.items() if time} == pytest.approx(dict(kernels))


def test_sentence_names_the_largest_changes_and_their_ring_steps():
    parts = (
        Change("exposed_wire", 20.0, 11.0, -0.09),
        Change("merge_and_copies", 9.0, 5.0, -0.04),
        Change("launch_gaps", 1.0, 0.5, -0.005),
    )
    backward = (Change(f"bwd {step}", 4.0, 2.2, -0.018) for step in range(2, 7))
    steps = (*backward, Change("fwd 1", 1.0, 0.9, -0.001), Change("bwd 1", 1.0, 3.0, 0.02))
    said = RunChanges(parts, steps, ()).sentence()
    assert said == (
        "-9.0 % exposed wire, -4.0 % merges and copies; by ring step -7.2 % exposed in backward steps 2 to 5"
    )
    assert RunChanges(parts[2:], steps, ()).sentence() == ""


def test_no_changes_between_runs_of_different_work_or_three_runs():
    assert ringprof.compare(*(analysis(TRACES / f"h200x4-zigzag-{n}") for n in ("65536", "262144"))).changes is None
    three = [analysis(TRACES / f"h200x4-{name}-262144") for name in ("zigzag", "burst", "usp")]
    assert ringprof.compare(*three).changes is None


def test_sentence_explains_the_slower_contiguous_ring():
    comparison = ringprof.compare(*(analysis(TRACES / f"h200x4-{name}-262144") for name in ("zigzag", "ring")))
    assert comparison.changes is not None
    assert re.match(
        r"\+69\.\d % imbalance between ranks, .*; by ring step \+50.7 % exposed in backward steps 1, 2, 4$",
        comparison.changes.sentence(),
    )


def test_single_ring_step_is_named_in_the_singular():
    parts = (Change("exposed_wire", 20.0, 11.0, -0.09),)
    steps = (Change("fwd 1", 9.0, 4.0, -0.05), Change("fwd 2", 1.0, 1.0, 0.0))
    said = RunChanges(parts, steps, ()).sentence()
    assert said == "-9.0 % exposed wire; by ring step -5.0 % exposed in forward step 1"
