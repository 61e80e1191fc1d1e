"""Context parallelism under DistributedDataParallel: DDP averages the gradients over the ranks of the sequence.

torchrun --nproc-per-node 2 examples/ddp.py traces/ddp
"""

import sys

import torch
import torch.distributed as dist
from setup_ranks import log, setup
from tiny_model import Model, batch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import ringprof
from ringprof.strategies import create

SEQ = 128
device = setup()

strategy = create("zigzag")
model = DistributedDataParallel(Model(lambda q, k, v: strategy.attention(q, k, v, causal=True)).to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
positions = strategy.positions(SEQ, device)


def train_step(step: int) -> None:
    tokens, labels = batch(step, SEQ)
    labels_per_rank = (labels != -100).sum() / strategy.comm.size
    tokens, labels = strategy.shard(tokens).to(device), strategy.shard(labels).to(device)
    loss = cross_entropy(model(tokens, positions).flatten(0, 1), labels.flatten(), reduction="sum") / labels_per_rank
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
