"""What commands write: text to the terminal or a file, and files beside it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import click

from ringprof.errors import InputError
from ringprof.files import replacing
from ringprof.report.text import TextStyle, printable

_Command = TypeVar("_Command", bound=Callable[..., Any])
to_file = click.option(
    "-o", "--output", type=click.Path(dir_okay=False), help="Write to this file instead of the terminal."
)
NARROWEST = 78
"""Below this a table would lose digits."""


def formats(*others: str) -> Callable[[_Command], _Command]:
    """Gives a command ``--format``, of ``terminal`` and others."""
    return click.option(
        "--format", "form", type=click.Choice(["terminal", *others]), default="terminal", show_default=True
    )


def say(text: str) -> None:
    """One line on stderr, of which a terminal obeys nothing: names in it may come from a stranger's file."""
    with suppress(OSError):  # nobody reads it, or the disk is full; the exit code says what it says
        click.echo(" ".join(printable(text).split()), err=True)


def print_or_write(text: str, output: str | None) -> None:
    """Print, or write to the file that was asked for instead."""
    if output is None:
        # Coloured by `text_style` or not at all: click would take forced colours out again.
        click.echo(text, nl=False, color=True)
    else:
        write_text(output, text)


def write_text(path: str | Path, text: str) -> None:
    """Write a file and say so on stderr. Raises `InputError` where it cannot be written."""
    with written(path) as place:
        place.write_text(text, encoding="utf-8")


@contextmanager
def written(path: str | Path) -> Iterator[Path]:
    """A place to write a file to, which stands where it is wished once it is complete; then says so on stderr.

    Raises `InputError` where it cannot be written.
    """
    try:
        with replacing(path) as place:
            yield place
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None
    say(f"Wrote {path}")


def text_style(output: str | None, width: int | None = None) -> TextStyle:
    """How to write: colour only to a terminal that wants it or by FORCE_COLOR, ASCII where the output knows no more."""
    to_terminal = output is None and sys.stdout.isatty()
    forced = os.environ.get("FORCE_COLOR", "0") not in ("", "0")
    plain = bool(os.environ.get("NO_COLOR")) or (os.environ.get("TERM") == "dumb" and not forced)
    columns = width or max(NARROWEST, shutil.get_terminal_size((80, 24)).columns)
    color = (to_terminal or (forced and output is None)) and not plain
    # Without a terminal, and where nobody asked for a width, nothing needs to be left out of a table.
    wide = not to_terminal and width is None and "COLUMNS" not in os.environ
    return TextStyle(width=columns, color=color, ascii_only=knows_only_ascii(output), wide_tables=wide)


def knows_only_ascii(output: str | None) -> bool:
    """Whether the terminal lacks the characters of bars and units; a file never does."""
    try:
        "█▏·µ…".encode("utf-8" if output else (sys.stdout.encoding or "ascii"))
    except (UnicodeEncodeError, LookupError):
        return True
    return False
