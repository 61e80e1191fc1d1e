"""One rank's life: check the strategy, time it, profile it, and hand the figures to rank 0, which writes the run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from ringprof.errors import UsageError
from ringprof.record.baselines import BaselineTimes, measure_baselines, silent_strategy
from ringprof.record.dynamic_cp import StepsProblem, verify_steps, verify_timed_steps
from ringprof.record.launcher import RankPlace
from ringprof.record.layer import LayersProblem
from ringprof.record.machine import device_name, driver_version, host_name, host_numbers, variables, versions
from ringprof.record.measure import Measurement, WorkloadShard, counted_work, measure, profile_iterations
from ringprof.record.process_group import gather_bytes, gather_tensor, world_group
from ringprof.record.progress import Reporter
from ringprof.record.remote_traces import TraceFile, gather_traces
from ringprof.record.request import Request, Task, from_json, to_json
from ringprof.record.resolve import load_strategy, strategy_errors
from ringprof.record.run_folder import publish, reduced_name, trace_name
from ringprof.record.telemetry import links_of
from ringprof.record.verify import verify
from ringprof.record.verify_cached import verify_cached, verify_cached_timed
from ringprof.record.verify_timed import verify_timed
from ringprof.run import (
    Baselines,
    DeviceLinks,
    DeviceState,
    Environment,
    Profiled,
    RankTrace,
    Run,
    StrategyUsed,
    Timings,
    Topology,
    Verification,
    Work,
)
from ringprof.strategies import Dynamic, create, find, names
from ringprof.strategies.base import Strategy

Reduce = Callable[[Path, Path], bool]
"""Writes the reduced form of a rank's own trace (first path) to the second; whether it could be read."""


class RankResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank tells rank 0 when its trace is complete."""

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
    """Of the trace, where it is not in the run's folder and rank 0 must be sent it."""
    reduced: str | None = None
    remote_reduced_bytes: int | None = None


