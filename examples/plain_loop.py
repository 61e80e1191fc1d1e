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
    labels_per_rank = (labels != -100).sum() / strategy.comm.size
    tokens, labels = strategy.shard(tokens).to(device), strategy.shard(labels).to(device)
    # The mean over the ranks of these losses is the mean over all labels; that of the ranks' means would not be.
    loss = cross_entropy(model(tokens, positions).flatten(0, 1), labels.flatten(), reduction="sum") / labels_per_rank
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():  # what DDP and FSDP do: the mean over ranks
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    log(step, loss, clip_grad_norm_(model.parameters(), 1.0))
    optimizer.step()


for step in range(8):
    train_step(step)
with ringprof.capture(sys.argv[1], strategy=strategy):
    train_step(8)
    train_step(9)

dist.destroy_process_group()
