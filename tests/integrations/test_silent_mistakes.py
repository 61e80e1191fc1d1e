"""Mistakes in training with a strategy that would give wrong gradients: every rank raises an error that names each."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the integration needs transformers")

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

import ringprof
from ringprof.errors import RingprofError
from ringprof.integrations import batches
from ringprof.integrations.batches import shard_batch, unshard_batch
from ringprof.integrations.transformers import register, use_with_trainer
from ringprof.strategies import Unsupported, create
from tests.integrations.test_transformers import (
    DOCUMENTS,
    SEQ,
    SIZES,
    build,
    examples,
    parallelism_on_cpu,
    restarting,
    trainer_arguments,
    whole_batch,
)
from tests.strategies.ranks import refusal, run_ranks

pytestmark = pytest.mark.processes

ROPE: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    "longrope": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [8.0] * 4},
}


def model_of(name: str, attention: str, **options: Any) -> Any:
    """Return a small causal model of transformers with random weights, the same for every ``attention``."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        **{**SIZES, **options}, attn_implementation=attention, use_cache=False
    )
    return getattr(transformers, f"{name}ForCausalLM")(config).train(False)


def with_rope(kind: str, attention: str, original: int) -> Any:
    """Return a model whose rotary embeddings depend on the length, beyond ``original`` tokens."""
    if kind == "dynamic":
        return model_of("Llama", attention, rope_parameters=ROPE[kind], max_position_embeddings=original)
    return model_of(
        "Phi3", attention, rope_parameters=ROPE[kind], original_max_position_embeddings=original, pad_token_id=0
    )


def packed() -> dict[str, Tensor]:
    return {**whole_batch(1), "position_ids": restarting()}


def without_positions(strategy: Any) -> dict[str, Any]:
    return {name: value for name, value in shard_batch(packed(), strategy).items() if name != "position_ids"}


def two_steps(model: Any, strategy: Any, batch: Any = None) -> None:
    for _ in range(2):
        model(**shard_batch(batch or whole_batch(2), strategy)).loss.backward()


