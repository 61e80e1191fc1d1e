"""Train a causal language model of transformers with Trainer, FSDP2 and a strategy of ringprof.

    torchrun --nproc-per-node 2 examples/transformers_trainer.py --family Llama --strategy zigzag

Every process of the group gets the same batch and computes its own part of every sequence. The weights are random and
the data is made up. Prints the loss of every epoch.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import transformers
from accelerate.parallelism_config import ParallelismConfig

from ringprof.integrations.transformers import register, use_with_trainer
from ringprof.strategies import create


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", default="Llama", help="Llama, Qwen3, Mistral, Gemma2 or GptOss")
    parser.add_argument("--strategy", default="zigzag")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()

    size = int(os.environ["WORLD_SIZE"])
    arguments = transformers.TrainingArguments(
        "trainer_output", num_train_epochs=options.epochs, per_device_train_batch_size=1, gradient_accumulation_steps=2,
        bf16=True, learning_rate=1e-3, logging_strategy="epoch", save_strategy="no",
        report_to=[], parallelism_config=ParallelismConfig(cp_size=size), fsdp=True,
        fsdp_config={"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "activation_checkpointing": True},
    )  # fmt: skip

    strategy = create(options.strategy)
    register(strategy)
    torch.manual_seed(0)
    extra = {"num_local_experts": 4, "num_experts_per_tok": 2} if options.family == "GptOss" else {}
    config = getattr(transformers, f"{options.family}Config")(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
        head_dim=64, vocab_size=1024, max_position_embeddings=options.seq, attn_implementation="ringprof",
        use_cache=False, **extra,
    )  # fmt: skip
    model = getattr(transformers, f"{options.family}ForCausalLM")(config)

    # Sequences that count upwards from a random start: the model learns the step of each.
    generator = torch.Generator().manual_seed(1)
    examples = []
    for _ in range(8):
        start, step = torch.randint(1, 1024, (2,), generator=generator).tolist()
        ids = (start + step * torch.arange(options.seq)) % 1024
        examples.append({"input_ids": ids, "labels": ids})

    trainer = transformers.Trainer(model, arguments, train_dataset=examples)
    use_with_trainer(trainer, strategy)
    result = trainer.train()
    loss = torch.tensor(result.training_loss, device=arguments.device)
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        print(f"{options.family} with {options.strategy} on {size} processes: mean loss {loss.item() / size:.5f}")


if __name__ == "__main__":
    main()
