"""Output of the commands: text to the terminal or a file, other files, and messages on stderr."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import click

from ringprof.cli.options import Advanced, OneOf
from ringprof.cli.values import Whole
from ringprof.common.files import replacing
from ringprof.errors import InputError
from ringprof.report.text import TextStyle, printable

_Command = TypeVar("_Command", bound=Callable[..., Any])
NARROWEST = 78
"""Minimum width in columns: a narrower table would lose digits."""


class OutputFile(click.Path):
    """Path of a file to write; one that cannot be written is refused before the work rather than after it."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = str(super().convert(value, param, ctx))
        if ctx is None or not ctx.resilient_parsing:
            refuse_unwritable(path)
        return path


def refuse_unwritable(path: str) -> None:
    """Raise `InputError` if the file cannot be written."""
    if os.path.exists(path) and os.access(path, os.W_OK):
        return
    try:
        tempfile.TemporaryFile(dir=os.path.dirname(os.path.realpath(path))).close()
    except OSError as error:
        raise _not_written(path, error) from None


def _not_written(path: str | Path, error: OSError) -> InputError:
    return InputError(f"{path}: cannot be written: {error.strerror or error}")


to_file = click.option("-o", "--output", type=OutputFile(), help="Write to this file instead of the terminal.")

with_width = click.option(
    "--width", cls=Advanced, type=Whole(min=NARROWEST),
    help="Output width in columns.  [default: the terminal's]",
)  # fmt: skip


def formats(*others: str, **attributes: Any) -> Callable[[_Command], _Command]:
    """Add ``--format`` to a command: ``terminal`` and other formats; ``attributes`` are arguments of the option."""
    return click.option(
        "--format", "form", type=OneOf(["terminal", *others]), default="terminal", show_default=True,
        help="Output format.", **attributes,
    )  # fmt: skip


def say(text: str) -> None:
    """Print one line on stderr, without control characters, since it may contain names from an untrusted file."""
    with suppress(OSError):  # stderr is closed, or the disk is full; the exit code stays the same
        click.echo(" ".join(printable(text).split()), err=True)


def print_or_write(text: str, output: str | None) -> None:
    """Print the text, or write it to the file ``output``."""
    if output is None:
        # `text_style` decides about colours; click would remove colours that the user forced.
        click.echo(text, nl=False, color=True)
    else:
        write_text(output, text)


def write_text(path: str | Path, text: str) -> None:
    """Write a file and report it on stderr. Raises `InputError` if it cannot be written."""
    with written(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def written(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path that becomes ``path`` when the file is complete, which is then reported on stderr.

    Raises `InputError` if the file cannot be written.
    """
    try:
        with replacing(path) as temporary:
            yield temporary
    except OSError as error:
        raise _not_written(path, error) from None
    say(f"Wrote {path}")


def text_style(output: str | None, width: int | None = None) -> TextStyle:
    """Choose the text style: colours on a terminal or with FORCE_COLOR, ASCII if the output's encoding has no more."""
    to_terminal = output is None and sys.stdout.isatty()
    forced = os.environ.get("FORCE_COLOR", "0") not in ("", "0")
    plain = bool(os.environ.get("NO_COLOR")) or (os.environ.get("TERM") == "dumb" and not forced)
    columns = width or max(NARROWEST, shutil.get_terminal_size((80, 24)).columns)
    color = (to_terminal or (forced and output is None)) and not plain
    # Without a terminal and without a requested width, a table can show all its columns.
    wide = not to_terminal and width is None and "COLUMNS" not in os.environ
    return TextStyle(width=columns, color=color, ascii_only=knows_only_ascii(output), wide_tables=wide)


def knows_only_ascii(output: str | None) -> bool:
    """Return whether the terminal's encoding lacks the characters of bars and units; a file's never does."""
    try:
        "█▏·µ…".encode("utf-8" if output else (sys.stdout.encoding or "ascii"))
    except (UnicodeEncodeError, LookupError):
        return True
    return False
