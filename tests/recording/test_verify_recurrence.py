"""The gate of recurrences: it passes right strategies, and names planted mistakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from ringprof.errors import VerificationError
from ringprof.iteration.recurrence import call_operator, draw_inputs, select_group
from ringprof.proof import recurrences as references
from ringprof.proof.recurrences import ChunkedRecurrence, DenseRecurrence
from ringprof.proof.verify_recurrence import verify_recurrence
from ringprof.strategies.recurrent.kernel import Carry
from ringprof.strategies.recurrent.registry import STRATEGIES
from ringprof.strategies.recurrent.state_strategies import RecurrentStrategy, StateRing
from ringprof.strategies.transport.communicator import Communicator
from ringprof.workload.recurrences import RECURRENCES
from ringprof.workload.workload import Workload
from tests.strategies.ranks import run_ranks
from tests.strategies.recurrent import oracle

WORK = Workload(seq=96, heads=4, kv_heads=2, head_dim=8, v_head_dim=12, dtype="fp32", operator="gdn")
PACKED = {"documents": (20, 28, 30, 18)}
"""A document's border inside rank 0, at the border of ranks 1 and 2 of four, and inside others."""


def mistaken(
    before: Callable[[Carry, bool], Carry] = lambda carry, reverse: carry,
    after: Callable[[Communicator, Any, bool], Any] = lambda comm, incoming, reverse: incoming,
) -> type[RecurrentStrategy]:
    """Return a strategy that changes what a rank passes on, or gets; ``reverse`` says of which pass."""

    class Mistaken(StateRing):
        def pass_state(self, carry: Carry, takes: bool, gives: bool, known: Any, *rest: Any, reverse: bool) -> Any:
            carry = before(carry, reverse)
            incoming, sent = super().pass_state(carry, takes, gives, known, *rest, reverse=reverse)
            return after(self.comm, incoming, reverse), sent

    return Mistaken


def zeros(comm: Communicator, incoming: Tensor | None, reverse: bool) -> Tensor | None:
    return None if incoming is None else torch.zeros_like(incoming)


def not_decayed(carry: Carry, reverse: bool) -> Carry:
    if reverse or carry.transition is None:
        return carry
    ones = torch.ones_like(carry.transition)
    return Carry(carry.state, torch.eye(ones.shape[-1]).expand_as(ones) if ones.shape[-1] > 1 else ones)


def decayed_twice(carry: Carry, reverse: bool) -> Carry:
    if reverse or carry.transition is None:
        return carry
    square = carry.transition @ carry.transition if carry.transition.shape[-1] > 1 else carry.transition**2
    return Carry(carry.state, square)


NOT_PASSED = mistaken(after=lambda comm, x, reverse: x if reverse or comm.rank == 0 else zeros(comm, x, reverse))
NOTHING_ENTERS = mistaken(after=zeros)
NOT_DECAYED, DECAYED_TWICE = mistaken(not_decayed), mistaken(decayed_twice)
OF_ONE_RANK = mistaken(lambda carry, reverse: Carry(carry.state, carry.transition if reverse else None))
GRADIENT_NOT_PASSED = mistaken(
    after=lambda comm, x, reverse: None if reverse and comm.rank < comm.size - 1 else x
)  # fmt: skip


class _NoHalo(StateRing):
    """Ends a document at every rank's border, for the convolution alone."""

    def causal_conv1d(self, x: Tensor, weight: Tensor, bias: Any = None, *, cu_seqlens: Any = None) -> Tensor:
        seq = x.shape[1] * self.comm.size
        bounds = sorted({*(cu_seqlens or ()), *range(0, seq + 1, x.shape[1])})
        return super().causal_conv1d(x, weight, bias, cu_seqlens=bounds)


class _DocumentsIgnored(StateRing):
    def _documents(self, cu_seqlens: Any, local: int) -> tuple[int, ...]:
        return super()._documents(None, local)


