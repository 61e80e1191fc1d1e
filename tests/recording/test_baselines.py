"""Baselines on CPU ranks: the same kernel calls alone, without communication, and the same hops without computation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ringprof.iteration.baselines import BASELINE_KINDS, ORDERS, Replay, measure_baselines, strategy_without_transport
from ringprof.iteration.shard import Measurement, WorkloadShard
from ringprof.ranks.progress import SilentReporter
from ringprof.recording.measure import measure
from ringprof.run import read_run
from ringprof.strategies import create, names
from ringprof.strategies.kernels.torch_kernels import CpuFlashKernel
from ringprof.strategies.transport.baselines import NoOpKernel, use_kernel
from ringprof.strategies.transport.torch_transport import TorchTransport
from ringprof.workload.workload import Workload
from tests.recording.command import report_of, run
from tests.strategies.cases import CASES, Case
from tests.strategies.ranks import run_ranks

CPU = torch.device("cpu")
# Batch 2: a half of the sequence is then a view with gaps.
WORKLOAD = Workload(batch=2, seq=64, heads=8, kv_heads=4, head_dim=8)
SENDING = ("batch_isend_irecv", "all_to_all_single", "all_gather", "all_gather_into_tensor",
           "reduce_scatter_tensor", "all_reduce", "broadcast")  # fmt: skip
Calls = list[tuple[Any, ...]]


@contextmanager
def kernel_calls() -> Iterator[Calls]:
    """Collect the calls of the innermost kernel: the pass, the mask, and every tensor's shape, strides and dtype."""
    calls: Calls = []

    def watched(phase: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *arguments: Any) -> Any:
            tensors = [(tuple(x.shape), x.stride(), x.dtype) for x in arguments if isinstance(x, torch.Tensor)]
            calls.append((phase, arguments[-1], tensors))
            return original(self, *arguments)

        return call

    forward = watched("forward", CpuFlashKernel._forward)
    backward = watched("backward", CpuFlashKernel._backward)
    with patch.object(CpuFlashKernel, "_forward", forward), patch.object(CpuFlashKernel, "_backward", backward):
        yield calls


@contextmanager
def no_sending() -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something was sent")

    with ExitStack() as stack:
        for name in SENDING:
            stack.enter_context(patch.object(dist, name, refuse))
        stack.enter_context(patch.object(TorchTransport, "hop", refuse))
        stack.enter_context(patch.object(TorchTransport, "collective", refuse))
        yield


@contextmanager
def nan_in_fresh_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        assert bool(torch.isnan(torch.empty(4)).all())
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.processes
def test_no_sending_guard_raises_on_a_send() -> None:
    def attempt(case: Case) -> bool:
        shard, _ = create_shard(case)
        with no_sending(), pytest.raises(AssertionError, match="something was sent"):
            shard.run_iteration()
        shard.strategy.recover()  # all ranks left the call half-way
        return True

    assert in_every_case(2, attempt, [Case("zigzag"), Case("ulysses"), Case("allgather")]) == [[True] * 3] * 2


def create_shard(case: Case, **changes: Any) -> tuple[WorkloadShard, Measurement]:
    """Create this rank's shard of a workload and measure its ordinary iterations."""
    workload = Workload(**{**{name: getattr(WORKLOAD, name) for name in WORKLOAD.__struct_fields__}, **changes})
    shard = WorkloadShard.create(create(case.name, kernel="cpu-flash", **case.params), workload, CPU)
    return shard, measure(shard, 1, 1, SilentReporter())


def in_every_case(world: int, function: Callable[[Case], Any], cases: list[Case]) -> list[list[Any]]:
    """Return, for every rank, the results of ``function`` for each case that runs on ``world`` ranks."""
    return run_ranks(world, lambda rank: [function(case) for case in cases if world in case.worlds])


def check_solo(case: Case) -> None:
    shard, measured = create_shard(case)
    with kernel_calls() as ordinary:
        shard.run_iteration()
    replay = Replay.record(shard)
    with kernel_calls() as alone, no_sending():
        replay.run()
    assert alone == ordinary, case
    assert len(alone) == sum(measured.work.block_calls.values())
    assert replay.flops == measured.work.block_flops, case


def check_compute_only(case: Case) -> None:
    shard, measured = create_shard(case)
    null_strategy = strategy_without_transport(case.name, "cpu-flash", None, case.params)
    with kernel_calls() as ordinary:
        shard.run_iteration()
    other = WorkloadShard(null_strategy, True, shard.q, shard.k, shard.v, shard.dout)
    with kernel_calls() as muted, no_sending():
        other.run_iteration()
        # Uninitialised memory must reach no kernel, because a kernel's speed depends on its inputs.
        with nan_in_fresh_memory():
            out = null_strategy.attention(shard.q, shard.k, shard.v)
            gradients = torch.autograd.grad(out, (shard.q, shard.k, shard.v), shard.dout)
    assert all(bool(torch.isfinite(x).all()) and x.abs().max() < 1e3 for x in (out, *gradients)), case
    assert muted[len(ordinary) :] == ordinary, case
    muted = muted[: len(ordinary)]
    assert muted == ordinary, case
    assert null_strategy.comm.meter.sent == {}
    assert measured.work.block_flops is not None
    assert null_strategy.kernel_for(shard.q).flops == 2 * measured.work.block_flops


