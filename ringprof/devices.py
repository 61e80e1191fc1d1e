"""Peak matrix rates of devices, from their vendors' data sheets: dense, with 16-bit inputs, in TFLOP/s."""

from __future__ import annotations

from dataclasses import dataclass

HALF_TYPES = ("bf16", "fp16")
"""The data types that the table speaks of."""

# The first name that the device's contains wins. Sparse figures, which some sheets print alone, are halved.
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
    ("L4", 121.0),
    ("RTX 4090 D", 147.0),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
    ("MI325X", 1307.4),
    ("MI300X", 1307.4),
    ("MI250X", 383.0),
)


@dataclass(frozen=True)
class Peak:
    """The most that a device can compute."""

    tflops: float
    source: str
    """In words: whose figure it is, of what."""


def peak_of(device: str | None, dtype: str | None) -> Peak | None:
    """The peak of a device by its name in the trace; None where the table does not know it, or not this data type."""
    if device is None or dtype not in HALF_TYPES:
        return None
    plain = " ".join(device.split())
    for name, tflops in _PEAKS:
        if f" {name.lower()} " in f" {plain.lower().replace('-', ' ')} ":
            return Peak(tflops, f"{name}, dense {dtype}, vendor's figure")
    return None
