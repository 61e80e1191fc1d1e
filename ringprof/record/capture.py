"""Profiling a block of a user's own program, on every rank that runs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ringprof.errors import UsageError
from ringprof.run import Run, Workload

if TYPE_CHECKING:
    import torch

    from ringprof.record.remote_traces import TraceFile


@contextmanager
def capture(
    folder: str | os.PathLike[str],
    workload: Workload | None = None,
    *,
    name: str | None = None,
    reduce: Callable[[Path, Path], bool] | None = None,
) -> Iterator[None]:
    """Profile the block on every rank and write a run into ``folder``, which must be new or empty.

    Inside a program started by torchrun, or alone: the process group may be there or not, it is used as it is and left
    as it is. All ranks of the world must enter. They start together behind a barrier; at the end of the block the
    device has finished, and when the context closes, ``folder`` holds one compressed trace a rank and ``run.json``.
    Where a rank does not see that folder, its trace is sent to rank 0. With ``workload`` a report knows the FLOPs;
    there are no verification and no timings without the profiler.

    Run one step of warm-up before it: the first one sets up communicators. Raises `UsageError` where the folder holds
    something already, and `MissingExtraError` without torch. An error in the block leaves no run behind.
    """
    from ringprof.record.resolve import need

    need("torch")
    from ringprof.record.remote_traces import TraceFile
    from ringprof.record.run_folder import discard

    target = Path(folder).absolute()
    staging = target.parent / f".{target.name}.partial"
    rank, world, device = _standing()
    created = f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}"
    opening = _together(_prepare(target, staging) if rank == 0 else _Opening(), world, device)
    trace = TraceFile(staging, opening.token, rank)
    try:
        times: list[int] = []
        with _profiled(trace.path, device, world, times):
            yield
        reduced = reduce is not None and reduce(trace.path, trace.reduced)
        run = _run(name or target.name, created, workload, device, world, rank, trace, staging, times, reduced)
        if run is not None:
            _publish(run, staging, target)
    except BaseException:
        if rank == 0:
            discard(staging)
        raise
    finally:
        trace.discard()
    _wait(world)


class _Opening(msgspec.Struct, frozen=True):
    """What rank 0 tells the others: what stands against the run, empty where nothing does, and its folder's token."""

    refusal: str = ""
    token: str = ""


def _standing() -> tuple[int, int, torch.device]:
    """Rank, world size, and the device that the process group or this process works on."""
    import torch
    import torch.distributed as dist

    grouped = dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
    on_gpu = "nccl" in str(dist.get_backend()) if grouped else torch.cuda.is_available()
    return rank, world, torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _prepare(target: Path, staging: Path) -> _Opening:
    """Make the staging folder, which nobody else may be using; what a killed capture left there gives way."""
    from ringprof.folder_owner import claim, clear_abandoned

    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            return _Opening(f"{target}: not empty; capture never overwrites, choose another folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        clear_abandoned(target.parent)
        staging.mkdir()
        return _Opening(token=claim(staging))
    except FileExistsError:
        return _Opening(f"{staging}: another capture is writing here: choose another folder, or remove it if none is")
    except OSError as error:
        return _Opening(f"{target}: cannot write the run here: {error.strerror or error}")


def _together(opening: _Opening, world: int, device: torch.device) -> _Opening:
    """Rank 0's answer for all ranks. Raises `UsageError` on each where there is a refusal."""
    if world > 1:
        from ringprof.record.world_group import gather_bytes

        opening = msgspec.json.decode(gather_bytes(msgspec.json.encode(opening), device)[0], type=_Opening)
    if opening.refusal:
        raise UsageError(opening.refusal)
    return opening


@contextmanager
def _profiled(trace: Path, device: torch.device, world: int, times: list[int]) -> Iterator[None]:
    """Profile the block as one iteration, write the trace, and append the block's time in nanoseconds."""
    import time

    from torch.profiler import record_function

    from ringprof.record.measure import ITERATION, profiler

    finish = _finisher(device)
    with profiler() as recording:
        finish()
        recording.step()
        _wait(world)
        finish()
        start = time.perf_counter_ns()
        with record_function(ITERATION):
            yield
        finish()
        times.append(time.perf_counter_ns() - start)
        recording.step()
    recording.export_chrome_trace(str(trace))


def _finisher(device: torch.device) -> Callable[[], None]:
    import torch

    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def _wait(world: int) -> None:
    if world > 1:
        import torch.distributed as dist

        dist.barrier()


def _run(
    name: str, created: str, workload: Workload | None, device: torch.device, world: int, rank: int, trace: TraceFile,
    staging: Path, times: list[int], reduced: bool,
) -> Run | None:  # fmt: skip
    """Tell rank 0 that this rank's trace is complete, and send it where it must be; rank 0 returns the run."""
    from ringprof.record.machine import device_name
    from ringprof.record.recording import RankResult, assemble, exchange, gather
    from ringprof.record.run_folder import reduced_name, trace_name

    local_rank, host = _standing_on_host(rank, world, device)
    result = RankResult(
        host=host, local_rank=local_rank, device=device_name(device), trace=trace_name(rank), profiled_ns=times,
        trace_bytes=trace.size_bytes, remote_bytes=trace.remote_bytes(),
        reduced=reduced_name(rank) if reduced else None, remote_reduced_bytes=trace.remote_reduced_bytes(),
    )  # fmt: skip
    results = exchange(result, device) if world > 1 else [result]
    if world > 1:
        gather(results, trace, staging, device)
    if rank != 0:
        return None
    run = assemble(name, created, [Path(sys.argv[0]).name, *sys.argv[1:]], results, device)
    return msgspec.structs.replace(run, workload=workload)


def _standing_on_host(rank: int, world: int, device: torch.device) -> tuple[int, str]:
    """This rank's number on its host, and the host's name, told apart from others of that name."""
    from ringprof.record.hosts import RankHost, distinct_host_names
    from ringprof.record.launcher import launcher_rank
    from ringprof.record.machine import host_name
    from ringprof.record.world_group import gather_bytes

    place = launcher_rank()
    text = os.environ.get("LOCAL_RANK", "")
    local_rank = place.local_rank if place else int(text) if text.isdigit() else rank
    where = RankHost(host_name(), place.node if place else 0)
    if world == 1:
        return local_rank, where.name
    said = [msgspec.json.decode(part, type=RankHost) for part in gather_bytes(msgspec.json.encode(where), device)]
    return local_rank, distinct_host_names(said)[rank]


def _publish(run: Run, staging: Path, target: Path) -> None:
    """The same order as for a recording; an empty ``target`` gives way."""
    from ringprof.folder_owner import release
    from ringprof.record.run_folder import RUN_FILE
    from ringprof.run import write_run

    write_run(run, staging / RUN_FILE)
    release(staging)
    os.replace(staging, target)
