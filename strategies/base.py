"""What all strategies share: checks, sharding, autograd, and the call of one block.

A strategy subclasses `Strategy`, names its layout and writes two loops, `forward` and `backward`, over a communicator
and blocks. Shapes: B batch, S local sequence, H heads, Hkv kv heads, D head_dim.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringprof.mask import Mask
from ringprof.strategies.annotate import ring_step
from ringprof.strategies.errors import Unsupported
from ringprof.strategies.first_order import first_order
from ringprof.strategies.kernels.builtin import choose_kernel
from ringprof.strategies.kernels.kernel import Gradients, Kernel
from ringprof.strategies.kernels.merge import (
    Partial,
    output_with_delta,
    row_product,
    rows_that_carry,
    wide_type,
    with_sinks,
)
from ringprof.strategies.kernels.uncompiled import uncompiled
from ringprof.strategies.masks.expected import Expectations
from ringprof.strategies.masks.layouts import ALL, WHOLE, Block, Layout, as_contiguous, part, split_local_block
from ringprof.strategies.masks.row_routing import RowRouting
from ringprof.strategies.masks.sharded_mask import ShardedMask, sharded_mask_of
from ringprof.strategies.transport.communicator import Communicator

GradWire = Literal["fp32", "input"]
DocumentsLayout = Literal["packed", "per_document"]
DOCUMENTS_LAYOUT_HELP = "zigzag over the packed whole, or over each document by itself"
Documents = Sequence[int] | Tensor | None
"""Cumulative lengths of packed documents, from 0 to the sequence's."""
NO_SOFTCAP = "takes no softcap: the bundled strategies do, with a kernel that computes it (`ringprof kernels`)"
HIDDEN_FROM_BYTES = 2**25
"""From which size on the last hop of a backward pass is worth two more kernel calls that hide it, on a GPU."""
_ASKED = (
    "causal", "softmax_scale", "return_lse", "sinks", "softcap", "documents", "window_size", "prefix", "gradients",
)  # fmt: skip
"""What ranks must ask for alike beside shapes and types; the documents themselves are not compared."""
OutAndLse = tuple[Tensor, Tensor | None]  # The LSE where it is wanted.
POSITIONS_KEPT = 8
"""Sequence lengths whose positions a strategy keeps on a device."""


@dataclass(frozen=True)
class Shape:
    """The sizes of one attention problem over all ranks; ``seq`` is the global sequence length."""

    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    kv_length: int | None = None
    """Keys of a sequence, those of its ``seq`` new tokens the last of them; None: these alone."""


@dataclass(frozen=True)
class Context:
    """What a strategy is given to run with: the ranks, and the kernel's name (``auto``: the fastest that fits)."""

    comm: Communicator
    kernel: str = "auto"


@dataclass(slots=True)
class Rows:
    """What a backward pass needs of the queries' rows; one of ``out`` and ``delta`` is given. Made of dense tensors.

    dout and out (B, S, H, D); lse and delta = rowsum(dO · O) (B, H, S).
    """

    dout: Tensor
    lse: Tensor
    out: Tensor | None = None
    delta: Tensor | None = None
    _parts: dict[tuple[Any, Any], Rows] = field(default_factory=dict, repr=False)

    def select(self, queries: slice, *, dense: bool = True) -> Rows:
        """The same for some of the queries, dense again: made once, as several blocks may want them.

        With ``dense`` false O and dO may be views, as far as nothing is computed from them here.
        """
        if queries == ALL:
            return self
        key = queries.start, queries.stop
        if key not in self._parts:
            dout, out = part(self.dout, queries), None if self.out is None else part(self.out, queries)
            if dense or self.delta is not None:
                dout, out = as_contiguous(dout), None if out is None else as_contiguous(out)
            delta = None if self.delta is None else as_contiguous(part(self.delta, queries, 2))
            self._parts[key] = Rows(dout, as_contiguous(part(self.lse, queries, 2)), out, delta)
        return self._parts[key]

    def pad_heads(self, head_dim: int) -> Rows:
        """The same with O and dO filled up with zeros to ``head_dim``: made once."""
        missing = head_dim - self.dout.shape[-1]
        if missing and ("filled", missing) not in self._parts:
            out = None if self.out is None else pad(self.out, (0, missing))
            self._parts["filled", missing] = Rows(pad(self.dout, (0, missing)), self.lse, out, self.delta)
        return self._parts["filled", missing] if missing else self


