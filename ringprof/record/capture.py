"""Profiling a block of a user's own program, on every rank that runs it. Loads torch.

Wrong usage raises before the block starts. From then on nothing here raises: what goes wrong in recording becomes a
warning of the logger ``ringprof.capture``, a line on stderr unless the program handles it, and there is no run.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from torch.profiler import record_function

from ringprof.errors import UsageError
from ringprof.record.launcher import launcher_rank
from ringprof.record.machine import RankHost, device_name, distinct_host_names, host_name
from ringprof.record.measure import ITERATION, counted_work, profiler, profiler_is_busy, reset_counts
from ringprof.record.process_group import GroupRanks
from ringprof.record.recording import RankResult, assemble, gather, strategy_used
from ringprof.record.remote_traces import TraceFile
from ringprof.record.request import from_json
from ringprof.record.run_folder import RUN_FILE, discard, reduced_name, trace_name
from ringprof.run import Run, Workload, write_run
from ringprof.scratch import lock, remove_abandoned, unlock
from ringprof.validation import whole
from ringprof.workload_checks import workload_problems

_log = logging.getLogger("ringprof.capture")
_Reduce = Callable[[Path, Path], bool]


@contextmanager
def capture(
    folder: str | os.PathLike[str],
    workload: Workload | None = None,
    *,
    name: str | None = None,
    group: Any = None,
    strategy: Any = None,
    record_shapes: bool = False,
    reduce: _Reduce | None = None,
) -> Iterator[None]:
    """Profile the block on every rank and write a run into ``folder``, which must be new or empty.

    Inside a program started by torchrun, or alone: the process group may be there or not, it is used as it is and left
    as it is. All ranks of ``group`` (a process group or a DeviceMesh of one dimension; None is the world) must enter,
    others must not. They start together behind a barrier; at the end of the block the device has finished, and when
    the context closes, ``folder`` holds one compressed trace per rank and ``run.json``. Where a rank does not see that
    folder, its trace is sent to the group's first rank. Where several groups of one job capture into the same
    ``folder``, each writes a run into a folder of its own inside it, such as ``folder/ranks2-3``.

    ``workload`` is what the ranks of one context-parallel group compute in the block, ``layers`` and ``steps``
    included: with it a report knows the FLOPs and TFLOP/s, of the time under the profiler. ``strategy``, or several
    where layers have their own, adds the kernel, the work that it counted, the bytes that it sent, and the size of the
    context-parallel group: with data parallelism each such group computes a workload of its own. There are no
    verification and no timings without the profiler.
    ``record_shapes`` has the profiler record the shapes of operators, from which a report tells the rates of attention
    and matrix products and the MFU; it slows down the CPU.

    Run one step of warm-up before it: the first one sets up communicators. Raises `UsageError` before the block where
    the folder is not empty or cannot be written, where a rank has another profiler at work (torch has one per process;
    one that only warms up cannot be detected, and two may end the process), and on a rank outside ``group``. Nothing
    else is raised: where recording fails, or a rank does not come, the logger ``ringprof.capture`` warns in one line,
    the program goes on, and there is no run. An error in the block is the program's own and leaves no run behind.
    """
    if workload is not None and not isinstance(workload, Workload):
        raise UsageError(f"workload is a ringprof.Workload, not {workload!r}")
    asked = _Asked(
        Path(folder).absolute(),
        name,
        workload,
        _listed(strategy),
        group is not None,
        reduce,
        record_shapes=record_shapes,
    )
    recorder = _Recorder(asked, GroupRanks(group))
    try:
        recorder.open()
        recorder.start()
        try:
            with record_function(ITERATION):
                yield
        except BaseException as error:
            recorder.abandon(error)
            raise
        recorder.finish()
    finally:
        recorder.close()


_BUSY = "rank {} has a profiler at work already (torch.profiler, or another capture): end it, there can be but one"
_NOBODY = "another rank has ended, or is not here: all of the group must enter (see group=)"


@dataclass(frozen=True)
class _Asked:
    """Request of the user of `capture`."""

    target: Path
    name: str | None
    workload: Workload | None
    strategies: Sequence[Any]
    names_group: bool
    """Whether the ranks that share the workload were named as ``group``."""
    reduce: _Reduce | None
    record_shapes: bool


class _Opening(msgspec.Struct, frozen=True):
    """Message of a rank to the others before the block: why there is no run, or nothing; and the folder's token."""

    refusal: str = ""
    token: str = ""


class _Outcome(msgspec.Struct, frozen=True):
    """Message of a rank to the others after the block."""

    problem: str = ""
    """Why it has no trace; empty where it has one."""
    result: RankResult | None = None
    """Its host is not yet told from others of the same name."""
    node: int = 0
    """The launcher's number of its host."""
    strategy_ranks: int | None = None
    """Ranks of its strategies' group; 0 for groups of several sizes, None without a strategy."""


