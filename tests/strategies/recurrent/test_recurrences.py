"""Recurrences over ranks against the recurrence token by token, forward and backward, in float64."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ringprof.strategies.recurrent.kernel import reach_of
from ringprof.strategies.recurrent.registry import create_recurrent
from tests.strategies.ranks import refusal, run_ranks
from tests.strategies.recurrent import oracle
from tests.strategies.recurrent.cases import TOLERANCE, documents_of, errors_of_cases


def check_cases(size: int, seeds: list[int]) -> None:
    results = run_ranks(size, errors_of_cases, size, seeds)[0]
    wrong = [(case, error) for case, error in results if not error < TOLERANCE]
    assert len(results) == len(seeds) and not wrong, wrong[:3]


def test_recurrences_of_one_process_equal_the_oracle() -> None:
    wrong = [(case, error) for case, error in errors_of_cases(0, 1, list(range(40))) if not error < TOLERANCE]
    assert not wrong, wrong[:3]


@pytest.mark.processes
@pytest.mark.parametrize("size", [2, 3, 4])
def test_recurrences_over_ranks_equal_the_oracle(size: int) -> None:
    check_cases(size, [1000 * size + case for case in range(25)])


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("size", range(1, 9))
def test_two_thousand_recurrences_over_ranks_equal_the_oracle(size: int) -> None:
    check_cases(size, [100_000 * size + case for case in range(250)])


def convolution_errors(rank: int, size: int, seeds: list[int]) -> list[float]:
    strategy, errors = create_recurrent("state-ring", kernel="reference"), []
    for seed in seeds:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        width = draw.choice([1, 2, 4, 4])
        local = draw.randrange(max(width - 1, 1), 12)
        documents = documents_of(draw, local, size)
        seq = local * size
        x, weight = torch.randn(2, seq, 3, dtype=torch.float64), torch.randn(3, width, dtype=torch.float64)
        bias = torch.randn(3, dtype=torch.float64) if draw.random() < 0.5 else None
        grad = torch.randn(2, seq, 3, dtype=torch.float64)
        own, own_weight = strategy.shard(x).requires_grad_(), weight.clone().requires_grad_()
        out = strategy.causal_conv1d(own, own_weight, bias, cu_seqlens=documents)
        (out * strategy.shard(grad)).sum().backward()
        assert own.grad is not None and own_weight.grad is not None
        weight_grad = torch.stack(strategy.comm.all_gather(own_weight.grad)).sum(0)
        actual = strategy.unshard(out), strategy.unshard(own.grad), weight_grad
        x.requires_grad_()
        weight.requires_grad_()
        expected = oracle.convolution(x, weight, bias, documents or [0, seq])
        (expected * grad).sum().backward()
        assert x.grad is not None and weight.grad is not None
        errors += [
            float((a - b).detach().abs().max()) for a, b in zip(actual, (expected, x.grad, weight.grad), strict=True)
        ]
    return errors


@pytest.mark.processes
@pytest.mark.parametrize("size", [1, 2, 4])
def test_convolution_over_ranks_equals_the_convolution_of_each_document(size: int) -> None:
    for errors in run_ranks(size, convolution_errors, size, list(range(40))):
        assert max(errors) < 1e-12


def traffic(rank: int, name: str, documents: list[int] | None) -> dict[tuple[str, str, str], list[int]]:
    """Return [count, bytes] sent by (channel, phase, operation) in one pass of 4 heads of 2 x 3 numbers."""
    strategy = create_recurrent(name, kernel="reference")
    strategy.comm.meter.clear()
    q, k, v = (torch.randn(1, 6, 4, size, dtype=torch.float64, requires_grad=True) for size in (2, 2, 3))
    g = -torch.rand(1, 6, 4, dtype=torch.float64)
    out = strategy.gated_delta_rule(q, k, v, g, torch.rand_like(g), cu_seqlens=documents)
    assert isinstance(out, torch.Tensor)
    out.sum().backward()
    return {(channel, phase, operation): x for (channel, phase, operation, _), x in strategy.comm.meter.sent.items()}


@pytest.mark.processes
def test_messages_are_states_and_no_rank_sends_over_a_border_of_documents() -> None:
    state, transition = 4 * 2 * 3 * 8, 4 * 2 * 2 * 8
    ring = run_ranks(4, traffic, "state-ring", None)
    assert [sorted(sent) for sent in ring] == [
        [("state", phase, "send_recv") for phase in phases]
        for phases in (["forward"], ["backward", "forward"], ["backward", "forward"], ["backward"])
    ]
    assert all(x == [1, state] for sent in ring for x in sent.values())
    for sent in run_ranks(4, traffic, "state-scan", None):
        # Three ranks before the last: hops over 1, 1 and 2 ranks, the last of them without transitions.
        assert sent == {
            (f"state_{distance}", phase, "send_recv"): x
            for phase in ("forward", "backward")
            for distance, x in ((1, [2, 2 * (state + transition)]), (2, [1, state]))
        }
    for name in ("state-ring", "state-scan"):
        assert all(not sent for sent in run_ranks(4, traffic, name, [0, 3, 6, 12, 18, 24]))
    # Of two ranks, the first is the one before the last: its state is all that travels.
    assert run_ranks(2, traffic, "state-scan", None)[0] == {
        ("state_1", phase, "send_recv"): [1, state] for phase in ("forward", "backward")
    }


def refusals(rank: int) -> list[str]:
    strategy, heads = create_recurrent("state-scan", kernel="reference"), create_recurrent("state-a2a")
    q, v, g = torch.randn(1, 4, 3, 2), torch.randn(1, 4, 3, 5), -torch.rand(1, 4, 3)
    calls: list[Callable[[], object]] = [
        lambda: strategy.simple_gla(q, q, v, g, cu_seqlens=[0, 3 + rank, 8]),
        lambda: strategy.simple_gla(q, q, v, g, cu_seqlens=[0, 3, 7]),
        lambda: strategy.simple_gla(q, q, v, g[:, :3]),
        lambda: strategy.simple_gla(q, q, v, g, initial_state=torch.zeros(1, 3, 5, 2)),
        lambda: strategy.gated_delta_rule(q[:, :, :2], q[:, :, :2], v, g, g),
        lambda: strategy.causal_conv1d(torch.randn(1, 2, 6), torch.randn(6, 4)),
        lambda: strategy.causal_conv1d(torch.randn(1, 4, 6), nn.Conv1d(6, 6, 4, groups=6).weight),
        lambda: strategy.causal_conv1d(torch.randn(1, 4, 6), torch.randn(6, 0)),
        lambda: strategy.causal_conv1d(torch.randn(1, 4, 6).mT, torch.randn(6, 4)),
        lambda: strategy.simple_gla(q.int(), q.int(), v.int(), g),
        lambda: heads.simple_gla(q, q, v, g),
        lambda: create_recurrent("state-scan", kernel="fla").simple_gla(q, q, v, g),
        lambda: create_recurrent("state-rng"),
        lambda: create_recurrent("state-scan", kernel="triton"),
    ]
    return [refusal(call) for call in calls]


def test_reach_is_the_number_of_ranks_before_one_that_hold_its_documents() -> None:
    """Count, for the first token of every rank, the earlier ranks that hold tokens of its document."""
    rng = random.Random(3)
    for _ in range(300):
        size, share = rng.randint(1, 8), rng.randint(1, 4)
        seq = size * share
        bounds = tuple(sorted({0, seq, *rng.sample(range(seq + 1), rng.randint(0, seq))}))
        document = [sum(bound <= token for bound in bounds) for token in range(seq)]
        before = [
            {token // share for token in range(rank * share) if document[token] == document[rank * share]}
            for rank in range(size)
        ]
        assert reach_of(bounds, size) == max(map(len, before))


@pytest.mark.processes
def test_calls_that_cannot_be_meant_are_refused_on_every_rank() -> None:
    expected = (
        "the ranks call with different documents", "the documents end at 7, and the sequence has 8 tokens",
        "expected g (B, S, H)", "expected initial_state (1, 3, 2, 5): got (1, 3, 5, 2)",
        "3 heads are not a multiple of 2 heads of keys", "with S at least 3",
        "squeeze the weight of an nn.Conv1d", "got (1, 4, 6) and (6, 0)", "got (1, 6, 4) and (6, 4)",
        "floating point: got torch.int32", "2 ranks do not divide 3 heads",
        "kernel fla: needs tensors on a GPU", "did you mean 'state-ring'",
        "no kernel 'triton' for recurrences; there are: auto, fla, reference",
    )  # fmt: skip
    for messages in run_ranks(2, refusals):
        assert len(messages) == len(expected)
        for message, part in zip(messages, expected, strict=True):
            assert part in message


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations made and that are still there; ``most`` is their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage not in self._known:
                self._known[storage] = size = storage.nbytes()
                self.live += size
                weakref.finalize(storage, self._freed, size)
        self.most = max(self.most, self.live)
        return result

    def _freed(self, size: int) -> None:
        self.live -= size


def peak_states(rank: int, name: str) -> float:
    """Return the peak memory of a pass of one document over all ranks, in states."""
    strategy = create_recurrent(name, kernel="reference")
    torch.manual_seed(rank)
    q, k, v = (torch.randn(1, 2, 2, 32, dtype=torch.float64, requires_grad=True) for _ in range(3))
    g = -torch.rand(1, 2, 2, dtype=torch.float64)
    with LiveBytes() as memory:
        for _ in range(2):
            out = strategy.gated_delta_rule(q, normalize(k, dim=-1), v, g, torch.rand_like(g))
            assert isinstance(out, torch.Tensor)
            out.sum().backward()
    return float(memory.most / (2 * 32 * 32 * 8))


@pytest.mark.processes
@pytest.mark.parametrize(("name", "messages"), [("state-ring", 0), ("state-scan", 1)])
def test_memory_grows_by_at_most_one_message_when_the_ranks_double(name: str, messages: int) -> None:
    """From 4 to 8 ranks an all-gather would add 4 messages; one holds a state and a transition, here of equal size."""
    four, eight = (max(run_ranks(size, peak_states, name)) for size in (4, 8))
    assert 4 < four and eight - four <= 2 * messages + 0.1, (four, eight)
