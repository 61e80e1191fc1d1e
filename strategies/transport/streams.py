"""Compute streams beside the current one, so that one kernel's last wave overlaps with the next one's first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class SideStreams:
    """None: what runs beside the current stream runs on it, as on the CPU."""

    def on(self, number: int) -> AbstractContextManager[Any]:
        """Run on one of the streams, taken in turns, after what the current stream has waited for."""
        return nullcontext()

    def join(self, results: Iterable[Tensor]) -> None:
        """Make the current stream wait for the others, and the memory of their ``results`` wait for it."""


class CudaSideStreams(SideStreams):
    """Of one CUDA device."""

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
"""By the type of device; others have none. A planner that runs strategies on ``meta`` tensors adds its own."""


def side_streams(like: Tensor, count: int) -> SideStreams:
    """``count`` streams for tensors on the device of ``like``."""
    kind = SIDE_STREAMS.get(like.device.type)
    return SideStreams() if kind is None else kind(like.device, count)
