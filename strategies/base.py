"""What all strategies share: checks, sharding, autograd, and the call of one block.

A strategy subclasses `Strategy`, names its layout and writes two loops, `forward` and `backward`, over a communicator
and blocks. Shapes: B batch, S local sequence, H heads, Hkv kv heads, D head_dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .communicator import Communicator
from .errors import Unfit
from .kernels import Gradients, Kernel, choose_kernel
from .layouts import ALL, Block, Layout, split_home_block
from .merge import output_with_delta, row_product, wide_type

GradWire = Literal["fp32", "input"]


@dataclass(frozen=True)
class Shape:
    """The sizes of one attention problem over all ranks; ``seq`` is the global sequence length."""

    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Context:
    """What a strategy is given to run with: the ranks, and the kernel's name (``auto``: the fastest that fits)."""

    comm: Communicator
    kernel: str = "auto"


@dataclass(frozen=True)
class Rows:
    """What a backward pass needs of the queries' rows; one of ``out`` and ``delta`` is given.

    dout and out (B, S, H, D); lse and delta = rowsum(dO · O) (B, H, S).
    """

    dout: Tensor
    lse: Tensor
    out: Tensor | None = None
    delta: Tensor | None = None

    def at(self, queries: slice) -> Rows:
        """The same for some of the queries."""
        if queries == ALL:
            return self
        return Rows(
            self.dout[:, queries],
            self.lse[..., queries],
            None if self.out is None else self.out[:, queries],
            None if self.delta is None else self.delta[..., queries],
        )


