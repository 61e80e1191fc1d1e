"""Kernel curves: a known law is recovered, blocks between samples are met, and blocks beyond them are refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

import msgspec
import pytest
from msgspec.structs import replace

from ringprof.dryrun.schedule import AttentionOp
from ringprof.prediction.calibration import KernelSample, assumed_calibration, read_calibration
from ringprof.prediction.kernel_model import EXTRAPOLATED_SPREAD, Curve, OutsideCalibration, block_of
from ringprof.prediction.machine import Curves
from tests.tiers import tiered

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)


def no_throttling(sample: KernelSample) -> float:
    """Return 1: the sample is from a hot device."""
    return 1.0


def block(
    q: int, kv: int, causal: bool = False, heads: int = 32, kv_heads: int = 32, head_dim: int = 128,
    phase: Literal["forward", "backward"] = "forward",
) -> AttentionOp:  # fmt: skip
    return block_of(phase, q, kv, heads, kv_heads, head_dim, causal=causal)


def law(op: AttentionOp) -> float:
    """Return nanoseconds at 600 TFLOP/s, 20 us per call, and 300 columns of keys more per row of queries."""
    pairs = op.q * (op.q + 1) / 2 if op.causal else op.q * op.kv
    return 2e4 + 4 * op.heads * op.head_dim * (pairs + 300 * op.q) / 600e3


def curve(time_of: Callable[[AttentionOp], float], blocks: list[AttentionOp], noise: float = 0.005) -> Curve:
    chance = random.Random(1)
    samples = [
        KernelSample(
            phase=op.phase, q=op.q, kv=op.kv, heads=op.heads, kv_heads=op.kv_heads, head_dim=op.head_dim,
            causal=op.causal, pairs=op.pairs, ns=time_of(op) * chance.gauss(1, noise), origin="measured",
            source="a law",
        )
        for op in blocks
    ]  # fmt: skip
    return Curve("law", samples, 132, no_throttling)


SQUARES = [block(length, length, causal) for length in LENGTHS for causal in (False, True)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1536, 3000, 6144, 12288, 24576])
def test_lengths_between_samples_follow_the_law(length: int, causal: bool) -> None:
    estimate = curve(law, SQUARES).estimate(block(length, length, causal))
    assert estimate.ns == pytest.approx(law(block(length, length, causal)), rel=0.05)


def test_rectangular_blocks_follow_the_law() -> None:
    for q, kv in ((8192, 16384), (4096, 32768)):
        assert curve(law, SQUARES).estimate(block(q, kv)).ns == pytest.approx(law(block(q, kv)), rel=0.08)


def test_spread_grows_with_distance_from_samples() -> None:
    fitted = curve(lambda op: law(op) * (1.1 if op.kv > 4096 else 1.0), SQUARES, noise=0.02)
    spreads = [fitted.estimate(block(length, length)).spread for length in (16384, 65536, 262144)]
    assert spreads == sorted(spreads) and spreads[0] < 0.5 * spreads[-1]


@pytest.mark.parametrize("length", [65536, 262144])
def test_longer_blocks_stay_at_the_plateau_of_the_samples(length: int) -> None:
    """A rate that is flat from 8192 tokens on, and a short call that costs more than the form has: no rise beyond."""

    def flat(op: AttentionOp) -> float:
        return op.flops() / 600e3 + (2e5 if op.q == 1024 else 0.0)

    estimate = curve(flat, SQUARES).estimate(block(length, length))
    assert estimate.ns == pytest.approx(flat(block(length, length)), rel=0.04)
    # How sure that is falls with the distance.
    assert estimate.spread > 3 * curve(flat, SQUARES).estimate(block(32768, 32768)).spread


def test_short_mask_part_is_extrapolated_with_its_spread() -> None:
    """Pieces of a mask that are too short: 600 TFLOP/s plus the rest of `law`, on a device that is not full."""
    masked = [replace(op, pairs=op.q * op.kv // 2) for op in SQUARES if not op.causal]
    fitted = curve(lambda op: 2e4 + 4 * op.heads * op.head_dim * (op.q * op.kv / 2 + 300 * op.q) / 600e3, masked)
    short = fitted.estimate(replace(block(8192, 64), pairs=8192 * 64))
    assert short.spread == EXTRAPOLATED_SPREAD
    assert short.ns == pytest.approx(law(block(8192, 64)), rel=0.5)
    assert fitted.estimate(masked[2]).spread < 0.1
    with pytest.raises(OutsideCalibration, match="too unlike"):
        fitted.estimate(replace(block(2**24, 64), pairs=2**30))


def test_unmeasured_shapes_are_refused() -> None:
    fitted = curve(law, SQUARES)
    with pytest.raises(OutsideCalibration, match="64 x 64 tokens is too unlike"):
        fitted.estimate(block(64, 64))
    with pytest.raises(OutsideCalibration, match="nothing measured"):
        Curve("none", [], 132, no_throttling)


def test_cool_samples_are_scaled_to_a_hot_device() -> None:
    """The samples follow the law on a cool device, which is a tenth faster than a hot one."""
    samples = [
        KernelSample(
            phase="forward", q=op.q, kv=op.kv, heads=32, kv_heads=32, head_dim=128, causal=op.causal, ns=law(op),
            origin="measured", source="a law",
        )
        for op in SQUARES
    ]  # fmt: skip
    estimate = Curve("law", samples, 132, lambda sample: 1.1).estimate(block(8192, 8192))
    assert estimate.ns == pytest.approx(1.1 * law(block(8192, 8192)), rel=0.03)


@pytest.mark.parametrize(
    ("utilisation", "busy_s", "slowdown"),
    [(1.0, None, 1.1), (0.5, None, 1.05), (1.0, 0.15, 1.0632), (1.0, 0.001, 1.0007)],
)
def test_a_device_warms_up_as_it_computes(utilisation: float, busy_s: float | None, slowdown: float) -> None:
    """A hot device is a tenth slower; after 0.15 s the slowdown lacks a fraction of 1 / e."""
    machine = assumed_calibration("any", "any", 132, 80 << 30)
    machine = replace(
        machine,
        throttling=replace(machine.throttling, value=0.1),
        throttling_s=replace(machine.throttling_s, value=0.15),
    )
    assert machine.slowdown(machine.kernel("cudnn"), utilisation, busy_s) == pytest.approx(slowdown, abs=1e-4)


def test_each_head_size_has_its_own_curve() -> None:
    """4 x 32 x 16384^2 x 64 FLOPs in 4.77 ms: 461 TFLOP/s, where heads of 128 reach 613 (h200_heads.csv)."""
    curves = Curves(read_calibration("h200"), "cudnn")
    op = msgspec.structs.replace(block(16384, 16384, head_dim=64), heads=32, kv_heads=32)
    assert op.flops() / curves.estimate(op).ns / 1e3 == pytest.approx(461, rel=0.01)
    with pytest.raises(OutsideCalibration, match=r"'cudnn forward' is calibrated for head_dim \[64, 128\], not 96"):
        curves.estimate(msgspec.structs.replace(op, head_dim=96))


@tiered("name, within", [("h200", 0.05), ("h100", 0.05), ("b200", 0.07)], fast=[("h100", 0.05), ("b200", 0.07)])
def test_bundled_curves_predict_held_out_lengths(name: str, within: float) -> None:
    """Each length of a curve is left out and predicted from the others; the mean error stays within the limit."""
    machine, errors = read_calibration(name), []
    for kernel in machine.kernels:
        for phase in ("forward", "backward"):
            samples = [
                sample
                for sample in kernel.samples
                if (sample.phase, sample.pairs, sample.head_dim) == (phase, None, 128)
            ]
            inner = sorted({sample.kv for sample in samples})[1:-1]
            for length in inner:
                others = Curve(
                    "others",
                    [sample for sample in samples if sample.kv != length],
                    machine.multiprocessors,
                    no_throttling,
                )
                for sample in (sample for sample in samples if sample.kv == length):
                    op = block(
                        sample.q, sample.kv, sample.causal, sample.heads, sample.kv_heads, sample.head_dim, sample.phase
                    )
                    errors.append(others.estimate(op).ns / sample.ns - 1)
    assert sum(map(abs, errors)) / len(errors) < within
