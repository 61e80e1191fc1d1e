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

from ringprof.errors import UsageError
from ringprof.iteration.baselines import BaselineTimes, measure_baselines, strategy_without_transport
from ringprof.iteration.layer import LayersShard
from ringprof.iteration.recurrence import RecurrenceResults, RecurrenceShard
from ringprof.iteration.request import RecordRequest
from ringprof.iteration.resolve import layout_options, load_any_strategy, ranks_per_host, resolve, strategy_errors
from ringprof.iteration.shard import DynamicCpShard, Measurement, Results, WorkloadShard, counted_work
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
from ringprof.ranks.process_group import GroupRanks, world_group
from ringprof.ranks.progress import PositionReporter, Reporter
from ringprof.recording.estimate import describe, estimate_of, raise_if_too_large
from ringprof.recording.measure import measure, profile_iterations
from ringprof.recording.remote_traces import TraceFile, gather_traces
from ringprof.recording.run_folder import StagingFolder, discard, publish, stage
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
        with world_group(rank_info, self.request.device, self.time_limit + 60):
            recording_class(self.request)(self, rank_info, GroupRanks(None), position).record()

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
    """Recording of one rank, in a process group that exists: of attention, as far as no subclass says otherwise."""

    task: RankTask
    rank_info: RankInfo
    ranks: GroupRanks
    """Ranks of the world."""
    reporter: PositionReporter
    """Receiver of the progress; it also learns the number of hops."""
    hosts: list[str] | None = None
    """Host name of every rank under an external launcher; None: all ranks are on this host."""
    before_publish: Callable[[], None] = lambda: None
    """Function that rank 0 calls before it publishes the run."""
    strategy: Any = None
    """Strategy of this rank; None until it is created. With dynamic CP, that of the first step."""
    shard: Any = None
    """Share of the workload on this rank, a `WorkloadShard`; None until it is created."""

    def __post_init__(self) -> None:
        self.reporter.hops = self.hops

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self.ranks.device

    @property
    def strategies(self) -> list[Any]:
        """Strategies whose hops are counted."""
        return [] if self.strategy is None else [self.strategy]

    def hops(self) -> int | None:
        """Return the number of hops begun in this iteration so far; None before there is a strategy.

        A rank that waits for the others before it posts a hop has begun it; one that hangs elsewhere has not.

        A watchdog may call this from another thread.
        """
        if self.strategy is None:
            return None
        meters = [strategy.comm.meter for strategy in self.strategies]
        return int(sum(meter.compares + sum(count for count, _ in meter.sent.values()) for meter in meters))

    def record(self) -> Run | None:
        """Record; return the written run on rank 0, None on other ranks."""
        staging = self.task.staging.path
        trace = TraceFile(staging, self.task.staging.token, self.rank_info.rank)
        try:
            results, verification, kernel = self._results(trace)
            gather_trace_files(results, trace, staging, self.ranks)
        finally:
            trace.discard()
        if self.rank_info.rank != 0:
            return None
        self.before_publish()
        run = self._run(results, verification, kernel)
        publish(staging, run, Path(self.task.request.output))
        return run

    # --- answers that depend on what is recorded ------------------------------------------------------

    def create_strategy(self) -> None:
        """Create the strategy."""
        request = self.task.request
        self.strategy = create(
            request.strategy, kernel=request.kernel, ranks_per_host=request.ranks_per_host, hops=request.hops,
            hosts=self._host_numbers(), **request.params,
        )  # fmt: skip

    def verify(self) -> Verification:
        """Verify the strategy before it is timed. Raises `VerificationError`."""
        return verify(self.strategy, self.task.request.workload, self.device)

    def create_shard(self) -> WorkloadShard:
        """Create this rank's share of the workload."""
        request = self.task.request
        return WorkloadShard.create(self.strategy, request.workload, self.device, cuda_graph=request.cuda_graph)

    def verify_timed(self, measured: Measurement, last: Results, before: Verification) -> Verification:
        """Verify ``last``, the last timed results, and add the outcome to ``before``. Raises `VerificationError`."""
        return verify_timed(self.shard, measured.first_rows, last, self.task.request.workload, before)

    # --- one way for all of them ----------------------------------------------------------------------

    def _results(self, trace: TraceFile) -> tuple[list[RankResult], Verification | None, str | None]:
        """Verify, time and profile; return every rank's result, the verification, and the kernel's name.

        The kernel's name is None if the strategy computes with kernels of its own.
        """
        request, reporter = self.task.request, self.reporter
        with strategy_errors():
            # The class is loaded first, so that the user's own modules are found.
            load_any_strategy(request.strategy)
            self.create_strategy()
            verification = None
            if request.verify:
                reporter.start("verify", 1)
                verification = self.verify()
                reporter.advance()
                if self.device.type == "cuda":
                    # The reference's tensors must not stay in the allocator while the strategy is timed.
                    torch.cuda.empty_cache()
                if request.controls:
                    # The counts of the short verification show this before the long run.
                    self._are_counted(None)
            self.shard = shard = self.create_shard()
            assert request.warmup is not None and request.iters is not None
            measured = measure(shard, request.warmup, request.iters, reporter)
            steps = shard.step_times_ns(request.iters) if isinstance(shard, DynamicCpShard) else None
            computes, sends = self._are_counted(measured.work)
            if verification is not None and measured.last is not None:
                reporter.start("verify the timed result", 1)
                verification = self.verify_timed(measured, measured.last, verification)
                reporter.advance()
            # Free these results: the baselines hold tensors of their own.
            measured.last = baselines = None
            if request.controls:
                null_strategy = strategy_without_transport(
                    request.strategy, request.kernel, request.ranks_per_host, request.params, self._host_numbers()
                )
                baselines = measure_baselines(shard, null_strategy, request.warmup, request.iters, reporter)
            profiled = profile_iterations(shard, request.profile_iters, trace.path, reporter)
            kernel = shard.kernel().name if computes else None
        reduced = reduce_file(trace.path, trace.reduced)
        # Leave out figures that are incomplete because a rank computes or sends past the counters.
        work = msgspec.structs.replace(
            measured.work, block_flops=measured.work.block_flops if computes else None,
            sent=measured.work.sent if sends else None,
        )  # fmt: skip
        host = host_name() if self.hosts is None else self.hosts[self.rank_info.rank]
        result = RankResult(
            host=host, local_rank=self.rank_info.local_rank, device=device_name(self.device),
            iterations_ns=measured.iterations_ns, steps_ns=steps,
            profiled_ns=profiled, peak_bytes=measured.peak_bytes,
            state=measured.state, links=device_links(self.device, first_on_host=self.rank_info.local_rank == 0),
            work=work, controls=baselines, **trace.described(reduced=reduced),
        )  # fmt: skip
        return self.ranks.gather_structs(result), verification, kernel

    def _run(self, results: list[RankResult], verification: Verification | None, kernel: str | None) -> Run:
        request, staging = self.task.request, self.task.staging
        run = build_run(staging.name, staging.created, request.command, results, self.device)
        # With unequal hosts, or hosts whose ranks are not contiguous, this exceeds the number that the strategy uses.
        per_host = request.ranks_per_host or max(Counter(run.topology.hosts).values())
        baselines = None
        if measured := [result.controls for result in results if result.controls is not None]:
            times = {f"{kind}_ns": [rank.times_ns[kind] for rank in measured] for kind in measured[0].times_ns}
            flops = [rank.solo_flops for rank in measured]
            baselines = Baselines(warmup=request.warmup or 0, rounds=measured[0].rounds, solo_flops=flops, **times)
        steps = [result.steps_ns or [] for result in results]
        return msgspec.structs.replace(
            run,
            workload=request.workload,
            strategy=strategy_used(self.strategy, request.strategy, request.workload, cuda_graph=request.cuda_graph),
            kernel=kernel,
            topology=msgspec.structs.replace(run.topology, ranks_per_host=per_host),
            verification=verification,
            timings=Timings(
                warmup=request.warmup or 0,
                iterations_ns=[result.iterations_ns for result in results],
                steps_ns=steps if any(steps) else None,
            ),
            controls=baselines,
        )

    def _host_numbers(self) -> list[int] | None:
        return None if self.hosts is None else host_numbers(self.hosts)

    def _recurrent_strategy(self, name: str, kernel: str) -> RecurrentStrategy:
        strategy_class: Any = load_any_strategy(name)
        comm = Communicator(
            ranks_per_host=self.task.request.ranks_per_host, hosts=self._host_numbers(),
            request=f"{strategy_class.__name__} with kernel {kernel}",
        )  # fmt: skip
        strategy: RecurrentStrategy = strategy_class(comm, kernel)
        return strategy

    def _are_counted(self, work: Work | None) -> tuple[bool, bool]:
        """Return whether the counters see the strategy's computation, and its communication, on all ranks.

        User code may compute and send past the counters. ``work`` is that of one timed iteration, whose FLOPs over all
        ranks must reach the workload's. None: take the counts so far, of which any FLOPs are enough. Collective: every
        rank must call this. Raises `UsageError` if baselines are to be measured and the counters do not see both.
        """
        request = self.task.request
        counted = work or counted_work([self.strategy])
        counts = [counted.block_flops or 0, int(counted.sent is not None)]
        counts_by_rank = self.ranks.gather_tensor(torch.tensor(counts, device=self.device))
        needed = request.workload.exact_flops() if work else 1
        computes = sum(int(rank[0]) for rank in counts_by_rank) >= needed
        sends = all(int(rank[1]) for rank in counts_by_rank)
        reason = "" if sends else "sends by ways of its own: nothing can be left unsent"
        if not computes:
            reason = "computes with kernels of its own: its blocks can be neither left out nor run alone"
        if reason and request.controls:
            raise UsageError(f"--controls: strategy {request.strategy!r} {reason} (record it without --controls)")
        return computes, sends


