"""Progress of a recording on stderr: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import click


class LineProgress(AbstractContextManager["LineProgress"]):
    """Progress reporter for logs and pipes: one line per phase."""

    def __exit__(self, *error: object) -> None:
        pass

    def say(self, text: str) -> None:
        click.echo(text, err=True)

    def start(self, phase: str, total: int) -> None:
        click.echo(phase if total == 1 else f"{phase}: {total}", err=True)

    def advance(self) -> None:
        pass


class BarProgress(AbstractContextManager["BarProgress"]):
    """Progress reporter for terminals: one bar per phase."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=Console(stderr=True),
        )  # fmt: skip
        self._bar: Any = None

    def __enter__(self) -> BarProgress:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def start(self, phase: str, total: int) -> None:
        self._bar = self._progress.add_task(phase, total=total)

    def advance(self) -> None:
        self._progress.advance(self._bar)

    def move_to(self, done: int) -> None:
        """Set the number of finished steps of the current phase."""
        self._progress.update(self._bar, completed=done)


def reporter() -> BarProgress | LineProgress:
    """Return the progress reporter for this stderr: bars on a terminal, else lines."""
    return BarProgress() if sys.stderr.isatty() else LineProgress()


@contextmanager
def loading_progress() -> Iterator[Callable[[str, int, int], None] | None]:
    """Yield a callback that shows the progress of reading many ranks on a terminal; None without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    bars: list[BarProgress] = []
    phase = [""]
    with ExitStack() as stack:

        def notify(what: str, done: int, of: int) -> None:
            if not bars:
                bars.append(stack.enter_context(BarProgress()))
            if what != phase[0]:
                phase[0] = what
                bars[0].start(what, of)
            bars[0].move_to(done)

        yield notify
