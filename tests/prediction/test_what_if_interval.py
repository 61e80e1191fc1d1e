"""The interval of ``predict --replay RUN --hops`` against recorded pairs that differ in the transport of hops alone."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="a dry run gives the operations")

from ringprof.dryrun.schedule import AttentionOp
from ringprof.prediction.calibration import read_calibration
from ringprof.prediction.fit import observed_run
from ringprof.prediction.machine import curves_of
from ringprof.prediction.what_if import HOPS_SPREAD, Changes, what_if

TRACES = Path(__file__).parents[2] / "traces"
PAIRS = ("h200x4-burst-262144", "h200x4-zigzag-262144", "h200x4-zigzag-65536")


def test_recorded_pairs_lie_inside_the_interval() -> None:
    """Both directions of three pairs: the spread is their errors', and left out pair by pair, 5 of 6 lie inside."""
    machine = read_calibration("h200")
    errors: dict[str, list[float]] = {}
    inside = 0
    for pair in PAIRS:
        runs = {
            hops: observed_run(TRACES / name, machine) for hops, name in (("nccl", pair), ("copy", f"{pair}-copied"))
        }
        for before, after in (("nccl", "copy"), ("copy", "nccl")):
            assert runs[before].run.workload == runs[after].run.workload
            answer = what_if(runs[before], machine, Changes(hops=after))
            measured_ns = max(rank.wall_ns for rank in runs[after].ranks)
            errors.setdefault(pair, []).append(math.log(answer.changed_ns / measured_ns))
            inside += answer.is_interval and answer.range_ns[0] <= measured_ns <= answer.range_ns[1]
    everything = [error for pair in PAIRS for error in errors[pair]]
    assert math.sqrt(sum(error**2 for error in everything) / 6) == pytest.approx(HOPS_SPREAD, abs=0.0015)
    left_out = 0
    for pair in PAIRS:
        others = [error for other in PAIRS if other != pair for error in errors[other]]
        spread = math.sqrt(sum(error**2 for error in others) / len(others))
        left_out += sum(abs(error) <= 1.2816 * spread for error in errors[pair])
    assert (inside, left_out) == (5, 5)


def test_other_changes_have_no_interval() -> None:
    """No recorded pair differs in a link or in the speed of a rank."""
    machine = read_calibration("h200")
    run = observed_run(TRACES / "h200x4-zigzag-65536", machine)
    assert not what_if(run, machine, Changes(slow={0: 1.1})).is_interval
    assert not Changes(hops="copy", slow={0: 1.1}).hops_alone and Changes(hops="copy").hops_alone


def test_range_of_another_kernel_holds_the_spread_of_both_curves() -> None:
    """Attention is most of the time, and no block's ratio is known better than the better known kernel's curve."""
    machine = read_calibration("h200")
    run = observed_run(TRACES / "h200x4-zigzag-65536", machine)
    answer = what_if(run, machine, Changes(kernel="flash-attn-3"))
    blocks = [op for op in run.ranks[0].program.ops if isinstance(op, AttentionOp)]
    least = min(
        curves_of(machine, name).estimate(block).spread for name in ("cudnn", "flash-attn-3") for block in blocks
    )
    low, high = answer.range_ns
    assert least > 0 and not answer.is_interval
    assert low < answer.changed_ns * math.exp(-1.2 * 0.8 * least)
    assert high > answer.changed_ns * math.exp(1.2 * 0.8 * least)
    same = what_if(run, machine, Changes(kernel="cudnn"))
    assert same.changed_ns == pytest.approx(same.replayed_ns)
    assert same.range_ns[1] / same.changed_ns < high / answer.changed_ns
