"""Kernel curves: a law that is known is found again, what lies between samples is met, what lies beyond is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

import msgspec
import pytest
from msgspec.structs import replace

from ringprof.prediction.calibration import KernelSample, assumed, read_calibration
from ringprof.prediction.kernel_model import SHORT_SPREAD, Curve, OutsideCalibration
from ringprof.prediction.machine import Curves
from ringprof.record.dryrun.schedule import AttentionOp

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)


def alike(sample: KernelSample) -> float:
    """On a device that is as hot as any."""
    return 1.0


def block(
    q: int, kv: int, causal: bool = False, heads: int = 32, kv_heads: int = 32, head_dim: int = 128,
    phase: Literal["forward", "backward"] = "forward",
) -> AttentionOp:  # fmt: skip
    return AttentionOp(
        label="", phase=phase, batch=1, q=q, kv=kv, heads=heads, kv_heads=kv_heads, head_dim=head_dim, causal=causal
    )


def law(one: AttentionOp) -> float:
    """600 TFLOP/s, 20 us a call, and as much for a row of queries as for 300 columns of keys more."""
    pairs = one.q * (one.q + 1) / 2 if one.causal else one.q * one.kv
    return 2e4 + 4 * one.heads * one.head_dim * (pairs + 300 * one.q) / 600e3


def curve(time_of: Callable[[AttentionOp], float], blocks: list[AttentionOp], noise: float = 0.005) -> Curve:
    chance = random.Random(1)
    samples = [
        KernelSample(
            phase=one.phase, q=one.q, kv=one.kv, heads=one.heads, kv_heads=one.kv_heads, head_dim=one.head_dim,
            causal=one.causal, pairs=one.pairs, ns=time_of(one) * chance.gauss(1, noise), origin="measured",
            source="a law",
        )
        for one in blocks
    ]  # fmt: skip
    return Curve("law", samples, 132, alike)


SQUARES = [block(length, length, causal) for length in LENGTHS for causal in (False, True)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1536, 3000, 6144, 12288, 24576])
def test_lengths_between_samples_follow_the_law(length: int, causal: bool) -> None:
    found = curve(law, SQUARES).at(block(length, length, causal))
    assert found.ns == pytest.approx(law(block(length, length, causal)), rel=0.05)


def test_oblong_blocks_follow_the_law() -> None:
    for q, kv in ((8192, 16384), (4096, 32768)):
        assert curve(law, SQUARES).at(block(q, kv)).ns == pytest.approx(law(block(q, kv)), rel=0.08)


def test_the_farther_from_samples_the_less_sure() -> None:
    known = curve(lambda one: law(one) * (1.1 if one.kv > 4096 else 1.0), SQUARES, noise=0.02)
    spreads = [known.at(block(length, length)).spread for length in (16384, 65536, 262144)]
    assert spreads == sorted(spreads) and spreads[0] < 0.5 * spreads[-1]


def test_a_short_part_of_a_mask_has_the_forms_time_and_its_spread() -> None:
    """Parts of a mask that are too short: 600 TFLOP/s, and what `law` says beside it, on a device that is not full."""
    masked = [replace(one, pairs=one.q * one.kv // 2) for one in SQUARES if not one.causal]
    known = curve(lambda one: 2e4 + 4 * one.heads * one.head_dim * (one.q * one.kv / 2 + 300 * one.q) / 600e3, masked)
    few = known.at(replace(block(8192, 64), pairs=8192 * 64))
    assert few.spread == SHORT_SPREAD
    assert few.ns == pytest.approx(law(block(8192, 64)), rel=0.5)
    assert known.at(masked[2]).spread < 0.1
    with pytest.raises(OutsideCalibration, match="too unlike"):
        known.at(replace(block(2**24, 64), pairs=2**30))


def test_what_was_not_measured_is_refused() -> None:
    known = curve(law, SQUARES)
    with pytest.raises(OutsideCalibration, match="64 x 64 tokens is too unlike"):
        known.at(block(64, 64))
    with pytest.raises(OutsideCalibration, match="nothing measured"):
        Curve("none", [], 132, alike)


def test_samples_of_a_cool_device_are_those_of_a_hot_one_made_longer() -> None:
    """Blocks that took what the law says on a device where they are a tenth faster than on a hot one."""
    samples = [
        KernelSample(
            phase="forward", q=one.q, kv=one.kv, heads=32, kv_heads=32, head_dim=128, causal=one.causal, ns=law(one),
            origin="measured", source="a law",
        )
        for one in SQUARES
    ]  # fmt: skip
    found = Curve("law", samples, 132, lambda sample: 1.1).at(block(8192, 8192))
    assert found.ns == pytest.approx(1.1 * law(block(8192, 8192)), rel=0.03)


@pytest.mark.parametrize(
    ("duty", "busy_s", "slowed"), [(1.0, None, 1.1), (0.5, None, 1.05), (1.0, 0.15, 1.0632), (1.0, 0.001, 1.0007)]
)
def test_a_device_warms_up_as_it_computes(duty: float, busy_s: float | None, slowed: float) -> None:
    """A tenth slower when hot, of which all but 1 / e is there after 0.15 s."""
    machine = assumed("any", "any", 132, 80 << 30)
    machine = replace(machine, heat=replace(machine.heat, value=0.1), heat_s=replace(machine.heat_s, value=0.15))
    assert machine.slowed(machine.kernel("cudnn"), duty, busy_s) == pytest.approx(slowed, abs=1e-4)


def test_heads_of_each_size_have_curves_of_their_own() -> None:
    """4 x 32 x 16384^2 x 64 FLOPs in 4.77 ms: 461 TFLOP/s, where heads of 128 reach 613 (h200_heads.csv)."""
    known = Curves(read_calibration("h200"), "cudnn")
    asked = msgspec.structs.replace(block(16384, 16384, head_dim=64), heads=32, kv_heads=32)
    assert asked.flops() / known.at(asked).ns / 1e3 == pytest.approx(461, rel=0.01)
    with pytest.raises(OutsideCalibration, match=r"'cudnn forward' is calibrated for head_dim \[64, 128\], not 96"):
        known.at(msgspec.structs.replace(asked, head_dim=96))


@pytest.mark.parametrize(("name", "within"), [("h200", 0.05), ("h100", 0.05), ("b200", 0.07)])
def test_bundled_curves_foresee_the_lengths_left_out(name: str, within: float) -> None:
    """Of each curve one length at a time is left out and foreseen from the others; so far off they are in the mean."""
    machine, errors = read_calibration(name), []
    for kernel in machine.kernels:
        for phase in ("forward", "backward"):
            samples = [one for one in kernel.samples if (one.phase, one.pairs, one.head_dim) == (phase, None, 128)]
            inner = sorted({sample.kv for sample in samples})[1:-1]
            for length in inner:
                others = Curve("others", [s for s in samples if s.kv != length], machine.multiprocessors, alike)
                for sample in (s for s in samples if s.kv == length):
                    asked = block(
                        sample.q, sample.kv, sample.causal, sample.heads, sample.kv_heads, sample.head_dim, sample.phase
                    )
                    errors.append(others.at(asked).ns / sample.ns - 1)
    assert sum(map(abs, errors)) / len(errors) < within
