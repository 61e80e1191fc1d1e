"""Showing what a recording does, on stderr: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

import click


class Lines:
    """A line for each phase: for logs and pipes."""

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def say(self, text: str) -> None:
        click.echo(text, err=True)

    def start(self, phase: str, total: int) -> None:
        click.echo(phase if total == 1 else f"{phase}: {total}", err=True)

    def advance(self) -> None:
        pass


class Bars:
    """A bar for each phase."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=Console(stderr=True),
        )  # fmt: skip
        self._bar: Any = None

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def start(self, phase: str, total: int) -> None:
        self._bar = self._progress.add_task(phase, total=total)

    def advance(self) -> None:
        self._progress.advance(self._bar)


def reporter() -> Bars | Lines:
    """The fitting one for this stderr."""
    return Bars() if sys.stderr.isatty() else Lines()
