"""From the traces of one run to where its time went: every rank, every hop, and what could not be told."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import islice

import msgspec

from ringprof.analysis.iterations import times_are_of, window_iterations
from ringprof.analysis.rank import Rank
from ringprof.analysis.timeline.kernels import RunKernel
from ringprof.analysis.timeline.window import Focus
from ringprof.analysis.transfers.clocks import UNKNOWN_NS, Clocks, one_clock
from ringprof.analysis.transfers.hops import HostOfRank
from ringprof.analysis.transfers.hosts import clock_of, hosts_of
from ringprof.analysis.transfers.wait_and_wire import LinkClass
from ringprof.errors import InputError
from ringprof.run import Run
from ringprof.trace.columns import CUT_OFF, NO_DEVICE_ACTIVITIES, Notice
from ringprof.trace.one_run import RUN_WARNINGS, TraceFacts, rank_sort_key, split_recordings
from ringprof.workload_checks import workload_problems

MOST_OF_OTHER = 5


class Attribution(msgspec.Struct, frozen=True, dict=True):
    """What the traces of one run say."""

    ranks: tuple[Rank, ...]
    """By rank."""
    run: Run | None
    best_gbps: dict[LinkClass, float]
    """The best rate seen, by (kind, link class)."""
    warnings: tuple[Notice, ...]
    clocks: Clocks = msgspec.field(default_factory=lambda: one_clock(()))
    """The clocks of the ranks' hosts, and how far they can be told."""
    world_size: int = 0
    """How many ranks the run has, as far as is known; those without a trace are not among ``ranks``."""
    kernels: tuple[RunKernel, ...] = ()
    """What ran on the devices by name, over all ranks, longest first."""

    @property
    def median_iteration(self) -> int | None:
        """Number of the iteration whose slowest rank took the median time (the lower of two middle ones).

        None where only one is marked, or not all ranks have the same number of them.
        """
        counts = {len(rank.iteration_ns) for rank in self.ranks}
        if len(counts) != 1 or counts == {1}:
            return None
        slowest = [max(walls) for walls in zip(*(rank.iteration_ns for rank in self.ranks), strict=True)]
        return sorted(range(len(slowest)), key=lambda number: (slowest[number], number))[(len(slowest) - 1) // 2]

    @property
    def partial_window(self) -> bool:
        """Whether a part of the iterations was chosen: a range of another name, or times."""
        return any(rank.partial_window for rank in self.ranks)

    @cached_property
    def window_iterations(self) -> int | None:
        """Number of iterations in the window; None where that is not known, and for a part of an iteration."""
        return window_iterations(self.ranks, self.run)

    @cached_property
    def times_are_of(self) -> str:
        """Return, in words, what a divided time of the window stands for: ``one iteration`` and others."""
        return times_are_of(self.ranks, self.run)

    @cached_property
    def on_cpu(self) -> bool:
        return all(rank.on_cpu for rank in self.ranks)

    @property
    def lacks_device(self) -> bool:
        """Whether it ran on GPUs, and no trace has anything of what ran there."""
        return self.on_cpu and any(warning.code == NO_DEVICE_ACTIVITIES for warning in self.warnings)

    @property
    def largest_of_other(self) -> tuple[RunKernel, ...]:
        """The longest kernels of kind ``other``: what is left when all that is known has a name."""
        return tuple(kernel for kernel in self.kernels if kernel.kind == "other")[:MOST_OF_OTHER]


# --- before any trace is looked at ---------------------------------------------------------------------


_MOST_LISTED = 8


class RunInfo(msgspec.Struct, frozen=True, dict=True):
    """What is known of a run before any activity is looked at."""

    place: dict[int, int]
    """Rank -> index of its trace among those given, by rank."""
    hosts: HostOfRank
    clock_of: dict[int, str]
    warnings: tuple[Notice, ...]
    world_size: int
    expected: Collection[int]
    """The ranks that should be there, ascending."""
    starts_ns: dict[int, int]
    """The first moment of each rank's trace, by its own clock."""
    chosen_ns: tuple[int, int] | None
    """The chosen times, counted from the earliest moment of any trace."""
    offset_ns: Mapping[int, int] = msgspec.field(default_factory=dict)
    """What to add to each rank's times; empty until the clocks are known, or where there is one."""

    @property
    def needs_clocks(self) -> bool:
        """Whether times are chosen that are not the same on every rank's clock."""
        return self.chosen_ns is not None and len(set(self.clock_of.values())) > 1

    def on(self, clocks: Clocks) -> RunInfo:
        """The same, with all ranks' times on one clock."""
        return msgspec.structs.replace(self, offset_ns=clocks.offset_ns)

    def between_ns(self, rank: int) -> tuple[int, int] | None:
        """The chosen times as unix times of one rank's clock."""
        if self.chosen_ns is None:
            return None
        start = self._first_ns - self.offset_ns.get(rank, 0)
        return start + self.chosen_ns[0], start + self.chosen_ns[1]

    def chosen_by_rank(self) -> dict[int, tuple[int, int] | None]:
        """The same for every rank; empty where no times are chosen."""
        return {rank: self.between_ns(rank) for rank in self.place} if self.chosen_ns else {}

    @cached_property
    def _first_ns(self) -> int:
        return min((start + self.offset_ns.get(rank, 0) for rank, start in self.starts_ns.items()), default=0)

    def missing(self) -> list[Notice]:
        """A warning where ranks have no trace."""
        count = len(self.expected) - sum(rank in self.expected for rank in self.place)
        if not count:
            return []
        first = islice((rank for rank in self.expected if rank not in self.place), _MOST_LISTED)
        shown = ", ".join(map(str, first)) + (" ..." if count > _MOST_LISTED else "")
        return [Notice("missing_ranks", f"{count} of {self.world_size} ranks have no trace: {shown}")]


_LEFT_OUT = (
    (CUT_OFF, "is cut off"),
    ({NO_DEVICE_ACTIVITIES}, "has no device activities, which others have"),
)
"""Codes of warnings of traces that are left out beside better ones, and why: means would be of unlike ranks."""


def read_run_info(facts: Sequence[TraceFacts], run: Run | None, ranks_per_host: int | None, focus: Focus) -> RunInfo:
    """Tell the ranks, hosts and clocks of traces that are of one run. Raises `InputError` where they are not."""
    warnings = [warning for one in facts for warning in _with_rank(one)]
    place = _by_rank(facts, warnings)
    warnings = _of_one_run(warnings, run, focus)
    given = tuple(place)
    for codes, why in _LEFT_OUT:
        worse = {rank for rank, at in place.items() if codes & {warning.code for warning in facts[at].warnings}}
        if worse < place.keys():
            place = {rank: at for rank, at in place.items() if rank not in worse}
            warnings += [Notice("left_out", f"the trace {why}: the rank is left out", rank) for rank in sorted(worse)]
    numbered = {rank: facts[at] for rank, at in place.items()}
    hosts = hosts_of(numbered, run, ranks_per_host)
    sizes = [one.world_size for one in facts if one.world_size]
    # A lone trace that names no world is one of its own, though its file be called rank2.
    least = 1 if len(given) == 1 else max(given) + 1
    world_size = run.topology.world_size if run else max(sizes, default=least)
    return RunInfo(
        place=place,
        hosts=hosts,
        clock_of=clock_of(numbered, hosts),
        warnings=(*warnings, *_of_workload(run)),
        world_size=world_size,
        expected=_expected(run, given, world_size, told=bool(sizes)),
        starts_ns={rank: one.span_ns[0] for rank, one in numbered.items() if one.span_ns},
        chosen_ns=focus.between_ns,
    )


def _of_workload(run: Run | None) -> list[Notice]:
    """List the warnings about the workload that the user of `capture` stated."""
    return [Notice(problem.code, problem.message) for problem in workload_problems(run)] if run else []


def _expected(run: Run | None, given: Collection[int], world_size: int, *, told: bool) -> Collection[int]:
    """The ranks that should be there; ``told``: whether traces name the size of their world."""
    if run and run.topology.ranks:
        return dict.fromkeys(run.topology.ranks)
    return range(world_size) if run or told or len(given) > 1 else given


def _with_rank(one: TraceFacts) -> list[Notice]:
    return [
        w if w.rank is not None or w.code in RUN_WARNINGS else msgspec.structs.replace(w, rank=one.rank)
        for w in one.warnings
    ]


def _by_rank(facts: Sequence[TraceFacts], warnings: list[Notice]) -> dict[int, int]:
    """The traces by rank. A trace that names no rank takes a free one, in the order given."""
    if not facts:
        raise InputError("no trace to analyse")
    result: dict[int, int] = {}
    for at, one in enumerate(facts):
        if one.rank is None:
            continue
        if one.rank in result:
            raise InputError(_both(facts[result[one.rank]], one, facts))
        result[one.rank] = at
    nameless = [at for at, one in enumerate(facts) if one.rank is None]
    free = (rank for rank in range(len(facts) * 2 + 1) if rank not in result)
    for at, rank in zip(nameless, free, strict=False):
        result[rank] = at
        if len(facts) > 1:
            warnings.append(Notice("unknown_rank", f"{facts[at].path} names no rank: taken as rank {rank}", rank))
    _refuse_other_sizes(facts)
    return dict(sorted(result.items()))


def _both(first: TraceFacts, second: TraceFacts, facts: Sequence[TraceFacts]) -> str:
    """That two traces are of one rank, and which traces to give instead."""
    message = f"{second.path} and {first.path} are both of rank {first.rank}: give the traces of one run"
    recordings = split_recordings(facts)
    if not recordings:
        return message
    last = " ".join(one.path for one in sorted(recordings[-1], key=rank_sort_key))
    return f"{message}; these are of {len(recordings)}, one after another (a profiler's schedule?). The last: {last}"


def _of_one_run(warnings: list[Notice], run: Run | None, focus: Focus) -> list[Notice]:
    """Means over ranks of two runs are of neither: refused. What is recorded says itself that it is one, though a rank
    may be done before another begins."""
    mixed = [warning for warning in warnings if warning.code == "mixed_runs"]
    if mixed and run is None and not focus.mixed_runs:
        raise InputError(f"{mixed[0].message} Give those of one, or take them together with --mixed-runs")
    return warnings if run is None else [warning for warning in warnings if warning.code != "mixed_runs"]


def _refuse_other_sizes(facts: Sequence[TraceFacts]) -> None:
    sizes: dict[int, TraceFacts] = {}
    for one in facts:
        if one.world_size is not None:
            sizes.setdefault(one.world_size, one)
    if len(sizes) > 1:
        (a, first), (b, second) = list(sizes.items())[:2]
        raise InputError(f"{first.path} is of a run of {a} ranks, {second.path} of {b}: give the traces of one run")


# --- all ranks --------------------------------------------------------------------------------------


def judge_matching(
    ranks: Sequence[Rank], clocks: Clocks, unmatched: Mapping[str, int], inconclusive: int, *, disagree: bool
) -> tuple[bool, list[Notice]]:
    """Whether wait and wire can be told at all, and what is to be said of the matching.

    ``unmatched``: transfers without partners, by reason; ``disagree``: the clocks contradict a transfer;
    ``inconclusive``: transfers that the clocks do not tell well enough.
    """
    warnings = [Notice(*_UNMATCHED[reason], count=count) for reason, count in sorted(unmatched.items())]
    if clocks.pairs:
        warnings.append(Notice("clocks_fitted", _fit_in_words(clocks)))
    problem = _no_common_clock(ranks, clocks)
    if problem is None and disagree:
        # Where nobody names the hosts, all ranks are taken to share a clock.
        fit = (
            ""
            if all(rank.host for rank in ranks)
            else ": if these ranks are of several hosts, --ranks-per-host has their clocks fitted"
        )
        problem = Notice("clocks_disagree", f"a transfer ends before its partner begins: no wait and wire{fit}")
    if problem:
        return False, [*warnings, problem]
    if inconclusive:
        warnings.append(Notice("clocks_inconclusive", _INCONCLUSIVE, count=inconclusive))
    return True, warnings


def _fit_in_words(clocks: Clocks) -> str:
    residual = "is not known" if clocks.residual_ns >= UNKNOWN_NS else f"is {clocks.residual_ns / 1e3:.1f} us"
    largest = max(abs(offset) for offset in clocks.offset_ns.values())
    return (
        f"the clocks of {len(set(clocks.host.values()))} hosts are aligned by their transfers, not known to agree: "
        f"offsets up to {largest / 1e3:.1f} us, the largest residual {residual}"
    )


_INCONCLUSIVE = "kernels wait less than the clocks of their hosts can tell: no wait and wire for them"

_UNMATCHED = {
    "rank_missing": ("peer_missing", "transfers whose peers' traces are not here: no wait and wire for them"),
    "counts_differ": ("counts_differ", "transfers that two ranks count differently: no wait and wire for them"),
    "bytes_differ": ("bytes_differ", "transfers whose bytes two ranks record differently: no wait and wire for them"),
    "no_record": ("no_record", "communication kernels without a record of peers and bytes: no wait and wire for them"),
}


def _no_common_clock(ranks: Sequence[Rank], clocks: Clocks) -> Notice | None:
    if all(rank.on_cpu for rank in ranks):
        return None  # nothing of theirs is set against one another
    latest_start = max(rank.breakdown.start_ns + clocks.offset_ns[rank.rank] for rank in ranks)
    if latest_start > min(rank.breakdown.end_ns + clocks.offset_ns[rank.rank] for rank in ranks):
        return Notice("mixed_runs", "the traces do not overlap in time: they are of different runs or clocks")
    return None


def all_warnings(info: RunInfo, said: Sequence[Notice], of_matching: Sequence[Notice]) -> tuple[Notice, ...]:
    """Input warnings, then analysis warnings; a `mixed_runs` that the reader raised is not repeated."""
    codes = {warning.code for warning in said}
    fresh = [warning for warning in of_matching if warning.code != "mixed_runs" or warning.code not in codes]
    return merged_caveats([*said, *info.missing(), *fresh])


def merged_caveats(warnings: Iterable[Notice]) -> tuple[Notice, ...]:
    """One warning where several ranks raise the same."""
    found: dict[tuple[str, str], Notice] = {}
    for warning in warnings:
        key = warning.code, warning.message
        known = found.get(key)
        found[key] = (
            warning if known is None else msgspec.structs.replace(known, rank=None, count=known.count + warning.count)
        )
    return tuple(found.values())
