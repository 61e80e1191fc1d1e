"""A rank's watchdog: ends the process at a signal, at the parent's death or at the time limit.

A rank that waits in a collective sits in native code, where Python runs no signal handler and raises no
KeyboardInterrupt. The watchdog is a thread of its own: the signal's number reaches it through a pipe that the
interpreter writes to at once, and it ends the process without asking the main thread.

A thread of Python's runs only while no other keeps the interpreter's lock. Against that there is faulthandler's timer,
a thread of C's: ``LAST_RESORT_S`` after the run's time limit it prints where the process hangs and ends it, unless the
watchdog puts it off.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PARENT_GONE, TIME_LIMIT = "its parent's end", "time limit"
LOOK_S = 0.5
LAST_RESORT_S = 8.0
ENDING_S = 60.0
"""More than ending takes, with what it removes from a slow disk."""


class Watchdog:
    """Ends this process when it must end.

    ``on_end`` is called with the reason (``SIGINT``, `PARENT_GONE`, `TIME_LIMIT`, ...) and the exit code; then the
    process is gone. It must be short, and must not communicate. ``parent`` is the process to live no longer than.
    """

    def __init__(self, on_end: Callable[[str, int], None], parent: int | None = None) -> None:
        self._on_end = on_end
        self._parent = parent
        self._limit: float | None = None
        self._patience_s = 0.0
        self._handlers: dict[int, Any] = {}
        self._stopped = threading.Event()
        self._read, self._write = os.pipe()

    def start(self) -> None:
        """Begin to watch; must be called from the main thread, which signals are tied to."""
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in (one for one in _SIGNALS if signal.getsignal(one) != signal.SIG_IGN):
            # Any handler of Python's own: without one the interpreter would not write to the pipe.
            self._handlers[number] = signal.signal(number, lambda *_: None)
        threading.Thread(target=self._watch, name="ringprof-watchdog", daemon=True).start()

    def hand_over(self, on_end: Callable[[str, int], None], limit_s: float, patience_s: float) -> None:
        """From here on call ``on_end``, also where this process runs for more than ``limit_s`` seconds.

        ``patience_s`` is how much longer it waits for another rank to end it.
        """
        self._patience_s, self._limit, self._on_end = patience_s, time.monotonic() + limit_s, on_end
        self._put_off_the_last_resort(LAST_RESORT_S)

    def stop(self) -> None:
        """Stop watching, and give the signals back."""
        self._stopped.set()
        faulthandler.cancel_dump_traceback_later()
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _watch(self) -> None:
        while not self._stopped.is_set():
            ready, _, _ = select.select([self._read], [], [], LOOK_S)
            if ready:
                number = os.read(self._read, 1)[0]
                self._end(signal.Signals(number).name, 128 + number)
            elif self._parent is not None and os.getppid() != self._parent:
                self._end(PARENT_GONE, 3)
            elif self._limit is not None and time.monotonic() > self._limit:
                self._put_off_the_last_resort(LAST_RESORT_S)
                if time.monotonic() > self._limit + self._patience_s:
                    self._end(TIME_LIMIT, 3)

    def _put_off_the_last_resort(self, by_s: float) -> None:
        """To so many seconds from now, or from the time limit where that is to come."""
        if self._limit is not None:
            left = max(0.0, self._limit - time.monotonic())
            faulthandler.dump_traceback_later(left + by_s, exit=True)
        if self._stopped.is_set():
            faulthandler.cancel_dump_traceback_later()

    def _end(self, reason: str, code: int) -> None:
        if self._stopped.is_set():
            return
        self._put_off_the_last_resort(ENDING_S)
        try:
            self._on_end(reason, code)
        finally:
            os._exit(code)
