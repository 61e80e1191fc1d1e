"""`ringprof.prove` in a training loop: what is right passes, what is wrong is found, and nothing ends the loop."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="proofs need torch")

import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # what a first backward pass imports: once, and not in every forked rank
from torch.nn.parallel import DistributedDataParallel

import ringprof
from ringprof.errors import UsageError
from ringprof.strategies import create
from ringprof.training import prover
from ringprof.training.appended_log import line_hash
from tests.recording.test_check_model import SEQ, ids
from tests.recording.tiny_model import Model, dense, shifted, total_loss
from tests.strategies.ranks import run_ranks


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def train(target: Any, model: Any, strategy: Any, log: Path | None, *, steps: int = 6, **options: Any) -> Any:
    """Train ``model`` for some steps under a prover of ``target``; return the prover."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batch = ids()
    with ringprof.prove(target, every=2, log=log, **options) as running:
        for _ in range(steps):
            optimizer.zero_grad()
            logits = model(strategy.shard(batch), position_ids=strategy.positions(SEQ))
            total_loss(logits, strategy.shard(shifted(batch))).backward()
            optimizer.step()
    return running


def right(rank: int, folder: Path) -> None:
    prover.interval_for = lambda cost_ns, step_ns, every: every  # type: ignore[attr-defined]
    for name, kind, recompute in (
        ("zigzag", torch.float32, False), ("ulysses", torch.bfloat16, False), ("burst", torch.float32, True)
    ):  # fmt: skip
        torch.manual_seed(0)
        strategy = create(name)
        model: Any = Model(lambda q, k, v, strategy=strategy: strategy.attention(q, k, v), recompute=recompute).to(kind)
        running = train(model, DistributedDataParallel(model), strategy, folder / name)
        assert running.proofs == 3


@pytest.mark.processes
def test_bundled_strategies_in_a_model_are_proved(tmp_path: Path) -> None:
    run_ranks(2, right, tmp_path)
    for name in ("zigzag", "ulysses", "burst"):
        proofs = lines(tmp_path / name)
        assert [line["step"] for line in proofs] == [2, 4, 6]
        assert [line["call"] for line in proofs] == [0, 1, 0] and {line["calls"] for line in proofs} == {2}
        for line, previous in zip(proofs, [{"hash": ""}, *proofs], strict=False):
            assert line["equal"] and line["partition"] and line["position_ids"] and line["problem"] is None, line
            assert (
                line["batch"] and prover._verdict(line).startswith("equal") and "not seen" not in prover._verdict(line)
            )
            assert set(line["errors"]) == {"out", "dq", "dk", "dv"} and line["seq"] == SEQ
            assert all(size > 0 for size in line["sent_bytes"])
            # In contiguous shares, as with ulysses, rank 0 attends to no other rank's keys.
            assert line["peers"] == [int(name != "ulysses"), 1]
            assert line["previous"] == previous["hash"] and line["hash"] == line_hash(line)


