"""``ringprof kernels``: the attention kernels, what each can compute, and how fast it does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

from ringprof.cli.values import Tokens
from ringprof.cli.write import formats, print_or_write, text_style, to_file
from ringprof.json_object import JsonObject, json_text, rows_json
from ringprof.record.request import DTYPES
from ringprof.report.tables import Column, Table
from ringprof.run import Workload

if TYPE_CHECKING:
    from ringprof.strategies.kernels.kernel import Kernel

_FACTS: tuple[tuple[str, Column, Callable[[type[Kernel]], object]], ...] = (
    ("types", Column("types", left=True, drop=5), lambda one: one.types()),
    ("head_dim", Column("head_dim", left=True, drop=4), lambda one: one.head_dims()),
    ("tried", Column("tried", left=True), lambda one: one.tested),
    ("windows", Column("windows", left=True), lambda one: one.takes_windows),
    ("documents", Column("documents", left=True), lambda one: "in one call" if one.varlen else "a call each"),
    ("softcap", Column("softcap", left=True), lambda one: one.takes_softcap),
    ("deterministic", Column("determi-\nnistic", left=True, drop=1), lambda one: one.has_deterministic_mode),
    ("delta", Column("delta", left=True, drop=3), lambda one: one.takes_delta),
    ("grouped_heads", Column("grouped\nheads", left=True, drop=2), lambda one: one.grouped_heads),
)
"""Of every kernel: the name in JSON, the column in the terminal, and the fact."""


@click.command("kernels")
@click.option("--measure", is_flag=True, help="Time every kernel that is here on every mask, on one device.")
@click.option("--seq", type=Tokens(), help="With --measure: tokens.  [default: 16384 on GPU, 512 on CPU]")
@click.option("--heads", default=16, show_default=True, type=click.IntRange(min=1), help="With --measure: query heads.")
@click.option("--kv-heads", type=click.IntRange(min=1), help="With --measure: kv heads.  [default: --heads]")
@click.option("--head-dim", default=128, show_default=True, type=click.IntRange(min=1),
              help="With --measure: size of a head.")  # fmt: skip
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="bf16", show_default=True,
              help="With --measure: type of the inputs.")  # fmt: skip
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True,
              help="With --measure: where.")  # fmt: skip
@formats("json")
@to_file
def command(*, measure: bool, form: str, output: str | None, **sizes: Any) -> None:
    """List the attention kernels, installed or not: what `record --kernel` takes.

    Windows: sliding windows. Documents: packed ones in one call, or a call each. Delta: takes rowsum(dO · O) for O.
    Tried: ringprof's authors have run it; others are called by their public signatures alone.
    """
    if measure:
        print_or_write(_measured(form, output, **sizes), output)
        return
    rows = _rows()
    if form == "json":
        names = ("kernel", "here", *(name for name, *_ in _FACTS))
        text = rows_json("ringprof.kernels/1", [dict(zip(names, row, strict=True)) for row in rows])
    else:
        columns = (Column("kernel"), Column("here", left=True, folds=True), *(column for _, column, _ in _FACTS))
        text = Table("", columns, rows).text(text_style(output)) + "\n"
    print_or_write(text, output)


def _measured(
    form: str, output: str | None, *, seq: int | None, heads: int, kv_heads: int | None, head_dim: int, dtype: str,
    device: str,
) -> str:  # fmt: skip
    """The rates as they will be printed. Raises `UsageError` for a device that is not there."""
    import torch

    from ringprof.record.kernel_rates import kernel_rates
    from ringprof.record.machine import device_name
    from ringprof.record.resolve import resolve_device

    where = torch.device(resolve_device(device), *([0] if resolve_device(device) == "cuda" else []))
    seq = seq or (16384 if where.type == "cuda" else 512)
    workload = Workload(seq=seq, heads=heads, kv_heads=kv_heads or heads, head_dim=head_dim, dtype=dtype)
    found = list(kernel_rates(workload, where))
    if form == "json":
        facts = {"device": device_name(where), "device_type": where.type, "workload": workload}
        return json_text({"schema": "ringprof.kernel-rates/1", **facts, "rates": found})
    on_cpu = where.type == "cpu"
    lines = [
        f"{'GFLOP/s' if on_cpu else 'TFLOP/s'} of one call, forward and backward, on {device_name(where)}"
        + (": a CPU, which says nothing of a GPU" if on_cpu else ""),
        f"{seq} tokens, {workload.heads_in_words()}, {dtype}; by each mask's exact area; softcap is causal",
        "",
        _rates_table(found, 1e3 if on_cpu else 1.0).text(text_style(output)),
        *(f"{name}: {reason}" for name, reason in dict.fromkeys((one.kernel, one.reason) for one in found) if reason),
    ]
    return "\n".join(lines) + "\n"


def _rates_table(found: Iterable[Any], factor: float) -> Table:
    """A row a kernel that computes anything here, two columns a mask."""
    by_kernel: dict[str, JsonObject] = {}
    for one in found:
        by_kernel.setdefault(one.kernel, {})[one.mask] = one
    names = list(next(iter(by_kernel.values())))
    columns = [Column(f"{mask if way == 'fwd' else ''}\n{way}", "rate") for mask in names for way in ("fwd", "bwd")]
    rows = [
        [kernel, *(x and x * factor for one in of.values() for x in (one.forward_tflops, one.backward_tflops))]
        for kernel, of in by_kernel.items()
        if any(one.reason is None for one in of.values())
    ]
    return Table("", (Column("kernel"), *columns), rows)


def _rows() -> list[list[str]]:
    import torch

    from ringprof.strategies.kernels.registry import KERNELS

    devices = [torch.device(name) for name in (*(["cuda"] if torch.cuda.is_available() else []), "cpu")]
    return [
        _row(name, kernel, {device.type: kernel.missing(device) for device in devices})
        for name, kernel in KERNELS.items()
    ]


def _row(name: str, kernel: type[Kernel], reasons: Mapping[str, str | None]) -> list[str]:
    found = [device for device, reason in reasons.items() if reason is None]
    here = f"yes, on {' and '.join(found)}" if found else next(iter(reasons.values())) or ""
    facts = (fact(kernel) for _, _, fact in _FACTS)
    return [name, here, *(one if isinstance(one, str) else "yes" if one else "no" for one in facts)]
