"""Waterfall from the device's peak to the achieved speed: named parts that sum to the slowest rank's wall time.

What is said of each part is in `ringprof.analysis.findings.parts`.

Each rank's time up to the slowest rank's wall time is split into these parts, and every part is the mean over ranks:

- Attention kernels: the needed work at peak, the loss of the kernel alone against the peak, repeated work, and the
  slow-down beside communication. Where the device is calibrated, the loss of the kernel is split: up to what a plain
  matrix product reaches, from there to the fastest kernel known for the blocks, and from there to the run's own kernel.
  Only the last has a remedy; the first is no loss of the program.
- Exposed communication. An exposed instant counts as wire before wait before memory before idle. A rank's waiting is
  its exposed waiting and the time from its last activity until the slowest rank is done. Imbalance is the part of the
  waiting up to the difference between the longest computation of any rank and the rank's own. Peer wait is the rest.
  The reference is the rank that computes longest, not the one with the longest wall time: where all ranks end at one
  transfer, the latter may be any rank.
- Linear recurrences, matrix products, the optimizer, other computation, and merges and copies (with exposed memory).
  An instant in which several of them run counts for the first of them.
- Idle time: before the launch of the next activity and in gaps below 5 us (host-bound), or after the launch (blocked).

Parts that the evidence cannot separate are shown as one part with a name of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.kernel_comparison import NOTHING_KNOWN, KernelComparison, compare_kernels
from ringprof.analysis.findings.summary import Summary
from ringprof.analysis.kinds.kinds import COMPUTE_PARTS
from ringprof.analysis.rank import Rank
from ringprof.analysis.steps.steps import StepFinder
from ringprof.analysis.workload_checks import workload_fits
from ringprof.kernel_rates import DeviceRates
from ringprof.workload.devices import Peak, peak_of

COMMUNICATION_PARTS = ("imbalance", "exposed_wire", "peer_wait", "exposed_unsplit")
"""Parts in which ranks wait or send: one loss with several causes."""
IDLE_PARTS = ("launch_gaps", "blocked")
"""Parts in which the device idles."""
ATTENTION_PARTS = (
    "attention", "peak", "vendor_peak", "kernel_limit", "slower_kernel", "kernel", "repeated", "slowdown",
)  # fmt: skip
"""Parts in which attention kernels run."""
NEEDED_WORK = tuple(part for part in COMPUTE_PARTS if part != "merge_and_copies")
"""Parts of computation outside attention that no recommendation would shorten: work, and no loss."""
LIMITS = ("peak", "vendor_peak", "kernel_limit", "kernel", "attention")
"""Parts that no change of the program is known to remove: needed work, and distances of attention to a faster rate."""
WORTH_NAMING = 0.02
"""Smallest share of the time that is called a loss."""


class WaterfallPart(msgspec.Struct, frozen=True):
    """One part of the slowest rank's wall time."""

    part: str
    """Name of a row of `ringprof.analysis.findings.parts.PARTS`."""
    time_ns: int
    """Mean over ranks, rounded so that all parts sum to the wall time. A slow-down can be negative."""
    share: float
    """``time_ns`` as a share of the wall time."""
    tflops: float | None
    """TFLOP/s per device if the run consisted of this part and those before it; None where the work is not known."""
    evidence: str
    """Metrics that the part is computed from, in words."""
    remedy: str
    """Recommendation that would shorten the part; empty where none is known, and for a part that takes no time."""


class Bounds(msgspec.Struct, frozen=True):
    """Wall time of the slowest rank under idealised conditions, in nanoseconds."""

    free_ns: int
    """Wall time if communication took no time: the longest time that a rank computes, copies and idles."""
    balanced_ns: int
    """Wall time if all ranks computed equally long: without the imbalance, where that is known."""
    hidden_ns: int
    """Wall time if communication were hidden behind balanced computation.

    This is the longer of the mean time that ranks compute, copy and idle, and the longest time that a rank's wire is
    busy.
    """


