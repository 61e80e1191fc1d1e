"""Context parallelism in torchtitan: its Trainer with a strategy of ringprof, on packed documents made up here.

    torchrun --nproc-per-node 2 examples/torchtitan_llama.py traces/torchtitan

Needs torchtitan 0.3 and GPUs. A real job names the function of a configuration instead:
``python -m torchtitan.train --module my_configs --config llama3_zigzag``.
"""

import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

import ringprof
from ringprof.integrations.torchtitan import with_strategy

SEQ, STEPS, VOCABULARY, DOCUMENTS = 2048, 4, 2048, 3


class Documents(BaseDataLoader):
    """Sequences of random tokens, each packed from documents: positions restart where one begins."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Configuration of the data."""

    def __init__(self, config: Config, *, seq_len: int, local_batch_size: int, **unused: object) -> None:
        self.shape = (local_batch_size, seq_len)

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        length = -(-self.shape[1] // DOCUMENTS)
        positions = (torch.arange(self.shape[1]) % length).expand(self.shape)
        while True:
            tokens = torch.randint(VOCABULARY, (self.shape[0], self.shape[1] + 1), generator=generator)
            yield {"input": tokens[:, :-1], "positions": positions.contiguous()}, tokens[:, 1:].contiguous()

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


class NoTokenizer(BaseTokenizer):
    """A tokenizer that is never used: the data are tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Configuration of the tokenizer."""

    def __init__(self, config: Config, **unused: object) -> None:
        super().__init__()

    def encode(self, *args):
        return []

    def decode(self, *args):
        return ""

    def get_vocab_size(self):
        return VOCABULARY


def llama3(degree: int) -> Trainer.Config:
    """Return the configuration of a small Llama 3 with context parallelism over ``degree`` ranks."""
    spec = model_registry("debugmodel", attn_backend="flex")
    return Trainer.Config(
        model_spec=spec,
        tokenizer=NoTokenizer.Config(),
        dataloader=Documents.Config(),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0),
        training=TrainingConfig(local_batch_size=1, seq_len=SEQ, steps=STEPS),
        # "spmd_types", the default, needs a later torch than 2.13.
        parallelism=ParallelismConfig(context_parallel_degree=degree, spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(enable=False),
    )


def main() -> None:
    trainer = Trainer(with_strategy(llama3(int(os.environ["WORLD_SIZE"])), "zigzag"))
    batches = trainer.batch_generator(trainer.dataloader)
    for trainer.step in range(1, 3):
        trainer.train_step(batches)
    with ringprof.capture(sys.argv[1]):
        for trainer.step in range(3, STEPS + 1):
            trainer.train_step(batches)
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
