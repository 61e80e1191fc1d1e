"""Profiling of a block of a user's own program, on every rank that runs it. Loads torch.

Wrong arguments raise before the block starts. Nothing else raises, unless the caller asks for it: what prevents a
recording is a warning of the logger ``ringprof.capture`` (a line on stderr unless the program handles it), and no run
is written.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from torch import nn
from torch.profiler import record_function

from ringprof.analysis.workload_checks import workload_problems
from ringprof.common.scratch import lock, remove_abandoned, unlock
from ringprof.common.validation import whole
from ringprof.errors import UsageError
from ringprof.iteration.layer_ranges import named_layers
from ringprof.iteration.shard import ITERATION, counted_work, profiler, profiler_is_busy, reset_counts
from ringprof.ranks.launcher import launcher_rank
from ringprof.ranks.machine import RankHost, device_name, distinct_host_names, host_name
from ringprof.ranks.process_group import GroupRanks, one_line
from ringprof.recording.recording import RankResult, build_run, gather_trace_files, strategy_used
from ringprof.recording.remote_traces import TraceFile
from ringprof.recording.run_folder import RUN_FILE, discard
from ringprof.run import Run, write_run
from ringprof.trace.reduced import reduce_file
from ringprof.workload.workload import Workload

_log = logging.getLogger("ringprof.capture")


@contextmanager
def capture(
    folder: str | os.PathLike[str],
    workload: Workload | None = None,
    *,
    name: str | None = None,
    group: Any = None,
    strategy: Any = None,
    model: nn.Module | None = None,
    record_shapes: bool = False,
    strict: bool = False,
) -> Iterator[None]:
    """Profile the block on every rank and write a run into ``folder``, or beside it where that is not empty.

    Works inside a program started by torchrun, or in a single process. An existing process group is used and left
    unchanged; none is created. All ranks of ``group`` must enter, others must not. ``group`` is a process group or a
    DeviceMesh of one dimension; None is the world. The ranks start together behind a barrier. At the end of the block
    they wait for the device. When the context closes, ``folder`` holds one compressed trace per rank and ``run.json``.
    A rank that does not see that folder sends its trace to the group's first rank. If several groups of one job capture
    into the same ``folder``, each writes its run into a subfolder, such as ``folder/ranks2-3``.

    ``workload`` is what the ranks of one context-parallel group compute in the block, ``layers`` and ``steps``
    included. With it a report has FLOPs and TFLOP/s, from the time under the profiler. ``strategy`` is one
    strategy, or a list of several where layers have their own. It adds the kernel, the work that it counted, the bytes
    that it sent, and the size of the context-parallel group. With data parallelism each such group computes a workload
    of its own. A capture has no verification and no timings without the profiler.
    ``model`` has the calls of its layers, which are the members of its ``ModuleList``, named in the trace, so that a
    report tells which layer's communication is exposed.
    ``record_shapes`` makes the profiler record the shapes of operators. From them a report computes the rates of
    attention and matrix products and the MFU. Recording shapes slows down the CPU.

    Run one warm-up step before the block, because the first step sets up communicators.

    A capture does not end the program: the logger ``ringprof.capture`` warns in one line. Where ``folder`` is not
    empty, the run is written into ``folder-2``, or the next number that is free, on all ranks. Where nothing can be
    written there, a rank has another active profiler, a rank is missing or recording fails, the block runs and no run
    is written. Torch has one profiler per process; one that only warms up cannot be detected, and two may end the
    process. An error in the block propagates and leaves no run behind.

    Raises `UsageError` before the block for wrong arguments and on a rank outside ``group``; with ``strict``, also if
    the folder is not empty or cannot be written, or a rank has another active profiler.
    """
    if workload is not None and not isinstance(workload, Workload):
        raise UsageError(f"workload is a ringprof.Workload, not {workload!r}")
    if model is not None and not isinstance(model, nn.Module):
        raise UsageError(f"model is a torch.nn.Module, not {model!r}")
    recorder = _Recorder(
        Path(folder).absolute(), name, workload, _as_list(strategy), GroupRanks(group), names_group=group is not None,
        record_shapes=record_shapes, strict=strict,
    )  # fmt: skip
    try:
        recorder.open()
        recorder.start()
        try:
            with named_layers(model), record_function(ITERATION):
                yield
        except BaseException as error:
            recorder.abandon(error)
            raise
        recorder.finish()
    finally:
        recorder.close()


_PROFILER_IS_BUSY = (
    "rank {} has a profiler at work already (torch.profiler, or another capture): end it, there can be but one"
)
_MOST_FOLDERS = 1000
_RANK_IS_MISSING = "another rank has ended, or is not here: all of the group must enter (see group=)"


class _Opening(msgspec.Struct, frozen=True):
    """Message of a rank to the others before the block: why there can be no run, if so, and the folder's token."""

    refusal: str = ""
    token: str = ""
    target: str = ""
    """Folder that the first rank has chosen."""


