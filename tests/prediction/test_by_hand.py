"""Five predictions against what a pencil finds: FLOPs over a rate, bytes over a rate, and which of both waits.

Rates are read off the samples of the bundled h200 that are nearest in shape (TFLOP/s on a hot device); what a pencil
leaves out, a merge or a copy, is worth a few percent.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="a prediction runs strategies on shapes")

from msgspec.structs import replace

from ringprof.prediction.calibration import read_calibration
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import PredictionResult, predict
from ringprof.prediction.query import Query
from ringprof.prediction.schedules import schedule_of
from ringprof.run import Workload

T = 1e12


def foreseen(strategy: str, workload: Workload, cluster: Cluster, kernel: str = "cudnn") -> PredictionResult:
    return predict(Query(strategy, workload, cluster, kernel), read_calibration("h200"), schedule_of)


def problem(seq: int, heads: int, *, backward: bool = True, causal: bool = True) -> Workload:
    return Workload(seq=seq, heads=heads, kv_heads=heads, head_dim=128, backward=backward, causal=causal)


def test_zigzag_on_four_is_its_blocks_alone() -> None:
    """S²/2 pairs a head over 4 GPUs, 4 and 10 FLOPs each and channel, at 600 and 525; transfers are hidden."""
    pairs = 262144**2 / 2 * 40 * 128 / 4
    pencil = 4 * pairs / (600 * T) + 10 * pairs / (525 * T)
    assert foreseen("zigzag", problem(262144, 40), Cluster(1, 4)).median_ns / 1e9 == pytest.approx(pencil, rel=0.05)


def test_a_ring_over_slow_nics_is_its_hops_and_one_block() -> None:
    """K and V of 16384 tokens over 6.25 GB/s, seven times; of eight blocks seven are hidden behind them (at 400)."""
    ring = problem(131072, 32, backward=False, causal=False)
    hops = 7 * 2 * 16384 * 32 * 128 * 2 / 6.25e9
    block = 4 * 16384**2 * 32 * 128 / (400 * T)
    found = foreseen("ring", ring, Cluster(8, 1, nic_gbit=50.0), "flash-attn")
    assert found.median_ns / 1e9 == pytest.approx(hops + block, rel=0.04)


def test_hops_that_find_the_device_full_wait_for_the_block() -> None:
    """cuDNN's blocks fill the device, and of a ring's ranks one is always too late: blocks (at 650) and hops add up."""
    ring = problem(131072, 32, backward=False, causal=False)
    hops = 7 * 2 * 16384 * 32 * 128 * 2 / 6.25e9
    blocks = 8 * 4 * 16384**2 * 32 * 128 / (650 * T)
    found = foreseen("ring", ring, Cluster(8, 1, nic_gbit=50.0))
    assert found.median_ns / 1e9 == pytest.approx(hops + blocks, rel=0.04)


def test_ulysses_is_one_long_block_and_its_exchanges() -> None:
    """10 heads of all tokens a GPU, at 620 and 520; eight tensors of 32768 tokens change hands, 3/4 of each, at 334."""
    pairs = 131072**2 / 2 * 10 * 128
    blocks = 4 * pairs / (620 * T) + 10 * pairs / (520 * T)
    moved = 8 * 0.75 * 32768 * 40 * 128 * 2 / 334e9
    found = foreseen("ulysses", problem(131072, 40), Cluster(1, 4))
    assert found.median_ns / 1e9 == pytest.approx(blocks + moved, rel=0.05)


def test_a_short_zigzag_is_what_its_host_issues() -> None:
    """As many of each kind as its program has, times what each takes; the slowest of four hosts takes 1.1 times one."""
    found = foreseen("zigzag", problem(4096, 8), Cluster(1, 4))
    host = read_calibration("h200").host
    ops = found.schedule.programs[0].ops
    kinds = [type(op).__name__ for op in ops]
    us = {"MemoryOp": host.launch_us, "CommStart": host.post_us, "CommWait": host.wait_us}
    pencil = sum(kinds.count(kind) * value.value for kind, value in us.items())
    pencil += sum(op.calls for op in ops) * host.call_us.value
    pencil += 4 * (host.forward_us.value + host.backward_us.value)
    assert host.autograd_us is not None
    pencil += host.autograd_us.value
    assert found.host_bound and found.median_ns / 1e3 == pytest.approx(1.098 * pencil, rel=0.02)


def test_what_nothing_explains_is_a_share_of_the_time_and_so_many_microseconds() -> None:
    """A hundredth and 200 us of a run of some 3 ms: standard deviations, which add up in squares."""
    machine = read_calibration("h200")
    machine = replace(
        machine, elsewhere={}, noise=replace(machine.noise, value=0.01),
        unsteady_us=replace(machine.unsteady_us, value=200.0),
    )  # fmt: skip
    query = Query("zigzag", problem(16384, 40), Cluster(1, 4), "cudnn")
    found = predict(query, machine, schedule_of)
    took_ns = max(one.end_ns for one in found.timelines)
    assert 1e6 < took_ns < 1e7
    assert found.device_parts["unexplained"] == pytest.approx(0.01**2 + (200e3 / took_ns) ** 2)


def test_a_ring_of_128_is_its_hops_and_one_block() -> None:
    """K and V of 16384 tokens over 6.25 GB/s, 127 times: what is beyond the simulated ranks goes on as they do."""
    ring = problem(16384 * 128, 32, backward=False, causal=False)
    hops = 127 * 2 * 16384 * 32 * 128 * 2 / 6.25e9
    found = foreseen("ring", ring, Cluster(128, 1, nic_gbit=50.0), "flash-attn")
    assert found.median_ns / 1e9 == pytest.approx(hops, rel=0.03)
