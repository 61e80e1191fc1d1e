"""From the device's peak to the speed achieved: the slowest rank's wall, every part of it named, nothing left over.

Each rank's time up to the slowest rank's wall is one of these parts, and every part is the mean over ranks:

- attention kernels, and of them what the needed work takes at peak, what the kernel alone loses against it, repeated
  work, and the slow-down beside communication;
- exposed communication: an exposed instant is wire before wait before memory before idle. Of what a rank waits (its
  exposed waiting, and the time after its last activity until the slowest rank is done), imbalance is what its own
  computation falls short of that of the rank which computes longest, peer wait the rest (not of the rank whose wall is
  longest: where all end at one transfer, that may be any);
- matrix products, the optimizer, other computation, and merges and copies (with exposed memory): an instant in which
  several of them run is the first's;
- idle time: before the launch of the next activity and in gaps below 5 us (host-bound), or after it (blocked).

Parts that the evidence cannot tell apart are one part, named so.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.recommendations import recommendations_of
from ringprof.analysis.findings.summary import Summary
from ringprof.analysis.findings.waterfall_text import AttentionWork, evidence_of
from ringprof.analysis.kinds.kinds import COMPUTE_PARTS
from ringprof.analysis.rank import Rank
from ringprof.devices import Peak, peak_of
from ringprof.workload_checks import workload_fits

WATERFALL_LABELS: dict[str, str] = {
    "peak": "needed work at peak",
    "kernel": "attention kernel below peak",
    "repeated": "repeated work",
    "slowdown": "slow-down beside communication",
    "attention": "attention kernels",
    "imbalance": "imbalance between ranks",
    "exposed_wire": "exposed wire",
    "peer_wait": "peer wait",
    "exposed_unsplit": "exposed wire, wait and imbalance",
    "other_groups": "other groups' communication",
    "matrix_products": "matrix products",
    "optimizer": "optimizer",
    "other_compute": "other computation",
    "merge_and_copies": "merges and copies",
    "background": "background only",
    "launch_gaps": "host-bound idle",
    "blocked": "blocked idle",
}
"""Every part that a waterfall may have, in order, and what it is called. ``kernel`` holds ``slowdown`` where there is
no solo rate; ``attention`` stands for the first four where the needed work or the peak is not known;
``exposed_unsplit`` is exposed communication without wait and wire, ``other_groups`` that of process groups that were
not asked for, ``background`` what else ran where the window is a part of it."""

COMMUNICATION_PARTS = ("imbalance", "exposed_wire", "peer_wait", "exposed_unsplit")
"""What ranks wait and what they send: one loss with several causes."""
IDLE_PARTS = ("launch_gaps", "blocked")
ATTENTION_PARTS = ("attention", "peak", "kernel", "repeated", "slowdown")
WORTH_NAMING = 0.02
"""The least share of the time that is called a loss."""


class WaterfallPart(msgspec.Struct, frozen=True):
    """One part of the slowest rank's wall."""

    part: str
    """One of `WATERFALL_LABELS`."""
    time_ns: int
    """Mean over ranks, rounded so that all parts sum to the wall. A slow-down can be negative."""
    share: float
    """Of the wall."""
    tflops: float | None
    """What the speed would be if this part and those before it were all there is; None where the work is not known."""
    evidence: str
    """The figures that it comes from, in words."""
    remedy: str
    """What would shorten it; empty where that is not known, and of a part that takes no time."""


class Bounds(msgspec.Struct, frozen=True):
    """How long the window would take the slowest rank, in nanoseconds."""

    free_ns: int
    """If communication took no time: the longest that a rank computes, copies and idles."""
    balanced_ns: int
    """If all ranks computed equally long: the wall less imbalance. The wall itself where that is not known."""
    hidden_ns: int
    """If communication hid behind balanced computation: the mean of what ranks compute, copy and idle, or the longest
    that a rank's wire is busy, whichever is longer."""


