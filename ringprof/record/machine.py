"""What the ranks run on: hosts, devices, driver, versions, and the variables that change communication."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import torch

from ringprof._version import __version__

VARIABLE_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "RINGPROF_")
VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS", "OMP_NUM_THREADS")


def host_name() -> str:
    """This host's name, as other hosts' ranks would print it."""
    return platform.node() or "localhost"


def device_name(device: torch.device) -> str:
    """The GPU's or processor's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _processor() or platform.machine() or "CPU"


def driver_version(device: torch.device) -> str | None:
    """The GPU driver's version, as nvidia-smi says it; None on CPU and where it cannot be asked."""
    if device.type != "cuda":
        return None
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.split("\n")[0].strip() or None


def versions(device: torch.device) -> dict[str, str]:
    """Versions of what computes and communicates."""
    found = {"ringprof": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    if device.type == "cuda":
        untyped: Any = torch
        found["cuda"] = torch.version.cuda or "unknown"
        found["nccl"] = ".".join(str(part) for part in untyped.cuda.nccl.version())
        found["cudnn"] = str(untyped.backends.cudnn.version())
        with suppress(metadata.PackageNotFoundError):
            found["flash_attn"] = metadata.version("flash-attn")
    return found


def variables() -> dict[str, str]:
    """The environment's variables that change how ranks communicate or compute."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(VARIABLE_PREFIXES) or name in VARIABLES
    }


def _processor() -> str | None:
    """The processor's model: ``platform`` does not know it on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


NODE = "#"
"""Between a host's name and the launcher's number, where several of the launcher's hosts have one name."""


class RankHost(msgspec.Struct, frozen=True):
    """Where one rank is: its host's name, and the number that the launcher gave the host; and its process."""

    name: str
    node: int
    pid: int = 0


def distinct_host_names(ranks: Sequence[RankHost]) -> list[str]:
    """The host of each rank. Containers and network namespaces may have one name: their number tells them apart."""
    nodes: dict[str, set[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank.name, set()).add(rank.node)
    return [rank.name if len(nodes[rank.name]) == 1 else f"{rank.name}{NODE}{rank.node}" for rank in ranks]


def host_numbers(names: Sequence[str]) -> list[int]:
    """Hosts counted from 0, in the order of their first ranks."""
    order = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [order[name] for name in names]
