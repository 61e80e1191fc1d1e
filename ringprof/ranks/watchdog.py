"""The watchdog thread of a rank: ends the process on a signal, when its parent dies or at the time limit.

A rank that waits in a collective is in native code, where Python runs no signal handler and raises no
KeyboardInterrupt. The watchdog is a separate thread. It receives the signal's number through a pipe, to which the
interpreter writes at once, and ends the process without the main thread.

A Python thread cannot run while another holds the interpreter's lock. For that case faulthandler's timer, a C thread,
is armed: ``HARD_KILL_S`` after the run's time limit it prints where the process hangs and kills it, unless the watchdog
has re-armed the timer.
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
INTERRUPT, PARENT_GONE, TIME_LIMIT = signal.SIGINT.name, "its parent's end", "time limit"
POLL_S = 0.5
"""Interval at which the parent and the time limit are checked."""
HARD_KILL_S = 8.0
"""Time after the time limit at which a process whose watchdog cannot run is killed."""
ENDING_S = 60.0
"""Upper bound on the time that shutting down takes, with the removal of files on a slow disk."""


class Watchdog:
    """A thread that ends this process on a signal, when the parent dies or at the time limit.

    ``on_end`` is called with the reason (``SIGINT``, `PARENT_GONE`, `TIME_LIMIT`, ...) and the exit code; then the
    process exits. ``on_end`` must be short, and must not run collectives. ``parent`` is the id of the process whose
    death ends this one; None: no process.
    """

    def __init__(self, on_end: Callable[[str, int], None], parent: int | None = None) -> None:
        self._on_end = on_end
        self._parent = parent
        self._limit: float | None = None
        self._patience_s = 0.0
        self._handlers: dict[int, Any] = {}
        self._stopped = threading.Event()
        self._wakeup_read, self._wakeup_write = os.pipe()

    def start(self) -> None:
        """Start the watchdog thread; call this from the main thread, the only one that may set signal handlers."""
        os.set_blocking(self._wakeup_write, False)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        for number in (number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN):
            # The interpreter writes to the pipe only for signals with a Python handler, so install an empty one.
            self._handlers[number] = signal.signal(number, lambda *_: None)
        threading.Thread(target=self._watch, name="ringprof-watchdog", daemon=True).start()

    def hand_over(self, on_end: Callable[[str, int], None], limit_s: float, patience_s: float) -> None:
        """Replace ``on_end``, and call it also when this process has run for ``limit_s`` seconds from now.

        ``patience_s`` is the extra time that this rank waits after the limit for another rank to end it.
        """
        self._patience_s, self._limit, self._on_end = patience_s, time.monotonic() + limit_s, on_end
        self._rearm_hard_kill(HARD_KILL_S)

    def stop(self) -> None:
        """Stop the thread, disarm the hard kill and restore the previous signal handlers."""
        self._stopped.set()
        faulthandler.cancel_dump_traceback_later()
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _watch(self) -> None:
        """Wait for a signal, the parent's end or the time limit, and end the process."""
        while not self._stopped.is_set():
            ready, _, _ = select.select([self._wakeup_read], [], [], POLL_S)
            if ready:
                number = os.read(self._wakeup_read, 1)[0]
                self._end(signal.Signals(number).name, 128 + number)
            elif self._parent is not None and os.getppid() != self._parent:
                self._end(PARENT_GONE, 3)
            elif self._limit is not None and time.monotonic() > self._limit:
                self._rearm_hard_kill(HARD_KILL_S)
                if time.monotonic() > self._limit + self._patience_s:
                    self._end(TIME_LIMIT, 3)

    def _rearm_hard_kill(self, delay_s: float) -> None:
        """Re-arm the hard kill for ``delay_s`` seconds after now or after the time limit, whichever is later."""
        if self._limit is not None:
            remaining_s = max(0.0, self._limit - time.monotonic())
            faulthandler.dump_traceback_later(remaining_s + delay_s, exit=True)
        if self._stopped.is_set():
            faulthandler.cancel_dump_traceback_later()

    def _end(self, reason: str, code: int) -> None:
        """Call ``on_end`` and exit; do nothing after `stop`."""
        if self._stopped.is_set():
            return
        self._rearm_hard_kill(ENDING_S)
        try:
            self._on_end(reason, code)
        finally:
            os._exit(code)
