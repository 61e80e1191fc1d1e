"""Data parallelism x context parallelism on a 2-D mesh: each replica has its own sequence, shared by 2 ranks.

torchrun --nproc-per-node 4 examples/dp_cp_mesh.py traces/mesh
"""

import sys

import torch
import torch.distributed as dist
from setup_ranks import log, setup
from tiny_model import HEAD_DIM, HEADS, KV_HEADS, LAYERS, Model, batch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import ringprof
from ringprof.strategies import create

SEQ, CP = 128, 2
device = setup()

mesh = init_device_mesh(device.type, (dist.get_world_size() // CP, CP), mesh_dim_names=("dp", "cp"))
strategy = create("zigzag", group=mesh["cp"])
# DDP over all ranks: the mean over the sequence's parts and over the replicas in one all-reduce.
model = DistributedDataParallel(Model(lambda q, k, v: strategy.attention(q, k, v, causal=True)).to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
positions = strategy.positions(SEQ, device)
replica = mesh["dp"].get_local_rank()


def train_step(step: int) -> None:
    # One sequence per replica: equal on the ranks of one context-parallel group, different between groups.
    tokens, labels = batch(step, SEQ, replica)
    labels_per_rank = (labels != -100).sum() / strategy.comm.size
    tokens, labels = strategy.shard(tokens).to(device), strategy.shard(labels).to(device)
    loss = cross_entropy(model(tokens, positions).flatten(0, 1), labels.flatten(), reduction="sum") / labels_per_rank
    optimizer.zero_grad()
    loss.backward()
    log(step, loss, clip_grad_norm_(model.parameters(), 1.0))
    optimizer.step()


for step in range(8):
    train_step(step)
# The workload of one context-parallel group; with it the report has TFLOP/s per device.
workload = ringprof.Workload(
    seq=SEQ, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, layers=LAYERS, steps=2, dtype="fp32"
)
with ringprof.capture(sys.argv[1], workload, strategy=strategy):
    train_step(8)
    train_step(9)

dist.destroy_process_group()