class Waterfall(msgspec.Struct, frozen=True):
    """All parts, which sum to ``wall_ns``."""

    parts: tuple[WaterfallPart, ...]
    wall_ns: int
    """Of the slowest rank."""
    slowest_rank: int
    bounds: Bounds
    peak: Peak | None
    tflops: float | None
    """Needed work over the wall, per device."""

    def __post_init__(self) -> None:
        assert sum(part.time_ns for part in self.parts) == self.wall_ns

    def of(self, *names: str) -> int:
        """Time of some parts together."""
        return sum(part.time_ns for part in self.parts if part.part in names)

    def gain_ns(self, part: str) -> int:
        """The most that the slowest rank's wall could shrink without a part, never beyond the printed bounds."""
        bounds = {"imbalance": self.bounds.balanced_ns}
        bounds |= dict.fromkeys(("exposed_wire", "peer_wait", "exposed_unsplit"), self.bounds.free_ns)
        return max(0, min(self.of(part), self.wall_ns - bounds.get(part, 0)))

    def largest_loss(self) -> str:
        """Find the part outside the attention kernels that takes longest; communication goes before as a whole.

        Not where each part of the communication is too small to be named and another part is not.
        """
        others = max((*COMPUTE_PARTS, *IDLE_PARTS, "other_groups"), key=self.of)
        named = max(COMMUNICATION_PARTS, key=self.of)
        least = WORTH_NAMING * self.wall_ns
        before = self.of(*COMMUNICATION_PARTS) >= self.of(others)
        return named if before and (self.of(named) >= least or self.of(others) < least) else others


class _RankParts(msgspec.Struct, frozen=True):
    """One rank's time up to the slowest rank's wall; all but the last three fields sum to that wall."""

    attention_ns: int
    imbalance_ns: int
    wire_ns: int
    peer_wait_ns: int
    unsplit_ns: int
    other_groups_ns: int
    beside_ns: dict[str, int]
    """Computation other than attention, and exposed memory, by part."""
    background_ns: int
    host_bound_ns: int
    """Idle before the launch of the next activity, and in gaps; on CPU all idle time."""
    blocked_ns: int
    compute_ns: int
    busy_ns: int
    """Wall less exposed communication."""
    on_wire_ns: int


def find_waterfall(attribution: Attribution, summary: Summary) -> Waterfall:
    """The waterfall of a run."""
    ranks = attribution.ranks
    slowest = next(rank for rank in ranks if rank.rank == summary.slowest_rank)
    most_compute = max(rank.breakdown.compute_ns for rank in ranks)
    parts = [_of_rank(rank, slowest.breakdown.wall_ns, most_compute) for rank in ranks]
    work = _work(attribution, summary)
    totals = _attention(sum(part.attention_ns for part in parts), work)
    totals |= {
        "imbalance": sum(part.imbalance_ns for part in parts),
        "exposed_wire": sum(part.wire_ns for part in parts),
        "peer_wait": sum(part.peer_wait_ns for part in parts),
        "exposed_unsplit": sum(part.unsplit_ns for part in parts),
        "other_groups": sum(part.other_groups_ns for part in parts),
        **{name: sum(part.beside_ns[name] for part in parts) for name in COMPUTE_PARTS},
        "background": sum(part.background_ns for part in parts),
        "launch_gaps": sum(part.host_bound_ns for part in parts),
        "blocked": sum(part.blocked_ns for part in parts),
    }
    means = _means(totals, len(ranks))
    wall = slowest.breakdown.wall_ns
    words = evidence_of(attribution, summary, work), recommendations_of(attribution, summary)
    # Of whole layers the attention alone has a count here: no rate follows from it.
    flops = work.needed / len(ranks) if work and not _in_layers(attribution) else None
    return Waterfall(
        parts=_rows(means, wall, flops, words, _always(attribution)),
        wall_ns=wall,
        slowest_rank=slowest.rank,
        bounds=_bounds(parts, wall, means["imbalance"]),
        peak=work.peak if work else None,
        tflops=flops / wall / 1e3 if flops and wall else None,
    )


def _of_rank(rank: Rank, wall_ns: int, most_compute_ns: int) -> _RankParts:
    b = rank.breakdown
    wire, waiting = rank.exposed.wire_ns, rank.exposed.wait_ns
    unsplit = b.exposed_comm_ns - wire - waiting
    # Who is done early waits for the slowest, if only at the next collective.
    early = wall_ns - b.wall_ns
    if unsplit:
        unsplit += early
    else:
        waiting += early
    imbalance = min(waiting, most_compute_ns - b.compute_ns)
    copies = b.beside_ns["merge_and_copies"] + b.exposed_memory_ns
    blocked = rank.idle.blocked_ns if rank.idle else 0
    return _RankParts(
        # On CPU an attention operator can contain a wait, which is not computation.
        attention_ns=b.compute_ns - sum(b.beside_ns.values()),
        imbalance_ns=imbalance,
        wire_ns=wire,
        peer_wait_ns=waiting - imbalance,
        unsplit_ns=unsplit,
        other_groups_ns=b.exposed_other_groups_ns,
        beside_ns={**b.beside_ns, "merge_and_copies": copies},
        background_ns=b.background_ns,
        host_bound_ns=b.idle_ns - blocked,
        blocked_ns=blocked,
        compute_ns=b.compute_ns,
        busy_ns=b.wall_ns - b.exposed_comm_ns,
        on_wire_ns=rank.exposed.on_wire_ns,
    )


