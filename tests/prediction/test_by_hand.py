"""Five predictions against sums by hand: FLOPs over a rate, bytes over a rate, and which of both waits.

Rates are read off the samples of the bundled h200 that are nearest in shape (TFLOP/s on a hot device). What such a sum
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
from ringprof.workload.workload import Workload

T = 1e12


def predicted(strategy: str, workload: Workload, cluster: Cluster, kernel: str = "cudnn") -> PredictionResult:
    return predict(Query(strategy, workload, cluster, kernel), read_calibration("h200"), schedule_of)


def problem(seq: int, heads: int, *, backward: bool = True, causal: bool = True) -> Workload:
    return Workload(seq=seq, heads=heads, kv_heads=heads, head_dim=128, backward=backward, causal=causal)


def test_zigzag_on_4_gpus_is_bound_by_its_blocks() -> None:
    """S²/2 pairs per head over 4 GPUs, 4 and 10 FLOPs per pair and channel, at 600 and 525; hops are hidden."""
    pairs = 262144**2 / 2 * 40 * 128 / 4
    by_hand = 4 * pairs / (600 * T) + 10 * pairs / (525 * T)
    assert predicted("zigzag", problem(262144, 40), Cluster(1, 4)).median_ns / 1e9 == pytest.approx(by_hand, rel=0.05)


def test_ring_over_slow_nics_takes_its_hops_and_one_block() -> None:
    """K and V of 16384 tokens over 6.25 GB/s, seven times; of eight blocks seven are hidden behind them (at 400)."""
    ring = problem(131072, 32, backward=False, causal=False)
    hops = 7 * 2 * 16384 * 32 * 128 * 2 / 6.25e9
    block = 4 * 16384**2 * 32 * 128 / (400 * T)
    prediction = predicted("ring", ring, Cluster(8, 1, nic_gbit=50.0), "flash-attn")
    assert prediction.median_ns / 1e9 == pytest.approx(hops + block, rel=0.04)


def test_hops_wait_for_blocks_that_fill_the_device() -> None:
    """cuDNN's blocks fill the device, and of a ring's ranks one is always too late: blocks (at 650) and hops add up."""
    ring = problem(131072, 32, backward=False, causal=False)
    hops = 7 * 2 * 16384 * 32 * 128 * 2 / 6.25e9
    blocks = 8 * 4 * 16384**2 * 32 * 128 / (650 * T)
    prediction = predicted("ring", ring, Cluster(8, 1, nic_gbit=50.0))
    assert prediction.median_ns / 1e9 == pytest.approx(hops + blocks, rel=0.04)


def test_ulysses_takes_one_block_and_its_all_to_alls() -> None:
    """10 heads of all tokens per GPU, at 620 and 520; 3/4 of eight tensors of 32768 tokens move at 334 GB/s."""
    pairs = 131072**2 / 2 * 10 * 128
    blocks = 4 * pairs / (620 * T) + 10 * pairs / (520 * T)
    moved = 8 * 0.75 * 32768 * 40 * 128 * 2 / 334e9
    prediction = predicted("ulysses", problem(131072, 40), Cluster(1, 4))
    assert prediction.median_ns / 1e9 == pytest.approx(blocks + moved, rel=0.05)


def test_calls_with_copies_around_them_take_the_time_of_the_copies() -> None:
    """Ring of 4, one stream: four blocks of 8192 tokens at 685 with 4.5 % more, and the copies of each.

    Q has 134.2 MB, K and V together 33.6 MB; gathers read and write them at 3590 GB/s, a fill and a scatter write, read
    and write the output at 3130 and 1460. Merges read and write the sum in float32 and read a block's output.
    """
    ring = Workload(seq=32768, heads=64, kv_heads=8, head_dim=128, backward=False, causal=False)
    query = Query("megatron", ring, Cluster(1, 4), "flash-attn-3", pairwise=True, one_stream=True, repacks=True)
    block = 4 * 8192**2 * 64 * 128 / (685 * T) * 1.045
    q, kv = 8192 * 64 * 128 * 2, 2 * 8192 * 8 * 128 * 2
    copies = 2 * (q + kv) / 3590e9 + q / 3130e9 + 2 * q / 1460e9
    merges = 3 * (2 * 2 * q + q) / 4176e9
    prediction = predict(query, read_calibration("h200"), schedule_of)
    assert prediction.median_ns / 1e9 == pytest.approx(4 * (block + copies) + merges, rel=0.04)


def test_short_zigzag_is_bound_by_host_launches() -> None:
    """Count of each kind of operation times its host time; the slowest of four hosts takes 1.1 times the mean."""
    prediction = predicted("zigzag", problem(4096, 8), Cluster(1, 4))
    host = read_calibration("h200").host
    ops = prediction.schedule.programs[0].ops
    kinds = [type(op).__name__ for op in ops]
    us = {"MemoryOp": host.launch_us, "CommStart": host.post_us, "CommWait": host.wait_us}
    by_hand = sum(kinds.count(kind) * value.value for kind, value in us.items())
    by_hand += sum(op.calls for op in ops) * host.call_us.value
    by_hand += 4 * (host.forward_us.value + host.backward_us.value) + host.autograd_us.value
    assert prediction.host_bound and prediction.median_ns / 1e3 == pytest.approx(1.098 * by_hand, rel=0.02)


def test_variance_is_relative_noise_plus_fixed_noise() -> None:
    """The standard deviations are 1 % of the time and 200 us, of a run of about 3 ms; their squares add up."""
    machine = read_calibration("h200")
    machine = replace(
        machine, transfer_margin={}, noise=replace(machine.noise, value=0.01),
        run_to_run_noise_us=replace(machine.run_to_run_noise_us, value=200.0),
    )  # fmt: skip
    query = Query("zigzag", problem(16384, 40), Cluster(1, 4), "cudnn")
    prediction = predict(query, machine, schedule_of)
    slowest_ns = max(timeline.end_ns for timeline in prediction.timelines)
    assert 1e6 < slowest_ns < 1e7
    unexplained = prediction.device_variance["unexplained"]
    assert unexplained == pytest.approx(0.01**2 + (200e3 / slowest_ns) ** 2)


def test_spread_of_a_family_counts_across_nodes_of_a_measured_machine() -> None:
    """On one node h200 has runs of its own; over nodes it has the spread of published rows, outside the margin."""
    machine = read_calibration("h200")
    for hosts, spread in ((1, 0.0), (2, 0.056)):
        query = Query("megatron", problem(65536, 16), Cluster(hosts, 4, nic_gbit=400.0), "cudnn")
        assert predict(query, machine, schedule_of, draws=1).device_variance["family"] == pytest.approx(spread**2)
    other = machine.family_spread["other"].value
    assert machine.family_variance("zigzag", 2) == other**2 and machine.family_variance("zigzag", 1) == 0.0


def test_ring_of_128_takes_its_hops_and_one_block() -> None:
    """K and V of 16384 tokens over 6.25 GB/s, 127 times; the prediction extrapolates from fewer simulated ranks."""
    ring = problem(16384 * 128, 32, backward=False, causal=False)
    hops = 127 * 2 * 16384 * 32 * 128 * 2 / 6.25e9
    prediction = predicted("ring", ring, Cluster(128, 1, nic_gbit=50.0), "flash-attn")
    assert prediction.median_ns / 1e9 == pytest.approx(hops, rel=0.03)