def wrong(rank: int, folder: Path) -> None:
    prover.interval_for = lambda cost_ns, step_ns, every: every  # type: ignore[attr-defined]
    zigzag = create("zigzag")
    for name in ("alone", "positions", "batches", "function", "fails"):
        torch.manual_seed(0)
        model, batch = Model(dense), ids().roll(rank if name == "batches" else 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        target = {"alone": lambda q, k, v: dense(q, k, v, None), "function": lambda q, k, v: zigzag.attention(q, k, v)}
        with ringprof.prove(target.get(name, model), "zigzag", every=2, log=folder / name) as running:
            model.attention = running if name in target else lambda q, k, v: zigzag.attention(q, k, v)
            if name == "fails" and rank == 1:
                running._captured = None  # type: ignore[method-assign, assignment]
            for _ in range(2):
                positions = torch.arange(SEQ // 2) if name == "positions" else zigzag.positions(SEQ)
                total_loss(model(zigzag.shard(batch), position_ids=positions), zigzag.shard(shifted(batch))).backward()
                optimizer.step()
    dist.barrier()


@pytest.mark.processes
def test_what_is_wrong_is_found_and_a_rank_that_fails_ends_nothing(tmp_path: Path) -> None:
    run_ranks(2, wrong, tmp_path)
    (alone,), (positions,), (batches,), (function,), (fails,) = (
        lines(tmp_path / name) for name in ("alone", "positions", "batches", "function", "fails")
    )
    assert not alone["equal"] and alone["errors"]["out"]["rms"] > 0.01 and alone["sent_bytes"] == [0, 0]
    assert positions["equal"] and positions["partition"] and positions["position_ids"] is False
    assert batches["batch"] is False and prover._verdict(batches) == "the ranks have different batches"
    # A function's positions are those that the caller names: what the model was called with is not seen.
    assert function["position_ids"] is None and "; not seen: the model's position_ids" in prover._verdict(function)
    assert function["equal"] and all(size > 0 for size in function["sent_bytes"])
    assert fails["problem"].startswith("rank 1: the call was not captured: TypeError") and "equal" not in fails


def masked(rank: int, folder: Path) -> None:
    """Documents, window, sinks, softcap and a scale, in pieces of few rows."""
    prover.Prover._plan_first = lambda *_: 2  # type: ignore[method-assign]
    strategy = create("ring", kernel="reference")
    documents, sinks = torch.tensor([0, 5, 24, 32]), torch.nn.Parameter(torch.randn(4))
    model = Model(lambda q, k, v: strategy.attention(
        q, k, v, documents=documents, window_size=(6, 0), sinks=sinks, softcap=3.0, softmax_scale=0.7
    ))  # fmt: skip
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    dist.broadcast(sinks.data, 0)
    train(strategy, model, strategy, folder / "log", steps=2, memory_bytes=50_000)


@pytest.mark.processes
def test_masks_and_scores_are_those_of_the_call(tmp_path: Path) -> None:
    run_ranks(2, masked, tmp_path)
    (line,) = lines(tmp_path / "log")
    assert line["equal"] and set(line["errors"]) == {"out", "dq", "dk", "dv"}, line
    assert line["mask"] == "causal, 3 documents of 5 to 19 tokens, window of 7"


def test_the_first_proof_waits_until_its_estimate_is_one_percent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, steps_ns = create("ring"), [10**6]
    monkeypatch.setattr(prover, "median", lambda times: steps_ns[0])
    monkeypatch.setattr(prover, "_estimated_s", lambda *_: 0.03)
    for step_ns, first in ((10**12, 2), (10**6, 3000)):
        steps_ns[0] = step_ns
        running = train(strategy, Model(lambda q, k, v: strategy.attention(q, k, v)), strategy, None, steps=3)
        assert running.proofs == (first == 2) and running._next >= first


def test_the_estimate_grows_with_rows_times_keys() -> None:
    """4 query heads of 2^15 rows have 2^15 * 4 * 2^16 scores, in six products with 128 numbers each."""
    shape = (1, 2**15, 4, 128), (1, 2**15, 1, 128), (1, 2**15, 1, 128)
    of_q, of_k, of_v = map(torch.Size, shape)
    long = prover._estimated_s(of_q, of_k, of_v, torch.device("cpu"), 2)
    exact_and_rounded = 2 * 6 * 2 * 128 * (2**15 * 4 * 2**16)
    assert long >= exact_and_rounded / (1e9 * torch.get_num_threads())
    assert prover._estimated_s(of_q, of_k, of_v, torch.device("cpu"), 1) < 0.51 * long


def test_the_interval_grows_with_the_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast the machine is at that moment, proofs are as far apart as their cost says."""
    monkeypatch.setattr(prover.Prover, "_plan_first", lambda *_: 2)
    strategy = create("ring")
    running = train(strategy, Model(lambda q, k, v: strategy.attention(q, k, v)), strategy, tmp_path / "log", steps=9)
    proofs = lines(tmp_path / "log")
    assert running.proofs == len(proofs) and running.interval == proofs[-1]["interval"]
    assert all(proof["interval"] >= proof["took_ms"] / (0.01 * proof["step_ms"]) for proof in proofs)
    assert all(after["step"] - before["step"] >= before["interval"] for before, after in pairwise(proofs))


def test_a_block_without_a_proof_says_why(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prover.Prover, "_plan_first", lambda *_: 30)
    strategy = create("ring")
    train(strategy, Model(lambda q, k, v: strategy.attention(q, k, v)), strategy, None, steps=3)
    train(strategy, Model(lambda q, k, v: dense(q, k, v, None)), strategy, None, steps=3)
    with ringprof.prove(strategy), torch.no_grad():
        Model(lambda q, k, v: strategy.attention(q, k, v))(ids(), torch.arange(SEQ))
    assert [record.getMessage() for record in caplog.records] == [
        "no proof in 3 steps: the first was due after step 30, when its cost is 1 % of the time",
        "no proof in 3 steps: no call of an attention was seen",
        "no proof in 0 steps: no optimizer took a step, and step() was not called",
    ]


def test_what_no_proof_can_have_is_refused(tmp_path: Path) -> None:
    refused: list[dict[str, Any]] = [
        {"attention": 3}, {"layout": "spiral"}, {"log": tmp_path}, {"every": 0}, {"log": tmp_path / "none" / "log"}
    ]  # fmt: skip
    for options in refused:
        with pytest.raises(UsageError), ringprof.prove(**{"attention": dense, **options}):
            pass
