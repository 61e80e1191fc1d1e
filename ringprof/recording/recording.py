"""Recording of one rank: verify, time and profile the strategy; send the results to rank 0, which writes the run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import torch

from ringprof.common.json_object import from_json, to_json
from ringprof.errors import UsageError
from ringprof.iteration.baselines import BaselineTimes, measure_baselines, strategy_without_transport
from ringprof.iteration.dynamic_cp import DynamicCpShard
from ringprof.iteration.layer import LayersShard
from ringprof.iteration.recurrence import RecurrenceShard
from ringprof.iteration.request import RecordRequest
from ringprof.iteration.resolve import layout_options, load_any_strategy, ranks_per_host, resolve, strategy_errors
from ringprof.iteration.shard import Measurement, WorkloadShard, counted_work
from ringprof.proof.verify import verify
from ringprof.proof.verify_recurrence import (
    join_verifications,
    recurrences_of,
    verify_recurrence,
    verify_timed_layers,
    verify_timed_recurrence,
)
from ringprof.proof.verify_timed import verify_steps, verify_timed, verify_timed_steps
from ringprof.ranks.launcher import RankInfo
from ringprof.ranks.machine import device_name, environment_of, host_name, host_numbers
from ringprof.ranks.process_group import gather_bytes, gather_tensor, world_group
from ringprof.ranks.progress import PositionReporter, Reporter
from ringprof.recording.estimate import describe, estimate_of, raise_if_too_large
from ringprof.recording.measure import measure, profile_iterations
from ringprof.recording.remote_traces import TraceFile, gather_traces
from ringprof.recording.run_folder import StagingFolder, discard, publish, reduced_name, stage, trace_name
from ringprof.recording.telemetry import device_links
from ringprof.run import (
    Baselines,
    DeviceLinks,
    DeviceState,
    Profiled,
    RankTrace,
    Run,
    StrategyUsed,
    Timings,
    Topology,
    Verification,
    Work,
    read_run,
)
from ringprof.strategies import Dynamic, create, find, for_recurrences, names
from ringprof.strategies.base import Strategy
from ringprof.strategies.recurrent.state_strategies import RecurrentStrategy
from ringprof.strategies.transport.communicator import Communicator
from ringprof.trace.reduced import reduce_file
from ringprof.workload.workload import Workload


class RankTask(msgspec.Struct, frozen=True, kw_only=True):
    """Task of the ranks of a recording: a resolved request, and the folder that the ranks write to."""

    job: ClassVar[str] = "record"
    request: RecordRequest
    staging: StagingFolder
    time_limit: float
    """Time limit of the whole recording, in seconds."""

    @classmethod
    def prepare(cls, request: RecordRequest, reporter: Reporter, rank_info: RankInfo | None = None) -> RankTask:
        """Resolve the request, report the plan, refuse a run that is too large, and create its staging folder.

        ``rank_info`` is the rank as which a launcher started this process, if any. Raises `UsageError`.
        """
        request = resolve(request, rank_info)
        estimate = estimate_of(request, ranks_per_host(request, rank_info))
        for line in describe(request, estimate):
            reporter.say(line)
        raise_if_too_large(request, estimate)
        output = Path(request.output).absolute()
        label = f"{request.strategy}-{request.workload.kv_length or request.workload.seq}"
        return cls(
            request=msgspec.structs.replace(request, output=str(output)),
            staging=stage(output, label, request.world or 1),
            time_limit=request.time_limit or estimate.time_limit,
        )

    def limit_of(self, phase: str | None) -> float | None:
        """Return the time limit in seconds for the phase None, before the first, and None for later ones.

        A recording has a single limit, which starts with the ranks.
        """
        return self.time_limit if phase is None else None

    def run(self, rank_info: RankInfo, position: PositionReporter, _: Path) -> None:
        """Record as one rank that ringprof started, in a process group that this method opens."""
        if self.request.hops != "nccl":
            # CUDA reads this when it starts: with few hardware queues, streams that wait would block others.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        # The run's time limit ends a rank that hangs; the timeout of the group must not come first.
        with world_group(rank_info, self.request.device, self.time_limit + 60) as device:
            RankRecording(self, rank_info, device, position).record()

    def result(self, _: Path) -> Run:
        """Read the run that rank 0 has published."""
        return read_run(self.request.output)

    def discard(self) -> None:
        """Remove the half-written run."""
        discard(self.staging.path)


class RankResult(msgspec.Struct, frozen=True, kw_only=True):
    """Results that one rank sends to rank 0 when its trace is complete."""

    host: str
    local_rank: int
    device: str
    trace: str
    iterations_ns: list[int] = []
    steps_ns: list[int] | None = None
    profiled_ns: list[int] = []
    peak_bytes: int | None = None
    state: DeviceState | None = None
    links: DeviceLinks | None = None
    work: Work | None = None
    controls: BaselineTimes | None = None
    trace_bytes: int | None = None
    remote_bytes: int | None = None
    """Size of the trace if it must be sent to rank 0; None if it is in the run's folder."""
    reduced: str | None = None
    """File name of the reduced trace; None if there is none."""
    remote_reduced_bytes: int | None = None
    """Size of the reduced trace if it must be sent to rank 0."""


