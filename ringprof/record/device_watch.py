"""The state of a rank's GPU while it is timed: clock, power, temperature, and what held the clock back.

Asked of the driver by NVML (``nvidia-ml-py``, imported as ``pynvml``), in a thread that sleeps between two looks. What
the driver does not tell, as on CPU, on a MIG slice or without the package, is None.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from ringprof.run import DeviceState

EVERY_S = 0.1
"""A look takes some 0.1 ms of the driver and none of the GPU."""

_REASONS = {
    0x0004: "power cap",
    0x0008: "hardware slow-down",
    0x0010: "sync boost",
    0x0020: "software thermal slow-down",
    0x0040: "hardware thermal slow-down",
    0x0080: "hardware power brake",
    0x0100: "display clock setting",
    0x0002: "application clock setting",
}
"""Bits of the driver's mask of throttle reasons (NVIDIA, "NVML API Reference", nvmlClocksEventReasons); that it is idle
is none."""


class DeviceWatch:
    """What looks at one GPU found."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        """``nvml`` is the module ``pynvml``, initialised; ``handle`` its handle of the GPU."""
        self._nvml, self._handle = nvml, handle
        self._clocks: list[int] = []
        self._watts: list[float] = []
        self._degrees: list[int] = []
        self._reasons: Counter[str] = Counter()
        self._looks = 0

    def look(self) -> None:
        """Ask for everything once."""
        nvml, handle = self._nvml, self._handle
        self._looks += 1
        _add(self._clocks, lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        _add(self._watts, lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3)
        _add(self._degrees, lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        masks: list[int] = []
        _add(masks, lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        self._reasons.update(name for bit, name in _REASONS.items() for mask in masks if mask & bit)

    def state(self) -> DeviceState | None:
        """What all looks come to; None where there was none that told anything."""
        if not (self._clocks or self._watts or self._degrees):
            return None
        nvml, handle = self._nvml, self._handle
        rated: list[int] = []
        _add(rated, lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))
        limit: list[float] = []
        _add(limit, lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3)
        return DeviceState(
            looks=self._looks,
            sm_clock_mhz=int(median(self._clocks)) if self._clocks else None,
            least_sm_clock_mhz=min(self._clocks, default=None),
            rated_sm_clock_mhz=rated[0] if rated else None,
            power_w=round(median(self._watts), 1) if self._watts else None,
            power_limit_w=limit[0] if limit else None,
            hottest_celsius=max(self._degrees, default=None),
            held_back={name: count / self._looks for name, count in sorted(self._reasons.items())},
        )


def _add(found: list[Any], ask: Callable[[], Any]) -> None:
    """What the driver answers; nothing where it does not know, which it says in an exception of its own."""
    try:
        found.append(ask())
    except Exception:
        return


def nvml_handle(uuid: str) -> tuple[Any, Any] | None:
    """The module ``pynvml``, initialised, and its handle of the GPU of this UUID; None where it cannot be asked."""
    try:
        import pynvml  # here, because it is not everywhere

        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    except Exception:  # whatever a driver, or its absence, raises: the state is a courtesy
        return None


def open_watch(uuid: str) -> DeviceWatch | None:
    """A watch on the GPU of this UUID; None where the driver cannot be asked about it."""
    asked = nvml_handle(uuid)
    return DeviceWatch(*asked) if asked else None


@contextmanager
def watching(device: torch.device) -> Iterator[DeviceWatch | None]:
    """Look at a GPU through the block: at its begin, at its end, and `EVERY_S` in between."""
    watch = open_watch(str(torch.cuda.get_device_properties(device).uuid)) if device.type == "cuda" else None
    if watch is None:
        yield None
        return
    with looking(watch):
        yield watch


@contextmanager
def looking(watch: DeviceWatch) -> Iterator[None]:
    """Look from another thread as long as the block lasts."""
    over = threading.Event()

    def looks() -> None:
        watch.look()
        while not over.wait(EVERY_S):
            watch.look()

    thread = threading.Thread(target=looks, name="ringprof device watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        watch.look()
