"""Context parallelism for Hugging Face transformers: a strategy as attention function, and batches sharded to match.

    strategy = create("zigzag", group=mesh["cp"].get_group())
    register(strategy)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="ringprof")
    loss = model(**shard_batch(batch, strategy)).loss

Every rank of the group passes the same batch. Causal models with full and sliding attention layers are supported, with
softcap, sinks and packed documents.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ringprof.integrations.batches import shard_batch
from ringprof.strategies import Unsupported
from ringprof.strategies.base import Strategy

_KINDS_OF_LAYERS = {"full_attention", "sliding_attention"}


def register(strategy: Strategy, name: str = "ringprof") -> None:
    """Register a strategy as the attention implementation ``name`` of transformers, for all models.

    A model uses it with ``attn_implementation=name`` or ``model.set_attn_implementation(name)``. Its attention raises
    `Unsupported` where the result would be wrong: for a 4-D mask, padding, a cache of keys, layers that are neither
    full nor sliding attention, and ``position_ids`` that are not those of the strategy's shard.
    """
    AttentionInterface.register(name, _Attention(strategy))
    AttentionMaskInterface.register(name, _no_mask)


def use_with_trainer(trainer: Any, strategy: Strategy, *, pad_token_id: int = 0) -> None:
    """Make a transformers or TRL Trainer train with a strategy; call this once, before ``trainer.train()``.

    The trainer needs ``parallelism_config=ParallelismConfig(cp_size=N)``, by which it gives all ranks of a
    context-parallel group the same batch and counts each label once. Its own context parallelism is replaced.
    Raises `Unsupported` where ``cp_size`` is not the size of the strategy's group.
    """
    accelerator, size = trainer.accelerator, strategy.comm.size
    if trainer.get_cp_size() != size:
        raise Unsupported(
            f"the strategy's group has {size} ranks and the trainer's cp_size is {trainer.get_cp_size()}: pass "
            f"TrainingArguments(parallelism_config=ParallelismConfig(cp_size={size}, ...))"
        )
    accelerator.parallelism_config.cp_backend = "ringprof"
    accelerator._prepare_cp = lambda *objects: objects
    accelerator.maybe_context_parallel = lambda **buffers: nullcontext()

    def shard(module: nn.Module, args: Any, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, shard_batch(batch, strategy, pad_token_id=pad_token_id)

    trainer.model.register_forward_pre_hook(shard, with_kwargs=True)


class _Attention:
    """The attention function of transformers for one strategy."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._lengths: tuple[Any, list[int] | None] = (None, None)
        self._positions: Any = None
        self._wrong: Callable[[], bool] | None = None

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
        scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
        softcap: float | None = None, s_aux: Tensor | None = None, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Compute attention of (B, heads, S/N, D) tensors; return the output as (B, S/N, heads, D), and no weights."""
        if attention_mask is not None:
            raise Unsupported("a 4-D attention_mask is not supported: pack documents by position_ids or cu_seq_lens_q")
        if key.shape[2] != query.shape[2]:
            raise Unsupported("a cache of keys is not supported: pass use_cache=False")
        _check_layers(module)
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if sliding_window and not causal:
            raise Unsupported("a sliding window without a causal mask is not supported")
        documents = self._documents(kwargs.get("cu_seq_lens_q"))
        if documents is None and kwargs.get("position_ids") is not None:
            self._check_positions(kwargs["position_ids"], query.shape[2])
        out = self._strategy.attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), causal=causal, softmax_scale=scaling,
            dropout_p=dropout, window_size=(sliding_window - 1, 0) if sliding_window else (-1, -1),
            softcap=softcap or 0.0, sinks=s_aux, documents=documents,
        )  # fmt: skip
        return out, None

    def _documents(self, lengths: Tensor | None) -> list[int] | None:
        """Return cumulative lengths as integers; a tensor on a GPU is copied once for all layers."""
        if lengths is not self._lengths[0]:
            self._lengths = lengths, None if lengths is None else lengths.tolist()
        return self._lengths[1]

    def _check_positions(self, positions: Tensor, local_length: int) -> None:
        """Raise `Unsupported` if ``position_ids`` are not those of the shard.

        Without ``cu_seq_lens_q``, positions that restart would mean packed documents, whose mask would be lost. On a
        GPU the comparison is read at a later call, so that the host does not wait.
        """
        if self._wrong is not None and self._wrong():
            self._wrong = None
            raise Unsupported(_WRONG_POSITIONS)
        if positions is self._positions or positions.ndim != 2:
            return
        self._positions = positions
        own = self._strategy.positions(local_length * self._strategy.comm.size, positions.device)
        wrong = (positions != own).any()
        if positions.device.type == "cpu":
            if wrong:
                raise Unsupported(_WRONG_POSITIONS)
            return
        on_host, copied = torch.empty((), dtype=torch.bool, pin_memory=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
        on_host.copy_(wrong, non_blocking=True)
        copied.record()
        self._wrong = lambda: copied.query() and bool(on_host)  # type: ignore[no-untyped-call]


_WRONG_POSITIONS = (
    "position_ids are not those of this rank's tokens: they restart (packed documents), or were not sharded by the "
    "strategy. Make the batch with shard_batch(batch, strategy)"
)


def _no_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> None:
    """Make no mask: the strategy applies it. Raises `Unsupported` for padding and for masks of the model's own."""
    if kwargs.get("use_vmap"):
        raise Unsupported("this model combines the causal mask with a mask of its own, which is not supported")
    if attention_mask is not None and not bool(attention_mask.all()):
        raise Unsupported("padding in attention_mask is not supported inside the model: shard the batch by shard_batch")


def _check_layers(module: nn.Module) -> None:
    """Raise `Unsupported` for a model with layers that mix tokens otherwise: they would see one rank's tokens alone."""
    kinds = set(getattr(getattr(module, "config", None), "layer_types", None) or ()) - _KINDS_OF_LAYERS
    if kinds:
        raise Unsupported(f"layers of {', '.join(sorted(kinds))} mix tokens of one rank alone: not supported")
