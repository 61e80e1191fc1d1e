"""Strategies in transformers' models: loss and gradients equal those of one process, or the call is refused."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the integration needs transformers")

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ringprof.integrations.batches import shard_batch
from ringprof.integrations.transformers import register
from ringprof.strategies import create
from tests.strategies.ranks import refusal, run_ranks

pytestmark = pytest.mark.processes

VOCAB, SEQ = 64, 64
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 256,
}  # fmt: skip
HEADS_OF_8: dict[str, Any] = {"head_dim": 8}
SLIDING: dict[str, Any] = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", HEADS_OF_8),
    "mistral, a window": ("Mistral", {"sliding_window": 16}),
    "gemma 2, softcap": ("Gemma2", {**HEADS_OF_8, **SLIDING, "query_pre_attn_scalar": 8}),
    "gemma 3": ("Gemma3", {**HEADS_OF_8, **SLIDING, "query_pre_attn_scalar": 8}),
    "gpt-oss, sinks": ("GptOss", {**HEADS_OF_8, **SLIDING, "num_local_experts": 2, "num_experts_per_tok": 1}),
}
DOCUMENTS = (0, 10, 11, 40, SEQ)


def build(family: str, attention: str) -> Any:
    """Return a model of a family with the same random weights for every ``attention``."""
    name, extra = FAMILIES[family]
    config_class = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(
        config_class(**SIZES, **extra, attn_implementation=attention, use_cache=False)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
    return model.train(False)


def whole_batch(rows: int, seq: int = SEQ) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCAB, (rows, seq), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)
    return {"input_ids": ids, "labels": labels}


def restarting(documents: tuple[int, ...] = DOCUMENTS) -> Tensor:
    return torch.cat([torch.arange(end - begin) for begin, end in pairwise(documents)])[None]


def truth(
    family: str, batch: dict[str, Tensor], documents: tuple[int, ...] | None = None
) -> tuple[float, list[Tensor]]:
    """Return the mean loss over all labels and its gradients, each document alone through one process's eager model."""
    model = build(family, "eager")
    ends = documents or (0, batch["input_ids"].shape[1])
    total, count = torch.zeros(()), 0
    for begin, end in pairwise(ends):
        if end - begin < 2:
            continue
        labels = batch["labels"][:, begin:end][:, 1:]
        logits = model(batch["input_ids"][:, begin:end]).logits[:, :-1]
        total = total + torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        count += int((labels != -100).sum())
    (total / count).backward()
    return (total / count).item(), [parameter.grad for parameter in model.parameters()]


def mean_over_ranks(model: Any, loss: Tensor) -> tuple[float, list[Any]]:
    """Return the mean of the ranks' losses and gradients, as DDP and FSDP average them."""
    loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    mean = loss.detach().clone()
    for tensor in (mean, *grads):
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()
    return mean.item(), [grad.numpy() for grad in grads]


def worst(grads: list[Any], expected: list[Tensor]) -> float:
    return max(
        float((torch.from_numpy(grad) - right).norm() / right.norm().clamp_min(1e-6))
        for grad, right in zip(grads, expected, strict=True)
    )


def _step(rank: int, family: str, strategy: str, batch: dict[str, Tensor], options: dict[str, Any]) -> Any:
    created = create(strategy, **options)
    register(created)
    model = build(family, "ringprof")
    return mean_over_ranks(model, model(**shard_batch(batch, created)).loss)


BATCH: dict[str, dict[str, Tensor]] = {
    "whole": whole_batch(2),
    "packed": {**whole_batch(1), "position_ids": restarting()},
    # A length that does not divide, which is padded.
    "61 tokens": {**whole_batch(2, 61), "attention_mask": torch.ones(2, 61, dtype=torch.long)},
}


