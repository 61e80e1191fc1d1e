"""``--cuda-graph``: refused where it cannot be, and on GPUs a run like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ringprof.run import read_run
from tests.record.command import run


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "cpu"], "--cuda-graph needs GPUs"),
        pytest.param(["--hops", "copy"], "copied hops count on", marks=pytest.mark.gpu),
        pytest.param(["--controls"], "leave --controls out", marks=pytest.mark.gpu),
    ],
)
def test_what_a_graph_cannot_hold_is_refused(tmp_path: Path, options: list[str], said: str) -> None:
    if "--device" not in options and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    size = ["--seq", "2048", "--heads", "2", "--head-dim", "64"]
    ended = run(["record", "--strategy", "zigzag", "--cuda-graph", *size, *options], tmp_path)
    assert ended.returncode == 2 and said in ended.stderr


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_replays_are_timed_profiled_and_counted(tmp_path: Path) -> None:
    size = ["--seq", "4096", "--heads", "8", "--head-dim", "128", "--world", "2", "--iters", "5"]
    runs = []
    for options in (["--hops", "nccl"], ["--cuda-graph"]):
        ended = run(["record", "--strategy", "zigzag", *size, *options], tmp_path)
        assert ended.returncode == 0, ended.stderr
        runs.append(read_run(tmp_path / "traces" / "run.json"))
    plain, graphed = runs
    assert graphed.strategy is not None and graphed.strategy.cuda_graph
    assert graphed.verification is not None and graphed.verification.passed
    assert plain.work == graphed.work
    assert graphed.timings is not None and len(graphed.timings.iterations_ns[0]) == 5
