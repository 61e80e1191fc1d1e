"""Process groups of the recorder and of a user: their ranks, and collectives on bytes and tensors. Loads torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ringprof.common.json_object import from_json, to_json
from ringprof.errors import UsageError
from ringprof.ranks.launcher import RankInfo, slurm_rendezvous
from ringprof.strategies.transport.groups import uses_nccl


@contextmanager
def world_group(rank_info: RankInfo, device_type: str, timeout_s: float) -> Iterator[torch.device]:
    """Open the world's process group, NCCL on GPUs and gloo on CPUs; yield this rank's device."""
    if "RANK" not in os.environ:
        os.environ.update(slurm_rendezvous(rank_info))
    device = torch.device("cpu")
    if device_type == "cuda":
        # Set the device before the group is created: NCCL must never see a rank on another rank's device.
        # If a launcher makes only its own GPU visible to each rank, the index of every GPU is 0.
        device = torch.device("cuda", rank_info.local_rank if torch.cuda.device_count() > 1 else 0)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device_type == "cuda" else None,
    )
    yield device
    # Only after success: destroying the group would wait for a rank that has gone.
    dist.destroy_process_group()


def gather_bytes(data: bytes, device: torch.device, group: Any = None) -> list[bytes]:
    """Gather every rank's ``data``, in the order of ``group`` (None: the world), through tensors on ``device``.

    Ranks exchange JSON as bytes and not objects, so that nothing is unpickled.
    """
    lengths = gather_tensor(torch.tensor([len(data)], dtype=torch.int64, device=device), group)
    sizes = [int(length.item()) for length in lengths]
    padded = torch.zeros(max(1, *sizes), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
    gathered = gather_tensor(padded.to(device), group)
    return [bytes(part[:size].cpu().numpy()) for part, size in zip(gathered, sizes, strict=True)]


def gather_tensor(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """Gather every rank's ``tensor`` (same shape and type on all), in the order of ``group`` (None: the world)."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    return parts


_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_EXIT_NOTICE = "ringprof/left/"
_CAPTURE_KEY = "ringprof/capture/"
_MOST_NAMED = 8
"""Most ranks that the label of a group lists."""


class GroupRanks:
    """Ranks of a user's process group, and this rank among them; a single rank if torch.distributed is not in use.

    ``rank`` is this rank's index in the group, and ``number`` its global rank. ``numbers`` are the global ranks of the
    group. ``device`` is where the group's collectives take their tensors.
    """

    def __init__(self, group: Any) -> None:
        """Take a process group, a DeviceMesh of one dimension, or None, which is the world.

        Raises `UsageError` on a rank outside ``group``, and for a DeviceMesh of several dimensions.
        """
        self.rank, self.size, self.number, self.numbers = 0, 1, 0, [0]
        self.group: Any = None
        on_gpu = torch.cuda.is_available()
        if dist.is_available() and dist.is_initialized():
            if getattr(group, "ndim", 1) > 1:
                raise UsageError(f"a DeviceMesh of {group.ndim} dimensions is no group: name one, as in mesh['cp']")
            if hasattr(group, "get_coordinate") and group.get_coordinate() is None:
                self.group = dist.GroupMember.NON_GROUP_MEMBER
            else:
                self.group = group.get_group() if hasattr(group, "get_group") else group or dist.group.WORLD
            self.rank, self.number = dist.get_rank(self.group), dist.get_rank()
            if self.rank < 0:
                raise UsageError(f"rank {self.number} is not in the group: only its members may take part")
            self.size = dist.get_world_size(self.group)
            self.numbers = dist.get_process_group_ranks(self.group)
            # If the user names no backend, as init_device_mesh does not, the group has one for each device type.
            backend = str(dist.get_backend(self.group))
            cuda: Any = torch.cuda
            on_gpu = "nccl" in backend or (backend == "undefined" and uses_nccl(self.group) and cuda.is_initialized())
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    @property
    def label(self) -> str:
        """Name of the group among those of its job, such as ``ranks2-3``; empty for the world."""
        first, last = min(self.numbers), max(self.numbers)
        if not (dist.is_available() and dist.is_initialized()) or self.size == dist.get_world_size():
            return ""
        if self.size == 1:
            return f"rank{first}"
        if last - first + 1 == self.size:
            return f"ranks{first}-{last}"
        more = "_more" if self.size > _MOST_NAMED else ""
        return "ranks" + "_".join(map(str, sorted(self.numbers)[:_MOST_NAMED])) + more

    def groups_in(self, folder: object) -> int:
        """Register this group for ``folder`` and count the groups registered for it; 1 if the job has no store."""
        with suppress(Exception):
            store, key = c10d._get_default_store(), f"{_CAPTURE_KEY}{folder}/"
            return int(store.add(f"{key}count", 1 if store.add(key + self.label, 1) == 1 else 0))
        return 1

    def finish(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def wait(self) -> None:
        """Wait for the other ranks."""
        if self.size > 1:
            dist.barrier(self.group)

    def announce_exit(self, token: str, error: BaseException) -> None:
        """Announce in the job's store, without waiting, that an error ended this rank's capture ``token``."""
        # Nothing here may hide that error.
        with suppress(Exception):
            notice = f"rank {self.number} left the block with {one_line(error)}"
            c10d._get_default_store().set(_EXIT_NOTICE + token, notice)

    def exit_notice(self, token: str) -> str | None:
        """Return what another rank has announced of the capture ``token``; None if nothing, or if the store is gone."""
        with suppress(Exception):
            store = c10d._get_default_store()
            if token and store.check([_EXIT_NOTICE + token]):
                return str(store.get(_EXIT_NOTICE + token), "utf-8", "replace")
        return None

    def gather_structs(self, value: _Struct) -> list[_Struct]:
        """Gather every rank's ``value``, in rank order."""
        return [from_json(part, type(value)) for part in self.gather_bytes(to_json(value))]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Gather every rank's ``data``."""
        return gather_bytes(data, self.device, self.group) if self.size > 1 else [data]

    def gather_tensor(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Gather every rank's ``tensor``, of the same shape and type on all."""
        return gather_tensor(tensor, self.group) if self.size > 1 else [tensor]


def one_line(error: BaseException) -> str:
    """Format an error in one line: its type and the first 200 characters of its text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
