"""Progress on stderr: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import click

from ringprof.cli.write import say
from ringprof.scale.workers import Notify

LINE_EVERY_VARIABLE, LINE_EVERY_S = "RINGPROF_PROGRESS_S", 10.0
"""Seconds between two lines in a log, and the environment variable that sets another number."""
_BAR_AFTER_S = 1.0
"""Seconds after which a bar appears: what is faster needs none."""


class LineProgress(AbstractContextManager["LineProgress"]):
    """Progress reporter for logs and pipes: one line per phase, and one every `LINE_EVERY_S` seconds of a long one."""

    def __init__(self) -> None:
        self._phase, self._done, self._total, self._printed = "", 0, 0, 0.0

    def __exit__(self, *error: object) -> None:
        pass

    def say(self, text: str) -> None:
        click.echo(text, err=True)
        self._printed = time.monotonic()

    def start(self, phase: str, total: int) -> None:
        self._phase, self._done, self._total = phase, 0, total
        self.say(phase if total == 1 else f"{phase}: {total}")

    def advance(self) -> None:
        self._done += 1
        if self._done < self._total and time.monotonic() - self._printed >= _line_every_s():
            self.say(f"{self._phase}: {self._done} of {self._total}")


class BarProgress(AbstractContextManager["BarProgress"]):
    """Progress reporter for terminals: one bar per phase; ``transient`` bars are gone at the end."""

    def __init__(self, *, transient: bool = False) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=Console(stderr=True), transient=transient,
        )  # fmt: skip
        self._bar: Any = None

    def __enter__(self) -> BarProgress:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def start(self, phase: str, total: int | None) -> None:
        self._bar = self._progress.add_task(phase, total=total)

    def advance(self) -> None:
        self._progress.advance(self._bar)

    def move_to(self, done: int, total: int | None) -> None:
        """Set the number of finished steps of the current phase, and how many there are (None: not known)."""
        self._progress.update(self._bar, completed=done, total=total)


def reporter() -> BarProgress | LineProgress:
    """Return the progress reporter for this stderr: bars on a terminal, else lines."""
    return BarProgress() if sys.stderr.isatty() else LineProgress()


@contextmanager
def show_progress(step: str) -> Iterator[Notify]:
    """Show the progress of what takes more than seconds, and yield the callback that names its current step.

    ``step`` is shown until the first call. On a terminal, a bar appears after `_BAR_AFTER_S`, and is gone at the end;
    elsewhere a line is printed every `LINE_EVERY_S` seconds, so that a log does not look like a hang.
    """
    state, ended = [(step, 0, 0)], threading.Event()

    def notify(what: str, done: int, of: int) -> None:
        state[0] = what, done, of

    thread = threading.Thread(
        target=_show_bar if sys.stderr.isatty() else _print_lines, args=(state, ended), daemon=True
    )
    try:
        with suppress(RuntimeError):  # the system has no thread left: the work matters more
            thread.start()
        yield notify
    finally:
        ended.set()
        if thread.ident is not None:
            thread.join()


_State = list[tuple[str, int, int]]
"""The current step, how many of its parts are done, and how many there are (0: not known); a list of one."""


def _show_bar(state: _State, ended: threading.Event) -> None:
    _leave_signals_to_main_thread()
    if ended.wait(_BAR_AFTER_S):
        return
    shown = ""
    with BarProgress(transient=True) as bar:
        while True:
            step, done, of = state[0]
            if step != shown:
                bar.start(step, of or None)
                shown = step
            bar.move_to(done, of or None)
            if ended.wait(0.1):
                return


def _print_lines(state: _State, ended: threading.Event) -> None:
    _leave_signals_to_main_thread()
    start = time.monotonic()
    while not ended.wait(_line_every_s()):
        step, done, of = state[0]
        say(f"{step}: {f'{done} of {of}, ' if of else ''}{time.monotonic() - start:.0f} s so far")


def _line_every_s() -> float:
    try:
        seconds = float(os.environ[LINE_EVERY_VARIABLE])
    except (KeyError, ValueError):
        return LINE_EVERY_S
    return min(seconds, threading.TIMEOUT_MAX) if seconds > 0 else LINE_EVERY_S


def _leave_signals_to_main_thread() -> None:
    """Block all signals in this thread: the main thread decides when it takes them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
