"""Profiling a block of a user's own program, on every rank that runs it. Loads torch."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from torch.profiler import record_function

from ringprof.errors import RecordError, UsageError
from ringprof.owned_folders import claim, clear_abandoned, release
from ringprof.record.group_ranks import GroupRanks
from ringprof.record.launcher import launcher_rank
from ringprof.record.machine import RankHost, device_name, distinct_host_names, host_name
from ringprof.record.measure import ITERATION, counted_work, profiler, profiler_is_busy, reset_counts
from ringprof.record.recording import RankResult, assemble, exchange, gather, strategy_used
from ringprof.record.remote_traces import TraceFile
from ringprof.record.request import from_json
from ringprof.record.run_folder import RUN_FILE, discard, reduced_name, trace_name
from ringprof.run import Run, Workload, write_run
from ringprof.whole_numbers import whole


@contextmanager
def capture(
    folder: str | os.PathLike[str],
    workload: Workload | None = None,
    *,
    name: str | None = None,
    group: Any = None,
    strategy: Any = None,
    record_shapes: bool = False,
    reduce: Callable[[Path, Path], bool] | None = None,
) -> Iterator[None]:
    """Profile the block on every rank and write a run into ``folder``, which must be new or empty.

    Inside a program started by torchrun, or alone: the process group may be there or not, it is used as it is and left
    as it is. All ranks of ``group`` (a process group or a DeviceMesh of one dimension; None is the world) must enter,
    others must not. They start together behind a barrier; at the end of the block the device has finished, and when
    the context closes, ``folder`` holds one compressed trace a rank and ``run.json``. Where a rank does not see that
    folder, its trace is sent to the group's first rank.

    ``workload`` is what the block computes, its ``layers`` and ``steps`` included: with it a report knows the FLOPs and
    TFLOP/s, of the time under the profiler. ``strategy``, or several where layers have their own, adds the kernel, the
    work that it counted and the bytes that it sent. There are no verification and no timings without the profiler.
    ``record_shapes`` has the profiler record the shapes of operators, from which a report tells the rates of attention
    and matrix products and the MFU; it slows down the CPU.

    Run one step of warm-up before it: the first one sets up communicators. Raises `UsageError` where the folder holds
    something already, where a rank has another profiler at work (torch has one a process; one that only warms up cannot
    be told, and two may end the process), and on a rank outside ``group``. An error in the block leaves no run behind,
    nor does a rank that does not come: once their group gives it up, the others raise `RecordError`, with what that
    rank's block raised.
    """
    target = Path(folder).absolute()
    if workload is not None and not isinstance(workload, Workload):
        raise UsageError(f"workload is a ringprof.Workload, not {workload!r}")
    ranks = GroupRanks(group)
    strategies = _listed(strategy)
    created = f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}"
    staging = target.parent / f".{target.name}.partial"
    with _staged(staging, target, ranks) as token:
        trace = TraceFile(staging, token, ranks.number)
        try:
            times: list[int] = []
            reset_counts(strategies)
            with _profiled(trace.path, ranks, times, target, token, record_shapes=record_shapes):
                yield
            reduced = reduce is not None and reduce(trace.path, trace.reduced)
            with _answered(target, ranks, token):
                result = _result(ranks, trace, times, strategies, reduced=reduced)
                results = exchange(result, ranks.device, ranks.group) if ranks.size > 1 else [result]
                if ranks.size > 1:
                    gather(results, trace, staging, ranks.device, ranks.group)
            if ranks.rank == 0:
                command = [Path(sys.argv[0]).name, *sys.argv[1:]]
                run = assemble(name or target.name, created, command, results, ranks.device)
                _publish(_described(run, ranks, workload, strategies), staging, target)
        finally:
            trace.discard()
    with _answered(target, ranks, token):
        ranks.wait()


_BUSY = "rank {} has a profiler at work already (torch.profiler, or another capture): end it, there can be but one"


class _Opening(msgspec.Struct, frozen=True):
    """What a rank tells the others: why there is no run, or nothing; and, of the first, its folder's token."""

    refusal: str = ""
    token: str = ""


