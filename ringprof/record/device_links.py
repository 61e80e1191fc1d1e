"""What a rank's GPU and host are connected by: NVLinks as NVML tells them, network adapters as Linux lists them.

What is not there, or not told, is None: on CPU, in a container that hides it, without ``nvidia-ml-py``.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from ringprof.record.device_watch import nvml_handle
from ringprof.run import Adapter, DeviceLinks

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
