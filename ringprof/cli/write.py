"""Files that commands write beside what they print."""

from __future__ import annotations

from pathlib import Path

import click

from ringprof.errors import InputError


def write_text(path: str | Path, text: str) -> None:
    """Write a file and say so on stderr. Raises `InputError` where it cannot be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None
    click.echo(f"Wrote {path}", err=True)
