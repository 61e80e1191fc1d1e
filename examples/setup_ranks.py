"""What every example does first and last: join the ranks that torchrun started, and print a step's loss."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor


def setup() -> torch.device:
    """Join the process group, with NCCL on GPUs and gloo on CPU, and return this rank's device.

    Ends the program with a line of usage unless it was given one folder to write to.
    """
    if len(sys.argv) != 2:
        sys.exit(f"usage: torchrun --nproc-per-node 2 {sys.argv[0]} FOLDER")
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def log(step: int, loss: Tensor, grad_norm: Tensor) -> None:
    """Print the loss, averaged over all ranks, and the norm of the averaged gradient, on rank 0."""
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {mean.item():.5f}, gradient norm {grad_norm.item():.5f}", flush=True)
