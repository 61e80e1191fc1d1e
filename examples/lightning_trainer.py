"""Context parallelism with Lightning: batches sharded in the training step, monitor and proofs as callbacks.

torchrun --nproc-per-node 2 examples/lightning_trainer.py traces/lightning

Needs Lightning 2.6 and transformers 5. The folder gets samples of the exposed communication. In a longer run it also
gets proofs that the strategy computes dense attention.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from setup_ranks import log, setup
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaConfig, LlamaForCausalLM

from ringprof.integrations.batches import shard_batch
from ringprof.integrations.lightning import MonitorCallback, ProveCallback
from ringprof.integrations.transformers import register
from ringprof.strategies import create

try:
    from lightning.pytorch import LightningModule, Trainer
except ImportError:
    from pytorch_lightning import LightningModule, Trainer

SEQ, STEPS = 128, 10
device = setup()
strategy = create("zigzag")
register(strategy)


class Module(LightningModule):
    """A Llama with random weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=SEQ, attn_implementation="ringprof", use_cache=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        self.loss = self.model(**shard_batch(batch, strategy)).loss
        return self.loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        log(self.global_step, self.loss, clip_grad_norm_(self.parameters(), 1.0))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
tokens = [torch.randint(256, (SEQ,), generator=torch.Generator().manual_seed(step)) for step in range(STEPS)]
trainer = Trainer(
    # Every rank gets the same batches: the ranks share sequences, not the dataset.
    strategy="ddp", use_distributed_sampler=False, accelerator="auto", devices=dist.get_world_size(), max_epochs=1,
    callbacks=[MonitorCallback(folder / "exposed.jsonl", every=8), ProveCallback(strategy, log=folder / "proofs")],
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
prompt = torch.arange(SEQ // 8)  # it has no labels
rows = [{"input_ids": row, "labels": row.index_fill(0, prompt, -100)} for row in tokens]
trainer.fit(Module(), torch.utils.data.DataLoader(rows))
dist.destroy_process_group()