@dataclass(slots=True)
class AttentionCall:
    """The blocks of one attention call: kernel, scale and mask.

    Heads of v that are smaller than those of q and k are filled up with zeros for the kernel alone: they travel, and
    are merged, as they are.
    """

    kernel: Kernel
    scale: float
    causal: bool
    lse_wanted: bool = False
    """Whether a gradient may come through the LSE, on any rank: all must then go the same way back."""
    sharded_mask: ShardedMask | None = None
    """The mask, where it is more than causal or none."""
    saved: tuple[Tensor, ...] = ()
    """q, k and v for the backward pass, where it begins with others than the call's own."""

    def block_between(self, layout: Layout, q_rank: int, kv_rank: int, local_seq: int) -> Block | None:
        """The block that ``q_rank`` owes ``kv_rank``'s keys; None where the mask leaves nothing."""
        if self.sharded_mask is not None:
            return self.sharded_mask.block(q_rank, kv_rank)
        return layout.block(q_rank, kv_rank, local_seq, causal=self.causal)

    def whole_block(self) -> Block:
        """Everything against everything, where one rank holds all tokens in order."""
        block = WHOLE[self.causal] if self.sharded_mask is None else self.sharded_mask.block(0, 0)
        assert block is not None
        return block

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """Output and LSE of the block's queries over the block's keys alone."""
        k, v = part(k, block.kv), part(v, block.kv)
        missing = k.shape[-1] - v.shape[-1]
        out, lse = self.kernel.forward(
            part(q, block.q), k, pad(v, (0, missing)) if missing else v, scale=self.scale, causal=block.causal,
            parts=block.parts,
        )  # fmt: skip
        return out[..., : v.shape[-1]].contiguous() if missing else out, lse

    def backward(self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, block: Block) -> Gradients:
        """dq of the block's queries, dk and dv of the block's keys."""
        k, v = part(k, block.kv), part(v, block.kv)
        missing = k.shape[-1] - v.shape[-1]
        rows = (rows.pad_heads(k.shape[-1]) if missing else rows).select(block.q, dense=self.kernel.dense_rows)
        dq, dk, dv = self.kernel.backward(
            rows.dout, part(q, block.q), k, pad(v, (0, missing)) if missing else v, rows.lse, out=rows.out,
            delta=rows.delta, scale=self.scale, causal=block.causal, parts=block.parts,
        )  # fmt: skip
        return dq, dk, dv[..., : v.shape[-1]].contiguous() if missing else dv