class RecurrenceRecording(RankRecording):
    """Recording of a recurrence."""

    def create_strategy(self) -> None:
        self.strategy = self._recurrent_strategy(self.task.request.strategy, self.task.request.kernel)

    def verify(self) -> Verification:
        return verify_recurrence(self.strategy, self.task.request.workload, self.device)

    def create_shard(self) -> WorkloadShard:
        request = self.task.request
        return RecurrenceShard.create(self.strategy, request.workload, self.device, cuda_graph=request.cuda_graph)

    def verify_timed(self, measured: Measurement, last: Results, before: Verification) -> Verification:
        assert isinstance(last, RecurrenceResults)
        return verify_timed_recurrence(self.shard, last, measured.first_rows, before)


class LayersRecording(RankRecording):
    """Recording of whole layers, with recurrences where their pattern has some."""

    recurrent: RecurrentStrategy | None = None
    """Strategy of the pattern's recurrences; None without any."""

    def create_strategy(self) -> None:
        super().create_strategy()
        if (layer := self.task.request.workload.layer) and layer.recurrent_strategy:
            self.recurrent = self._recurrent_strategy(layer.recurrent_strategy, "auto")

    def verify(self) -> Verification:
        verification = super().verify()
        for part in recurrences_of(self.task.request.workload):
            recurrence = verify_recurrence(self.recurrent, part, self.device)
            verification = join_verifications(verification, recurrence, part.operator)
        return verification

    def create_shard(self) -> WorkloadShard:
        return LayersShard.create(self.strategy, self.task.request.workload, self.device, recurrent=self.recurrent)

    def verify_timed(self, measured: Measurement, last: Results, before: Verification) -> Verification:
        return verify_timed_layers(self.shard, before, super().verify_timed(measured, last, before))


