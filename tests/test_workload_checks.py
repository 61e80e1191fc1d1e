"""Rates and doubts of a stated workload, against closed formulas of FLOPs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ringprof.analysis.workload_checks import counted_over_needed, workload_fits, workload_problems
from ringprof.run import Run, Work, read_run, write_run
from ringprof.workload.workload import Workload
from tests.analysis.recorded import MS, recorded_run

SEQ, HEADS, HEAD_DIM = 1024, 8, 64
FORWARD = 4 * (SEQ * (SEQ + 1) // 2) * HEADS * HEAD_DIM
ONCE = FORWARD * 7 // 2
"""Exact FLOPs of forward and backward over one sequence; a backward pass needs 2.5 times a forward pass."""
MODEL = 4 * SEQ**2 * HEADS * HEAD_DIM / 2 * 3.5
WORKLOAD = Workload(seq=SEQ, heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIM)


def captured(counted: int | None, world_size: int = 4, **changes: Any) -> Run:
    """Make a captured block whose ranks counted ``counted`` FLOPs in total."""
    each = None if counted is None else counted // world_size
    work = [Work(block_flops=each, block_calls={}, sent=[])] * world_size
    return recorded_run(world_size, **{"timings": None, "workload": WORKLOAD, "work": work, **changes})


@pytest.mark.parametrize(
    ("world_size", "group", "sequences"),
    [(4, None, 1), (4, 4, 1), (4, 2, 2), (4, 1, 4), (6, 2, 3), (2, 4, 0.5)],
    ids=["as before", "cp 4", "dp 2 x cp 2", "dp 4", "dp 3 x cp 2", "half of cp 4 captured"],
)
def test_every_group_of_ranks_computes_a_workload(world_size: int, group: int | None, sequences: float) -> None:
    run = captured(int(sequences * ONCE), world_size, workload_ranks=group)
    assert run.needed_flops() == int(sequences * ONCE)
    assert run.tflops(MS) == pytest.approx(sequences * MODEL / world_size / 1e-3 / 1e12)
    assert counted_over_needed(run) == pytest.approx(1)
    assert workload_problems(run) == [] and workload_fits(run)


@pytest.mark.parametrize(
    ("counted", "group", "fits", "message"),
    [
        (2 * ONCE, None, False,
         "attention FLOPs of 4 ranks (4 per workload): 3.76 GFLOP stated, 7.52 GFLOP counted (2 times); TFLOP/s use "
         "the stated workload: pass strategy=, state the work of one context-parallel group"),
        (4 * ONCE, 2, False,
         "attention FLOPs of 4 ranks (2 per workload): 7.52 GFLOP stated, 15 GFLOP counted (2 times); TFLOP/s use the "
         "stated workload: state the work of one group of 2 ranks"),
        (2 * (ONCE + FORWARD), 2, True,
         "attention FLOPs of 4 ranks (2 per workload): 7.52 GFLOP stated, 9.67 GFLOP counted (1.29 times); TFLOP/s use "
         "the stated workload: checkpointing explains up to 1.29 times, else correct it"),
        (ONCE // 2, 4, False,
         "attention FLOPs of 4 ranks (4 per workload): 3.76 GFLOP stated, 1.88 GFLOP counted (0.5 times); TFLOP/s use "
         "the stated workload: correct its batch, heads, layers or steps"),
    ],
)  # fmt: skip
def test_flops_that_differ_from_the_stated_are_a_warning(
    counted: int, group: int | None, fits: bool, message: str
) -> None:
    run = captured(counted, workload_ranks=group)
    assert [(problem.code, problem.message) for problem in workload_problems(run)] == [
        ("workload_flops_differ", message)
    ]
    assert workload_fits(run) == fits


@pytest.mark.parametrize(("factor", "differs"), [(0.979, 1), (0.981, 0), (1.019, 0), (1.021, 1)])
def test_flops_within_2_percent_are_not_a_warning(factor: float, differs: int) -> None:
    assert len(workload_problems(captured(int(factor * ONCE)))) == differs


def test_forward_recomputation_counts_only_with_a_backward_pass() -> None:
    forward = msgspec.structs.replace(WORKLOAD, backward=False)
    assert not workload_fits(captured(FORWARD * 9 // 7, workload=forward))
    assert workload_fits(captured(ONCE * 9 // 7))


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({}, ["workload_ranks_unknown"]),
        ({"workload_ranks": 4}, []),
        ({"world_size": 1}, []),
        ({"workload": None}, []),
        ({"timings": recorded_run().timings}, []),
    ],
    ids=["nothing tells", "the group is known", "one rank", "no workload", "not captured"],
)
def test_unknown_workload_ranks_are_a_warning(changes: dict[str, Any], codes: list[str]) -> None:
    assert [problem.code for problem in workload_problems(captured(None, **changes))] == codes


def test_messages_are_at_most_200_characters() -> None:
    """Keep messages within 200 characters, after which a report cuts texts from files."""
    large = msgspec.structs.replace(WORKLOAD, seq=1 << 22, layers=999)
    needed = captured(None, 16384, workload=large, workload_ranks=128).needed_flops() or 0
    for group in (None, 128):
        for factor in (0.123, 1.123, 123.4):
            counted = needed if group else needed // 128
            run = captured(int(counted * factor), 16384, workload=large, workload_ranks=group)
            assert len(workload_problems(run)[0].message) <= 200
    assert len(workload_problems(captured(None, 16384, workload=large))[0].message) <= 200


def test_a_file_without_the_field_has_one_workload_for_all_ranks(tmp_path: Path) -> None:
    write_run(captured(ONCE, workload_ranks=2), tmp_path / "run.json")
    old = json.loads((tmp_path / "run.json").read_text("utf-8"))
    assert old.pop("workload_ranks") == 2
    (tmp_path / "run.json").write_text(json.dumps(old))
    run = read_run(tmp_path / "run.json")
    assert run.workload_ranks is None and run.needed_flops() == ONCE
    assert run.tflops(MS) == pytest.approx(MODEL / 4 / 1e-3 / 1e12)
