"""A calibration fitted to recorded runs: attention blocks, memory rates, links and contention, from their traces.

Figures that runs do not show, the host times above all, are taken from another calibration and keep its source.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import msgspec
import numpy as np

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.rank import Rank
from ringprof.analysis.transfers.hops import Split
from ringprof.dryrun.schedule import AttentionOp, CommStart, MemoryOp, Program, Schedule
from ringprof.errors import InputError, UnsupportedWorkloadError, UsageError
from ringprof.prediction.calibration import Calibration, KernelFigures, KernelSample, Link, Value
from ringprof.prediction.machine import cache_bytes, reads_cache
from ringprof.prediction.network import Links
from ringprof.prediction.query import busy_s, cluster_of, uses_legacy_schedule
from ringprof.prediction.simulator import RINGS
from ringprof.results.analysis import Analysis
from ringprof.results.load import load
from ringprof.run import Run
from ringprof.strategies.catalog import PEERS

LARGE_BYTES = 16 << 20
"""Bytes from which a kernel's rate counts; smaller kernels are bound by their launch."""
_PAUSE_SHOWS, _MOSTLY_BLOCKS = 1.03, 0.9
"""Least ratio of timed to profiled iterations, and least share of the time in blocks, for `_timed_over_profiled`."""
_BEST_PERCENTILE = 90
"""Percentile of the observed rates; slower transfers shared the link or the device with something else."""


@dataclass(frozen=True)
class Observed:
    """One recorded run with its operations matched to their measured times."""

    run: Run
    ranks: list[ObservedRank]
    links: Links
    fills: bool


def schedule_of_run(run: Run) -> Schedule:
    """Return the schedule that a run executed. Raises `InputError` for a run that does not name its strategy."""
    from ringprof.prediction.schedules import schedule

    if run.strategy is None or run.workload is None or run.kernel is None:
        raise InputError(f"run {run.name}: it does not name its strategy, kernel and workload")
    if run.strategy.name in PEERS:
        raise UnsupportedWorkloadError(
            f"{run.strategy.name} is another project's code, whose traces name no ring steps: the blocks and hops of a"
            " run cannot be told apart"
        )
    return schedule(
        run.strategy.name, run.workload, run.topology.world_size, ranks_per_host=run.topology.ranks_per_host,
        kernel=run.kernel, hops=run.strategy.hops, params=run.strategy.params,
        legacy_schedule=uses_legacy_schedule(run),
    )  # fmt: skip


def observed_run(path: str | os.PathLike[str], base: Calibration) -> Observed:
    """Read a run and its traces. Raises `InputError` and `UsageError` for a run that cannot calibrate a GPU."""
    analysis = load(path)
    run = analysis.run
    if not isinstance(analysis, Analysis) or run is None:
        raise InputError(f"{os.fspath(path)}: not a recorded run: name its folder or its run.json")
    if run.topology.device_type != "cuda":
        raise UsageError(f"{os.fspath(path)}: recorded on CPU processes, which cannot be predicted")
    if run.workload and run.workload.recurrent:
        raise UsageError(
            f"{os.fspath(path)}: runs of recurrences cannot be replayed or calibrated from; ringprof calibrate --parts"
            " recurrences measures their kernels"
        )
    if run.workload and not run.workload.mask().plain:
        raise UsageError(
            f"{os.fspath(path)}: runs of packed documents and windows cannot be replayed or calibrated from"
        )
    try:
        ranks, links = observe(analysis.attribution, schedule_of_run(run)), Links(base, cluster_of(run))
    except UnsupportedWorkloadError as error:
        raise UnsupportedWorkloadError(f"{os.fspath(path)}: {error}") from None
    fills = any(kernel.name == run.kernel and kernel.fills_device for kernel in base.kernels)
    return Observed(run, ranks, links, fills)


