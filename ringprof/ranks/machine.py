"""Environment of the ranks: hosts, devices, driver, versions, and the variables that change communication."""

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
from ringprof.run import Environment

VARIABLE_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "RINGPROF_")
VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS", "OMP_NUM_THREADS")


def host_name() -> str:
    """Return this host's name."""
    return platform.node() or "localhost"


def device_name(device: torch.device) -> str:
    """Return the name of the GPU or the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    # ``platform`` does not know the processor's model on Linux.
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return model or platform.machine() or "CPU"


def environment_of(device: torch.device, devices: Sequence[str]) -> Environment:
    """Describe the environment of a run from one of its ``device``s; ``devices`` are the names of all of them."""
    return Environment(
        devices=list(devices), driver=driver_version(device), versions=versions(device), variables=variables()
    )


def driver_version(device: torch.device) -> str | None:
    """Return the GPU driver's version as nvidia-smi prints it; None on CPU and if nvidia-smi fails."""
    if device.type != "cuda":
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return output.split("\n")[0].strip() or None


def versions(device: torch.device) -> dict[str, str]:
    """Return the versions of Python, torch and the libraries that compute and communicate, by name."""
    by_name = {"ringprof": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    if device.type == "cuda":
        untyped: Any = torch
        by_name["cuda"] = torch.version.cuda or "unknown"
        by_name["nccl"] = ".".join(str(part) for part in untyped.cuda.nccl.version())
        by_name["cudnn"] = str(untyped.backends.cudnn.version())
        with suppress(metadata.PackageNotFoundError):
            by_name["flash_attn"] = metadata.version("flash-attn")
    return by_name


def variables() -> dict[str, str]:
    """Return the environment variables that change how ranks communicate or compute."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if (name.startswith(VARIABLE_PREFIXES) and name != "RINGPROF_PROGRESS_S") or name in VARIABLES
    }


NODE_SEPARATOR = "#"
"""Separator of a host's name and the launcher's number of it, if several of the launcher's hosts have one name."""


class RankHost(msgspec.Struct, frozen=True):
    """Location of one rank: its host's name, the number that the launcher gave the host, and the process id."""

    name: str
    node: int
    pid: int = 0


def distinct_host_names(ranks: Sequence[RankHost]) -> list[str]:
    """Return the host name of each rank, with the host's number where containers or network namespaces share a name."""
    nodes: dict[str, set[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank.name, set()).add(rank.node)
    return [rank.name if len(nodes[rank.name]) == 1 else f"{rank.name}{NODE_SEPARATOR}{rank.node}" for rank in ranks]


def host_numbers(names: Sequence[str]) -> list[int]:
    """Return each rank's host number from its host name, counted from 0 in the order of first appearance."""
    order = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [order[name] for name in names]
