"""More ranks than are simulated one by one, against formulas that need no simulation."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="a prediction runs strategies on shapes")

from ringprof.prediction.calibration import read_calibration
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import predict
from ringprof.prediction.query import Query
from ringprof.prediction.schedules import schedule_of
from ringprof.run import Workload


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
