"""What NVML and Linux tell of a rank's GPU and host: its state while it is timed, and what connects it.

Of the state: clock, power, temperature, and what held the clock back. The driver is asked by ``nvidia-ml-py`` (imported
as ``pynvml``), in a thread that sleeps between two looks. Connections are NVLinks, and the network adapters that Linux
lists. What is not told, as on CPU, on a MIG slice, in a container or without the package, is None.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ringprof.run import Adapter, DeviceLinks, DeviceState

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


class DeviceTelemetry:
    """What looks at one GPU found."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        """``nvml`` is the module ``pynvml``, initialised; ``handle`` its handle of the GPU."""
        self._nvml, self._handle = nvml, handle
        self._clocks: list[int] = []
        self._watts: list[float] = []
        self._instant = True
        self._degrees: list[int] = []
        self._reasons: Counter[str] = Counter()
        self._looks = 0

    def look(self) -> None:
        """Ask for everything once."""
        nvml, handle = self._nvml, self._handle
        self._looks += 1
        self._clocks += _told(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        self._watts += self._power_w()
        self._degrees += _told(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        masks = _told(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        self._reasons.update(name for bit, name in _REASONS.items() for mask in masks if mask & bit)

    def _power_w(self) -> list[float]:
        """The power of the moment; if the driver does not tell it, in all samples what it calls the power usage."""
        nvml, handle = self._nvml, self._handle
        if self._instant:
            if watts := _told(lambda: _field(nvml, handle, nvml.NVML_FI_DEV_POWER_INSTANT) / 1e3):
                return watts
            self._instant = False
            self._watts.clear()
        return _told(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3)

    def state(self) -> DeviceState | None:
        """What all looks come to; None where there was none that told anything."""
        if not (self._clocks or self._watts or self._degrees):
            return None
        nvml, handle = self._nvml, self._handle
        rated = _told(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))
        limit = _told(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3)
        celsius = _told(lambda: nvml.nvmlDeviceGetTemperatureThreshold(handle, nvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX))
        return DeviceState(
            looks=self._looks,
            sm_clock_mhz=int(median(self._clocks)) if self._clocks else None,
            least_sm_clock_mhz=min(self._clocks, default=None),
            rated_sm_clock_mhz=rated[0] if rated else None,
            power_w=round(median(self._watts), 1) if self._watts else None,
            highest_power_w=round(max(self._watts), 1) if self._watts else None,
            power_limit_w=limit[0] if limit else None,
            instant_power=self._instant and bool(self._watts),
            hottest_celsius=max(self._degrees, default=None),
            limit_celsius=celsius[0] if celsius else None,
            held_back={name: count / self._looks for name, count in sorted(self._reasons.items())},
        )


def _told(ask: Callable[[], Any]) -> list[Any]:
    """What the driver answers; nothing where it does not know, which it says in an exception of its own."""
    try:
        return [ask()]
    except Exception:
        return []


def _field(nvml: Any, handle: Any, field: int) -> int:
    """One field value that NVML holds as an unsigned integer. Raises NVML's error where it has none."""
    (value,) = nvml.nvmlDeviceGetFieldValues(handle, [field])
    if value.nvmlReturn != nvml.NVML_SUCCESS:
        raise nvml.NVMLError(value.nvmlReturn)
    return int(value.value.uiVal)


def nvml_handle(uuid: str) -> tuple[Any, Any] | None:
    """The module ``pynvml``, initialised, and its handle of the GPU of this UUID; None where it cannot be asked."""
    try:
        import pynvml  # here, because it is not everywhere

        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    except Exception:  # whatever a driver, or its absence, raises: the state is a courtesy
        return None


def open_telemetry(uuid: str) -> DeviceTelemetry | None:
    """A watch on the GPU of this UUID; None where the driver cannot be asked about it."""
    asked = nvml_handle(uuid)
    return DeviceTelemetry(*asked) if asked else None


@contextmanager
def watching(device: torch.device) -> Iterator[DeviceTelemetry | None]:
    """Look at a GPU through the block: at its begin, at its end, and `EVERY_S` in between."""
    watch = open_telemetry(str(torch.cuda.get_device_properties(device).uuid)) if device.type == "cuda" else None
    if watch is None:
        yield None
        return
    with looking(watch):
        yield watch


@contextmanager
def looking(watch: DeviceTelemetry) -> Iterator[None]:
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


ADAPTERS = Path("/sys/class/infiniband")
_SWITCH = 2
"""Of NVML's remote device types (``NVML_NVLINK_DEVICE_TYPE_SWITCH``)."""
_MOST_LINKS = 36


def links_of(device: torch.device, *, first_on_host: bool) -> DeviceLinks | None:
    """Of this rank; the host's adapters from its first rank alone. None where nothing is known."""
    adapters = adapters_in(ADAPTERS) if first_on_host and device.type == "cuda" else None
    asked = nvml_handle(str(torch.cuda.get_device_properties(device).uuid)) if device.type == "cuda" else None
    links = nvlinks_of(*asked) if asked else None
    if links is None and adapters is None:
        return None
    return DeviceLinks(nvlinks=links, adapters=adapters)


def nvlinks_of(nvml: Any, handle: Any) -> dict[str, int] | None:
    """Active links by what is at their other end: ``switch``, or a GPU's PCI address; None where NVML does not say."""
    ends: Counter[str] = Counter()
    for link in range(_MOST_LINKS):
        try:
            active = nvml.nvmlDeviceGetNvLinkState(handle, link)
        except Exception:  # NVML's own: there are no more links, or none at all
            return dict(ends) if link else None
        if active:
            ends[_other_end(nvml, handle, link)] += 1
    return dict(ends)


def _other_end(nvml: Any, handle: Any, link: int) -> str:
    try:
        if nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link) == _SWITCH:
            return "switch"
        address = nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId
    except Exception:  # older drivers, and virtual machines
        return "unknown"
    return address.decode() if isinstance(address, bytes) else str(address)


def adapters_in(folder: Path) -> list[Adapter] | None:
    """A row a port that is active, by name; None where Linux lists none."""
    try:
        ports = sorted(folder.glob("*/ports/*"))
    except OSError:
        return None
    found = [_adapter(port) for port in ports if _said(port / "state").endswith("ACTIVE")]
    return found or None


def _adapter(port: Path) -> Adapter:
    # "400 Gb/sec (4X NDR)"
    rate = _said(port / "rate").partition(" ")[0]
    return Adapter(
        name=f"{port.parent.parent.name}:{port.name}",
        gbits=float(rate) if rate.isascii() and rate.replace(".", "", 1).isdigit() else None,
        layer=_said(port / "link_layer") or None,
    )


def _said(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
