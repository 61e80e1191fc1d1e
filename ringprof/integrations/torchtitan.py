"""Context parallelism for torchtitan 0.3: a strategy as inner attention, batches sharded by its layout.

    def llama3_zigzag() -> Trainer.Config:  # in a module that torchtitan.train --module names
        return with_strategy(llama3_8b(), "zigzag")

Context parallelism is switched on as for torchtitan's own: ``--parallelism.context_parallel_degree N``. Packed
documents are kept apart, for which a batch holds one packed sequence (``--training.local_batch_size 1``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan import trainer
from torchtitan.components import validate
from torchtitan.models.common.attention import FlexAttention, GQAttention, VarlenMetadata
from torchtitan.protocols.module import Module

from ringprof.integrations.batches import check_batch, documents_of
from ringprof.strategies import Unsupported, create
from ringprof.strategies.base import Strategy


class StrategyAttention(FlexAttention):  # type: ignore[misc]
    """Inner attention of torchtitan that a strategy computes, over the ranks of the mesh dimension ``cp``.

    The class derives from FlexAttention because torchtitan accepts no other module with context parallelism. Its
    ``Config`` does not, so that torchtitan makes no block masks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # type: ignore[misc]
        """Configuration of the inner attention; it has no options."""

    def __init__(self, config: Config) -> None:
        nn.Module.__init__(self)
        self.strategy: Strategy | None = None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, attention_masks: VarlenMetadata | None = None,
        scale: float | None = None, is_causal: bool = True, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Return attention of q (B, S/N, H, D) over k and v (B, S/N, Hkv, D) of all ranks, in the shape of q.

        Raises `Unsupported` without context parallelism.
        """
        if self.strategy is None:
            raise Unsupported("the strategy has no ranks: pass --parallelism.context_parallel_degree 2 or more")
        documents = None if attention_masks is None else attention_masks.cu_seq_q_host
        out: Tensor = self.strategy.attention(q, k, v, causal=is_causal, softmax_scale=scale, documents=documents)
        return out


def with_strategy(config: Any, name: str, **options: Any) -> Any:
    """Change a ``Trainer.Config`` so that it trains with the strategy ``name`` of ringprof; return the same object.

    ``options`` are those of `ringprof.strategies.create`. The strategy is created when torchtitan parallelizes the
    model. CUDA graphs are switched off. Raises `Unsupported` for layers whose attention is not torchtitan's
    ``GQAttention``, such as MLA and linear attention. When the model is parallelized, `Unsupported` is raised for
    tensor and pipeline parallelism, a compiled model, and a context-parallel degree of 1. The mask is causal, within
    documents: masks that a model makes for its layers, such as windows or chunks, are not read.
    """
    spec = config.model_spec
    for layer in spec.model.layers:
        attention: Any = getattr(layer, "attention", None)
        if type(attention) is not GQAttention.Config:
            raise Unsupported(f"layers with {type(attention).__qualname__} are not supported: only GQAttention is")
        attention.inner_attention = StrategyAttention.Config()
    config.model_spec = replace(spec, parallelize_fn=partial(_parallelize, spec.parallelize_fn, name, options))
    config.training.disable_cuda_graphs = True
    return config


def _parallelize(
    original: Callable[..., nn.Module], name: str, options: dict[str, Any], model: nn.Module, *, parallel_dims: Any,
    compile_config: Any, **others: Any,
) -> nn.Module:  # fmt: skip
    """Parallelize a model as torchtitan does, but for the inner attention and the batches, which the strategy gets."""
    refused = {
        "tensor parallelism": parallel_dims.tp_enabled,
        "pipeline parallelism": parallel_dims.pp_enabled,
        "a context-parallel degree of 1": not parallel_dims.cp_enabled,
        "--compile.components model": compile_config.enable and "model" in compile_config.components,
    }
    for what, is_used in refused.items():
        if is_used:
            raise Unsupported(f"{what} is not supported with a strategy of ringprof")
    strategy = create(name, group=parallel_dims.get_mesh("cp"), **options)
    attentions = [module for module in model.modules() if isinstance(module, StrategyAttention)]
    for module in attentions:
        module.strategy, module._sharding_config = strategy, None
    parallel = original(model, parallel_dims=parallel_dims, compile_config=compile_config, **others)
    for module in attentions:
        # Where torchtitan has wrapped the forward pass to gather keys and values, restore that of the class.
        module.__dict__.pop("forward", None)
    # Trainer and validator look the function up in their own modules.
    trainer.prepare_context_parallel_input = validate.prepare_context_parallel_input = partial(shard_inputs, strategy)
    return parallel


def shard_inputs(
    strategy: Strategy, inputs: Tensor, labels: Tensor, extra_kwargs: dict[str, Any], *unused: Any
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Shard a batch by the strategy's layout, in place of torchtitan's ``prepare_context_parallel_input``.

    ``inputs``, ``labels`` and ``extra_kwargs["positions"]`` are (B, S) and become (B, S/N). Documents begin where
    positions restart; they go into ``attention_masks``, None for one document. Raises `Unsupported` for batch entries
    that pack different documents, and where the ranks' batches differ (compared now and then).
    """
    positions = extra_kwargs["positions"]
    check_batch(strategy, (inputs, labels, positions))
    documents = documents_of({}, positions, inputs.shape[1])
    inputs, labels, positions = (strategy.shard(x, documents=documents) for x in (inputs, labels, positions))
    masks = None
    if documents is not None:
        ends = torch.tensor(documents, dtype=torch.int32, device=inputs.device)
        masks = VarlenMetadata(ends, ends, *[int(ends.diff().max())] * 2, cu_seq_q_host=tuple(documents))
    return inputs, labels, {**extra_kwargs, "positions": positions, "attention_masks": masks}
