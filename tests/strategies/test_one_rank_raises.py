"""A rank that raises in the middle of a call and goes on: the others raise, too, and all recover."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringprof.strategies import PeerLost, RankRaised, Unsupported, create, create_recurrent
from ringprof.strategies.base import Strategy
from ringprof.strategies.kernels.reference import ReferenceKernel
from ringprof.strategies.recurrent.reference import ReferenceRecurrence
from ringprof.strategies.transport import call_comparison, passes
from tests.strategies.cases import CASES, Case, WorkloadShard, attend, call, dense, inputs, worst
from tests.strategies.cpu_transports import copies_on_cpu
from tests.strategies.ranks import run_ranks

PROBLEM = WorkloadShard(seq=48, heads=12, kv_heads=12, head_dim=4)
NINE = [case for case in CASES if not case.params]
ON_FOUR = [
    Case("usp", {"ulysses_degree": 2}), Case("double-ring", {"ring_window": 2}), Case("burst", {"ring_window": 2}),
    Case("double-ring", {"ulysses_degree": 2, "ring_window": 1}), Case("allgather", {"layout": "zigzag"}),
]  # fmt: skip
SOON_S = 10.0
"""Seconds within which every rank raises, on a machine that runs other tests; two looks take one second."""


@contextmanager
def failing(moment: str) -> Iterator[None]:
    """Raise at one moment of a call: ``first`` and ``middle`` block, ``backward``, ``interrupted``, or ``unsent``."""
    if moment == "unsent":
        with patch.object(Strategy, "kernel_for", side_effect=MemoryError("out of memory")):
            yield
        return
    method = "backward" if moment == "backward" else "forward"
    real, left = getattr(ReferenceKernel, method), [2 if moment == "middle" else 1]

    def raising(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt if moment == "interrupted" else MemoryError("out of memory")
        return real(*args, **options)

    with patch.object(ReferenceKernel, method, raising):
        yield


def error_of_call(strategy: Any, **options: Any) -> float:
    """Make a call and its backward pass; return the largest error of out, dq, dk and dv on this rank."""
    return worst(call(strategy, PROBLEM, **options), map(strategy.shard, dense(PROBLEM)))


def outcome(call: Callable[[], float]) -> str:
    """Return what a call raises; empty where it returns the right numbers."""
    begin = time.monotonic()
    try:
        error = call()
    except (RankRaised, MemoryError, KeyboardInterrupt) as raised:
        late = time.monotonic() - begin > SOON_S
        return f"{'late: ' if late else ''}{type(raised).__name__}: {raised}"
    return "" if error < 1e-12 else f"off by {error}"


def raised_and_recovered(strategy: Any, raising: int, moment: str, call: Callable[[], float]) -> list[str]:
    """Return what is wrong on this rank when the rank ``raising`` raises at this moment of a call, and goes on."""
    rank = dist.get_rank()
    before = outcome(call)
    if rank == raising:
        with failing(moment):
            this = outcome(call)
    else:
        this = outcome(call)
    after, again = outcome(call), outcome(call)
    strategy.recover()
    recovered = outcome(call)
    wrong = [f"before: {before}"] if before else []
    if rank == raising:
        own = "KeyboardInterrupt" if moment == "interrupted" else "MemoryError: out of memory"
        wrong += [] if this.startswith(own) else [f"own: {this}"]
        wrong += [] if after.startswith("RankRaised: this rank left ") and "strategy.recover()" in after else [after]
    else:
        # A pass over copied hops may end before it is told: what did not arrive is NaN.
        nan = this == "off by inf" and strategy.comm.hop_transport == "copy"
        fits = not this or nan or this.startswith(f"RankRaised: rank {raising} raised in ")
        wrong += [] if fits else [f"this: {this}"]
        wrong += [] if after.startswith(f"RankRaised: rank {raising} raised in ") else [f"after: {after}"]
    wrong += [] if again == after else [f"again: {again}"]
    wrong += [f"recovered: {recovered}"] if recovered else []
    return [f"{moment}, rank {raising} raises: {text}" for text in wrong]


def every_strategy(rank: int, cases: list[Case], moments: list[str]) -> list[str]:
    size, wrong = dist.get_world_size(), []
    for number, case in enumerate(cases):
        strategy = create(case.name, kernel="reference", **case.params)
        for turn, moment in enumerate(moments):
            raising = (number + turn) % size
            # A rank of these has one block; of a causal ring, rank 0 has one.
            single = case.name in ("ulysses", "allgather") or (case.name, raising) == ("ring", 0)
            block = "first" if moment == "middle" and (single or strategy.ring_size < 2) else moment
            # Ranks that wait look for one that has raised more often than in programs.
            with patch.object(call_comparison, "INTERVAL_S", 0.1):
                faults = raised_and_recovered(strategy, raising, block, partial(error_of_call, strategy))
            wrong += [f"{case}: {fault}" for fault in faults]
    return wrong


def test_other_ranks_raise_and_all_recover():
    assert run_ranks(2, every_strategy, [Case("zigzag")], ["first"]) == [[], []]


@pytest.mark.processes
@pytest.mark.parametrize(("size", "cases"), [(2, NINE), (3, NINE), (4, NINE + ON_FOUR)], ids=["2", "3", "4"])
def test_other_ranks_raise_and_all_recover_with_every_strategy(size, cases):
    moments = ["first", "middle", "backward", "interrupted", "unsent"]
    assert run_ranks(size, every_strategy, cases, moments) == [[]] * size


def over_copies(rank: int, timing: str, folder: str, cases: list[Case], moments: list[str]) -> list[str]:
    with copies_on_cpu(timing, folder):
        wrong = every_strategy(rank, cases, moments)
        dist.barrier()
        return wrong


COPYING = [Case("ring"), Case("zigzag"), Case("double-ring"), Case("burst"), Case("burst", {"ring_window": 2})]


@pytest.mark.processes
@pytest.mark.parametrize("timing", ["early", "late"])
@pytest.mark.parametrize("size", [2, 4])
def test_other_ranks_raise_and_all_recover_over_copied_hops(size, timing, tmp_path):
    cases = [*COPYING, *([Case("usp", {"ulysses_degree": 2})] if size == 4 else [])]
    moments = ["first", "middle", "backward", "unsent"]
    assert run_ranks(size, over_copies, timing, str(tmp_path), cases, moments) == [[]] * size


# --- messages ---------------------------------------------------------------------------------------


def messages(rank: int) -> list[str]:
    strategy, said = create("zigzag", kernel="reference"), []
    for moment in ("first", "backward"):
        with failing(moment) if rank == 1 else nullcontext():
            said += [outcome(lambda: error_of_call(strategy)), outcome(lambda: error_of_call(strategy))]
        strategy.recover()
    return said


@pytest.mark.processes
def test_errors_name_rank_call_and_cause():
    others, own = run_ranks(2, messages)
    advice = "call strategy.recover() on all ranks"
    why = "(MemoryError: out of memory)"
    second = "a backward pass after call 2"
    assert others == [
        *[f"RankRaised: rank 1 raised in call 1 {why}; {advice}"] * 2,
        *[f"RankRaised: rank 1 raised in {second} {why}; {advice}"] * 2,
    ]
    assert own == [
        "MemoryError: out of memory", f"RankRaised: this rank left call 1 half-way {why}; {advice}",
        "MemoryError: out of memory", f"RankRaised: this rank left {second} half-way {why}; {advice}",
    ]  # fmt: skip


# --- what marks nothing -----------------------------------------------------------------------------


def refused(rank: int) -> list[Any]:
    """Refuse on all ranks in several ways; return the error of a call after each."""
    strategy = create("zigzag", kernel="reference")
    q, k, v, _ = (strategy.shard(x) for x in inputs(PROBLEM))
    errors = []
    for attempt in (
        lambda: strategy.attention(q, k, v, dropout_p=0.5),
        lambda: strategy.attention(q, k, v[:, 1:]),
        lambda: strategy.attention(q, k, v, documents=[0, 5, 40]),
        lambda: strategy.attention(q, k, v, softcap=-1.0),
        lambda: strategy.attention(q, k),
    ):
        with pytest.raises((Unsupported, TypeError)):
            attempt()
        errors.append(outcome(lambda: error_of_call(strategy)))
    with patch.object(Strategy, "kernel_for", side_effect=Unsupported("no kernel")), pytest.raises(Unsupported):
        error_of_call(strategy)
    return [*errors, outcome(lambda: error_of_call(strategy))]


@pytest.mark.processes
def test_refusals_before_the_first_hop_need_no_recovery():
    assert run_ranks(2, refused) == [[""] * 6] * 2


def test_a_single_process_needs_no_recovery():
    strategy = create("zigzag", kernel="reference")
    with failing("first"), pytest.raises(MemoryError):
        error_of_call(strategy)
    assert error_of_call(strategy) < 1e-12
    with strategy.recoverable():
        strategy.recover()


# --- waits that are no hops -------------------------------------------------------------------------


def in_a_comparison(rank: int, in_store: bool) -> list[str]:
    """Let rank 0 raise in the last block, after which the others have all they need and compare their next call."""
    strategy, documents = create("ring", kernel="reference"), [0, 20, 48]
    mine = [strategy.shard(x) for x in inputs(PROBLEM)[:3]]

    def forward() -> float:
        strategy.attention(*mine, documents=documents)
        return 0.0

    words = call_comparison.shared_words
    without_memory = patch.object(call_comparison, "shared_words", lambda *args: (words(*args)[0], None))
    with without_memory if in_store else nullcontext():
        said = [outcome(forward)]
        with failing("first") if rank == 0 else nullcontext():
            said += [outcome(forward), outcome(forward)]
        strategy.recover()
        return [*said, outcome(forward), outcome(lambda: error_of_call(strategy))]


@pytest.mark.processes
@pytest.mark.parametrize("in_store", [False, True], ids=["in memory", "in the store"])
def test_ranks_that_compare_their_calls_raise(in_store):
    for rank, (before, _, after, *recovered) in enumerate(run_ranks(3, in_a_comparison, in_store)):
        assert (before, *recovered) == ("", "", "")
        assert after.startswith("RankRaised: this rank left " if rank == 0 else "RankRaised: rank 0 raised in call 2 (")


# --- strategies that share a group ------------------------------------------------------------------


def recurrent_error(strategy: Any) -> float:
    """Return the error of linear attention without decay, against its plain sum, and of its gradients."""
    full = inputs(WorkloadShard(seq=24, heads=6, kv_heads=6, head_dim=4))
    truth = [x.clone().requires_grad_() for x in full[:3]]
    scores = torch.einsum("bihd,bjhd->bhij", truth[0], truth[1]).tril()
    out = torch.einsum("bhij,bjhd->bihd", scores, truth[2])
    truths = [out.detach(), *torch.autograd.grad(out, truth, full[3])]
    leaves = [strategy.shard(x).requires_grad_() for x in full[:3]]
    decay = torch.zeros(leaves[0].shape[:3], dtype=torch.float64)
    local = strategy.simple_gla(*leaves, decay, scale=1.0)
    gradients = torch.autograd.grad(local, leaves, strategy.shard(full[3]))
    return worst((local.detach(), *gradients), map(strategy.shard, truths))


def recurrences(rank: int) -> list[str]:
    """Let a recurrence raise on rank 1, and another strategy over the group recover, with attention beside them."""
    attention, wrong = create("zigzag", kernel="reference"), []
    for name in ("state-ring", "state-scan", "state-a2a"):
        strategy = create_recurrent(name, kernel="reference")
        for method in ("begin", "finish", "begin_backward"):
            said = [outcome(partial(recurrent_error, strategy)), outcome(lambda: error_of_call(attention))]
            memory = patch.object(ReferenceRecurrence, method, side_effect=MemoryError)
            with memory if rank == 1 else nullcontext():
                this = outcome(partial(recurrent_error, strategy))
            after = outcome(lambda: error_of_call(attention))
            attention.recover()
            said += [outcome(partial(recurrent_error, strategy)), outcome(lambda: error_of_call(attention))]
            begin = "RankRaised: this rank left " if rank == 1 else "RankRaised: rank 1 raised in "
            fits = this.startswith("MemoryError") if rank == 1 else not this or this.startswith(begin)
            if any(said) or not fits or not after.startswith(begin):
                wrong.append(f"{name}, {method}: {said}, {this}, {after}")
    return wrong


@pytest.mark.processes
@pytest.mark.parametrize("size", [2, 3])
def test_recurrences_raise_and_recover_with_attention(size):
    assert run_ranks(size, recurrences) == [[]] * size


def subgroups(rank: int) -> list[str]:
    """Let rank 1 raise over a pair of ranks: the other pair, and all four ranks, go on."""
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    halves, whole = create("zigzag", group=pair, kernel="reference"), create("zigzag", kernel="reference")
    said = [outcome(lambda: error_of_call(halves))]
    with failing("first") if rank == 1 else nullcontext():
        outcome(lambda: error_of_call(halves))
    said += [outcome(lambda: error_of_call(whole))]
    if rank < 2:
        halves.recover()
    # A strategy that is created after a recovery connects anew, too.
    again = create("zigzag", group=pair, kernel="reference")
    return [*said, outcome(lambda: error_of_call(halves)), outcome(lambda: error_of_call(again))]


@pytest.mark.processes
def test_other_groups_go_on():
    assert run_ranks(4, subgroups) == [[""] * 4] * 4


# --- a training step --------------------------------------------------------------------------------


def trained(rank: int, failing_rank: int, moment: str) -> list[float]:
    """Train a weight on four batches, of which a rank cannot compute the second; return the weight."""
    strategy = create("zigzag", kernel="reference")
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
    for batch in range(4):
        x = strategy.shard(batch_of(batch))
        failed = torch.zeros(1)
        try:
            with strategy.recoverable():
                y = strategy.attention(x * weight, x * weight, x)
                if batch == 1 and rank == failing_rank and moment == "between calls":
                    raise MemoryError
                y = strategy.attention(y, y * weight, x)
                if batch == 1 and rank == failing_rank and moment == "loss":
                    raise MemoryError
                y.square().sum().backward()
        except (MemoryError, RankRaised):
            failed += 1
        dist.all_reduce(failed)
        if failed:
            strategy.recover()
            weight.grad = None
            continue
        assert weight.grad is not None
        dist.all_reduce(weight.grad)
        with torch.no_grad():
            weight -= 1e-3 * weight.grad
        weight.grad = None
    weights: list[float] = weight.tolist()
    return weights


def batch_of(number: int) -> Tensor:
    return torch.randn(1, 24, 2, 4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


@pytest.mark.processes
@pytest.mark.parametrize("moment", ["between calls", "loss"])
def test_a_trainer_skips_a_batch_on_all_ranks(moment):
    """The weight is that of a training without the second batch, in one process."""
    expected = torch.ones(4, dtype=torch.float64, requires_grad=True)
    for batch in (0, 2, 3):
        x = batch_of(batch)
        y = attend(x * expected, x * expected, x)[0]
        y = attend(y, y * expected, x)[0]
        (gradient,) = torch.autograd.grad(y.square().sum(), expected)
        expected = (expected - 1e-3 * gradient).detach().requires_grad_()
    for weight in run_ranks(3, trained, 1, moment):
        assert (torch.tensor(weight, dtype=torch.float64) - expected).abs().max() < 1e-12


# --- recover ----------------------------------------------------------------------------------------


def missing_rank(rank: int) -> str:
    """Let all ranks but the last recover, with a short timeout; then all."""
    strategy = create("zigzag", kernel="reference")
    said = outcome(lambda: error_of_call(strategy))  # ranks that gather a new kind of call cannot be woken
    if rank < 2:
        with patch.object(passes, "timeout", lambda: timedelta(seconds=1.5)), pytest.raises(PeerLost) as lost:
            strategy.recover()
        said = str(lost.value)
    else:
        said = outcome(lambda: error_of_call(strategy))
    dist.barrier()
    strategy.recover()
    return said + outcome(lambda: error_of_call(strategy))


@pytest.mark.processes
def test_recover_names_ranks_that_do_not_come_and_wakes_them():
    first, second, last = run_ranks(3, missing_rank)
    assert first == second == "all ranks must call recover(): rank 2 does not come"
    assert last.startswith("RankRaised: rank ") and last.endswith(
        " has called recover(); call strategy.recover() on all ranks"
    )
