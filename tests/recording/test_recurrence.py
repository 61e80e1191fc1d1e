"""Recurrences through the recorder: refusals, FLOPs, baselines, the check after timing, and one recording."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="recording needs torch")

import msgspec
import torch

import ringprof
from ringprof import cli
from ringprof.errors import VerificationError
from ringprof.iteration.recurrence import RecurrenceResults, RecurrenceShard, recurrence_bodies, single_rank_strategy
from ringprof.iteration.shard import counted_work, reset_counts, row_sums
from ringprof.proof.verify_recurrence import verify_recurrence, verify_timed_recurrence
from ringprof.run import read_run
from ringprof.strategies.recurrent.kernel import Inputs
from ringprof.strategies.recurrent.kernels import choose_kernel
from ringprof.strategies.recurrent.registry import STRATEGIES
from ringprof.strategies.transport.baselines import NullTransport
from ringprof.strategies.transport.communicator import Communicator
from ringprof.workload.recurrences import CHUNK, RECURRENCES, forward_flops_per_token
from ringprof.workload.workload import Workload
from tests.recording.command import HANGS_S, RINGPROF
from tests.strategies.ranks import run_ranks

CPU = torch.device("cpu")
WORK = Workload(seq=64, heads=4, kv_heads=2, head_dim=8, v_head_dim=12, dtype="fp32", operator="gdn")
RECORD = ["record", "--operator", "gdn", "--strategy", "state-scan", "--seq", "64", "--device", "cpu", "--world", "2"]


@pytest.mark.parametrize("fields", [{"window": 8}, {"causal": False}, {"softcap": 2.0}, {"kv_heads": 3}])
def test_a_workload_of_a_recurrence_has_no_scores(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"--operator gdn|--kv-heads 3 does not divide the 4 heads"):
        msgspec.structs.replace(WORK, **fields)


def test_an_earlier_workload_is_one_of_attention() -> None:
    earlier = msgspec.json.decode(b'{"seq": 64, "heads": 4, "kv_heads": 4, "head_dim": 8}', type=Workload)
    assert (earlier.operator, earlier.recurrent, earlier.conv_width) == ("attention", False, None)


@pytest.mark.parametrize("delta_rule", [False, True])
def test_flops_are_those_of_the_products_of_a_chunk(delta_rule: bool) -> None:
    keys, values, products = 16, 24, list[tuple[int, int, int]]()
    # Rows, columns and inner size of each product; those over pairs have half of their square.
    pairs = CHUNK * CHUNK // 2
    counted = pairs * (keys + values) * 2  # scores, and their product with the values
    products += [(CHUNK, values, keys), (keys, values, CHUNK)]  # read the state, update it
    if delta_rule:
        counted += pairs * (2 * keys + values) * 2  # keys with keys, W and U of the WY representation
        products += [(CHUNK, values, keys)]  # W with the state
    counted += sum(2 * rows * columns * inner for rows, columns, inner in products)
    assert CHUNK * forward_flops_per_token(keys, values, delta_rule=delta_rule) == counted


def test_flops_are_linear_in_tokens_and_count_both_passes() -> None:
    once = msgspec.structs.replace(WORK, backward=False).model_flops()
    assert WORK.model_flops() == WORK.exact_flops() == 3 * once
    assert WORK.at(128).model_flops() == 2 * WORK.model_flops()
    assert once == 64 * 4 * forward_flops_per_token(8, 12, delta_rule=True)


def baselines(rank: int, name: str) -> dict[str, Any]:
    """Run one body of each kind on a rank; return FLOPs, calls and bytes sent by channel of each."""
    strategy = STRATEGIES[name](Communicator(), "reference")
    silent = STRATEGIES[name](Communicator(connect=NullTransport), "reference")
    shard = RecurrenceShard.create(strategy, msgspec.structs.replace(WORK, conv_width=4), CPU)
    bodies, flops = recurrence_bodies(shard, silent)
    counts: dict[str, Any] = {"solo_flops": flops}
    for kind, body in zip(("ordinary", "solo", "compute_only", "communication_only"), bodies, strict=True):
        reset_counts([strategy, silent])
        body()
        counts[kind] = [
            {entry.channel: entry.sent_bytes for entry in counted_work([each]).sent or ()}
            for each in (strategy, silent)
        ]  # fmt: skip
    return counts


@pytest.mark.processes
@pytest.mark.parametrize("name", STRATEGIES)
def test_baselines_leave_out_what_they_say(name: str) -> None:
    for counts in run_ranks(2, baselines, name):
        assert counts["solo_flops"] == WORK.model_flops() // 2
        assert counts["ordinary"][0]
        assert counts["communication_only"] == counts["ordinary"]
        assert counts["solo"] == counts["compute_only"] == [{}, {}]


def damaged(rank: int, name: str, operator: Any, damage: str) -> str:
    """Verify the last of two iterations after one rank's tensor ``damage`` is changed; return the error."""
    strategy = STRATEGIES[name](Communicator(), "reference")
    # Gradients of parameters are sums over both batch entries.
    work = msgspec.structs.replace(WORK, operator=operator, conv_width=3, batch=2)
    before = verify_recurrence(strategy, work, CPU)
    shard = RecurrenceShard.create(strategy, work, CPU)
    first, last = shard.run_iteration(), shard.run_iteration()
    assert isinstance(last, RecurrenceResults)
    if rank == 1 and damage in last.gradients:
        last = replace(last, gradients={**last.gradients, damage: last.gradients[damage] * 1.05})
    if rank == 1 and damage == "out":
        last = replace(last, out=last.out * 1.05)
    try:
        timed = verify_timed_recurrence(shard, last, row_sums(first.out), before).timed
    except VerificationError as error:
        return str(error)
    assert timed is not None and timed.places == 32
    return ""


