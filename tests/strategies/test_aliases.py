"""Other names of strategies, layouts and documents mean the same as ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ringprof
from ringprof.cli import run
from ringprof.cli.values import INFERENCE, STRATEGIES, Known, StrategyName
from ringprof.errors import UnknownStrategyError, UsageError
from ringprof.prediction.advise import advise
from ringprof.strategies import Unsupported, create, find, names
from ringprof.strategies.registry import parse_parameter
from ringprof.workload.workload import Workload
from tests.strategies.cases import WorkloadShard, inputs
from tests.strategies.ranks import run_ranks

TRANSFORMER_ENGINE = {"p2p": "megatron", "a2a": "ulysses", "all_gather": "allgather", "a2a+p2p": "usp"}


@pytest.mark.parametrize(("alias", "name"), TRANSFORMER_ENGINE.items())
def test_transformer_engines_names(alias, name):
    assert find(alias) is find(name)
    assert type(create(alias)) is type(create(name))
    assert StrategyName(STRATEGIES).convert(f" {alias} ", None, None) == name
    assert alias not in names()


def test_other_names_are_left_as_they_are():
    assert StrategyName(STRATEGIES + INFERENCE).convert("json:Class", None, None) == "json:Class"
    # Not a list of strategies.
    assert Known(["auto"]).convert("p2p", None, None) == "p2p"


def test_advise_takes_the_aliases(monkeypatch):
    queries: list[Any] = []
    monkeypatch.setattr("ringprof.prediction.advise.candidates", lambda *_: iter(queries))
    nothing: Any = None
    with pytest.raises(UnknownStrategyError, match="no strategy 'megatron'"):
        workload = Workload(seq=4096, heads=8, kv_heads=8, head_dim=64)
        advise(workload, nothing, nothing, nothing, memory_bytes=1, strategies=["p2p"])


def test_striped_is_the_stripe_layout():
    assert create("usp", layout="striped").parameters["layout"] == "stripe"
    assert parse_parameter(find("usp").load(), "usp", "layout", "striped") == "stripe"
    with pytest.raises(Unsupported, match="layout"):
        create("allgather", layout="striped")


def test_check_takes_the_striped_layout(monkeypatch):
    requests = []

    def keep(request: Any) -> None:
        requests.append(request)
        raise UsageError("not run")

    monkeypatch.setattr("ringprof.cli.check.run_check", keep)
    assert run(["check", "json:function", "--layout", "striped"]) == 2
    monkeypatch.setattr("ringprof.proof.on_ranks.check_on_ranks", lambda _, request, *others: keep(request))
    with pytest.raises(UsageError):
        ringprof.check(lambda q, k, v: q, "striped")
    assert [request.layout for request in requests] == ["stripe", "stripe"]


def test_cu_seqlens_are_the_documents():
    strategy = create("zigzag")
    q, k, v, _ = inputs(WorkloadShard(seq=16))
    bounds = torch.tensor([0, 5, 16], dtype=torch.int32)
    out = strategy.attention(q, k, v, cu_seqlens=bounds)
    assert torch.equal(out, strategy.attention(q, k, v, documents=bounds))
    assert not torch.equal(out, strategy.attention(q, k, v))
    with pytest.raises(Unsupported, match=r"^documents and cu_seqlens are two names of the same argument: give one"):
        strategy.attention(q, k, v, documents=bounds, cu_seqlens=bounds)


def both_names(rank: int) -> bool:
    q, k, v, _ = inputs(WorkloadShard(seq=16, heads=4, kv_heads=4))
    # The ranks ask for the same, by two names.
    strategy = create("p2p" if rank else "megatron")
    mine = [strategy.shard(x, documents=[0, 5, 16]) for x in (q, k, v)]
    call = {"cu_seqlens": [0, 5, 16]} if rank else {"documents": [0, 5, 16]}
    return bool(strategy.attention(*mine, **call).isfinite().all())


@pytest.mark.processes
def test_ranks_may_ask_by_either_name():
    assert run_ranks(2, both_names) == [True, True]
