"""Context parallelism in a plain training loop: two steps captured, gradients averaged by hand.

torchrun --nproc-per-node 2 examples/plain_loop.py traces/plain
"""

import sys

import torch
import torch.distributed as dist
from setup_ranks import log, setup
from tiny_model import Model, batch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

import ringprof
from ringprof.strategies import create

SEQ = 128  # of the whole sequence; each rank holds SEQ / ranks tokens
device = setup()

strategy = create("zigzag")
model = Model(lambda q, k, v: strategy.attention(q, k, v, causal=True)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
positions = strategy.positions(SEQ, device)  # where this rank's tokens are in the sequence: RoPE needs it


def train_step(step: int) -> None:
    tokens, labels = batch(step, SEQ)  # the whole sequence, equal on all ranks
    tokens, labels = strategy.shard(tokens).to(device), strategy.shard(labels).to(device)
    loss = cross_entropy(model(tokens, positions).flatten(0, 1), labels.flatten())  # mean over this rank's tokens
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():  # what DDP and FSDP do: the mean over ranks
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    log(step, loss, clip_grad_norm_(model.parameters(), 1.0))
    optimizer.step()


train_step(0)
train_step(1)
with ringprof.capture(sys.argv[1], strategy=strategy):
    train_step(2)
    train_step(3)

dist.destroy_process_group()
