"""Context parallelism in a Hugging Face model: register a strategy, shard each batch.

torchrun --nproc-per-node 2 examples/hugging_face.py traces/hf

Needs transformers 5. The model has random weights; `from_pretrained(..., attn_implementation="ringprof")` works alike.
`transformers_trainer.py` does the same with Trainer.
"""

import sys

import torch
import torch.distributed as dist
from setup_ranks import log, setup
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaConfig, LlamaForCausalLM

import ringprof
from ringprof.integrations.batches import shard_batch
from ringprof.integrations.transformers import register
from ringprof.strategies import create

SEQ = 128
device = setup()
strategy = create("zigzag")
register(strategy)

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=SEQ, attn_implementation="ringprof", use_cache=False,
)  # fmt: skip
model = DistributedDataParallel(LlamaForCausalLM(config).to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_step(step: int) -> None:
    tokens = torch.randint(256, (1, SEQ), generator=torch.Generator().manual_seed(step)).to(device)
    labels = tokens.index_fill(1, torch.arange(SEQ // 8, device=device), -100)  # the prompt has no labels
    # Every rank passes the whole batch. shard_batch shifts and counts the labels, then takes this rank's part.
    loss = model(**shard_batch({"input_ids": tokens, "labels": labels}, strategy)).loss
    optimizer.zero_grad()
    loss.backward()
    log(step, loss, clip_grad_norm_(model.parameters(), 1.0))
    optimizer.step()


for step in range(8):
    train_step(step)
with ringprof.capture(sys.argv[1], strategy=strategy):
    train_step(8)
    train_step(9)

dist.destroy_process_group()
