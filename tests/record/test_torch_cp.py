"""torch's own ring recorded as ours are."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringprof.run import read_run
from tests.record.command import run


@pytest.mark.processes
def test_torchs_ring_is_verified_timed_and_profiled(tmp_path: Path) -> None:
    size = ["--seq", "256", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--world", "2", "--device", "cpu"]
    ended = run(["record", "--strategy", "torch-cp", "-p", "rotate=alltoall", "--iters", "2", *size], tmp_path)
    assert ended.returncode == 0, ended.stderr
    found = read_run(tmp_path / "traces" / "run.json")
    assert found.verification is not None and found.verification.passed
    assert found.strategy is not None and found.strategy.params["rotate"] == "alltoall"
    assert found.timings is not None and [len(times) for times in found.timings.iterations_ns] == [2, 2]
    assert all((tmp_path / "traces" / trace.path).exists() for trace in found.traces)