@dataclass
class RankRecording:
    """One rank of a recording, with what a watchdog may ask of it."""

    task: Task
    place: RankPlace
    reporter: Reporter
    hosts: list[str] | None = None
    """Of every rank, where the launcher's answer is known; None: all are here."""
    seal: Callable[[], None] = lambda: None
    """Called on rank 0 before the run is made complete."""
    reduce: Reduce | None = None
    strategy: Any = None
    parts: Any = None
    """A `Dynamic`, where the number of ranks that attend a sequence changes."""

    def hops(self) -> int | None:
        """Hops posted in this iteration so far; None before there is a strategy."""
        if self.strategy is None:
            return None
        made = [self.strategy] if self.parts is None else self.parts.made
        return int(sum(count for one in made for count, _ in one.comm.meter.sent.values()))

    def run(self) -> Run | None:
        """Record in a process group of this rank's own making; rank 0 returns the run, which it has written."""
        request = self.task.request
        # A rank that hangs is ended by the run's time limit; the group's own must not come first.
        if request.hops != "nccl":
            # Read when CUDA starts: with few hardware queues, streams that wait would hold up others.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        with world_group(self.place, request.device, self.task.time_limit + 60) as device:
            return self.record(device)

    def record(self, device: torch.device) -> Run | None:
        """Record in the process group that there is."""
        staging = Path(self.task.staging)
        trace = TraceFile(staging, self.task.token, self.place.rank)
        try:
            results, verification, kernel = self._results(trace, device)
            gather(results, trace, staging, device)
        finally:
            trace.discard()
        if self.place.rank != 0:
            return None
        self.seal()
        run = self._run(results, verification, kernel, device)
        publish(staging, run, Path(self.task.request.output))
        return run

    def _results(
        self, trace: TraceFile, device: torch.device
    ) -> tuple[list[RankResult], Verification | None, str | None]:
        """Every rank's result, with what is alike on all."""
        request = self.task.request
        with strategy_errors():
            self.parts = self._parts()
            self.strategy = self._create() if self.parts is None else self.parts.of(request.cp_sizes[0])
            verification = self._verify(device)
            if verification is not None and request.controls:
                # Told by the few blocks of that check, before the many.
                computes, sends = self._counted(None, device)
                self._refuse_controls(computes=computes, sends=sends)
            problem = self._problem(device)
            measured = self._timed(problem, device)
            steps = problem.step_times_ns(request.iters or 0) if isinstance(problem, StepsProblem) else None
            computes, sends = self._counted(measured.work, device)
            if request.controls:
                self._refuse_controls(computes=computes, sends=sends)
            verification = self._verify_timed(problem, measured, verification)
            # The controls hold tensors of their own, until they are done.
            measured.last = None
            controlled = self._control(problem, device) if request.controls else None
            profiled = profile_iterations(problem, device, request.profile_iters, trace.path, self.reporter)
            kernel = problem.kernel().name if computes else None
        reduced = self.reduce is not None and self.reduce(trace.path, trace.reduced)
        host = host_name() if self.hosts is None else self.hosts[self.place.rank]
        result = RankResult(
            host=host, local_rank=self.place.local_rank, device=device_name(device), trace=trace_name(self.place.rank),
            iterations_ns=measured.iterations_ns, steps_ns=steps, profiled_ns=profiled, peak_bytes=measured.peak_bytes,
            state=measured.state, links=links_of(device, first_on_host=self.place.local_rank == 0),
            work=_as_far_as_counted(measured.work, computes=computes, sends=sends), controls=controlled,
            trace_bytes=trace.size_bytes, remote_bytes=trace.remote_bytes(),
            reduced=reduced_name(self.place.rank) if reduced else None,
            remote_reduced_bytes=trace.remote_reduced_bytes(),
        )  # fmt: skip
        return exchange(result, device), verification, kernel

    def _run(
        self, results: list[RankResult], verification: Verification | None, kernel: str | None, device: torch.device
    ) -> Run:
        request = self.task.request
        run = assemble(self.task.name, self.task.created, request.command, results, device)
        # Hosts of unequal size, or whose ranks are not neighbours, are more than the strategy can make use of.
        per_host = request.ranks_per_host or max(Counter(run.topology.hosts).values())
        return msgspec.structs.replace(
            run,
            workload=request.workload,
            strategy=strategy_used(self.strategy, request.strategy, cuda_graph=request.cuda_graph),
            kernel=kernel,
            topology=msgspec.structs.replace(run.topology, ranks_per_host=per_host),
            verification=verification,
            timings=Timings(
                warmup=request.warmup or 0,
                iterations_ns=[r.iterations_ns for r in results],
                steps_ns=[r.steps_ns or [] for r in results] if self.parts is not None else None,
            ),
            controls=_controls(request, [r.controls for r in results if r.controls is not None]),
        )

    def _problem(self, device: torch.device) -> WorkloadShard:
        request = self.task.request
        if self.parts is not None:
            return StepsProblem.over(self.parts, request.workload, request.cp_sizes, device)
        kind = WorkloadShard if request.workload.layer is None else LayersProblem
        return kind.of(self.strategy, request.workload, device, cuda_graph=request.cuda_graph)

    def _parts(self) -> Any:
        """The strategy over parts of the ranks; None where all of them attend every sequence."""
        request = self.task.request
        load_strategy(request.strategy)
        if not request.cp_sizes:
            return None
        return Dynamic(request.strategy, kernel=request.kernel, hops=request.hops, **request.params)

    def _create(self) -> Any:
        """The strategy on this rank; the class is loaded first, so that the user's own modules are found."""
        request = self.task.request
        load_strategy(request.strategy)
        return create(
            request.strategy, kernel=request.kernel, ranks_per_host=request.ranks_per_host, hops=request.hops,
            hosts=None if self.hosts is None else host_numbers(self.hosts), **request.params,
        )  # fmt: skip

    def _verify(self, device: torch.device) -> Verification | None:
        if not self.task.request.verify:
            return None
        self.reporter.start("verify", 1)
        request = self.task.request
        if self.parts is not None:
            verification = verify_steps(self.parts, request.workload, request.cp_sizes, device)
        else:
            check = verify if request.workload.phase == "training" else verify_cached
            verification = check(self.strategy, request.workload, device)
        self.reporter.advance()
        if device.type == "cuda":
            # The reference's tensors must not stay in the allocator while the strategy is timed.
            torch.cuda.empty_cache()
        return verification

    def _timed(self, problem: WorkloadShard, device: torch.device) -> Measurement:
        request = self.task.request
        assert request.warmup is not None and request.iters is not None
        return measure(problem, device, request.warmup, request.iters, self.reporter)

    def _verify_timed(
        self, problem: WorkloadShard, measured: Measurement, before: Verification | None
    ) -> Verification | None:
        if before is None or measured.last is None:
            return None
        self.reporter.start("verify the timed result", 1)
        workload = self.task.request.workload
        if isinstance(problem, StepsProblem):
            verification = verify_timed_steps(problem, measured, before)
        else:
            check = verify_timed if workload.phase == "training" else verify_cached_timed
            verification = check(problem, measured.first_rows, measured.last, workload, before)
        self.reporter.advance()
        return verification

    def _counted(self, work: Work | None, device: torch.device) -> tuple[bool, bool]:
        """Whether the strategy computes with the kernels that count, and sends by the ways that count, on all ranks.

        Other people's code may do neither. ``work`` is that of one timed iteration, and must add up to the whole
        problem's; None: what was counted so far, of another problem. Collective.
        """
        so_far = work or counted_work([self.strategy])
        counts = [so_far.block_flops or 0, int(so_far.sent is not None)]
        found = gather_tensor(torch.tensor(counts, device=device))
        needed = self.task.request.workload.exact_flops() if work else 1
        return sum(int(rank[0]) for rank in found) >= needed, all(int(rank[1]) for rank in found)

    def _refuse_controls(self, *, computes: bool, sends: bool) -> None:
        name = self.task.request.strategy
        past = "" if computes else "computes with kernels of its own: its blocks can be neither left out nor run alone"
        past = past or ("" if sends else "sends by ways of its own: nothing can be left unsent")
        if past:
            raise UsageError(f"--controls: strategy {name!r} {past} (record it without --controls)")

    def _control(self, problem: WorkloadShard, device: torch.device) -> BaselineTimes:
        request = self.task.request
        assert request.warmup is not None and request.iters is not None
        hosts = None if self.hosts is None else host_numbers(self.hosts)
        silent = silent_strategy(request.strategy, request.kernel, request.ranks_per_host, request.params, hosts)
        return measure_baselines(problem, silent, device, request.warmup, request.iters, self.reporter)


