"""Traces that only another host can see: brought to rank 0's folder through the process group, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringprof.record.run_folder import reduced_name, trace_name
from ringprof.scratch import has_token, remove, scratch_folder

MESSAGE_BYTES = 4 * 2**20
"""The most of a trace that a rank holds in memory at a time."""


class TraceFile:
    """Where a rank writes its compressed trace: the run's folder, or one of its own where it does not see that."""

    def __init__(self, staging: Path, token: str, rank: int) -> None:
        self.shared = has_token(staging, token)
        self._folder = staging if self.shared else scratch_folder("trace")
        self.path = self._folder / trace_name(rank)
        self.reduced = self._folder / reduced_name(rank)
        """Where the trace's reduced form goes."""

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size

    def remote_bytes(self) -> int | None:
        """The trace's size where rank 0 must be sent it; None where it lies in the run's folder."""
        return None if self.shared else self.size_bytes

    def remote_reduced_bytes(self) -> int | None:
        """The same of its reduced form; None where there is none."""
        return None if self.shared or not self.reduced.exists() else self.reduced.stat().st_size

    def discard(self) -> None:
        """Remove a folder of one's own."""
        if not self.shared:
            remove(self._folder)


def gather_traces(
    own: Path, files: Sequence[tuple[str, int | None]], staging: Path, device: torch.device, group: Any = None
) -> None:
    """Send each rank's trace to the group's first rank, which writes it into ``staging``; one rank after the other.

    ``files`` holds the name of each rank's trace there, and its size where it must be sent. Called by all ranks of
    ``group`` (None: the world) with the same ``files``. Raises OSError where the first rank cannot write.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    problems: list[OSError] = []
    for sender, (name, size) in zip(ranks, files, strict=True):
        if size is None or sender == ranks[0]:
            continue
        if dist.get_rank() == ranks[0]:
            _receive(staging / name, size, sender, device, group, problems)
        elif dist.get_rank() == sender:
            _send(own, size, ranks[0], device, group)
    if problems:
        raise problems[0]


def _send(path: Path, size: int, receiver: int, device: torch.device, group: Any) -> None:
    room = _room(size, device)
    with path.open("rb") as file:
        for start in range(0, size, MESSAGE_BYTES):
            data = bytearray(file.read(min(MESSAGE_BYTES, size - start)))
            piece = room[: len(data)].copy_(torch.frombuffer(data, dtype=torch.uint8))
            _exchange(dist.isend, piece, receiver, group)


def _receive(
    path: Path, size: int, sender: int, device: torch.device, group: Any, problems: list[OSError]
) -> None:  # fmt: skip
    """Receive every piece, also after one that could not be written: the sender waits. Errors go to ``problems``."""
    room = _room(size, device)
    with _noting(problems):
        path.touch()
    for start in range(0, size, MESSAGE_BYTES):
        piece = room[: min(MESSAGE_BYTES, size - start)]
        _exchange(dist.irecv, piece, sender, group)
        with _noting(problems), path.open("ab") as file:
            file.write(piece.cpu().numpy().data)


@contextmanager
def _noting(problems: list[OSError]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problems.append(error)


def _room(size: int, device: torch.device) -> torch.Tensor:
    """The same for every piece: the backend may let go of a message's tensor long after the message is complete."""
    return torch.empty(min(MESSAGE_BYTES, size), dtype=torch.uint8, device=device)


def _exchange(operation: object, piece: torch.Tensor, peer: int, group: Any) -> None:
    """One message. In a batch of one: NCCL then uses the group's own communicator, and makes none for each pair."""
    for work in dist.batch_isend_irecv([dist.P2POp(operation, piece, peer, group)]):  # type: ignore[arg-type]
        work.wait()
    if piece.device.type == "cuda":
        torch.cuda.synchronize(piece.device)