def calibrate_from(runs: Sequence[Observed], base: Calibration) -> Calibration:
    """Return ``base`` with the figures that ``runs`` show. Raises `UsageError` if the runs are of several devices."""
    devices = {device for observed in runs for device in observed.run.environment.devices}
    if len(devices) != 1:
        raise UsageError(f"one calibration is of one device, and these runs are of {', '.join(sorted(devices))}")
    contention = _contention(runs) or base.contention
    measured = {
        "device": devices.pop(), "created": max(observed.run.created for observed in runs),
        "environment": runs[-1].run.environment.versions, "kernels": _kernels(runs, base, contention.value),
        "contention": contention, "hop_first": _hop_first(runs) or base.hop_first,
        "device_variation": _device_variation(runs, contention.value, base.throttling.value) or base.device_variation,
        "memory_gb_s": _memory(runs, strided=False) or base.memory_gb_s,
        "reorder_gb_s": _memory(runs, strided=True) or base.reorder_gb_s,
        "same_host": _same_host(runs, base.same_host), "transfer_margin": {},
        "family_spread_from_hosts": max(2, base.family_spread_from_hosts),
    }  # fmt: skip
    return msgspec.structs.replace(base, **measured)


# --- blocks -----------------------------------------------------------------------------------------


def _kernels(runs: Sequence[Observed], base: Calibration, contention: float) -> list[KernelFigures]:
    """Return the kernels that ran, with samples of their blocks, and the other kernels of ``base`` unchanged."""
    by_name = {kernel.name: kernel for kernel in base.kernels}
    for name in {observed.run.kernel for observed in runs}:
        assert name is not None
        observed_runs = [observed for observed in runs if observed.run.kernel == name]
        samples = [sample for observed in observed_runs for sample in _samples(observed, contention)]
        # GB/s at which the calls of few queries read their keys and values.
        rates = [
            cache_bytes(op) / duration_ns
            for observed in observed_runs for _, op, duration_ns, _ in _observed_blocks(observed) if reads_cache(op)
        ]  # fmt: skip
        current = by_name.get(name) or KernelFigures(
            name=name, fills_device=False, tail=Value(0.0, 0.5, "assumed", "a kernel of many short blocks"),
            lead=Value(0.0, 0.5, "assumed", "not seen"), samples=[],
        )  # fmt: skip
        # From a delayed hop's start to the end of the block before it, as a fraction of the block.
        tails = [
            (block.end_ns - transfer.start_ns) / (block.end_ns - block.start_ns)
            for observed in observed_runs if current.fills_device
            for rank in observed.ranks for block, transfer in _delayed_transfers(rank)
        ]  # fmt: skip
        leads = [
            (block.main_ns - block.start_ns) / (block.end_ns - block.start_ns)
            for observed in observed_runs for rank in observed.ranks for op_index, block in rank.blocks.items()
            if _attention_op(rank, op_index).phase == "backward"
        ]  # fmt: skip
        by_name[name] = msgspec.structs.replace(
            current,
            # Runs of inference have no backward pass, and those of decode no blocks of many queries.
            samples=samples
            + [sample for sample in current.samples if sample.phase not in {measured.phase for measured in samples}],
            cache_gb_s=_median_value(rates, observed_runs) or current.cache_gb_s,
            tail=_median_value(tails, observed_runs) or current.tail,
            lead=_median_value(leads, observed_runs) or current.lead,
        )
    return list(by_name.values())


def _timed_over_profiled(observed: Observed) -> float:
    """Return the factor by which blocks took longer in the timed iterations than in the profiled one; at least 1.

    A device at its power limit cools while the profiler starts: on 2 H200 the profiled iteration of runs of 8 to 33 ms
    was 4 to 9 % shorter than the timed ones. The factor is 1 if the difference is small (`_PAUSE_SHOWS`) or if blocks
    are not most of the time (`_MOSTLY_BLOCKS`), so that something else may be its cause.
    """
    timed_ns = observed.run.timings.median_ns() if observed.run.timings else None
    if not timed_ns or min(rank.utilisation for rank in observed.ranks) < _MOSTLY_BLOCKS:
        return 1.0
    ratio = timed_ns / max(rank.wall_ns for rank in observed.ranks)
    return ratio if ratio > _PAUSE_SHOWS else 1.0