class _Outcome(msgspec.Struct, frozen=True):
    """Message of a rank to the others after the block."""

    problem: str = ""
    """Reason why the rank has no trace; empty if it has one."""
    result: RankResult | None = None
    """Result of the rank, whose host name may still be that of another host, too."""
    node: int = 0
    """Number that the launcher gave the rank's host."""
    strategy_ranks: int | None = None
    """Number of ranks of the strategies' group; 0 for groups of several sizes, None without a strategy."""


@dataclass
class _Recorder:
    """Capture of one rank, with the arguments of `capture`. After `open` no method raises an `Exception`."""

    folder: Path
    name: str | None
    workload: Workload | None
    strategies: Sequence[Any]
    ranks: GroupRanks
    names_group: bool
    """Whether the caller named the ranks that share the workload, as ``group``."""
    record_shapes: bool
    strict: bool
    """Whether what prevents a recording raises before the block."""

    def __post_init__(self) -> None:
        self._created = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        self._target = self.folder
        self._owns_staging = False
        self._token, self._problem = "", ""
        self._disconnected = False
        """Whether another rank did not answer. Then this rank communicates no more."""
        self._profiling = ExitStack()
        self._profiler: Any = None
        self._trace: TraceFile | None = None
        self._start_ns = 0

    # --- before the block -----------------------------------------------------------------------------

    def open(self) -> None:
        """Create the staging folder of the run. Where any rank refuses and it is strict, raises `UsageError` on all."""
        message = _Opening(_PROFILER_IS_BUSY.format(self.ranks.number)) if profiler_is_busy() else _Opening()
        if self.ranks.rank == 0 and not message.refusal:
            first = self._target
            for number in range(2, _MOST_FOLDERS):
                if self.strict or not _holds_something(self._run_folder()):
                    break
                self._target = first.with_name(f"{first.name}-{number}")
            message = _create_staging(self._target, self._run_folder(), self._staging)
            self._owns_staging = not message.refusal
            if self._owns_staging and self._target != first:
                self._warn(f"not empty: the run is written to {self._target}")
        try:
            messages = self.ranks.gather_structs(message)
        except RuntimeError as error:
            self._give_up(error)
            return
        refusals = [answer.refusal for answer in messages if answer.refusal]
        if refusals and self.strict:
            raise UsageError(refusals[0])
        if refusals:
            self._disconnected = True
            if self.ranks.rank == 0:
                self._warn(f"no run: {refusals[0]}")
            return
        self._token, self._target = messages[0].token, Path(messages[0].target)

    def start(self) -> None:
        """Start the profiler, together with the other ranks."""
        if self._disconnected:
            return
        with self._error_kept():
            reset_counts(self.strategies)
            self._trace = TraceFile(self._staging, self._token, self.ranks.number)
            self._profiler = self._profiling.enter_context(profiler(record_shapes=self.record_shapes))
            self.ranks.finish()
            self._profiler.step()
        self._wait()
        with self._error_kept():
            self.ranks.finish()
        self._start_ns = time.perf_counter_ns()

    # --- after the block ------------------------------------------------------------------------------

    def abandon(self, error: BaseException) -> None:
        """Tell the other ranks, without waiting for them, that the program raised ``error`` in the block."""
        self.ranks.announce_exit(self._token, error)

    def finish(self) -> None:
        """Write this rank's trace and, on the first rank, the run."""
        if self._disconnected:
            return
        outcome = self._outcome()
        try:
            outcomes = self.ranks.gather_structs(outcome)
            self._write(outcomes)
        except RuntimeError as error:
            self._give_up(error)
        except Exception as error:  # a failed capture must not end the job
            self._warn(f"no run: {one_line(error)}")
        self._wait()

    def close(self) -> None:
        """Stop the profiler and remove files that belong to no complete run."""
        with suppress(Exception):
            self._profiling.close()
        with suppress(Exception):
            if self._trace is not None:
                self._trace.discard()
        if self._owns_staging:
            discard(self._staging)

    def _outcome(self) -> _Outcome:
        result = None
        with self._error_kept():
            self.ranks.finish()
            took_ns = time.perf_counter_ns() - self._start_ns
            if self._trace is not None and not self._problem:
                self._profiler.step()
                self._profiling.close()
                self._profiler.export_chrome_trace(str(self._trace.path))
                result = self._result(self._trace, took_ns)
        rank_info = None if self._problem else launcher_rank()
        sizes = {strategy.comm.size for strategy in self.strategies}
        return _Outcome(
            problem=self._problem,
            result=result,
            node=rank_info.node if rank_info else 0,
            strategy_ranks=None if not sizes else sizes.pop() if len(sizes) == 1 else 0,
        )

    def _result(self, trace: TraceFile, took_ns: int) -> RankResult:
        """Return the result of this rank, whose trace is complete."""
        rank_info, ranks, strategies = launcher_rank(), self.ranks, self.strategies
        local_rank_variable = whole(os.environ.get("LOCAL_RANK", ""))
        local_rank = (
            rank_info.local_rank if rank_info else ranks.rank if local_rank_variable is None else local_rank_variable
        )
        reduced = reduce_file(trace.path, trace.reduced)
        return RankResult(
            host=host_name(), local_rank=local_rank, device=device_name(ranks.device), profiled_ns=[took_ns],
            work=counted_work(strategies) if strategies else None, **trace.described(reduced=reduced),
        )  # fmt: skip

    def _write(self, outcomes: Sequence[_Outcome]) -> None:
        """Gather the traces and publish the run. Collective: every rank must call this."""
        numbered = zip(self.ranks.numbers, outcomes, strict=True)
        problems = [f"rank {number}: {outcome.problem}" for number, outcome in numbered if outcome.problem]
        if problems:
            if self.ranks.rank == 0:
                self._warn(f"no run: {'; '.join(problems)}")
            return
        hosts = distinct_host_names(
            [RankHost(outcome.result.host, outcome.node) for outcome in outcomes if outcome.result]
        )
        results = [
            replace(outcome.result, host=host) for outcome, host in zip(outcomes, hosts, strict=True) if outcome.result
        ]
        if self.ranks.size > 1 and self._trace is not None:
            gather_trace_files(results, self._trace, self._staging, self.ranks)
        if self.ranks.rank == 0:
            try:
                self._publish(results, self._ranks_per_workload(outcomes))
            except Exception as error:  # a failed capture must not end the job
                self._warn(f"no run: {one_line(error)}")

    def _publish(self, results: list[RankResult], sharing_ranks: int | None) -> None:
        """Complete the run's folder and rename it to its final name, in place of an empty folder of that name."""
        folder = self._run_folder()
        label = "" if folder == self._target else f"-{self.ranks.label}"
        name = f"{self.name or self._target.name}{label}"
        command = [Path(sys.argv[0]).name, *sys.argv[1:]]
        run = self._described(build_run(name, self._created, command, results, self.ranks.device))
        run = replace(run, workload_ranks=sharing_ranks)
        write_run(run, self._staging / RUN_FILE)
        unlock(self._staging)
        folder.parent.mkdir(parents=True, exist_ok=True)
        os.replace(self._staging, folder)
        self._owns_staging = False
        for problem in workload_problems(run):
            self._warn(f"{problem.message} [{problem.code}]")

    # --- helpers --------------------------------------------------------------------------------------

    def _run_folder(self) -> Path:
        """Return the run's folder: the target, or a subfolder if other groups of this job capture into it, too."""
        is_shared = bool(self.ranks.label) and self.ranks.groups_in(self.folder) > 1
        return self._target / self.ranks.label if is_shared else self._target

    @property
    def _staging(self) -> Path:
        label = f".{self.ranks.label}" if self.ranks.label else ""
        return self._target.parent / f".{self._target.name}{label}.partial"

    def _described(self, run: Run) -> Run:
        """Return the run with its ranks' numbers, the user's workload, the strategy and the kernels."""
        ranks = self.ranks
        if ranks.numbers != list(range(ranks.size)):
            traces = [replace(trace, rank=number) for trace, number in zip(run.traces, ranks.numbers, strict=True)]
            run = replace(run, topology=replace(run.topology, ranks=ranks.numbers), traces=traces)
        run, strategies = replace(run, workload=self.workload), self.strategies
        if not strategies:
            return run
        kernels = {
            kernel.name for strategy in strategies for kernel in strategy.kernels() if any(kernel.calls.values())
        }
        return replace(
            run,
            strategy=strategy_used(strategies[0], workload=run.workload),
            kernel=" and ".join(sorted(kernels)) or None,
        )

    def _ranks_per_workload(self, outcomes: Sequence[_Outcome]) -> int | None:
        """Return how many ranks share one workload; None if neither the strategies nor ``group`` determine it."""
        if self.workload is None:
            return None
        sizes = {outcome.strategy_ranks for outcome in outcomes}
        if self.workload.sequences is not None or (sizes == {None} and self.names_group):
            return len(outcomes)
        return (sizes.pop() or None) if len(sizes) == 1 else None

    def _wait(self) -> None:
        if self._disconnected:
            return
        try:
            self.ranks.wait()
        except Exception as error:  # the group's backend has failed, which the program will notice itself
            self._give_up(error)

    @contextmanager
    def _error_kept(self) -> Iterator[None]:
        """Store an exception of the block as this rank's problem, which is sent to the ranks that wait for it."""
        try:
            yield
        except Exception as error:  # a failed capture must not end the job
            self._problem = self._problem or one_line(error)

    def _give_up(self, error: Exception) -> None:
        """Warn that another rank does not answer, with the reason if that rank has announced one."""
        self._disconnected = True
        self._warn(f"no run: {self.ranks.exit_notice(self._token) or _RANK_IS_MISSING} ({one_line(error)})")

    def _warn(self, message: str) -> None:
        _log.warning("ringprof.capture: %s: %s", self.folder, message)


