"""Peak matrix rates of devices, from their vendors' data sheets: dense, with 16-bit inputs, in TFLOP/s."""

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


class Peak(msgspec.Struct, frozen=True):
    """The most that a device can compute."""

    tflops: float
    source: str
    """In words: whose figure it is, of what."""


def peak_of(device: str | None, dtype: str | None) -> Peak | None:
    """The peak of a device by its name in a trace or log; None where the table does not know it, or not this data type.

    Logs shorten names (``4090D``); what is made for laptops is another, slower chip of the same name.
    """
    if device is None or dtype not in HALF_TYPES or "laptop" in device.lower():
        return None
    plain = f" {' '.join(device.replace('-', ' ').split())} ".lower()
    for name, tflops in _PEAKS:
        if f" {name.removeprefix('RTX ').lower()} " in plain:
            return Peak(tflops, f"{name}, dense {dtype}, vendor's figure")
    return None
