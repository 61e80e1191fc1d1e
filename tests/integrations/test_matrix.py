"""Ten steps in every trainer, on every kind of batch: losses and gradients are those of one process.

`ROWS` names what is compared, and docs/integrations.md shows it as a table.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the integration needs transformers")

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from ringprof.integrations.accelerate import context_parallel
from ringprof.integrations.batches import shard_batch
from ringprof.integrations.transformers import use_with_trainer
from tests.integrations.test_transformers import DOCUMENTS, build, parallelism_on_cpu, restarting, whole_batch
from tests.paths import ROOT
from tests.strategies.cases import relative_error
from tests.strategies.ranks import run_ranks

# Lightning, datasets and TRL use what others call deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")
STEPS, LEARNING_RATE, CLIP, EVALUATED = 10, 0.1, 0.05, 48
CASES = (
    "all labels", "masked labels", "packed documents", "right padding", "accumulation", "clipping", "evaluation",
    "CP x DP",
)  # fmt: skip
Batch = dict[str, Any]


@cache
def batches(case: str) -> list[list[Batch]]:
    """Return the batches of each step: two where gradients are accumulated, or on two replicas."""
    steps = []
    for step in range(STEPS):
        parts = []
        for part in range(2 if case in ("accumulation", "CP x DP") else 1):
            batch: Batch = {name: value.roll(step + 11 * part, 1) for name, value in whole_batch(2).items()}
            if case == "all labels":
                batch["labels"] = batch["input_ids"].clone()
            else:
                batch["labels"][:, : 20 + 30 * part] = -100
            if case == "packed documents":
                batch = {name: value[:1] for name, value in batch.items()} | {"position_ids": restarting()}
            if case == "right padding":
                batch["attention_mask"] = torch.ones_like(batch["input_ids"])
                for name, value in {"attention_mask": 0, "labels": -100, "input_ids": 0}.items():
                    batch[name][1, 50:] = value
            parts.append(batch)
        steps.append(parts)
    return steps


def evaluated() -> Batch:
    return {name: value[:, :EVALUATED] for name, value in whole_batch(2).items()}


def labels_of(parts: list[Batch]) -> int:
    """Return the number of labels that the loss of a step counts."""
    total = 0
    for batch in parts:
        labels = batch["labels"].clone()
        labels[:, 0] = -100
        if "position_ids" in batch:
            labels[batch["position_ids"] == 0] = -100
        total += int((labels != -100).sum())
    return total


def summed(model: Any, batch: Batch) -> Tensor:
    """Return the sum of the losses of each document alone, by one process."""
    ends = DOCUMENTS if "position_ids" in batch else (0, batch["input_ids"].shape[1])
    total = torch.zeros(())
    for begin, end in pairwise(ends):
        logits = model(batch["input_ids"][:, begin:end]).logits[:, :-1]
        labels = batch["labels"][:, begin + 1 : end]
        total = total + cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total


@cache
def truth(case: str) -> tuple[list[float], list[list[Tensor]]]:
    """Return the losses of one process (those of evaluation after those of training), and gradients of each step."""
    model: Any = build("llama", "eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses, evaluations, gradients = [], [], []
    for parts in batches(case):
        loss: Tensor = sum(summed(model, batch) for batch in parts) / labels_of(parts)  # type: ignore[assignment]
        loss.backward()
        if case == "clipping":
            clip_grad_norm_(model.parameters(), CLIP)
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if case == "evaluation":
            with torch.no_grad():
                evaluations.append(float(summed(model, evaluated())) / labels_of([evaluated()]))
    return [*losses, *evaluations], gradients


# --- trainers: each returns the losses of training and evaluation --------------------------------------


def mean_over_ranks(losses: list[Tensor]) -> list[float]:
    mean = torch.stack([loss.detach() for loss in losses])
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).tolist()


def own_batches(case: str, rank: int) -> list[list[Batch]]:
    """Return this rank's batches of each step, with the count of labels where one batch does not tell it."""
    size, steps = dist.get_world_size(), []
    for parts in batches(case):
        own = parts[rank // 2 :: 2] if case == "CP x DP" else parts
        count = {"num_items_in_batch": torch.tensor(labels_of(parts) / size)} if len(parts) > 1 else {}
        steps.append([{**batch, **count} for batch in own])
    return steps


def own_loop(case: str, rank: int, model: Any, strategy: Any, parallelism: Any, folder: str) -> list[float]:
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses, evaluations = [], []
    for parts in own_batches(case, rank):
        loss = torch.zeros(())
        for batch in parts:
            with model.no_sync() if batch is not parts[-1] else nullcontext():
                part = model(**shard_batch(batch, strategy)).loss
                part.backward()
            loss += part.detach()
        if case == "clipping":
            clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
        if case == "evaluation":
            with torch.no_grad():
                evaluations.append(model(**shard_batch(evaluated(), strategy)).loss)
    return mean_over_ranks([*losses, *evaluations])


def accelerate(case: str, rank: int, model: Any, strategy: Any, parallelism: Any, folder: str) -> list[float]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    # The parent process of this rank may have trained before, alone.
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(own_batches(case, rank)[0]))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))

    def loss_of(batch: Batch, parts: int) -> Tensor:
        ids, labels = batch["input_ids"].clone(), pad(batch["labels"][:, 1:], (0, 1), value=-100)
        positions = batch.get("position_ids", torch.arange(ids.shape[1])[None]).clone()
        count = batch.get("num_items_in_batch", (labels != -100).sum() / strategy.comm.size)
        with context_parallel(
            strategy, buffers=[ids, labels, positions], buffer_seq_dims=[1, 1, 1], no_restore_buffers={ids}
        ):
            loss: Tensor = model(
                input_ids=ids, position_ids=positions, labels=labels, shift_labels=labels, use_cache=False,
                num_items_in_batch=count / parts,  # backward divides by the number of accumulated batches
            ).loss  # fmt: skip
            if torch.is_grad_enabled():
                accelerator.backward(loss)
        return loss.detach() / parts

    losses, evaluations = [], []
    for parts in own_batches(case, rank):
        loss = torch.zeros(())
        for batch in parts:
            with accelerator.accumulate(model):
                loss += loss_of(batch, len(parts))
                if case == "clipping" and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
        losses.append(loss)
        if case == "evaluation":
            with torch.no_grad():
                evaluations.append(loss_of(evaluated(), 1))
    return mean_over_ranks([*losses, *evaluations])


