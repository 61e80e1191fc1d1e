"""`capture` in a user's own program: groups of ranks, strategies, steps and layers, and what a failure leaves."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("torch", reason="capturing needs torch")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import ringprof
from ringprof.api import Analysis
from ringprof.errors import RecordError, UsageError
from ringprof.record import group_ranks
from ringprof.run import Workload, read_run
from ringprof.strategies import create
from tests.strategies.ranks import run_ranks

SEQ, HEADS, HEAD_DIM = 128, 4, 16
WORKLOAD = Workload(seq=SEQ, heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIM, dtype="fp32")


def step(strategies: list[Any], times: int = 1) -> None:
    """Forward and backward through a layer a strategy."""
    for _ in range(times):
        x = strategies[0].shard(torch.randn(1, SEQ, HEADS, HEAD_DIM)).requires_grad_()
        out = x
        for strategy in strategies:
            out = strategy.attention(out, out, out)
        out.sum().backward()


def loaded(folder: Path) -> Analysis:
    found = ringprof.load(folder / "run.json")
    assert isinstance(found, Analysis)
    return found


def two_layers(rank: int, folder: Path) -> None:
    strategies = [create("zigzag"), create("zigzag")]
    step(strategies)
    workload = Workload(seq=SEQ, heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIM, dtype="fp32", layers=2, steps=3)
    with ringprof.capture(folder, workload, strategy=strategies):
        step(strategies, 3)


def test_layers_steps_and_the_strategys_own_work_enter_the_run(tmp_path: Path) -> None:
    """Two layers, three steps: six times the FLOPs of one call, counted by the kernels and said by the workload."""
    run_ranks(2, two_layers, tmp_path / "mine")
    run = read_run(tmp_path / "mine/run.json")
    once = 4 * (SEQ * (SEQ + 1) // 2) * HEADS * HEAD_DIM * 7 // 2
    assert run.block_flops() == {0: 3 * once, 1: 3 * once} and run.workload is not None
    assert run.workload.exact_flops() == 6 * once
    assert run.kernel == "cpu-flash" and run.strategy is not None and run.strategy.name == "zigzag"
    assert run.strategy.target == "ringprof.strategies.zigzag:Zigzag" and run.strategy.layout == "zigzag"
    assert run.work is not None
    sent = {(entry.channel, entry.phase): entry for entry in run.work[0].sent or []}
    kv_bytes = 2 * (SEQ // 2) * HEADS * HEAD_DIM * 4
    assert (sent["kv", "forward"].count, sent["kv", "forward"].sent_bytes) == (6, 6 * kv_bytes)
    assert sent["kv", "forward"].to == 1 and run.profiled is not None
    slowest_ns = max(times[0] for times in run.profiled.iterations_ns)
    rates = loaded(tmp_path / "mine").summary.rates
    model = 6 * 4 * SEQ**2 * HEADS * HEAD_DIM / 2 * 3.5
    assert rates.tflops == pytest.approx(model / 2 / slowest_ns / 1e3)
    assert "under the profiler" in loaded(tmp_path / "mine").to_terminal()


def each_group(rank: int, folder: Path, mesh: bool) -> None:
    if mesh:
        group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))["cp"]
    else:
        group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    strategy = create("zigzag", group=group)
    step([strategy])
    if rank >= 2:
        # The other group never enters.
        with ringprof.capture(folder, WORKLOAD, group=group, strategy=strategy):
            step([strategy])


@pytest.mark.parametrize("mesh", [False, True])
def test_a_group_captures_alone_and_its_ranks_keep_their_numbers(tmp_path: Path, mesh: bool) -> None:
    run_ranks(4, each_group, tmp_path / "mine", mesh)
    run = read_run(tmp_path / "mine/run.json")
    assert run.topology.world_size == 2 and run.topology.ranks == [2, 3]
    assert [(trace.rank, trace.path) for trace in run.traces] == [(2, "rank2.json.gz"), (3, "rank3.json.gz")]
    assert [work.sent and work.sent[0].to for work in run.work or []] == [3, 2]
    found = loaded(tmp_path / "mine")
    assert [rank.rank for rank in found.attribution.ranks] == [2, 3] and found.summary.rates.tflops is not None
    assert not [warning for warning in found.attribution.warnings if warning.code == "missing_ranks"]
    assert found.to_terminal().startswith("2 ranks, host")


def outside(rank: int, folder: Path) -> str:
    group = dist.new_group([0, 1])
    if rank < 2:
        with ringprof.capture(folder, group=group):
            dist.all_reduce(torch.ones(8), group=group)
        return ""
    with pytest.raises(UsageError) as refused, ringprof.capture(folder, group=group):
        raise AssertionError("entered")
    return str(refused.value)


def test_a_rank_outside_the_group_is_refused(tmp_path: Path) -> None:
    said = run_ranks(3, outside, tmp_path / "mine")
    assert said == ["", "", "rank 2 is not in the group: only its members may take part"]


def several_dimensions(rank: int, folder: Path) -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    with pytest.raises(UsageError) as refused, ringprof.capture(folder, group=mesh):
        raise AssertionError("entered")
    return str(refused.value)


def test_a_mesh_of_several_dimensions_is_refused(tmp_path: Path) -> None:
    said = "a DeviceMesh of 2 dimensions is no group: name one, as in mesh['cp']"
    assert run_ranks(2, several_dimensions, tmp_path / "mine") == [said, said]


def beside_another(rank: int, folder: Path) -> list[str]:
    """Rank 1's program is profiled already; then each captures inside a capture."""
    said = []
    own = profile(activities=[ProfilerActivity.CPU], acc_events=True) if rank else nullcontext()
    with own, pytest.raises(UsageError) as refused, ringprof.capture(folder / "mine"):
        raise AssertionError("entered")
    said.append(str(refused.value))
    with ringprof.capture(folder / "outer"):
        with pytest.raises(UsageError) as refused, ringprof.capture(folder / "inner"):
            raise AssertionError("entered")
        dist.all_reduce(torch.ones(8))
    return [*said, str(refused.value)]


