"""Telemetry of a rank's GPU and host from NVML and Linux: the GPU's state while it is timed, and its connections.

The state is clock, power, temperature, and what limited the clock. ``nvidia-ml-py`` (imported as ``pynvml``) queries
the driver, in a thread that sleeps between two samples. Connections are NVLinks, and the network adapters that Linux
lists. Unknown values are None, as on CPU, on a MIG slice, in a container or without the package.
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

SAMPLE_INTERVAL_S = 0.1
"""Seconds between two samples. A sample takes about 0.1 ms of the driver and no time of the GPU."""

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
"""Throttle reasons by bit of the driver's mask, except idle (NVIDIA, "NVML API Reference", nvmlClocksEventReasons)."""


class DeviceTelemetry:
    """Samples of one GPU's clock, power, temperature and throttle reasons."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        """Take ``nvml``, the initialised module ``pynvml``, and ``handle``, its handle of the GPU."""
        self._nvml, self._handle = nvml, handle
        self._clocks: list[int] = []
        self._watts: list[float] = []
        self._instant = True
        self._celsius: list[int] = []
        self._reasons: Counter[str] = Counter()
        self._samples = 0

    def sample(self) -> None:
        """Query all values once."""
        nvml, handle = self._nvml, self._handle
        self._samples += 1
        self._clocks += _query(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        self._watts += self._power_w()
        self._celsius += _query(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        masks = _query(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        self._reasons.update(name for bit, name in _REASONS.items() for mask in masks if mask & bit)

    def _power_w(self) -> list[float]:
        """Return the instantaneous power in watts, or nothing if unknown.

        If the driver does not report it, all samples are the driver's averaged power usage instead.
        """
        nvml, handle = self._nvml, self._handle
        if self._instant:
            if watts := _query(lambda: _field(nvml, handle, nvml.NVML_FI_DEV_POWER_INSTANT) / 1e3):
                return watts
            self._instant = False
            self._watts.clear()
        return _query(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3)

    def state(self) -> DeviceState | None:
        """Summarise all samples; None if no sample has a value."""
        if not (self._clocks or self._watts or self._celsius):
            return None
        nvml, handle = self._nvml, self._handle
        rated = _query(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))
        limit = _query(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3)
        limit_celsius = _query(
            lambda: nvml.nvmlDeviceGetTemperatureThreshold(handle, nvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX)
        )
        return DeviceState(
            looks=self._samples,
            sm_clock_mhz=int(median(self._clocks)) if self._clocks else None,
            least_sm_clock_mhz=min(self._clocks, default=None),
            rated_sm_clock_mhz=rated[0] if rated else None,
            power_w=round(median(self._watts), 1) if self._watts else None,
            highest_power_w=round(max(self._watts), 1) if self._watts else None,
            power_limit_w=limit[0] if limit else None,
            instant_power=self._instant and bool(self._watts),
            hottest_celsius=max(self._celsius, default=None),
            limit_celsius=limit_celsius[0] if limit_celsius else None,
            held_back={name: count / self._samples for name, count in sorted(self._reasons.items())},
        )


def _query(read: Callable[[], Any]) -> list[Any]:
    """Return the driver's answer in a list, which is empty if the driver raises an exception because it has none."""
    try:
        return [read()]
    except Exception:
        return []


def _field(nvml: Any, handle: Any, field: int) -> int:
    """Return one field value that NVML stores as an unsigned integer. Raises NVML's error if it has none."""
    (value,) = nvml.nvmlDeviceGetFieldValues(handle, [field])
    if value.nvmlReturn != nvml.NVML_SUCCESS:
        raise nvml.NVMLError(value.nvmlReturn)
    return int(value.value.uiVal)


def nvml_handle(device: torch.device) -> tuple[Any, Any] | None:
    """Return the initialised module ``pynvml`` and its handle of a GPU; None if it is unavailable, and on CPU."""
    if device.type != "cuda":
        return None
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    try:
        import pynvml  # here, because it is optional

        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    except Exception:  # whatever a driver, or its absence, raises: telemetry is optional
        return None


@contextmanager
def device_telemetry(device: torch.device) -> Iterator[DeviceTelemetry | None]:
    """Sample a GPU during the block: at its start, at its end, and every `SAMPLE_INTERVAL_S`; yield its telemetry.

    Yields None on CPU and if the driver is unavailable.
    """
    handles = nvml_handle(device)
    if handles is None:
        yield None
        return
    telemetry = DeviceTelemetry(*handles)
    with sampling(telemetry):
        yield telemetry


@contextmanager
def sampling(telemetry: DeviceTelemetry) -> Iterator[None]:
    """Sample from another thread during the block."""
    ended = threading.Event()

    def sample_until_end() -> None:
        telemetry.sample()
        while not ended.wait(SAMPLE_INTERVAL_S):
            telemetry.sample()

    thread = threading.Thread(target=sample_until_end, name="ringprof telemetry", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        telemetry.sample()


ADAPTERS = Path("/sys/class/infiniband")
_SWITCH = 2
"""NVML's remote device type of a switch (``NVML_NVLINK_DEVICE_TYPE_SWITCH``)."""
_MAX_LINKS = 36


def device_links(device: torch.device, *, first_on_host: bool) -> DeviceLinks | None:
    """Return the NVLinks of this rank's GPU and, on a host's first rank, the host's adapters; None if unknown."""
    adapters = list_adapters(ADAPTERS) if first_on_host and device.type == "cuda" else None
    handles = nvml_handle(device)
    links = count_nvlinks(*handles) if handles else None
    if links is None and adapters is None:
        return None
    return DeviceLinks(nvlinks=links, adapters=adapters)


def count_nvlinks(nvml: Any, handle: Any) -> dict[str, int] | None:
    """Count the active links by their remote end, ``switch`` or a GPU's PCI address; None if NVML does not tell."""
    count_by_end: Counter[str] = Counter()
    for link in range(_MAX_LINKS):
        try:
            active = nvml.nvmlDeviceGetNvLinkState(handle, link)
        except Exception:  # NVML's own: there are no more links, or none at all
            return dict(count_by_end) if link else None
        if active:
            count_by_end[_remote_end(nvml, handle, link)] += 1
    return dict(count_by_end)


def _remote_end(nvml: Any, handle: Any, link: int) -> str:
    try:
        if nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link) == _SWITCH:
            return "switch"
        address = nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId
    except Exception:  # older drivers, and virtual machines
        return "unknown"
    return address.decode() if isinstance(address, bytes) else str(address)


def list_adapters(folder: Path) -> list[Adapter] | None:
    """Return the active ports of the network adapters in ``folder``, by name; None if Linux lists none."""
    try:
        ports = sorted(folder.glob("*/ports/*"))
    except OSError:
        return None
    adapters = []
    for port in ports:
        if _read_text(port / "state").endswith("ACTIVE"):
            # "400 Gb/sec (4X NDR)"
            rate = _read_text(port / "rate").partition(" ")[0]
            gbits = float(rate) if rate.isascii() and rate.replace(".", "", 1).isdigit() else None
            layer = _read_text(port / "link_layer") or None
            adapters.append(Adapter(name=f"{port.parent.parent.name}:{port.name}", gbits=gbits, layer=layer))
    return adapters or None


def _read_text(file: Path) -> str:
    """Return a file's text without surrounding space; empty if it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
