"""Strategies as they were when runs were recorded, where that is another course than today's.

A run is observed, replayed and foreseen by what its ranks did; `question.is_older` tells from its ``run.json``.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor

from ringprof.strategies.algorithms.ring import Ring
from ringprof.strategies.annotate import ring_step
from ringprof.strategies.base import AttentionCall, Rows, Strategy, wire_type
from ringprof.strategies.kernels.kernel import Gradients
from ringprof.strategies.kernels.merge import Sum
from ringprof.strategies.transport.gradient_ring import LocalGrads, add_and_cast_dkv, forward_grads, kv_grads


def use_legacy_schedule(strategy: Strategy) -> None:
    """Give the strategy the backward pass that it had."""
    if isinstance(strategy, Ring) and type(strategy).backward is Ring.backward:
        strategy.backward = MethodType(_n_hops, strategy)  # type: ignore[method-assign]


def _n_hops(self: Any, call: AttentionCall, rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    """dK and dV travel from the first block on, which is the rank's own."""
    early, rest = self.split_local_block(call, q, k)
    wire, dq = wire_type(self.parameters["grad_wire"], k), Sum(q)
    home: LocalGrads = []
    late = []
    hop: Any = None
    for step, (kv_rank, kv) in enumerate(self.kv_ring.tour([k, v])):
        block = early if step == 0 else self.block(call, kv_rank, q)
        grads = None
        if block is not None:
            with ring_step("bwd", step, "block"):
                grads = call.backward(rows, q, kv[0], kv[1], block)
        arrived = None if hop is None else hop.wait()
        with ring_step("bwd", step, "merge"):
            if block is not None and grads is not None:
                dq.add(grads[0], block.q)
            dkv = forward_grads(self.dkv_ring, arrived, *kv_grads(grads, block), (k, v), wire)
        grads = None
        hop = self.dkv_ring.post(dkv)
    for block in rest:
        with ring_step("bwd", self.ring_size, "block"):
            own, *pair = call.backward(rows, q, k, v, block)
        home.append((block, pair))
        late.append((block.q, own))
    dkv = hop.wait()
    with ring_step("bwd", self.ring_size, "merge"):
        return dq.result(q.dtype, late), *add_and_cast_dkv(dkv, home, k.dtype)
