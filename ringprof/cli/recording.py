"""The options of the commands that record, defined once, and the request that they make."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import click

from ringprof.cli.values import Tokens
from ringprof.documents import document_lengths
from ringprof.errors import UsageError
from ringprof.record import Request
from ringprof.record.resolve import DTYPES
from ringprof.run import Workload

_SAME = ("hops", "device", "world", "ranks_per_host", "warmup", "iters", "controls", "verify")
"""Options that a request has under the same name."""

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def all_of(*options: Decorator) -> Decorator:
    """Gives a command these options, in this order."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def workload_options(*, heads: int = 40, head_dim: int = 128) -> Decorator:
    """Gives a command the options that say what attention is computed, but for the length."""
    return all_of(
        click.option("--batch", default=1, show_default=True, help="Batch size."),
        click.option("--heads", default=heads, show_default=True, help="Query heads."),
        click.option("--kv-heads", type=int, help="Key and value heads (grouped-query).  [default: --heads]"),
        click.option("--head-dim", default=head_dim, show_default=True, help="Size of a head."),
        click.option("--causal/--no-causal", default=True, show_default=True, help="Causal mask, or full attention."),
        click.option("--dtype", type=click.Choice(list(DTYPES)), default="bf16", show_default=True,
                     help="Type of the inputs."),
    )  # fmt: skip


on_ranks = all_of(
    click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True,
                 help="GPUs with NCCL, or CPU processes with gloo."),
    click.option("--world", type=int, help="Ranks.  [default: all GPUs; 4 on CPU]"),
)  # fmt: skip
"""Gives a command the options that say where it is computed."""

records = all_of(
    workload_options(),
    on_ranks,
    click.option("--hops", type=click.Choice(["auto", "nccl", "copy"]), default="auto", show_default=True,
                 help="What carries hops within a host: NCCL, or copy engines; auto: these where hops are large."),
    click.option("--ranks-per-host", type=int, help="Treat so many ranks as one host.  [default: as launched]"),
    click.option("--warmup", type=int, help="Untimed iterations.  [default: 3 on GPU, 1 on CPU]"),
    click.option("--iters", type=int, help="Timed iterations.  [default: 10 on GPU, 3 on CPU]"),
    click.option("--controls", is_flag=True,
                 help="Also time the blocks alone, all but sending, and all but computing."),
    click.option("--verify/--no-verify", default=True, show_default=True,
                 help="Compare the result with a float64 reference before timing."),
)  # fmt: skip
"""Gives a command the options that every recording has."""


def masks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command the options of a mask that is more than causal or none."""
    documents = click.option(
        "--documents", metavar="LENGTHS",
        help="Packed documents: 65536,32768x4, a file of lengths, or lognormal:mean=8192,sigma=1.2,seed=7.",
    )  # fmt: skip
    window = click.option(
        "--window-size", type=Tokens(), help="Sliding window: a token sees so many keys, its own counted."
    )
    return documents(window(function))


def workload_of(options: dict[str, Any], seq: int, *, backward: bool = True) -> Workload:
    """The problem that the options describe."""
    given, heads, kv_heads = options.get("documents"), options["heads"], options["kv_heads"]
    return Workload(
        batch=options["batch"], seq=seq, heads=heads, kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=options["head_dim"], causal=options["causal"], dtype=options["dtype"], backward=backward,
        documents=document_lengths(given, seq) if given else None, window=window_of(options.get("window_size")),
    )  # fmt: skip


def request_of(options: dict[str, Any], *, seq: int, strategy: str, backward: bool = True, **others: Any) -> Request:
    """What the options ask for; ``others`` are further fields of the request."""
    workload = workload_of(options, seq, backward=backward)
    chosen = {name: options[name] for name in _SAME}
    return Request(workload=workload, strategy=strategy, command=["ringprof", *sys.argv[1:]], **chosen, **others)


def window_of(given: int | None) -> int | None:
    """A window as a workload has it. Raises `UsageError` where it is none."""
    if given is not None and given < 1:
        raise UsageError(f"--window-size must be at least 1, a token's own key, not {given}")
    return given


def params_of(given: Iterable[str], form: str) -> dict[str, str]:
    """``KEY=VALUE`` as a dict; dashes in the last part of a key stand for underscores."""
    params = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{text!r} is not {form}", param_hint="--param")
        owner, dot, name = key.rpartition(".")
        params[f"{owner}{dot}{name.replace('-', '_')}"] = value
    return params
