"""How much reading a file may take: a file may come from a stranger, and a small one can be made to fill a machine."""

from __future__ import annotations

import msgspec

from ringprof.errors import InputError

MEMORY_BYTES = 1 << 30
EXPANDED_BYTES = 16 << 30


class MemoryLimitError(InputError):
    """Reading would take more memory than it may."""


class Limits(msgspec.Struct, frozen=True):
    """What one process may take to read what it was given."""

    memory_bytes: int = MEMORY_BYTES
    """Memory for all that is read at once, and for analysing it."""
    expanded_bytes: int = EXPANDED_BYTES
    """How far a compressed file may expand."""


class MemoryBudget:
    """Counts what stays in memory of what is read, before it is there.

    Two thirds of the limit may stay; the last third is for what comes and goes while pieces of a file are decoded.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.left = self.limits.memory_bytes * 2 // 3
        """What may still be taken."""

    def take(self, size: int, name: str) -> None:
        """Count so many more bytes, for the file of this name. Raises `MemoryLimitError` where they are too many."""
        self.left -= size
        if self.left < 0:
            raise MemoryLimitError(
                f"{name}: needs more than {size_text(self.limits.memory_bytes)} of memory;"
                " if you trust the file, raise the limit with --max-memory"
            )


def size_text(count: int) -> str:
    """A limit for people."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale and count % scale == 0:
            return f"{count // scale} {unit}"
    return f"{count} bytes"