def _as_far_as_counted(work: Work, *, computes: bool, sends: bool) -> Work:
    """The same on all ranks: None where one of them does something past the counters."""
    return msgspec.structs.replace(
        work, block_flops=work.block_flops if computes else None, sent=work.sent if sends else None
    )


def gather(
    results: list[RankResult], trace: TraceFile, staging: Path, device: torch.device, group: Any = None
) -> None:  # fmt: skip
    """Bring to the first rank's folder what lies elsewhere of the ranks' traces. Collective over ``group``."""
    remote = [(result.trace, result.remote_bytes) for result in results]
    reduced = [(result.reduced or "", result.remote_reduced_bytes) for result in results]
    try:
        gather_traces(trace.path, remote, staging, device, group)
    except OSError:
        # The ranks that send must not wait for one whose disk is full.
        gather_traces(trace.reduced, reduced, staging, device, group)
        raise
    gather_traces(trace.reduced, reduced, staging, device, group)


def exchange(result: RankResult, device: torch.device, group: Any = None) -> list[RankResult]:
    """Every rank's result, in rank order. A rank calls this when its trace is complete: that is what it says."""
    return [from_json(part, RankResult) for part in gather_bytes(to_json(result), device, group)]


def assemble(name: str, created: str, command: list[str], results: list[RankResult], device: torch.device) -> Run:
    """The run as far as the ranks' results and this machine tell it."""
    peaks = [result.peak_bytes for result in results if result.peak_bytes is not None]
    states, links = [result.state for result in results], [result.links for result in results]
    works = [result.work for result in results if result.work is not None]
    profiled = [result.profiled_ns for result in results]
    return Run(
        name=name,
        created=created,
        command=command,
        workload=None,
        topology=Topology(
            world_size=len(results),
            hosts=[result.host for result in results],
            local_ranks=[result.local_rank for result in results],
            ranks_per_host=1 + max(result.local_rank for result in results),
            device_type=device.type,
            backend="nccl" if device.type == "cuda" else "gloo",
        ),
        strategy=None,
        kernel=None,
        environment=Environment(
            devices=[result.device for result in results],
            driver=driver_version(device),
            versions=versions(device),
            variables=variables(),
        ),
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


def _controls(request: Request, ranks: list[BaselineTimes]) -> Baselines | None:
    """All ranks' controls; None where none were measured."""
    if not ranks:
        return None
    times = {f"{kind}_ns": [rank.times_ns[kind] for rank in ranks] for kind in ranks[0].times_ns}
    flops = [rank.solo_flops for rank in ranks]
    return Baselines(warmup=request.warmup or 0, rounds=ranks[0].rounds, solo_flops=flops, **times)


def strategy_used(strategy: Strategy, name: str = "", *, cuda_graph: bool = False) -> StrategyUsed:
    """What a strategy is and ran with; ``name`` as the user gave it."""
    target = f"{type(strategy).__module__}:{type(strategy).__name__}"
    bundled = (spec.name for spec in map(find, names()) if spec.target == target)
    return StrategyUsed(
        name=name or next(bundled, target),
        target=find(name).target if name else target,
        params=dict(strategy.parameters),
        layout=strategy.layout.name,
        hops=strategy.comm.carried_by,
        cuda_graph=cuda_graph,
    )