class _ResetInsideOnly(StateRing):
    """Resets states inside a rank alone: a document's border at a rank's own border is taken for none."""

    def _documents(self, cu_seqlens: Any, local: int) -> tuple[int, ...]:
        documents = super()._documents(cu_seqlens, local)
        return tuple(bound for bound in documents if bound % local or bound in (0, documents[-1]))


def _refusals(rank: int, cases: list[tuple[type[RecurrentStrategy], Workload]]) -> list[str]:
    """Return what the gate says of each strategy and workload; empty where it passes."""
    said = []
    for strategy, workload in cases:
        try:
            verify_recurrence(strategy(Communicator(), "reference"), workload, torch.device("cpu"))
            said.append("")
        except VerificationError as error:
            said.append(str(error))
    return said


MISTAKES: list[tuple[type[RecurrentStrategy], dict[str, Any], str]] = [
    (NOT_PASSED, {}, "the state does not pass from rank to rank"),
    (NOT_PASSED, {"operator": "mamba2", "conv_width": 4}, "the state does not pass from rank to rank"),
    (NOTHING_ENTERS, {}, "neither a state of other ranks nor the initial one"),
    (NOTHING_ENTERS, {"operator": "mamba2", "backward": False}, "neither a state of other ranks nor the initial one"),
    (NOT_DECAYED, {}, "their transitions are missing"),
    (NOT_DECAYED, {"operator": "gla"}, "their transitions are missing"),
    (OF_ONE_RANK, {}, "the states of ranks before it are lost"),
    (DECAYED_TWICE, {}, "applies its transition twice"),
    (DECAYED_TWICE, {"operator": "simple-gla"}, "applies its transition twice"),
    (_DocumentsIgnored, PACKED, "the state is not reset where a document ends"),
    (_ResetInsideOnly, PACKED, "not where it ends on a rank's border"),
    (GRADIENT_NOT_PASSED, {}, "the gradient of the state does not pass back"),
    (_NoHalo, {"conv_width": 4}, "its halo is missing"),
]


@pytest.mark.processes
def test_planted_mistakes_are_named() -> None:
    cases = [(mistake, replace(WORK, **options)) for mistake, options, _ in MISTAKES]
    for said in run_ranks(4, _refusals, cases):
        for (_, options, says), text in zip(MISTAKES, said, strict=True):
            assert says in text and "wrong result on rank" in text, (says, options, text)


@pytest.mark.processes
def test_the_bundled_strategies_pass() -> None:
    variants: list[dict[str, Any]] = [
        {}, {"conv_width": 3, "kv_heads": 4, **PACKED}, {"dtype": "bf16", "backward": False}
    ]  # fmt: skip
    cases = [
        (strategy, replace(WORK, operator=operator, **options))
        for operator in RECURRENCES for strategy in STRATEGIES.values() for options in variants
    ]  # fmt: skip
    for said in run_ranks(2, _refusals, cases):
        assert {text: case for text, case in zip(said, cases, strict=True) if text} == {}


