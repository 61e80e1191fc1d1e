"""Waterfall from the device's peak to the achieved speed: named parts that sum to the slowest rank's wall time.

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
from statistics import fmean

import msgspec

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.kernel_comparison import NOTHING_KNOWN, KernelComparison, compare_kernels
from ringprof.analysis.findings.recommendations import recommendations_of
from ringprof.analysis.findings.summary import Summary
from ringprof.analysis.kinds.kinds import COMPUTE_PARTS, MEMORY
from ringprof.analysis.rank import Rank
from ringprof.common.formatting import milliseconds, three_digits
from ringprof.kernel_rates import DeviceRates
from ringprof.workload.devices import Peak, peak_of
from ringprof.workload_checks import workload_fits

WATERFALL_LABELS: dict[str, str] = {
    "peak": "needed work at peak",
    "vendor_peak": "matrix product below peak",
    "kernel_limit": "attention below a matrix product",
    "slower_kernel": "kernel slower than the fastest known",
    "kernel": "attention kernel below peak",
    "repeated": "repeated work",
    "slowdown": "slow-down beside communication",
    "attention": "attention kernels",
    "imbalance": "imbalance between ranks",
    "exposed_wire": "exposed wire",
    "peer_wait": "peer wait",
    "exposed_unsplit": "exposed wire, wait and imbalance",
    "other_groups": "other groups' communication",
    "recurrence": "linear recurrences",
    "matrix_products": "matrix products",
    "optimizer": "optimizer",
    "other_compute": "other computation",
    "merge_and_copies": "merges and copies",
    "background": "background only",
    "launch_gaps": "host-bound idle",
    "blocked": "blocked idle",
}
"""Labels of all parts that a waterfall may have, in order.

``vendor_peak`` and ``kernel_limit`` replace ``kernel`` where the rate of a matrix product on the device is known;
``slower_kernel`` is absent where no other kernel is known for the blocks. ``kernel``, or else
``kernel_limit``, contains ``slowdown`` where there is no solo rate. ``attention`` replaces all of these where the
needed work or the peak is not known. ``exposed_unsplit`` is exposed communication whose wait and wire are not known.
``other_groups`` is exposed communication of process groups other than the chosen one. ``background`` is time of
activities outside the window, where the window is a part of the run.
"""

COMMUNICATION_PARTS = ("imbalance", "exposed_wire", "peer_wait", "exposed_unsplit")
"""Parts in which ranks wait or send: one loss with several causes."""
IDLE_PARTS = ("launch_gaps", "blocked")
"""Parts in which the device idles."""
ATTENTION_PARTS = (
    "attention", "peak", "vendor_peak", "kernel_limit", "slower_kernel", "kernel", "repeated", "slowdown",
)  # fmt: skip
"""Parts in which attention kernels run."""
LIMITS = ("peak", "vendor_peak", "kernel_limit", "kernel", "attention")
"""Parts that no change of the program is known to remove: needed work, and distances of attention to a faster rate."""
WORTH_NAMING = 0.02
"""Smallest share of the time that is called a loss."""


class WaterfallPart(msgspec.Struct, frozen=True):
    """One part of the slowest rank's wall time."""

    part: str
    """One of `WATERFALL_LABELS`."""
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


class Waterfall(msgspec.Struct, frozen=True):
    """Waterfall of a run: parts that sum to ``wall_ns``."""

    parts: tuple[WaterfallPart, ...]
    """Parts in the order of `WATERFALL_LABELS`."""
    wall_ns: int
    """Wall time of the slowest rank."""
    slowest_rank: int
    bounds: Bounds
    peak: Peak | None
    """Peak of the device; None where it is not known, or is no bound of the measured rate."""
    tflops: float | None
    """Needed work per device over the wall time, in TFLOP/s; None where the work is not known."""
    kernels: KernelComparison = NOTHING_KNOWN
    """Comparison of the attention kernel with others that a calibration of the device knows."""

    def __post_init__(self) -> None:
        assert sum(part.time_ns for part in self.parts) == self.wall_ns

    def of(self, *names: str) -> int:
        """Return the total nanoseconds of some parts."""
        return sum(part.time_ns for part in self.parts if part.part in names)

    def attention_loss(self) -> str:
        """Return the longest loss in the attention kernels: a part that is not needed work or the peak's own limit."""
        return max((part for part in ATTENTION_PARTS if part not in ("peak", "vendor_peak")), key=self.of)

    def gain_ns(self, part: str) -> int:
        """Return by how much the slowest rank's wall time could shrink at most without a part, within the bounds."""
        bound_of_part = {"imbalance": self.bounds.balanced_ns}
        bound_of_part |= dict.fromkeys(("exposed_wire", "peer_wait", "exposed_unsplit"), self.bounds.free_ns)
        return max(0, min(self.of(part), self.wall_ns - bound_of_part.get(part, 0)))

    def needed_work(self) -> list[str]:
        """List the parts of computation outside attention that no recommendation would shorten: work, and no loss."""
        return [part.part for part in self.parts if part.part in COMPUTE_PARTS and not part.remedy]

    def largest_loss(self) -> str:
        """Return the longest loss outside the attention kernels, or ``slower_kernel`` if that is longer.

        `largest_outside` says which part outside the attention kernels counts; parts of `needed_work` are no losses.
        """
        outside = self.largest_outside(self.needed_work())
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


