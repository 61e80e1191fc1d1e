"""Peak rates of devices from their vendors' data sheets: dense matrix products with 16-bit inputs, and memory."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

HALF_TYPES = ("bf16", "fp16")
"""Data types for which the peak compute rates hold."""

# The first entry whose name occurs in the device's name is used. Some data sheets print sparse figures only: halved.
# Sources: NVIDIA's data sheet of each GPU (HGX B200, GB200 NVL72, H200, H100, A100, L40S, L4 ...), its white papers on
# Ada and Ampere for GeForce (fp32 accumulation), AMD's data sheets for Instinct (MI300X: 1307.4). Figures for H20, L20
# and the 800 series (A100 and H100 except for links and fp64) are those that NVIDIA gave to server vendors.
_DEVICES: dict[str, tuple[float, float | None]] = {
    "GB200": (2500.0, 8000.0),
    "B200": (2250.0, 8000.0),
    "H200 NVL": (835.0, 4800.0),
    "H200": (989.0, 4800.0),
    "GH200": (989.0, None),
    "H100 NVL": (835.0, 3900.0),
    "H100 PCIe": (756.0, 2000.0),
    "H100": (989.0, 3350.0),
    "H800 PCIe": (756.0, 2000.0),
    "H800": (989.0, 3350.0),
    "H20": (148.0, 4000.0),
    "A100": (312.0, 1555.0),
    "A800": (312.0, None),
    "A40": (149.7, 696.0),
    "A10G": (70.0, 600.0),
    "A10": (125.0, 600.0),
    "A30": (165.0, 933.0),
    "L40S": (362.0, 864.0),
    "L40": (181.0, 864.0),
    "L20": (119.5, 864.0),
    "L4": (121.0, 300.0),
    "V100": (125.0, None),  # fp16; it has no bf16
    "RTX 4090 D": (147.0, 1008.0),
    "RTX 4090D": (147.0, None),
    "RTX 4090": (165.2, 1008.0),
    "RTX 3090": (71.0, 936.0),
    "MI325X": (1307.4, 6000.0),
    "MI300X": (1307.4, 5300.0),
    "MI250X": (383.0, 3276.8),
}
"""Peak TFLOP/s and memory bandwidth in GB/s by device name.

The bandwidth is None for a name that covers several memories; `_MEMORIES` has the full names of those."""
_MEMORIES = {"A100 SXM4 80GB": 2039.0, "A100 80GB PCIe": 1935.0, "A800 SXM4 80GB": 2039.0, "A800 80GB PCIe": 1935.0}


class Peak(msgspec.Struct, frozen=True):
    """Peak compute rate of a device."""

    tflops: float
    source: str
    """Origin of the figure, in words: the device, the data type and whose figure it is."""


def peak_of(device: str | None, dtype: str | None) -> Peak | None:
    """Look up the peak of a device by its name in a trace or log; None if the device or the data type is unknown.

    Logs shorten names (``4090D``). Laptop GPUs are slower chips with the same name, so they have no entry.
    """
    name = device_named(device)
    if name is None or dtype not in HALF_TYPES:
        return None
    return Peak(_DEVICES[name][0], f"{name}, dense {dtype}, vendor's figure")


def bandwidth_of(device: str | None) -> float | None:
    """Look up the vendor's figure for a device's memory bandwidth in GB/s; None if it is unknown."""
    memory, name = _named(device, _MEMORIES), device_named(device)
    return _MEMORIES[memory] if memory else _DEVICES[name][1] if name else None


def device_named(device: str | None) -> str | None:
    """Look up the table's name for a device by its name in a trace or log; None if there is no entry."""
    return _named(device, _DEVICES)


def _named(device: str | None, names: Iterable[str]) -> str | None:
    """Return the first of ``names`` that occurs as whole words in the name of a device; None for laptop GPUs."""
    if device is None or "laptop" in device.lower():
        return None
    plain = f" {' '.join(device.replace('-', ' ').split())} ".lower()
    return next((name for name in names if f" {name.removeprefix('RTX ').lower()} " in plain), None)