@pytest.mark.parametrize("chunks", [0, 4, 1024], ids=lambda chunks: f"{chunks} chunks at a time")
@pytest.mark.parametrize("documents", [None, (0, 7, 90, 150), (0, 64, 150)])
@pytest.mark.parametrize("operator", ["gdn", "mamba2", "gla", "simple-gla"])
def test_the_gates_references_are_the_recurrence_token_by_token(
    chunks: int, operator: Any, documents: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(references, "_CHUNKS_AT_A_TIME", chunks)
    kind: Any = ChunkedRecurrence if chunks else DenseRecurrence
    work = replace(WORK, seq=150, operator=operator)
    drawn = draw_inputs(work, 150, torch.device("cpu"), torch.Generator().manual_seed(1))
    inputs = {name: x.double() for name, x in drawn.items()}
    initial = torch.randn(1, 4, 8, 12, dtype=torch.float64)
    method = {"gdn": "gated_delta_rule", "simple-gla": "simple_gla"}.get(operator, operator)
    out, last = getattr(kind(), method)(**inputs, initial_state=initial, return_final_state=True, cu_seqlens=documents)
    bounds = documents or (0, 150)
    if operator == "mamba2":
        x, dt, a, b, c, d = (inputs[name] for name in ("x", "dt", "a", "b", "c", "d"))
        expected, expected_last = oracle.mamba2(x, dt, a, b, c, d, bounds, initial)
    else:
        q, k = (inputs[name].repeat_interleave(2, 2) for name in "qk")
        expected, expected_last = oracle.recurrence(
            q, k, inputs["v"], inputs["g"], inputs.get("beta"), 8**-0.5, bounds, initial
        )
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(last, expected_last, rtol=1e-12, atol=1e-12)


def test_the_gates_convolution_is_torchs() -> None:
    x, weight = torch.randn(2, 20, 6, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    out = DenseRecurrence().causal_conv1d(x, weight, cu_seqlens=[0, 2, 2, 15, 20])
    for first, end in ((0, 2), (2, 15), (15, 20)):
        rows = torch.nn.functional.pad(x[:, first:end].mT, (3, 0))
        expected = torch.nn.functional.conv1d(rows, weight.unsqueeze(1), groups=6).mT
        torch.testing.assert_close(out[:, first:end], expected)


@pytest.mark.parametrize("operator", ["gdn", "mamba2", "gla", "simple-gla"])
@pytest.mark.parametrize("width", [None, 4])
@pytest.mark.parametrize("chunks", [4, 1024], ids=lambda chunks: f"{chunks} chunks at a time")
@pytest.mark.parametrize("documents", [(70, 80), (64, 86)])
def test_the_chunked_reference_has_the_gradients_of_the_dense_one(
    operator: Any, width: int | None, chunks: int, documents: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(references, "_CHUNKS_AT_A_TIME", chunks)
    work = replace(WORK, seq=150, operator=operator, conv_width=width, documents=documents)
    gradients = []
    for target in (DenseRecurrence(), ChunkedRecurrence()):
        inputs = draw_inputs(work, 150, torch.device("cpu"), torch.Generator().manual_seed(1))
        leaves = [x.double().requires_grad_() for x in inputs.values()]
        out = call_operator(target, work, dict(zip(inputs, leaves, strict=True)))
        weight = torch.linspace(-99, 99, out.numel(), dtype=torch.float64).view(out.shape).sin()
        gradients.append(torch.autograd.grad(out, leaves, weight))
    for dense, chunked in zip(*gradients, strict=True):
        torch.testing.assert_close(chunked, dense, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("operator", ["gdn", "mamba2", "gla", "simple-gla"])
@pytest.mark.parametrize("width", [None, 4])
@pytest.mark.parametrize("batch", [1, 3])
def test_one_head_of_keys_computes_its_part_of_the_whole(operator: Any, width: int | None, batch: int) -> None:
    work = replace(WORK, seq=24, operator=operator, conv_width=width, batch=batch)
    inputs = draw_inputs(work, 24, torch.device("cpu"), torch.Generator().manual_seed(1))
    inputs = {name: x.double().requires_grad_() for name, x in inputs.items()}
    out = call_operator(DenseRecurrence(), work, inputs)
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, list(inputs.values()), dout)
    whole = {"out": out, **{f"d{name}": x for name, x in zip(inputs, gradients, strict=True)}}
    part, one_group = select_group(work, {**{name: x.detach() for name, x in inputs.items()}, **whole}, 1)
    leaves = {name: part[name].clone().requires_grad_() for name in inputs}
    out = call_operator(DenseRecurrence(), one_group, leaves)
    torch.testing.assert_close(out, part["out"])
    gradients = torch.autograd.grad(out, list(leaves.values()), dout[: one_group.batch, :, 2:])
    for name, gradient in zip(leaves, gradients, strict=True):
        torch.testing.assert_close(gradient, part[f"d{name}"])
