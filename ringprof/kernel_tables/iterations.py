"""How many iterations a kernel table holds, from its launch calls and its kernels.

The CPU rows of a table cover the profiled iterations; its device rows cover what *ran* in the window, and work
launched before it can run on into it. Then a kernel has more calls than its launch, and every device time is too
large for the iterations that were asked for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ringprof.analysis.kinds.kinds import COMMUNICATION
from ringprof.kernel_tables.kernels import Chosen, kind_of_row
from ringprof.kernel_tables.rows import KernelTable, TableRow

LEAK = 1.01
"""More device calls than launches by this factor is no accident of where a window was cut."""

_MOST_RATIO = 2.0
"""Beyond this the launches are not one a kernel (CUDA graphs), and counts prove nothing."""

_LAUNCHES = {
    "communication": ("cuLaunchKernelEx", "cudaLaunchKernelExC"),
    "compiled": ("cuLaunchKernel",),
    "kernel": ("cudaLaunchKernel",),
    "copy": ("cudaMemcpyAsync",),
    "set": ("cudaMemsetAsync",),
}
_COUNTED = frozenset(name for names in _LAUNCHES.values() for name in names)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class LaunchCount:
    """Calls of one kind of launch beside the device work that it started."""

    group: str
    launch: str
    launched: int
    ran: int

    @property
    def ratio(self) -> float:
        """Device calls for each launch."""
        return self.ran / self.launched


@dataclass(frozen=True)
class FlashCount:
    """Calls of an attention pass, and how many of them make one iteration."""

    kind: str
    calls: int
    per_iteration: int

    @property
    def iterations(self) -> float:
        """Iterations that these calls make."""
        return self.calls / self.per_iteration


@dataclass(frozen=True)
class Iterations:
    """What the counts say."""

    cpu: int
    """Iterations in the CPU rows."""
    source: str
    """Of `cpu`: ``given``, ``log``, ``profiler_steps`` or ``inferred`` (greatest common divisor of launch counts)."""
    counts: tuple[LaunchCount, ...]
    flash: tuple[FlashCount, ...]
    leak: bool
    """The device rows hold more than the CPU rows launched."""

    @property
    def device_range(self) -> tuple[float, float]:
        """Least and most iterations that the device rows hold."""
        if not self.leak:
            return float(self.cpu), float(self.cpu)
        values = [self.cpu * count.ratio for count in self.counts] + [count.iterations for count in self.flash]
        return min(values), max(values)

    def of(self, row: TableRow) -> float:
        """Iterations that a row's time covers: by its own calls where those of an iteration are known, else those
        launched, times how much more ran."""
        for count in self.flash:
            if count.kind == kind_of_row(row.name):
                return count.iterations
        ratios = {count.group: count.ratio for count in self.counts}
        ratio = ratios.get(group_of(row), ratios.get("all", ratios.get("kernel", 1.0)))
        return self.cpu * (ratio if self.leak else 1.0)


def group_of(row: TableRow) -> str:
    """How a device activity is launched, by the name of it."""
    kind = kind_of_row(row.name)
    if kind in ("memcpy", "copy_engine"):
        return "copy"
    if kind == "memset":
        return "set"
    if kind in COMMUNICATION:
        return "communication"
    return "compiled" if _IDENTIFIER.fullmatch(row.name) else "kernel"


def count_iterations(table: KernelTable, chosen: Chosen, given: int | None) -> Iterations | None:
    """Iterations in the CPU and in the device rows; None where neither the log nor its launches tell."""
    if chosen.basis != "kernels":
        cpu, source = _cpu_iterations(table, given, ())
        return Iterations(cpu, source, (), (), False) if cpu else None
    counts = _launch_counts(table, chosen.rows)
    cpu, source = _cpu_iterations(table, given, counts)
    if not cpu:
        return None
    leak = any(count.ratio > LEAK for count in counts) and all(count.ratio < _MOST_RATIO for count in counts)
    flash = _flash_counts(table, chosen.rows, cpu, counts) if leak else ()
    return Iterations(cpu, source, counts, flash, leak)


def _calls(rows: Iterable[TableRow]) -> int:
    return sum(row.calls or 0 for row in rows)


def _launch_counts(table: KernelTable, rows: tuple[TableRow, ...]) -> tuple[LaunchCount, ...]:
    """One count for each kind of launch; all kernels together where they do not match one by one."""
    cpu = {row.name: row.calls or 0 for row in table.rows if row.name in _COUNTED and row.self_cpu_ns is not None}
    if any(row.name.startswith(("cudaGraphLaunch", "hipGraphLaunch")) for row in table.rows):
        return ()
    counts = []
    for group, names in _LAUNCHES.items():
        ran, launched = _calls(r for r in rows if group_of(r) == group), sum(cpu.get(name, 0) for name in names)
        if ran and launched:
            counts.append(LaunchCount(group, " and ".join(n for n in names if n in cpu), launched, ran))
    kernels = [row for row in rows if group_of(row) not in ("copy", "set")]
    launches = [name for name in cpu if name not in (*_LAUNCHES["copy"], *_LAUNCHES["set"])]
    launched = sum(cpu[name] for name in launches)
    if not kernels or not launched:
        return tuple(counts)
    together = LaunchCount("all", " and ".join(sorted(launches)), launched, _calls(kernels))
    own = [count for count in counts if count.group not in ("copy", "set")]
    explained = sum(count.ran for count in own) == together.ran and sum(c.launched for c in own) == launched
    # Newer libraries launch some of their kernels by another call: then only the sums can be compared.
    if explained and all(abs(count.ratio / together.ratio - 1) < 0.1 for count in own):
        return tuple(counts)
    return (together, *(count for count in counts if count.group in ("copy", "set")))


def _cpu_iterations(table: KernelTable, given: int | None, counts: tuple[LaunchCount, ...]) -> tuple[int | None, str]:
    if given:
        return given, "given"
    if table.context.iterations:
        return table.context.iterations, "log"
    steps = [row for row in table.rows if row.name.startswith("ProfilerStep") and row.calls and row.cpu_total_ns]
    if steps:
        return _calls(steps), "profiler_steps"
    divisor = math.gcd(*(count.launched for count in counts)) if len(counts) > 1 else 0
    return (divisor, "inferred") if divisor > 1 else (None, "")


def _flash_counts(
    table: KernelTable, rows: tuple[TableRow, ...], cpu: int, counts: tuple[LaunchCount, ...]
) -> tuple[FlashCount, ...]:
    """Attention calls of both passes, where one number of calls an iteration fits both: a ring calls them equally."""
    forward = _calls(row for row in rows if kind_of_row(row.name) == "flash_fwd")
    by_kernel: dict[str, int] = {}
    for row in rows:
        if kind_of_row(row.name) == "flash_bwd":
            base = re.split(r"[<(]", row.name, maxsplit=1)[0]
            by_kernel[base] = by_kernel.get(base, 0) + (row.calls or 0)
    # Backward has helper kernels; its main one comes first in a table sorted by time.
    backward = next(iter(by_kernel.values()), 0)
    if not forward or not backward:
        return ()
    low, high = cpu * min(c.ratio for c in counts), cpu * max(c.ratio for c in counts)

    def outside(per_iteration: int) -> float:
        values = (forward / per_iteration, backward / per_iteration)
        return sum(max(low - value, 0.0) + max(value - high, 0.0) for value in values)

    guesses = range(max(1, math.floor(forward / high) - 2), math.ceil(backward / low) + 3)
    if not guesses:
        # More forward calls than backward ones: rows are missing.
        return ()
    best = min(guesses, key=lambda n: (outside(n), n != table.context.world_size))
    if outside(best) > 0.05 * cpu:
        return ()
    return FlashCount("flash_fwd", forward, best), FlashCount("flash_bwd", backward, best)
