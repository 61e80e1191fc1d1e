"""Context parallelism for Megatron-LM (megatron-core 0.16): a strategy as core attention.

    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = core_attention("zigzag")

The strategy runs over Megatron's context-parallel group. Megatron shards batches and rotary embeddings itself, in
zigzag order (``get_batch_on_this_cp_rank``) and, of packed sequences, every document by itself; strategies in that
order are supported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn

from ringprof.strategies import Unsupported, create
from ringprof.strategies.base import Strategy
from ringprof.strategies.masks.layouts import ZigzagLayout


def core_attention(name: str = "zigzag", **options: Any) -> Callable[..., nn.Module]:
    """Return a builder of Megatron's core attention, for ``core_attention`` of a layer's submodules.

    ``options`` are those of `ringprof.strategies.create`. All layers of a group share one strategy. When the model is
    built, `Unsupported` is raised for strategies in another order than zigzag, attention dropout, windows, query-key
    layer scaling and softmax offsets; when it runs, for masks that are not causal, biases, and context-parallel groups
    that change with the batch.
    """
    created: dict[Any, Strategy] = {}

    def build(
        *, config: Any, softmax_scale: float | None = None, pg_collection: Any = None, **unused: Any
    ) -> nn.Module:
        group = parallel_state.get_context_parallel_group() if pg_collection is None else pg_collection.cp
        if config.attention_dropout:
            raise Unsupported("attention dropout is not supported: pass --attention-dropout 0")
        if config.window_size is not None or config.apply_query_key_layer_scaling or config.softmax_type != "vanilla":
            raise Unsupported("windows, query-key layer scaling and softmax offsets are not supported")
        if group not in created:
            created[group] = create(name, group=group, documents_layout="per_document", **options)
        if not isinstance(created[group].layout, ZigzagLayout):
            raise Unsupported(f"{name} does not hold tokens in Megatron's zigzag order")
        return _CoreAttention(created[group], softmax_scale)

    return build


class _CoreAttention(nn.Module):
    """Core attention of one layer, in Megatron's argument order and shapes."""

    def __init__(self, strategy: Strategy, softmax_scale: float | None) -> None:
        super().__init__()
        self.strategy, self.softmax_scale = strategy, softmax_scale
        self._lengths: tuple[Any, list[int] | None] = (None, None)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, *,
        attn_mask_type: Any = None, attention_bias: Tensor | None = None, packed_seq_params: Any = None,
    ) -> Tensor:  # fmt: skip
        """Return attention of q (S/N, B, H, D) as (S/N, B, H * D), or of packed q (T/N, H, D) as (T/N, H * D).

        ``attention_mask`` is not read: the mask is causal, within each document.
        """
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal) or attention_bias is not None:
            raise Unsupported(f"{attn_mask_type} is not supported: the mask must be causal, without a bias")
        packed = query.ndim == 3
        q, k, v = (x[None] if packed else x.transpose(0, 1) for x in (query, key, value))
        out: Tensor = self.strategy.attention(
            q, k, v, causal=True, softmax_scale=self.softmax_scale, documents=self._documents(packed_seq_params)
        )
        return out[0].flatten(1) if packed else out.transpose(0, 1).flatten(2)

    def _documents(self, packed: Any) -> list[int] | None:
        """Return the cumulative lengths of packed documents, padding included; copied once for a batch."""
        if packed is None:
            return None
        if getattr(packed, "local_cp_size", None) is not None:
            raise Unsupported("context-parallel groups that change with the batch are not supported")
        lengths = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
        if lengths is not self._lengths[0]:
            self._lengths = lengths, lengths.tolist()
        return self._lengths[1]
