"""Rates of kernels alone: FLOPs by the exact area of each mask over the median time."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="kernels are torch's")

import torch

from ringprof.prediction import measured_rates as subject
from ringprof.workload.workload import Workload


def test_rates_follow_from_the_pairs_of_each_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 ms forward and 2 ms backward; 4 and 10 FLOPs for each pair of a query and a key, and channel of a head."""
    monkeypatch.setattr(subject, "_median_times", lambda kernel, problem, device: (1e6, 2e6))
    workload = Workload(seq=1024, heads=2, kv_heads=2, head_dim=64, batch=3, dtype="fp32")
    rates = [rate for rate in subject.kernel_rates(workload, torch.device("cpu")) if rate.reason is None]
    channels = 3 * 2 * 64
    for mask, pairs in (("full", 1024 * 1024), ("causal", 1024 * 1025 // 2)):
        figures = {(rate.forward_tflops, rate.backward_tflops) for rate in rates if rate.mask == mask}
        ((forward, backward),) = figures
        assert forward == pytest.approx(4 * pairs * channels / 1e-3 / 1e12)
        assert backward == pytest.approx(10 * pairs * channels / 2e-3 / 1e12)