class _AttentionWork(msgspec.Struct, frozen=True):
    """Attention work of the window over all ranks, and the rates that it is compared with."""

    peak: Peak | None
    needed: int
    """FLOPs that the workload needs, from its exact mask area."""
    done: int | None
    """FLOPs of the computed blocks; None where the run did not count them."""
    solo_tflops: float | None
    """TFLOP/s of the same blocks without communication; None where they were not measured."""
    kernels: KernelComparison
    """Comparison of the kernel with others that a calibration of the device knows."""


def find_waterfall(
    attribution: Attribution, summary: Summary, calibration: DeviceRates | None = None
) -> Waterfall:  # fmt: skip
    """Compute the waterfall of a run; ``calibration``: the user's own of the device, None: the bundled one."""
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
    flops = work.needed / len(ranks) if work and not has_layers else None
    return Waterfall(
        parts=_waterfall_parts(attribution, summary, work, times_ns, wall_ns, flops),
        wall_ns=wall_ns,
        slowest_rank=slowest.rank,
        bounds=Bounds(
            free_ns=max(busy_ns),
            balanced_ns=wall_ns - times_ns["imbalance"],
            hidden_ns=max(mean_ns, *(rank.exposed.on_wire_ns for rank in ranks)),
        ),
        peak=work.peak if work else None,
        tflops=flops / wall_ns / 1e3 if flops and wall_ns else None,
        kernels=work.kernels if work else NOTHING_KNOWN,
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

    Keys are those of `WATERFALL_LABELS`, with all attention kernels in ``attention``; the values sum to ``wall_ns``.
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
) -> _AttentionWork | None:  # fmt: skip
    """Return the attention FLOPs and rates over all ranks; None where the work of every rank is not known."""
    run, ranks = attribution.run, attribution.ranks
    if (
        run is None
        or run.workload is None
        or attribution.recurrent
        or run.topology.world_size != len(ranks)
        or attribution.on_cpu
    ):
        return None
    iterations = {len(rank.iteration_ns) for rank in ranks}
    if len(iterations) != 1 or attribution.partial_window or not workload_fits(run):
        return None
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
    return _AttentionWork(peak, needed_flops, done_flops, summary.rates.solo_tflops, kernels)


def _attention_parts(spent_ns: int, work: _AttentionWork | None) -> dict[str, int]:
    """Split the attention kernels' time over all ranks as far as the evidence allows."""
    if work is None or work.peak is None:
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


def _waterfall_parts(
    attribution: Attribution,
    summary: Summary,
    work: _AttentionWork | None,
    times_ns: dict[str, int],
    wall_ns: int,
    flops: float | None,
) -> tuple[WaterfallPart, ...]:
    """Build the parts in order; ``flops``: needed FLOPs per device, None where they give no rate."""
    evidence = _part_evidence(attribution, summary, work)
    recommendations = recommendations_of(attribution, summary, work.kernels if work else NOTHING_KNOWN)
    # These are shown even if they take no time, since that is worth knowing.
    always_shown = {"merge_and_copies", "launch_gaps", *(() if attribution.recurrent else ATTENTION_PARTS)}
    if len(attribution.ranks) > 1 and any(row.timed for rank in attribution.ranks for row in rank.link_totals):
        always_shown |= {"imbalance", "exposed_wire", "peer_wait"}
    rows, total_ns = [], 0
    for name in WATERFALL_LABELS:
        if name not in times_ns or (not times_ns[name] and name not in always_shown):
            continue
        total_ns += times_ns[name]
        rows.append(
            WaterfallPart(
                part=name,
                time_ns=times_ns[name],
                share=times_ns[name] / wall_ns if wall_ns else 0.0,
                tflops=flops / total_ns / 1e3 if flops and total_ns > 0 else None,
                evidence=evidence[name],
                remedy=recommendations.get(name, "") if times_ns[name] > 0 else "",
            )
        )
    return tuple(rows)


# --- evidence: the metrics that a part is computed from, in one line each -----------------------------


