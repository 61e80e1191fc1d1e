"""Recording of torch's own context-parallel ring."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringprof.prediction.schedules import schedule
from ringprof.run import read_run
from tests.recording.command import run


@pytest.mark.processes
def test_torchs_ring_is_verified_timed_and_profiled(tmp_path: Path) -> None:
    size = ["--seq", "256", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--world", "2", "--device", "cpu"]
    ended = run(["record", "--strategy", "torch-cp", "-p", "rotate=alltoall", "--iters", "2", *size], tmp_path)
    assert ended.returncode == 0, ended.stderr
    recorded = read_run(tmp_path / "traces" / "run.json")
    assert recorded.verification is not None and recorded.verification.passed
    assert recorded.strategy is not None and recorded.strategy.params["rotate"] == "alltoall"
    assert recorded.timings is not None and [len(times) for times in recorded.timings.iterations_ns] == [2, 2]
    assert recorded.workload is not None and recorded.work is not None
    dry_run = schedule("torch-cp", recorded.workload, 2, kernel="cpu-flash", params=recorded.strategy.params)
    for work, program in zip(recorded.work, dry_run.programs, strict=True):
        assert (work.block_flops, work.block_calls) == (program.work.block_flops, program.work.block_calls)
    assert all((tmp_path / "traces" / trace.path).exists() for trace in recorded.traces)