@dataclass
class RankRecording:
    """Recording of one rank, in a process group that exists."""

    task: RankTask
    rank_info: RankInfo
    device: torch.device
    reporter: PositionReporter
    """Receiver of the progress; it also learns the number of hops."""
    hosts: list[str] | None = None
    """Host name of every rank under an external launcher; None: all ranks are on this host."""
    before_publish: Callable[[], None] = lambda: None
    """Function that rank 0 calls before it publishes the run."""
    strategy: Any = None
    """Strategy of this rank; None until it is created. With dynamic CP, that of the first step."""
    recurrent: Any = None
    """Strategy of a pattern's recurrences; None without a pattern."""
    dynamic: Any = None
    """Strategies of all sizes, a `Dynamic`, if the number of ranks per sequence changes; else None."""

    def __post_init__(self) -> None:
        self.reporter.hops = self.hops

    def hops(self) -> int | None:
        """Return the number of hops begun in this iteration so far; None before there is a strategy.

        A rank that waits for the others before it posts a hop has begun it; one that hangs elsewhere has not.

        A watchdog may call this from another thread.
        """
        if self.strategy is None:
            return None
        strategies = [self.strategy] if self.dynamic is None else self.dynamic.made
        meters = [strategy.comm.meter for strategy in strategies]
        return int(sum(meter.compares + sum(count for count, _ in meter.sent.values()) for meter in meters))

    def record(self) -> Run | None:
        """Record; return the written run on rank 0, None on other ranks."""
        staging = self.task.staging.path
        trace = TraceFile(staging, self.task.staging.token, self.rank_info.rank)
        try:
            results, verification, kernel = self._results(trace)
            gather_trace_files(results, trace, staging, self.device)
        finally:
            trace.discard()
        if self.rank_info.rank != 0:
            return None
        self.before_publish()
        run = self._run(results, verification, kernel)
        publish(staging, run, Path(self.task.request.output))
        return run

    def _results(self, trace: TraceFile) -> tuple[list[RankResult], Verification | None, str | None]:
        """Verify, time and profile; return every rank's result, the verification, and the kernel's name.

        The kernel's name is None if the strategy computes with kernels of its own.
        """
        request, device = self.task.request, self.device
        with strategy_errors():
            # The class is loaded first, so that the user's own modules are found.
            strategy_class: Any = load_any_strategy(request.strategy)
            if request.workload.recurrent:
                self.strategy = self._recurrent_strategy(strategy_class, request.kernel)
            elif request.cp_sizes:
                self.dynamic = Dynamic(request.strategy, kernel=request.kernel, hops=request.hops, **request.params)
                self.strategy = self.dynamic.of(request.cp_sizes[0])
            else:
                self.strategy = create(
                    request.strategy, kernel=request.kernel, ranks_per_host=request.ranks_per_host, hops=request.hops,
                    hosts=self._host_numbers(), **request.params,
                )  # fmt: skip
                if (layer := request.workload.layer) and layer.recurrent_strategy:
                    recurrent_class: Any = load_any_strategy(layer.recurrent_strategy)
                    self.recurrent = self._recurrent_strategy(recurrent_class, "auto")
            verification = self._verify()
            if verification is not None and request.controls:
                # The counts of the short verification show this before the long run.
                computes, sends = self._are_counted(None)
                self._refuse_baselines(computes=computes, sends=sends)
            shard = self._create_shard()
            assert request.warmup is not None and request.iters is not None
            measured = measure(shard, device, request.warmup, request.iters, self.reporter)
            steps = shard.step_times_ns(request.iters) if isinstance(shard, DynamicCpShard) else None
            computes, sends = self._are_counted(measured.work)
            if request.controls:
                self._refuse_baselines(computes=computes, sends=sends)
            verification = self._verify_timed(shard, measured, verification)
            # Free these results: the baselines hold tensors of their own.
            measured.last = None
            baselines = self._measure_baselines(shard) if request.controls else None
            profiled = profile_iterations(shard, device, request.profile_iters, trace.path, self.reporter)
            kernel = shard.kernel().name if computes else None
        reduced = reduce_file(trace.path, trace.reduced)
        # Leave out figures that are incomplete because a rank computes or sends past the counters.
        work = msgspec.structs.replace(
            measured.work, block_flops=measured.work.block_flops if computes else None,
            sent=measured.work.sent if sends else None,
        )  # fmt: skip
        host = host_name() if self.hosts is None else self.hosts[self.rank_info.rank]
        result = RankResult(
            host=host, local_rank=self.rank_info.local_rank, device=device_name(device),
            trace=trace_name(self.rank_info.rank), iterations_ns=measured.iterations_ns, steps_ns=steps,
            profiled_ns=profiled, peak_bytes=measured.peak_bytes,
            state=measured.state, links=device_links(device, first_on_host=self.rank_info.local_rank == 0),
            work=work, controls=baselines,
            trace_bytes=trace.size_bytes, remote_bytes=trace.remote_bytes(),
            reduced=reduced_name(self.rank_info.rank) if reduced else None,
            remote_reduced_bytes=trace.remote_reduced_bytes(),
        )  # fmt: skip
        return gather_results(result, device), verification, kernel

    def _run(self, results: list[RankResult], verification: Verification | None, kernel: str | None) -> Run:
        request, staging = self.task.request, self.task.staging
        run = build_run(staging.name, staging.created, request.command, results, self.device)
        # With unequal hosts, or hosts whose ranks are not contiguous, this exceeds the number that the strategy uses.
        per_host = request.ranks_per_host or max(Counter(run.topology.hosts).values())
        return msgspec.structs.replace(
            run,
            workload=request.workload,
            strategy=strategy_used(self.strategy, request.strategy, request.workload, cuda_graph=request.cuda_graph),
            kernel=kernel,
            topology=msgspec.structs.replace(run.topology, ranks_per_host=per_host),
            verification=verification,
            timings=Timings(
                warmup=request.warmup or 0,
                iterations_ns=[r.iterations_ns for r in results],
                steps_ns=[r.steps_ns or [] for r in results] if self.dynamic is not None else None,
            ),
            controls=_baselines_of_run(request, [r.controls for r in results if r.controls is not None]),
        )

    def _recurrent_strategy(self, strategy_class: type[RecurrentStrategy], kernel: str) -> RecurrentStrategy:
        comm = Communicator(
            ranks_per_host=self.task.request.ranks_per_host, hosts=self._host_numbers(),
            request=f"{strategy_class.__name__} with kernel {kernel}",
        )  # fmt: skip
        return strategy_class(comm, kernel)

    def _create_shard(self) -> WorkloadShard:
        request, device = self.task.request, self.device
        if request.workload.layer is not None:
            return LayersShard.create(self.strategy, request.workload, device, recurrent=self.recurrent)
        if self.dynamic is not None:
            return DynamicCpShard.from_dynamic(self.dynamic, request.workload, request.cp_sizes, device)
        kind: type[WorkloadShard] = RecurrenceShard if request.workload.recurrent else WorkloadShard
        return kind.create(self.strategy, request.workload, device, cuda_graph=request.cuda_graph)

    def _host_numbers(self) -> list[int] | None:
        return None if self.hosts is None else host_numbers(self.hosts)

    def _verify(self) -> Verification | None:
        if not self.task.request.verify:
            return None
        self.reporter.start("verify", 1)
        request, device = self.task.request, self.device
        if self.dynamic is not None:
            verification = verify_steps(self.dynamic, request.workload, request.cp_sizes, device)
        elif request.workload.recurrent:
            verification = verify_recurrence(self.strategy, request.workload, device)
        else:
            verification = verify(self.strategy, request.workload, device)
            for part in recurrences_of(request.workload):
                verification = join_verifications(
                    verification, verify_recurrence(self.recurrent, part, device), part.operator
                )
        self.reporter.advance()
        if device.type == "cuda":
            # The reference's tensors must not stay in the allocator while the strategy is timed.
            torch.cuda.empty_cache()
        return verification

    def _verify_timed(
        self, shard: WorkloadShard, measured: Measurement, before: Verification | None
    ) -> Verification | None:
        if before is None or measured.last is None:
            return None
        self.reporter.start("verify the timed result", 1)
        workload = self.task.request.workload
        if isinstance(shard, DynamicCpShard):
            verification = verify_timed_steps(shard, measured, before)
        elif isinstance(shard, RecurrenceShard):
            last: Any = measured.last
            verification = verify_timed_recurrence(shard, last, measured.first_rows, before)
        else:
            verification = verify_timed(shard, measured.first_rows, measured.last, workload, before)
            if isinstance(shard, LayersShard):
                verification = verify_timed_layers(shard, before, verification)
        self.reporter.advance()
        return verification

    def _are_counted(self, work: Work | None) -> tuple[bool, bool]:
        """Return whether the counters see the strategy's computation, and its communication, on all ranks.

        User code may compute and send past the counters. ``work`` is that of one timed iteration, whose FLOPs over all
        ranks must reach the workload's. None: take the counts so far, of which any FLOPs are enough. Collective: every
        rank must call this.
        """
        counted = work or counted_work([self.strategy])
        counts = [counted.block_flops or 0, int(counted.sent is not None)]
        counts_by_rank = gather_tensor(torch.tensor(counts, device=self.device))
        needed = self.task.request.workload.exact_flops() if work else 1
        return sum(int(rank[0]) for rank in counts_by_rank) >= needed, all(int(rank[1]) for rank in counts_by_rank)

    def _refuse_baselines(self, *, computes: bool, sends: bool) -> None:
        """Raise `UsageError` if the counters do not see the strategy's computation or communication."""
        name = self.task.request.strategy
        reason = (
            "" if computes else "computes with kernels of its own: its blocks can be neither left out nor run alone"
        )
        reason = reason or ("" if sends else "sends by ways of its own: nothing can be left unsent")
        if reason:
            raise UsageError(f"--controls: strategy {name!r} {reason} (record it without --controls)")

    def _measure_baselines(self, shard: WorkloadShard) -> BaselineTimes:
        request = self.task.request
        assert request.warmup is not None and request.iters is not None
        null_strategy = strategy_without_transport(
            request.strategy, request.kernel, request.ranks_per_host, request.params, self._host_numbers()
        )
        return measure_baselines(shard, null_strategy, self.device, request.warmup, request.iters, self.reporter)