@pytest.mark.processes
@pytest.mark.parametrize("operator", ["gdn", "mamba2"])
def test_the_check_after_timing_finds_a_tensor_that_is_off(operator: Any) -> None:
    gates = ["dg", "dbeta"] if operator == "gdn" else ["ddt", "da", "dd"]
    for damage in ["", "out", "dchannels", "dweight", *gates]:
        for text in run_ranks(2, damaged, "state-scan", operator, damage):
            assert (f"{damage} is off by" in text) == bool(damage), (damage, text)


@pytest.mark.processes
def test_a_recording_is_verified_and_reported(tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "run.json"
    options = ["--heads", "2", "--head-dim", "8", "--conv-width", "3", "--documents", "20,44", "--dtype", "fp32"]
    assert cli.run([*RECORD, *options, "--controls", "--iters", "1", "-o", str(output)]) == 0
    run = read_run(output)
    assert run.workload is not None and run.verification is not None and run.strategy is not None
    assert (run.workload.operator, run.workload.conv_width, run.kernel) == ("gdn", 3, "reference")
    errors = {"out", "final_state", "dchannels", "dweight", "dg", "dbeta", "dinitial_state"}
    assert set(run.verification.errors) == errors and run.verification.timed is not None
    assert set(run.verification.timed.errors) == errors - {"final_state", "dinitial_state"}
    assert run.block_flops() == dict.fromkeys((0, 1), run.workload.model_flops() // 2)
    assert run.controls is not None and run.controls.communication_only_ns is not None
    assert {entry.channel for work in run.work or () for entry in work.sent or ()} >= {"halo", "state_1"}
    capsys.readouterr()
    assert cli.run(["report", str(output), "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["run"]["workload"]["operator"] == "gdn"
    assert "attention" not in " ".join(report["summary"]["verdict"])
    for command in (
        ["report", str(output), "--show", "steps,waterfall"], ["compare", str(output), str(output)],
        ["report", str(output), "--html", str(tmp_path / "page.html")],
        ["plot", "timeline", str(output), "-o", str(tmp_path / "plot.png")], ["report", str(tmp_path), "--csv", "runs"],
        ["predict", "--replay", str(output), "--link", "intra-node=2x"],
        ["export", str(output), "-o", str(tmp_path / "x.json")],
    ):  # fmt: skip
        code = cli.run(command)
        captured = capsys.readouterr()
        assert code == 0 or captured.err.count("\n") == 1, (command, captured.err)
    assert "parts of the recurrence" in (cli.run(["report", str(output)]), capsys.readouterr().out)[1]
    assert len(ringprof.load(output).breakdown()) == 2
    assert set(RECURRENCES) == {"gdn", "mamba2", "simple-gla", "gla"}


@pytest.mark.gpu
@pytest.mark.processes
@pytest.mark.skipif(find_spec("fla") is None, reason="needs flash-linear-attention")
@pytest.mark.parametrize("strategy", [*STRATEGIES, "fla/cp"])
def test_a_recording_on_gpus_is_verified(strategy: str, tmp_path: Path) -> None:
    x = torch.zeros(1, 64, 4, 64, device="cuda", dtype=torch.bfloat16)
    try:
        choose_kernel("fla", Inputs.of([x, x, x, x[..., :1].float(), x[..., 0].float()], 1.0))
    except ValueError as refusal:
        pytest.skip(str(refusal))
    output = tmp_path / "run.json"
    options = ["--strategy", strategy, "--seq", "4096", "--heads", "4", "--iters", "2", "-o", str(output)]
    assert subprocess.run([*RINGPROF, "record", "--operator", "gdn", *options], timeout=HANGS_S).returncode == 0
    run = read_run(output)
    assert run.verification is not None and run.verification.timed is not None
    assert run.kernel == (None if strategy == "fla/cp" else "fla")


def test_an_iteration_after_the_capture_is_a_replay_with_its_results() -> None:
    shard = RecurrenceShard.create(single_rank_strategy("reference"), WORK, CPU, cuda_graph=True)
    results = shard.run_iteration()
    replays: list[int] = []
    shard.graph_results.append(results)
    shard.graph = SimpleNamespace(replay=lambda: replays.append(1))  # type: ignore[assignment]
    assert shard.cuda_graph and shard.run_iteration() is results and replays == [1]