def check_communication_only(case: Case) -> None:
    shard, measured = create_shard(case)
    kernel, no_op = shard.strategy.kernel_for(shard.q), NoOpKernel()
    shard.strategy.comm.meter.clear()
    before = kernel.flops
    with kernel_calls() as computed, use_kernel(shard.strategy, no_op):
        shard.run_iteration()
    assert computed == [] and (kernel.flops - before, no_op.flops) == (0, 0)
    sent = {
        (sent.channel, sent.phase, sent.operation, sent.link): [sent.count, sent.sent_bytes]
        for sent in measured.work.sent or []
    }
    assert shard.strategy.comm.meter.sent == sent and sent, case
    assert shard.strategy.kernel_for(shard.q) is kernel


@pytest.mark.processes
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("check", [check_solo, check_compute_only, check_communication_only])
def test_every_strategy_and_option_under_each_baseline(check: Callable[[Case], None], world: int) -> None:
    in_every_case(world, check, CASES)


class Counting(SilentReporter):
    """Reporter that counts the announced and the finished steps."""

    def __init__(self) -> None:
        self.expected, self.done = 0, 0

    def start(self, phase: str, total: int) -> None:
        self.expected += total

    def advance(self) -> None:
        self.done += 1


def measure_all(case: Case) -> tuple[int, dict[str, int], int, int | None]:
    shard, measured = create_shard(case)
    before = [x.detach().clone() for x in (shard.q, shard.k, shard.v)]
    first = shard.strategy.attention(shard.q, shard.k, shard.v).detach()
    null_strategy = strategy_without_transport(case.name, "cpu-flash", None, case.params)
    reporter = Counting()
    measured_times = measure_baselines(shard, null_strategy, 1, 5, reporter)
    assert reporter.expected == reporter.done == 3 * 1 + 4 * 8
    assert all(time > 0 for times in measured_times.times_ns.values() for time in times)
    assert all(torch.equal(x, y) for x, y in zip(before, (shard.q, shard.k, shard.v), strict=True))
    torch.testing.assert_close(shard.strategy.attention(shard.q, shard.k, shard.v).detach(), first)
    counts = {kind: len(times) for kind, times in measured_times.times_ns.items()}
    return measured_times.rounds, counts, measured_times.solo_flops, measured.work.block_flops


@pytest.mark.processes
def test_baselines_keep_the_inputs_and_time_each_kind_equally_often() -> None:
    for rank in in_every_case(2, measure_all, [Case(name) for name in names()]):
        for rounds, counts, solo_flops, block_flops in rank:
            # Five in four rounds: two in each.
            assert rounds == 4 and counts == dict.fromkeys(BASELINE_KINDS, 8)
            assert solo_flops == block_flops


def test_each_baseline_follows_each_other_once_within_the_rounds() -> None:
    pairs = [pair for order in ORDERS for pair in pairwise(order)]
    assert len(set(pairs)) == len(pairs) == 12 and all(sorted(order) == [0, 1, 2, 3] for order in ORDERS)


def forward_only(rank: int) -> tuple[int, set[str]]:
    shard, _ = create_shard(Case("ring"), backward=False, causal=False, kv_heads=8)
    replay = Replay.record(shard)
    with kernel_calls() as calls:
        replay.run()
    return len(calls), {call[0] for call in calls}


@pytest.mark.processes
def test_solo_blocks_of_a_forward_pass() -> None:
    assert run_ranks(2, forward_only) == [(2, {"forward"})] * 2


def replay_is_finite(rank: int) -> bool:
    """Return whether the replayed calls compute ordinary numbers, on which a kernel's speed depends."""
    shard, _ = create_shard(Case("burst"))
    replay, results = Replay.record(shard), []
    for call in replay._bound:
        tensors: Any = call()
        results.append(all(bool(torch.isfinite(x).all()) and x.abs().max() < 1e3 for x in tensors))
    return all(results)


@pytest.mark.processes
def test_solo_blocks_compute_with_finite_values() -> None:
    assert run_ranks(2, replay_is_finite) == [True, True]


@pytest.mark.long
@pytest.mark.parametrize("name", [*names(), "mine:Slow"])
def test_controls_option_works_for_every_strategy(name: str, strategy_folder: Path) -> None:
    arguments = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--seq", "256", "--iters", "1", "--controls"]
    done = run(["record", "--strategy", name, *arguments, "--device", "cpu", "--world", "2"], strategy_folder)
    assert done.returncode == 0, done.stderr
    recorded = read_run(strategy_folder / "traces/run.json")
    assert recorded.controls is not None and recorded.work is not None
    assert recorded.controls.solo_flops == [work.block_flops for work in recorded.work]
    controls = json.loads(report_of(strategy_folder, "--format", "json"))["summary"]["controls"]
    ordinary, solo = recorded.controls.ordinary_ns, recorded.controls.solo_ns
    # One iteration of each: the slowest rank's, and the mean of the ranks'.
    assert controls["iteration_ns"] == max(ordinary[0][0], ordinary[1][0])
    assert controls["solo_ns"] == (solo[0][0] + solo[1][0]) / 2
