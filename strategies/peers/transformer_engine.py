"""Wrappers of NVIDIA Transformer Engine, whose context parallelism is an option of its attention module.

All its kinds of communication hold the sequence in the zigzag layout, and packed documents in the zigzag layout of each
document by itself.
"""

from __future__ import annotations

import os
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ringprof.workload.mask import Mask

from ..algorithms.usp import USP
from ..base import AttentionCall, Context, Documents, Shape
from ..masks.layouts import LAYOUTS, Grid, Layout
from ..masks.sharded_mask import ShardedMask
from .call import PeerStrategy

_BACKENDS = {"cudnn": "NVTE_FUSED_ATTN", "flash-attn": "NVTE_FLASH_ATTN_V2", "flash-attn-3": "NVTE_FLASH_ATTN_V3"}
"""Variable that enables the backend of the same kernel as ours, by the kernel's name."""


class _TransformerEngine(PeerStrategy):
    """`DotProductAttention` with a context-parallel group; its backends have the names of our corresponding kernels."""

    layout = LAYOUTS["zigzag"]
    KERNELS = tuple(_BACKENDS)
    takes_masks = True
    COMM_TYPE: ClassVar[str]
    TAKES_WINDOWS: ClassVar[bool] = False

    def __init__(self, context: Context, *, deterministic: bool = False) -> None:
        super().__init__(context, deterministic=deterministic)
        self._module = lru_cache(maxsize=8)(self._build_module)
        self._cu_seqlens = lru_cache(maxsize=8)(_cumulative_lengths)
        self._stream: Any = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Every kind of communication holds the same layout.
        cls.imbalance = vars(_TransformerEngine)["imbalance"]  # type: ignore[method-assign]

    @classmethod
    def imbalance(cls, size: int, *, causal: bool, **params: Any) -> float | None:
        return 1.0

    @classmethod
    def why_mask_unsupported(cls, mask: Mask, seq: int, size: int, **params: Any) -> str | None:
        """Return why this mask is not supported; the package itself needs documents that its layout divides."""
        if mask.prefix:
            return "takes no prefix beside a window"
        if mask.windowed and not (cls.TAKES_WINDOWS and mask.causal):
            return "takes no such window: transformer-engine/a2a and all_gather take causal ones"
        bounds = mask.documents or ()
        uneven = [end - first for first, end in pairwise(bounds) if (end - first) % (2 * size)]
        if uneven:
            return f"needs documents of a multiple of {2 * size} tokens on {size} ranks: one has {uneven[0]}"
        return super().why_mask_unsupported(mask, seq, size, **params, documents_layout="per_document")

    @classmethod
    def sharded_mask(cls, mask: Mask, seq: int, size: int, **params: Any) -> ShardedMask:
        return super().sharded_mask(mask, seq, size, **params, documents_layout="per_document")

    def layout_of(self, documents: Documents = None) -> Layout:
        packed = None if documents is None else Mask.of(documents=documents).documents
        return self.layout if packed is None else self.layout.per_document(packed)

    def call(self, q: Tensor, k: Tensor, v: Tensor, attention: AttentionCall) -> Tensor:
        select_backend(attention.kernel.name, deterministic=self._deterministic)
        mask = None if attention.sharded_mask is None else attention.sharded_mask.mask
        documents = None if mask is None else mask.documents
        kind = "thd" if documents else "bshd", _mask_type(attention.causal, packed=documents is not None)
        module = self._module(q.shape[2], k.shape[2], q.shape[3], attention.scale, *kind)
        options: dict[str, Any] = {}
        if mask is not None and mask.windowed:
            options["window_size"] = mask.left, mask.right
        if documents is None:
            out: Tensor = module(q, k, v, **options)
        else:
            ends = self._cu_seqlens(documents, q.shape[0], q.device)
            longest = max(end - first for first, end in pairwise(documents))
            out = module(
                *(x.flatten(0, 1) for x in (q, k, v)), cu_seqlens_q=ends, cu_seqlens_kv=ends, cu_seqlens_q_padded=ends,
                cu_seqlens_kv_padded=ends, max_seqlen_q=longest, max_seqlen_kv=longest, **options,
            )  # fmt: skip
        return out.view(q.shape)

    def _build_module(
        self, heads: int, kv_heads: int, head_dim: int, scale: float, qkv_format: str, mask_type: str
    ) -> Any:
        """Create the attention module for one problem size."""
        from transformer_engine.pytorch import DotProductAttention

        module = DotProductAttention(
            heads, head_dim, num_gqa_groups=kv_heads, attention_dropout=0.0, qkv_format=qkv_format,
            attn_mask_type=mask_type, softmax_scale=scale,
        )  # fmt: skip
        if self._stream is None and torch.cuda.is_available():
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        group, comm_type = self._group()
        ranks = dist.get_process_group_ranks(self.comm.group)
        module.set_context_parallel_group(group, ranks, self._stream, comm_type)
        return module

    def _group(self) -> tuple[Any, str]:
        """Return the process group, or groups, and the kind of communication that the package is told."""
        return self.comm.group, self.COMM_TYPE