def _samples(observed: Observed, contention: float) -> list[KernelSample]:
    """Return one sample per shape of a run: the median over ranks and steps of the block's time without contention."""
    slower = _timed_over_profiled(observed)
    times_by_shape: dict[tuple[Any, ...], list[tuple[float, float]]] = defaultdict(list)
    for rank, op, duration_ns, contended in _observed_blocks(observed):
        if reads_cache(op):
            continue
        shape = (op.phase, op.batch, op.q, op.kv, op.heads, op.kv_heads, op.head_dim, op.causal)
        times_by_shape[shape].append((duration_ns - contention * contended, rank.utilisation))
    names = ("phase", "batch", "q", "kv", "heads", "kv_heads", "head_dim", "causal")
    return [
        KernelSample(
            **dict(zip(names, shape, strict=True)), ns=slower * median(ns for ns, _ in times),
            spread=min(1.0, float(np.std([ns for ns, _ in times]) / np.mean([ns for ns, _ in times]))),
            count=len(times),
            utilisation=min(1.0, float(np.mean([duty for _, duty in times]))),
            busy_s=busy_s(observed.run, 0.5 if slower > 1 else 1.0),
            origin="measured", source=observed.run.name,
        )
        for shape, times in times_by_shape.items()
    ]  # fmt: skip


def _observed_blocks(observed: Observed) -> Iterator[tuple[ObservedRank, AttentionOp, int, float]]:
    """Yield each block's rank, operation, duration in nanoseconds and contended nanoseconds."""
    for rank in observed.ranks:
        for op_index, block in rank.blocks.items():
            contended = contended_ns(observed, rank, op_index)
            yield rank, _attention_op(rank, op_index), block.end_ns - block.start_ns, contended


def contended_ns(observed: Observed, rank: ObservedRank, op_index: int) -> float:
    """Return the block's time beside transfer kernels, weighted by the fraction of multiprocessors that each holds."""
    return sum(
        rank.beside_ns(op_index, transfer_index) * observed.links.held_share(transfer.comm_op)
        for transfer_index, transfer in rank.transfers.items()
    )


def _device_variation(runs: Sequence[Observed], contention: float, throttling: float) -> Value | None:
    """Fit how far the ranks of one run differ in the time of equal blocks, corrected for throttling."""
    variances = []
    for observed in runs:
        groups: dict[tuple[Any, ...], list[tuple[int, float]]] = defaultdict(list)
        for rank, op, duration_ns, contended in _observed_blocks(observed):
            alone = (duration_ns - contention * contended) / (1 + throttling * rank.utilisation)
            groups[op.phase, op.q, op.kv, op.heads, op.causal].append((rank.program.rank, alone))
        relative_times: dict[int, list[float]] = defaultdict(list)
        for times in groups.values():
            if len({rank for rank, _ in times}) == len(observed.ranks):
                mean = float(np.mean([ns for _, ns in times]))
                for number, ns in times:
                    relative_times[number].append(ns / mean)
        if len(relative_times) > 1:
            variances.append(float(np.var([np.mean(ratios) for ratios in relative_times.values()], ddof=1)))
    if not variances:
        return None
    spread = float(np.mean(variances)) ** 0.5
    return Value(spread, min(1.0, (2 / len(variances)) ** 0.5), "measured", _source_of(runs))


def _contention(runs: Sequence[Observed]) -> Value | None:
    """Fit the fraction of the contended time that blocks lose: a slope over blocks of equal shape and run."""
    x, y = [], []
    for observed in runs:
        groups: dict[tuple[Any, ...], list[tuple[float, float]]] = defaultdict(list)
        for _, op, duration_ns, contended in _observed_blocks(observed):
            groups[op.phase, op.q, op.kv, op.heads, op.causal].append((contended / duration_ns, 1.0 / duration_ns))
        for points in groups.values():
            contended, inverse_ns = np.array(points).T
            if np.ptp(contended) > 0.05:
                x += list(contended - contended.mean())
                y += list(1 - inverse_ns / inverse_ns.mean())
    if len(x) < 8:
        return None
    slope = float(np.dot(x, y) / np.dot(x, x))
    residuals = np.array(y) - slope * np.array(x)
    spread = float(np.sqrt(np.mean(residuals**2) / np.dot(x, x))) / max(slope, 1e-3)
    return Value(min(max(slope, 0.0), 1.5), min(spread, 1.0), "measured", _source_of(runs))


