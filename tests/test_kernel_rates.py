"""Times of other kernels for a run's blocks, against figures that can be reckoned in the head."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from ringprof.errors import InputError
from ringprof.kernel_rates import DeviceRates, KernelRate, block_times, bundled_rates, read_rates
from ringprof.workload.workload import Workload

PLAIN = Workload(seq=4096, heads=8, kv_heads=8, head_dim=128, backward=False, causal=False)
FLOPS = 4 * 8 * 128 * 4096 * 4096
"""FLOPs of one full block of 4096 tokens, forward."""


def rate(tokens: int, tflops: float, **changes: Any) -> KernelRate:
    fields: dict[str, Any] = {
        "kernel": "a", "phase": "forward", "head_dim": 128, "group": 1, "causal": False, "spread": 0.01, **changes
    }  # fmt: skip
    return KernelRate(tokens=tokens, tflops=tflops, **fields)


def rates(*rows: KernelRate) -> DeviceRates:
    return DeviceRates(name="made", device="made up", kernel_rates=rows)


def ns_of(known: DeviceRates, workload: Workload = PLAIN, calls: int = 1, flops: int = FLOPS) -> dict[str, float]:
    times = block_times(known, workload, {"forward": calls, "backward": calls}, flops)
    return {name: block.ns for name, block in times.items()}


def test_a_block_of_a_calibrated_length_has_its_rate() -> None:
    assert ns_of(rates(rate(4096, 500.0))) == {"a": pytest.approx(FLOPS / 500e3)}
    # Four calls of a quarter of the pairs each are blocks of half the length.
    assert ns_of(rates(rate(2048, 400.0), rate(4096, 500.0)), calls=4) == {"a": pytest.approx(FLOPS / 400e3)}


def test_between_two_lengths_the_rate_is_linear_in_the_logarithm() -> None:
    half_way = rates(rate(2048, 400.0), rate(8192, 600.0))
    assert ns_of(half_way) == {"a": pytest.approx(FLOPS / 500e3)}


def test_of_a_causal_workload_a_block_is_the_mean_of_causal_and_full() -> None:
    """A causal square of 1.41 times the length has as many pairs; the difference of both is uncertainty."""
    causal = msgspec.structs.replace(PLAIN, causal=True)
    both = rates(rate(4096, 500.0), *(rate(tokens, 250.0, causal=True) for tokens in (4096, 8192)))
    times = block_times(both, causal, {"forward": 1}, FLOPS)["a"]
    assert times.ns == pytest.approx((FLOPS / 500e3 + FLOPS / 250e3) / 2)
    assert times.spread == pytest.approx(math.hypot(0.01, (1 / 250 - 1 / 500) / (1 / 250 + 1 / 500)))


def test_forward_and_backward_are_4_and_10_of_14_parts() -> None:
    known = rates(rate(4096, 400.0), rate(4096, 500.0, phase="backward"))
    trains = msgspec.structs.replace(PLAIN, backward=True)
    total = FLOPS // 4 * 14
    assert ns_of(known, trains, flops=total) == {"a": pytest.approx(FLOPS / 400e3 + FLOPS / 4 * 10 / 500e3)}
    # A kernel without backward rates cannot compute it.
    assert ns_of(rates(rate(4096, 400.0)), trains, flops=total) == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 64}, {"kv_heads": 1}, {"dtype": "fp16"}, {"softcap": 5.0}, {"window": 100, "causal": True},
        {"documents": (2048, 2048), "causal": True}, {"v_head_dim": 64}, {"phase": "prefill", "kv_length": 8192},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_calibrated_is_not_known(changes: dict[str, Any]) -> None:
    workload = msgspec.structs.replace(PLAIN, **changes)
    assert ns_of(rates(rate(4096, 500.0), rate(4096, 500.0, causal=True)), workload) == {}


@pytest.mark.parametrize(("calls", "known"), [(1, True), (3, True), (5, False), (0, False)])
def test_blocks_more_than_an_octave_shorter_are_not_known(calls: int, known: bool) -> None:
    """N calls are blocks of 4096 / sqrt(N) tokens: 2365 of three, 1832 of five."""
    assert bool(ns_of(rates(rate(4096, 500.0)), calls=calls)) is known


def test_bundled_rates_are_found_by_the_device() -> None:
    h200, h100 = bundled_rates("NVIDIA H200"), bundled_rates("NVIDIA H100 80GB HBM3")
    assert h200 is not None and h200.name == "h200" and h200.matrix_product == 790.0
    assert h100 is not None and h100.matrix_product == 699.5 and h100.matmul_clock_mhz == 1470.0
    assert bundled_rates("NVIDIA H100 PCIe") is None and bundled_rates("") is None


def test_a_damaged_calibration_is_an_error_in_one_line(tmp_path: Any) -> None:
    path = tmp_path / "machine.json"
    path.write_text('{"name": "x", "device": "y", "kernel_rates": [1]}')
    with pytest.raises(InputError):
        read_rates(path)
