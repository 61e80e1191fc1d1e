"""A calibration from recorded runs: what their traces say of blocks, memory, links and contention.

What runs do not tell, the host's own time above all, is taken from another calibration, and stays marked as its.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import msgspec
import numpy as np

from ringprof.api import Analysis, load
from ringprof.errors import InputError, UnsupportedWorkloadError, UsageError
from ringprof.prediction.calibration import Calibration, KernelFigures, KernelSample, Link, Value
from ringprof.prediction.network import Links
from ringprof.prediction.observed_schedule import ObservedRank, observe
from ringprof.prediction.query import busy_s, cluster_of, is_older
from ringprof.record.dryrun.schedule import AttentionOp, MemoryOp, Schedule
from ringprof.run import Run

LARGE_BYTES = 16 << 20
"""Kernels that move less are bound by their launch."""
_BEST = 90
"""Percentile of the rates seen: the others shared the link, or the device, with something."""


@dataclass(frozen=True)
class Observed:
    """One run and what its traces say."""

    run: Run
    ranks: list[ObservedRank]
    links: Links
    fills: bool

    @property
    def source(self) -> str:
        return self.run.name


def schedule_of_run(run: Run) -> Schedule:
    """The tape of what a run did. Raises `InputError` for a run that does not say."""
    from ringprof.prediction.schedules import schedule

    if run.strategy is None or run.workload is None or run.kernel is None:
        raise InputError(f"run {run.name}: it does not name its strategy, kernel and workload")
    return schedule(
        run.strategy.name, run.workload, run.topology.world_size, ranks_per_host=run.topology.ranks_per_host,
        kernel=run.kernel, hops=run.strategy.hops, params=run.strategy.params, older=is_older(run),
    )  # fmt: skip


def observed_run(path: str | os.PathLike[str], base: Calibration) -> Observed:
    """Read a run and its traces. Raises `InputError` and `UsageError` for one that cannot calibrate a GPU."""
    analysis = load(path)
    run = analysis.run
    if not isinstance(analysis, Analysis) or run is None:
        raise InputError(f"{os.fspath(path)}: not a recorded run: name its folder or its run.json")
    if run.topology.device_type != "cuda":
        raise UsageError(f"{os.fspath(path)}: recorded on CPU processes, which cannot be foreseen")
    if run.workload and not run.workload.mask().plain:
        raise UsageError(f"{os.fspath(path)}: runs of packed documents and windows are not taken apart")
    try:
        ranks, links = observe(analysis.attribution, schedule_of_run(run)), Links(base, cluster_of(run))
    except UnsupportedWorkloadError as error:
        raise UnsupportedWorkloadError(f"{os.fspath(path)}: {error}") from None
    fills = any(kernel.name == run.kernel and kernel.fills_device for kernel in base.kernels)
    return Observed(run, ranks, links, fills)


def calibrate_from(runs: Sequence[Observed], base: Calibration) -> Calibration:
    """``base`` with what ``runs`` say put in its place. Raises `UsageError` where they are of several devices."""
    devices = {device for observed in runs for device in observed.run.environment.devices}
    if len(devices) != 1:
        raise UsageError(f"one calibration is of one device, and these runs are of {', '.join(sorted(devices))}")
    contention = _contention(runs) or base.contention
    measured = {
        "device": devices.pop(),
        "created": max(observed.run.created for observed in runs),
        "environment": runs[-1].run.environment.versions,
        "kernels": _kernels(runs, base, contention.value),
        "contention": contention,
        "hop_first": _hop_first(runs) or base.hop_first,
        "unlike": _unlike(runs, contention.value, base.heat.value) or base.unlike,
        "memory_gb_s": _memory(runs, strided=False) or base.memory_gb_s,
        "reorder_gb_s": _memory(runs, strided=True) or base.reorder_gb_s,
        "same_host": _same_host(runs, base.same_host),
        "elsewhere": {},
    }
    return msgspec.structs.replace(base, **measured)


# --- blocks -----------------------------------------------------------------------------------------


def _kernels(runs: Sequence[Observed], base: Calibration, contention: float) -> list[KernelFigures]:
    """The kernels that ran, with samples of their blocks alone; the base's others as they are."""
    known = {kernel.name: kernel for kernel in base.kernels}
    for name in {observed.run.kernel for observed in runs}:
        assert name is not None
        mine = [observed for observed in runs if observed.run.kernel == name]
        samples = [sample for observed in mine for sample in _samples(observed, contention)]
        before = known.get(name) or KernelFigures(
            name=name, fills_device=False, tail=_assumed("a kernel of many short blocks"),
            lead=_assumed("not seen"), samples=[],
        )  # fmt: skip
        tail = [part for observed in mine for part in _tails(observed)] if before.fills_device else []
        leads = [
            (block.main_ns - block.start_ns) / (block.end_ns - block.start_ns)
            for observed in mine for rank in observed.ranks for place, block in rank.blocks.items()
            if _block(rank, place).phase == "backward"
        ]  # fmt: skip
        known[name] = msgspec.structs.replace(
            before,
            samples=samples,
            tail=_measured(tail, mine) or before.tail,
            lead=_measured(leads, mine) or before.lead,
        )
    return list(known.values())


