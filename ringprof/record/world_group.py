"""The ranks' process group, and what they tell each other outside the strategy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringprof.record.launcher import RankPlace, slurm_rendezvous


@contextmanager
def world_group(place: RankPlace, device_type: str, timeout_s: float) -> Iterator[torch.device]:
    """The world's process group: NCCL on GPUs, gloo on CPUs. Yields this rank's device."""
    if "RANK" not in os.environ:
        os.environ.update(slurm_rendezvous(place))
    device = torch.device("cpu")
    if device_type == "cuda":
        # Before the group is made: NCCL must never see a rank on another rank's device.
        # A launcher that shows each rank its own GPU alone calls all of them 0.
        device = torch.device("cuda", place.local_rank if torch.cuda.device_count() > 1 else 0)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device_type == "cuda" else None,
    )
    yield device
    # Only after success: with a rank gone, taking the group down would wait for it.
    dist.destroy_process_group()


def gather_bytes(data: bytes, device: torch.device, group: Any = None) -> list[bytes]:
    """Every rank's ``data``, in the order of ``group`` (None: the world). ``device`` is where its backend works.

    Bytes and not objects: what ranks exchange is JSON, nothing is unpickled.
    """
    lengths = gather_tensor(torch.tensor([len(data)], dtype=torch.int64, device=device), group)
    sizes = [int(length.item()) for length in lengths]
    padded = torch.zeros(max(1, *sizes), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
    gathered = gather_tensor(padded.to(device), group)
    return [bytes(part[:size].cpu().numpy()) for part, size in zip(gathered, sizes, strict=True)]


def gather_tensor(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """Every rank's ``tensor`` (same shape and type on all), in the order of ``group`` (None: the world)."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    return parts
