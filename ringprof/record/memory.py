"""The most memory that a rank held while something ran."""

from __future__ import annotations

from pathlib import Path

import torch

from ringprof.strategies.copies import held_bytes


def reset_peak(device: torch.device) -> None:
    """Start to look for the peak from here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        # Linux: 5 resets the high-water mark of the resident memory.
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def peak_bytes(device: torch.device) -> int | None:
    """On a GPU the allocator's peak and the memory that copied hops arrive in. On the CPU the process's resident peak,
    libraries included; None where unknown.

    Without a reset the resident peak is that of the whole process, which verification may have set: an upper bound.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) + held_bytes()
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def ran_out(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on the device or on the host."""
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)