BLOOM: dict[str, Any] = {"n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0}
BART: dict[str, Any] = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
MISTAKES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "attn_implementation is forgotten": (
        lambda strategy: two_steps(build("llama", "sdpa"), strategy), "no strategy was called since the last batch"
    ),
    "a model that ignores it": (
        lambda strategy: two_steps(model_of("Bloom", "eager", **BLOOM), strategy), "no strategy was called"
    ),
    "a model without position_ids": (
        lambda strategy: two_steps(model_of("Bart", "ringprof", **BART), strategy),
        "BartForCausalLM takes no position_ids",
    ),
    "a model whose attention gets none": (
        lambda strategy: two_steps(model_of("GPTBigCode", "ringprof", n_embd=32, n_layer=2, n_head=4), strategy),
        "GPTBigCodeAttention gets no position_ids, or passes none",
    ),
    "a model that ignores it, in its first step": (
        lambda strategy: model_of("XGLM", "ringprof", d_model=32, num_layers=2, ffn_dim=64)(
            **shard_batch(whole_batch(2), strategy)
        ),
        "XGLMForCausalLM does not use transformers' attention interface",
    ),
    "positions that count from the padding token on": (
        lambda strategy: two_steps(model_of("Roberta", "ringprof", is_decoder=True), strategy),
        "RobertaForCausalLM counts positions from its padding token on",
    ),
    "an indexer": (
        lambda strategy: two_steps(model_of("Llama", "ringprof", index_topk=8), strategy),
        "indexer selects keys among those of one rank",
    ),
    "register with a model that ignores it": (
        lambda strategy: register(strategy, model=model_of("XGLM", "eager", d_model=32, num_layers=2, ffn_dim=64)),
        "XGLMForCausalLM does not use transformers' attention interface",
    ),
    "dynamic": (
        lambda strategy: two_steps(with_rope("dynamic", "ringprof", 56), strategy),
        "64 tokens are not supported, up to 56",
    ),
    "longrope": (
        lambda strategy: two_steps(with_rope("longrope", "ringprof", 56), strategy),
        "rope_type longrope depend on the length",
    ),
    "different batches": (
        lambda strategy: two_steps(
            build("llama", "ringprof"), strategy,
            {name: value.roll(dist.get_rank(), 1) for name, value in whole_batch(2).items()},
        ),
        "need the same batches",
    ),
    "position_ids lost, of packed documents": (
        lambda strategy: build("llama", "ringprof")(**without_positions(strategy)), "position_ids are not those"
    ),
    "sharded twice": (
        lambda strategy: shard_batch(shard_batch(whole_batch(2), strategy), strategy), "the batch is already sharded"
    ),
    "packed documents sharded twice": (
        lambda strategy: shard_batch(shard_batch(packed(), strategy), strategy), "the batch is already sharded"
    ),
    "attention dropout": (
        lambda strategy: two_steps(model_of("Llama", "ringprof", attention_dropout=0.2).train(), strategy),
        "set attention_dropout to 0 in the model's config",
    ),
    "generate": (
        lambda strategy: build("llama", "ringprof").generate(whole_batch(1)["input_ids"][:, :8], max_new_tokens=2),
        "for generate(), call model.set_attn_implementation('sdpa') before it",
    ),
    "a shard in place of the batch": (
        lambda strategy: unshard_batch(torch.ones(2, SEQ // 2, 3), {"input_ids": torch.ones(2, SEQ // 2)}, strategy),
        "pass the whole batch",
    ),
}  # fmt: skip


def _mistakes(rank: int, layout: str) -> dict[str, str]:
    answers = {}
    for name, (mistake, _) in MISTAKES.items():
        strategy = create(layout)
        register(strategy)
        answers[name] = refusal(mistake, strategy)
    return answers


# With contiguous shards, the first rank's positions are right whatever was forgotten.
@pytest.mark.parametrize("layout", ["zigzag", "ring"])
def test_every_rank_names_the_mistake(layout: str) -> None:
    for answers in run_ranks(2, _mistakes, layout):
        for name, (_, sentence) in MISTAKES.items():
            assert sentence in answers[name], (name, answers[name])


def _later(rank: int) -> list[int]:
    """Return how many batches were sharded before an error: of ranks that part later, and without gradients."""
    batches._COMPARED_EVERY = 5
    numbers = []
    for parts in (True, False):
        strategy = create("zigzag")
        register(strategy)
        model = build("llama", "ringprof" if parts else "sdpa")
        for number in range(40):
            batch = whole_batch(2)
            batch["labels"] = batch["labels"].roll(rank * (number > 2) * parts, 1)
            try:
                with torch.no_grad():
                    model(**shard_batch(batch, strategy))
            except Unsupported:
                numbers.append(number)
                break
    return numbers


def test_ranks_that_part_later_and_evaluation_without_the_strategy_are_found() -> None:
    assert run_ranks(2, _later) == [[5, 32], [5, 32]]


def _prefetched(rank: int) -> list[float]:
    """Return losses of batches that are sharded five ahead, of which one is evaluated without gradients."""
    strategy = create("zigzag")
    register(strategy)
    model, losses = build("llama", "ringprof"), []
    ahead = [shard_batch(whole_batch(2), strategy) for _ in range(5)]
    for _ in range(3):
        ahead.append(shard_batch(whole_batch(2), strategy))
        loss = model(**ahead.pop(0)).loss
        loss.backward()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(model(**ahead.pop(0)).loss.item())
    return losses


def test_batches_that_are_sharded_ahead_are_not_refused() -> None:
    loss = build("llama", "eager")(**whole_batch(2)).loss.item()
    for losses in zip(*run_ranks(2, _prefetched), strict=True):
        assert sum(losses) / 2 == pytest.approx(loss, rel=1e-5)


def _within_length(rank: int, kind: str) -> Any:
    strategy = create("zigzag")
    model = with_rope(kind, "eager", SEQ)
    register(strategy, model=model)
    loss = model(**shard_batch(whole_batch(2), strategy)).loss.detach()
    dist.all_reduce(loss)
    return loss.item() / 2


@pytest.mark.parametrize("kind", ROPE)
def test_rotary_embeddings_within_the_original_length_are_equal(kind: str) -> None:
    loss = with_rope(kind, "eager", SEQ)(**whole_batch(2)).loss.item()
    assert run_ranks(2, _within_length, kind) == pytest.approx([loss, loss], rel=1e-6)


def _unsharded(rank: int) -> list[Any]:
    strategy, logits = create("zigzag"), []
    register(strategy)
    model = build("llama", "ringprof")
    for batch in (whole_batch(2, 61), packed()):
        with torch.no_grad():
            local = model(**shard_batch(batch, strategy)).logits
        logits.append(unshard_batch(local, batch, strategy).numpy())
    return logits


def test_unsharded_logits_are_those_of_one_process() -> None:
    model = build("llama", "eager")
    with torch.no_grad():
        padded = model(whole_batch(2, 61)["input_ids"]).logits
        ids = packed()["input_ids"]
        documents = torch.cat([model(ids[:, a:b]).logits for a, b in pairwise(DOCUMENTS)], 1)
    for own in run_ranks(2, _unsharded):
        for logits, right in zip(own, (padded, documents), strict=True):
            torch.testing.assert_close(torch.from_numpy(logits), right, rtol=1e-5, atol=1e-6)


# --- Trainer ------------------------------------------------------------------------------------


def accuracy(prediction: Any) -> dict[str, float]:
    logits, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    counted = labels != -100
    return {"accuracy": float((logits.argmax(-1) == labels)[counted].mean()), "logits": float(logits[counted].sum())}


def evaluated(trainer: Any, count: int) -> list[Any]:
    """Train, evaluate on ``count`` examples that the batch size does not divide, and predict."""
    trainer.train()
    data = examples()[:count]
    metrics = trainer.evaluate(data)
    predictions = trainer.predict(data).predictions
    trainer.compute_metrics = None
    loss_alone = trainer.evaluate(data)["eval_loss"]
    return [*(metrics[f"eval_{name}"] for name in ("loss", "accuracy", "logits")), loss_alone, predictions]


def _trainer(rank: int, folder: str, attention: str = "ringprof", **options: Any) -> Any:
    strategy, parallelism = parallelism_on_cpu(rank)
    named = {name: options.pop(name) for name in ("compute_loss_func", "compute_metrics") if name in options}
    arguments = trainer_arguments(folder, parallelism_config=parallelism, ddp_backend="gloo", **options)
    trainer = transformers.Trainer(build("llama", attention), arguments, train_dataset=examples(), **named)
    use_with_trainer(trainer, strategy)
    return trainer, strategy


def _evaluated(rank: int, folder: str) -> list[Any]:
    trainer, strategy = _trainer(rank, folder, compute_metrics=accuracy, per_device_eval_batch_size=2)
    use_with_trainer(trainer, strategy)  # the second call replaces the first
    return evaluated(trainer, 5)


def test_a_trainer_evaluates_and_predicts_as_on_one_process(tmp_path: Any) -> None:
    arguments = trainer_arguments(str(tmp_path), per_device_eval_batch_size=2)
    trainer = transformers.Trainer(
        build("llama", "eager"), arguments, train_dataset=examples(), compute_metrics=accuracy
    )
    right = evaluated(trainer, 5)
    assert right[-1].shape == (5, SEQ, SIZES["vocab_size"])
    for own in run_ranks(2, _evaluated, str(tmp_path)):
        assert own[:-1] == pytest.approx(right[:-1], rel=1e-5)
        torch.testing.assert_close(torch.from_numpy(own[-1]), torch.from_numpy(right[-1]), rtol=1e-4, atol=1e-5)


REFUSED: dict[str, dict[str, Any]] = {
    "is 'sdpa' and not this strategy's": {"attention": "sdpa"},
    "label_smoothing_factor is not supported": {"label_smoothing_factor": 0.1},
    "compute_loss_func is not supported": {"compute_loss_func": max},
}


def _refused(rank: int, folder: str) -> list[str]:
    return [refusal(_trainer, rank, folder, **options) for options in REFUSED.values()]


def test_what_a_trainer_cannot_do_is_refused_before_it_trains(tmp_path: Any) -> None:
    for messages in run_ranks(2, _refused, str(tmp_path)):
        for message, sentence in zip(messages, REFUSED, strict=True):
            assert sentence in message


# --- check_model --------------------------------------------------------------------------------


def mean_of_own_labels(batch: dict[str, Any], strategy: Any) -> dict[str, Any]:
    return {name: value for name, value in shard_batch(batch, strategy).items() if name != "num_items_in_batch"}


def _checked(rank: int) -> list[str]:
    def check(mine: Any, reference: Any, batch: Any, shard: Any = shard_batch) -> str:
        strategy = create("zigzag")
        register(strategy)

        def step(batch: Any) -> Any:
            loss = mine(**shard(batch, strategy)).loss / dist.get_world_size()
            loss.backward()
            for parameter in mine.parameters():
                dist.all_reduce(parameter.grad)
            return loss.detach()

        try:
            return str(ringprof.check_model(step, lambda batch: reference(**batch).loss, batch))
        except RingprofError as error:
            return str(error)

    register(create("zigzag"))
    llama, prompt = build("llama", "ringprof"), whole_batch(2)
    prompt["labels"][:, :20] = -100
    return [
        check(llama, build("llama", "eager"), whole_batch(2)),
        check(llama, build("llama", "eager"), prompt, mean_of_own_labels),
        check(build("llama", "sdpa"), build("llama", "eager"), whole_batch(2)),
        check(with_rope("dynamic", "ringprof", 56), with_rope("dynamic", "eager", 56), whole_batch(2)),
        check(llama, build("llama", "sdpa"), packed(), lambda batch, strategy: without_positions(strategy)),
    ]


def test_check_model_takes_the_documented_step_and_names_the_mistakes() -> None:
    sentences = [
        "equal to one process",
        "the ranks' losses are weighted unequally",
        "context parallelism is silently off",
        "rope_type dynamic depend on the length",
        "position_ids are not those of this rank's tokens",
    ]
    for answers in run_ranks(2, _checked):
        for answer, sentence in zip(answers, sentences, strict=True):
            assert sentence in answer, answer
