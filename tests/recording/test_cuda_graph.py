"""``--cuda-graph``: refused where it cannot be, and on GPUs a run like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ringprof.run import read_run
from tests.recording.command import run

REFUSED = ["record", "--strategy", "zigzag", "--cuda-graph", "--seq", "2048", "--heads", "2", "--head-dim", "64"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(
    ("options", "said"),
    [(["--hops", "copy"], "use --hops nccl"), (["--controls"], "leave --controls out")],
)
def test_options_that_a_cuda_graph_cannot_capture_are_refused(tmp_path: Path, options: list[str], said: str) -> None:
    ended = run([*REFUSED, *options], tmp_path)
    assert ended.returncode == 2 and said in ended.stderr


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(
    "what",
    [
        "--strategy zigzag",
        "--operator simple-gla --strategy state-ring --conv-width 4 --documents lognormal:mean=1024,sigma=1.2,seed=7",
        # The reference of the delta rule is slow.
        pytest.param("--operator gdn --strategy state-scan --seq 1024", marks=pytest.mark.long),
        pytest.param("--operator gla --strategy state-a2a", marks=pytest.mark.long),
    ],
)
def test_graph_replays_are_timed_profiled_and_counted(what: str, tmp_path: Path) -> None:
    size = ["--seq", "4096", "--heads", "16", "--head-dim", "128", "--world", "2", "--iters", "5"]
    runs = []
    for options in ([] if "--operator" in what else ["--hops", "nccl"], ["--cuda-graph"]):
        ended = run(["record", *size, *what.split(), *options], tmp_path)
        assert ended.returncode == 0, ended.stderr
        runs.append(read_run(tmp_path / "traces" / "run.json"))
    plain, graphed = runs
    assert graphed.strategy is not None and graphed.strategy.cuda_graph
    assert graphed.verification is not None and graphed.verification.passed
    assert plain.work == graphed.work
    assert graphed.timings is not None and len(graphed.timings.iterations_ns[0]) == 5
