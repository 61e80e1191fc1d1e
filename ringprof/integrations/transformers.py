"""Context parallelism for Hugging Face transformers: a strategy as attention function, and batches sharded to match.

    strategy = create("zigzag", group=mesh["cp"].get_group())
    register(strategy)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="ringprof")
    loss = model(**shard_batch(batch, strategy)).loss

Every rank of the group passes the same batch. Causal models with full and sliding attention layers are supported, with
softcap, sinks and packed documents.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ringprof.integrations.batches import IGNORED, documents_of, shard_batch, unshard_batch
from ringprof.strategies import Unsupported
from ringprof.strategies.base import Strategy, positions_in_documents
from ringprof.strategies.kernels.uncompiled import uncompiled

_KINDS_OF_LAYERS = {"full_attention", "sliding_attention"}


def register(strategy: Strategy, name: str = "ringprof", model: nn.Module | None = None) -> None:
    """Register a strategy as the attention implementation ``name`` of transformers, for all models.

    A model uses it with ``attn_implementation=name`` or ``model.set_attn_implementation(name)``. A ``model`` given here
    is set to use it, and `Unsupported` is raised if some of its attention layers do not.

    The attention raises `Unsupported` where the result would be wrong: for a 4-D mask, padding, a cache of keys,
    attention dropout, layers that are neither full nor sliding attention, models that take no ``position_ids``, do not
    pass them to their attention or take no shifted labels, rotary embeddings that depend on the sequence's length
    (dynamic NTK, longrope) beyond the original length, and ``position_ids`` that are not those of the strategy's shard.
    """
    AttentionInterface.register(name, _Attention(strategy))
    AttentionMaskInterface.register(name, _no_mask)
    if model is not None:
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module.set_attn_implementation(name)
                break
        _check_model(model, strategy)


def use_with_trainer(trainer: Any, strategy: Strategy, *, pad_token_id: int = 0) -> None:
    """Make a transformers or TRL Trainer train and evaluate with a strategy; call this before ``trainer.train()``.

    The trainer needs ``parallelism_config=ParallelismConfig(cp_size=N)``, by which it gives all ranks of a
    context-parallel group the same batch and counts each label once, those of packed documents' first tokens left out.
    Its own context parallelism is replaced.
    Evaluation, ``compute_metrics`` and ``predict`` see each example once, with the logits of the whole sequence.

    Raises `Unsupported` where ``cp_size`` is not the size of the strategy's group, where an attention layer of the
    model does not use the strategy, for label smoothing, ``compute_loss_func`` and ``eval_use_gather_object``.
    """
    accelerator, size = trainer.accelerator, strategy.comm.size
    if trainer.get_cp_size() != size:
        raise Unsupported(
            f"the strategy's group has {size} ranks and the trainer's cp_size is {trainer.get_cp_size()}: pass "
            f"TrainingArguments(parallelism_config=ParallelismConfig(cp_size={size}, ...))"
        )
    refused = {
        "label_smoothing_factor": trainer.label_smoother is not None,
        "compute_loss_func": trainer.compute_loss_func is not None,
        "eval_use_gather_object": trainer.args.eval_use_gather_object,
    }
    for name, is_used in refused.items():
        if is_used:
            raise Unsupported(
                f"{name} is not supported: it would see one rank's tokens beside the whole batch's labels"
            )
    _check_model(trainer.model, strategy)
    for hook in getattr(trainer.model, "_ringprof_hooks", ()):
        hook.remove()  # another trainer's, or those of a call before
    accelerator.parallelism_config.cp_backend = "ringprof"
    accelerator._prepare_cp = lambda *objects: objects
    accelerator.maybe_context_parallel = lambda **buffers: nullcontext()
    # In evaluation, the whole batch of a step whose logits are wanted.
    evaluated: list[dict[str, Any]] = []
    wants_logits = False

    def shard(module: nn.Module, args: Any, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        evaluated[:] = [batch] if wants_logits else []
        return args, shard_batch(batch, strategy, pad_token_id=pad_token_id)

    def unshard(module: nn.Module, args: Any, output: Any) -> Any:
        if evaluated and output.get("logits") is not None:
            output["logits"] = unshard_batch(output["logits"], evaluated.pop(), strategy)
        return output

    trainer.model._ringprof_hooks = (
        trainer.model.register_forward_pre_hook(shard, with_kwargs=True), trainer.model.register_forward_hook(unshard)
    )  # fmt: skip
    predict, compute_loss, count_labels = (
        trainer.prediction_step, trainer.compute_loss, trainer._get_num_items_in_batch
    )  # fmt: skip

    def count(batches: list[Any], device: Any) -> Any:
        """Count labels without those of documents' first tokens, which `shard_batch` ignores."""
        for batch in batches:
            labels = batch.get("labels")
            if labels is not None and labels.ndim == 2:
                documents = documents_of(batch, batch.get("position_ids"), labels.shape[1])
                first = torch.tensor((documents or [0])[:-1], dtype=torch.long, device=labels.device)
                batch["labels"] = labels.index_fill(1, first, IGNORED)
        return count_labels(batches, device)

    def loss_of(model: nn.Module, inputs: Any, **options: Any) -> Any:
        # TRL evaluates without a count: each rank would return the mean over its own labels.
        if options.get("num_items_in_batch") is None:
            options["num_items_in_batch"] = count([inputs], trainer.args.device)
        return compute_loss(model, inputs, **options)

    def prediction_step(model: nn.Module, inputs: Any, loss_only: Any, ignore_keys: Any = None) -> Any:
        nonlocal wants_logits
        wants_logits = not loss_only
        try:
            loss, logits, labels = predict(model, inputs, loss_only, ignore_keys=ignore_keys)
        finally:
            wants_logits = False
        if loss is not None:
            dist.all_reduce(loss, group=strategy.comm.group)
            loss = loss / size
        trainer.gather_function = gather  # evaluation resets it at its end
        return loss, logits, labels

    first_of_groups: list[int] = []

    def gather(data: Any) -> Any:
        """Gather for metrics from one rank of each group: the others hold the same examples."""
        everyone = accelerator.gather
        if not first_of_groups:
            ranks = everyone(torch.tensor([strategy.comm.rank], device=accelerator.device)).tolist()
            first_of_groups[:] = [number for number, rank in enumerate(ranks) if rank == 0]

        def select(x: Tensor) -> Tensor:
            parts = x.chunk(accelerator.num_processes)
            return torch.cat([parts[number] for number in first_of_groups])

        accelerator.gather = lambda data: tree_map_only(Tensor, select, everyone(data))
        try:
            return accelerator.gather_for_metrics(data)
        finally:
            accelerator.gather = everyone

    trainer.prediction_step, trainer.compute_loss, trainer._get_num_items_in_batch = prediction_step, loss_of, count


