"""``ringprof kernels``: list the attention kernels with their features, or measure their rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from ringprof.cli.values import Tokens
from ringprof.cli.write import formats, print_or_write, text_style, to_file
from ringprof.common.json_object import JsonObject, json_text, rows_json
from ringprof.record.request import DTYPES
from ringprof.report.tables import Column, Table
from ringprof.run import Workload

if TYPE_CHECKING:
    from ringprof.strategies.kernels.kernel import Kernel

_FEATURES: tuple[tuple[str, Column, Callable[[type[Kernel]], object]], ...] = (
    ("types", Column("types", left=True, drop=5), lambda kernel: kernel.types()),
    ("head_dim", Column("head_dim", left=True, drop=4), lambda kernel: kernel.head_dims()),
    ("tried", Column("tried", left=True), lambda kernel: kernel.tested),
    ("windows", Column("windows", left=True), lambda kernel: kernel.takes_windows),
    ("documents", Column("documents", left=True), lambda kernel: "in one call" if kernel.varlen else "a call each"),
    ("softcap", Column("softcap", left=True), lambda kernel: kernel.takes_softcap),
    ("deterministic", Column("determi-\nnistic", left=True, drop=1), lambda kernel: kernel.has_deterministic_mode),
    ("delta", Column("delta", left=True, drop=3), lambda kernel: kernel.takes_delta),
    ("grouped_heads", Column("grouped\nheads", left=True, drop=2), lambda kernel: kernel.grouped_heads),
)
"""Features in the listing: name in JSON, column in the terminal, and function of the kernel that returns the value."""


@click.command("kernels")
@click.option("--measure", is_flag=True, help="Time every available kernel on every mask, on one device.")
@click.option("--seq", type=Tokens(), help="With --measure: length in tokens.  [default: 16384 on GPU, 512 on CPU]")
@click.option("--heads", default=16, show_default=True, type=click.IntRange(min=1), help="With --measure: query heads.")
@click.option("--kv-heads", type=click.IntRange(min=1), help="With --measure: kv heads.  [default: --heads]")
@click.option("--head-dim", default=128, show_default=True, type=click.IntRange(min=1),
              help="With --measure: head size.")  # fmt: skip
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="bf16", show_default=True,
              help="With --measure: data type of the inputs.")  # fmt: skip
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True,
              help="With --measure: device.")  # fmt: skip
@formats("json")
@to_file
def command(*, measure: bool, form: str, output: str | None, **sizes: Any) -> None:
    """List the attention kernels that `record --kernel` accepts, with their features, installed or not.

    Windows: supports sliding windows. Documents: computes packed documents in one call, or in one call each. Delta:
    takes rowsum(dO · O) instead of O. Tried: tested by ringprof's authors; the other kernels are called by their public
    signatures but are untested.
    """
    if measure:
        print_or_write(_rates_text(form, output, **sizes), output)
        return
    rows = _feature_rows()
    if form == "json":
        names = ("kernel", "here", *(name for name, *_ in _FEATURES))
        text = rows_json("ringprof.kernels/1", [dict(zip(names, row, strict=True)) for row in rows])
    else:
        columns = (Column("kernel"), Column("here", left=True, folds=True), *(column for _, column, _ in _FEATURES))
        text = Table("", columns, rows).text(text_style(output)) + "\n"
    print_or_write(text, output)


def _rates_text(
    form: str, output: str | None, *, seq: int | None, heads: int, kv_heads: int | None, head_dim: int, dtype: str,
    device: str,
) -> str:  # fmt: skip
    """Measure all kernels and format their rates. Raises `UsageError` for a device that is not available."""
    import torch

    from ringprof.record.kernel_rates import kernel_rates
    from ringprof.record.machine import device_name
    from ringprof.record.resolve import resolve_device

    target = torch.device(resolve_device(device), *([0] if resolve_device(device) == "cuda" else []))
    seq = seq or (16384 if target.type == "cuda" else 512)
    workload = Workload(seq=seq, heads=heads, kv_heads=kv_heads or heads, head_dim=head_dim, dtype=dtype)
    rates = list(kernel_rates(workload, target))
    if form == "json":
        setting = {"device": device_name(target), "device_type": target.type, "workload": workload}
        return json_text({"schema": "ringprof.kernel-rates/1", **setting, "rates": rates})
    on_cpu = target.type == "cpu"
    reasons = dict.fromkeys((rate.kernel, rate.reason) for rate in rates)
    lines = [
        f"{'GFLOP/s' if on_cpu else 'TFLOP/s'} of one call, forward and backward, on {device_name(target)}"
        + (": a CPU, which says nothing of a GPU" if on_cpu else ""),
        f"{seq} tokens, {workload.heads_in_words()}, {dtype}; by each mask's exact area; softcap is causal",
        "",
        _rates_table(rates, 1e3 if on_cpu else 1.0).text(text_style(output)),
        *(f"{name}: {reason}" for name, reason in reasons if reason),
    ]
    return "\n".join(lines) + "\n"


def _rates_table(rates: Iterable[Any], factor: float) -> Table:
    """Build a table with one row per usable kernel and two columns, forward and backward, per mask."""
    by_kernel: dict[str, JsonObject] = {}
    for rate in rates:
        by_kernel.setdefault(rate.kernel, {})[rate.mask] = rate
    masks = list(next(iter(by_kernel.values())))
    columns = [Column(f"{mask if way == 'fwd' else ''}\n{way}", "rate") for mask in masks for way in ("fwd", "bwd")]
    rows = []
    for kernel, by_mask in by_kernel.items():
        if any(rate.reason is None for rate in by_mask.values()):
            tflops = (value for rate in by_mask.values() for value in (rate.forward_tflops, rate.backward_tflops))
            rows.append([kernel, *(value and value * factor for value in tflops)])
    return Table("", (Column("kernel"), *columns), rows)


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