def _delayed_transfers(rank: ObservedRank) -> list[tuple[Any, Any]]:
    """Return transfers that began in the last tenth of the block after their start, with that block."""
    return [
        (block, transfer)
        for op_index, transfer in rank.transfers.items()
        if (block := _next_block(rank, op_index)) is not None
        and block.end_ns - 0.1 * (block.end_ns - block.start_ns) < transfer.start_ns < block.end_ns
    ]


def _hop_first(runs: Sequence[Observed]) -> Value | None:
    """Fit how often a hop begins before a forward block that fills the device and directly follows the hop.

    Hops of the first step do not count: the host decides there, and the profiler slows it down.
    """
    hops_first = blocks_first = 0
    for observed in runs:
        for rank in observed.ranks if observed.fills else ():
            delayed = {id(transfer) for _, transfer in _delayed_transfers(rank)}
            for op_index, transfer in rank.transfers.items():
                block = _next_block(rank, op_index)
                if block is None or not any(index < op_index for index in rank.blocks):
                    continue
                if _attention_op(rank, min(index for index in rank.blocks if index > op_index)).phase != "forward":
                    continue
                previous = [other.end_ns for index, other in rank.transfers.items() if index < op_index]
                if previous and transfer.start_ns - max(previous) < 2e4:
                    continue
                blocks_first += id(transfer) in delayed
                hops_first += abs(transfer.start_ns - block.start_ns) < 5e4
    if hops_first + blocks_first < 8:
        return None
    share = hops_first / (hops_first + blocks_first)
    spread = (share * (1 - share) / (hops_first + blocks_first)) ** 0.5 / max(share, 0.01)
    return Value(share, spread, "measured", _source_of(runs))


# --- memory and links -------------------------------------------------------------------------------


def _memory(runs: Sequence[Observed], *, strided: bool) -> Value | None:
    """Fit the rate of kernels that only move memory."""
    rates = [
        op.bytes / duration_ns
        for observed in runs for rank in observed.ranks for op_index, duration_ns in rank.memory_op_ns.items()
        if isinstance(op := rank.program.ops[op_index], MemoryOp) and op.bytes > LARGE_BYTES and op.strided is strided
    ]  # fmt: skip
    return _median_value(rates, runs)


def _same_host(runs: Sequence[Observed], base: Link) -> Link:
    """Fit the rates of hops per number of channels, of collectives and of copies inside a host."""
    by_channels: dict[int, list[float]] = defaultdict(list)
    collectives: dict[str, list[float]] = defaultdict(list)
    copies: list[float] = []
    for observed in runs:
        if observed.links.cluster.hosts > 1:
            continue
        for rank in observed.ranks:
            for transfer in rank.transfers.values():
                comm_op = transfer.comm_op
                if not transfer.wire_ns:
                    continue
                if comm_op.operation == "copy":
                    copies.append(sum(comm_op.messages) / (transfer.end_ns - transfer.start_ns))
                elif comm_op.operation == "send_recv":
                    by_channels[observed.links.channels_of(comm_op)].append(sum(comm_op.messages) / transfer.wire_ns)
                else:
                    sent_bytes = (len(comm_op.members) - 1) * comm_op.messages[0]
                    collectives[comm_op.operation].append(sent_bytes / transfer.wire_ns)
    per_channel = [rate / count for count, rates in by_channels.items() if count < 32 for rate in _best_tenth(rates)]
    per_hop = [rate for count, rates in by_channels.items() if count >= 32 for rate in _best_tenth(rates)]
    return msgspec.structs.replace(
        base,
        channel_gb_s=_median_value(per_channel, runs) or base.channel_gb_s,
        hop_gb_s=_median_value(per_hop, runs) or base.hop_gb_s,
        copy_gb_s=_median_value(copies, runs) or base.copy_gb_s,
        collective_gb_s=base.collective_gb_s
        | {name: value for name, rates in collectives.items() if (value := _median_value(_best_tenth(rates), runs))},
    )


def _best_tenth(rates: Sequence[float]) -> list[float]:
    """Return the highest tenth of the rates."""
    threshold = float(np.percentile(rates, _BEST_PERCENTILE))
    return [rate for rate in rates if rate >= threshold]


# --- small pieces -----------------------------------------------------------------------------------


def _attention_op(rank: ObservedRank, op_index: int) -> AttentionOp:
    op = rank.program.ops[op_index]
    assert isinstance(op, AttentionOp)
    return op


