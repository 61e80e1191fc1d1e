"""Context parallelism under FSDP2: parameters are sharded over the same ranks that share the sequence.

torchrun --nproc-per-node 2 examples/fsdp2.py traces/fsdp2
"""

import sys

import torch
import torch.distributed as dist
from setup_ranks import log, setup
from tiny_model import Model, batch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

import ringprof
from ringprof.strategies import create

SEQ = 128
device = setup()

strategy = create("zigzag")
model = Model(lambda q, k, v: strategy.attention(q, k, v, causal=True)).to(device)
mesh = init_device_mesh(device.type, (dist.get_world_size(),))
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)  # its reduce-scatter averages, as DDP's all-reduce does
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
positions = strategy.positions(SEQ, device)


def train_step(step: int) -> None:
    tokens, labels = batch(step, SEQ)
    labels_per_rank = (labels != -100).sum() / strategy.comm.size
    tokens, labels = strategy.shard(tokens).to(device), strategy.shard(labels).to(device)
    loss = cross_entropy(model(tokens, positions).flatten(0, 1), labels.flatten(), reduction="sum") / labels_per_rank
    optimizer.zero_grad()
    loss.backward()
    log(step, loss, clip_grad_norm_(model.parameters(), 1.0).full_tensor())
    optimizer.step()


for step in range(8):
    train_step(step)
with ringprof.capture(sys.argv[1], strategy=strategy):
    train_step(8)
    train_step(9)

dist.destroy_process_group()
