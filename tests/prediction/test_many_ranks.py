"""More ranks than are simulated one by one, against formulas that need no simulation."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="a prediction runs strategies on shapes")

from ringprof.prediction.advise import _sweep, advise, candidates, label_of, ranked_choices
from ringprof.prediction.calibration import read_calibration
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import predict
from ringprof.prediction.query import Query
from ringprof.prediction.schedules import ScheduleCache, schedule_of
from ringprof.scale.workers import ignore_progress
from ringprof.workload.workload import Workload
from tests.tiers import tiered


@pytest.mark.parametrize("placement", ["head-first", "ring-first"])
def test_usp_ring_runs_at_the_rate_of_its_slowest_link(placement: str) -> None:
    """128 GPUs, 8 of them share the heads: a ring of 16, which leaves its host wherever its ranks lie.

    K and V of 8192 tokens and 5 heads are 20.97 MB; a NIC of 100 Gbit/s carries 43 / 50 of its line rate, as in the
    machine's source, so 15 hops take 29.3 ms. Beside them there are all-to-alls of 9.2 MB and 5 ms of attention.
    """
    query = Query(
        "usp", Workload(seq=131072, heads=40, kv_heads=40, head_dim=128, backward=False),
        Cluster(hosts=16, gpus_per_host=8, nic_gbit=100.0), "cudnn", "nccl",
        {"ulysses_degree": 8, "placement": placement},
    )  # fmt: skip
    hops_ms = 15 * 2 * 8192 * 5 * 128 * 2 / (100 / 8 * 43 / 50) / 1e6
    assert hops_ms == pytest.approx(29.26, abs=0.01)
    assert hops_ms < predict(query, read_calibration("h100"), schedule_of).median_ns / 1e6 < hops_ms + 9


@tiered("backward", [True, False], [False])
def test_few_ranks_rank_the_slow_choices_and_all_ranks_the_fast_ones(
    backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few ranks wait for fewer peers: they are never slower than all, and here at most 12 % faster."""
    monkeypatch.setattr("ringprof.prediction.advise._sweep", lambda *_: iter(()))
    workload = Workload(seq=1 << 20, heads=16, kv_heads=8, head_dim=128, backward=backward)
    names = ("double-ring", "megatron")
    cluster, machine, cache = (
        Cluster(hosts=16, gpus_per_host=8, nic_gbit=100.0),
        read_calibration("h100"),
        ScheduleCache(),
    )
    choices = advise(workload, cluster, machine, cache.of, strategies=names).choices
    fastest_ns = choices[0].prediction.median_ns
    few_ranks = 0
    for choice in choices:
        prediction = choice.prediction
        full = predict(prediction.query, machine, cache.of, draws=1)
        if prediction.few_ranks:
            few_ranks += 1
            assert prediction.median_ns > 1.7 * fastest_ns
            assert 0.88 <= prediction.median_ns / full.median_ns <= 1.005
        else:
            assert prediction.median_ns in (full.median_ns, predict(prediction.query, machine, cache.of).median_ns)
        assert prediction.peak_bytes == full.peak_bytes
    assert few_ranks


def test_points_from_few_ranks_agree_with_all_ranks() -> None:
    """Over NICs and nodes, times from four ranks are scaled by what all ranks take over four at the question itself."""
    query = Query(
        "double-ring", Workload(seq=1 << 20, heads=16, kv_heads=8, head_dim=128),
        Cluster(hosts=16, gpus_per_host=8, nic_gbit=100.0), "flash-attn-3", "nccl",
    )  # fmt: skip
    machine, cache = read_calibration("h100"), ScheduleCache()
    at_question = predict(query, machine, cache.of, draws=1)
    for axis, values in (("nic", [100.0, 400.0]), ("hosts", [16, 32])):
        (_, same), (_, (scaled,)) = _sweep(axis, values, [at_question], machine, cache.of, ignore_progress)
        assert same == [at_question]
        whole = predict(scaled.query, machine, cache.of, draws=1)
        assert scaled.few_ranks and not whole.few_ranks
        assert scaled.median_ns == pytest.approx(whole.median_ns, rel=0.03)


def test_copied_hops_are_left_out_only_where_they_are_slow() -> None:
    """Choices that are not tried, as they are far behind over NCCL, take more than 1.7 times as long as the first."""
    workload = Workload(seq=1 << 15, heads=16, kv_heads=8, head_dim=128)
    machine, cache = read_calibration("h200"), ScheduleCache()
    cluster = Cluster(hosts=4, gpus_per_host=4, nic_gbit=400.0)
    names = ("allgather", "double-ring")
    choices, refused = ranked_choices(workload, cluster, machine, cache.of, strategies=names)
    left_out = [label for label, reason in refused if "far behind" in reason]
    copied = {label_of(query): query for query in candidates(workload, cluster, machine, "auto")}
    assert left_out
    for label in left_out:
        slow = predict(copied[label], machine, cache.of, draws=1)
        assert slow.median_ns > 1.7 * choices[0].prediction.median_ns


@tiered(
    "strategy, hosts, gpus_per_host",
    [(name, *nodes) for name in ("double-ring", "burst", "megatron") for nodes in ((16, 8), (2, 64), (8, 32))],
    fast=[("double-ring", 2, 64), ("megatron", 16, 8)],
)
def test_memory_of_many_ranks_is_that_of_their_own_dry_run(strategy: str, hosts: int, gpus_per_host: int) -> None:
    """Smaller clusters stand for the large one; the truth is the code of ranks of the whole cluster."""
    cluster = Cluster(hosts=hosts, gpus_per_host=gpus_per_host, nic_gbit=400.0)
    workload = Workload(seq=1 << 20, heads=16, kv_heads=8, head_dim=128)
    query, cache = Query(strategy, workload, cluster, "flash-attn-3", "nccl"), ScheduleCache()
    predicted = predict(query, read_calibration("h100"), cache.of, draws=1)
    ranks = [0, 1, gpus_per_host - 1, gpus_per_host, cluster.size - 1]
    assert predicted.peak_bytes == max(program.peak_bytes for program in cache.of(query, cluster, ranks).programs)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["double-ring", "zigzag"])
def test_few_large_nodes_stand_for_more(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate 32 ranks of four nodes of 32 GPUs; the truth is a simulation of all 128."""
    cluster = Cluster(hosts=4, gpus_per_host=32, nic_gbit=400.0)
    query = Query(strategy, Workload(seq=1 << 19, heads=16, kv_heads=8, head_dim=128), cluster, "flash-attn-3", "nccl")
    machine, cache = read_calibration("h100"), ScheduleCache()
    few = predict(query, machine, cache.of, draws=1)
    monkeypatch.setattr("ringprof.prediction.predict.MAX_SIMULATED_RANKS", cluster.size)
    assert few.median_ns == pytest.approx(predict(query, machine, cache.of, draws=1).median_ns, rel=0.005)


def test_copied_hops_that_only_lack_memory_are_predicted() -> None:
    """A double ring takes little longer than Ulysses and does not fit beside it: that is not far behind."""
    workload, machine = Workload(seq=1 << 17, heads=16, kv_heads=8, head_dim=128), read_calibration("h200")
    choices, refused = ranked_choices(
        workload, Cluster(hosts=2, gpus_per_host=4, nic_gbit=400.0), machine, ScheduleCache().of,
        strategies=("ulysses", "double-ring"), memory_bytes=1000 << 20,
    )  # fmt: skip
    assert refused == ()
    fits = {choice.label: choice.fits for choice in choices}
    assert fits["ulysses"] and not fits["double-ring"] and not fits["double-ring, hops copied"]
