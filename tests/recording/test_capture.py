"""`capture` in a user's own program: groups of ranks, strategies, steps and layers, and what a failure leaves."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("torch", reason="capturing needs torch")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import ProfilerActivity, profile

import ringprof
from ringprof.errors import UsageError
from ringprof.ranks import process_group
from ringprof.recording.recording import RankResult, build_run
from ringprof.results.analysis import Analysis
from ringprof.run import read_run
from ringprof.strategies import create
from ringprof.training import capture as recorder
from ringprof.workload.workload import Workload
from tests.strategies.ranks import run_ranks

SEQ, HEADS, HEAD_DIM = 128, 4, 16
WORKLOAD = Workload(seq=SEQ, heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIM, dtype="fp32")


def step(strategies: list[Any], times: int = 1) -> None:
    """Run forward and backward through one layer per strategy."""
    for _ in range(times):
        x = strategies[0].shard(torch.randn(1, SEQ, HEADS, HEAD_DIM)).requires_grad_()
        out = x
        for strategy in strategies:
            out = strategy.attention(out, out, out)
        out.sum().backward()


@contextmanager
def warnings_of_capture() -> Iterator[list[str]]:
    """Collect what the logger of `capture` says on this rank."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ringprof.capture")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def loaded(folder: Path) -> Analysis:
    analysis = ringprof.load(folder / "run.json")
    assert isinstance(analysis, Analysis)
    return analysis


def two_layers(rank: int, folder: Path) -> None:
    strategies = [create("zigzag"), create("zigzag")]
    step(strategies)
    workload = Workload(seq=SEQ, heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIM, dtype="fp32", layers=2, steps=3)
    with ringprof.capture(folder, workload, strategy=strategies):
        step(strategies, 3)