class _Recorder:
    """One rank's part in a capture. After `open` no method raises an `Exception`."""

    def __init__(self, asked: _Asked, ranks: GroupRanks) -> None:
        self._asked, self._ranks = asked, ranks
        self._created = f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}"
        label = f".{ranks.label}" if ranks.label else ""
        self._staging = asked.target.parent / f".{asked.target.name}{label}.partial"
        self._owns_staging = False
        self._token, self._problem = "", ""
        self._alone = False
        """Whether another rank did not answer: then none is asked again."""
        self._window = ExitStack()
        self._recording: Any = None
        self._trace: TraceFile | None = None
        self._start_ns = 0

    # --- before the block -----------------------------------------------------------------------------

    def open(self) -> None:
        """Make the folder of the half-written run. Raises `UsageError` on every rank where one has a refusal."""
        opening = _Opening(_BUSY.format(self._ranks.number)) if profiler_is_busy() else _Opening()
        if self._ranks.rank == 0 and not opening.refusal:
            opening = _prepare(self._place(), self._staging)
            self._owns_staging = not opening.refusal
        try:
            openings = [from_json(data, _Opening) for data in self._ranks.told(opening)]
        except RuntimeError as error:
            self._nobody_answers(error)
            return
        for each in openings:
            if each.refusal:
                raise UsageError(each.refusal)
        self._token = openings[0].token

    def start(self) -> None:
        """Start the profiler, together with the other ranks."""
        if self._alone:
            return
        with self._noting():
            reset_counts(self._asked.strategies)
            self._trace = TraceFile(self._staging, self._token, self._ranks.number)
            self._recording = self._window.enter_context(profiler(record_shapes=self._asked.record_shapes))
            self._ranks.finish()
            self._recording.step()
        self._wait()
        with self._noting():
            self._ranks.finish()
        self._start_ns = time.perf_counter_ns()

    # --- after the block ------------------------------------------------------------------------------

    def abandon(self, error: BaseException) -> None:
        """Tell the others, without waiting for them, that the program raised ``error`` in the block."""
        self._ranks.leave(self._token, error)

    def finish(self) -> None:
        """Write this rank's trace and, on the first rank, the run."""
        if self._alone:
            return
        outcome = self._outcome()
        try:
            outcomes = [from_json(data, _Outcome) for data in self._ranks.told(outcome)]
            self._write(outcomes)
        except RuntimeError as error:
            self._nobody_answers(error)
        except Exception as error:  # a profiler ends no job
            self._warn(f"no run: {_in_words(error)}")
        self._wait()

    def close(self) -> None:
        """Stop the profiler and remove what belongs to no run."""
        with suppress(Exception):
            self._window.close()
        with suppress(Exception):
            if self._trace is not None:
                self._trace.discard()
        if self._owns_staging:
            discard(self._staging)

    def _outcome(self) -> _Outcome:
        result = None
        with self._noting():
            self._ranks.finish()
            took_ns = time.perf_counter_ns() - self._start_ns
            if self._trace is not None and not self._problem:
                self._recording.step()
                self._window.close()
                self._recording.export_chrome_trace(str(self._trace.path))
                result = self._result(self._trace, took_ns)
        place = None if self._problem else launcher_rank()
        sizes = {strategy.comm.size for strategy in self._asked.strategies}
        return _Outcome(
            problem=self._problem,
            result=result,
            node=place.node if place else 0,
            strategy_ranks=None if not sizes else sizes.pop() if len(sizes) == 1 else 0,
        )

    def _result(self, trace: TraceFile, took_ns: int) -> RankResult:
        """Describe this rank's part, whose trace is complete."""
        place, ranks, strategies = launcher_rank(), self._ranks, self._asked.strategies
        stated = whole(os.environ.get("LOCAL_RANK", ""))
        local_rank = place.local_rank if place else ranks.rank if stated is None else stated
        reduced = self._asked.reduce is not None and self._asked.reduce(trace.path, trace.reduced)
        return RankResult(
            host=host_name(), local_rank=local_rank, device=device_name(ranks.device), trace=trace_name(ranks.number),
            profiled_ns=[took_ns], work=counted_work(strategies) if strategies else None,
            trace_bytes=trace.size_bytes, remote_bytes=trace.remote_bytes(),
            reduced=reduced_name(ranks.number) if reduced else None, remote_reduced_bytes=trace.remote_reduced_bytes(),
        )  # fmt: skip

    def _write(self, outcomes: Sequence[_Outcome]) -> None:
        """Bring the traces together and publish the run; every rank takes part."""
        numbered = zip(self._ranks.numbers, outcomes, strict=True)
        problems = [f"rank {number}: {outcome.problem}" for number, outcome in numbered if outcome.problem]
        if problems:
            if self._ranks.rank == 0:
                self._warn(f"no run: {'; '.join(problems)}")
            return
        hosts = distinct_host_names([RankHost(one.result.host, one.node) for one in outcomes if one.result])
        results = [replace(one.result, host=host) for one, host in zip(outcomes, hosts, strict=True) if one.result]
        if self._ranks.size > 1 and self._trace is not None:
            gather(results, self._trace, self._staging, self._ranks.device, self._ranks.group)
        if self._ranks.rank == 0:
            try:
                self._publish(results, _sharing_ranks(self._asked, outcomes))
            except Exception as error:  # a profiler ends no job
                self._warn(f"no run: {_in_words(error)}")

    def _publish(self, results: list[RankResult], sharing_ranks: int | None) -> None:
        """Complete the run's folder and give it its name; an empty folder of that name gives way."""
        place = self._place()
        label = "" if place == self._asked.target else f"-{self._ranks.label}"
        name = f"{self._asked.name or self._asked.target.name}{label}"
        command = [Path(sys.argv[0]).name, *sys.argv[1:]]
        run = _described(assemble(name, self._created, command, results, self._ranks.device), self._asked, self._ranks)
        run = replace(run, workload_ranks=sharing_ranks)
        write_run(run, self._staging / RUN_FILE)
        unlock(self._staging)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(self._staging, place)
        self._owns_staging = False
        for problem in workload_problems(run):
            self._warn(f"{problem.message} [{problem.code}]")

    # --- pieces ---------------------------------------------------------------------------------------

    def _place(self) -> Path:
        """Return the run's folder: inside ``target`` where another group of this job captures into that, too."""
        several = bool(self._ranks.label) and self._ranks.groups_in(self._asked.target) > 1
        return self._asked.target / self._ranks.label if several else self._asked.target

    def _wait(self) -> None:
        if self._alone:
            return
        try:
            self._ranks.wait()
        except Exception as error:  # the group's backend is gone: the program will see that for itself
            self._nobody_answers(error)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Keep what is raised as this rank's problem: it is told to the others, who must not wait in vain."""
        try:
            yield
        except Exception as error:  # a profiler ends no job
            self._problem = self._problem or _in_words(error)

    def _nobody_answers(self, error: Exception) -> None:
        """Warn that another rank does not answer, with its reason where that rank has left word."""
        self._alone = True
        self._warn(f"no run: {self._ranks.left(self._token) or _NOBODY} ({_in_words(error)})")

    def _warn(self, message: str) -> None:
        _log.warning("ringprof.capture: %s: %s", self._asked.target, message)


