"""Calibrations of simulated machines find the machines' constants, within the spread that they state.

Every constant is drawn anew for 20 machines; what a calibration says of each is compared with the drawn value.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median
from typing import Literal

import pytest

pytest.importorskip("torch", reason="a calibration computes")

import torch
from msgspec.structs import replace

from ringprof import cli
from ringprof.errors import UsageError
from ringprof.prediction.calibration import (
    Calibration,
    Value,
    assumed,
    calibration_json,
    parse_calibration,
    read_calibration,
)
from ringprof.prediction.host_model import times_us
from ringprof.prediction.machine import Curves
from ringprof.prediction.shapes import HEAD_DIM, blocks
from ringprof.prediction.text import calibration_text
from ringprof.record.dryrun.schedule import AttentionOp
from ringprof.report.text import TextStyle
from tests.prediction.simulated_gpu import Truth, calibrated

SEEDS = range(20)
HEADS = ((40, 40), (32, 8), (48, 8), (16, 2))
LENGTHS = (
    (700, 700, True), (1500, 1500, False), (3000, 3000, True), (5000, 10000, False), (20000, 20000, True),
    (40000, 20000, False), (100000, 100000, True),
)  # fmt: skip
"""Queries, keys, causal: none was measured; most end in a part of a tile."""
Phase = Literal["forward", "backward"]
USUAL_US = {
    "call_us": 2.0, "launch_us": 12.0, "forward_us": 60.0, "backward_us": 100.0, "post_us": 150.0, "wait_us": 15.0,
    "collective_us": 150.0, "copy_us": 150.0, "autograd_us": 300.0,
}  # fmt: skip
"""As `assumed` has them, to within 30 %."""


def machine(seed: int) -> Truth:
    """Draw the constants of a machine."""
    draw = random.Random(seed)

    def about(value: float) -> float:
        return value * math.exp(draw.gauss(0, 0.3))

    return Truth(
        flops_per_ns=about(600e3), backward_rate=draw.uniform(0.6, 0.95), call_ns=draw.uniform(5e3, 35e3),
        tile_columns=draw.uniform(100, 700), grouped=draw.uniform(-0.02, 0.03), heat=draw.uniform(0.02, 0.15),
        memory_gb_s=about(3000), reorder_gb_s=about(1000), latency_ns=draw.uniform(20e3, 60e3),
        copy_latency_ns=draw.uniform(5e3, 30e3), channel_gb_s=draw.uniform(14, 21), hop_gb_s=draw.uniform(340, 370),
        total_gb_s=draw.uniform(375, 420), copy_gb_s=draw.uniform(340, 410), collective_gb_s=draw.uniform(250, 340),
        contention=draw.uniform(0.3, 1.0), host_us={name: about(us) for name, us in USUAL_US.items()},
        host_unlike=0.095,
    )  # fmt: skip


def block(phase: Phase, q: int, kv: int, heads: int, kv_heads: int, *, causal: bool) -> AttentionOp:
    return AttentionOp(
        label="", phase=phase, batch=1, q=q, kv=kv, heads=heads, kv_heads=kv_heads, head_dim=HEAD_DIM, causal=causal
    )


def share(offs: list[float], within: float) -> float:
    """The share of errors, in stated spreads, that lie within so many."""
    return fmean(abs(off) < within for off in offs)


def curve_errors(patch: pytest.MonkeyPatch, seconds: float) -> tuple[dict[int, list[float]], list[float]]:
    """The errors of estimates in stated spreads, by queries, and the stated spreads."""
    errors: dict[int, list[float]] = defaultdict(list)
    spreads = []
    for seed in SEEDS:
        truth = machine(seed)
        curves = Curves(calibrated(patch, truth, ["kernels"], seed=seed, seconds=seconds), "cudnn")
        phases: tuple[Phase, ...] = ("forward", "backward")
        for phase in phases:
            for heads, kv_heads in HEADS:
                for q, kv, causal in LENGTHS:
                    estimate = curves.at(block(phase, q, kv, heads, kv_heads, causal=causal))
                    hot = truth.attention_ns(phase, q, kv, heads, kv_heads, causal=causal) * (1 + truth.heat)
                    errors[q].append(math.log(estimate.ns / hot) / estimate.spread)
                    spreads.append(estimate.spread)
    return errors, spreads


def test_curves_of_kernels_lie_within_their_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, GQA, lengths between the samples and shorter: nominal shares are 0.68 and 0.95."""
    errors, spreads = curve_errors(monkeypatch, seconds=100)
    everything = [off for offs in errors.values() for off in offs]
    assert len(everything) == 20 * 2 * 4 * 7
    assert 0.60 < share(everything, 1) < 0.97 and share(everything, 2) > 0.95 and share(everything, 3) > 0.985
    assert all(share(offs, 2) > 0.9 for offs in errors.values()), {q: share(offs, 2) for q, offs in errors.items()}
    assert median(spreads) < 0.01 and max(spreads) < 0.15