def lightning(case: str, rank: int, model: Any, strategy: Any, parallelism: Any, folder: str) -> list[float]:
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.plugins.environments import LightningEnvironment
    from pytorch_lightning.strategies import DDPStrategy

    def loader(batches: Any) -> Any:
        return DataLoader(batches, batch_size=None)

    steps = own_batches(case, rank)
    accumulated, losses, evaluations = len(steps[0]), [], []

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Batch, index: int) -> Tensor:
            if accumulated > 1:  # Lightning divides the loss by it
                batch = {**batch, "num_items_in_batch": batch["num_items_in_batch"] / accumulated}
            loss: Tensor = self.model(**shard_batch(batch, strategy)).loss
            losses.append(loss.detach())
            return loss

        def validation_step(self, batch: Batch, index: int) -> None:
            evaluations.append(self.model(**shard_batch(batch, strategy)).loss)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)

    Trainer(
        accelerator="cpu", devices=dist.get_world_size(), max_epochs=1, accumulate_grad_batches=accumulated,
        gradient_clip_val=CLIP if case == "clipping" else None, use_distributed_sampler=False, val_check_interval=1,
        strategy=DDPStrategy(process_group_backend="gloo"), plugins=[LightningEnvironment()], num_sanity_val_steps=0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(
        Module(), loader([batch for parts in steps for batch in parts]),
        loader([evaluated()]) if case == "evaluation" else None,
    )  # fmt: skip
    means = [torch.stack(losses[first : first + accumulated]).mean() for first in range(0, len(losses), accumulated)]
    return mean_over_ranks([*means, *evaluations])


def rows(parts: list[Batch]) -> list[Batch]:
    return [
        {name: value[row] for name, value in batch.items()} for batch in parts for row in range(len(batch["labels"]))
    ]


def arguments_of(kind: Any, case: str, folder: str, parallelism: Any, **options: Any) -> Any:
    evaluation = {"eval_strategy": "steps", "eval_steps": 1} if case == "evaluation" else {}
    return kind(
        folder, num_train_epochs=1, per_device_train_batch_size=1 if case == "packed documents" else 2,
        gradient_accumulation_steps=2 if case == "accumulation" else 1, learning_rate=LEARNING_RATE, optim="sgd",
        lr_scheduler_type="constant", max_grad_norm=CLIP if case == "clipping" else 0.0, report_to=[],
        save_strategy="no", logging_steps=1, use_cpu=True, disable_tqdm=True, ddp_backend="gloo",
        parallelism_config=parallelism, train_sampling_strategy="sequential", per_device_eval_batch_size=2,
        **evaluation, **options,
    )  # fmt: skip


def trained(trainer: Any, strategy: Any) -> list[float]:
    trainer.remove_callback(transformers.PrinterCallback)
    use_with_trainer(trainer, strategy)
    trainer.train()
    history = trainer.state.log_history
    return [float(row[name]) for name in ("loss", "eval_loss") for row in history if name in row]


def trainer(case: str, rank: int, model: Any, strategy: Any, parallelism: Any, folder: str) -> list[float]:
    arguments = arguments_of(transformers.TrainingArguments, case, folder, parallelism)
    data = [row for parts in batches(case) for row in rows(parts)]
    return trained(
        transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=rows([evaluated()])), strategy
    )


