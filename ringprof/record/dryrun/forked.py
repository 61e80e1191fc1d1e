"""A function carried out in a fork of this process, where a stranger's code may do what it likes."""

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

_GRADIENTS = "this process has computed gradients on devices, and torch computes none in a fork of it then"


def in_fork(work: Callable[[], int], limit_s: float) -> int:
    """What ``work`` returns, within ``limit_s`` seconds.

    It prints nowhere, and what it changes, begins on a GPU or starts ends with it. Raises `UnsupportedWorkloadError`
    with the
    reason where it raises, does not end, or ends the process.
    """
    context = get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(work, there, limit_s), daemon=True)
    with warnings.catch_warnings():
        # From Python 3.12 on, of threads, which the fork does without.
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    there.close()
    group = child.pid
    assert group is not None
    try:
        if not here.poll(limit_s):
            raise UnsupportedWorkloadError(f"it does not end within {limit_s:.0f} s on shapes alone")
        found, reason = here.recv()
    except EOFError:
        raise UnsupportedWorkloadError("it ends the process on shapes alone") from None
    finally:
        child.kill()
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        child.join()
        here.close()
    if reason:
        raise UnsupportedWorkloadError(reason)
    return int(found)


def _answer(work: Callable[[], int], there: Any, limit_s: float) -> None:
    os.setsid()
    # Also where the process that waits is gone.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit_s + 1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    # In a notebook, what Python writes goes elsewhere.
    sys.stdout = sys.stderr = os.fdopen(nowhere, "w")
    # The threads that torch computes on have stayed behind.
    torch.set_num_threads(1)
    try:
        there.send((work(), ""))
    except UnsupportedWorkloadError as error:
        threads = "autograd's threading" in str(error)
        there.send((0, _GRADIENTS if threads else str(error)[:500]))
    except Exception as error:  # whatever a stranger's code raises
        there.send((0, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"))
