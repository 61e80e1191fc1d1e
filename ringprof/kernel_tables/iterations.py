"""Number of iterations that a kernel table holds, from its launch calls and its kernels.

The CPU rows of a table cover the profiled iterations. Its device rows cover the work that *ran* in the window, which
can include work launched before the window. Then a kernel has more calls than its launch, and every device time is too
large for the profiled iterations.
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
"""Ratio of device calls to launches above which earlier work ran in the window; the window's edges explain less."""

_MAX_RATIO = 2.0
"""Ratio of device calls to launches above which launches start several kernels (CUDA graphs): counts prove nothing."""

_MAX_GUESSES = 10_000
"""Most numbers of attention calls per iteration that are tried."""

_COPIES = {"copy": ("cudaMemcpyAsync",), "set": ("cudaMemsetAsync",)}
_LAUNCHES = {
    "communication": ("cuLaunchKernelEx", "cudaLaunchKernelExC"),
    "compiled": ("cuLaunchKernel",),
    "kernel": ("cudaLaunchKernel",),
    **_COPIES,
}
IterationSource = Literal["given", "log", "profiler_steps", "inferred"]
"""Source of a number of iterations; ``inferred`` is the greatest common divisor of the launch counts."""
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class LaunchCount:
    """Number of launch calls of one group, with the number of device activities that they started."""

    group: str
    """Key of `_LAUNCHES`, or ``all`` for all kernels together."""
    launch: str
    """Names of the launch calls, joined by ``and``."""
    launched: int
    """Number of launch calls."""
    ran: int
    """Number of kernels, copies or memsets that ran."""

    @property
    def ratio(self) -> float:
        """Device calls per launch."""
        return self.ran / self.launched


@dataclass(frozen=True)
class FlashCount:
    """Number of calls of an attention pass, in total and per iteration."""

    kind: str
    calls: int
    per_iteration: int

    @property
    def iterations(self) -> float:
        """Number of iterations in which the calls were made."""
        return self.calls / self.per_iteration


@dataclass(frozen=True)
class Iterations:
    """Number of iterations in the CPU rows and in the device rows, with the counts that show it."""

    cpu: int
    """Number of iterations in the CPU rows."""
    source: IterationSource
    counts: tuple[LaunchCount, ...]
    flash: tuple[FlashCount, ...]
    leak: bool
    """Whether the device rows hold more work than the CPU rows launched."""

    @property
    def device_range(self) -> tuple[float, float]:
        """Smallest and largest number of iterations that the device rows may hold."""
        if not self.leak:
            return float(self.cpu), float(self.cpu)
        values = [self.cpu * count.ratio for count in self.counts] + [count.iterations for count in self.flash]
        return min(values), max(values)

    @cached_property
    def _by_key(self) -> dict[str, float]:
        """Number of iterations by kind of attention and, where earlier work ran in the window, by launch group."""
        by_group = {count.group: self.cpu * count.ratio for count in self.counts} if self.leak else {}
        return by_group | {count.kind: count.iterations for count in self.flash}

    def covered_by(self, row: CountedRow) -> float:
        """Return the number of iterations that a row's time covers.

        Where the row's calls per iteration are known, the number follows from its calls. Elsewhere it is the number of
        iterations in the CPU rows, times the ratio of device calls to launches where earlier work ran in the window.
        """
        keys = (row.kind, launch_group(row), "all", "kernel")
        return next((self._by_key[key] for key in keys if key in self._by_key), self.cpu)


def launch_group(row: CountedRow) -> str:
    """Return the group of `_LAUNCHES` that launches a device activity, by its kind and name."""
    if row.kind in ("memcpy", "copy_engine"):
        return "copy"
    if row.kind == "memset":
        return "set"
    if row.kind in COMMUNICATION:
        return "communication"
    return "compiled" if _IDENTIFIER.fullmatch(row.row.name) else "kernel"