class TransformerEngineP2P(_TransformerEngine):
    """Transformer Engine's ring of send/recv hops."""

    COMM_TYPE = "p2p"


class TransformerEngineAllGather(_TransformerEngine):
    """Transformer Engine's all-gather of keys and values."""

    COMM_TYPE = "all_gather"
    TAKES_WINDOWS = True


class TransformerEngineA2A(_TransformerEngine):
    """Transformer Engine's all-to-all between sequence and head shards."""

    COMM_TYPE = "a2a"
    TAKES_WINDOWS = True

    @classmethod
    def why_unsupported(cls, shape: Shape, size: int, **params: Any) -> str | None:
        return super().why_unsupported(shape, size, **params) or _why_heads_unsupported(shape, size)


class TransformerEngineA2AP2P(_TransformerEngine):
    """Transformer Engine's all-to-all within groups of neighbouring ranks, and its ring across them."""

    COMM_TYPE = "a2a+p2p"
    PARAMETERS: ClassVar[dict[str, str]] = {
        "ulysses_degree": "ranks that split the heads (default: a host's ranks, or 2 where there is one host)",
        **PeerStrategy.PARAMETERS,
    }

    def __init__(self, context: Context, *, ulysses_degree: int | None = None, deterministic: bool = False) -> None:
        super().__init__(context, deterministic=deterministic)
        size, rank = self.comm.size, self.comm.rank
        resolved = self.with_placement(size, self.comm.ranks_per_host(), ulysses_degree=ulysses_degree)
        grid = Grid.of(size, resolved["ulysses_degree"], None, head_first=True)
        self.parameters["ulysses_degree"] = grid.ulysses_degree
        members = {"te_a2a": grid.ulysses_group(rank), "te_p2p": grid.ring(rank)}
        self._channels = [self.comm.collective(channel, ranks) for channel, ranks in members.items()]

    @classmethod
    def with_placement(cls, size: int, per_host: int, **params: Any) -> dict[str, Any]:
        return USP.with_placement(size, per_host, **params)

    @classmethod
    def why_unsupported(cls, shape: Shape, size: int, **params: Any) -> str | None:
        degree = cls.with_placement(size, size, **params)["ulysses_degree"]
        reason = super().why_unsupported(shape, size, **params)
        return reason or _why_heads_unsupported(shape, degree)

    def _group(self) -> tuple[Any, str]:
        # A group of one rank has no process group, and the kind of communication is then one of the two.
        groups = [getattr(channel.transport, "group", None) for channel in self._channels]
        if None not in groups:
            return groups, self.COMM_TYPE
        return self.comm.group, "a2a" if groups[1] is None else "p2p"


def _why_heads_unsupported(shape: Shape, degree: int) -> str | None:
    if shape.heads % degree or shape.kv_heads % degree:
        return f"its all-to-all must divide {shape.heads} heads and {shape.kv_heads} kv heads by {degree} ranks"
    return None


def _mask_type(causal: bool, *, packed: bool) -> str:
    """Return the package's name of a mask; packed sequences count as padded."""
    if packed:
        return "padding_causal" if causal else "padding"
    return "causal" if causal else "no_mask"


def _cumulative_lengths(documents: tuple[int, ...], batch: int, device: torch.device) -> Tensor:
    """Return the cumulative lengths of the documents of all batch entries, one entry after another."""
    ends = [entry * documents[-1] + end for entry in range(batch) for end in documents[1:]]
    return torch.tensor([0, *ends], dtype=torch.int32, device=device)


def select_backend(kernel: str, *, deterministic: bool) -> None:
    """Set the environment so that the package can choose only the backend of this kernel.

    The package remembers its last choice, by shapes alone, and is told to choose again where the environment changed.
    """
    wanted = {variable: str(int(kernel == name)) for name, variable in _BACKENDS.items()} | {
        "NVTE_FLASH_ATTN": str(int(kernel != "cudnn")),
        "NVTE_FLASH_ATTN_V4": "0",
        "NVTE_UNFUSED_ATTN": "0",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": str(int(not deterministic)),
    }
    if all(os.environ.get(name) == value for name, value in wanted.items()):
        return
    os.environ |= wanted
    from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends

    _attention_backends["backend_selection_requires_update"] = True