def _holds_something(folder: Path) -> bool:
    """Return whether a run cannot have this name: it is a file, or a folder that is not empty."""
    with suppress(OSError):
        return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    return False


def _create_staging(target: Path, folder: Path, staging: Path) -> _Opening:
    """Create the staging folder and lock it, after removing what killed captures have left."""
    try:
        if _holds_something(folder):
            return _Opening(f"{folder}: not empty; capture never overwrites, choose another folder")
        staging.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(staging.parent)
        staging.mkdir()
        return _Opening(token=lock(staging), target=str(target))
    except FileExistsError:
        if not staging.parent.is_dir():
            return _Opening(f"{folder}: cannot write the run here: {staging.parent} is no folder")
        return _Opening(f"{staging}: another capture is writing here: choose another folder, or remove it if none is")
    except OSError as error:
        return _Opening(f"{folder}: cannot write the run here: {error.strerror or error}")


def _as_list(strategy: Any) -> list[Any]:
    if strategy is None:
        return []
    strategies = list(strategy) if isinstance(strategy, Sequence) else [strategy]
    for item in strategies:
        if not hasattr(item, "comm"):
            raise UsageError(
                f"strategy is what ringprof.strategies.create returns, or a list of them, not {strategy!r}"
            )
    return list({id(item): item for item in strategies}.values())
