"""Peak rates of devices, from their vendors' data sheets: matrix products (dense, 16-bit inputs) and memory."""

from __future__ import annotations

import msgspec

HALF_TYPES = ("bf16", "fp16")
"""The data types that the table speaks of."""

# The first name that the device's contains wins. Sparse figures, which some sheets print alone, are halved.
# Documents: NVIDIA's data sheet of each GPU (HGX B200, GB200 NVL72, H200, H100, A100, L40S, L4 ...), its whitepapers of
# Ada and Ampere for GeForce (fp32 accumulation), AMD's data sheets of Instinct (MI300X: 1307.4). H20, L20 and the 800s,
# which are A100 and H100 but for links and fp64, as NVIDIA told the vendors of their servers.
_PEAKS: tuple[tuple[str, float], ...] = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("GH200", 989.0),
    ("H100 NVL", 835.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("H800 PCIe", 756.0),
    ("H800", 989.0),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A40", 149.7),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("A30", 165.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L20", 119.5),
    ("L4", 121.0),
    ("V100", 125.0),  # fp16; it has no bf16
    ("RTX 4090 D", 147.0),
    ("RTX 4090D", 147.0),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
    ("MI325X", 1307.4),
    ("MI300X", 1307.4),
    ("MI250X", 383.0),
)

_BANDWIDTHS: tuple[tuple[str, float], ...] = (
    ("GB200", 8000.0),
    ("B200", 8000.0),
    ("H200", 4800.0),
    ("H100 NVL", 3900.0),
    ("H100 PCIe", 2000.0),
    ("H100", 3350.0),
    ("H800 PCIe", 2000.0),
    ("H800", 3350.0),
    ("H20", 4000.0),
    ("A100 SXM4 80GB", 2039.0),
    ("A100 80GB PCIe", 1935.0),
    ("A100", 1555.0),
    ("A800 SXM4 80GB", 2039.0),
    ("A800 80GB PCIe", 1935.0),
    ("A40", 696.0),
    ("A10G", 600.0),
    ("A10", 600.0),
    ("A30", 933.0),
    ("L40S", 864.0),
    ("L40", 864.0),
    ("L20", 864.0),
    ("L4", 300.0),
    ("RTX 4090", 1008.0),
    ("RTX 3090", 936.0),
    ("MI325X", 6000.0),
    ("MI300X", 5300.0),
    ("MI250X", 3276.8),
)
"""Memory, in GB/s. GH200 and V100 come with several memories under one name."""


class Peak(msgspec.Struct, frozen=True):
    """The most that a device can compute."""

    tflops: float
    source: str
    """In words: whose figure it is, of what."""


def peak_of(device: str | None, dtype: str | None) -> Peak | None:
    """The peak of a device by its name in a trace or log; None where the table does not know it, or not this data type.

    Logs shorten names (``4090D``); what is made for laptops is another, slower chip of the same name.
    """
    name, tflops = _found(device, _PEAKS)
    if name is None or dtype not in HALF_TYPES:
        return None
    return Peak(tflops, f"{name}, dense {dtype}, vendor's figure")


def bandwidth_of(device: str | None) -> float | None:
    """GB/s of a device's memory by its vendor's figure; None where the table does not know it."""
    name, gbps = _found(device, _BANDWIDTHS)
    return None if name is None else gbps


def _found(device: str | None, table: tuple[tuple[str, float], ...]) -> tuple[str | None, float]:
    """The first row that a device's name contains."""
    if device is None or "laptop" in device.lower():
        return None, 0.0
    plain = f" {' '.join(device.replace('-', ' ').split())} ".lower()
    return next((row for row in table if f" {row[0].removeprefix('RTX ').lower()} " in plain), (None, 0.0))
