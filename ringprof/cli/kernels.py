"""``ringprof kernels``: the attention kernels, and what each can compute."""

from __future__ import annotations

import json

import click

from ringprof.cli.write import print_or_write, text_style
from ringprof.record.resolve import need
from ringprof.report.tables import Column, Table

_FIELDS = (
    "kernel", "here", "types", "head_dim", "windows", "documents", "deterministic", "delta", "grouped_heads",
)  # fmt: skip
_COLUMNS = (
    Column("kernel"), Column("here", left=True, folds=True), Column("types", left=True),
    Column("head_dim", left=True, drop=4), Column("windows", left=True), Column("documents", left=True),
    Column("determi-\nnistic", left=True, drop=1), Column("delta", left=True, drop=3),
    Column("grouped\nheads", left=True, drop=2),
)  # fmt: skip


@click.command("kernels")
@click.option("--format", "form", type=click.Choice(["terminal", "json"]), default="terminal", show_default=True)
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write to this file instead of the terminal.")
def command(form: str, output: str | None) -> None:
    """List the attention kernels, installed or not: what `record --kernel` takes.

    Windows: sliding windows. Documents: packed ones in one call, or a call each. Delta: takes rowsum(dO · O) for O.
    """
    need("torch")
    rows = [_row(name) for name in _names()]
    if form == "json":
        text = json.dumps([dict(zip(_FIELDS, row, strict=True)) for row in rows], indent=1) + "\n"
    else:
        text = Table("", _COLUMNS, rows).text(text_style(output)) + "\n"
    print_or_write(text, output)


def _names() -> list[str]:
    from ringprof.strategies.kernels import KERNELS

    return list(KERNELS)


def _row(name: str) -> list[str]:
    import torch

    from ringprof.strategies.kernels import KERNELS

    kernel = KERNELS[name]
    reasons = {device: kernel.missing(torch.device(device)) for device in _devices()}
    found = [device for device, reason in reasons.items() if reason is None]
    return [
        name,
        f"yes, on {' and '.join(found)}" if found else next(iter(reasons.values())) or "",
        kernel.types(),
        kernel.head_dims(),
        _yes(kernel.takes_windows),
        "in one call" if kernel.several_lengths else "a call each",
        _yes(kernel.has_deterministic_mode),
        _yes(kernel.takes_delta),
        _yes(kernel.grouped_heads),
    ]


def _devices() -> list[str]:
    import torch

    return [*(["cuda"] if torch.cuda.is_available() else []), "cpu"]


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"