def test_a_capture_beside_another_profiler_is_refused_on_all_ranks(tmp_path: Path) -> None:
    said = run_ranks(2, beside_another, tmp_path)
    busy = "rank {} has a profiler at work already (torch.profiler, or another capture): end it, there can be but one"
    assert said == [[busy.format(1), busy.format(0)]] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["outer"]


@pytest.mark.parametrize(
    ("place", "given", "said"),
    [
        ("mine", {"workload": {"seq": 64}}, "workload is a ringprof.Workload, not {'seq': 64}"),
        ("mine", {"strategy": "zigzag"}, "strategy is what ringprof.strategies.create returns"),
        ("file/mine", {}, "file/mine: cannot write the run here: .*file is no folder"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_the_block(
    tmp_path: Path, place: str, given: dict[str, Any], said: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=said), ringprof.capture(tmp_path / place, **given):
        raise AssertionError("entered")


def nobody_else_comes(rank: int, folder: Path) -> list[str]:
    group = dist.new_group([0, 1])
    if rank == 0:
        # As where another rank's program has ended: it answers no message.
        with (
            patch.object(group_ranks, "gather_bytes", side_effect=RuntimeError("nobody answers")),
            pytest.raises(RecordError, match=r"mine: no run: another rank has ended, or .*nobody answers"),
            ringprof.capture(folder / "mine", group=group),
        ):
            raise AssertionError("entered")
    return os.listdir(folder)


def test_a_failed_opening_leaves_nothing_behind(tmp_path: Path) -> None:
    assert run_ranks(2, nobody_else_comes, tmp_path)[0] == []


def raises(rank: int, folder: Path) -> str:
    """What each rank raises where the block fails on rank 1, which then takes no part in anything."""
    store = dist.distributed_c10d._get_default_store()

    def closed(*_: Any, **__: Any) -> None:
        store.wait(["gone"])
        raise RuntimeError("Connection closed by peer")

    try:
        with patch("ringprof.record.capture._result", closed), ringprof.capture(folder / "mine"):
            if rank == 1:
                raise ValueError("loss is\nnot finite")
    except (ValueError, RecordError) as error:
        store.set("gone", "")
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_an_error_in_one_ranks_block_is_told_to_the_others(tmp_path: Path) -> None:
    first, second = run_ranks(2, raises, tmp_path)
    assert second == "ValueError: loss is\nnot finite"
    left = "rank 1 left the block with ValueError: loss is not finite (Connection closed by peer)"
    assert first == f"RecordError: {tmp_path / 'mine'}: no run: {left}"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("named", "by_nccl", "used", "device"),
    [("nccl", True, True, "cuda"), ("cpu:gloo,cuda:nccl", True, True, "cuda"), ("gloo", False, True, "cpu"),
     ("undefined", True, True, "cuda"), ("undefined", True, False, "cpu"), ("undefined", False, False, "cpu")],
)  # fmt: skip
def test_the_device_is_that_of_the_groups_backend(
    named: str, by_nccl: bool, used: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """init_device_mesh names no backend: then each sort of device has its own, and the program's choice tells."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for name, value in {
        "get_rank": 0,
        "get_world_size": 1,
        "get_process_group_ranks": [0],
        "get_backend": named,
    }.items():
        monkeypatch.setattr(torch.distributed, name, lambda *_, value=value: value)
    monkeypatch.setattr(group_ranks, "by_nccl", lambda _: by_nccl)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert group_ranks.GroupRanks(object()).device.type == device
