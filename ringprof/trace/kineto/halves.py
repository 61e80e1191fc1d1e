"""Where a large trace can be read in two halves at once, and the copy of this process that reads the second."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ringprof.trace.kineto.byte_source import LOOK_BYTES, is_packed
from ringprof.trace.kineto.event_list import BOUNDARY

WORTH_HALVING = 32 << 20
"""Bytes of a file from which a second process reads faster than it takes to start and to hand over what it found."""

_TASKS = "/proc/self/task"


class HalfLostError(ValueError):
    """The copy did not come to an end, or met something that only a reader from the start can judge."""


def middle_of(source: str | bytes) -> tuple[int, int] | None:
    """Where the event before the middle of the file ends and the next begins; None where it is better read in turn.

    A process with threads cannot be copied, so this is for the command line, which has none.
    """
    if isinstance(source, bytes) or not _can_copy() or not os.path.isfile(source):
        return None
    size = os.path.getsize(source)
    if size < WORTH_HALVING:
        return None
    with open(source, "rb") as file:
        if is_packed(file.read(4)):
            return None
        file.seek(size // 2)
        found = BOUNDARY.search(file.read(LOOK_BYTES))
    return (size // 2 + found.start() + 1, size // 2 + found.end()) if found else None


def _can_copy() -> bool:
    return sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1 and len(os.listdir(_TASKS)) == 1


class Copy:
    """A copy of this process that carries out one function; it ends with the block, or with this process."""

    def __init__(self, function: Callable[[Callable[[], None]], Any]) -> None:
        self._function = function

    def __enter__(self) -> Copy:
        ours, theirs = os.pipe()
        self._of = os.getpid()
        self._process = os.fork()
        if not self._process:
            os.close(ours)
            self._carry_out(theirs)
        os.close(theirs)
        self._answer = open(ours, "rb")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._answer.close()
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)

    def result(self) -> Any:
        """What the function returned. Raises `HalfLostError` where it raised something, whatever it was."""
        try:
            return pickle.load(self._answer)
        except EOFError:
            raise HalfLostError from None

    def _carry_out(self, theirs: int) -> None:
        """In the copy: nothing of what this process still had to do is done twice."""
        try:
            answer = pickle.dumps(self._function(self._check), protocol=pickle.HIGHEST_PROTOCOL)
            with open(theirs, "wb") as pipe:
                pipe.write(answer)
        finally:
            os._exit(0)

    def _check(self) -> None:
        """To be called now and then: raises where the process that asks is gone."""
        if os.getppid() != self._of:
            raise HalfLostError
