"""Metrics in conditions: the shares among them, which may be compared with a percentage."""

from __future__ import annotations

from ringprof.analysis.findings.conditions import shares_among


def test_times_sizes_and_rates_are_not_shares():
    no_shares = {"tflops", "wall_ns", "iteration_ms", "sent_bytes", "peak_mib", "peak_mb", "max(wall_ns)", "iterations"}
    assert shares_among(no_shares | {"idle", "max(exposed_comm)"}) == {"idle", "max(exposed_comm)"}
