"""Transfer of traces from hosts that do not share rank 0's folder, through the process group and in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringprof.common.json_object import JsonObject
from ringprof.common.scratch import has_token, remove, scratch_folder
from ringprof.ranks.process_group import GroupRanks
from ringprof.recording.run_folder import reduced_name, trace_name

MESSAGE_BYTES = 4 * 2**20
"""Most bytes of a trace that a rank holds in memory at a time."""


class TraceFile:
    """Compressed trace of one rank: in the run's folder, or in a temporary folder if the rank cannot see that."""

    def __init__(self, staging: Path, token: str, rank: int) -> None:
        self.shared = has_token(staging, token)
        self._folder = staging if self.shared else scratch_folder("trace")
        self.path = self._folder / trace_name(rank)
        self.reduced = self._folder / reduced_name(rank)
        """Path of the reduced trace."""

    def described(self, *, reduced: bool) -> JsonObject:
        """Return the fields of a `RankResult` that name a complete trace and, if it is ``reduced``, the reduced one."""
        size_bytes = self.path.stat().st_size
        reduced_bytes = self.reduced.stat().st_size if reduced else None
        return {
            "trace": self.path.name, "trace_bytes": size_bytes, "remote_bytes": None if self.shared else size_bytes,
            "reduced": self.reduced.name if reduced else None,
            "remote_reduced_bytes": None if self.shared else reduced_bytes,
        }  # fmt: skip

    def discard(self) -> None:
        """Remove the temporary folder, if any."""
        if not self.shared:
            remove(self._folder)


def gather_traces(
    trace: Path, files: Sequence[tuple[str, int | None]], staging: Path, ranks: GroupRanks
) -> list[OSError]:
    """Send each rank's trace to the group's first rank, which writes it into ``staging``; one rank after the other.

    ``files`` holds each trace's file name in ``staging``, and its size if it must be sent. All ``ranks`` must call this
    with the same ``files``. Returns the errors of the first rank's writing.
    """
    problems: list[OSError] = []
    first = ranks.numbers[0]
    for sender, (name, size) in zip(ranks.numbers, files, strict=True):
        if size is None or sender == first:
            continue
        if ranks.number == first:
            _receive(staging / name, size, sender, ranks, problems)
        elif ranks.number == sender:
            _send(trace, size, first, ranks)
    return problems


def _send(path: Path, size: int, receiver: int, ranks: GroupRanks) -> None:
    buffer = _create_buffer(size, ranks.device)
    with path.open("rb") as file:
        for start in range(0, size, MESSAGE_BYTES):
            data = bytearray(file.read(min(MESSAGE_BYTES, size - start)))
            piece = buffer[: len(data)].copy_(torch.frombuffer(data, dtype=torch.uint8))
            _transfer(dist.isend, piece, receiver, ranks.group)


def _receive(path: Path, size: int, sender: int, ranks: GroupRanks, problems: list[OSError]) -> None:
    """Receive every piece, because the sender waits, even if one cannot be written; append errors to ``problems``."""
    buffer = _create_buffer(size, ranks.device)
    with _errors_collected(problems):
        path.touch()
    for start in range(0, size, MESSAGE_BYTES):
        piece = buffer[: min(MESSAGE_BYTES, size - start)]
        _transfer(dist.irecv, piece, sender, ranks.group)
        with _errors_collected(problems), path.open("ab") as file:
            file.write(piece.cpu().numpy().data)


@contextmanager
def _errors_collected(problems: list[OSError]) -> Iterator[None]:
    """Append an OSError of the block to ``problems`` instead of raising it."""
    try:
        yield
    except OSError as error:
        problems.append(error)


def _create_buffer(size: int, device: torch.device) -> torch.Tensor:
    """Create the buffer of all pieces of a file.

    A buffer per piece would hold more memory: the backend may keep a message's tensor long after its completion.
    """
    return torch.empty(min(MESSAGE_BYTES, size), dtype=torch.uint8, device=device)


def _transfer(operation: object, piece: torch.Tensor, peer: int, group: Any) -> None:
    """Send or receive one piece, and wait for it.

    Uses a batch of one message, so that NCCL uses the group's communicator and creates none per pair of ranks.
    """
    for work in dist.batch_isend_irecv([dist.P2POp(operation, piece, peer, group)]):  # type: ignore[arg-type]
        work.wait()
    if piece.device.type == "cuda":
        torch.cuda.synchronize(piece.device)