@pytest.mark.processes
def test_capture_records_layers_steps_and_strategy_work(tmp_path: Path) -> None:
    """Two layers, three steps: six times the FLOPs of one call, by the kernels' counts and by the workload."""
    run_ranks(2, two_layers, tmp_path / "mine")
    run = read_run(tmp_path / "mine/run.json")
    once = 4 * (SEQ * (SEQ + 1) // 2) * HEADS * HEAD_DIM * 7 // 2
    assert run.block_flops() == {0: 3 * once, 1: 3 * once} and run.workload is not None
    assert run.workload.exact_flops() == 6 * once
    assert run.kernel == "cpu-flash" and run.strategy is not None and run.strategy.name == "zigzag"
    assert run.strategy.target == "ringprof.strategies.algorithms.zigzag:Zigzag" and run.strategy.layout == "zigzag"
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


@pytest.mark.processes
@pytest.mark.parametrize("mesh", [False, True])
def test_group_captures_separately_and_keeps_global_ranks(tmp_path: Path, mesh: bool) -> None:
    run_ranks(4, each_group, tmp_path / "mine", mesh)
    run = read_run(tmp_path / "mine/run.json")
    assert run.topology.world_size == 2 and run.topology.ranks == [2, 3]
    assert [(trace.rank, trace.path) for trace in run.traces] == [(2, "rank2.json.gz"), (3, "rank3.json.gz")]
    assert [work.sent and work.sent[0].to for work in run.work or []] == [3, 2]
    analysis = loaded(tmp_path / "mine")
    assert [rank.rank for rank in analysis.attribution.ranks] == [2, 3] and analysis.summary.rates.tflops is not None
    assert not [warning for warning in analysis.attribution.warnings if warning.code == "missing_ranks"]
    assert analysis.to_terminal().startswith("2 ranks, host")


def data_parallel(rank: int, folder: Path) -> list[str]:
    """Data parallel x context parallel, 2 x 2: each group of two has a sequence of its own in each of two steps."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    strategy = create("zigzag", group=mesh["cp"])
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    step([strategy])
    workload = Workload(seq=SEQ, heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIM, dtype="fp32", steps=2)
    with warnings_of_capture() as lines, ringprof.capture(folder, workload, strategy=strategy):
        for _ in range(2):
            step([strategy])
            optimizer.step()
    return lines


@pytest.mark.processes
def test_data_parallel_groups_have_a_workload_each(tmp_path: Path) -> None:
    assert run_ranks(4, data_parallel, tmp_path / "mine") == [[], [], [], []]
    run, analysis = read_run(tmp_path / "mine/run.json"), loaded(tmp_path / "mine")
    assert run.workload_ranks == 2 and run.topology.world_size == 4
    # Two groups, two steps: four times forward and backward over one sequence.
    once = 4 * (SEQ * (SEQ + 1) // 2) * HEADS * HEAD_DIM * 7 // 2
    assert sum((run.block_flops() or {}).values()) == run.needed_flops() == 4 * once
    assert run.profiled is not None
    slowest_ns = max(times[0] for times in run.profiled.iterations_ns)
    model = 4 * (4 * SEQ**2 * HEADS * HEAD_DIM / 2 * 3.5)
    assert analysis.summary.rates.tflops == pytest.approx(model / 4 / slowest_ns / 1e3)
    assert not [warning.code for warning in analysis.attribution.warnings if warning.code.startswith("workload")]
    assert analysis.summary.window_iterations == 2
    text = " ".join(analysis.to_terminal().split())
    assert "per device achieved (2 captured iterations, under the profiler)" in text
    assert f"{SEQ} tokens per group of 2 ranks, " in text


def all_groups(rank: int, folder: Path) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "cp"))["cp"]
    strategy = create("zigzag", group=mesh["cp"])
    step([strategy])
    with warnings_of_capture() as lines:
        with ringprof.capture(folder / "pairs", WORKLOAD, group=mesh["cp"], strategy=strategy):
            # All ranks are in the block at one moment, as where gradients are averaged over all of them.
            dist.all_reduce(torch.ones(8))
            step([strategy])
            dist.all_reduce(torch.ones(8))
        with ringprof.capture(folder / "alone", group=alone):
            torch.ones(8).sum()
            dist.barrier()
    with pytest.raises(UsageError, match=f"ranks{rank // 2 * 2}-.: not empty"):
        with ringprof.capture(folder / "pairs", WORKLOAD, group=mesh["cp"], strict=True):
            raise AssertionError("entered")
    assert lines == []
    for _ in range(2):
        with warnings_of_capture() as again, ringprof.capture(folder / "pairs", WORKLOAD, group=mesh["cp"]):
            dist.all_reduce(torch.ones(8))
        lines += again
    return lines


@pytest.mark.processes
def test_groups_of_one_job_can_share_a_folder(tmp_path: Path) -> None:
    beside = [
        f"ringprof.capture: {tmp_path}/pairs: not empty: the run is written to {tmp_path}/pairs-{n}" for n in (2, 3)
    ]
    assert run_ranks(4, all_groups, tmp_path) == [beside, [], beside, []]
    assert sorted(os.listdir(tmp_path)) == ["alone", "pairs", "pairs-2", "pairs-3"]
    for name in ("pairs", "pairs-2", "pairs-3"):
        assert sorted(os.listdir(tmp_path / name)) == ["ranks0-1", "ranks2-3"]
    assert sorted(os.listdir(tmp_path / "alone")) == ["rank0", "rank1", "rank2", "rank3"]
    for first, name in ((0, "ranks0-1"), (2, "ranks2-3")):
        run = read_run(tmp_path / f"pairs/{name}/run.json")
        assert list(run.ranks()) == [first, first + 1] and run.name == f"pairs-{name}" and run.workload_ranks == 2
        assert {rank.rank for rank in loaded(tmp_path / "pairs" / name).attribution.ranks} == {first, first + 1}
    assert list(read_run(tmp_path / "alone/rank3/run.json").ranks()) == [3]
    whole = ringprof.load(tmp_path / "pairs")
    assert isinstance(whole, Analysis) and len(whole.attribution.ranks) == 4
    assert {warning.code for warning in whole.attribution.warnings} == {"cpu_no_transfer_times"}


def test_a_newer_capture_beside_a_run_is_named(tmp_path: Path) -> None:
    for second, name in enumerate(("mine", "mine-2", "mine-3")):
        with ringprof.capture(tmp_path / "mine"):
            torch.ones(8).sum()
        run = json.loads((tmp_path / name / "run.json").read_text())
        (tmp_path / name / "run.json").write_text(json.dumps(run | {"created": f"2026-11-28T00:00:0{second}Z"}))
    (tmp_path / "mine-4").mkdir()
    (tmp_path / "mine-old").mkdir()
    shutil.copy(tmp_path / "mine-3/run.json", tmp_path / "mine-old")
    said = [warning.message for warning in loaded(tmp_path / "mine").attribution.warnings]
    newer = f"{tmp_path}/mine-3 is newer; a capture writes there if {tmp_path}/mine is not empty"
    assert newer in said and not [message for message in said if "mine-old" in message]
    assert "newer_run" not in {warning.code for warning in loaded(tmp_path / "mine-2").attribution.warnings}


@pytest.mark.parametrize(
    ("hosts", "local_ranks", "expected"),
    [
        (["a", "a"], [2, 3], 2),
        (["a", "b"], [3, 3], 1),
        (["a", "a", "b", "b"], [0, 1, 0, 1], 2),
        (["a", "a", "a", "a"], [0, 1, 0, 1], 2),
    ],
    ids=["second group of a host", "one rank on each host", "all of two hosts", "two emulated hosts"],
)
def test_ranks_per_host_count_the_recorded_ranks_alone(hosts: list[str], local_ranks: list[int], expected: int) -> None:
    results = [
        RankResult(host=host, local_rank=local_rank, device="cpu", trace=f"rank{index}.json.gz")
        for index, (host, local_rank) in enumerate(zip(hosts, local_ranks, strict=True))
    ]
    run = build_run("pair", "2026-11-23T00:00:00Z", [], results, torch.device("cpu"))
    assert run.topology.ranks_per_host == expected


def outside(rank: int, folder: Path, mesh: bool) -> str:
    group = DeviceMesh("cpu", [0, 1]) if mesh else dist.new_group([0, 1])
    if rank < 2:
        with ringprof.capture(folder, group=group):
            dist.all_reduce(torch.ones(8), group=group.get_group() if isinstance(group, DeviceMesh) else group)
        return ""
    with pytest.raises(UsageError) as refused, ringprof.capture(folder, group=group):
        raise AssertionError("entered")
    return str(refused.value)


@pytest.mark.processes
@pytest.mark.parametrize("mesh", [False, True])
def test_a_rank_outside_the_group_is_refused(tmp_path: Path, mesh: bool) -> None:
    said = run_ranks(3, outside, tmp_path / "mine", mesh)
    assert said == ["", "", "rank 2 is not in the group: only its members may take part"]


def several_dimensions(rank: int, folder: Path) -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    with pytest.raises(UsageError) as refused, ringprof.capture(folder, group=mesh):
        raise AssertionError("entered")
    return str(refused.value)


@pytest.mark.processes
def test_a_mesh_of_several_dimensions_is_refused(tmp_path: Path) -> None:
    said = "a DeviceMesh of 2 dimensions is no group: name one, as in mesh['cp']"
    assert run_ranks(2, several_dimensions, tmp_path / "mine") == [said, said]


def beside_another(rank: int, folder: Path) -> list[str]:
    """Rank 1's program is profiled already; then each captures inside a capture."""
    said = []
    own = profile(activities=[ProfilerActivity.CPU], acc_events=True) if rank else nullcontext()
    with own, pytest.raises(UsageError) as refused, ringprof.capture(folder / "mine", strict=True):
        raise AssertionError("entered")
    said.append(str(refused.value))
    with ringprof.capture(folder / "outer"):
        with warnings_of_capture() as lines, ringprof.capture(folder / "inner"):
            dist.all_reduce(torch.ones(8))
    return [*said, *lines]


@pytest.mark.processes
def test_a_capture_beside_another_profiler_is_refused_on_all_ranks(tmp_path: Path) -> None:
    said = run_ranks(2, beside_another, tmp_path)
    busy = "rank {} has a profiler at work already (torch.profiler, or another capture): end it, there can be but one"
    no_run = f"ringprof.capture: {tmp_path}/inner: no run: {busy.format(0)}"
    assert said == [[busy.format(1), no_run], [busy.format(1)]]
    assert [path.name for path in tmp_path.iterdir()] == ["outer"]


@pytest.mark.parametrize(
    ("path", "arguments", "message"),
    [
        ("mine", {"workload": {"seq": 64}}, "workload is a ringprof.Workload, not {'seq': 64}"),
        ("mine", {"strategy": "zigzag"}, "strategy is what ringprof.strategies.create returns"),
        ("file/mine", {}, "file/mine: cannot write the run here: .*file is no folder"),
    ],
)
def test_invalid_capture_arguments_are_refused_before_the_block(
    tmp_path: Path, path: str, arguments: dict[str, Any], message: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=message), ringprof.capture(tmp_path / path, strict=True, **arguments):
        raise AssertionError("entered")


def enter_alone(rank: int, folder: Path) -> tuple[list[str], list[str]]:
    group, entered = dist.new_group([0, 1]), False
    if rank == 1:
        return [], []
    # As where another rank's program has ended: it answers no message.
    with (
        warnings_of_capture() as lines,
        patch.object(process_group, "gather_bytes", side_effect=RuntimeError("nobody answers")),
        ringprof.capture(folder / "mine", group=group),
    ):
        entered = True
    assert entered
    return lines, os.listdir(folder)


@pytest.mark.processes
def test_program_continues_where_no_other_rank_enters_capture(tmp_path: Path) -> None:
    (line,), left = run_ranks(2, enter_alone, tmp_path)[0]
    said = "no run: another rank has ended, or is not here: all of the group must enter (see group=)"
    assert line == f"ringprof.capture: {tmp_path / 'mine'}: {said} (RuntimeError: nobody answers)"
    assert left == []


def raises(rank: int, folder: Path) -> tuple[str, list[str]]:
    """Return what each rank raises and warns if the block fails on rank 1, which then does not participate."""
    store = dist.distributed_c10d._get_default_store()

    def closed(*_: Any, **__: Any) -> None:
        store.wait(["gone"])
        raise RuntimeError("Connection closed by peer")

    with warnings_of_capture() as lines:
        try:
            with ringprof.capture(folder / "mine"):
                if rank == 1:
                    raise ValueError("loss is\nnot finite")
                process_group.gather_bytes = closed  # type: ignore[assignment]
        except ValueError as error:
            store.set("gone", "")
            return str(error), lines
    return "nothing", lines


@pytest.mark.processes
def test_error_in_the_block_of_one_rank_is_a_warning_on_others(tmp_path: Path) -> None:
    first, second = run_ranks(2, raises, tmp_path)
    assert second == ("loss is\nnot finite", [])
    left = "rank 1 left the block with ValueError: loss is not finite (RuntimeError: Connection closed by peer)"
    assert first == ("nothing", [f"ringprof.capture: {tmp_path / 'mine'}: no run: {left}"])
    assert os.listdir(tmp_path) == []


FAULTS = {
    "no scratch folder": ("TraceFile", "rank 1: OSError: [Errno 28] No space left on device"),
    "no profiler": ("profiler", "rank 1: OSError: [Errno 28] No space left on device"),
    "no trace": ("counted_work", "rank 1: OSError: [Errno 28] No space left on device"),
    "no run.json": ("write_run", "OSError: [Errno 28] No space left on device"),
}


def fails(rank: int, folder: Path) -> list[tuple[list[str], float]]:
    """Return this rank's warnings and the result of a later collective for every fault; rank 0 calls `write_run`."""
    outcomes = []
    strategy = create("zigzag")
    for name, (function, _) in FAULTS.items():
        disk_full = OSError(28, "No space left on device")
        faulty = rank == (0 if function == "write_run" else 1)
        fault = patch.object(recorder, function, side_effect=disk_full) if faulty else nullcontext()
        total = torch.ones(1)
        with warnings_of_capture() as lines:
            with fault, ringprof.capture(folder / name, strategy=strategy):
                dist.all_reduce(total)
            dist.all_reduce(total)
        outcomes.append((lines, total.item()))
    return outcomes


@pytest.mark.processes
def test_recording_failure_is_one_warning_and_the_program_continues(tmp_path: Path) -> None:
    first, second = run_ranks(2, fails, tmp_path)
    for (name, (_, reason)), (lines, total), other in zip(FAULTS.items(), first, second, strict=True):
        assert lines == [f"ringprof.capture: {tmp_path / name}: no run: {reason}"] and total == 4
        assert other == ([], 4)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("named", "by_nccl", "used", "device"),
    [("nccl", True, True, "cuda"), ("cpu:gloo,cuda:nccl", True, True, "cuda"), ("gloo", False, True, "cpu"),
     ("undefined", True, True, "cuda"), ("undefined", True, False, "cpu"), ("undefined", False, False, "cpu")],
)  # fmt: skip
def test_capture_uses_the_device_of_the_group_backend(
    named: str, by_nccl: bool, used: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """init_device_mesh names no backend: each device type then has its own, and the program's device decides."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for name, value in {
        "get_rank": 0,
        "get_world_size": 1,
        "get_process_group_ranks": [0],
        "get_backend": named,
    }.items():
        monkeypatch.setattr(torch.distributed, name, lambda *_, value=value: value)
    monkeypatch.setattr(process_group, "uses_nccl", lambda _: by_nccl)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert process_group.GroupRanks(object()).device.type == device