class AttentionWork(msgspec.Struct, frozen=True):
    """Attention work of the window over all ranks, and the rates that it is compared with."""

    peak: Peak | None
    """Peak of the device; None where it is not known, or is no bound of the measured rate."""
    needed: int
    """FLOPs that the workload needs, from its exact mask area."""
    done: int | None
    """FLOPs of the computed blocks; None where the run did not count them."""
    solo_tflops: float | None
    """TFLOP/s of the same blocks without communication; None where they were not measured."""
    kernels: KernelComparison
    """Comparison of the kernel with others that a calibration of the device knows."""


NO_WORK = AttentionWork(None, 0, None, None, NOTHING_KNOWN)
"""Attention work of a run or of traces that do not tell it."""


class Waterfall(msgspec.Struct, frozen=True):
    """Waterfall of a run: parts that sum to ``wall_ns``."""

    times_ns: dict[str, int]
    """Time of each part that the evidence can separate, mean over ranks; the values sum to ``wall_ns``."""
    wall_ns: int
    """Wall time of the slowest rank."""
    slowest_rank: int
    bounds: Bounds
    work: AttentionWork
    flops: float | None
    """FLOPs that the workload needs per device; None where they are not known, or are not all of the step's."""
    parts: tuple[WaterfallPart, ...] = ()
    """Parts in words, in the order of `ringprof.analysis.findings.parts.PARTS`."""

    def __post_init__(self) -> None:
        assert sum(self.times_ns.values()) == self.wall_ns

    @property
    def tflops(self) -> float | None:
        """Needed work per device over the wall time, in TFLOP/s; None where the work is not known."""
        return self.flops / self.wall_ns / 1e3 if self.flops and self.wall_ns else None

    def of(self, *names: str) -> int:
        """Return the total nanoseconds of some parts."""
        return sum(self.times_ns.get(name, 0) for name in names)

    def attention_loss(self) -> str:
        """Return the longest loss in the attention kernels: a part that is not needed work or the peak's own limit."""
        return max((part for part in ATTENTION_PARTS if part not in ("peak", "vendor_peak")), key=self.of)

    def gain_ns(self, part: str) -> int:
        """Return by how much the slowest rank's wall time could shrink at most without a part, within the bounds."""
        bound_of_part = {"imbalance": self.bounds.balanced_ns}
        bound_of_part |= dict.fromkeys(("exposed_wire", "peer_wait", "exposed_unsplit"), self.bounds.free_ns)
        return max(0, min(self.of(part), self.wall_ns - bound_of_part.get(part, 0)))

    def largest_loss(self) -> str:
        """Return the longest loss outside the attention kernels, or ``slower_kernel`` if that is longer.

        `largest_outside` says which part outside the attention kernels counts; `NEEDED_WORK` is no loss.
        """
        outside = self.largest_outside(NEEDED_WORK)
        together = self.of(*COMMUNICATION_PARTS) if outside in COMMUNICATION_PARTS else self.of(outside)
        slower_kernel_ns = self.of("slower_kernel")
        return "slower_kernel" if slower_kernel_ns > max(together, WORTH_NAMING * self.wall_ns) else outside

    def largest_outside(self, excluded: Collection[str] = ()) -> str:
        """Return the longest part outside the attention kernels that is not ``excluded``.

        The parts of communication count together, and the longest of them is returned if they exceed every other part.
        If each of them is too small to be named and another part is not, the other part is returned.
        """
        others = (*COMPUTE_PARTS, *IDLE_PARTS, "other_groups")
        largest_other = max((part for part in others if part not in excluded), key=self.of)
        largest_communication = max(COMMUNICATION_PARTS, key=self.of)
        min_ns = WORTH_NAMING * self.wall_ns
        communication_first = self.of(*COMMUNICATION_PARTS) >= self.of(largest_other)
        return (
            largest_communication
            if communication_first and (self.of(largest_communication) >= min_ns or self.of(largest_other) < min_ns)
            else largest_other
        )