def gather_trace_files(
    results: list[RankResult], trace: TraceFile, staging: Path, device: torch.device, group: Any = None
) -> None:  # fmt: skip
    """Copy the ranks' traces and reduced traces into the first rank's folder. Collective over ``group``."""
    remote = [(result.trace, result.remote_bytes) for result in results]
    reduced = [(result.reduced or "", result.remote_reduced_bytes) for result in results]
    try:
        gather_traces(trace.path, remote, staging, device, group)
    except OSError:
        # The sending ranks must not wait for a first rank whose disk is full.
        gather_traces(trace.reduced, reduced, staging, device, group)
        raise
    gather_traces(trace.reduced, reduced, staging, device, group)


def gather_results(result: RankResult, device: torch.device, group: Any = None) -> list[RankResult]:
    """Gather every rank's result, in rank order. A rank must call this only when its trace is complete."""
    return [from_json(part, RankResult) for part in gather_bytes(to_json(result), device, group)]


def build_run(name: str, created: str, command: list[str], results: list[RankResult], device: torch.device) -> Run:
    """Build a run from the ranks' results and this machine's environment; it has no workload and no strategy yet."""
    peaks = [result.peak_bytes for result in results if result.peak_bytes is not None]
    states, links = [result.state for result in results], [result.links for result in results]
    works = [result.work for result in results if result.work is not None]
    profiled = [result.profiled_ns for result in results]
    hosts = [result.host for result in results]
    # A group's local ranks need not start at 0, and hosts that are emulated share a name: neither count alone is right.
    ranks_per_host = min(1 + max(result.local_rank for result in results), max(Counter(hosts).values()))
    return Run(
        name=name,
        created=created,
        command=command,
        workload=None,
        topology=Topology(
            world_size=len(results),
            hosts=hosts,
            local_ranks=[result.local_rank for result in results],
            ranks_per_host=ranks_per_host,
            device_type=device.type,
            backend="nccl" if device.type == "cuda" else "gloo",
        ),
        strategy=None,
        kernel=None,
        environment=environment_of(device, [result.device for result in results]),
        profiled=Profiled(iterations_ns=profiled) if all(profiled) else None,
        peak_memory_bytes=peaks if len(peaks) == len(results) else None,
        device_states=states if any(states) else None,
        device_links=links if any(links) else None,
        work=works if len(works) == len(results) else None,
        traces=[
            RankTrace(rank=rank, path=result.trace, reduced=result.reduced, size_bytes=result.trace_bytes)
            for rank, result in enumerate(results)
        ],
    )


