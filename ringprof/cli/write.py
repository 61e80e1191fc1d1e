"""What commands print, and the files that they write instead or beside it."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ringprof.errors import InputError


def print_or_write(text: str, path: str | None) -> None:
    """Print a report, or write it to the file that the user named."""
    if path is None:
        click.echo(text, nl=False)
    else:
        write_text(path, text)


def write_text(path: str | Path, text: str) -> None:
    """Write a file and say so on stderr. Raises `InputError` where it cannot be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None
    click.echo(f"Wrote {path}", err=True)


def knows_only_ascii(path: str | None) -> bool:
    """Whether the terminal lacks the characters of bars and units; a file never does."""
    try:
        "█▏·µ…".encode("utf-8" if path else (sys.stdout.encoding or "ascii"))
    except (UnicodeEncodeError, LookupError):
        return True
    return False