def trl(case: str, rank: int, model: Any, strategy: Any, parallelism: Any, folder: str) -> list[float]:
    from datasets import Dataset, concatenate_datasets
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from trl import SFTConfig, SFTTrainer, pack_dataset

    words = {f"w{number}": number for number in range(64)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), pad_token="w0", eos_token="w2"
    )

    def dataset(parts: list[Batch]) -> Any:
        lists: list[dict[str, list[int]]] = []
        for row in rows(parts):
            length = int(row.get("attention_mask", row["input_ids"].bool() | True).sum())
            ends = pairwise(DOCUMENTS if case == "packed documents" else (0, length))
            lists += [{name: row[name][a:b].tolist() for name in ("input_ids", "labels")} for a, b in ends]
        if case != "packed documents":
            return Dataset.from_list(lists)
        starts = range(0, len(lists), len(DOCUMENTS) - 1)
        packs = [pack_dataset(Dataset.from_list(lists[i : i + starts.step]), DOCUMENTS[-1]) for i in starts]
        assert all(len(pack) == 1 for pack in packs)
        return concatenate_datasets(packs)

    arguments = arguments_of(
        SFTConfig, case, folder, parallelism, padding_free=case == "packed documents", max_length=None, bf16=False,
        gradient_checkpointing=False,
    )  # fmt: skip
    data = dataset([batch for parts in batches(case) for batch in parts])
    sft = SFTTrainer(
        model, arguments, train_dataset=data, eval_dataset=dataset([evaluated()]), processing_class=tokenizer
    )
    return trained(sft, strategy)


ROWS: dict[str, tuple[Callable[..., list[float]], str]] = {
    "own loop": (own_loop, "torch"),
    "Trainer": (trainer, "accelerate"),
    "accelerate": (accelerate, "accelerate"),
    "TRL": (trl, "trl"),
    "Lightning": (lightning, "pytorch_lightning"),
}
REFUSED = {("accelerate", "packed documents"): "position_ids are not those of this rank's tokens"}
"""Cells that raise an error, with a part of its sentence."""


def _errors(rank: int, row: str, cases: tuple[str, ...], folder: str) -> list[Any]:
    """Return for each case the worst relative errors of losses and gradients, or the error that it raises."""
    strategy, parallelism = parallelism_on_cpu(rank, dist.get_world_size())
    results: list[Any] = []
    for case in cases:
        model, gradients = build("llama", "ringprof"), []

        def record(optimizer: Any, args: Any, kwargs: Any) -> None:
            gradients.append([x.grad.clone() for x in model.parameters()])  # noqa: B023

        hook = register_optimizer_step_post_hook(record)
        try:
            losses = ROWS[row][0](case, rank, model, strategy, parallelism, folder)
        except Exception as error:
            results.append(str(error))
            continue
        finally:
            hook.remove()
        right_losses, right = truth(case)
        assert len(losses) == len(right_losses) and len(gradients) == STEPS, (case, losses, len(gradients))
        loss_error = max(abs(own / expected - 1) for own, expected in zip(losses, right_losses, strict=True))
        results.append((loss_error, max(
            relative_error(own, expected)
            for step, expected_step in zip(gradients, right, strict=True)
            for own, expected in zip(step, expected_step, strict=True)
        )))  # fmt: skip
    return results


@pytest.mark.processes
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ten_steps_are_those_of_one_process(row: str, ranks: int, tmp_path: Any) -> None:
    package = ROWS[row][1]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    cases = tuple(case for case in CASES if (case == "CP x DP") == (ranks == 4))
    for case in cases:
        truth(case)
    for results in run_ranks(ranks, _errors, row, cases, str(tmp_path)):
        for case, result in zip(cases, results, strict=True):
            if (row, case) in REFUSED:
                assert REFUSED[row, case] in result
            else:
                assert isinstance(result, tuple) and max(result) < 1e-5, (row, case, result)


def test_the_page_shows_the_cells_that_are_compared() -> None:
    page = (ROOT / "docs" / "integrations.md").read_text("utf-8")
    lines = re.findall(r"^\| ten steps .*(?:\n\|.*)+", page, re.M)[0].splitlines()
    head, _, *table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert head == ["ten steps", *CASES]
    shown = {line[0]: line[1:] for line in table}
    for row in ROWS:
        assert shown.pop(row) == ["refused" if (row, case) in REFUSED else "equal" for case in CASES]
    # One step each, in their own tests.
    assert set(shown) == {"torchtitan", "Megatron-LM"}
    assert {cell for cells in shown.values() for cell in cells} == {"one step", "-"}


@pytest.mark.processes
def test_the_list_of_models_is_what_the_sweep_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    sweep = importlib.import_module("sweep_models")
    page = (ROOT / "docs" / "transformers-models.md").read_text("utf-8")
    sections = {part.split(":")[0]: part for part in page.split("\n## ")[1:]}
    for name in ("gpt2", "stablelm", "xlm", "roberta"):
        answer, reason = sweep.run(name, 60)
        assert f"`{name}`" in sections[sweep.HEADINGS[answer].split(":")[0]], (name, answer, reason)
    assert "Faults" not in sections
