"""Wrapper of torch's context parallelism: the ring behind `torch.distributed.tensor.experimental.context_parallel`.

torch's loop, rotation and merge run unchanged. The path to them is left out: DTensor's dispatch, and the patch of
`torch.nn.functional.scaled_dot_product_attention`. (The patch misses programs that imported that function by name: each
rank then attends to its own tokens only.) Our kernels of the same operators compute the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

from torch import Tensor

from ..base import AttentionCall, Context, Rows, Strategy
from ..kernels.kernel import Gradients, Kernel
from ..kernels.merge import lift_tiny_rows, output_with_delta
from ..masks.layouts import LAYOUTS

Rotate = Literal["allgather", "alltoall"]
_SEQ_DIM = 2


class TorchContextParallel(Strategy):
    """torch's ring over the zigzag layout, with keys and values sent by all-gather or by rotation."""

    layout = LAYOUTS["zigzag"]
    sends_smaller_v = False
    KERNELS = ("cudnn", "torch-flash", "torch-efficient", "cpu-flash", "reference")
    PARAMETERS: ClassVar[dict[str, str]] = {
        "rotate": "how keys and values are sent: torch's default, allgather, or alltoall",
        **Strategy.PARAMETERS,
    }

    def __init__(self, context: Context, *, rotate: Rotate = "allgather", deterministic: bool = False) -> None:
        super().__init__(context, deterministic=deterministic)
        self.parameters |= {"rotate": rotate, "grad_wire": "fp32"}

    def forward(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        op = _Operator(call.kernel, call.scale)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with self._options(call.causal) as ring:
            out, lse, *_ = ring._templated_ring_attention(
                self.comm.group, _SEQ_DIM, op.forward, q, k, v, is_causal=call.causal
            )
        return out.transpose(1, 2).contiguous(), lse

    def backward(self, call: AttentionCall, rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
        op, dout, out = _Operator(call.kernel, call.scale), rows.dout, rows.out
        if out is None:
            # Only our kernels can take delta, torch's ring passes on an output.
            assert rows.delta is not None
            dout = lift_tiny_rows(dout, rows.delta)
            out = output_with_delta(dout, rows.delta)
        dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        with self._options(call.causal) as ring:
            dq, dk, dv, *_ = ring._templated_ring_attention_backward(
                self.comm.group, _SEQ_DIM, op.backward, dout, "dout", q, k, v, out, rows.lse, is_causal=call.causal
            )
        return tuple(x.transpose(1, 2).contiguous() for x in (dq, dk, dv))

    @contextmanager
    def _options(self, causal: bool) -> Iterator[Any]:
        """Provide torch's module with its options set for this strategy; they are process-wide, and restored later."""
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring

        options, rotations = ring._cp_options, ring._RotateMethod
        saved = options.enable_load_balance, options.rotate_method
        options.enable_load_balance = causal
        by_gather = self.parameters["rotate"] == "allgather"
        options.rotate_method = rotations.ALL_GATHER if by_gather else rotations.ALL_TO_ALL
        try:
            yield ring
        finally:
            options.enable_load_balance, options.rotate_method = saved


class _Operator:
    """Adapter of one of our kernels to the operators that torch's ring calls, with heads before the sequence."""

    def __init__(self, kernel: Kernel, scale: float) -> None:
        self._kernel, self._scale = kernel, scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out, lse = self._kernel.forward(q, k, v, scale=self._scale, causal=is_causal)
        return out.transpose(1, 2), lse

    def backward(
        self, *, dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
        is_causal: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        # torch's call passes views, but our kernels need contiguous tensors.
        dout, out = (x.transpose(1, 2).contiguous() for x in (dout, out))
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        lse = logsumexp.contiguous()
        gradients = self._kernel.backward(dout, q, k, v, lse, out=out, scale=self._scale, causal=is_causal)
        return tuple(x.transpose(1, 2) for x in gradients)