class Strategy(Expectations, ABC):
    """One way of computing attention over a sequence that is split over ranks."""

    layout: Layout
    phase: ClassVar[str] = "training"
    """What it is for: ``training``, or over a cache of keys and values ``prefill`` or ``decode``."""
    takes_masks: ClassVar[bool] = False
    """Whether it computes packed documents and sliding windows."""
    smaller_v_travels: ClassVar[bool] = True
    """Whether heads of v that are smaller than those of q and k travel as they are; otherwise they are filled up."""
    takes_softcap: ClassVar[bool] = True
    """Whether its blocks are computed by kernels of ours, some of which take a softcap."""
    PARAMETERS: ClassVar[dict[str, str]] = {"deterministic": "the kernel's deterministic mode: same bits every call"}
    """A line of help for each keyword parameter of the constructor."""
    exchange: Any = None
    """What exchanges heads before and after, where something does."""
    KERNELS: ClassVar[tuple[str, ...]] = ()
    """The kernels that may compute its blocks, where not all may."""

    def __init__(self, context: Context, *, deterministic: bool = False) -> None:
        self.comm = context.comm
        self.parameters: dict[str, Any] = {"deterministic": deterministic}
        self._kernel_name = context.kernel
        self._kernels: dict[Any, Kernel] = {}
        self._fitting: set[Any] = set()
        self._positions: dict[tuple[int, torch.device, Layout], Tensor] = {}
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._deterministic = deterministic

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _alias_renamed_methods(cls)

    # --- what a strategy writes ---------------------------------------------------------------

    @abstractmethod
    def forward(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Output (B, S, H, D) in q's type and LSE (B, H, S) of this rank's queries."""

    @abstractmethod
    def backward(self, call: AttentionCall, rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
        """Gradients of this rank's q, k and v, in their types."""

    @classmethod
    def with_placement(cls, size: int, per_host: int, **params: Any) -> dict[str, Any]:
        """``params``, with what shape and refusals depend on filled in for ``per_host`` of ``size`` ranks a host."""
        return params

    @classmethod
    def layout_for(cls, size: int, **params: Any) -> Layout:
        """The layout that these parameters mean on ``size`` ranks. Raises `Unsupported` where they mean none."""
        return cls.layout

    @classmethod
    def why_unsupported(cls, shape: Shape, size: int, **params: Any) -> str | None:
        """Why this problem cannot run on ``size`` ranks; None where it can. Needs no process group."""
        try:
            layout = cls.layout_for(size, **params)
        except Unsupported as error:
            return str(error)
        reason = _indivisible(layout, shape.seq, size)
        if reason:
            return reason
        if shape.heads % shape.kv_heads:
            return f"{shape.heads} heads are not a multiple of {shape.kv_heads} kv heads"
        return None

    @classmethod
    def why_mask_unsupported(cls, mask: Mask, seq: int, size: int, **params: Any) -> str | None:
        """Why this mask cannot be computed over ``seq`` tokens on ``size`` ranks; None where it can."""
        if mask.plain:
            return None
        if not cls.takes_masks:
            from ringprof.strategies.registry import taking_masks

            return f"takes no packed documents and no sliding window: those that do are {', '.join(taking_masks())}"
        try:
            mask.check(seq)
            if mask.documents and params.get("documents_layout") == "per_document":
                layout = cls.layout_for(size, **params).per_document(mask.documents)
                return _indivisible(layout, seq, size)
        except (Unsupported, ValueError) as error:
            return str(error)
        return None

    # --- what a user calls --------------------------------------------------------------------

    @uncompiled
    def positions(self, seq: int, device: torch.device | str = "cpu", *, documents: Documents = None) -> Tensor:
        """Global positions (int64, length seq / N) of the tokens that this rank holds, in local order (for RoPE).

        ``documents``, here and in `shard` and `unshard`, as in `attention`: positions count on over all of them.
        """
        return self._positions_on(seq, torch.device(device), documents).clone()

    @uncompiled
    def shard(self, x: Tensor, dim: int = 1, *, documents: Documents = None) -> Tensor:
        """This rank's tokens of the full tensor ``x``, whose sequence dimension is ``dim``. Differentiable."""
        return x.index_select(dim, self._positions_on(x.shape[dim], x.device, documents))

    @uncompiled
    def unshard(self, local: Tensor, dim: int = 1, *, documents: Documents = None) -> Tensor:
        """The full tensor from every rank's share, on every rank: the inverse of `shard`. Not differentiable."""
        full = torch.cat(self.comm.all_gather(local.detach()), dim)
        order = self.layout_of(documents).order(full.shape[dim], self.comm.size).to(full.device)
        return torch.empty_like(full).index_copy_(dim, order, full)

    def layout_of(self, documents: Documents) -> Layout:
        """The layout of a sequence that packs these documents (None: one)."""
        if documents is None or self.parameters.get("documents_layout") != "per_document":
            return self.layout
        packed = Mask.of(documents=documents).documents
        if packed is None:
            return self.layout
        if packed not in self._layouts:
            while len(self._layouts) >= POSITIONS_KEPT:
                del self._layouts[next(iter(self._layouts))]
            self._layouts[packed] = self.layout.per_document(packed)
        return self._layouts[packed]

    @uncompiled
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
        documents: Documents = None,
        sinks: Tensor | None = None,
        softcap: float = 0.0,
        prefix: int = 0,
    ) -> Any:
        """Attention over the whole sequence for this rank's queries. Differentiable, also through the LSE.

        q (B, S/N, H, D), k and v (B, S/N, Hkv, D), sharded as `shard` does. Returns out (B, S/N, H, D), or (out, lse)
        with lse (B, H, S/N) float32. Raises `Unsupported` for shapes, types and options that the strategy cannot
        honour.
        Heads of v may be smaller (MLA): they travel as they are, and each block's work is that of the larger size.
        Under autocast q, k and v are cast as `scaled_dot_product_attention` casts them.

        ``documents`` are the cumulative lengths, from 0 to S, of the documents that every batch entry packs
        (``cu_seqlens`` of flash-attn; a tensor on a GPU makes the host wait for it): none sees another.
        ``window_size`` are the tokens before and after its own that a query sees, -1 for all; beside them it sees the
        first ``prefix`` tokens of its document. ``sinks`` (H) are logits that take part in the softmax of each head's
        rows and have no value; their gradient is this rank's share, to be added up over the ranks as that of every
        replicated parameter. With a ``softcap`` above 0 a score s becomes softcap · tanh(s / softcap), before the mask;
        a kernel that computes it is needed.
        """
        if dropout_p or alibi_slopes is not None:
            option = "dropout_p" if dropout_p else "alibi_slopes"
            raise Unsupported(f"{option} is not supported by any bundled strategy")
        q, k, v = _as_autocast(q, k, v)
        missing = 0 if self.smaller_v_travels else q.shape[-1] - v.shape[-1]
        if missing > 0:
            v = pad(v, (0, missing))
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        window, packed = tuple(window_size), documents is not None
        trains = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        asked = causal, scale, return_lse, sinks is not None, softcap, packed, window, prefix, trains
        self._check_call(q, k, v, asked)
        cut = None
        if packed or prefix or window != (-1, -1):
            cut = self._sharded_mask(causal, documents, window, prefix, q.shape[1] * self.comm.size)
        asks = self._kernel_requirements(cut.mask if cut else None, softcap) if cut or softcap else {}
        kernel = self.kernel_for(q, **asks)
        call = AttentionCall(kernel, scale, causal, return_lse or sinks is not None, cut)
        attend = self.differentiable
        out, lse = attend(call, q, k, v) if self.exchange is None else self.exchange.around(attend, call, q, k, v)
        out = out[..., : v.shape[-1] - missing] if missing > 0 else out
        if sinks is not None:
            assert lse is not None
            out, lse = with_sinks(out, lse, sinks)
        return (out, lse) if return_lse else out

    def differentiable(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> OutAndLse:
        """`forward`, with `backward` as its gradient."""
        result: Any = _Attention.apply(self, call, q, k, v)  # type: ignore[no-untyped-call]
        return result if call.lse_wanted else (result, None)

    def _kernel_requirements(self, mask: Mask | None, softcap: float) -> dict[str, Any]:
        """What the choice of a kernel is told beside the tensors: nothing where all kernels do."""
        asks: dict[str, Any] = {} if mask is None else mask.asks_of_kernels()
        if not softcap:
            return asks
        if not (0 < softcap < float("inf")):
            raise Unsupported(f"softcap is a positive number, or 0 for none: not {softcap}")
        if not self.takes_softcap:
            raise Unsupported(f"{type(self).__name__} {NO_SOFTCAP}")
        return {**asks, "softcap": float(softcap)}

    def _sharded_mask(
        self, causal: bool, documents: Documents, window: Sequence[int], prefix: int, seq: int
    ) -> ShardedMask | None:
        """The mask as the ranks that trade keys hold it; None for a plain one."""
        mask = mask_of_call(documents, window, causal=causal, prefix=prefix)
        reason = self.why_mask_unsupported(mask, seq, self.comm.size, **self.parameters)
        if reason:
            raise Unsupported(f"{type(self).__name__} {reason}")
        return None if mask.plain else self.sharded_mask(mask, seq, self.comm.size, **self.parameters)

    @classmethod
    def sharded_mask(cls, mask: Mask, seq: int, size: int, **params: Any) -> ShardedMask:
        """The mask over ``seq`` tokens as ``size`` ranks hold it when they compute."""
        layout = cls.layout_for(size, **params)
        if mask.documents and params.get("documents_layout") == "per_document":
            layout = layout.per_document(mask.documents)
        return sharded_mask_of(mask, *cls.layout_while_computing(layout, size), seq)

    @classmethod
    def layout_while_computing(cls, layout: Layout, size: int) -> tuple[Layout, int]:
        """The layout of the tokens when blocks are computed, and by how many ranks (or groups of them)."""
        return layout, size

    @classmethod
    def kernel_class(
        cls, name: str, device: torch.device, dtype: torch.dtype, head_dim: int, *, deterministic: bool = False,
        windows: bool = False, documents: bool = False, softcap: float = 0.0,
    ) -> type[Kernel]:  # fmt: skip
        """The kernel called ``name``, or for ``auto`` the fastest that fits. Raises `UnknownName` and `Unsupported`."""
        return choose_kernel(
            name, device, dtype, head_dim, deterministic=deterministic, among=cls.KERNELS, windows=windows,
            documents=documents, softcap=softcap,
        )  # fmt: skip

    def kernel_for(self, q: Tensor, *, windows: bool = False, documents: bool = False, softcap: float = 0.0) -> Kernel:
        """The kernel that computes blocks of tensors like ``q``, of sliding windows or documents where these are there.

        Raises `Unsupported` where it is not available.
        """
        key = q.device, q.dtype, q.shape[-1], windows, documents, softcap
        if key not in self._kernels:
            chosen = self.kernel_class(
                self._kernel_name, *key[:3], deterministic=self._deterministic, windows=windows, documents=documents,
                softcap=softcap,
            )  # fmt: skip
            made = (one for one in self._kernels.values() if type(one) is chosen and one.softcap == softcap)
            self._kernels[key] = next(made, None) or chosen(deterministic=self._deterministic, softcap=softcap)
        return self._kernels[key]

    def kernels(self) -> list[Kernel]:
        """Those that have computed blocks so far, or may have."""
        return list({id(kernel): kernel for kernel in self._kernels.values()}.values())

    # --- copies -------------------------------------------------------------------------------

    def __deepcopy__(self, memo: Any) -> Strategy:
        """The strategy itself: a copied module talks to the same ranks over the same process groups."""
        return self

    def __reduce__(self) -> Any:
        """As `create` made it, to be made again over the world: collective where torch.distributed is in use."""
        recipe = self.comm.recipe
        if recipe is None:
            raise TypeError(
                f"a {type(self).__name__} over a group that is not the world cannot be pickled: make it again"
            )
        return recipe

    # --- shared pieces ------------------------------------------------------------------------

    @property
    def hop_window(self) -> int:
        """Ranks of an inner ring that keys go round; 0 where they go no ring."""
        return 0

    @property
    def ring_size(self) -> int:
        """Ranks that the travelling tensors of this strategy go round."""
        return self.comm.size

    def forward_over_ring(
        self, call: AttentionCall, q: Tensor, tour: Iterable[tuple[int, Sequence[Tensor]]]
    ) -> tuple[Tensor, Tensor]:
        """A forward pass over the K and V of a tour of ranks, merged one after another."""
        result = Partial()
        for step, (kv_rank, kv) in enumerate(tour):
            block = self.block(call, kv_rank, q)
            if block is None:
                continue
            with ring_step("fwd", step, "block"):
                out, lse = call.forward(q, kv[0], kv[1], block)
            with ring_step("fwd", step, "merge"):
                result.merge(out, lse, block.q)
        with ring_step("fwd", step, "merge"):
            return result.result(q.dtype)

    def routing(self, call: AttentionCall, *, queries: bool = False) -> RowRouting | None:
        """What of the ranks' keys, or queries, goes round, where not all of it does."""
        if call.sharded_mask is None or not self.hop_window:
            return None
        return call.sharded_mask.routing(self.hop_window, queries=queries)

    def block(self, call: AttentionCall, kv_rank: int, q: Tensor) -> Block | None:
        """What this rank's queries see of ``kv_rank``'s keys, as far as they come to it."""
        routing = self.routing(call)
        if routing is not None and kv_rank != self.ring_rank:
            return routing.block(self.ring_rank, kv_rank)
        return call.block_between(self.layout, self.ring_rank, kv_rank, q.shape[1])

    def local_block(self, call: AttentionCall, q: Tensor) -> Block:
        """What they see of its own."""
        block = self.block(call, self.ring_rank, q)
        assert block is not None, "a token sees itself"
        return block

    def split_local_block(self, call: AttentionCall, q: Tensor, travelling: Tensor) -> tuple[Block, list[Block]]:
        """That block in an early part and what a backward pass keeps to the end.

        All of it is early where nothing travels, where what comes home last, ``travelling``, is so small that the
        additional kernel calls cost more than they hide, and where the mask is neither causal nor full.
        """
        if call.sharded_mask is not None or self.ring_size == 1 or not self.overlaps_last_hop(travelling):
            return self.local_block(call, q), []
        return split_local_block(q.shape[1], causal=call.causal)

    @property
    def ring_rank(self) -> int:
        """This rank's place among those that the travelling tensors go round."""
        return self.comm.rank

    def overlaps_last_hop(self, travelling: Tensor) -> bool:
        """Whether a hop of such a tensor is worth the kernel calls that hide it."""
        return travelling.is_cpu or travelling.nbytes >= HIDDEN_FROM_BYTES

    def _positions_on(self, seq: int, device: torch.device, documents: Documents = None) -> Tensor:
        """The positions, kept where they are wanted: of the lengths asked for last."""
        layout = self.layout_of(documents)
        reason = _indivisible(layout, seq, self.comm.size)
        if reason:
            raise Unsupported(reason)
        key = seq, device, layout
        if key not in self._positions:
            while len(self._positions) >= POSITIONS_KEPT:
                del self._positions[next(iter(self._positions))]
            self._positions[key] = layout.positions(seq, self.comm.size, self.comm.rank).to(device)
        return self._positions[key]

    def _check_call(self, q: Tensor, k: Tensor, v: Tensor, asked: tuple[Any, ...]) -> None:
        """Raises `Unsupported` for tensors that do not fit, and where the ranks do not call alike; looks once at
        each."""
        if torch._C._are_functorch_transforms_active():
            raise Unsupported(
                "torch.func transforms (grad, vmap, jvp) are not supported: take gradients by torch.autograd"
            )
        key = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, asked
        if key in self._fitting:
            return
        self._check_tensors(q, k, v)
        tensors = f"q, k and v of shape {_shapes(q, k, v)}", f"type {q.dtype}"
        options = (f"{name}={value}" for name, value in zip(_ASKED, asked, strict=True))
        self.comm.check_same_call("; ".join(("attention", *tensors, *options)))
        self._fitting.add(key)

    def _check_tensors(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        if q.dim() != 4 or k.dim() != 4 or k.shape[:3] != v.shape[:3] or v.shape[3:] > k.shape[3:]:
            raise Unsupported(f"expected q (B, S, H, D), k and v (B, S, Hkv, D): got {_shapes(q, k, v)}")
        if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
            raise Unsupported(f"q, k and v must share batch, local sequence and head_dim: got {_shapes(q, k, v)}")
        if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
            raise Unsupported(f"q, k and v must share type and device: got {q.dtype}, {k.dtype}, {v.dtype}")
        shape = Shape(q.shape[0], q.shape[1] * self.comm.size, q.shape[2], k.shape[2], q.shape[3])
        reason = self.why_unsupported(shape, self.comm.size, **self.parameters)
        if reason:
            raise Unsupported(reason)


_RENAMED_METHODS = {
    "unfit": "why_unsupported",
    "unfit_mask": "why_mask_unsupported",
    "travel": "routing",
    "home_blocks": "split_local_block",
    "hides_last_hop": "overlaps_last_hop",
    "own_block": "local_block",
    "over": "forward_over_ring",
    "cut": "sharded_mask",
    "placed": "with_placement",
    "computing": "layout_while_computing",
}
"""Old and new names of methods that a user's strategy may define or call; the old names go with the next release."""


def _alias_renamed_methods(cls: type) -> None:
    """Give each method that ``cls`` defines under one of its two names the other name, too.

    Both names resolve along the inheritance, so a user's class may define or call either, ``super().unfit`` included.
    """
    defined = dict(vars(cls))
    for old, new in _RENAMED_METHODS.items():
        if new in defined:
            setattr(cls, old, defined[new])
        elif old in defined:
            warnings.warn(f"{cls.__name__}.{old} is now called {new}", DeprecationWarning, stacklevel=3)
            setattr(cls, new, defined[old])


_alias_renamed_methods(Strategy)


def mask_of_call(documents: Documents, window: Sequence[int], *, causal: bool, prefix: int) -> Mask:
    """The mask of a call. Raises `Unsupported` where there is none such."""
    try:
        return Mask.of(documents, window, causal=causal, prefix=prefix)
    except ValueError as error:
        raise Unsupported(str(error)) from None


class _Attention(torch.autograd.Function):
    """Autograd around a strategy's two loops."""

    @staticmethod
    def forward(ctx: Any, strategy: Strategy, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Any:
        strategy.comm.meter.phase = "forward"
        q = _heads_together(q)
        out, lse = strategy.forward(call, q, k, v)
        ctx.strategy, ctx.blocks = strategy, call
        ctx.save_for_backward(*(call.saved or (q, k, v)), out, lse)
        call.saved = ()
        ctx.set_materialize_grads(False)
        return (out, lse) if call.lse_wanted else out

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        strategy, call = ctx.strategy, ctx.blocks
        dout = torch.zeros_like(out) if dout is None else as_contiguous(dout)
        rows = Rows(dout, as_contiguous(lse), out=as_contiguous(out))
        if dlse is not None or (call.lse_wanted and call.kernel.takes_delta):
            rows = _rows_with_lse_gradient(call.kernel, rows, dlse)
        strategy.comm.meter.phase = "backward"
        return (None, None, *strategy.backward(call, rows, q, k, v))


def _rows_with_lse_gradient(kernel: Kernel, rows: Rows, dlse: Tensor | None) -> Rows:
    """A gradient that reaches the LSE enters every block as delta - dLSE in place of delta.

    What ranks send is of the same shapes whether or not theirs has one: the LSE may be in the loss on some ranks only.
    """
    assert rows.out is not None
    delta = row_product(rows.dout, rows.out)
    if dlse is not None:
        delta = delta - dlse
    if kernel.takes_delta:
        return Rows(rows.dout, rows.lse, delta=delta)
    dout = rows_that_carry(rows.dout, delta)
    return Rows(dout, rows.lse, out=output_with_delta(dout, delta))


def _heads_together(q: Tensor) -> Tensor:
    """q with the strides in the order of its dimensions, for that is the order in which O and dQ will be dense."""
    if q.is_contiguous():
        return q
    strides = [stride for stride, size in zip(q.stride(), q.shape, strict=True) if size > 1]
    return q if strides == sorted(strides, reverse=True) and q.stride(-1) == 1 else q.contiguous()


def _as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def wire_type(wire: GradWire, like: Tensor) -> torch.dtype:
    """The type that a gradient travels in: at least float32, or the input's own."""
    return like.dtype if wire == "input" else wide_type(like)


def _indivisible(layout: Layout, seq: int, size: int) -> str | None:
    """Why a layout cannot cut so long a sequence; None where it can."""
    divisor = layout.divisor(size)
    if seq % divisor == 0:
        return None
    return (
        f"the {layout.name} layout on {size} ranks needs a sequence divisible by {divisor}: not {seq}"
        f" (try {max(divisor, seq // divisor * divisor)})"
    )


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