def _part_evidence(attribution: Attribution, summary: Summary, work: _AttentionWork | None) -> dict[str, str]:
    """Return the line of evidence for every part, by its name."""
    ranks, on_cpu = attribution.ranks, attribution.on_cpu
    if on_cpu:
        attention = f"attention operators, mean {milliseconds(fmean(rank.breakdown.flash_ns for rank in ranks))}"
        unsplit = "blocked in wait: on CPU wire, peer wait and imbalance are not told apart"
    else:
        reason = "the traces do not tell the work" if work is None else "no peak is known that fits"
        if attribution.run is not None and not workload_fits(attribution.run):
            reason = "the stated workload does not fit the counted FLOPs"
        attention = f"union of the attention kernels; {reason}: not compared with a peak"
        unsplit = "its kernels have no wait and wire (see warnings): exposed wire, peer wait and imbalance in one"
    least = min(ranks, key=lambda rank: rank.breakdown.compute_ns)
    most = max(ranks, key=lambda rank: rank.breakdown.compute_ns)
    computing = [f"rank {rank.rank} computes {milliseconds(rank.breakdown.compute_ns)}" for rank in (least, most)]
    rates = [
        f"{row.kind} {three_digits(row.wire_gbps)} GB/s" for row in summary.communication if row.wire_gbps is not None
    ]
    beside = "" if attribution.recurrent else "not beside attention; "
    host_bound = "nothing ran on the device before the next activity was launched, and in gaps below 5 us"
    return {
        "attention": attention,
        **_work_evidence(attribution, work),
        "imbalance": ", ".join(computing)
        if least is not most
        else computing[0].replace(f"rank {least.rank}", "each rank"),
        "exposed_wire": f"on the wire with no computation beside it; {', '.join(rates[:3]) or 'rates not known'}",
        "peer_wait": "waiting beyond what the ranks' computation differs by",
        "exposed_unsplit": unsplit,
        "other_groups": "communication of groups that were not asked for, with nothing beside it",
        **{part: f"{beside}{_compute_evidence(summary, kinds)}" for part, kinds in COMPUTE_PARTS.items()},
        "merge_and_copies": beside + _compute_evidence(summary, (*COMPUTE_PARTS["merge_and_copies"], *MEMORY)),
        "background": "other work of the device runs, launched outside the window",
        "launch_gaps": host_bound if not on_cpu else "neither computing nor blocked",
        "blocked": "nothing ran on the device, although the next activity had been launched, or no launch is recorded",
    }


def _work_evidence(attribution: Attribution, work: _AttentionWork | None) -> dict[str, str]:
    """Return the evidence for the parts that compare attention with the peak; empty where no peak is known."""
    if work is None or work.peak is None:
        return {}
    rank_count = len(attribution.ranks)
    attention_ns = sum(rank.breakdown.flash_ns for rank in attribution.ranks)
    done_flops = work.done or work.needed
    rate_tflops = done_flops / attention_ns / 1e3 if attention_ns else 0.0
    peak = work.peak
    words = _kernel_evidence(work.kernels) | {
        "peak": f"{work.needed / rank_count / 1e12:,.1f} TFLOP per device at {peak.tflops:g} TFLOP/s ({peak.source})",
        "repeated": f"blocks of {done_flops / work.needed:.4f} times the work that the mask needs",
    }
    if work.solo_tflops:
        share = work.solo_tflops / peak.tflops
        kernel_words = f"the same blocks alone: {work.solo_tflops:,.1f} TFLOP/s, {share:.0%} of peak"
        words["slowdown"] = f"{rate_tflops:,.1f} TFLOP/s in the run against {work.solo_tflops:,.1f} alone"
    else:
        other_cause = "" if work.done is not None else " repeated work and"
        kernel_words = (
            f"{rate_tflops:,.1f} TFLOP/s in the run; no solo rate:{other_cause} slow-down beside communication is in it"
        )
    unknown = f"; {work.kernels.unknown}" if work.kernels.unknown else ""
    return {**words, "kernel": kernel_words + unknown, "kernel_limit": kernel_words + unknown}


def _kernel_evidence(kernels: KernelComparison) -> dict[str, str]:
    """Return the evidence for the parts that follow from calibrated rates."""
    if kernels.matmul_tflops is None:
        return {"slower_kernel": kernels.evidence}
    clock = "" if kernels.matmul_clock_mhz is None else f" at {kernels.matmul_clock_mhz:,.0f} MHz"
    product = f"a plain matrix product reaches {kernels.matmul_tflops:,.0f} TFLOP/s{clock}"
    no_loss = "a distance that no change of the program removes"
    return {
        "vendor_peak": f"{product} by calibration {kernels.calibration}: {no_loss}",
        "slower_kernel": kernels.evidence,
    }


def _compute_evidence(summary: Summary, kinds: tuple[str, ...]) -> str:
    """Give the mean time of each kind that a part consists of."""
    times = [f"{row.kind} {milliseconds(row.time_ns)}" for row in summary.kinds if row.kind in kinds]
    return f"mean of all: {', '.join(times) or 'none'}"