@contextmanager
def _staged(staging: Path, target: Path, ranks: GroupRanks) -> Iterator[str]:
    """The half-written run's folder, which the first rank makes, for all ranks; yields its token.

    After an error it is gone, also where the ranks did not come together. Raises `UsageError` on each rank where there
    is a refusal.
    """
    opening = _Opening(_BUSY.format(ranks.number)) if profiler_is_busy() else _Opening()
    if ranks.rank == 0 and not opening.refusal:
        opening = _prepare(target, staging)
    made = ranks.rank == 0 and not opening.refusal
    try:
        with _answered(target, ranks):
            openings = [from_json(told, _Opening) for told in ranks.told(opening)]
        for one in openings:
            if one.refusal:
                raise UsageError(one.refusal)
        yield openings[0].token
    except BaseException:
        if made:
            discard(staging)
        raise


def _prepare(target: Path, staging: Path) -> _Opening:
    """Make the staging folder, which nobody else may be using; what a killed capture left there gives way."""
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            return _Opening(f"{target}: not empty; capture never overwrites, choose another folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        clear_abandoned(target.parent)
        staging.mkdir()
        return _Opening(token=claim(staging))
    except FileExistsError:
        if not target.parent.is_dir():
            return _Opening(f"{target}: cannot write the run here: {target.parent} is no folder")
        return _Opening(f"{staging}: another capture is writing here: choose another folder, or remove it if none is")
    except OSError as error:
        return _Opening(f"{target}: cannot write the run here: {error.strerror or error}")


@contextmanager
def _answered(target: Path, ranks: GroupRanks, token: str = "") -> Iterator[None]:
    """Raises `RecordError` where another rank does not answer, and says why where that rank has said it."""
    try:
        yield
    except RuntimeError as error:
        reason = ranks.left(token) or "another rank has ended, or is not here: all of the group must enter (see group=)"
        raise RecordError(f"{target}: no run: {reason} ({' '.join(str(error).split())[:200]})") from error


@contextmanager
def _profiled(
    trace: Path, ranks: GroupRanks, times: list[int], target: Path, token: str, *, record_shapes: bool
) -> Iterator[None]:
    """Profile the block as one iteration, write the trace, and append the block's time in nanoseconds."""
    with profiler(record_shapes=record_shapes) as recording:
        ranks.finish()
        recording.step()
        with _answered(target, ranks, token):
            ranks.wait()
        ranks.finish()
        start = time.perf_counter_ns()
        try:
            with record_function(ITERATION):
                yield
        except BaseException as error:
            ranks.leave(token, error)
            raise
        ranks.finish()
        times.append(time.perf_counter_ns() - start)
        recording.step()
    recording.export_chrome_trace(str(trace))


def _result(
    ranks: GroupRanks, trace: TraceFile, times: list[int], strategies: Sequence[Any], *, reduced: bool
) -> RankResult:  # fmt: skip
    """What this rank tells the first; its trace is complete."""
    place = launcher_rank()
    told = whole(os.environ.get("LOCAL_RANK", ""))
    local_rank = place.local_rank if place else ranks.rank if told is None else told
    said = ranks.told(RankHost(host_name(), place.node if place else 0))
    host = distinct_host_names([from_json(part, RankHost) for part in said])[ranks.rank]
    return RankResult(
        host=host, local_rank=local_rank, device=device_name(ranks.device), trace=trace_name(ranks.number),
        profiled_ns=times, work=counted_work(strategies) if strategies else None,
        trace_bytes=trace.size_bytes, remote_bytes=trace.remote_bytes(),
        reduced=reduced_name(ranks.number) if reduced else None, remote_reduced_bytes=trace.remote_reduced_bytes(),
    )  # fmt: skip


def _described(run: Run, ranks: GroupRanks, workload: Workload | None, strategies: Sequence[Any]) -> Run:
    """The run with what the user and the strategies say of it."""
    if ranks.numbers != list(range(ranks.size)):
        traces = [replace(trace, rank=number) for trace, number in zip(run.traces, ranks.numbers, strict=True)]
        run = replace(run, topology=replace(run.topology, ranks=ranks.numbers), traces=traces)
    if not strategies:
        return replace(run, workload=workload)
    kernels = {kernel.name for strategy in strategies for kernel in strategy.kernels() if any(kernel.calls.values())}
    return replace(
        run, workload=workload, strategy=strategy_used(strategies[0]), kernel=" and ".join(sorted(kernels)) or None
    )


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


def _publish(run: Run, staging: Path, target: Path) -> None:
    """The same order as for a recording; an empty ``target`` gives way."""
    write_run(run, staging / RUN_FILE)
    release(staging)
    os.replace(staging, target)