def _prepare(place: Path, staging: Path) -> _Opening:
    """Make the staging folder, which nobody else may be using; what a killed capture left there gives way."""
    try:
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            return _Opening(f"{place}: not empty; capture never overwrites, choose another folder")
        staging.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(staging.parent)
        staging.mkdir()
        return _Opening(token=lock(staging))
    except FileExistsError:
        if not staging.parent.is_dir():
            return _Opening(f"{place}: cannot write the run here: {staging.parent} is no folder")
        return _Opening(f"{staging}: another capture is writing here: choose another folder, or remove it if none is")
    except OSError as error:
        return _Opening(f"{place}: cannot write the run here: {error.strerror or error}")


def _described(run: Run, asked: _Asked, ranks: GroupRanks) -> Run:
    """Add to the run what the user and the strategies say of it."""
    if ranks.numbers != list(range(ranks.size)):
        traces = [replace(trace, rank=number) for trace, number in zip(run.traces, ranks.numbers, strict=True)]
        run = replace(run, topology=replace(run.topology, ranks=ranks.numbers), traces=traces)
    run, strategies = replace(run, workload=asked.workload), asked.strategies
    if not strategies:
        return run
    kernels = {kernel.name for strategy in strategies for kernel in strategy.kernels() if any(kernel.calls.values())}
    return replace(run, strategy=strategy_used(strategies[0]), kernel=" and ".join(sorted(kernels)) or None)


def _sharing_ranks(asked: _Asked, outcomes: Sequence[_Outcome]) -> int | None:
    """Return how many ranks share one workload; None where neither strategies nor ``group`` tell."""
    if asked.workload is None:
        return None
    sizes = {outcome.strategy_ranks for outcome in outcomes}
    if asked.workload.sequences is not None or (sizes == {None} and asked.names_group):
        return len(outcomes)
    return (sizes.pop() or None) if len(sizes) == 1 else None


def _listed(strategy: Any) -> list[Any]:
    if strategy is None:
        return []
    several = list(strategy) if isinstance(strategy, Sequence) else [strategy]
    for one in several:
        if not hasattr(one, "comm"):
            raise UsageError(
                f"strategy is what ringprof.strategies.create returns, or a list of them, not {strategy!r}"
            )
    return list({id(one): one for one in several}.values())


def _in_words(error: BaseException) -> str:
    """Write an error in one line: its type and the first 200 characters of its text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