@dataclass(frozen=True)
class Blocks:
    """The blocks of one attention call: kernel, scale and mask."""

    kernel: Kernel
    scale: float
    causal: bool
    kept: list[Tensor] = field(default_factory=list)

    def keep(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Called by a forward pass whose backward pass begins with other tensors than the call's own q, k and v."""
        self.kept[:] = [q, k, v]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """Output and LSE of the block's queries over the block's keys alone."""
        return self.kernel.forward(q[:, block.q], k[:, block.kv], v[:, block.kv], scale=self.scale, causal=block.causal)

    def backward(self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, block: Block) -> Gradients:
        """dq of the block's queries, dk and dv of the block's keys."""
        rows = rows.at(block.q)
        return self.kernel.backward(
            rows.dout, q[:, block.q], k[:, block.kv], v[:, block.kv], rows.lse,
            out=rows.out, delta=rows.delta, scale=self.scale, causal=block.causal,
        )  # fmt: skip


class Strategy(ABC):
    """One way of computing attention over a sequence that is split over ranks."""

    layout: Layout
    PARAMETERS: ClassVar[dict[str, str]] = {"deterministic": "the kernel's deterministic mode: same bits every call"}
    """A line of help for each keyword parameter of the constructor."""

    def __init__(self, context: Context, *, deterministic: bool = False) -> None:
        self.comm = context.comm
        self.parameters: dict[str, Any] = {"deterministic": deterministic}
        self._kernel_name = context.kernel
        self._kernels: dict[type[Kernel], Kernel] = {}
        self._deterministic = deterministic

    # --- what a strategy writes ---------------------------------------------------------------

    @abstractmethod
    def forward(self, blocks: Blocks, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Output (B, S, H, D) in q's type and LSE (B, H, S) of this rank's queries."""

    @abstractmethod
    def backward(self, blocks: Blocks, rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
        """Gradients of this rank's q, k and v, in their types."""

    @classmethod
    def placed(cls, size: int, per_host: int, **params: Any) -> dict[str, Any]:
        """``params``, with what shape and refusals depend on filled in for ``per_host`` of ``size`` ranks a host."""
        return params

    @classmethod
    def layout_for(cls, size: int, **params: Any) -> Layout:
        """The layout that these parameters mean on ``size`` ranks. Raises `Unfit` where they mean none."""
        return cls.layout

    @classmethod
    def unfit(cls, shape: Shape, size: int, **params: Any) -> str | None:
        """Why this problem cannot run on ``size`` ranks; None where it can. Needs no process group."""
        try:
            layout = cls.layout_for(size, **params)
        except Unfit as error:
            return str(error)
        divisor = layout.divisor(size)
        if shape.seq % divisor:
            return (
                f"the {layout.name} layout on {size} ranks needs a sequence divisible by {divisor}: not {shape.seq}"
                f" (try {max(divisor, shape.seq // divisor * divisor)})"
            )
        if shape.heads % shape.kv_heads:
            return f"{shape.heads} heads are not a multiple of {shape.kv_heads} kv heads"
        return None

    # --- what a user calls --------------------------------------------------------------------

    def positions(self, seq: int) -> Tensor:
        """Global positions (int64, length seq / N) of the tokens that this rank holds, in local order (for RoPE)."""
        self._check_divides(seq)
        return self.layout.positions(seq, self.comm.size, self.comm.rank)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of the full tensor ``x``, whose sequence dimension is ``dim``. Differentiable."""
        return x.index_select(dim, self.positions(x.shape[dim]).to(x.device))

    def unshard(self, local: Tensor, dim: int = 1) -> Tensor:
        """The full tensor from every rank's share, on every rank: the inverse of `shard`. Not differentiable."""
        full = torch.cat(self.comm.all_gather(local.detach()), dim)
        order = self.layout.order(full.shape[dim], self.comm.size).to(full.device)
        return torch.empty_like(full).index_copy_(dim, order, full)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = True,
        softmax_scale: float | None = None,
        return_lse: bool = False,
        dropout_p: float = 0.0,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Any:
        """Attention over the whole sequence for this rank's queries. Differentiable, also through the LSE.

        q (B, S/N, H, D), k and v (B, S/N, Hkv, D), sharded as `shard` does. Returns out (B, S/N, H, D), or (out, lse)
        with lse (B, H, S/N) float32. Raises `Unfit` for shapes, types and options that the strategy cannot honour.
        """  # fmt: skip
        _refuse_options(
            dropout_p=dropout_p != 0.0, window_size=tuple(window_size) != (-1, -1),
            alibi_slopes=alibi_slopes is not None, cu_seqlens=cu_seqlens is not None,
        )  # fmt: skip
        self._check_tensors(q, k, v)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        blocks = Blocks(self.kernel_for(q), scale, causal)
        out, lse = self.differentiable(blocks, q, k, v, lse_wanted=return_lse)
        return (out, lse) if return_lse else out

    def differentiable(
        self, blocks: Blocks, q: Tensor, k: Tensor, v: Tensor, *, lse_wanted: bool
    ) -> tuple[Tensor, Tensor]:
        """`forward`, with `backward` as its gradient. A strategy that first exchanges heads does so around this."""
        result: tuple[Tensor, Tensor] = _Attention.apply(self, blocks, q, k, v)  # type: ignore[no-untyped-call]
        return result

    def kernel_for(self, q: Tensor) -> Kernel:
        """The kernel that computes blocks of tensors like ``q``. Raises `Unfit` where it is not available."""
        chosen = choose_kernel(self._kernel_name, q.device, q.dtype, q.shape[-1], deterministic=self._deterministic)
        if chosen not in self._kernels:
            self._kernels[chosen] = chosen(deterministic=self._deterministic)
        return self._kernels[chosen]

    # --- shared pieces ------------------------------------------------------------------------

    def home_blocks(self, local_seq: int, *, causal: bool) -> tuple[Block, list[Block]]:
        """This rank's block with its own keys: an early part and what a backward pass keeps to the end."""
        if self.comm.size == 1:
            return Block(causal=causal), []
        return split_home_block(local_seq, causal=causal)

    def _check_divides(self, seq: int) -> None:
        divisor = self.layout.divisor(self.comm.size)
        if seq % divisor:
            raise Unfit(
                f"the {self.layout.name} layout on {self.comm.size} ranks needs a sequence divisible by {divisor}:"
                f" not {seq}"
            )

    def _check_tensors(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
            raise Unfit(f"expected q (B, S, H, D), k and v (B, S, Hkv, D): got {_shapes(q, k, v)}")
        if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
            raise Unfit(f"q, k and v must share batch, local sequence and head_dim: got {_shapes(q, k, v)}")
        if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
            raise Unfit(f"q, k and v must share type and device: got {q.dtype}, {k.dtype}, {v.dtype}")
        shape = Shape(q.shape[0], q.shape[1] * self.comm.size, q.shape[2], k.shape[2], q.shape[3])
        reason = self.unfit(shape, self.comm.size, **self.parameters)
        if reason:
            raise Unfit(reason)


class _Attention(torch.autograd.Function):
    """Autograd around a strategy's two loops."""

    @staticmethod
    def forward(ctx: Any, strategy: Strategy, blocks: Blocks, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        strategy.comm.meter.phase = "forward"
        out, lse = strategy.forward(blocks, q, k, v)
        ctx.strategy, ctx.blocks = strategy, blocks
        ctx.save_for_backward(*(blocks.kept or (q, k, v)), out, lse)
        blocks.kept.clear()
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[None, None, Tensor, Tensor, Tensor]:
        q, k, v, out, lse = ctx.saved_tensors
        strategy, blocks = ctx.strategy, ctx.blocks
        dout = torch.zeros_like(out) if dout is None else dout.contiguous()
        rows = Rows(dout, lse, out=out)
        if dlse is not None:
            rows = _rows_with_lse_gradient(strategy, blocks.kernel, rows, dlse)
        strategy.comm.meter.phase = "backward"
        return (None, None, *strategy.backward(blocks, rows, q, k, v))


def _rows_with_lse_gradient(strategy: Strategy, kernel: Kernel, rows: Rows, dlse: Tensor) -> Rows:
    """A gradient that reaches the LSE enters every block as delta - dLSE in place of delta."""
    assert rows.out is not None
    delta = row_product(rows.dout, rows.out) - dlse
    if kernel.takes_delta:
        return replace(rows, out=None, delta=delta)
    silent = (rows.dout == 0).all(-1).transpose(1, 2)
    # All ranks refuse together: a rank that raised alone would leave the others waiting.
    if strategy.comm.any_rank(bool((silent & (delta != 0)).any())):
        raise Unfit(
            f"a gradient reaches the LSE of rows whose output has none, and kernel {kernel.name!r} takes no delta"
            " (kernel='reference' does)"
        )
    return replace(rows, out=output_with_delta(rows.dout, delta))


def wire_type(wire: GradWire, like: Tensor) -> torch.dtype:
    """The type that a gradient travels in: at least float32, or the input's own."""
    return like.dtype if wire == "input" else wide_type(like)


def _refuse_options(**given: bool) -> None:
    for option, present in given.items():
        if present:
            raise Unfit(f"{option} is not supported by any bundled strategy")


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