@pytest.mark.parametrize(
    ("family", "strategy", "batch", "options"),
    [
        *((family, strategy, "whole", {}) for family in FAMILIES for strategy in ("zigzag", "ulysses")),
        *(
            (family, "zigzag", "packed", {"documents_layout": layout})
            for family in ("llama", "gpt-oss, sinks")
            for layout in ("auto", "packed", "per_document", "dealt")
        ),
        ("llama", "zigzag", "61 tokens", {}),
    ],
    ids=str,
)
def test_loss_and_gradients_equal_those_of_one_process(family: str, strategy: str, batch: str, options: Any) -> None:
    """Positions that restart separate documents."""
    loss, grads = truth(family, BATCH[batch], DOCUMENTS if batch == "packed" else None)
    for mean, own in run_ranks(2, _step, family, strategy, BATCH[batch], options):
        assert mean == pytest.approx(loss, rel=1e-5)
        assert worst(own, grads) < 1e-5


def _refusals(rank: int) -> list[str]:
    strategy = create("zigzag")
    register(strategy)
    model, batch = build("llama", "ringprof"), whole_batch(2)
    local = {name: value for name, value in shard_batch(batch, strategy).items() if name == "input_ids"}
    ids, half = local["input_ids"], SEQ // 2
    left = torch.ones(2, SEQ, dtype=torch.long).index_fill(1, torch.arange(3), 0)
    different = torch.stack([restarting()[0], restarting((0, 20, SEQ))[0]])
    refused: list[Any] = [
        lambda: model(ids, position_ids=torch.arange(half)[None], use_cache=False),
        lambda: model(ids, attention_mask=torch.ones(1, 1, half, half, dtype=torch.bool)),
        lambda: model(ids, attention_mask=left[:, :half], use_cache=False),
        lambda: shard_batch({**batch, "attention_mask": left}, strategy),
        lambda: shard_batch({**batch, "attention_mask": torch.ones(2, 1, SEQ, SEQ)}, strategy),
        lambda: shard_batch({**batch, "position_ids": different}, strategy),
        lambda: shard_batch({**batch, "pixels": torch.ones(2, 7)}, strategy),
        lambda: shard_batch({"labels": batch["labels"]}, strategy),
    ]
    messages = [refusal(call) for call in refused]
    model.config.layer_types = ["full_attention", "linear_attention"]
    return [*messages, refusal(model, **shard_batch(batch, strategy))]


def test_what_would_be_wrong_is_refused_by_name() -> None:
    for messages in run_ranks(2, _refusals):
        for message, name in zip(
            messages,
            ["position_ids", "4-D attention_mask", "padding", "left padding", "4 dimensions", "different documents",
             "pixels (2, 7)", "input_ids", "linear_attention"],
            strict=True,
        ):  # fmt: skip
            assert name in message


def parallelism_on_cpu(rank: int, ranks: int = 2) -> tuple[Any, Any]:
    """Let accelerate take this rank for one of ``ranks``, two of which share a sequence.

    Returns a registered strategy and the ParallelismConfig.
    """
    from accelerate.parallelism_config import ParallelismConfig

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # read, but the process group is there already
    # accelerate refuses a ParallelismConfig on CPU ranks; all else that a trainer does with one works there.
    ParallelismConfig._validate_accelerator = lambda self, accelerator: None
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "cp"))
    strategy = create("zigzag", group=mesh["cp"].get_group())
    register(strategy)
    return strategy, ParallelismConfig(cp_size=2, dp_shard_size=ranks // 2)


def examples() -> list[dict[str, Tensor]]:
    batch = whole_batch(8)
    return [{name: value[row] for name, value in batch.items()} for row in range(8)]


def trainer_arguments(folder: str, **options: Any) -> Any:
    """Two epochs of two optimizer steps, with accumulated gradients and recomputed layers."""
    return transformers.TrainingArguments(
        folder, num_train_epochs=2, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=0.1,
        optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0, activation_checkpointing=True, report_to=[],
        save_strategy="no", logging_strategy="no", use_cpu=True, disable_tqdm=True, seed=3, **options,
    )  # fmt: skip