def _baselines_of_run(request: RecordRequest, ranks: list[BaselineTimes]) -> Baselines | None:
    """Build the run's baselines from those of all ranks; None if none were measured."""
    if not ranks:
        return None
    times = {f"{kind}_ns": [rank.times_ns[kind] for rank in ranks] for kind in ranks[0].times_ns}
    flops = [rank.solo_flops for rank in ranks]
    return Baselines(warmup=request.warmup or 0, rounds=ranks[0].rounds, solo_flops=flops, **times)


def strategy_used(
    strategy: Strategy | RecurrentStrategy,
    name: str = "",
    workload: Workload | None = None,
    *,
    cuda_graph: bool = False,
) -> StrategyUsed:
    """Describe a strategy and its parameters for the run; ``name`` is the one that the user gave, or empty.

    The layout is that of the ``workload``'s documents, if it has some.
    """
    target = f"{type(strategy).__module__}:{type(strategy).__name__}"
    bundled = (spec.name for spec in map(find, (*names(), *for_recurrences())) if spec.target == target)
    return StrategyUsed(
        name=name or next(bundled, target),
        target=find(name).target if name else target,
        params=dict(strategy.parameters),
        layout=(strategy.layout_of(**layout_options(workload)) if workload else strategy.layout).name,
        hops=strategy.comm.hop_transport,
        cuda_graph=cuda_graph,
    )
