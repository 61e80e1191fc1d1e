"""Measured rates of the attention kernels: ``ringprof calibrate --rates``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from ringprof.cli.options import Decorator, OneOf, all_of
from ringprof.cli.progress import show_progress
from ringprof.cli.values import Tokens
from ringprof.cli.write import text_style
from ringprof.common.json_object import JsonObject, json_text
from ringprof.iteration.request import DTYPES
from ringprof.report.tables import Column, Table
from ringprof.workload.workload import Workload

if TYPE_CHECKING:
    from ringprof.prediction.measured_rates import MaskRate


def rate_options(*, hidden: bool = False, **attributes: Any) -> Decorator:
    """Add the options of `rates_text` to a command; ``attributes`` are further arguments of each option."""
    attributes["hidden"] = hidden
    return all_of(
        click.option("--seq", type=Tokens(), **attributes,
                     help="With --rates: length in tokens.  [default: 16384 on GPU, 512 on CPU]"),
        click.option("--heads", default=16, show_default=True, type=click.IntRange(min=1), **attributes,
                     help="With --rates: query heads."),
        click.option("--kv-heads", type=click.IntRange(min=1), **attributes,
                     help="With --rates: key and value heads.  [default: --heads]"),
        click.option("--head-dim", default=128, show_default=True, type=click.IntRange(min=1), **attributes,
                     help="With --rates: head size."),
        click.option("--dtype", type=OneOf(list(DTYPES)), default="bf16", show_default=True, **attributes,
                     help="With --rates: data type of the inputs."),
        click.option("--device", type=OneOf(["auto", "cuda", "cpu"]), default="auto", show_default=True, **attributes,
                     help="With --rates: device."),
    )  # fmt: skip


def rates_text(
    form: str, output: str | None, *, seq: int | None, heads: int, kv_heads: int | None, head_dim: int, dtype: str,
    device: str,
) -> str:  # fmt: skip
    """Measure all kernels and format their rates. Raises `UsageError` for a device that is not available."""
    with show_progress("kernels") as notify:
        import torch

        from ringprof.iteration.resolve import resolve_device
        from ringprof.prediction.measured_rates import kernel_rates
        from ringprof.ranks.machine import device_name

        target = torch.device(resolve_device(device), *([0] if resolve_device(device) == "cuda" else []))
        seq = seq or (16384 if target.type == "cuda" else 512)
        workload = Workload(seq=seq, heads=heads, kv_heads=kv_heads or heads, head_dim=head_dim, dtype=dtype)
        rates = list(kernel_rates(workload, target, notify))
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
        _table(rates, 1e3 if on_cpu else 1.0).text(text_style(output)),
        *(f"{name}: {reason}" for name, reason in reasons if reason),
    ]
    return "\n".join(lines) + "\n"


def _table(rates: Iterable[MaskRate], factor: float) -> Table:
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
