"""Blocks whose gradients a kernel writes into given tensors, against dense float64: halves, and rings of two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from ringprof.strategies.algorithms.zigzag import Zigzag
from ringprof.strategies.base import Context
from ringprof.strategies.kernels.kernel import Gradients
from ringprof.strategies.kernels.reference import ReferenceKernel
from ringprof.strategies.masks.layouts import ALL, WHOLE, split_in_place
from ringprof.strategies.transport.communicator import Communicator
from ringprof.workload.mask import Mask
from tests.strategies.cases import Case, WorkloadShard, dense, inputs, relative_error, with_kernel
from tests.strategies.ranks import run_ranks

CASES = [
    Case("ring"), Case("zigzag"), Case("zigzag", {"documents_layout": "dealt"}), Case("stripe"),
    Case("zigzag", {"grad_wire": "input"}), Case("usp", {"ulysses_degree": 2}, (4,)),
    Case("double-ring", {"ring_window": 2}, (4,)),
]  # fmt: skip
MASKS = [
    Mask.of(), Mask.of(causal=False), Mask.of(documents=[0, 16, 32, 48, 64]), Mask.of(documents=[0, 1, 2, 9, 40, 64]),
    Mask.of(causal=False, documents=[0, 5, 40, 64]), Mask.of(window=(6, 0)),
    Mask.of(documents=[0, 3, 30, 64], window=(8, 0)),
]  # fmt: skip


class WritingKernel(ReferenceKernel):
    """The reference, which writes gradients into the tensors that it is given, and counts these calls."""

    name = "writing"
    writes_into = True
    written = 0

    def _backward(self, *args: Any, into: Gradients | None = None) -> Gradients:
        return self._write(super()._backward(*args), into)

    def _backward_parts(self, *args: Any, into: Gradients | None = None) -> Gradients:
        return self._write(super()._backward_parts(*args), into)

    def _write(self, gradients: Gradients, into: Gradients | None) -> Gradients:
        if into is None:
            return gradients
        self.written += 1
        for target, gradient in zip(into, gradients, strict=True):
            target.copy_(gradient)
        return into


@pytest.mark.processes
@pytest.mark.parametrize(("world", "kv_heads", "v_head_dim"), [(2, 8, None), (2, 4, None), (4, 8, None), (2, 8, 6)])
def test_gradients_of_halves_are_exact(world: int, kv_heads: int, v_head_dim: int | None) -> None:
    """With fewer kv heads than heads the reference repeats them, and its gradients are copied."""
    problem = WorkloadShard(seq=64, batch=2, heads=8, kv_heads=kv_heads, v_head_dim=v_head_dim)
    run, cases = partial(with_kernel, overlaps=True), [case for case in CASES if world in case.worlds]
    for rows in run_ranks(world, run, WritingKernel, cases, problem, MASKS):
        assert {name: error for name, error, _ in rows if not error < 1e-12} == {}
        written = {name: kernel.written for name, _, kernel in rows}
        assert written[f"zigzag {MASKS[0]}"] == written[f"zigzag {MASKS[1]}"] == (2 if kv_heads == 8 else 0)
        # A double ring has two last hops, and a window bands: both keep what they had.
        assert all(count in (0, 2) for count in written.values())
        assert not any(count for name, count in written.items() if name.startswith("double-ring"))


@pytest.mark.processes
@pytest.mark.parametrize(("kv_heads", "v_head_dim"), [(8, None), (4, None), (8, 6)])
def test_gradients_of_a_ring_of_two_ranks_are_exact(kv_heads: int, v_head_dim: int | None) -> None:
    """Where nothing overlaps the last hop, the kernel writes dK and dV of both blocks where they are sent or added."""
    problem = WorkloadShard(seq=64, batch=2, heads=8, kv_heads=kv_heads, v_head_dim=v_head_dim)
    run, cases = partial(with_kernel, overlaps=False), [case for case in CASES if 2 in case.worlds]
    for rank, rows in enumerate(run_ranks(2, run, WritingKernel, cases, problem, MASKS[:3])):
        assert {name: error for name, error, _ in rows if not error < 1e-12} == {}
        # Under a causal mask the first rank of the contiguous layout sees no key of the other.
        expected = {str(case): 1 + (rank == 1 or case.name != "ring") for case in cases}
        written = {name: kernel.written for name, _, kernel in rows if name.endswith(f" {MASKS[0]}")}
        writes = v_head_dim is None and kv_heads == 8
        assert written == {f"{name} {MASKS[0]}": count * writes for name, count in expected.items()}
        assert not any(kernel.written for name, _, kernel in rows if name.endswith(f" {MASKS[2]}"))


class Watched(Zigzag):
    """A user's strategy, which replaces the loops and counts what passes through them."""

    seen: list[int]

    def tour(self, *args: Any) -> Iterator[tuple[int, list[Tensor]]]:
        for kv_rank, kv in super().tour(*args):
            self.seen.append(kv_rank)
            yield kv_rank, kv

    def forward_over_ring(self, *args: Any) -> tuple[Tensor, Tensor]:
        out, lse = super().forward_over_ring(*args)
        return 2 * out, lse


def watched(rank: int, problem: WorkloadShard, truth: Tensor) -> tuple[list[int], float]:
    strategy: Any = Watched(Context(Communicator()))
    kernel = WritingKernel()
    strategy.seen, strategy.kernel_for, strategy.overlaps_last_hop = [], lambda q, **_: kernel, lambda travelling: False
    *qkv, dout = (strategy.shard(x) for x in inputs(problem))
    out = strategy.attention(*(x.requires_grad_() for x in qkv))
    out.backward(dout)
    return strategy.seen, relative_error(strategy.unshard(out.detach()), 2 * truth)


@pytest.mark.processes
def test_loops_that_a_subclass_replaces_run_on_two_ranks() -> None:
    problem = WorkloadShard(seq=64, batch=2, heads=8, kv_heads=8)
    for rank, (seen, error) in enumerate(run_ranks(2, watched, problem, dense(problem, Mask.of())[0])):
        assert seen == 2 * [rank, 1 - rank] and error < 1e-12


def test_halves_share_no_row_of_documents_and_no_head() -> None:
    heads = split_in_place(WHOLE[True], 5)
    assert [block.kv_heads for block in heads] == [slice(0, 2), slice(2, 5)]
    assert all(block.causal and (block.q, block.kv) == (ALL, ALL) for block in heads)
    assert split_in_place(WHOLE[True], 1) == [WHOLE[True]]


def test_halves_of_documents_are_made_once() -> None:
    """Each half keeps its lengths on the device: a new one would copy them there, and the host would wait."""
    block = Zigzag.sharded_mask(MASKS[2], 64, 2, documents_layout="dealt").block(0, 0)
    assert block is not None
    first, again = split_in_place(block, 4), split_in_place(block, 4)
    assert len(first) == 2 and all(half is same for half, same in zip(first, again, strict=True))