def _next_block(rank: ObservedRank, op_index: int) -> Any:
    later = [index for index in rank.blocks if index > op_index]
    return rank.blocks[min(later)] if later else None


def _median_value(values: Sequence[float], runs: Iterable[Observed]) -> Value | None:
    if not values:
        return None
    middle = median(values)
    spread = float(np.median(np.abs(np.array(values) - middle))) * 1.4826 / middle if middle else 0.0
    return Value(middle, min(spread, 1.0), "measured", _source_of(runs))


def _source_of(runs: Iterable[Observed]) -> str:
    names = sorted({observed.run.name for observed in runs})
    return names[0] if len(names) == 1 else f"{len(names)} recorded runs, {names[0]} to {names[-1]}"


# --- the measured start and end of each scheduled operation ---

_BLOCK = re.compile(r"ringprof::(?:fwd|bwd)/step=[0-9]+/block")
_SEND = re.compile(r"ringprof::send/.+")
_TRANSFER_KINDS = ("send_recv", "copy_engine", "all_to_all", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class ObservedBlock:
    """Measured times of an attention call with its helper kernels."""

    start_ns: int
    end_ns: int
    main_ns: int
    """Start of the longest kernel of the call."""


@dataclass(frozen=True)
class ObservedTransfer:
    """Measured times of a transfer's kernel, or of its copies together."""

    comm_op: CommStart
    """The operation with the messages in the trace; other versions of a strategy may have split them differently."""
    start_ns: int
    end_ns: int
    wire_ns: int | None
    """Nanoseconds from the arrival of the last participating rank; None if the ranks' clocks are not aligned."""


@dataclass(frozen=True)
class ObservedRank:
    """One rank's profiled iteration; times count from its first activity."""

    program: Program
    blocks: dict[int, ObservedBlock]
    """Attention blocks by the index of their operation in the program; `transfers` and `memory_op_ns` have the same
    keys."""
    transfers: dict[int, ObservedTransfer]
    memory_op_ns: dict[int, int]
    """Nanoseconds per memory operation; empty if the traces have a different number of such kernels."""
    memory_total_ns: int
    """Total nanoseconds of all kernels between blocks."""
    wall_ns: int

    def beside_ns(self, op_index: int, transfer_index: int) -> int:
        """Return how long a transfer's kernel ran concurrently with a block."""
        block, transfer = self.blocks[op_index], self.transfers[transfer_index]
        return max(0, min(block.end_ns, transfer.end_ns) - max(block.start_ns, transfer.start_ns))

    @property
    def utilisation(self) -> float:
        """Fraction of the iteration in which the rank computed attention."""
        return sum(block.end_ns - block.start_ns for block in self.blocks.values()) / self.wall_ns


def observe(attribution: Attribution, schedule: Schedule) -> list[ObservedRank]:
    """Match every rank of a run with its program, by the annotations of ringprof's strategies.

    Raises `InputError` if the traces hold other blocks or transfers than the schedule, for example of another version.
    """
    programs = {program.rank: program for program in schedule.programs}
    return [_rank(rank, programs[rank.rank]) for rank in attribution.ranks if rank.rank in programs]


def _rank(rank: Rank, program: Program) -> ObservedRank:
    """Match one rank's activities with its program."""
    classified, rows = rank.classified, rank.window.iterations[0]
    activities = classified.trace.activities
    launch = classified.launch[rows]
    spans = _spans(rank, _BLOCK)
    op_indices = [op_index for op_index, op in enumerate(program.ops) if isinstance(op, AttentionOp)]
    if len(spans) != len(op_indices):
        raise InputError(
            f"{rank.path}: {len(spans)} attention blocks, where the strategy of this version has {len(op_indices)}"
        )
    launched = classified.trace.launches.start_ns[np.maximum(launch, 0)]
    span_index = np.searchsorted([start for start, _ in spans], launched, side="right") - 1
    in_attention = (launch >= 0) & (span_index >= 0)
    in_attention[in_attention] = launched[in_attention] < np.array([end for _, end in spans])[span_index[in_attention]]
    is_transfer, is_flash = classified.of(*_TRANSFER_KINDS)[rows], classified.of("flash_fwd", "flash_bwd")[rows]
    origin = int(activities.start_ns[rows].min())
    blocks = {}
    for number, op_index in enumerate(op_indices):
        kernels = rows[in_attention & (span_index == number) & is_flash]
        begin, end = activities.start_ns[kernels], activities.end_ns[kernels]
        main = int(begin[np.argmax(end - begin)])
        blocks[op_index] = ObservedBlock(int(begin.min()) - origin, int(end.max()) - origin, main - origin)
    other_kernels = rows[~in_attention & ~is_transfer & ~classified.of("all_reduce")[rows]]
    other_kernels = other_kernels[np.argsort(classified.launch[other_kernels], kind="stable")]
    durations = (activities.end_ns[other_kernels] - activities.start_ns[other_kernels]).tolist()
    memory_indices = [op_index for op_index, op in enumerate(program.ops) if isinstance(op, MemoryOp)]
    return ObservedRank(
        program=program,
        blocks=blocks,
        transfers=_transfers(rank, program, origin),
        memory_op_ns=dict(zip(memory_indices, durations, strict=True)) if len(memory_indices) == len(durations) else {},
        memory_total_ns=sum(durations),
        wall_ns=int(activities.end_ns[rows].max()) - origin,
    )


def _spans(rank: Rank, name: re.Pattern[str]) -> list[tuple[int, int]]:
    """Return (start, end) of the host's annotations with a matching name in the first profiled iteration, by start."""
    trace, window = rank.classified.trace, rank.window
    annotations = trace.annotations
    matching = np.flatnonzero(trace.names_that(name.fullmatch)[annotations.name])
    first, last = window.span_ns[0] if window.span_ns else (0, annotations.end_ns.max(initial=0))
    spans = sorted(zip(annotations.start_ns[matching].tolist(), annotations.end_ns[matching].tolist(), strict=True))
    return [(start, end) for start, end in spans if first <= start <= last]


def _transfers(rank: Rank, program: Program, origin: int) -> dict[int, ObservedTransfer]:
    """Match the transfers of a rank with the communication operations of its program."""
    comm_ops = [(op_index, op) for op_index, op in enumerate(program.ops) if isinstance(op, CommStart)]
    spans = _spans(rank, _SEND)
    if len(spans) != len(comm_ops):
        raise InputError(f"{rank.path}: {len(spans)} transfers, where the strategy of this version has {len(comm_ops)}")
    launches, launch = rank.classified.trace.launches.start_ns, rank.classified.launch
    splits: list[list[Split]] = [[] for _ in comm_ops]
    starts = [start for start, _ in spans]
    for split in rank.splits:
        index = int(launch[split.transfer.activity])
        position = bisect_right(starts, int(launches[index])) - 1 if index >= 0 else -1
        if split.transfer.kind in _TRANSFER_KINDS and position >= 0 and launches[index] < spans[position][1]:
            splits[position].append(split)
    if not all(splits):
        raise InputError(f"{rank.path}: a transfer was posted of which the trace shows nothing")
    return {
        op_index: _merge_splits(op, op_splits, origin)
        for (op_index, op), op_splits in zip(comm_ops, splits, strict=True)
    }


def _merge_splits(comm_op: CommStart, splits: Sequence[Split], origin: int) -> ObservedTransfer:
    """Merge a transfer's kernels or copies into one observed transfer."""
    wire_times = [split.wire_ns for split in splits]
    sent_bytes = [split.transfer.sent_bytes for split in splits]
    if comm_op.operation == "send_recv":
        sent_bytes = [message.size_bytes for split in splits for message in split.transfer.sends]
    if comm_op.operation in RINGS and sent_bytes and None not in sent_bytes:
        comm_op = msgspec.structs.replace(comm_op, messages=tuple(size for size in sent_bytes if size))
    return ObservedTransfer(
        comm_op,
        min(split.transfer.start_ns for split in splits) - origin,
        max(split.transfer.end_ns for split in splits) - origin,
        None if None in wire_times else sum(wire for wire in wire_times if wire is not None),
    )


def memory_op_bytes(program: Program) -> int:
    """Return the bytes that the kernels between blocks move."""
    return sum(op.bytes for op in program.ops if isinstance(op, MemoryOp))