class DynamicCpRecording(RankRecording):
    """Recording of steps, each with its own number of ranks per sequence."""

    dynamic: Dynamic
    """Strategies of all sizes."""

    @property
    def strategies(self) -> list[Any]:
        return list(self.dynamic.made)

    def create_strategy(self) -> None:
        request = self.task.request
        self.dynamic = Dynamic(request.strategy, kernel=request.kernel, hops=request.hops, **request.params)
        self.strategy = self.dynamic.of(request.cp_sizes[0])

    def verify(self) -> Verification:
        request = self.task.request
        return verify_steps(self.dynamic, request.workload, request.cp_sizes, self.device)

    def create_shard(self) -> WorkloadShard:
        request = self.task.request
        return DynamicCpShard.from_dynamic(self.dynamic, request.workload, request.cp_sizes, self.device)

    def verify_timed(self, measured: Measurement, last: Results, before: Verification) -> Verification:
        return verify_timed_steps(self.shard, measured, before)


def recording_class(request: RecordRequest) -> type[RankRecording]:
    """Return the class that records a request."""
    if request.workload.recurrent:
        return RecurrenceRecording
    if request.cp_sizes:
        return DynamicCpRecording
    return RankRecording if request.workload.layer is None else LayersRecording


def gather_trace_files(results: list[RankResult], trace: TraceFile, staging: Path, ranks: GroupRanks) -> None:
    """Copy the ranks' traces and reduced traces into the first rank's folder. Collective over ``ranks``.

    Raises OSError if the first rank cannot write, after it has received all.
    """
    problems = gather_traces(trace.path, [(r.trace, r.remote_bytes) for r in results], staging, ranks)
    reduced = [(result.reduced or "", result.remote_reduced_bytes) for result in results]
    problems += gather_traces(trace.reduced, reduced, staging, ranks)
    if problems:
        raise problems[0]


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
