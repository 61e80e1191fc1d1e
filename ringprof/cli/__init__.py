"""The command line: each command parses its options, calls the library and prints the result.

No slow module is imported here: the signal handlers are installed before anything else starts.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from contextlib import suppress

from ringprof.common.compile_cache import choose_compile_cache

INTERRUPTED = 130
"""Exit code of an interrupted recording, which reports the interruption itself, whatever the signal."""


def main(args: list[str] | None = None) -> None:
    """Run the command line and exit: 0 success, 1 a condition holds, 2 usage or input, 3 failed run, 128 + signal."""
    _open_closed_streams()
    choose_compile_cache(os.environ)
    signals = _Signals()
    code = None
    try:
        code = run(sys.argv[1:] if args is None else args)
        signals.ignore()
    except BaseException:
        # After a signal, any error counts: libraries may turn an interrupted import into an error of their own.
        if not signals.received:
            raise
        signals.ignore()
        # A repetition may also arrive between the command's return and the line after it: its exit code counts.
        code = 0 if code is None else code
    if signals.received:
        code = code if code == INTERRUPTED else 128 + signals.received
        # Python's own exit would wait until the worker processes finish.
        _end_workers()
    _finish("stdout")
    _finish("stderr")
    gc.freeze()  # Python would collect garbage three times at exit
    sys.exit(code)


def run(args: list[str]) -> int:
    """Run one command line and return its exit code; every error becomes one line on stderr."""
    from ringprof.cli import commands

    return commands.run(args)


def _open_closed_streams() -> None:
    """Open closed standard streams (``>&-``) on the null device: the next opened file would take their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "r+" if number else "r", closefd=False))


def _finish(name: str) -> None:
    """Flush a standard stream; a reader that closed the pipe is not an error."""
    stream = getattr(sys, name)
    try:
        stream.flush()
    except OSError as error:
        if name == "stdout" and not isinstance(error, BrokenPipeError):
            raise
        # Python would try to write the rest again at exit, and report an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Signalled(BaseException):
    """SIGTERM or SIGHUP as an exception, like Ctrl-C, so that scratch files and worker processes are cleaned up."""


class _Signals:
    """Handler that raises termination signals as exceptions in the main thread, repeatedly if a library drops them."""

    PATIENCE_S = 4.0
    """Seconds for cleaning up, after which the process is ended."""
    AGAIN_S = 0.1
    """Seconds between repetitions."""

    def __init__(self) -> None:
        self.received = 0
        self._until = 0.0
        # nohup ignores SIGHUP, and a shell ignores SIGINT for background jobs; both stay ignored.
        self._handled = [
            number
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
        ]
        for number in self._handled:
            signal.signal(number, self._raise)
        signal.signal(signal.SIGALRM, self._raise_again)
        sys.unraisablehook = self._hide_own_errors

    def ignore(self) -> None:
        """Ignore further signals while the process ends."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number in self._handled:
            signal.signal(number, signal.SIG_IGN)

    def _raise(self, number: int, frame: object) -> None:
        self.received, self._until = number, time.monotonic() + self.PATIENCE_S
        self.ignore()
        signal.setitimer(signal.ITIMER_REAL, self.AGAIN_S, self.AGAIN_S)
        raise self._error()

    def _error(self) -> BaseException:
        return KeyboardInterrupt() if self.received == signal.SIGINT else _Signalled()

    def _raise_again(self, *_: object) -> None:
        """Raise the exception again unless it is being handled; end the process when `PATIENCE_S` is over."""
        if time.monotonic() > self._until:
            self._end()
        # While it is being handled, the clean-up code runs in an `except`, a `finally` or an `__exit__`.
        error = sys.exc_info()[1]
        while error is not None and not isinstance(error, (KeyboardInterrupt, _Signalled)):
            error = error.__context__
        if error is None:
            raise self._error()

    def _hide_own_errors(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Do not report own exceptions that Python drops because a destructor raised them: they are raised again."""
        if not isinstance(unraisable.exc_value, (KeyboardInterrupt, _Signalled)):
            sys.__unraisablehook__(unraisable)

    def _end(self) -> None:
        _end_workers()
        _kill_children()
        if "ringprof.common.scratch" in sys.modules:
            sys.modules["ringprof.common.scratch"].remove_all()
        os._exit(128 + self.received)


def _kill_children() -> None:
    """Kill the child processes (Linux only): ranks that were just being started when the signal came."""
    for thread in os.listdir("/proc/self/task") if sys.platform == "linux" else ():
        with suppress(OSError), open(f"/proc/self/task/{thread}/children") as children:
            for child in children.read().split():
                os.kill(int(child), signal.SIGKILL)


def _end_workers() -> None:
    if "ringprof.common.process_pool" in sys.modules:
        sys.modules["ringprof.common.process_pool"].end_all()
