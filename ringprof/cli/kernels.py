"""``ringprof kernels``: list the attention kernels with their features."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from ringprof.cli.options import Command
from ringprof.cli.progress import show_progress
from ringprof.cli.write import formats, print_or_write, text_style, to_file
from ringprof.common.json_object import JsonObject, rows_json
from ringprof.report.tables import Column, Table
from ringprof.scale.workers import Notify

if TYPE_CHECKING:
    import torch

    from ringprof.strategies.kernels.kernel import Kernel

_PROVEN_SIZES = 64, 96, 128, 192, 256
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
@click.option(
    "--prove",
    is_flag=True,
    help="Prove the installed kernels first (not flex on a GPU): heads of 64 to 256, each kind of mask.",
)
@formats("json")
@to_file
def command(form: str, output: str | None, *, prove: bool) -> None:
    """List the attention kernels that `record --kernel` accepts, with their features, installed or not.

    Windows: supports sliding windows. Documents: computes packed documents in one call, or in one call each. Delta:
    takes rowsum(dO · O) instead of O. Tried: tested by ringprof's authors; the other kernels are called by their public
    signatures but are untested. Proofs: how many blocks the installed build has computed right, compared with float64
    at their first use. `ringprof calibrate --rates` measures how fast each is here.
    """
    with show_progress("loading torch") as notify:
        import torch

        devices = [*([torch.device("cuda", 0)] if torch.cuda.is_available() else []), torch.device("cpu")]
        if prove:
            _prove_all(devices, notify)
        rows, proofs = _feature_rows(devices), _proofs(devices)
    if form == "json":
        names = ("kernel", "here", *(name for name, *_ in _FEATURES))
        documents = [dict(zip(names, row, strict=True)) | {"proofs": proofs[row[0]]} for row in rows]
        text = rows_json("ringprof.kernels/1", documents)
    else:
        columns = (Column("kernel"), Column("here", left=True, folds=True), *(column for _, column, _ in _FEATURES))
        columns = *columns, Column("proofs", left=True)
        counted = [[*row, _count(proofs[row[0]])] for row in rows]
        text = Table("", columns, counted).text(text_style(output)) + "\n"
        text += "".join(
            f"{name} {proof['error']}\n" for name, known in proofs.items() for proof in known if proof["error"]
        )
    print_or_write(text, output)


def _prove_all(devices: list[torch.device], notify: Notify) -> None:
    """Prove the installed kernels for the types that training uses on each device."""
    import torch

    from ringprof.strategies.kernels.proof import Case, blocks_of, cases_for, prove
    from ringprof.strategies.kernels.registry import KERNELS, reason_against

    cases = {
        (kernel, case, device): None
        for device in devices
        for kernel in KERNELS.values() if kernel.production and (device.type == "cpu" or not kernel.compiles_by_heads)
        for dtype in (torch.bfloat16, torch.float32 if device.type == "cpu" else torch.float16)
        for size in _PROVEN_SIZES if reason_against(kernel, device, dtype, size) is None
        for group in (1, 4)
        for causal in (True, False)
        for blocks in [blocks_of(causal=causal, several_ranks=True, windows=kernel.takes_windows, documents=True)]
        for case in cases_for(kernel, Case("", dtype, size, size, group), blocks, device)
    }  # fmt: skip
    for number, (kernel, case, device) in enumerate(cases):
        notify("proofs", number, len(cases))
        prove(kernel, case, device)


def _proofs(devices: list[torch.device]) -> dict[str, list[JsonObject]]:
    """Return the known verdicts on the installed builds by kernel."""
    from ringprof.strategies.kernels.proof import known_verdicts
    from ringprof.strategies.kernels.registry import KERNELS

    return {
        name: [
            {"device": device.type, "case": case, "error": error}
            for device in devices if kernel.missing(device) is None
            for case, error in known_verdicts(kernel, device).items()
        ]
        for name, kernel in KERNELS.items()
    }  # fmt: skip


def _count(proofs: list[JsonObject]) -> str:
    wrong = sum(proof["error"] is not None for proof in proofs)
    return ", ".join([f"{len(proofs) - wrong} right"] * (len(proofs) > wrong) + [f"{wrong} wrong"] * (wrong > 0))


def _feature_rows(devices: list[torch.device]) -> list[list[str]]:
    from ringprof.strategies.kernels.registry import KERNELS

    rows = []
    for name, kernel in KERNELS.items():
        reasons = {device.type: kernel.missing(device) for device in devices}
        usable = [device for device, reason in reasons.items() if reason is None]
        availability = f"yes, on {' and '.join(usable)}" if usable else next(iter(reasons.values())) or ""
        values = (value_of(kernel) for _, _, value_of in _FEATURES)
        rows.append([name, availability, *(v if isinstance(v, str) else "yes" if v else "no" for v in values)])
    return rows
