"""Run a function in a fork of this process, to isolate side effects of user code."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from typing import Any

import torch

from ringprof.errors import UnsupportedWorkloadError

_AUTOGRAD_THREADS_REASON = (
    "this process has computed gradients on devices, and torch computes none in a fork of it then"
)


def run_in_fork(work: Callable[[], int], limit_s: float) -> int:
    """Return the result of ``work``, which has ``limit_s`` seconds.

    It prints nothing, and what it changes, starts or begins on a GPU ends with it. Raises `UnsupportedWorkloadError`
    with the reason if it raises, exceeds the limit or ends the process.
    """
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_run_and_send, args=(work, sender, limit_s), daemon=True)
    with warnings.catch_warnings():
        # Python 3.12 and later warn about threads, which the fork does not need.
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    sender.close()
    group = child.pid
    assert group is not None
    try:
        if not receiver.poll(limit_s):
            raise UnsupportedWorkloadError(f"it does not end within {limit_s:.0f} s on shapes alone")
        result, reason = receiver.recv()
    except EOFError:
        raise UnsupportedWorkloadError("it ends the process on shapes alone") from None
    finally:
        child.kill()
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        child.join()
        receiver.close()
    if reason:
        raise UnsupportedWorkloadError(reason)
    return int(result)


def _run_and_send(work: Callable[[], int], sender: Any, limit_s: float) -> None:
    """Run ``work`` and send its result or the reason of its failure."""
    os.setsid()
    # Limit the time even if the waiting process is gone.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit_s + 1)
    null_fd = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null_fd, fd)
    # In a notebook, Python's streams do not write to the file descriptors.
    sys.stdout = sys.stderr = os.fdopen(null_fd, "w")
    # Torch's compute threads do not exist in the fork.
    torch.set_num_threads(1)
    try:
        sender.send((work(), ""))
    except UnsupportedWorkloadError as error:
        threads = "autograd's threading" in str(error)
        sender.send((0, _AUTOGRAD_THREADS_REASON if threads else str(error)[:500]))
    except Exception as error:  # user code may raise anything
        sender.send((0, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"))
