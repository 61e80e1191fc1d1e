"""Measurements and their metrics: the data that a comparison takes, from any source."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

Recordings = Sequence[Sequence[float]]
"""Repeated values of one metric, by recording."""
MIN_INTERLEAVED = 4
"""Smallest number of interleaved recordings per side to compare in pairs; with fewer, pairs are less certain."""

WATERFALL_PREFIX = "waterfall."
"""Prefix of the names of metrics that are parts of the slowest rank's wall time."""


class Metric(msgspec.Struct, frozen=True):
    """One metric of a measurement: its value and, if it was measured repeatedly, all its values."""

    value: float
    unit: str
    """``ms``, ``TFLOP/s``, ``share`` (0..1), ``MiB``."""
    recordings: Recordings = ()
    """Repeated values whose median is ``value``, by recording; empty where it was measured once."""
    higher_is_better: bool | None = None
    """Whether a higher value is better; None where neither direction is better."""
    depends_on_work: bool = False
    """Whether values are comparable only for the same work, as times and memory are."""


class RankEvidence(msgspec.Struct, frozen=True):
    """Evidence of one rank's work in its trace, over the whole window."""

    rank: int
    calls: Mapping[str, int]
    """Computation calls by label of their kind; all calls in traces without computation."""
    sent_bytes: int | None = None
    """Bytes sent; None where the size of a message is not recorded."""
    from_host_bytes: int | None = None
    """Bytes copied from host memory to the GPU; None where the size of a copy is not recorded."""


class WorkEvidence(msgspec.Struct, frozen=True):
    """Evidence of the work of one measurement in its traces."""

    iterations: int
    """Number of iterations in the window."""
    world_size: int
    """Number of ranks of the run, including those without a trace."""
    ranks: tuple[RankEvidence, ...]
    """Evidence of each rank with a trace, in order of rank."""
    kernels: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Calls of each computation kernel by name, over all ranks; empty on CPU."""
    computes: bool = True
    """Whether the traces show any computation."""


class Measurement(msgspec.Struct, frozen=True):
    """One side of a comparison: a run, a trace, a printed table, a row of a log, or several recordings of one run."""

    label: str
    source: str
    """``run``, ``trace``, ``table`` or ``log``."""
    settings: Mapping[str, str | None]
    """Settings and hardware as text; None for a setting that the source does not state."""
    figures: Mapping[str, Metric] = msgspec.field(default_factory=dict)
    """Metrics by name."""
    warnings: tuple[str, ...] = ()
    """Warnings that limit what the metrics mean."""
    others: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Values by name of further metrics in the report; only conditions use them."""
    created: tuple[str, ...] = ()
    """Creation time of each recording, ISO 8601; empty where it is not known."""
    evidence: WorkEvidence | None = None
    """Evidence of the work in the traces; None for a table or a log."""
    times_are_of: str = "one iteration"
    """Unit that times stand for, in words: also ``one iteration (2 captured)``, ``the captured block``."""

    def values(self) -> dict[str, float]:
        """Return the value of every metric by name, for conditions."""
        return {**self.others, **{name: figure.value for name, figure in self.figures.items()}}


# --- waterfalls that separate different parts -------------------------------------------------------

_COARSE = {
    "attention": ("peak", "vendor_peak", "kernel_limit", "slower_kernel", "kernel", "repeated", "slowdown"),
    "kernel": ("vendor_peak", "kernel_limit", "slower_kernel"),
    "exposed_unsplit": ("imbalance", "exposed_wire", "peer_wait"),
}
"""Coarse parts, each with the finer parts that it contains where a run does not separate them."""
_OF_KERNEL = ("slower_kernel", "repeated", "slowdown")
"""Parts that ``kernel``, or else ``kernel_limit``, contains where a run does not separate them from it."""


def shared_parts(waterfalls: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Sum the parts that not every waterfall separates, so that a part means the same in each result.

    An empty waterfall, of a measurement without one, stays empty.
    """
    merged = merged_parts([set(parts) for parts in waterfalls if parts])
    results = []
    for parts in waterfalls:
        result: dict[str, float] = {}
        for name, value in parts.items():
            result[merged.get(name, name)] = result.get(merged.get(name, name), 0.0) + value
        results.append(result)
    return results


def merged_parts(waterfalls: Sequence[Collection[str]]) -> dict[str, str]:
    """Map each part that not every waterfall separates to the part that contains it in all of them."""
    merged: dict[str, str] = {}
    for coarse, fine in _COARSE.items():
        present = [part for part in fine if any(part in parts for parts in waterfalls)]
        if any(coarse in parts for parts in waterfalls):
            merged = dict.fromkeys(present, coarse) | merged
    split = [parts for parts in waterfalls if "kernel" in parts or "kernel_limit" in parts]
    coarse = "kernel" if any("kernel" in parts for parts in split) else "kernel_limit"
    for part in _OF_KERNEL:
        if part not in merged and any(part in parts for parts in split) and not all(part in parts for parts in split):
            merged[part] = coarse
    return merged
