"""Kernel rates of machine files: those of the curves, and near to what the exact blocks of recorded runs take."""

from __future__ import annotations

from itertools import product

import pytest

pytest.importorskip("torch", reason="a dry run runs strategies on shapes")

import msgspec

from ringprof.dryrun.schedule import AttentionOp
from ringprof.kernel_rates import BUNDLED, block_times, bundled_rates
from ringprof.prediction.calibration import Calibration, KernelFigures, KernelSample, read_calibration
from ringprof.prediction.fit import schedule_of_run
from ringprof.prediction.kernel_model import block_of
from ringprof.prediction.machine import Curves, with_rates
from ringprof.prediction.network import Cluster
from ringprof.prediction.query import Query
from ringprof.prediction.what_if import Changes
from ringprof.run import read_run
from ringprof.strategies.kernels.registry import auto_order
from ringprof.workload.workload import Workload
from tests.paths import TRACES

H200 = read_calibration("h200")
PLAIN = Workload(seq=65536, heads=40, kv_heads=40, head_dim=128)


@pytest.mark.parametrize("name", ["h200x4-zigzag-262144", "h200x4-ring-262144", "h200x4-ulysses-262144",
                                  "h200x4-zigzag-65536", "h200x4-stripe-262144", "h200x2-zigzag-65536"])  # fmt: skip
def test_blocks_of_a_run_take_what_the_curves_say_of_each_of_them(name: str) -> None:
    """Reports know pairs and calls of a run only, and take square blocks for all; a dry run has every shape."""
    run = read_run(TRACES / name / "run.json")
    rates = bundled_rates("NVIDIA H200")
    assert rates is not None and run.workload is not None and run.work is not None
    programs = schedule_of_run(run).programs
    ratios = {}
    for kernel in ("cudnn", "flash-attn", "flash-attn-3"):
        curves = Curves(H200, kernel)
        exact_ns = sum(
            curves.estimate(op).ns for program in programs for op in program.ops if isinstance(op, AttentionOp)
        )
        known_ns = sum(
            block_times(rates, run.workload, work.block_calls, work.block_flops or 0)[kernel].ns for work in run.work
        )
        assert known_ns == pytest.approx(exact_ns, rel=0.06)
        ratios[kernel] = known_ns / exact_ns
    # What is said of a run is how one kernel compares with another.
    assert ratios["flash-attn-3"] / ratios["cudnn"] == pytest.approx(1, abs=0.06)


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_rates_are_those_of_the_bundled_samples(name: str) -> None:
    machine = read_calibration(name)
    assert machine.kernel_rates and with_rates(machine).kernel_rates == machine.kernel_rates


def machine_with(*kernels: str, head_dim: int = 128) -> Calibration:
    """Return an H200 that has one sample of each of these kernels, in this order."""
    samples = [msgspec.structs.replace(H200.kernel("cudnn").samples[0], head_dim=head_dim, pairs=None)]
    masked = [msgspec.structs.replace(sample, pairs=1000) for sample in samples]
    figures = H200.kernel("cudnn")
    return msgspec.structs.replace(
        H200, kernels=[msgspec.structs.replace(figures, name=name, samples=samples + masked) for name in kernels]
    )


@pytest.mark.parametrize(
    ("kernels", "workload", "params", "chosen"),
    [
        (("cudnn", "flash-attn-3"), {}, {}, "flash-attn-3"),
        (("flash-attn", "cudnn"), {}, {}, "cudnn"),
        # Above head_dim 192, and for documents, another kernel comes first.
        (("flash-attn-3", "flash-attn"), {"head_dim": 256}, {}, "flash-attn"),
        (("cudnn", "flash-attn"), {"documents": (32768, 32768)}, {}, "flash-attn"),
        (("cudnn", "flash-attn", "flash-attn-3"), {"documents": (32768, 32768)}, {}, "flash-attn-3"),
        # cuDNN has no deterministic mode.
        (("cudnn", "flash-attn"), {}, {"deterministic": True}, "flash-attn"),
        (("cudnn", "flash-attn"), {}, {"deterministic": "true"}, "flash-attn"),
        (("cudnn", "flash-attn"), {}, {"deterministic": False}, "cudnn"),
        # A kernel that ringprof does not have stays the choice of its own file.
        (("ffa",), {}, {}, "ffa"),
    ],
)  # fmt: skip
def test_auto_predicts_the_kernel_that_auto_takes_at_run_time(
    kernels: tuple[str, ...], workload: dict[str, object], params: dict[str, object], chosen: str
) -> None:
    changed = msgspec.structs.replace(PLAIN, **workload)
    query = Query("zigzag", changed, Cluster(1, 4), params=params)
    assert query.kernel_on(machine_with(*kernels, head_dim=changed.head_dim)) == chosen


def test_bundled_hopper_machines_predict_flash_attn_3_by_auto() -> None:
    query = Query("zigzag", PLAIN, Cluster(1, 4))
    assert [query.kernel_on(read_calibration(name)) for name in BUNDLED] == [
        "flash-attn-3", "flash-attn-3", "flash-attn-4", "flash-attn"
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["h200", "h100"])
def test_auto_takes_a_kernel_within_3_percent_of_the_fastest_by_the_bundled_curves(name: str) -> None:
    """Forward and backward together, from 2048 tokens on: the host decides where blocks are shorter."""
    machine = read_calibration(name)
    curves = {kernel.name: Curves(machine, kernel.name) for kernel in machine.kernels}
    order = [kernel.name for kernel in auto_order(128) if kernel.name in curves]
    assert order[:2] == ["flash-attn-3", "flash-attn-4"]
    for tokens, (heads, kv_heads), causal in product((2048, 8192, 32768, 65536), ((40, 40), (24, 4)), (True, False)):
        block = block_of("forward", tokens, tokens, heads, kv_heads, causal=causal)
        passes = block, msgspec.structs.replace(block, phase="backward")
        ns = [sum(curves[kernel].estimate(op).ns for op in passes) for kernel in order]
        assert ns[0] < 1.03 * min(ns), block


def test_a_kernel_that_fills_the_device_forward_only() -> None:
    sample: KernelSample = H200.kernel("cudnn").samples[0]
    cudnn: KernelFigures = msgspec.structs.replace(H200.kernel("cudnn"), samples=[sample])
    flash_attn_3 = H200.kernel("flash-attn-3")
    assert (flash_attn_3.fills("forward"), flash_attn_3.fills("backward")) == (True, False)
    assert cudnn.fills("forward") and cudnn.fills("backward") and Changes().kernel is None