def _check_model(model: nn.Module, strategy: Strategy) -> None:
    """Raise `Unsupported` unless a strategy computes every attention layer of a transformers model."""
    implementations = AttentionInterface()
    names = [name for name in implementations if getattr(implementations[name], "strategy", None) is strategy]
    whole = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if whole is None:
        raise Unsupported(f"{type(model).__name__} is no model of transformers")
    if reason := _why_unsupported(type(whole)):
        raise Unsupported(reason)
    for module in whole.modules():
        config = getattr(module, "config", None)
        used = getattr(config, "_attn_implementation", None)
        if (module is whole or "Attention" in type(module).__name__) and config is not None and used not in names:
            advice = f"model.set_attn_implementation({names[0]!r})" if names else "register(strategy)"
            raise Unsupported(
                f"the attention of {type(module).__name__} is {used!r} and not this strategy's, so that every rank"
                f" would attend to its own tokens alone: call {advice} before (from_pretrained does not restore it)"
            )


def _why_unsupported(model: Any) -> str | None:
    """Return why a class of models cannot be sharded; None where it can, as far as its ``forward`` shows."""
    forward = inspect.unwrap(model.forward)
    parameters = inspect.signature(forward).parameters
    if "position_ids" not in parameters:
        return f"{model.__name__} takes no position_ids: positions would restart on every rank"
    if "labels" in parameters and "loss_function" not in forward.__code__.co_names:
        return f"{model.__name__} computes its loss itself, without shift_labels: labels of a shard would be wrong"
    if not model._can_set_attn_implementation():
        return f"{model.__name__} does not use transformers' attention interface: it would ignore the strategy"
    if any(hasattr(kind, "create_position_ids_from_input_ids") for kind in vars(inspect.getmodule(model)).values()):
        return f"{model.__name__} counts positions from its padding token on, and would be given those from 0 on"
    return None


@cache
def _why_configuration_unsupported(kind: Any) -> str | None:
    """Return why causal models of a class of configurations cannot be sharded; None where they can."""
    models: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, ())
    reasons = map(_why_unsupported, models if isinstance(models, tuple) else (models,))
    return next(filter(None, reasons), None)


