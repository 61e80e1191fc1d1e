"""Base class of the strategies: checks, sharding, autograd, and the computation of one block.

A strategy subclasses `Strategy`, sets its layout and writes two loops, `forward` and `backward`, over a communicator
and blocks. Shapes: B batch, S local sequence, H heads, Hkv kv heads, D head_dim.
"""

from __future__ import annotations

import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.nn.functional import pad

from ringprof.workload.mask import DOCUMENTS, WINDOW, Mask, integers

from .annotate import ring_step
from .catalog import names_with_masks
from .errors import Unsupported, why_not_tensors
from .first_order import first_order
from .kernels.kernel import Gradients, Kernel, allocate_adjacent
from .kernels.merge import (
    Partial,
    Sum,
    lift_tiny_rows,
    output_with_delta,
    row_product,
    wide_type,
    with_sinks,
)
from .kernels.proof import Case, blocks_of, choose_proven
from .kernels.registry import NOTHING_REFUSED, choose_kernel
from .kernels.uncompiled import uncompiled
from .masks.cache_layout import CacheLayout
from .masks.document_layouts import DocumentsLayout as DocumentsLayout
from .masks.document_layouts import layout_for_documents
from .masks.expected import Expectations
from .masks.layouts import ALL, WHOLE, Block, Layout, as_contiguous, part, split_in_place, split_local_block
from .masks.row_routing import RowRouting, routing_of
from .masks.sharded_mask import ShardedMask, sharded_mask_of
from .transport.communicator import Communicator
from .transport.gradient_ring import GradientRing
from .transport.passes import Recoverable, in_pass

GradWire = Literal["fp32", "input"]
"""Type that gradients travel in: at least float32, or the input's own."""
DOCUMENTS_LAYOUT_HELP = (
    "zigzag over the packed sequence or over each document, or whole documents dealt; auto: the fastest by estimate"
)
Documents = Sequence[int] | Tensor | None
"""Cumulative lengths of packed documents (``cu_seqlens``), from 0 to the sequence length; None: one document."""
NO_SOFTCAP = "takes no softcap: the bundled strategies do, with a kernel that computes it (`ringprof kernels`)"
OVERLAP_FROM_BYTES = 2**25
"""Bytes from which, on a GPU, the last hop of a backward pass is worth two more kernel calls that overlap it."""
_COMPARED_OPTIONS = (
    "causal", "softmax_scale", "return_lse", "sinks", "softcap", "packed", "window_size", "prefix", "gradients",
)  # fmt: skip
"""Options that all ranks must call with alike, beside shapes and types."""
_COMPARED_PARTS = ("documents", *_COMPARED_OPTIONS, "q", "k", "v", "type")
"""Parts that ranks compare at every call, once there were packed documents: options, and shapes of tensors."""
_PLAIN_MASKS = {causal: Mask(causal=causal) for causal in (True, False)}
OutAndLse = tuple[Tensor, Tensor | None]
"""Output, and the LSE where it is wanted."""
_Use = tuple[int, int, int, bool]
"""Heads of q and of k, size of v's heads, and whether the mask is causal."""
POSITIONS_KEPT = 8
"""Number of position tensors that a strategy caches."""
_KEPT_DOCUMENTS = 4096
_sharded_documents: dict[int, None] = {}
"""Hashes of the latest lists of documents and their layouts that this process has asked for, of any strategy."""


@dataclass(frozen=True)
class Shape:
    """The sizes of one attention problem over all ranks; ``seq`` is the global sequence length."""

    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    kv_length: int | None = None
    """Keys per sequence, of which the last ``seq`` belong to the new tokens; None: ``seq``, without a cache."""


@dataclass(frozen=True)
class Context:
    """The environment of a strategy: its ranks, and the name of its kernel (``auto``: the fastest that fits)."""

    comm: Communicator
    kernel: str = "auto"


