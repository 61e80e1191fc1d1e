"""Printed commands are options that `ringprof record` has, and flags that mean the same layout in Megatron-LM."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

pytest.importorskip("torch", reason="names of strategies")

from ringprof.cli.record import command as record
from ringprof.prediction.launch_commands import megatron_flags, record_command
from ringprof.prediction.network import Cluster
from ringprof.prediction.query import Query
from ringprof.run import Workload


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


@pytest.mark.parametrize(
    ("strategy", "params", "flags"),
    [
        ("megatron", {}, "--context-parallel-size 16 --cp-comm-type p2p"),
        ("allgather", {"layout": "zigzag"}, "--context-parallel-size 16 --cp-comm-type all_gather"),
        # Of 16 ranks four adjacent ones exchange heads, and four such groups form rings.
        ("usp", {"ulysses_degree": 4},
         "--context-parallel-size 16 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 4"),
        ("usp", {"ulysses_degree": 4, "placement": "ring-first"}, None),
        ("burst", {}, None),
    ],
)  # fmt: skip
def test_flags_of_megatron(strategy: str, params: dict[str, Any], flags: str | None) -> None:
    assert megatron_flags(query(strategy, **params)) == flags
