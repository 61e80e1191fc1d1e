"""Count of what a rank sends."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Meter:
    """Counts and bytes of what this rank has sent."""

    phase: str = "forward"
    goes_to: dict[str, int] = field(default_factory=dict)
    """The global rank that the hops of a channel go to."""
    sent: dict[tuple[str, str, str, str], list[int]] = field(default_factory=dict)
    """[count, bytes] by (channel, phase, operation, link)."""

    def add(self, channel: str, operation: str, link: str, size_bytes: int, count: int = 1) -> None:
        """Add ``count`` operations of ``size_bytes`` together, in the current phase."""
        entry = self.sent.setdefault((channel, self.phase, operation, link), [0, 0])
        entry[0] += count
        entry[1] += size_bytes

    def clear(self) -> None:
        """Reset the counts."""
        self.sent.clear()
