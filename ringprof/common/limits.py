"""Memory limits for reading untrusted files: a small file can be made to fill a machine's memory."""

from __future__ import annotations

import msgspec

from ringprof.errors import InputError

MEMORY_BYTES = 1 << 30
EXPANDED_BYTES = 16 << 30


class MemoryLimitError(InputError):
    """Reading a file would exceed the memory limit."""


class Limits(msgspec.Struct, frozen=True):
    """Limits of one process that reads files."""

    memory_bytes: int = MEMORY_BYTES
    """Memory for reading and analysing all files that are read at once, in bytes."""
    expanded_bytes: int = EXPANDED_BYTES
    """Maximum size of a compressed file after expansion, in bytes."""


class MemoryBudget:
    """Counter of the bytes that reading keeps in memory, updated before they are allocated.

    Two thirds of the limit may be kept. The last third is for temporary data while parts of a file are decoded.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.left = self.limits.memory_bytes * 2 // 3
        """Bytes that may still be taken."""

    def take(self, size: int, name: str) -> None:
        """Take ``size`` bytes for the file ``name``. Raises `MemoryLimitError` if they exceed the limit."""
        self.left -= size
        if self.left < 0:
            raise MemoryLimitError(
                f"{name}: needs more than {size_text(self.limits.memory_bytes)} of memory;"
                " if you trust the file, raise the limit with --max-memory"
            )


def size_text(count: int) -> str:
    """Format a number of bytes, in the largest binary unit that divides it."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale and count % scale == 0:
            return f"{count // scale} {unit}"
    return f"{count} bytes"