class _Attention:
    """The attention function of transformers for one strategy."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self._compared = False
        """Whether the ranks have compared their first positions."""
        self._lengths: tuple[Any, list[int] | None] = (None, None)
        self._positions: Any = None
        self._wrong: Callable[[], bool] | None = None

    @uncompiled
    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
        scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
        softcap: float | None = None, s_aux: Tensor | None = None, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Compute attention of (B, heads, S/N, D) tensors; return the output as (B, S/N, heads, D), and no weights."""
        Strategy.calls += 1  # also where it raises
        if attention_mask is not None:
            raise Unsupported("a 4-D attention_mask is not supported: pack documents by position_ids or cu_seq_lens_q")
        if key.shape[2] != query.shape[2]:
            raise Unsupported(f"a cache of keys is not supported: pass use_cache=False; {_FOR_GENERATE}")
        _check_layers(module, query.shape[2] * self.strategy.comm.size)
        if dropout:
            settings = vars(getattr(module, "config", object))
            keys = [key for key, value in settings.items() if "att" in key and "drop" in key and value]
            names = " and ".join(keys) or "it"
            raise Unsupported(f"attention dropout is not supported: set {names} to 0 in the model's config")
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if sliding_window and not causal:
            raise Unsupported("a sliding window without a causal mask is not supported")
        documents = self._documents(kwargs.get("cu_seq_lens_q"))
        if kwargs.get("position_ids") is not None:
            self._check_positions(kwargs["position_ids"], query.shape[2], documents)
        elif self.strategy.comm.size > 1:
            raise Unsupported(
                f"{type(module).__name__} gets no position_ids, or passes none to its attention function: wrong"
                " positions and lost documents would not show"
            )
        out = self.strategy.attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), causal=causal, softmax_scale=scaling,
            window_size=(sliding_window - 1, 0) if sliding_window else (-1, -1),
            softcap=softcap or 0.0, sinks=s_aux, documents=documents,
        )  # fmt: skip
        return out, None

    def _documents(self, lengths: Tensor | None) -> list[int] | None:
        """Return cumulative lengths as integers; a tensor on a GPU is copied once for all layers."""
        if lengths is not self._lengths[0]:
            self._lengths = lengths, None if lengths is None else lengths.tolist()
        return self._lengths[1]

    def _check_positions(self, positions: Tensor, local_length: int, documents: list[int] | None) -> None:
        """Raise `Unsupported` if ``position_ids`` are not those of the shard, in the sequence or in its documents.

        Without ``cu_seq_lens_q``, positions that restart would mean packed documents, whose mask would be lost. The
        first are compared on all ranks. On a GPU later comparisons are read at a later call, so that the host does not
        wait.
        """
        if self._wrong is not None and self._wrong():
            self._wrong = None
            raise Unsupported(_WRONG_POSITIONS)
        if positions is self._positions or positions.ndim != 2:
            return
        self._positions, comm = positions, self.strategy.comm
        own = self.strategy.positions(local_length * comm.size, positions.device, documents=documents)
        wrong = ((positions != own) & (positions != positions_in_documents(own, documents))).any()
        if not self._compared:
            comm.require_same_call("position_ids", _WRONG_POSITIONS if wrong else None)
            self._compared = True
            return
        if positions.device.type == "cpu":
            if wrong:
                raise Unsupported(_WRONG_POSITIONS)
            return
        on_host, copied = torch.empty((), dtype=torch.bool, pin_memory=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
        on_host.copy_(wrong, non_blocking=True)
        copied.record()
        self._wrong = lambda: copied.query() and bool(on_host)  # type: ignore[no-untyped-call]


_FOR_GENERATE = "for generate(), call model.set_attn_implementation('sdpa') before it"
_WRONG_POSITIONS = (
    "position_ids are not those of this rank's tokens: they were dropped, restart without cu_seq_lens_q (packed "
    "documents), or were not sharded by the strategy. Make the batch with shard_batch(batch, strategy); "
    f"{_FOR_GENERATE}"
)


def _no_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> None:
    """Make no mask: the strategy applies it.

    Raises `Unsupported` for padding, for masks of the model's own, and for models that cannot be sharded.
    """
    config: Any = kwargs.get("config")
    if hasattr(config, "index_topk"):
        raise Unsupported("a model whose indexer selects keys among those of one rank (index_topk) is not supported")
    kind: Any = type(config)
    # Models that would ignore the strategy have no other call of it.
    if reason := _why_configuration_unsupported(kind):
        raise Unsupported(reason)
    if kwargs.get("use_vmap"):
        raise Unsupported("this model combines the causal mask with a mask of its own, which is not supported")
    if attention_mask is not None and not bool(attention_mask.all()):
        raise Unsupported("padding in attention_mask is not supported inside the model: shard the batch by shard_batch")


def _check_layers(module: nn.Module, seq: int) -> None:
    """Raise `Unsupported` for a layer's model if its layers or its rotary embeddings see one rank's tokens alone.

    Layers may mix tokens otherwise; rotary embeddings may depend on the largest position in their input.
    """
    config: Any = getattr(module, "config", None)
    kinds = set(getattr(config, "layer_types", None) or ()) - _KINDS_OF_LAYERS
    if kinds:
        raise Unsupported(f"layers of {', '.join(sorted(kinds))} mix tokens of one rank alone: not supported")
    kind_of_config: Any = type(config)
    if reason := _why_configuration_unsupported(kind_of_config):
        raise Unsupported(reason)
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [rope] if "rope_type" in rope else [x for x in rope.values() if isinstance(x, dict)]:
        kind: str = parameters.get("rope_type") or ""
        original = parameters.get("original_max_position_embeddings") if kind == "longrope" else None
        limit: int = original or config.max_position_embeddings
        if (kind == "longrope" or "dynamic" in kind) and seq > limit:
            raise Unsupported(
                f"rotary embeddings of rope_type {kind} depend on the length of the sequence, and a rank sees its own"
                f" positions alone: {seq} tokens are not supported, up to {limit} are"
            )
