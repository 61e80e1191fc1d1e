"""Data parallelism profiled by torch.profiler alone: one trace per rank, then ``ringprof report FOLDER``.

    torchrun --nproc-per-node 2 examples/profiler_only.py traces/profiler

The training script does not import ringprof.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_model import Model, batch, dense_attention
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

SEQ = 128
folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
rank = dist.get_rank()
if device.type == "cuda":
    torch.cuda.set_device(rank % torch.cuda.device_count())

model = DistributedDataParallel(Model(dense_attention).to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
positions = torch.arange(SEQ, device=device)

# Two steps are skipped, one warms the profiler up, two are recorded. Every rank writes its own file.
with profile(
    activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])],
    schedule=schedule(wait=2, warmup=1, active=2, repeat=1),
    on_trace_ready=lambda p: p.export_chrome_trace(str(folder / f"rank{rank}.json.gz")),
) as profiler:
    for step in range(6):
        tokens, labels = (x.to(device) for x in batch(step, SEQ, replica=rank))
        loss = cross_entropy(model(tokens, positions).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        profiler.step()

dist.destroy_process_group()