def _samples(observed: Observed, contention: float) -> list[KernelSample]:
    """One sample for each shape of a run: the median over ranks and steps of what the block alone would have taken."""
    found: dict[tuple[Any, ...], list[tuple[float, float]]] = defaultdict(list)
    for rank, op, length, lost in _blocks(observed):
        key = (op.phase, op.batch, op.q, op.kv, op.heads, op.kv_heads, op.head_dim, op.causal)
        found[key].append((length - contention * lost, rank.duty))
    names = ("phase", "batch", "q", "kv", "heads", "kv_heads", "head_dim", "causal")
    return [
        KernelSample(
            **dict(zip(names, key, strict=True)), ns=median(ns for ns, _ in seen),
            spread=min(1.0, float(np.std([ns for ns, _ in seen]) / np.mean([ns for ns, _ in seen]))), count=len(seen),
            duty=min(1.0, float(np.mean([duty for _, duty in seen]))), busy_s=busy_s(observed.run, 1.0),
            origin="measured", source=observed.source,
        )
        for key, seen in found.items()
    ]  # fmt: skip


def _blocks(observed: Observed) -> Iterator[tuple[ObservedRank, AttentionOp, int, float]]:
    """Every block: its rank, what it was asked, nanoseconds that it took, and what transfers beside it held of them."""
    for rank in observed.ranks:
        for place, block in rank.blocks.items():
            yield rank, _block(rank, place), block.end_ns - block.start_ns, lost_ns(observed, rank, place)


def lost_ns(observed: Observed, rank: ObservedRank, place: int) -> float:
    """Time beside transfers' kernels, each counted by the part of the multiprocessors that it holds."""
    return sum(
        rank.beside_ns(place, at) * observed.links.held(transfer.post) for at, transfer in rank.transfers.items()
    )


def _unlike(runs: Sequence[Observed], contention: float, heat: float) -> Value | None:
    """How far ranks of one run are apart in the time of equal blocks, were they equally warm."""
    variances = []
    for observed in runs:
        groups: dict[tuple[Any, ...], list[tuple[int, float]]] = defaultdict(list)
        for rank, op, length, lost in _blocks(observed):
            alone = (length - contention * lost) / (1 + heat * rank.duty)
            groups[op.phase, op.q, op.kv, op.heads, op.causal].append((rank.program.rank, alone))
        off: dict[int, list[float]] = defaultdict(list)
        for seen in groups.values():
            if len({rank for rank, _ in seen}) == len(observed.ranks):
                middle = float(np.mean([ns for _, ns in seen]))
                for number, ns in seen:
                    off[number].append(ns / middle)
        if len(off) > 1:
            variances.append(float(np.var([np.mean(parts) for parts in off.values()], ddof=1)))
    if not variances:
        return None
    spread = float(np.mean(variances)) ** 0.5
    return Value(spread, min(1.0, (2 / len(variances)) ** 0.5), "measured", _names(runs))


def _contention(runs: Sequence[Observed]) -> Value | None:
    """How much of what hops hold blocks lose: the slope, over blocks of one shape and run, of time over time lost."""
    x, y = [], []
    for observed in runs:
        groups: dict[tuple[Any, ...], list[tuple[float, float]]] = defaultdict(list)
        for _, op, length, lost in _blocks(observed):
            groups[op.phase, op.q, op.kv, op.heads, op.causal].append((lost / length, 1.0 / length))
        for seen in groups.values():
            lost, speed = np.array(seen).T
            if np.ptp(lost) > 0.05:
                x += list(lost - lost.mean())
                y += list(1 - speed / speed.mean())
    if len(x) < 8:
        return None
    slope = float(np.dot(x, y) / np.dot(x, x))
    off = np.array(y) - slope * np.array(x)
    spread = float(np.sqrt(np.mean(off**2) / np.dot(x, x))) / max(slope, 1e-3)
    return Value(min(max(slope, 0.0), 1.5), min(spread, 1.0), "measured", _names(runs))


def _tails(observed: Observed) -> list[float]:
    """How long before a block's end hops began that had waited for it, as parts of the block."""
    return [
        (block.end_ns - transfer.start_ns) / (block.end_ns - block.start_ns)
        for rank in observed.ranks
        for block, transfer in _held_up(rank)
    ]


