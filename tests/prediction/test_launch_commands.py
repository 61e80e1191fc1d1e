"""Printed commands are options that `ringprof record` has, and flags that mean the same layout in Megatron-LM."""

from __future__ import annotations

import ast
import shlex
from typing import Any

import pytest

pytest.importorskip("torch", reason="names of strategies")

from ringprof.cli.record import command as record
from ringprof.prediction.advise import framework_flags, record_command
from ringprof.prediction.network import Cluster
from ringprof.prediction.query import Query
from ringprof.workload.workload import Workload


def query(strategy: str = "usp", hosts: int = 2, workload: Workload | None = None, **params: Any) -> Query:
    workload = workload or Workload(seq=65536, heads=32, kv_heads=8, head_dim=64, causal=False, backward=False, batch=2)
    return Query(strategy, workload, Cluster(hosts, 8, nic_gbit=400.0), "cudnn", "nccl", params)


@pytest.mark.parametrize("hosts", [1, 2])
def test_record_reads_its_own_command(hosts: int) -> None:
    """The words after ``record`` are parsed by the command itself."""
    command = record_command(query(hosts=hosts, ulysses_degree=4))
    assert command is not None
    launcher, _, words = command.partition("ringprof record ")
    assert ("torchrun --nnodes 2 --nproc-per-node 8" in launcher) == (hosts == 2)
    values = record.make_context("record", shlex.split(words)).params
    expected = {
        "strategy": "usp", "seq": 65536, "heads": 32, "kv_heads": 8, "head_dim": 64, "batch": 2, "causal": False,
        "forward_only": True, "kernel": "cudnn", "hops": "nccl",
    }  # fmt: skip
    assert {name: values[name] for name in expected} == expected
    assert "ulysses_degree=4" in words and (values["world"] == 8) == (hosts == 1)


def test_masks_have_no_command() -> None:
    windowed = Workload(seq=65536, heads=32, kv_heads=8, head_dim=64, window=4096)
    assert record_command(query(workload=windowed, ulysses_degree=4)) is None


MEGATRON = {"--context-parallel-size": 1, "--cp-comm-type": 1, "--hierarchical-context-parallel-sizes": 2}
"""Numbers of values. Source: NVIDIA/Megatron-LM, megatron/training/arguments.py (core 0.12); ``--cp-comm-type`` goes to
Transformer Engine, whose names are ``p2p``, ``all_gather``, ``a2a`` and ``a2a+p2p``."""
TORCHTITAN = {"context_parallel_degree", "context_parallel_load_balancer"}
"""Fields of ParallelismConfig in torchtitan/config/configs.py (0.3.0), as ``--parallelism.NAME``; the balancer is
``headtail``, ``ptrr`` or None."""
TRANSFORMER_ENGINE = ("cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type")
"""Parameters of set_context_parallel_group, transformer_engine/pytorch/attention/dot_product_attention (2.20)."""


@pytest.mark.parametrize(
    ("strategy", "params", "comm_type"),
    [
        ("megatron", {}, "p2p"), ("allgather", {"layout": "zigzag"}, "all_gather"), ("ulysses", {}, "a2a"),
        ("usp", {"ulysses_degree": 4}, "a2a+p2p"), ("usp", {"ulysses_degree": 4, "placement": "ring-first"}, None),
        ("burst", {}, None),
    ],
)  # fmt: skip
def test_flags_are_those_that_the_programs_have(strategy: str, params: dict[str, Any], comm_type: str | None) -> None:
    flags = framework_flags(query(strategy, **params))
    if comm_type is None:
        assert flags == {}
        return
    words = shlex.split(flags["Megatron-LM"])
    values: dict[str, list[str]] = {}
    for word in words:
        values.setdefault(word, []) if word.startswith("--") else values[[*values][-1]].append(word)
    assert {name: len(texts) for name, texts in values.items()}.items() <= MEGATRON.items()
    assert values["--context-parallel-size"] == ["16"] and values["--cp-comm-type"] == [comm_type]
    # Of 16 ranks four adjacent ones exchange heads, and four such groups form rings.
    assert values.get("--hierarchical-context-parallel-sizes") == (["4", "4"] if strategy == "usp" else None)
    call = ast.parse(flags["Transformer Engine"], mode="eval").body
    assert (
        isinstance(call, ast.Call)
        and len(call.args) == 3
        and [word.arg for word in call.keywords] == [TRANSFORMER_ENGINE[3]]
    )
    assert ast.literal_eval(call.keywords[0].value) == comm_type
    assert ("torchtitan" in flags) == (strategy == "allgather")
    if "torchtitan" in flags:
        titan = shlex.split(flags["torchtitan"])
        assert dict(zip(titan[::2], titan[1::2], strict=True)) == {
            "--parallelism.context_parallel_degree": "16", "--parallelism.context_parallel_load_balancer": "headtail"
        }  # fmt: skip
        assert {name.removeprefix("--parallelism.") for name in titan[::2]} == TORCHTITAN
