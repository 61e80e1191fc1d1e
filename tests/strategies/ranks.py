"""Forked processes on this machine, one per rank, that communicate over gloo."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from ringprof.strategies import UnknownName, Unsupported
from tests.recording.command import HANGS_S

# torch counts devices in a process's first backward pass, and forked ranks can have none of their own once there were
# some. Builds with CUDA count one without a GPU where that first one is FlexAttention's on a CPU.
torch.zeros(1, requires_grad=True).sum().backward()


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``function(rank, *args)`` on every rank of a new process group. Return the results in rank order.

    Raises an error with the tracebacks of all ranks that failed. Results must pickle (this is test code talking to
    itself).
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            context.Process(target=_rank, args=(rank, world_size, folder, pipes[rank][1], function, args))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            results = [_receive(pipe[0], process) for pipe, process in zip(pipes, processes, strict=True)]
        finally:
            for process in processes:
                process.join(5)
                process.kill()
    failed = [text for ok, text in results if not ok]
    if failed:
        raise AssertionError("\n".join(["a rank failed:", *failed]))
    return [value for _, value in results]


def refusal(call: Callable[..., object], *args: Any, **options: Any) -> str:
    """Return the message with which strategies refuse a call; empty where they do not."""
    try:
        call(*args, **options)
    except (Unsupported, UnknownName) as error:
        return str(error)
    return ""


def _receive(pipe: Connection, process: multiprocessing.process.BaseProcess) -> tuple[bool, Any]:
    while not pipe.poll(0.05):
        if not process.is_alive() and not pipe.poll(0):
            return False, f"exit code {process.exitcode} without a result"
    result: tuple[bool, Any] = pipe.recv()
    return result


def _rank(
    rank: int, world_size: int, folder: str, pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=HANGS_S),
        )
        result = function(rank, *args)
        # A rank that leaves while another still connects a group would break that connection.
        dist.barrier()
        pipe.send((True, result))
    except BaseException:
        pipe.send((False, f"rank {rank}: {traceback.format_exc()}"))
    finally:
        # Not destroy_process_group: a rank that failed must not wait for the others.
        os._exit(0)
