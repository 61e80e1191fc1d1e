"""Legacy backward schedule of rings, to replay and predict runs that were recorded before November 2026.

`ringprof.prediction.query.uses_legacy_schedule` detects it from a run's ``run.json``.
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
from ringprof.strategies.masks.layouts import ALL
from ringprof.strategies.transport.gradient_ring import LocalGrads, add_and_cast_all, forward_grads


def use_legacy_schedule(strategy: Strategy) -> None:
    """Replace the strategy's backward pass with the legacy one, if it is a plain ring."""
    if isinstance(strategy, Ring) and type(strategy).backward is Ring.backward:
        strategy.backward = MethodType(_backward_with_n_hops, strategy)  # type: ignore[method-assign]


def _backward_with_n_hops(self: Any, call: AttentionCall, rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    """Run the legacy backward pass, in which dK and dV travel from the first (local) block on, one hop per rank."""
    local_block, deferred_blocks = self.split_local_block(call, q, k)
    wire, dq = wire_type(self.parameters["grad_wire"], k), Sum(q)
    local_grads: LocalGrads = []
    deferred_dq = []
    hop: Any = None
    for step, (kv_rank, kv) in enumerate(self.kv_ring.tour([k, v])):
        block = local_block if step == 0 else self.block(call, kv_rank, q)
        grads = None
        if block is not None:
            with ring_step("bwd", step, "block"):
                grads = call.backward(rows, q, kv[0], kv[1], block)
        arrived = None if hop is None else hop.wait()
        with ring_step("bwd", step, "merge"):
            if block is not None and grads is not None:
                dq.add(grads[0], block.q)
            block_rows = ALL if block is None else block.kv
            dkv = forward_grads(self.dkv_ring, arrived, grads and grads[1:], block_rows, (k, v), wire)
        grads = None
        hop = self.dkv_ring.post(dkv)
    for block in deferred_blocks:
        with ring_step("bwd", self.ring_size, "block"):
            block_dq, *block_dkv = call.backward(rows, q, k, v, block)
        local_grads.append((block.kv, block_dkv))
        deferred_dq.append((block.q, block_dq))
    dkv = hop.wait()
    with ring_step("bwd", self.ring_size, "merge"):
        whole_dq = dq.result(q.dtype, deferred_dq)
        dk, dv = add_and_cast_all(dkv, local_grads, k.dtype)
        return whole_dq, dk, dv
