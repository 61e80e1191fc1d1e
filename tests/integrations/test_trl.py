"""TRL's SFTTrainer with packed documents: it trains as one process that sees each document alone."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("trl", reason="trl is not installed")

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer, pack_dataset

from ringprof.integrations.transformers import use_with_trainer
from tests.integrations.test_transformers import VOCAB, build, parallelism_on_cpu
from tests.strategies.ranks import run_ranks

# datasets and TRL use what others call deprecated.
pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore")]
LENGTHS, PACK = (10, 22, 31, 5, 40, 16), 64


def documents() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


def _trained(rank: int, folder: str) -> Any:
    strategy, parallelism = parallelism_on_cpu(rank)
    model = build("llama", "ringprof")
    packed = pack_dataset(Dataset.from_dict({"input_ids": documents()}), PACK)
    assert len(packed) == 2
    words = {f"w{number}": number for number in range(VOCAB)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), pad_token="w1", eos_token="w2"
    )
    arguments = SFTConfig(
        folder, padding_free=True, max_length=None, num_train_epochs=2, per_device_train_batch_size=1,
        gradient_accumulation_steps=2, learning_rate=0.1, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0,
        report_to=[], save_strategy="no", logging_strategy="no", use_cpu=True, disable_tqdm=True, bf16=False,
        gradient_checkpointing=False, ddp_backend="gloo", parallelism_config=parallelism,
    )  # fmt: skip
    trainer = SFTTrainer(model, arguments, train_dataset=packed, processing_class=tokenizer)
    use_with_trainer(trainer, strategy)
    result = trainer.train()
    return result.training_loss, [parameter.detach().numpy() for parameter in model.parameters()]


def test_packed_documents_train_as_each_alone(tmp_path: Any) -> None:
    model, losses = build("llama", "eager"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        total = torch.zeros(())
        for document in documents():
            ids = torch.tensor([document])
            total = total + torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum")
        loss = total / sum(length - 1 for length in LENGTHS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    results = run_ranks(2, _trained, str(tmp_path))
    assert sum(loss for loss, _ in results) / 2 == pytest.approx(sum(losses) / 2, rel=1e-4)
    for _, parameters in results:
        for own, right in zip(parameters, model.parameters(), strict=True):
            torch.testing.assert_close(torch.from_numpy(own), right.detach(), rtol=1e-4, atol=1e-6)
