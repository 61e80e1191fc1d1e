"""How many iterations a kernel table holds, from its launch calls and its kernels.

The CPU rows of a table cover the profiled iterations; its device rows cover what *ran* in the window, and work
launched before it can run on into it. Then a kernel has more calls than its launch, and every device time is too
large for the iterations that were asked for.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ringprof.analysis.kinds.kinds import COMMUNICATION
from ringprof.kernel_tables.kernels import CountedRow, CountedRows
from ringprof.kernel_tables.rows import KernelTable

LEAK = 1.01
"""More device calls than launches by this factor is no accident of where a window was cut."""

_MOST_RATIO = 2.0
"""Beyond this the launches are not one a kernel (CUDA graphs), and counts prove nothing."""

_MOST_GUESSES = 10_000
"""Calls an iteration that are tried."""

_COPIES = {"copy": ("cudaMemcpyAsync",), "set": ("cudaMemsetAsync",)}
_LAUNCHES = {
    "communication": ("cuLaunchKernelEx", "cudaLaunchKernelExC"),
    "compiled": ("cuLaunchKernel",),
    "kernel": ("cudaLaunchKernel",),
    **_COPIES,
}
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
    source: Literal["given", "log", "profiler_steps", "inferred"]
    """Of `cpu`; inferred is the greatest common divisor of the launch counts."""
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

    @cached_property
    def _by_flash(self) -> dict[str, float]:
        return {count.kind: count.iterations for count in self.flash}

    @cached_property
    def _by_group(self) -> dict[str, float]:
        return {count.group: self.cpu * count.ratio for count in self.counts}

    def of(self, row: CountedRow) -> float:
        """Iterations that a row's time covers: by its own calls where those of an iteration are known, else those
        launched, times how much more ran."""
        if row.kind in self._by_flash:
            return self._by_flash[row.kind]
        known = self._by_group if self.leak else {}
        return next((known[group] for group in (launch_group(row), "all", "kernel") if group in known), self.cpu)


def launch_group(row: CountedRow) -> str:
    """How a device activity is launched, by its kind and name."""
    if row.kind in ("memcpy", "copy_engine"):
        return "copy"
    if row.kind == "memset":
        return "set"
    if row.kind in COMMUNICATION:
        return "communication"
    return "compiled" if _IDENTIFIER.fullmatch(row.row.name) else "kernel"


def count_iterations(table: KernelTable, counted: CountedRows, given: int | None) -> Iterations | None:
    """Iterations in the CPU and in the device rows; None where neither the log nor its launches tell."""
    counts = _launch_counts(table, counted.rows) if counted.basis == "kernels" else ()
    told = _cpu_iterations(table, given, counts)
    if told is None:
        return None
    leak = any(count.ratio > LEAK for count in counts) and all(count.ratio < _MOST_RATIO for count in counts)
    flash = _flash_counts(table, counted.rows, told[0], counts) if leak else ()
    return Iterations(*told, counts, flash, leak)


def _launch_counts(table: KernelTable, rows: Iterable[CountedRow]) -> tuple[LaunchCount, ...]:
    """One count for each kind of launch; all kernels together where they do not match one by one."""
    if any(row.name.startswith(("cudaGraphLaunch", "hipGraphLaunch")) for row in table.rows):
        return ()
    cpu = {row.name: row.calls or 0 for row in table.rows if row.self_cpu_ns is not None}
    ran: Counter[str] = Counter()
    for row in rows:
        ran[launch_group(row)] += row.calls
    counts = {group: _launch_count(group, names, cpu, ran[group]) for group, names in _LAUNCHES.items()}
    found = {group: count for group, count in counts.items() if count is not None}
    own = [count for group, count in found.items() if group not in _COPIES]
    kernels = sum(calls for group, calls in ran.items() if group not in _COPIES)
    launches = sorted(name for group, names in _LAUNCHES.items() if group not in _COPIES for name in names)
    together = _launch_count("all", launches, cpu, kernels)
    if together is None:
        return tuple(found.values())
    explained = sum(c.ran for c in own) == together.ran and sum(c.launched for c in own) == together.launched
    # Newer libraries launch some of their kernels by another call: then only the sums can be compared.
    if explained and all(abs(count.ratio / together.ratio - 1) < 0.1 for count in own):
        return tuple(found.values())
    return (together, *(count for group, count in found.items() if group in _COPIES))


def _launch_count(group: str, names: Iterable[str], cpu: dict[str, int], ran: int) -> LaunchCount | None:
    """None where nothing was launched so, or nothing ran."""
    there = [name for name in names if name in cpu]
    launched = sum(cpu[name] for name in there)
    return LaunchCount(group, " and ".join(there), launched, ran) if launched and ran else None


def _cpu_iterations(
    table: KernelTable, given: int | None, counts: tuple[LaunchCount, ...]
) -> tuple[int, Literal["given", "log", "profiler_steps", "inferred"]] | None:
    if given:
        return given, "given"
    if table.context.iterations:
        return table.context.iterations, "log"
    steps = sum(row.calls or 0 for row in table.rows if row.name.startswith("ProfilerStep") and row.cpu_total_ns)
    if steps:
        return steps, "profiler_steps"
    divisor = math.gcd(*(count.launched for count in counts)) if len(counts) > 1 else 0
    return (divisor, "inferred") if divisor > 1 else None


def _flash_counts(
    table: KernelTable, rows: Iterable[CountedRow], cpu: int, counts: tuple[LaunchCount, ...]
) -> tuple[FlashCount, ...]:
    """Attention calls of both passes, where one number of calls an iteration fits both: a ring calls them equally."""
    calls: dict[str, Counter[str]] = {"flash_fwd": Counter(), "flash_bwd": Counter()}
    for row in rows:
        if row.kind in calls:
            calls[row.kind][re.split(r"[<(]", row.row.name, maxsplit=1)[0]] += row.calls
    forward = calls["flash_fwd"].total()
    # Backward has helper kernels; its main one comes first in a table sorted by time.
    backward = next(iter(calls["flash_bwd"].values()), 0)
    if not forward or not backward:
        return ()
    low, high = cpu * min(c.ratio for c in counts), cpu * max(c.ratio for c in counts)

    def outside(per_iteration: int) -> float:
        values = (forward / per_iteration, backward / per_iteration)
        return sum(max(low - value, 0.0) + max(value - high, 0.0) for value in values)

    least, most = max(1, math.floor(forward / high) - 2), math.ceil(backward / low) + 2
    # With more forward calls than backward ones rows are missing; with many times fewer no ring made them.
    if not least <= most <= least + _MOST_GUESSES:
        return ()
    best = min(range(least, most + 1), key=lambda n: (outside(n), n != table.context.world_size))
    if outside(best) > 0.05 * cpu:
        return ()
    return FlashCount("flash_fwd", forward, best), FlashCount("flash_bwd", backward, best)