def find_waterfall(
    attribution: Attribution, summary: Summary, calibration: DeviceRates | None = None
) -> Waterfall:  # fmt: skip
    """Split the slowest rank's wall time; ``calibration``: the user's own of the device, None: the bundled one."""
    ranks = attribution.ranks
    slowest = next(rank for rank in ranks if rank.rank == summary.slowest_rank)
    longest_compute_ns = max(rank.breakdown.compute_ns for rank in ranks)
    by_rank = [_rank_parts(rank, slowest.breakdown.wall_ns, longest_compute_ns) for rank in ranks]
    totals = {name: sum(parts[name] for parts in by_rank) for name in by_rank[0]}
    work = _attention_work(attribution, summary, calibration)
    # However far attention is split, all other parts are the same.
    times_ns = _means(totals, len(ranks), sum(totals.values()) // len(ranks))
    times_ns |= _means(_attention_parts(totals["attention"], work), len(ranks), times_ns.pop("attention"))
    wall_ns = slowest.breakdown.wall_ns
    busy_ns = [rank.breakdown.wall_ns - rank.breakdown.exposed_comm_ns for rank in ranks]
    mean_ns = -(-sum(busy_ns) // len(busy_ns))
    run = attribution.run
    # For whole layers only the FLOPs of the attention are counted, which give no rate of the step.
    has_layers = run is not None and run.workload is not None and run.workload.layer is not None
    flops = work.needed / len(ranks) if work != NO_WORK and not has_layers else None
    return Waterfall(
        times_ns=times_ns,
        wall_ns=wall_ns,
        slowest_rank=slowest.rank,
        bounds=Bounds(
            free_ns=max(busy_ns),
            balanced_ns=wall_ns - times_ns["imbalance"],
            hidden_ns=max(mean_ns, *(rank.exposed.on_wire_ns for rank in ranks)),
        ),
        work=work,
        flops=flops,
    )


def _means(totals: Mapping[str, int], count: int, whole: int) -> dict[str, int]:
    """Divide totals by ``count`` into whole numbers that sum to ``whole``, which is the mean of all, rounded.

    Those with the largest remainders are rounded up.
    """
    means = {name: total // count for name, total in totals.items()}
    missing = whole - sum(means.values())
    for name in sorted(totals, key=lambda name: -(totals[name] % count))[:missing]:
        means[name] += 1
    return means


def _rank_parts(rank: Rank, wall_ns: int, longest_compute_ns: int) -> dict[str, int]:
    """Split one rank's time up to ``wall_ns`` by part; ``longest_compute_ns``: longest computation of any rank.

    All attention kernels are in ``attention``; the values sum to ``wall_ns``.
    """
    breakdown = rank.breakdown
    wire_ns, waiting_ns = rank.exposed.wire_ns, rank.exposed.wait_ns
    unsplit_ns = breakdown.exposed_comm_ns - wire_ns - waiting_ns
    # A rank that ends early waits for the slowest, if only at the next collective.
    early_ns = wall_ns - breakdown.wall_ns
    if unsplit_ns:
        unsplit_ns += early_ns
    else:
        waiting_ns += early_ns
    imbalance_ns = min(waiting_ns, longest_compute_ns - breakdown.compute_ns)
    blocked_ns = rank.idle.blocked_ns if rank.idle else 0
    return {
        # On CPU an attention operator can contain a wait, which is not computation.
        "attention": breakdown.compute_ns - sum(breakdown.beside_ns.values()),
        "imbalance": imbalance_ns,
        "exposed_wire": wire_ns,
        "peer_wait": waiting_ns - imbalance_ns,
        "exposed_unsplit": unsplit_ns,
        "other_groups": breakdown.exposed_other_groups_ns,
        **{name: breakdown.beside_ns[name] for name in COMPUTE_PARTS},
        "merge_and_copies": breakdown.beside_ns["merge_and_copies"] + breakdown.exposed_memory_ns,
        "background": breakdown.background_ns,
        "launch_gaps": breakdown.idle_ns - blocked_ns,
        "blocked": blocked_ns,
    }


# --- the attention kernels' time ----------------------------------------------------------------------


def _attention_work(
    attribution: Attribution, summary: Summary, calibration: DeviceRates | None
) -> AttentionWork:  # fmt: skip
    """Return the attention FLOPs and rates over all ranks; `NO_WORK` where the work of every rank is not known."""
    run, ranks = attribution.run, attribution.ranks
    if (
        run is None
        or run.workload is None
        or attribution.recurrent
        or run.topology.world_size != len(ranks)
        or attribution.on_cpu
    ):
        return NO_WORK
    iterations = {len(rank.iteration_ns) for rank in ranks}
    if len(iterations) != 1 or attribution.partial_window or not workload_fits(run):
        return NO_WORK
    peak = peak_of(next(iter(summary.devices), None), run.workload.dtype)
    iteration_count = iterations.pop()
    flops = run.block_flops()
    done_flops = None if flops is None else iteration_count * sum(flops.values())
    needed_flops = iteration_count * (run.needed_flops() or 0)
    attention_ns = sum(rank.breakdown.flash_ns for rank in ranks)
    # Attention faster than the peak cannot be that of the stated workload, so there is no peak to compare with.
    if peak is None or needed_flops / peak.tflops / 1e3 > attention_ns or len(set(summary.devices)) > 1:
        peak = None
    kernels = compare_kernels(run, summary.devices, calibration) if peak else NOTHING_KNOWN
    return AttentionWork(peak, needed_flops, done_flops, summary.rates.solo_tflops, kernels)


def _attention_parts(spent_ns: int, work: AttentionWork) -> dict[str, int]:
    """Split the attention kernels' time over all ranks as far as the evidence allows."""
    if work.peak is None:
        return {"attention": spent_ns}
    totals = {"peak": round(work.needed / work.peak.tflops / 1e3)}
    rate_tflops = work.solo_tflops or (work.done / spent_ns / 1e3 if work.done and spent_ns else None)
    if work.done is not None and rate_tflops:
        totals["repeated"] = round((work.done - work.needed) / rate_tflops / 1e3)
    if work.done is not None and work.solo_tflops:
        totals["slowdown"] = spent_ns - round(work.done / work.solo_tflops / 1e3)
    kernel_ns = spent_ns - sum(totals.values())
    split = {}
    if work.kernels.fastest_known:
        # The saved share is of the needed blocks alone.
        saved_ns = round((totals["peak"] + kernel_ns) * work.kernels.saved_share)
        split["slower_kernel"] = min(saved_ns, max(kernel_ns, 0))
    if work.kernels.matmul_tflops is None:
        return {**totals, **split, "kernel": kernel_ns - sum(split.values())}
    # A matrix product is slower than the peak; a kernel that is faster still has no distance to it.
    at_matmul_ns = work.needed / min(work.kernels.matmul_tflops, work.peak.tflops) / 1e3
    left_ns = max(kernel_ns - sum(split.values()), 0)
    split["vendor_peak"] = min(max(round(at_matmul_ns) - totals["peak"], 0), left_ns)
    return {**totals, **split, "kernel_limit": kernel_ns - sum(split.values())}


class Facts(msgspec.Struct, frozen=True):
    """Attribution, summary and times of a run: the source of the sentences on its waterfall and the parts."""

    attribution: Attribution
    summary: Summary
    waterfall: Waterfall
    finder: StepFinder

    def share_of_time(self, time_ns: float) -> float:
        """Return a time as a share of the mean wall time; verdicts and the table of parts call it "of the time"."""
        wall = self.summary.parts[-1].mean_ns
        return time_ns / wall if wall else 0.0
