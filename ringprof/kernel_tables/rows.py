"""What a printed kernel table says, as values: the only thing the analysis sees of one.

Times are integer nanoseconds, exact to the digits printed (``14.531s`` is 14 531 000 000); shares are 0..1.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringprof.trace.columns import Notice

CUT_MARKS = ("...", "…")
"""What printers put where they cut a name off: torch, and ``nsys stats``."""
MOST_ROWS = 100_000
"""Of all tables of one log; readers stop behind so many."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """One printed row: a kernel, an operator, a CPU call or an annotation; the table does not say which."""

    name: str
    """As printed (untrusted text), without the padding; ends in one of `CUT_MARKS` where `cut`."""
    line: int
    """Line of the file, from 1."""
    calls: int | None
    self_cpu_ns: int | None = None
    cpu_total_ns: int | None = None
    self_device_ns: int | None = None
    device_share: float | None = None
    """Share of the device's whole time, as printed with two decimals of a percent; None where it is not a number."""
    unit: str = ""
    """Unit that the device time is printed in: ``us``, ``ms``, ``s``, ``ns``."""
    step_ns: int = 0
    """Worth of the last digit of the device time: the time is known to within half of it."""

    @property
    def cut(self) -> bool:
        """Whether the printer cut the name off."""
        return self.name.endswith(CUT_MARKS)

    @property
    def stem(self) -> str:
        """The name without the mark of a cut."""
        return self.name.removesuffix("...").removesuffix("…")

    @property
    def on_cpu(self) -> bool:
        """Whether the row has CPU time: a kernel has none."""
        return bool(self.self_cpu_ns or self.cpu_total_ns)


@dataclass(frozen=True)
class StatedShare:
    """A share of the time that the log's author printed about the table."""

    subject: str
    """``flash`` or ``send_recv``."""
    label: str
    """As printed."""
    printed: str
    """The number as printed, without its sign."""
    percent: bool
    """Whether a % sign follows."""
    line: int
    parts: tuple[float, ...] | None = None
    """The fractions that its author's own list names for the subject, where the log has that list."""


@dataclass(frozen=True)
class TableContext:
    """What the text around a table says about the run that it describes."""

    shares: tuple[StatedShare, ...] = ()
    iteration_ns: int | None = None
    """Time of one forward and backward pass, measured outside the profiler."""
    world_size: int | None = None
    iterations: int | None = None
    """Profiled iterations, where the text says how many."""


@dataclass(frozen=True)
class KernelTable:
    """One table of a file."""

    path: str
    line: int
    """Line of its header."""
    source: str
    """``torch``, ``nsys`` or ``nvprof``."""
    device: str | None
    """As its columns name it (``CUDA``, ``XPU`` ...); None where it has CPU columns only."""
    columns: tuple[str, ...]
    rows: tuple[TableRow, ...]
    self_cpu_total_ns: int | None = None
    """The footer's CPU total."""
    self_device_total_ns: int | None = None
    """The footer's device total."""
    total_step_ns: int = 0
    """Worth of the last digit of the footer's device total."""
    context: TableContext = TableContext()
    warnings: tuple[Notice, ...] = ()
