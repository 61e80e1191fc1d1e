"""``ringprof bench``: sweeps over strategies, sequence lengths and kernels."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ringprof.cli.progress import reporter
from ringprof.cli.write import write_text
from ringprof.record import Request
from ringprof.record.resolve import DTYPES
from ringprof.report import sweep as shown
from ringprof.run import Workload
from ringprof.sweep import figures_of, plan, run_sweep

FORMATS = {"json": shown.render_json, "csv": shown.render_csv, "markdown": shown.render_markdown}


class _List(click.ParamType[list[Any]]):
    """Values separated by commas."""

    def __init__(self, kind: type, name: str) -> None:
        self.kind, self.name = kind, name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[Any]:
        try:
            values = [self.kind(part.strip()) for part in str(value).split(",") if part.strip()]
        except ValueError:
            self.fail(f"{value!r} is not a list of {self.name}", param, ctx)
        return values or self.fail("the list is empty", param, ctx)


@click.command(name="bench")
@click.option("--strategies", required=True, type=_List(str, "names"), help="Such as burst,zigzag,usp.")
@click.option("--seq", "seqs", required=True, type=_List(int, "numbers"), help="Global lengths: 131072,262144.")
@click.option("--kernel", "kernels", default="auto", show_default=True, type=_List(str, "names"), help="One or more.")
@click.option("--hops", type=click.Choice(["nccl", "copy"]), default="nccl", show_default=True,
              help="As of `ringprof record`.")  # fmt: skip
@click.option("--batch", default=1, show_default=True, help="Batch size.")
@click.option("--heads", default=40, show_default=True, help="Query heads.")
@click.option("--kv-heads", type=int, help="Key and value heads.  [default: --heads]")
@click.option("--head-dim", default=128, show_default=True, help="Size of a head.")
@click.option("--causal/--no-causal", default=True, show_default=True, help="Causal mask, or full attention.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="bf16", show_default=True)
@click.option("-p", "--param", "params", multiple=True, metavar="[NAME.]KEY=VALUE",
              help="A parameter of all strategies, or of strategy NAME; repeatable.")  # fmt: skip
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True)
@click.option("--world", type=int, help="Ranks.  [default: all GPUs; 4 on CPU]")
@click.option("--ranks-per-host", type=int, help="Treat so many ranks as one host.")
@click.option("--warmup", type=int, help="Untimed iterations.")
@click.option("--iters", type=int, help="Timed iterations.")
@click.option("--controls", is_flag=True, help="As of `ringprof record`.")
@click.option("--verify/--no-verify", default=True, show_default=True, help="Check every row's result first.")
@click.option("--format", "form", type=click.Choice(["terminal", *FORMATS]), default="terminal", show_default=True)
@click.option("-o", "--output", default="traces/bench/sweep.json", show_default=True, type=click.Path(dir_okay=False),
              help="The sweep's file; its runs lie beside it. The same file again goes on with it.")  # fmt: skip
@click.option("--html", "page", type=click.Path(dir_okay=False), help="Also write the sweep as one HTML page.")
def command(
    strategies: list[str], seqs: list[int], kernels: list[str], form: str, output: str, page: str | None, **options: Any
) -> int:
    """Record every combination of strategies, lengths and kernels, and print a row for each as soon as it is there.

    A row that runs out of memory or fails says why, and the sweep goes on. After an interruption the same command goes
    on where it stopped.

    \b
    ringprof bench --strategies burst,zigzag,usp --seq 131072,262144 -p usp.ulysses_degree=2
    """
    requests = plan(_base(options), strategies, seqs, kernels, _params(options["params"]))
    rows = []
    if form == "terminal":
        click.echo(shown.header())
    with reporter() as progress:
        for row, analysis in run_sweep(requests, Path(output), progress):
            rows.append(figures_of(row, analysis))
            if form == "terminal":
                click.echo(shown.line(rows[-1]))
                sys.stdout.flush()
    if form != "terminal":
        click.echo(FORMATS[form](rows), nl=False)
    if page:
        from ringprof.report.page.document import render
        from ringprof.report.page.several import sweep_document

        write_text(page, render(sweep_document(rows, Path(output).stem)))
    return 0 if any(row["status"] == "ok" for row in rows) else 3


def _base(options: dict[str, Any]) -> Request:
    heads = options["heads"]
    workload = Workload(
        batch=options["batch"], seq=1, heads=heads, kv_heads=options["kv_heads"] or heads,
        head_dim=options["head_dim"], causal=options["causal"], dtype=options["dtype"],
    )  # fmt: skip
    same = ("hops", "device", "world", "ranks_per_host", "warmup", "iters", "controls", "verify")
    return Request(
        workload=workload, strategy="", command=["ringprof", *sys.argv[1:]], **{name: options[name] for name in same}
    )


def _params(given: tuple[str, ...]) -> dict[str, str]:
    params = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{text!r} is not [NAME.]KEY=VALUE", param_hint="--param")
        owner, dot, name = key.rpartition(".")
        params[f"{owner}{dot}{name.replace('-', '_')}"] = value
    return params
