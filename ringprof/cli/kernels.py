"""``ringprof kernels``: list the attention kernels with their features."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from ringprof.cli.options import Command
from ringprof.cli.progress import show_progress
from ringprof.cli.write import formats, print_or_write, text_style, to_file
from ringprof.common.json_object import rows_json
from ringprof.report.tables import Column, Table

if TYPE_CHECKING:
    from ringprof.strategies.kernels.kernel import Kernel

_FEATURES: tuple[tuple[str, Column, Callable[[type[Kernel]], object]], ...] = (
    ("types", Column("types", left=True, drop=5), lambda kernel: kernel.types()),
    ("head_dim", Column("head_dim", left=True, drop=4), lambda kernel: kernel.head_dims()),
    ("tried", Column("tried", left=True), lambda kernel: kernel.tested),
    ("windows", Column("windows", left=True), lambda kernel: kernel.takes_windows),
    ("documents", Column("documents", left=True), lambda kernel: "in one call" if kernel.varlen else "one call each"),
    ("softcap", Column("softcap", left=True), lambda kernel: kernel.takes_softcap),
    ("deterministic", Column("determi-\nnistic", left=True, drop=1), lambda kernel: kernel.has_deterministic_mode),
    ("delta", Column("delta", left=True, drop=3), lambda kernel: kernel.takes_delta),
    ("grouped_heads", Column("grouped\nheads", left=True, drop=2), lambda kernel: kernel.grouped_heads),
)
"""Features in the listing: name in JSON, column in the terminal, and function of the kernel that returns the value."""


@click.command("kernels", cls=Command)
@formats("json")
@to_file
def command(form: str, output: str | None) -> None:
    """List the attention kernels that `record --kernel` accepts, with their features, installed or not.

    Windows: supports sliding windows. Documents: computes packed documents in one call, or in one call each. Delta:
    takes rowsum(dO · O) instead of O. Tried: tested by ringprof's authors; the other kernels are called by their public
    signatures but are untested. `ringprof calibrate --rates` measures how fast each is here.
    """
    with show_progress("loading torch"):
        rows = _feature_rows()
    if form == "json":
        names = ("kernel", "here", *(name for name, *_ in _FEATURES))
        text = rows_json("ringprof.kernels/1", [dict(zip(names, row, strict=True)) for row in rows])
    else:
        columns = (Column("kernel"), Column("here", left=True, folds=True), *(column for _, column, _ in _FEATURES))
        text = Table("", columns, rows).text(text_style(output)) + "\n"
    print_or_write(text, output)


def _feature_rows() -> list[list[str]]:
    import torch

    from ringprof.strategies.kernels.registry import KERNELS

    devices = [torch.device(name) for name in (*(["cuda"] if torch.cuda.is_available() else []), "cpu")]
    rows = []
    for name, kernel in KERNELS.items():
        reasons = {device.type: kernel.missing(device) for device in devices}
        usable = [device for device, reason in reasons.items() if reason is None]
        availability = f"yes, on {' and '.join(usable)}" if usable else next(iter(reasons.values())) or ""
        values = (value_of(kernel) for _, _, value_of in _FEATURES)
        rows.append([name, availability, *(v if isinstance(v, str) else "yes" if v else "no" for v in values)])
    return rows
