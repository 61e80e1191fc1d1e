"""Predictions of other projects' strategies: torch's own loop in a dry run, and strategies that stand for others."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch", reason="a dry run needs it")

from dev.benchmarks import prediction
from ringprof import cli
from ringprof.dryrun.schedule import AttentionOp, CommStart
from ringprof.errors import UnsupportedWorkloadError
from ringprof.prediction.calibration import read_calibration
from ringprof.prediction.fit import schedule_of_run
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import predict, warnings_of
from ringprof.prediction.query import Query
from ringprof.prediction.schedules import schedule, schedule_of
from ringprof.run import Run, StrategyUsed, read_run
from ringprof.strategies.catalog import PEERS
from ringprof.workload.workload import Workload

RUN = Path(__file__).parents[2] / "traces" / "h200x4-zigzag-65536"
SMALL = Workload(seq=512, heads=4, kv_heads=2, head_dim=16)


@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
@pytest.mark.parametrize("causal", [True, False])
def test_torchs_loop_sends_what_its_source_says(rotate: str, causal: bool) -> None:
    """K and V (bf16) are gathered once per pass, or rotated N - 1 times; dK and dV (fp32) are rotated N times."""
    size, local = 4, SMALL.seq // 4
    programs = schedule(
        "torch-cp", msgspec.structs.replace(SMALL, causal=causal), size, params={"rotate": rotate}
    ).programs
    kv_bytes = 2 * 2 * local * SMALL.kv_heads * SMALL.head_dim
    for program in programs:
        sent = [(op.channel, op.operation, op.messages) for op in program.ops if isinstance(op, CommStart)]
        per_pass = {"allgather": 1, "alltoall": size - 1}[rotate]
        keys = ("kv", {"allgather": "all_gather", "alltoall": "send_recv"}[rotate], (kv_bytes,))
        assert sent.count(keys) == 2 * per_pass
        assert sent.count(("dkv", "send_recv", (2 * kv_bytes,))) == size
        assert len(sent) == 2 * per_pass + size
        blocks = [op for op in program.ops if isinstance(op, AttentionOp)]
        assert [op.phase for op in blocks] == ["forward"] * size + ["backward"] * size
    pairs = SMALL.seq * (SMALL.seq + 1) // 2 if causal else SMALL.seq**2
    assert sum(program.work.block_flops or 0 for program in programs) == 14 * SMALL.heads * SMALL.head_dim * pairs


def test_errors_on_measured_peers() -> None:
    """Nothing was fitted to them. The shorter ones depend on the host, whose times with their code are unknown."""
    scores = list(prediction.peers())
    long = [score for score in scores if re.search("-(65536|131072)-", score.name)]
    assert len(scores) == 15 and len(long) == 8
    assert all(-0.052 < score.error < 0 and score.inside for score in long)
    assert sum(bool(score.inside) for score in scores) == 10 and max(abs(score.error) for score in scores) < 0.23


def peer_run(name: str, **params: Any) -> Run:
    run = read_run(RUN / "run.json")
    assert run.strategy is not None and run.workload is not None
    used = StrategyUsed(name=name, target="", params=params, hops="nccl")
    return msgspec.structs.replace(run, strategy=used, kernel="flash-attn" if "flash" in name else "cudnn")


@pytest.mark.parametrize("name", sorted(PEERS))
def test_runs_of_peers_are_predicted_or_refused_in_a_true_line(name: str) -> None:
    run = peer_run(name, **({"grad_wire": "fp32", "rotate": "alltoall"} if name == "torch-cp" else {}))
    query = Query.of_run(run)
    machine = read_calibration("h200")
    if name.endswith("llama3"):
        with pytest.raises(UnsupportedWorkloadError, match="no bundled strategy sends alike"):
            predict(query, machine, schedule_of)
    else:
        result = predict(query, machine, schedule_of)
        said = [warning["message"] for warning in warnings_of(result) if warning["code"] == "stand_in"]
        assert said == (
            [] if name == "torch-cp"
            else [f"{name} is predicted as ringprof's {result.query.strategy}: its own code cannot be dry-run"]
        )  # fmt: skip
    with pytest.raises(UnsupportedWorkloadError, match=f"^{re.escape(name)} is another project's code"):
        schedule_of_run(run)


def test_peers_have_no_hops_by_copy_engine() -> None:
    query = Query("ring-flash-attn/zigzag", SMALL, Cluster(1, 4), "flash-attn", "copy")
    with pytest.raises(UnsupportedWorkloadError, match="no hops by copy engine"):
        predict(query, read_calibration("h200"), schedule_of)
    assert predict(
        replace(query, hops="auto", workload=msgspec.structs.replace(SMALL, seq=16384, head_dim=128)),
        read_calibration("h200"), schedule_of,
    ).query.hops == "nccl"  # fmt: skip


def test_a_stand_ins_parameters_are_not_those_of_the_peer() -> None:
    query = Query("ring-flash-attn/zigzag", SMALL, Cluster(1, 4), "flash-attn", params={"grad_wire": "input"})
    with pytest.raises(UnsupportedWorkloadError, match="'ring-flash-attn/zigzag' has no parameter 'grad_wire'"):
        predict(query, read_calibration("h200"), schedule_of)


def test_the_command_says_what_stands_for_a_peer(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.run([
        "predict", "--strategy", "ring-flash-attn/zigzag", "--seq", "64k", "--gpus-per-node", "4", "--machine", "h200",
        "--kernel", "flash-attn",
    ])  # fmt: skip
    text = capsys.readouterr().out
    assert code == 0 and "ring-flash-attn/zigzag is predicted as ringprof's zigzag" in " ".join(text.split())
    assert "--hops copy" not in text
