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
from ..transport.message import Message
from ..transport.ring_channel import Collective, HopRing

Rotate = Literal["allgather", "alltoall"]
_SEQ_DIM = 2


class TorchContextParallel(Strategy):
    """torch's ring over the zigzag layout, with keys and values sent by all-gather or by rotation."""

    layout = LAYOUTS["zigzag"]
    sends_smaller_v = False
    GRAD_WIRE = "fp32"
    KERNELS = ("cudnn", "torch-flash", "torch-efficient", "cpu-flash", "reference")
    PARAMETERS: ClassVar[dict[str, str]] = {
        "rotate": "how keys and values are sent: torch's default, allgather, or alltoall",
        **Strategy.PARAMETERS,
    }

    def __init__(self, context: Context, *, rotate: Rotate = "allgather", deterministic: bool = False) -> None:
        super().__init__(context, deterministic=deterministic)
        self.parameters["rotate"] = rotate
        self._channels: Any = None
        if self.comm.group is None:
            # A dry run: torch's loop sends over ringprof's channels.
            ring = self.comm.ring("kv")
            self._channels = ring, self.comm.ring("dkv", shares=ring), self.comm.collective("kv")

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

        module: Any = ring
        options, rotations = ring._cp_options, ring._RotateMethod
        saved = options.enable_load_balance, options.rotate_method, module.dist, ring._create_rotater
        options.enable_load_balance = causal
        by_gather = self.parameters["rotate"] == "allgather"
        options.rotate_method = rotations.ALL_GATHER if by_gather else rotations.ALL_TO_ALL
        if self._channels is not None:
            kv_ring, dkv_ring, gathering = self._channels
            module.dist = _NoProcessGroup(self.comm.rank, self.comm.size)
            # Only gradients are rotated by a method that the caller names.
            module._create_rotater = lambda group, dim, method=None: (
                _Rotater(dkv_ring) if method else _Rotater(kv_ring, gathering if by_gather else None)
            )
        try:
            yield ring
        finally:
            options.enable_load_balance, options.rotate_method, module.dist, module._create_rotater = saved


class _NoProcessGroup:
    """Answers to what torch's loop asks of torch.distributed, for one rank of a dry run, whose group is None."""

    ProcessGroup = type(None)

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def get_rank(self, group: None) -> int:
        return self._rank

    def get_world_size(self, group: None) -> int:
        return self._size


class _Rotater:
    """Rotation of one buffer per step over a ring, or by one all-gather, in a dry run; has the methods of torch's."""

    def __init__(self, ring: HopRing, gathering: Collective | None = None) -> None:
        self._ring, self._gathering = ring, gathering
        self._hop: Any = None
        self._gathered: Any = None
        self._step = 0

    def exchange_buffers(self, curr_buffer: Tensor) -> None:
        self._step += 1
        if self._gathering is None:
            self._hop = self._ring.post(Message([curr_buffer.contiguous()]))
        elif self._hop is None:
            self._hop = self._gathering.all_gather(curr_buffer.contiguous())

    def next_buffer(self) -> Tensor:
        if self._gathering is None:
            (received,) = self._hop.wait().tensors
        else:
            if self._gathered is None:
                (self._gathered,) = self._hop.wait()
            received = self._gathered[self._ring.rank - self._step]
        arrived: Tensor = received
        return arrived


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