def count_iterations(table: KernelTable, counted: CountedRows, user_count: int | None) -> Iterations | None:
    """Count the iterations in the CPU rows and in the device rows.

    ``user_count`` is the number that the user stated, if any. None where neither the log nor its launches show one.
    """
    counts = _launch_counts(table, counted.rows) if counted.basis == "kernels" else ()
    steps = sum(row.calls or 0 for row in table.rows if row.name.startswith("ProfilerStep") and row.cpu_total_ns)
    divisor = math.gcd(*(count.launched for count in counts)) if len(counts) > 1 else 0
    candidates: tuple[tuple[int | None, IterationSource], ...] = (
        (user_count, "given"),
        (table.context.iterations, "log"),
        (steps, "profiler_steps"),
        (divisor if divisor > 1 else None, "inferred"),
    )
    cpu, source = next(((count, source) for count, source in candidates if count), (0, None))
    if source is None:
        return None
    leak = any(count.ratio > LEAK for count in counts) and all(count.ratio < _MAX_RATIO for count in counts)
    flash = _flash_counts(table, counted.rows, cpu, counts) if leak else ()
    return Iterations(cpu, source, counts, flash, leak)


def _launch_counts(table: KernelTable, rows: Iterable[CountedRow]) -> tuple[LaunchCount, ...]:
    """Count launches and device activities per group; all kernels form one group where groups do not match."""
    if any(row.name.startswith(("cudaGraphLaunch", "hipGraphLaunch")) for row in table.rows):
        return ()
    cpu = {row.name: row.calls or 0 for row in table.rows if row.self_cpu_ns is not None}
    ran: Counter[str] = Counter()
    for row in rows:
        ran[launch_group(row)] += row.calls
    counts = {group: _launch_count(group, names, cpu, ran[group]) for group, names in _LAUNCHES.items()}
    by_group = {group: count for group, count in counts.items() if count is not None}
    kernel_counts = [count for group, count in by_group.items() if group not in _COPIES]
    kernels = sum(calls for group, calls in ran.items() if group not in _COPIES)
    launches = sorted(name for group, names in _LAUNCHES.items() if group not in _COPIES for name in names)
    together = _launch_count("all", launches, cpu, kernels)
    if together is None:
        return tuple(by_group.values())
    sums = sum(c.ran for c in kernel_counts), sum(c.launched for c in kernel_counts)
    explained = sums == (together.ran, together.launched)
    # Newer libraries launch some of their kernels by another call; then only the sums can be compared.
    if explained and all(abs(count.ratio / together.ratio - 1) < 0.1 for count in kernel_counts):
        return tuple(by_group.values())
    return (together, *(count for group, count in by_group.items() if group in _COPIES))


def _launch_count(group: str, names: Iterable[str], cpu: dict[str, int], ran: int) -> LaunchCount | None:
    """Count one group by the names of its launch calls; None where nothing was launched or nothing ran."""
    present = [name for name in names if name in cpu]
    launched = sum(cpu[name] for name in present)
    return LaunchCount(group, " and ".join(present), launched, ran) if launched and ran else None


def _flash_counts(
    table: KernelTable, rows: Iterable[CountedRow], cpu: int, counts: tuple[LaunchCount, ...]
) -> tuple[FlashCount, ...]:
    """Count the attention calls of both passes; empty unless one number of calls per iteration fits both.

    Ring attention calls the forward and the backward pass equally often.
    """
    calls: dict[str, Counter[str]] = {"flash_fwd": Counter(), "flash_bwd": Counter()}
    for row in rows:
        if row.kind in calls:
            calls[row.kind][re.split(r"[<(]", row.row.name, maxsplit=1)[0]] += row.calls
    forward = calls["flash_fwd"].total()
    # The backward pass has helper kernels; its main kernel comes first in a table sorted by time.
    backward = next(iter(calls["flash_bwd"].values()), 0)
    if not forward or not backward:
        return ()
    low, high = cpu * min(c.ratio for c in counts), cpu * max(c.ratio for c in counts)

    def outside(per_iteration: int) -> float:
        values = (forward / per_iteration, backward / per_iteration)
        return sum(max(low - value, 0.0) + max(value - high, 0.0) for value in values)

    fewest, most = max(1, math.floor(forward / high) - 2), math.ceil(backward / low) + 2
    # With more forward calls than backward calls, rows are missing; with far fewer, the calls are no ring's.
    if not fewest <= most <= fewest + _MAX_GUESSES:
        return ()
    best = min(range(fewest, most + 1), key=lambda n: (outside(n), n != table.context.world_size))
    if outside(best) > 0.05 * cpu:
        return ()
    return FlashCount("flash_fwd", forward, best), FlashCount("flash_bwd", backward, best)
