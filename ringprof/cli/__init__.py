"""The command line: each command parses its options, calls the library and writes what it returns.

Nothing is imported here that takes time: signals are heeded before anything else begins.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from contextlib import suppress

from ringprof.compile_cache import choose_compile_cache

INTERRUPTED = 130
"""A recording that was stopped has said so, whatever stopped it."""


def main(args: list[str] | None = None) -> None:
    """Run the command line and exit: 0 fine, 1 a condition holds, 2 usage or input, 3 failed run, 128 + a signal."""
    _open_closed_streams()
    choose_compile_cache(os.environ)
    signals = _Signals()
    try:
        code = run(sys.argv[1:] if args is None else args)
        signals.ignore()
    except BaseException:
        # Whatever became of it on its way: libraries make an import's interruption a failure of theirs.
        if not signals.received:
            raise
        signals.ignore()
        code = 0
    if signals.received:
        code = code if code == INTERRUPTED else 128 + signals.received
        # At once: Python's own end would wait for what the further processes are doing.
        _end_helpers()
    _finish("stdout")
    _finish("stderr")
    gc.freeze()  # Python would look for garbage three times on its way out
    sys.exit(code)


def run(args: list[str]) -> int:
    """Run one command line and return its exit code, every error as one line on stderr."""
    from ringprof.cli import commands

    return commands.run(args)


def _open_closed_streams() -> None:
    """Give a standard stream that was closed (``>&-``) nowhere to write to: the next file would take its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, number)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "r+" if number else "r", closefd=False))


def _finish(name: str) -> None:
    stream = getattr(sys, name)
    try:
        stream.flush()
    except OSError as error:
        if name == "stdout" and not isinstance(error, BrokenPipeError):
            raise
        # Python would try again to write what is left, and make an error of it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Signalled(BaseException):
    """SIGTERM or SIGHUP as an error, as Ctrl-C is, so that scratch files and further processes go with this one."""


class _Signals:
    """What asks this process to end is raised as an error in the main thread, again where a library has dropped it."""

    PATIENCE_S = 4.0
    """For cleaning up; then the process ends, whatever holds it."""
    AGAIN_S = 0.1

    def __init__(self) -> None:
        self.received = 0
        self._until = 0.0
        # nohup has SIGHUP ignored, a shell's background SIGINT, and they mean it.
        self._heeded = [
            number
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
        ]
        for number in self._heeded:
            signal.signal(number, self._raise)
        signal.signal(signal.SIGALRM, self._look)
        sys.unraisablehook = self._drop

    def ignore(self) -> None:
        """Let nothing disturb the end that has begun."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number in self._heeded:
            signal.signal(number, signal.SIG_IGN)

    def _raise(self, number: int, frame: object) -> None:
        self.received, self._until = number, time.monotonic() + self.PATIENCE_S
        self.ignore()
        signal.setitimer(signal.ITIMER_REAL, self.AGAIN_S, self.AGAIN_S)
        raise self._error()

    def _error(self) -> BaseException:
        return KeyboardInterrupt() if self.received == signal.SIGINT else _Signalled()

    def _look(self, *_: object) -> None:
        if time.monotonic() > self._until:
            self._end()
        # While it is on its way, whatever cleans up is in an `except`, a `finally` or an `__exit__`.
        error = sys.exc_info()[1]
        while error is not None and not isinstance(error, (KeyboardInterrupt, _Signalled)):
            error = error.__context__
        if error is None:
            raise self._error()

    def _drop(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Python drops an error that is raised in a destructor; ours comes again."""
        if not isinstance(unraisable.exc_value, (KeyboardInterrupt, _Signalled)):
            sys.__unraisablehook__(unraisable)

    def _end(self) -> None:
        _end_helpers()
        _end_children()
        if "ringprof.scratch" in sys.modules:
            sys.modules["ringprof.scratch"].remove_all()
        os._exit(128 + self.received)


def _end_children() -> None:
    """Ranks that were being started when the signal came: nobody else knows of them. Where Linux tells them."""
    for thread in os.listdir("/proc/self/task") if sys.platform == "linux" else ():
        with suppress(OSError), open(f"/proc/self/task/{thread}/children") as children:
            for child in children.read().split():
                os.kill(int(child), signal.SIGKILL)


def _end_helpers() -> None:
    if "ringprof.process_pool" in sys.modules:
        sys.modules["ringprof.process_pool"].end_all()
