"""Contents of a printed kernel table, as values; the analysis uses nothing else of a table.

Times are integer nanoseconds, exact to the printed digits (``14.531s`` is 14 531 000 000). Shares are 0..1.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringprof.trace.columns import Notice

CUT_MARKS = ("...", "…")
"""Marks at the end of a name that torch or ``nsys stats`` has cut off."""
MOST_ROWS = 100_000
"""Most rows of all tables in one log, after which reading stops."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """One printed row: a kernel, an operator, a CPU call or an annotation, which the table does not distinguish."""

    name: str
    """Printed name (untrusted text), without the padding; ends in one of `CUT_MARKS` where `cut`."""
    line: int
    """Number of the line in the file, from 1."""
    calls: int | None
    self_cpu_ns: int | None = None
    cpu_total_ns: int | None = None
    self_device_ns: int | None = None
    device_share: float | None = None
    """Share of the device's total time, printed with two decimals of a percent; None where it is not a number."""
    unit: str = ""
    """Printed unit of the device time: ``us``, ``ms``, ``s``, ``ns``."""
    step_ns: int = 0
    """Value of one unit in the last printed digit of the device time, which is known to within half of it."""

    @property
    def cut(self) -> bool:
        """Whether the printer cut the name off."""
        return self.name.endswith(CUT_MARKS)

    @property
    def stem(self) -> str:
        """Name without the mark at its end."""
        return self.name.removesuffix("...").removesuffix("…")

    @property
    def on_cpu(self) -> bool:
        """Whether the row has CPU time, which a kernel never has."""
        return bool(self.self_cpu_ns or self.cpu_total_ns)


@dataclass(frozen=True)
class StatedShare:
    """A share of the time that the log's author printed in addition to the table."""

    subject: str
    """``flash`` or ``send_recv``."""
    label: str
    """Printed label of the share."""
    printed: str
    """Printed number, without the % sign."""
    percent: bool
    """Whether a % sign follows."""
    line: int
    parts: tuple[float, ...] | None = None
    """Fractions of the single rows in the author's list for the subject; None where the log has no such list."""


@dataclass(frozen=True)
class KernelTable:
    """One kernel table in a file."""

    path: str
    line: int
    """Number of the header's line, from 1."""
    source: str
    """``torch``, ``nsys`` or ``nvprof``."""
    device: str | None
    """Device in the titles of the columns (``CUDA``, ``XPU`` ...); None for a table with CPU columns only."""
    columns: tuple[str, ...]
    rows: tuple[TableRow, ...]
    self_cpu_total_ns: int | None = None
    """The footer's CPU total."""
    self_device_total_ns: int | None = None
    """The footer's device total."""
    total_step_ns: int = 0
    """Value of one unit in the last digit of the footer's device total."""
    shares: tuple[StatedShare, ...] = ()
    """Shares that the text around the table states, like the three facts below."""
    iteration_ns: int | None = None
    """Time of one forward and backward pass, measured outside the profiler."""
    world_size: int | None = None
    iterations: int | None = None
    """Number of profiled iterations; None where the text does not state it."""
    warnings: tuple[Notice, ...] = ()
