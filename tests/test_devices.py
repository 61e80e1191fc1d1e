"""The table of peak rates against the vendors' data sheets."""

from __future__ import annotations

import pytest

from ringprof.workload.devices import peak_of


@pytest.mark.parametrize(
    ("device", "tflops"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H200 NVL", 835.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("A800", 312.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 D", 147.0),
        ("4090D", 147.0),
        ("RTX 4090", 165.2),
        ("L40S", 362.0),
        ("L4", 121.0),
        ("L20", 119.5),
        ("Tesla V100-SXM2-32GB", 125.0),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_peaks_by_name(device: str, tflops: float) -> None:
    peak = peak_of(device, "bf16")
    assert peak is not None and peak.tflops == tflops
    assert "dense bf16" in peak.source


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),
        ("H2000", "bf16"),
        ("AMD EPYC", "bf16"),
        (None, "bf16"),
        ("NVIDIA H200", "fp32"),
        ("NVIDIA H200", None),
    ],
)
def test_unknown_devices_and_dtypes_have_no_peak(device: str | None, dtype: str | None) -> None:
    assert peak_of(device, dtype) is None
