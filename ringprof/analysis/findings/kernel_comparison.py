"""Comparison of a run's attention kernel with the other kernels that a calibration knows for its blocks and device."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from ringprof.analysis.findings.claim import Claim
from ringprof.kernel_rates import DeviceRates, block_times, bundled_rates
from ringprof.run import Run

_SIGNIFICANT = 2.0
"""Standard deviations by which a kernel must be faster to be called so."""
_OWN_STRATEGIES = "ringprof.strategies"
_PEERS = "ringprof.strategies.peers"
"""Modules of other projects' strategies, which support some kernels only."""


class KernelComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Calibrated times of a run's attention blocks, by its own kernel and by the fastest one known."""

    calibration: str = ""
    """Name of the calibration."""
    matmul_tflops: float | None = None
    """Rate of a plain matrix product; None if it is not known."""
    matmul_clock_mhz: float | None = None
    fastest: str = ""
    """The fastest kernel known for the blocks, which may be the run's own; empty if the run's own is not known."""
    fastest_ns: float | None = None
    """Calibrated time of the blocks of one iteration with ``fastest``, mean over ranks; None if it is not known."""
    own_ns: float | None = None
    """Calibrated time of the blocks of one iteration with the run's own kernel, mean over ranks."""
    saved_share: float = 0.0
    """Share of the time of the blocks alone that ``fastest`` saves; 0 if the difference is not significant."""
    gains_with_tokens: bool = False
    """Whether ``fastest`` is significantly faster with blocks twice as long."""
    evidence: str = ""
    """Times of both kernels, in words."""
    unknown: str = ""
    """Why no kernel is known to compare with, in words; empty if one is."""

    @property
    def fastest_known(self) -> bool:
        return bool(self.fastest)


NOTHING_KNOWN = KernelComparison()


def compare_kernels(run: Run, devices: Sequence[str], calibration: DeviceRates | None = None) -> KernelComparison:
    """Compare the kernel of a run on GPUs with those that a calibration of its device knows.

    ``calibration``: the user's own; the bundled one counts if there is none, or if it is of another device.
    """
    device = next(iter(devices), "")
    rates = calibration if calibration and calibration.device == device else bundled_rates(device)
    if rates is None:
        reason = f"what another kernel takes is not known: there is no calibration of {device or 'the device'}"
        return KernelComparison(unknown=reason)
    known = KernelComparison(
        calibration=rates.name, matmul_tflops=rates.matrix_product, matmul_clock_mhz=rates.matmul_clock_mhz
    )
    reason = _why_incomparable(run)
    times = {} if reason else _times(run, rates)
    if run.kernel not in times:
        reason = reason or f"calibration {rates.name} does not cover these blocks by {run.kernel or 'this kernel'}"
        return msgspec.structs.replace(known, unknown=f"what another kernel takes is not known: {reason}")
    assert run.kernel is not None
    own_ns, own_spread = times[run.kernel]
    fastest = min(times, key=lambda name: times[name][0])
    ns, spread = times[fastest]
    saved_share = 1 - ns / own_ns
    if saved_share <= _SIGNIFICANT * math.hypot(spread, own_spread):
        fastest, saved_share = run.kernel, 0.0
    # Twice as many tokens per rank: four times the pairs of each block.
    longer_ns, longer_spread = _times(run, rates, 4).get(fastest, (math.inf, 0.0))
    gain = 1 - longer_ns / 4 / times[fastest][0]
    rank_count = run.topology.world_size
    fastest_ns, own_ns = times[fastest][0] / rank_count, own_ns / rank_count
    evidence = (
        f"by calibration {rates.name} no kernel is known to be faster than {run.kernel} for these blocks"
        if fastest == run.kernel else
        Claim("{} takes {saved:%} less time than {} for these blocks ({fastest_ms:3} ms against {own_ms:3} ms per GPU "
              "by calibration {})", fastest, saved_share, run.kernel, fastest_ns / 1e6, own_ns / 1e6, rates.name)
    )  # fmt: skip
    return msgspec.structs.replace(
        known, fastest=fastest, fastest_ns=fastest_ns, own_ns=own_ns, saved_share=saved_share, evidence=evidence,
        gains_with_tokens=gain > _SIGNIFICANT * longer_spread,
    )  # fmt: skip


def _why_incomparable(run: Run) -> str:
    """Return why rates of kernels do not tell what another kernel would take in this run; empty if they do."""
    strategy = run.strategy
    if strategy is None or run.kernel is None or run.captured:
        return "the run does not name its strategy and kernel"
    if not strategy.target.startswith(_OWN_STRATEGIES) or strategy.target.startswith(_PEERS):
        return "the strategy is not ringprof's own and may support other kernels only"
    if strategy.params.get("deterministic"):
        return "no kernel is calibrated in its deterministic mode"
    return ""


def _times(run: Run, rates: DeviceRates, factor: int = 1) -> dict[str, tuple[float, float]]:
    """Return the time of each kernel for the blocks of all ranks in nanoseconds, and its relative spread.

    ``factor``: multiplies the FLOPs of every block.
    """
    assert run.workload is not None
    totals: dict[str, list[tuple[float, float]]] = defaultdict(list)
    works = run.work or []
    for work in works:
        for kernel, times in block_times(
            rates, run.workload, work.block_calls, factor * (work.block_flops or 0)
        ).items():
            totals[kernel].append((times.ns, times.spread))
    # A kernel that lacks the blocks of a rank cannot compute the run.
    return {
        kernel: (sum(ns for ns, _ in ranks), max(spread for _, spread in ranks))
        for kernel, ranks in totals.items() if len(ranks) == len(works)
    }  # fmt: skip
