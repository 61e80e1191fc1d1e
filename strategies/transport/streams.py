"""Compute streams beside the current one, so that one kernel's last wave overlaps with the next one's first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class SideStreams:
    """Side streams of a device that has none, such as the CPU: everything runs on the current stream."""

    def on(self, number: int) -> AbstractContextManager[Any]:
        """Run the context on stream ``number`` modulo their count, after the work queued on the current stream."""
        return nullcontext()

    def join(self, results: Iterable[Tensor]) -> None:
        """Make the current stream wait for the side streams.

        The memory of their ``results`` is then reused only after the current stream has used it.
        """


class CudaSideStreams(SideStreams):
    """Side streams of one CUDA device."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._streams: list[Any] = [torch.cuda.Stream(device) for _ in range(count)]  # type: ignore[no-untyped-call]

    def on(self, number: int) -> AbstractContextManager[Any]:
        stream = self._streams[number % len(self._streams)]
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        return torch.cuda.stream(stream)

    def join(self, results: Iterable[Tensor]) -> None:
        current = torch.cuda.current_stream(self._streams[0].device)
        for stream in self._streams:
            current.wait_stream(stream)
        for result in results:
            result.record_stream(current)


SIDE_STREAMS: dict[str, Callable[[torch.device, int], SideStreams]] = {"cuda": CudaSideStreams}
"""Class of side streams by device type; other types have none. The dry run adds its own for ``meta`` tensors."""


def side_streams(like: Tensor, count: int) -> SideStreams:
    """Return ``count`` side streams for the device of ``like``."""
    kind = SIDE_STREAMS.get(like.device.type)
    return SideStreams() if kind is None else kind(like.device, count)
