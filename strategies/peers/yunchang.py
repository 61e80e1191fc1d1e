"""Wrappers of the yunchang package (feifeibear/long-context-attention)."""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from ..algorithms.usp import USP, Placement
from ..base import AttentionCall, Context, Shape
from ..masks.layouts import LAYOUTS, Grouped, Layout
from .call import PeerStrategy

_yunchang_groups: WeakKeyDictionary[Any, dict[tuple[int, int, bool], tuple[Any, Any]]] = WeakKeyDictionary()


class YunchangUSP(PeerStrategy):
    """yunchang's USP: Ulysses within groups, a zigzag ring across them."""

    layout: Layout = LAYOUTS["zigzag"]
    KERNELS = ("flash-attn",)
    CAUSAL_ONLY = True
    WORLD_ONLY = True
    PARAMETERS: ClassVar[dict[str, str]] = {
        **{name: USP.PARAMETERS[name] for name in ("ulysses_degree", "ring_degree", "placement")},
        **PeerStrategy.PARAMETERS,
    }

    def __init__(
        self, context: Context, *, ulysses_degree: int | None = None, ring_degree: int | None = None,
        placement: Placement = "head-first", deterministic: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(context, deterministic=deterministic)
        degrees = {"ulysses_degree": ulysses_degree, "ring_degree": ring_degree}
        resolved = self.with_placement(self.comm.size, self.comm.ranks_per_host(), placement=placement, **degrees)
        grouped = self.layout_for(self.comm.size, **resolved)
        self.layout, grid = grouped, grouped.grid
        shape = {"ulysses_degree": grid.ulysses_degree, "ring_degree": grid.ring_degree, "placement": placement}
        self.parameters |= shape
        self._layer = self._build_layer(grid.ulysses_degree, grid.ring_degree, grid.head_first)

    @classmethod
    def with_placement(cls, size: int, per_host: int, **params: Any) -> dict[str, Any]:
        return USP.with_placement(size, per_host, **params)

    @classmethod
    def layout_for(cls, size: int, **params: Any) -> Grouped:
        return USP.layout_for(size, **{key: value for key, value in params.items() if key != "deterministic"})

    @classmethod
    def why_unsupported(cls, shape: Shape, size: int, **params: Any) -> str | None:
        reason = super().why_unsupported(shape, size, **params)
        if reason:
            return reason
        degree = cls.layout_for(size, **params).grid.ulysses_degree
        if shape.heads % degree or shape.kv_heads % degree:
            return f"a Ulysses degree of {degree} must divide {shape.heads} heads and {shape.kv_heads} kv heads"
        return None

    def call(self, q: Tensor, k: Tensor, v: Tensor, attention: AttentionCall) -> Tensor:
        out: Tensor = self._layer(
            q, k, v, softmax_scale=attention.scale, causal=attention.causal, deterministic=self._deterministic
        )
        return out

    def _build_layer(self, ulysses: int, ring: int, head_first: bool) -> Any:
        """Create the attention layer.

        The package creates its process groups, which are cached: communicators are costly.
        """
        import yunchang

        groups = _yunchang_groups.setdefault(dist.group.WORLD, {})
        if (ulysses, ring, head_first) not in groups:
            yunchang.set_seq_parallel_pg(ulysses, ring, self.comm.rank, self.comm.size, use_ulysses_low=head_first)
            process_group = yunchang.globals.PROCESS_GROUP
            groups[ulysses, ring, head_first] = process_group.ULYSSES_PG, process_group.RING_PG
        layer = yunchang.LongContextAttention(ring_impl_type="zigzag", attn_type=yunchang.kernels.AttnType.FA)
        layer.ulysses_pg, layer.ring_pg = groups[ulysses, ring, head_first]
        return layer


class YunchangUlysses(YunchangUSP):
    """yunchang's Ulysses: one group of all ranks, over the contiguous layout."""

    layout = LAYOUTS["contiguous"]
    PARAMETERS = PeerStrategy.PARAMETERS

    def __init__(self, context: Context, *, deterministic: bool = False) -> None:
        super().__init__(context, ulysses_degree=context.comm.size, deterministic=deterministic)

    @classmethod
    def layout_for(cls, size: int, **params: Any) -> Grouped:
        return super().layout_for(size, ulysses_degree=size)