def _held_up(rank: ObservedRank) -> list[tuple[Any, Any]]:
    """Transfers that began in the last tenth of the block after their post, with that block."""
    return [
        (block, transfer)
        for place, transfer in rank.transfers.items()
        if (block := _next_block(rank, place)) is not None
        and block.end_ns - 0.1 * (block.end_ns - block.start_ns) < transfer.start_ns < block.end_ns
    ]


def _hop_first(runs: Sequence[Observed]) -> Value | None:
    """Of the hops posted right before a forward block that fills the device, how many came before it.

    Not of the first step: there the host, which the profiler slows down, decides.
    """
    first = later = 0
    for observed in runs:
        for rank in observed.ranks if observed.fills else ():
            held_up = {id(transfer) for _, transfer in _held_up(rank)}
            for place, transfer in rank.transfers.items():
                block = _next_block(rank, place)
                before = any(other < place for other in rank.blocks)
                if (
                    block is None
                    or not before
                    or _block(rank, min(p for p in rank.blocks if p > place)).phase != "forward"
                ):
                    continue
                previous = [t.end_ns for p, t in rank.transfers.items() if p < place]
                if previous and transfer.start_ns - max(previous) < 2e4:
                    continue
                later += id(transfer) in held_up
                first += abs(transfer.start_ns - block.start_ns) < 5e4
    if first + later < 8:
        return None
    part = first / (first + later)
    return Value(part, (part * (1 - part) / (first + later)) ** 0.5 / max(part, 0.01), "measured", _names(runs))


# --- memory and links -------------------------------------------------------------------------------


def _memory(runs: Sequence[Observed], *, strided: bool) -> Value | None:
    rates = [
        op.bytes / took
        for observed in runs for rank in observed.ranks for place, took in rank.touches.items()
        if isinstance(op := rank.program.ops[place], MemoryOp) and op.bytes > LARGE_BYTES and op.strided is strided
    ]  # fmt: skip
    return _measured(rates, runs)


def _same_host(runs: Sequence[Observed], base: Link) -> Link:
    """Rates of hops by the channels that they had, of collectives, and of copies."""
    by_channels: dict[int, list[float]] = defaultdict(list)
    collectives: dict[str, list[float]] = defaultdict(list)
    copies: list[float] = []
    for observed in runs:
        if observed.links.cluster.hosts > 1:
            continue
        for rank in observed.ranks:
            for transfer in rank.transfers.values():
                post = transfer.post
                if not transfer.wire_ns:
                    continue
                if post.operation == "copy":
                    copies.append(sum(post.messages) / (transfer.end_ns - transfer.start_ns))
                elif post.operation == "send_recv":
                    by_channels[observed.links.channels_of(post)].append(sum(post.messages) / transfer.wire_ns)
                else:
                    leaves = (len(post.members) - 1) * post.messages[0]
                    collectives[post.operation].append(leaves / transfer.wire_ns)
    few = [rate / count for count, rates in by_channels.items() if count < 32 for rate in _best(rates)]
    many = [rate for count, rates in by_channels.items() if count >= 32 for rate in _best(rates)]
    return msgspec.structs.replace(
        base,
        channel_gb_s=_measured(few, runs) or base.channel_gb_s,
        hop_gb_s=_measured(many, runs) or base.hop_gb_s,
        copy_gb_s=_measured(copies, runs) or base.copy_gb_s,
        collective_gb_s={
            **base.collective_gb_s,
            **{name: found for name, rates in collectives.items() if (found := _measured(_best(rates), runs))},
        },
    )


def _best(rates: Sequence[float]) -> list[float]:
    """The upper tenth."""
    least = float(np.percentile(rates, _BEST))
    return [rate for rate in rates if rate >= least]


# --- small pieces -----------------------------------------------------------------------------------


def _block(rank: ObservedRank, place: int) -> AttentionOp:
    op = rank.program.ops[place]
    assert isinstance(op, AttentionOp)
    return op


def _next_block(rank: ObservedRank, place: int) -> Any:
    later = [other for other in rank.blocks if other > place]
    return rank.blocks[min(later)] if later else None


def _measured(figures: Sequence[float], runs: Iterable[Observed]) -> Value | None:
    if not figures:
        return None
    middle = median(figures)
    spread = float(np.median(np.abs(np.array(figures) - middle))) * 1.4826 / middle if middle else 0.0
    return Value(middle, min(spread, 1.0), "measured", _names(runs))


def _assumed(why: str) -> Value:
    return Value(0.0, 0.5, "assumed", why)


def _names(runs: Iterable[Observed]) -> str:
    names = sorted({observed.source for observed in runs})
    return names[0] if len(names) == 1 else f"{len(names)} recorded runs, {names[0]} to {names[-1]}"