def test_curves_of_few_samples_are_less_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the shapes: what is left unknown of short blocks stands in their spread."""
    errors, spreads = curve_errors(monkeypatch, seconds=50)
    everything = [off for offs in errors.values() for off in offs]
    assert share(everything, 2) > 0.95 and max(map(abs, everything)) < 4
    assert median(spreads) < 0.015 and max(spreads) < 0.4


MOST = {
    "memory": 0.02, "reorder": 0.1, "heat": 0.2, "latency": 0.3, "channel": 0.05, "hop": 0.03, "total": 0.03,
    "copy": 0.02, "all_to_all": 0.05, "all_gather": 0.05, "reduce_scatter": 0.05, "contention": 0.5,
}  # fmt: skip
"""The widest spread that each constant may be given."""


@pytest.mark.parametrize("ranks", [2, 4])
def test_memory_links_and_heat_lie_within_their_spread(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the mean no constant is off by half its spread, latency by 0.8 of it; nine of ten lie within two spreads."""
    errors: dict[str, list[float]] = defaultdict(list)
    for seed in SEEDS:
        truth = machine(seed)
        known = calibrated(monkeypatch, truth, ["memory", "links", "heat"], seed=seed, ranks=ranks, seconds=60)
        assert known.unmeasured == [] and known.same_host.copy_gb_s is not None
        link = known.same_host
        channel = min(truth.channel_gb_s, truth.hop_gb_s / (32 // ranks))
        constants: dict[str, tuple[Value, float]] = {
            "memory": (known.memory_gb_s, truth.memory_gb_s), "reorder": (known.reorder_gb_s, truth.reorder_gb_s),
            "heat": (known.heat, truth.heat), "latency": (link.latency_us, truth.latency_ns / 1e3),
            "channel": (link.channel_gb_s, channel), "hop": (link.hop_gb_s, truth.hop_gb_s),
            "total": (link.total_gb_s, truth.total_gb_s), "copy": (known.same_host.copy_gb_s, truth.copy_gb_s),
            "contention": (known.contention, truth.contention),
            **{name: (value, truth.collective_gb_s) for name, value in link.collective_gb_s.items()},
        }  # fmt: skip
        assert constants.keys() == MOST.keys()
        for name, (value, true) in constants.items():
            assert value.origin == "measured" and value.spread <= MOST[name], (name, value)
            errors[name].append(math.log(value.value / true) / value.spread)
    for name, offs in errors.items():
        assert abs(fmean(offs)) < (0.8 if name == "latency" else 0.5), (name, fmean(offs))
        assert share(offs, 2) >= 0.9, (name, offs)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_host_times_lie_within_their_spread(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kinds of operations, and whole passes, whose kinds' errors cancel; hosts of one kind are 9.5 % apart."""
    kinds: list[float] = []
    passes: list[float] = []
    for seed in SEEDS:
        truth = machine(seed)
        known = calibrated(monkeypatch, truth, ["host"], seed=seed, ranks=ranks, seconds=5)
        us = times_us(known, known.kernel("cudnn"))
        assert known.host.pass_spread is not None and 0.05 <= known.host.pass_spread < 0.15
        kinds += [math.log(us[name] / true) / getattr(known.host, name).spread for name, true in truth.host_us.items()]
        passes += [
            math.log(sum(us[kind] * count for kind, count in one.kinds.items())
                     / sum(truth.host_us[kind] * count for kind, count in one.kinds.items())) / known.host.pass_spread
            for one in known.passes
        ]  # fmt: skip
        ran = {kind for one in known.passes for kind, count in one.kinds.items() if count}
        for name in USUAL_US:
            assert getattr(known.host, name).origin == ("measured" if name in ran else "assumed"), name
    assert 0.55 < share(kinds, 1) < 0.85 and share(kinds, 2) > 0.9
    assert 0.6 < share(passes, 1) < 0.97 and share(passes, 2) > 0.95


# --- what fails ---------------------------------------------------------------------------------------


def too_large(phase: str, q: int, kv: int) -> BaseException | None:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB") if q * kv > 2**30 else None


def no_backward(phase: str, q: int, kv: int) -> BaseException | None:
    return RuntimeError("no kernel image is available") if phase == "backward" else None


def test_a_size_without_memory_is_named_and_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    known = calibrated(monkeypatch, Truth(), ["kernels", "memory"], broken=too_large)
    wanted = [one.block for one in blocks(["cudnn"])]
    large = [one for one in wanted if one.q * one.kv > 2**30]
    assert len(known.kernel("cudnn").samples) == len(wanted) - len(large) > 0
    assert len(known.unmeasured) == len(large) and all("out of memory" in line for line in known.unmeasured)
    assert "cudnn forward 65536 x 65536, 40 heads, 40 kv, causal=True: " in "\n".join(known.unmeasured)
    estimate = Curves(known, "cudnn").at(block("forward", 16384, 16384, 40, 40, causal=True))
    true = Truth().attention_ns("forward", 16384, 16384, 40, 40, causal=True) * 1.1
    assert estimate.ns == pytest.approx(true, rel=0.02)


def test_a_phase_that_does_not_run_leaves_no_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    known = calibrated(monkeypatch, Truth(), ["kernels"], broken=no_backward)
    assert {sample.phase for sample in known.kernel("cudnn").samples} == {"forward"}
    with pytest.raises(UsageError, match="cudnn backward': nothing measured of this phase"):
        Curves(known, "cudnn").at(block("backward", 4096, 4096, 40, 40, causal=True))


def test_no_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other parts are measured, and every failure is named."""
    known = calibrated(
        monkeypatch, Truth(), ["kernels", "memory", "heat"], broken=lambda *_: RuntimeError("no kernel image")
    )
    assert known.memory_gb_s.origin == "measured" and known.heat.origin == "assumed"
    assert known.unmeasured[0] == "cudnn, to warm the GPU: RuntimeError: no kernel image"
    assert known.unmeasured[-1] == "heat: RuntimeError: no kernel image"
    assert all(not kernel.samples for kernel in known.kernels)
    text = calibration_text(known, TextStyle())
    assert "not measured: heat: RuntimeError: no kernel image" in text


def test_the_first_kernel_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one warms the GPU, so that samples are of a warm GPU: a tenth slower than a cool one."""
    calls = iter(range(10**9))

    def first_fails(phase: str, q: int, kv: int) -> BaseException | None:
        return RuntimeError("no kernel image") if next(calls) == 0 else None

    known = calibrated(
        monkeypatch, Truth(), ["kernels"], kernels=["cudnn", "flash-attn"], seconds=120, broken=first_fails
    )
    assert known.unmeasured[0] == "cudnn, to warm the GPU: RuntimeError: no kernel image"
    samples = [one for one in known.kernel("flash-attn").samples if one.pairs is None]
    ratios = [
        one.ns / Truth().attention_ns(one.phase, one.q, one.kv, one.heads, one.kv_heads, causal=one.causal)
        for one in samples
    ]
    assert len(ratios) > 5 and all(1.05 < ratio < 1.15 for ratio in ratios)


def test_no_kernel_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no attention kernel runs on this GPU"):
        calibrated(monkeypatch, Truth(), ["kernels"], kernels=[])


def test_an_interrupted_calibration_leaves_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are saved every 30 s: those of the first three slices are there, and predict."""
    saved: list[bytes] = []
    calls = iter(range(10**9))

    def interrupted(phase: str, q: int, kv: int) -> BaseException | None:
        return KeyboardInterrupt() if len(saved) == 3 and next(calls) > 200 else None

    with pytest.raises(KeyboardInterrupt):
        calibrated(
            monkeypatch, Truth(), ["kernels", "memory"], broken=interrupted,
            save=lambda known: saved.append(calibration_json(known)),
        )  # fmt: skip
    counts = [len(parse_calibration(data, "saved").kernel("cudnn").samples) for data in saved]
    assert len(counts) == 3 and 0 < counts[0] < counts[1] < counts[2] < len(blocks(["cudnn"]))
    estimate = Curves(parse_calibration(saved[-1], "saved"), "cudnn").at(
        block("forward", 8192, 8192, 40, 40, causal=True)
    )
    true = Truth().attention_ns("forward", 8192, 8192, 40, 40, causal=True) * 1.1
    assert estimate.ns == pytest.approx(true, rel=0.05)


@pytest.mark.parametrize("seconds", [5.0, 20.0])
def test_shapes_that_there_was_no_time_for_are_counted(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warming the GPU takes a fifth of the kernels' time at most, so that some shapes are measured."""
    known = calibrated(monkeypatch, Truth(), ["kernels"], seconds=seconds)
    measured, wanted = len(known.kernel("cudnn").samples), len(blocks(["cudnn"]))
    assert 3 <= measured < wanted
    left = wanted - measured
    assert known.unmeasured == [f"kernels: {left} of {wanted} shapes, for lack of time: give more --seconds"]


def test_links_without_time_or_without_a_second_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    base = assumed("simulated", "simulated", 132, 80 << 30)
    alone = calibrated(monkeypatch, Truth(), ["links"], base=base)
    assert alone.same_host == base.same_host and alone.contention == base.contention
    assert alone.unmeasured == [f"{part}: needs two GPUs" for part in ("links", "contention", "copied hops")]
    late = calibrated(monkeypatch, Truth(), ["links"], ranks=2, seconds=0)
    assert "links: UsageError: no time was left" in late.unmeasured
    # Another calibration that measures them takes the place of both.
    again = calibrated(
        monkeypatch, Truth(), ["links"], ranks=2, base=replace(late, unmeasured=[*late.unmeasured, "x: y"])
    )
    assert again.unmeasured == ["x: y"] and again.same_host.hop_gb_s.origin == "measured"


def test_the_environment_is_the_measured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured on another's base is of this torch and this NCCL; kernels that were not measured stay."""
    base: Calibration = read_calibration("h200")
    known = calibrated(monkeypatch, Truth(), ["memory"], base=base)
    assert known.environment["torch"] == torch.__version__ != base.environment["torch"]
    assert known.environment["nccl"] == known.nccl.version == "2.28.9"
    assert known.kernels == base.kernels and known.elsewhere == {}


def test_an_output_that_cannot_be_written_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is measured: nothing asks for a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("the file comes first"))
    missing = tmp_path / "missing" / "machine.json"
    assert cli.run(["calibrate", "-o", str(missing)]) == 2
    assert capsys.readouterr().err == f"ringprof: {missing}: No such file or directory\n"