def _bounds(parts: Sequence[_RankParts], wall_ns: int, imbalance_ns: int) -> Bounds:
    mean = -(-sum(part.busy_ns for part in parts) // len(parts))
    return Bounds(
        free_ns=max(part.busy_ns for part in parts),
        balanced_ns=wall_ns - imbalance_ns,
        hidden_ns=max(mean, *(part.on_wire_ns for part in parts)),
    )


# --- the attention kernels' time ----------------------------------------------------------------------


def _work(attribution: Attribution, summary: Summary) -> AttentionWork | None:
    """FLOPs and rates over all ranks; None where the run does not tell the work, or not of every rank."""
    run, ranks = attribution.run, attribution.ranks
    if run is None or run.workload is None or run.topology.world_size != len(ranks) or attribution.on_cpu:
        return None
    iterations = {len(rank.iteration_ns) for rank in ranks}
    if len(iterations) != 1 or attribution.partial_window or not workload_fits(run):
        return None
    peak = peak_of(next(iter(summary.devices), None), run.workload.dtype)
    count = iterations.pop()
    flops = run.block_flops()
    done = None if flops is None else count * sum(flops.values())
    needed = count * (run.needed_flops() or 0)
    spent = sum(rank.breakdown.flash_ns for rank in ranks)
    # Attention faster than the peak is not the attention of this workload.
    if peak is None or needed / peak.tflops / 1e3 > spent or len(set(summary.devices)) > 1:
        peak = None
    return AttentionWork(peak, needed, done, summary.rates.solo_tflops)


def _in_layers(attribution: Attribution) -> bool:
    """Whether the attention was recorded in whole layers."""
    run = attribution.run
    return run is not None and run.workload is not None and run.workload.layer is not None


def _attention(spent_ns: int, work: AttentionWork | None) -> dict[str, int]:
    """The attention kernels' time over all ranks, told apart as far as the evidence goes."""
    if work is None or work.peak is None:
        return {"attention": spent_ns}
    totals = {"peak": round(work.needed / work.peak.tflops / 1e3)}
    rate = work.solo_tflops or (work.done / spent_ns / 1e3 if work.done and spent_ns else None)
    if work.done is not None and rate:
        totals["repeated"] = round((work.done - work.needed) / rate / 1e3)
    if work.done is not None and work.solo_tflops:
        totals["slowdown"] = spent_ns - round(work.done / work.solo_tflops / 1e3)
    totals["kernel"] = spent_ns - sum(totals.values())
    return totals


# --- means that sum -----------------------------------------------------------------------------------


def _means(totals: dict[str, int], count: int) -> dict[str, int]:
    """Each total over ``count``, as whole nanoseconds that sum to the mean of all: those cut most are rounded up."""
    floors = {name: time // count for name, time in totals.items()}
    missing = sum(totals.values()) // count - sum(floors.values())
    for name in sorted(totals, key=lambda name: -(totals[name] % count))[:missing]:
        floors[name] += 1
    return floors


def _always(attribution: Attribution) -> set[str]:
    """Parts that are shown though they be nothing: that they are is worth knowing."""
    several = len(attribution.ranks) > 1
    timed = any(row.timed for rank in attribution.ranks for row in rank.link_totals)
    shown = {"merge_and_copies", "launch_gaps", "kernel", "repeated", "slowdown", "peak", "attention"}
    return shown | ({"imbalance", "exposed_wire", "peer_wait"} if several and timed else set())


def _rows(
    means: dict[str, int], wall_ns: int, flops: float | None, words: tuple[dict[str, str], ...], always: set[str]
) -> tuple[WaterfallPart, ...]:
    rows, spent, (evidence, remedies) = [], 0, words
    for name in WATERFALL_LABELS:
        if name not in means or (not means[name] and name not in always):
            continue
        spent += means[name]
        rows.append(
            WaterfallPart(
                part=name,
                time_ns=means[name],
                share=means[name] / wall_ns if wall_ns else 0.0,
                tflops=flops / spent / 1e3 if flops and spent > 0 else None,
                evidence=evidence[name],
                remedy=remedies.get(name, "") if means[name] > 0 else "",
            )
        )
    return tuple(rows)