@dataclass(slots=True)
class Rows:
    """The tensors per query row that a backward pass needs: ``dout``, ``lse``, and either ``out`` or ``delta``.

    dout and out are (B, S, H, D); lse and delta = rowsum(dO · O) are (B, H, S). All tensors are dense.
    """

    dout: Tensor
    lse: Tensor
    out: Tensor | None = None
    delta: Tensor | None = None
    _parts: dict[tuple[Any, Any], Rows] = field(default_factory=dict, repr=False)

    def select(self, queries: slice, *, dense: bool = True) -> Rows:
        """Return the rows of some queries as dense tensors; cached, because several blocks may need them.

        With ``dense`` false, O and dO may be views, unless delta is given.
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

    def narrow_heads(self, first: int, count: int) -> Rows:
        """Return the rows of some query heads; O and dO may be views."""
        dout, out = (None if x is None else x.narrow(2, first, count) for x in (self.dout, self.out))
        lse, delta = (None if x is None else as_contiguous(x.narrow(1, first, count)) for x in (self.lse, self.delta))
        assert dout is not None and lse is not None
        return Rows(dout, lse, out, delta)

    def pad_heads(self, head_dim: int) -> Rows:
        """Return the rows with O and dO padded with zeros to ``head_dim``; cached."""
        missing = head_dim - self.dout.shape[-1]
        if missing and ("filled", missing) not in self._parts:
            out = None if self.out is None else pad(self.out, (0, missing))
            self._parts["filled", missing] = Rows(pad(self.dout, (0, missing)), self.lse, out, self.delta)
        return self._parts["filled", missing] if missing else self


@dataclass(slots=True)
class AttentionCall:
    """One call of `Strategy.attention`: its kernel, scale and mask, and the computation of its blocks.

    Heads of v that are smaller than those of q and k are padded with zeros only for kernels that do not take them.
    They travel, and are merged, without padding.
    """

    kernel: Kernel
    scale: float
    causal: bool
    lse_wanted: bool = False
    """Whether a gradient may come through the LSE on some rank: all ranks must then run the same backward pass."""
    sharded_mask: ShardedMask | None = None
    """The mask, sharded; None where it is only causal, or there is none."""
    cache_layout: CacheLayout | None = None
    """Which keys each rank holds, where they are cached; None in training."""
    saved: tuple[Tensor, ...] = ()
    """q, k and v to save for the backward pass, where they are not those of the call."""

    def block_between(self, layout: Layout, q_rank: int, kv_rank: int, local_seq: int) -> Block | None:
        """Return the block of ``q_rank``'s queries with ``kv_rank``'s keys; None where they see none."""
        if self.sharded_mask is not None:
            return self.sharded_mask.block(q_rank, kv_rank)
        return layout.block(q_rank, kv_rank, local_seq, causal=self.causal)

    def whole_block(self) -> Block:
        """Return the block of all queries with all keys, for a rank that holds all tokens in order."""
        block = WHOLE[self.causal] if self.sharded_mask is None else self.sharded_mask.block(0, 0)
        assert block is not None
        return block

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """Compute the output and LSE of the block's queries over the block's keys alone."""
        k, v = part(k, block.kv), part(v, block.kv)
        missing = self._v_padding(k, v)
        out, lse = self.kernel.forward(
            part(q, block.q), k, pad(v, (0, missing)) if missing else v, scale=self.scale, causal=block.causal,
            parts=block.parts,
        )  # fmt: skip
        return out[..., : v.shape[-1]].contiguous() if missing else out, lse

    def backward_into(self, own: Gradients, rows: Rows, q: Tensor, k: Tensor, v: Tensor, block: Block) -> None:
        """Compute the gradients of a block, and write them to its rows and heads of ``own``, those of q, k and v."""
        dq, dk, dv = own
        if block.kv_heads != ALL:
            first, end, _ = block.kv_heads.indices(k.shape[2])
            group = q.shape[2] // k.shape[2]
            k, v, dk, dv = (x.narrow(2, first, end - first) for x in (k, v, dk, dv))
            q, dq = (x.narrow(2, first * group, (end - first) * group) for x in (q, dq))
            rows = rows.narrow_heads(first * group, (end - first) * group)
        rows = rows.select(block.q, dense=self.kernel.dense_rows)
        self.kernel.backward(
            rows.dout, part(q, block.q), part(k, block.kv), part(v, block.kv), rows.lse, out=rows.out, delta=rows.delta,
            scale=self.scale, causal=block.causal, parts=block.parts,
            into=(part(dq, block.q), part(dk, block.kv), part(dv, block.kv)),
        )  # fmt: skip

    def _v_padding(self, k: Tensor, v: Tensor) -> int:
        """Return by how much the kernel needs the heads of ``v`` padded."""
        missing = k.shape[-1] - v.shape[-1]
        return 0 if not missing or self.kernel.takes_v_head_dim(k.shape[-1], v.shape[-1]) else missing

    def backward(self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, block: Block) -> Gradients:
        """Compute dq of the block's queries, and dk and dv of the block's keys."""
        k, v = part(k, block.kv), part(v, block.kv)
        missing = self._v_padding(k, v)
        rows = (rows.pad_heads(k.shape[-1]) if missing else rows).select(block.q, dense=self.kernel.dense_rows)
        dq, dk, dv = self.kernel.backward(
            rows.dout, part(q, block.q), k, pad(v, (0, missing)) if missing else v, rows.lse, out=rows.out,
            delta=rows.delta, scale=self.scale, causal=block.causal, parts=block.parts,
        )  # fmt: skip
        return dq, dk, dv[..., : v.shape[-1]].contiguous() if missing else dv


class Strategy(Expectations, Recoverable, ABC):
    """A strategy for attention over a sequence that is split over ranks (context parallelism)."""

    layout: Layout
    """The layout: which tokens each rank holds."""
    phase: ClassVar[str] = "training"
    """Purpose: ``training``, or over a cache of keys and values ``prefill`` or ``decode``."""
    takes_masks: ClassVar[bool] = False
    """Whether the strategy supports packed documents and sliding windows."""
    sends_smaller_v: ClassVar[bool] = True
    """Whether heads of v that are smaller than those of q and k travel without padding."""
    GRAD_WIRE: ClassVar[str] = "input"
    """Type in which gradients are sent, where it is no parameter: ``fp32``, or ``input`` (the input's, or unknown)."""
    takes_softcap: ClassVar[bool] = True
    """Whether the blocks are computed by ringprof's kernels, some of which support a softcap."""
    PARAMETERS: ClassVar[dict[str, str]] = {"deterministic": "the kernel's deterministic mode: same bits every call"}
    """One line of help for each keyword parameter of the constructor."""
    exchange: Any = None
    """The exchange of heads before and after attention; None where there is none."""
    KERNELS: ClassVar[tuple[str, ...]] = ()
    """Names of the kernels that can compute the blocks; empty: all."""
    calls: ClassVar[int] = 0
    """Number of calls of any strategy's attention in this process."""

    def __init__(self, context: Context, *, deterministic: bool = False) -> None:
        self.comm = context.comm
        self.parameters: dict[str, Any] = {"deterministic": deterministic}
        self._kernel_name = context.kernel
        self._kernels: dict[Any, Kernel] = {}
        self._checked_calls: set[Any] = set()
        self._positions: dict[tuple[int, torch.device, Layout], Tensor] = {}
        self._deterministic = deterministic

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _alias_renamed_methods(cls)

    # --- to be implemented by a strategy ------------------------------------------------------

    @abstractmethod
    def forward(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the output (B, S, H, D) in q's type and the LSE (B, H, S) of this rank's queries."""

    @abstractmethod
    def backward(self, call: AttentionCall, rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
        """Compute the gradients of this rank's q, k and v, in their types."""

    @classmethod
    def with_placement(cls, size: int, per_host: int, **params: Any) -> dict[str, Any]:
        """Return ``params``, with defaults that depend on the ranks' placement filled in.

        ``per_host`` of the ``size`` ranks share a host.
        """
        return params

    @classmethod
    def layout_for(cls, size: int, **params: Any) -> Layout:
        """Return the layout for these parameters on ``size`` ranks. Raises `Unsupported` where there is none."""
        return cls.layout

    @classmethod
    def why_unsupported(cls, shape: Shape, size: int, **params: Any) -> str | None:
        """Return why this problem cannot run on ``size`` ranks; None where it can. Needs no process group."""
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
        """Return why this mask is not supported over ``seq`` tokens on ``size`` ranks; None where it is."""
        try:
            mask.check(seq)
            if mask.plain:
                return None
            if not cls.takes_masks:
                others = ", ".join(names_with_masks())
                return f"takes no packed documents and no sliding window: those that do are {others}"
            if mask.documents and params.get("documents_layout", "packed") != "packed":
                kind, layout = params["documents_layout"], cls.layout_for(size, **params)
                return _indivisible(layout_for_documents(layout, kind, mask.documents, size), seq, size)
        except (Unsupported, ValueError) as error:
            return str(error)
        return None

    # --- called by users ----------------------------------------------------------------------

    @uncompiled
    def positions(self, seq: int, device: torch.device | str = "cpu", *, documents: Documents = None) -> Tensor:
        """Return the global positions (int64, length seq / N) of this rank's tokens, in local order (for RoPE).

        ``documents``, here and in `shard` and `unshard`, are those of `attention`. Positions do not restart with a
        document.
        """
        return self._positions_on(seq, torch.device(device), documents).clone()

    @uncompiled
    def shard(self, x: Tensor, dim: int = 1, *, documents: Documents = None) -> Tensor:
        """Return this rank's tokens of the full tensor ``x``, whose sequence dimension is ``dim``. Differentiable."""
        return x.index_select(dim, self._positions_on(x.shape[dim], x.device, documents))

    @uncompiled
    def unshard(self, local: Tensor, dim: int = 1, *, documents: Documents = None) -> Tensor:
        """Gather the full tensor from every rank's shard, on every rank: the inverse of `shard`. Not differentiable."""
        full = torch.cat(self.comm.all_gather(local.detach()), dim)
        documents = mask_of_call(documents, seq=full.shape[dim]).documents
        order = self.layout_of(documents).order(full.shape[dim], self.comm.size).to(full.device)
        return torch.empty_like(full).index_copy_(dim, order, full)

    def layout_of(self, documents: Documents = None) -> Layout:
        """Return the layout of a sequence that packs these documents (None: one)."""
        packed = mask_of_call(documents).documents
        if packed is None:
            return self.layout
        while len(_sharded_documents) >= _KEPT_DOCUMENTS:
            del _sharded_documents[next(iter(_sharded_documents))]
        layout = self._layout_for(packed)
        _sharded_documents[hash((packed, layout.name, self.comm.size))] = None
        return layout

    def _layout_for(self, documents: tuple[int, ...]) -> Layout:
        kind = self.parameters.get("documents_layout", "packed")
        return layout_for_documents(self.layout, kind, documents, self.comm.size)

    def _check_sharding(self, documents: tuple[int, ...]) -> None:
        """Refuse documents for which ``auto`` chooses a layout that the caller cannot know of.

        Without documents, `shard` and `positions` return the packed layout: results would be wrong without an error.
        Raises `Unsupported`.
        """
        if self.parameters.get("documents_layout") != "auto":
            return
        layout = self._layout_for(documents)
        sharded = hash((documents, layout.name, self.comm.size)) in _sharded_documents
        if layout is not self.layout and not sharded:
            raise Unsupported(
                f"documents_layout=auto takes the layout {layout.name!r} for these documents, but this process has not"
                " sharded by it: give documents= to shard and positions, too, or create the strategy with"
                " documents_layout='packed', the layout of shard and positions without documents"
            )

    @uncompiled
    @in_pass("forward")
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
        cu_seqlens: Documents = None,
    ) -> Any:
        """Compute attention over the whole sequence for this rank's queries. Differentiable, also through the LSE.

        q is (B, S/N, H, D), k and v are (B, S/N, Hkv, D), sharded by `shard`. Returns out (B, S/N, H, D), or (out, lse)
        with lse (B, H, S/N) in float32 (float64 for float64 input). Raises `Unsupported` for shapes, types and options
        that the strategy does not support. Heads of v may be smaller (MLA): they travel without padding, but a block's
        work is that of the larger size unless the kernel takes both. Under autocast q, k and v are cast as
        `scaled_dot_product_attention` does it.

        * ``documents``, or ``cu_seqlens`` as in flash-attn: cumulative lengths, from 0 to S, of the documents that
          every batch entry packs. Tokens see only their own document. A tensor on a GPU makes the host wait for it.
        * ``window_size``: the numbers of tokens before and after its own that a query sees, -1 for all.
        * ``prefix``: outside the window, a query also sees the first ``prefix`` tokens of its document.
        * ``sinks`` (H): logits without a value that take part in the softmax of each head's rows. Their gradient is
          this rank's share, to be summed over the ranks like that of every replicated parameter.
        * ``softmax_scale``: any finite number but 0; None: 1/√D.
        * ``softcap``: above 0, a score s becomes softcap · tanh(s / softcap) before the mask. Needs a kernel that
          supports it.
        """
        Strategy.calls += 1
        if cu_seqlens is not None:
            if documents is not None:
                raise Unsupported("documents and cu_seqlens are two names of the same argument: give one of them")
            documents = cu_seqlens
        if dropout_p or alibi_slopes is not None:
            option = "dropout_p" if dropout_p else "alibi_slopes"
            raise Unsupported(f"{option} is not supported by any bundled strategy")
        device = q.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
        missing = 0 if self.sends_smaller_v else q.shape[-1] - v.shape[-1]
        if missing > 0:
            v = pad(v, (0, missing))
        q, scale = scaled_queries(q, softmax_scale)
        try:
            # A tensor on a GPU makes the host wait: copy it once.
            documents = None if documents is None else integers(documents, DOCUMENTS)
            window = integers(window_size, WINDOW)
        except ValueError as error:
            raise Unsupported(str(error)) from None
        trains = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        signed_scale = scale if softmax_scale is None else softmax_scale
        packed = documents is not None
        options = causal, signed_scale, return_lse, sinks is not None, softcap, packed, window, prefix, trains
        self._check_call(q, k, v, options, documents)
        sharded_mask, seq, size = None, q.shape[1] * self.comm.size, self.comm.size
        is_plain = not packed and not prefix and window == (-1, -1)
        mask = (_PLAIN_MASKS.get(causal) if is_plain else None) or mask_of_call(
            documents, window, causal=causal, prefix=prefix, seq=seq
        )
        if not mask.plain:
            reason = self.why_mask_unsupported(mask, seq, size, **self.parameters)
            if reason:
                raise Unsupported(f"{type(self).__name__} {reason}")
            if mask.documents:
                self._check_sharding(mask.documents)
            sharded_mask = self.sharded_mask(mask, seq, size, **self.parameters)
        use = q.shape[2], k.shape[2], v.shape[3], causal
        kernel = self.kernel_for(q, use=use, **self._kernel_requirements(mask, softcap))
        call = AttentionCall(kernel, scale, causal, return_lse or sinks is not None, sharded_mask)
        attend = self.differentiable
        out, lse = attend(call, q, k, v) if self.exchange is None else self.exchange.around(attend, call, q, k, v)
        out = out[..., : v.shape[-1] - missing] if missing > 0 else out
        if sinks is not None:
            assert lse is not None
            out, lse = with_sinks(out, lse, sinks)
        return (out, lse) if return_lse else out

    def differentiable(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> OutAndLse:
        """Run `forward`, with `backward` as its gradient."""
        result: Any = _Attention.apply(self, call, q, k, v)  # type: ignore[no-untyped-call]
        return result if call.lse_wanted else (result, None)

    def _kernel_requirements(self, mask: Mask, softcap: float) -> dict[str, Any]:
        """Return the features that the kernel must support, as arguments of `kernel_for`; empty if all kernels do."""
        needs: dict[str, Any] = mask.asks_of_kernels()
        if not softcap:
            return needs
        if not (0 < softcap < float("inf")):
            raise Unsupported(f"softcap is a positive number, or 0 for none: not {softcap}")
        if not self.takes_softcap:
            raise Unsupported(f"{type(self).__name__} {NO_SOFTCAP}")
        return {**needs, "softcap": float(softcap)}

    @classmethod
    def sharded_mask(cls, mask: Mask, seq: int, size: int, **params: Any) -> ShardedMask:
        """Return the mask over ``seq`` tokens, sharded as ``size`` ranks hold them while they compute."""
        layout = cls.layout_for(size, **params)
        if mask.documents:
            layout = layout_for_documents(layout, params.get("documents_layout", "packed"), mask.documents, size)
        return sharded_mask_of(mask, *cls.layout_while_computing(layout, size), seq)

    @classmethod
    def layout_while_computing(cls, layout: Layout, size: int) -> tuple[Layout, int]:
        """Return (layout of the tokens while blocks are computed, number of ranks or rank groups that share them)."""
        return layout, size

    @classmethod
    def kernel_class(
        cls, name: str, device: torch.device, dtype: torch.dtype, head_dim: int, *, deterministic: bool = False,
        windows: bool = False, documents: bool = False, softcap: float = 0.0,
        refused: Mapping[str, str] = NOTHING_REFUSED,
    ) -> type[Kernel]:  # fmt: skip
        """Return the kernel called ``name``; ``auto``: the fastest that fits. Raises `UnknownName`, `Unsupported`.

        ``refused``: why kernels are not used, by name.
        """
        return choose_kernel(
            name, device, dtype, head_dim, deterministic=deterministic, among=cls.KERNELS, windows=windows,
            documents=documents, softcap=softcap, refused=refused,
        )  # fmt: skip

    def kernel_for(
        self, q: Tensor, *, windows: bool = False, documents: bool = False, softcap: float = 0.0,
        use: _Use | None = None,
    ) -> Kernel:  # fmt: skip
        """Return the kernel for blocks of tensors like ``q`` that supports ``windows``, ``documents`` and ``softcap``.

        With ``use``, collective the first time: the kernel has proven itself on all ranks, and calls without it then
        return that kernel. Raises `Unsupported` where no kernel is available.
        """
        key = type(q), q.device, q.dtype, q.shape[-1], windows, documents, softcap, use
        if key not in self._kernels:
            chosen = self._proven_class(q, use, softcap, {"windows": windows, "documents": documents})
            existing = (x for x in self._kernels.values() if type(x) is chosen and x.softcap == softcap)
            kernel = next(existing, None) or chosen(deterministic=self._deterministic, softcap=softcap)
            self._kernels[key] = self._kernels[(*key[:-1], None)] = kernel
        return self._kernels[key]

    def _proven_class(self, q: Tensor, use: _Use | None, softcap: float, mask: dict[str, Any]) -> type[Kernel]:
        """Return the kernel that `kernel_for` chooses; with ``use``, one that all ranks have found to be right."""
        name, deterministic, size = self._kernel_name, self._deterministic, q.shape[-1]

        def choose(refused: Mapping[str, str]) -> type[Kernel]:
            options: dict[str, Any] = {"refused": refused} if refused else {}
            return self.kernel_class(
                name, q.device, q.dtype, size, deterministic=deterministic, softcap=softcap, **mask, **options
            )

        # Kernels of other packages' strategies compute in their own way, and the reference is the truth.
        exempt = self.KERNELS or name == "reference" or q.is_meta or not q.is_floating_point()
        if use is None or exempt or detect_fake_mode([q]) is not None:
            return choose({})
        heads, kv_heads, v_head_dim, causal = use
        degree, trains = 1 if self.exchange is None else self.exchange.degree, self.phase == "training"
        heads, kv_heads = heads // degree, max(1, lcm(kv_heads, degree) // degree)
        group, shape = max(1, heads // kv_heads), (q.shape[0], kv_heads)
        wanted = Case("", q.dtype, size, v_head_dim, group, softcap, deterministic, trains, shape)
        blocks = blocks_of(causal=causal, several_ranks=self.ring_size > 1 or not trains, **mask)
        settings = type(self), name
        return choose_proven(choose, settings, wanted, blocks, q.device, self.comm.group, self.comm.gather_objects)

    def kernels(self) -> list[Kernel]:
        """Return the kernels chosen so far."""
        return list({id(kernel): kernel for kernel in self._kernels.values()}.values())

    # --- copies -------------------------------------------------------------------------------

    def __deepcopy__(self, memo: Any) -> Strategy:
        """Return the strategy itself: a copied module uses the same ranks and the same process groups."""
        return self

    def __reduce__(self) -> Any:
        """Return how to create the strategy again over the world: collective where torch.distributed is in use."""
        recipe = self.comm.recipe
        if recipe is None:
            raise TypeError(
                f"a {type(self).__name__} over a group that is not the world cannot be pickled: make it again"
            )
        return recipe

    # --- shared by strategies -----------------------------------------------------------------

    @property
    def hop_window(self) -> int:
        """Number of ranks of an inner ring that keys travel around; 0 where there is no ring."""
        return 0

    @property
    def ring_size(self) -> int:
        """Number of ranks that this strategy's tensors travel around."""
        return self.comm.size

    def forward_over_ring(
        self, call: AttentionCall, q: Tensor, tour: Iterable[tuple[int, Sequence[Tensor]]]
    ) -> tuple[Tensor, Tensor]:
        """Run a forward pass over a ``tour`` of (rank, K and V), and merge the blocks one after another."""
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

    def backward_over_ring(
        self, call: AttentionCall, rows: Rows, q: Tensor, k: Tensor, v: Tensor,
        tour: Iterable[tuple[int, Sequence[Tensor]]], gradient_ring: GradientRing, *, sends_first: bool = False,
    ) -> Gradients:  # fmt: skip
        """Run a backward pass over a ``tour`` of (rank, K and V); dK and dV return by the ``gradient_ring``.

        With ``sends_first``, dK and dV of a block are sent before its dQ is added, and all is freed once it is used.
        """
        # Two halves, whose gradients one set of tensors holds, overlap the first hop and the last; no sum joins them.
        halves = self.split_in_place(call, q, k, v) if gradient_ring.single_last_hop else []
        own = (torch.empty_like(q), *allocate_adjacent(k, v)) if halves else None
        first_block, held_back = (halves[0], halves[1:]) if halves else self.split_local_block(call, q, k)
        dq = Sum(q, 2 if held_back and own is None else self.ring_size)
        local_dq: list[tuple[slice, Tensor]] = []
        for step, (kv_rank, kv) in enumerate(tour):
            block, grads = first_block if step == 0 else self.block(call, kv_rank, q), None
            if block is None:
                gradient_ring.add(step, None, ALL)
                continue
            with ring_step("bwd", step, "block"):
                if own is not None and step == 0:
                    call.backward_into(own, rows, q, kv[0], kv[1], block)
                    continue
                grads = call.backward(rows, q, kv[0], kv[1], block)
            if sends_first:
                gradient_ring.add(step, grads[1:], block.kv)
                block_dq, grads = grads[0], None
                with ring_step("bwd", step, "merge"):
                    dq.add(block_dq, block.q)
                del block_dq
            else:
                with ring_step("bwd", step, "merge"):
                    dq.add(grads[0], block.q)
                gradient_ring.add(step, grads[1:], block.kv)
        if sends_first:
            del kv
        for block in held_back:
            # These blocks overlap the last hops of dK and dV.
            with ring_step("bwd", self.ring_size, "block"):
                if own is None:
                    (own_dq, *own_dkv), q_rows, kv_rows = call.backward(rows, q, k, v, block), block.q, block.kv
                else:
                    call.backward_into(own, rows, q, k, v, block)
                    (own_dq, *own_dkv), q_rows, kv_rows = own, ALL, ALL
            gradient_ring.keep(own_dkv, kv_rows)
            local_dq.append((q_rows, own_dq))
            gradient_ring.post_last_hop()
        whole_dq = None
        if own is not None:
            # The sum of dQ overlaps the end of the last hop.
            with ring_step("bwd", self.ring_size, "merge"):
                whole_dq = dq.result(q.dtype, local_dq)
        returned = gradient_ring.receive()
        with ring_step("bwd", self.ring_size, "merge"):
            if whole_dq is None and self.routing(call) is None:
                whole_dq = dq.result(q.dtype, local_dq)
            dk, dv = gradient_ring.total(returned)
        del returned
        return dq.result(q.dtype) if whole_dq is None else whole_dq, dk, dv

    def split_in_place(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> list[Block]:
        """Split the local block into two halves with no gradient in common; none where that gains nothing.

        It needs a kernel that writes into views, and a last hop that takes longer than another kernel call.
        """
        padded = not call.kernel.takes_v_head_dim(k.shape[-1], v.shape[-1])
        if not call.kernel.writes_into or self.ring_size == 1 or padded or not q.is_contiguous():
            return []
        routing = self.routing(call)
        if not self.overlaps_last_hop(k if routing is None else k.narrow(1, 0, min(routing.rows, k.shape[1]))):
            return []
        halves = split_in_place(self.local_block(call, q), k.shape[2])
        return halves if len(halves) == 2 else []

    def routing(self, call: AttentionCall, *, queries: bool = False) -> RowRouting | None:
        """Return which keys, or ``queries``, travel around the ring; None where whole shards or nothing travels."""
        if call.sharded_mask is None or not self.hop_window:
            return None
        return routing_of(call.sharded_mask, self.hop_window, queries=queries)

    def block(self, call: AttentionCall, kv_rank: int, q: Tensor) -> Block | None:
        """Return the block of this rank's queries with the keys that arrive from ``kv_rank``; None if it is empty."""
        routing = self.routing(call)
        if routing is not None and kv_rank != self.ring_rank:
            return routing.block(self.ring_rank, kv_rank)
        return call.block_between(self.layout, self.ring_rank, kv_rank, q.shape[1])

    def local_block(self, call: AttentionCall, q: Tensor) -> Block:
        """Return the local block: this rank's queries with its own keys."""
        block = self.block(call, self.ring_rank, q)
        assert block is not None, "a token sees itself"
        return block

    def split_local_block(self, call: AttentionCall, q: Tensor, travelling: Tensor) -> tuple[Block, list[Block]]:
        """Split the local block: the part to compute first, and the blocks that overlap the last hop.

        The block stays whole where nothing travels, and where the mask is neither causal nor full. It also stays whole
        where the last hop, of a tensor like ``travelling``, takes less time than the additional kernel calls.
        """
        if call.sharded_mask is not None or self.ring_size == 1 or not self.overlaps_last_hop(travelling):
            return self.local_block(call, q), []
        return split_local_block(q.shape[1], causal=call.causal)

    @property
    def ring_rank(self) -> int:
        """This rank's position among the ranks that tensors travel around."""
        return self.comm.rank

    def overlaps_last_hop(self, travelling: Tensor) -> bool:
        """Return whether a hop of a tensor like ``travelling`` is worth the additional kernel calls that overlap it."""
        return travelling.is_cpu or travelling.nbytes >= OVERLAP_FROM_BYTES

    def _positions_on(self, seq: int, device: torch.device, documents: Documents = None) -> Tensor:
        """Return the positions of this rank's tokens among ``seq``, int64 on ``device``; the latest few are cached."""
        layout = self.layout_of(mask_of_call(documents, seq=seq).documents)
        reason = _indivisible(layout, seq, self.comm.size)
        if reason:
            raise Unsupported(reason)
        key = seq, device, layout
        if key not in self._positions:
            while len(self._positions) >= POSITIONS_KEPT:
                del self._positions[next(iter(self._positions))]
            with torch.inference_mode(False):
                self._positions[key] = layout.positions(seq, self.comm.size, self.comm.rank).to(device)
        return self._positions[key]

    def _check_call(
        self, q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], documents: tuple[int, ...] | None
    ) -> None:
        """Check, once per kind of call, that the tensors fit and that all ranks make the same call.

        From a group's first call with documents on, its ranks compare every call. Raises `Unsupported` where two calls
        differ.
        """
        if torch._C._are_functorch_transforms_active():
            raise Unsupported(
                "torch.func transforms (grad, vmap, jvp) are not supported: take gradients by torch.autograd"
            )
        key = (
            self.comm.token, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
            options, type(q),
        )  # fmt: skip
        compares, parts = self.comm.compares_calls(), {}
        if compares or documents is not None:
            call = documents or (), *options, q.shape, k.shape, v.shape, q.dtype
            parts = dict(zip(_COMPARED_PARTS, call, strict=True))
        if compares:
            self.comm.compare_call(parts, may_pass=q.is_cuda)
        if key not in self._checked_calls:
            self._check_new_call(q, k, v, options, alone=compares)
            self._checked_calls.add(key)
        if documents is not None and not compares:
            self.comm.compare_call(parts, may_pass=q.is_cuda)

    def _check_new_call(self, q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], *, alone: bool) -> None:
        """Check a kind of call that is new; with ``alone``, the ranks have compared it already."""
        problem = _why_not_attention(q, k, v)
        if problem is None:
            shape = Shape(q.shape[0], q.shape[1] * self.comm.size, q.shape[2], k.shape[2], q.shape[3])
            problem = self.why_unsupported(shape, self.comm.size, **self.parameters)
        tensors = f"q, k and v of shape {_shapes(q, k, v)}", f"type {q.dtype}", f"device {q.device.type}"
        described = (f"{name}={value}" for name, value in zip(_COMPARED_OPTIONS, options, strict=True))
        if not alone:
            # Before the refusal: shapes that differ are what every rank has to hear of.
            self.comm.check_same_call("; ".join(("attention", *tensors, *described)))
        if problem:
            raise Unsupported(problem)


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
    "held": "local_shapes",
    "query_places": "query_positions",
    "smaller_v_travels": "sends_smaller_v",
}
"""Old and new names of methods that a user's strategy may define or call. The next release removes the old names."""


def _alias_renamed_methods(cls: type) -> None:
    """Make each renamed method that ``cls`` defines available under both its names.

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


def mask_of_call(
    documents: Documents, window: Sequence[int] = (-1, -1), *, causal: bool = True, prefix: int = 0,
    seq: int | None = None,
) -> Mask:  # fmt: skip
    """Return the mask of a call with these options, over a sequence of ``seq`` tokens if that is known.

    Raises `Unsupported` where they make no valid mask, and where the documents are not the whole sequence.
    """
    try:
        mask = Mask.of(documents, window, causal=causal, prefix=prefix)
        if seq is not None:
            mask.check(seq)
        return mask
    except ValueError as error:
        raise Unsupported(str(error)) from None


def positions_in_documents(positions: Tensor, documents: Sequence[int] | None) -> Tensor:
    """Return the position of each token in its document, from those in the packed sequence. The host does not wait."""
    if documents is None:
        return positions
    starts = torch.tensor(documents)
    if positions.is_cuda:
        starts = starts.pin_memory().to(positions.device, non_blocking=True)
    return positions - starts[torch.searchsorted(starts, positions, right=True) - 1]


def checksum(tensors: Iterable[Any]) -> int:
    """Return a checksum of the integer tensors among ``tensors``, shapes included. Waits for those on a GPU."""
    value = 0
    for x in tensors:
        if isinstance(x, Tensor) and x.dim() and not x.is_floating_point():
            value = zlib.crc32(str(x.shape).encode(), value)
            value = zlib.crc32(x.detach().cpu().contiguous().numpy().tobytes(), value)
    return value


def _why_not_attention(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return why no strategy computes attention of these tensors; None where one may."""
    if problem := why_not_tensors(q, k, v):
        return problem
    if q.dim() != 4 or k.dim() != 4 or k.shape[:3] != v.shape[:3] or v.shape[3:] > k.shape[3:]:
        return f"expected q (B, S, H, D), k and v (B, S, Hkv, D): got {_shapes(q, k, v)}"
    if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        return f"q, k and v must share batch, local sequence and head_dim: got {_shapes(q, k, v)}"
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        return f"q, k and v must share type and device: got {q.dtype}, {k.dtype}, {v.dtype}"
    return None


def scaled_queries(q: Tensor, softmax_scale: float | None) -> tuple[Tensor, float]:
    """Return q and the positive scale of its scores; a negative ``softmax_scale`` negates q instead.

    Kernels apply the scale after the mask, so that -inf times a negative scale, or 0, would be wrong.
    Raises `Unsupported` for 0 and for a scale that is not finite.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if 0 < scale < float("inf"):
        return q, scale
    if not -float("inf") < scale < 0:
        raise Unsupported(f"softmax_scale is a finite number other than 0 (None: 1/sqrt(head_dim)): not {scale}")
    return -q, -scale


class _Attention(torch.autograd.Function):
    """Autograd function over a strategy's `forward` and `backward`."""

    @staticmethod
    def forward(ctx: Any, strategy: Strategy, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Any:
        q = _heads_together(q)
        out, lse = strategy.forward(call, q, k, v)
        ctx.strategy, ctx.comm, ctx.blocks = strategy, strategy.comm, call
        ctx.save_for_backward(*(call.saved or (q, k, v)), out, lse)
        call.saved = ()
        ctx.set_materialize_grads(False)
        return (out, lse) if call.lse_wanted else out

    @staticmethod
    @first_order
    @in_pass("backward")
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        strategy, call = ctx.strategy, ctx.blocks
        dout = torch.zeros_like(out) if dout is None else as_contiguous(dout)
        rows = Rows(dout, as_contiguous(lse), out=as_contiguous(out))
        if dlse is not None or (call.lse_wanted and call.kernel.takes_delta):
            rows = _rows_with_lse_gradient(call.kernel, rows, dlse)
        return (None, None, *strategy.backward(call, rows, q, k, v))


def _rows_with_lse_gradient(kernel: Kernel, rows: Rows, dlse: Tensor | None) -> Rows:
    """Add the gradient of the LSE to the rows: every block uses delta - dLSE in place of delta.

    Ranks send the same shapes with and without such a gradient: the LSE may be in the loss on some ranks only.
    """
    assert rows.out is not None
    delta = row_product(rows.dout, rows.out)
    if dlse is not None:
        delta = delta - dlse
    if kernel.takes_delta:
        return Rows(rows.dout, rows.lse, delta=delta)
    dout = lift_tiny_rows(rows.dout, delta)
    return Rows(dout, rows.lse, out=output_with_delta(dout, delta))


def _heads_together(q: Tensor) -> Tensor:
    """Return q with its strides in the order of its dimensions, copied if needed: O and dQ get the same order."""
    if q.is_contiguous():
        return q
    strides = [stride for stride, size in zip(q.stride(), q.shape, strict=True) if size > 1]
    return q if strides == sorted(strides, reverse=True) and q.stride(-1) == 1 else q.contiguous()


def wire_type(wire: GradWire, like: Tensor) -> torch.dtype:
    """Return the type that a gradient travels in: at least float32, or that of ``like``."""
    return like.dtype if wire == "input" else wide_type(like)


def _indivisible(layout: Layout, seq: int, size: int) -> str | None:
    """Return why a layout cannot split ``seq`` tokens over ``size`` ranks; None where it can."""
    divisor = layout.divisor(size)
    if seq % divisor == 0:
        return None
    return (
        f"the {layout.name} layout on {size} ranks needs a sequence divisible by {divisor}: not {seq}"
        f" (try {max(divisor, seq // divisor * divisor)})"
    )


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
