"""The options of the commands that record, defined once, and the request that they make."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, get_args

import click

from ringprof.cli.values import Decorator, Number, Tokens, all_of
from ringprof.cli.write import say
from ringprof.documents import document_lengths
from ringprof.errors import RingprofError, UsageError
from ringprof.json_object import JsonObject, Options
from ringprof.record import RecordRequest
from ringprof.record.request import DTYPES
from ringprof.run import LayerAround, Phase, Workload
from ringprof.validation import refuse_below_one

_SAME = ("hops", "device", "world", "ranks_per_host", "warmup", "iters", "controls", "verify")
"""Options that a request has under the same name."""

_SCORES_AND_HEADS = ("v_head_dim", "softcap", "sinks")


def workload_options(*, heads: int = 40, head_dim: int = 128) -> Decorator:
    """Gives a command the options that say what attention is computed, but for the length."""
    return all_of(
        click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Batch size."),
        click.option("--heads", type=click.IntRange(min=1), default=heads, show_default=True, help="Query heads."),
        click.option("--kv-heads", type=click.IntRange(min=1),
                     help="Key and value heads (grouped-query).  [default: --heads]"),
        click.option("--head-dim", type=click.IntRange(min=1), default=head_dim, show_default=True,
                     help="Size of a head."),
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
                 help="What carries hops within a host: NCCL, or copy engines; auto: these where all ranks can."),
    click.option("--ranks-per-host", type=int, help="Treat so many ranks as one host.  [default: as launched]"),
    click.option("--warmup", type=int, help="Untimed iterations.  [default: 3 on GPU, 1 on CPU]"),
    click.option("--iters", type=int, help="Timed iterations.  [default: 10 on GPU, 3 on CPU]"),
    click.option("--controls", is_flag=True,
                 help="Also time the blocks alone, all but sending, and all but computing."),
    click.option("--verify/--no-verify", default=True, show_default=True,
                 help="Compare the result with a float64 reference before timing."),
)  # fmt: skip
"""Gives a command the options that every recording has."""


masks = all_of(
    click.option("--documents", metavar="LENGTHS",
                 help="Packed documents: 65536,32768x4, a file of lengths, or lognormal:mean=8192,sigma=1.2,seed=7."),
    click.option("--window-size", type=Tokens(), help="Sliding window: a token sees so many keys, its own counted."),
    click.option("--prefix", type=Tokens(),
                 help="So many first keys of its document, beside a window; with --no-causal and none, a prefix LM."),
)  # fmt: skip
"""Gives a command the options of a mask that is more than causal or none."""

phases = all_of(
    click.option("--phase", type=click.Choice(get_args(Phase)), default="training", show_default=True,
                 help="prefill and decode: new tokens over a cache, forward only; `ringprof strategies` says which do"
                 " it."),
    click.option("--kv-length", type=Tokens(),
                 help="Keys of each sequence, its new tokens' own (--seq; decode: 1) among them."),
)  # fmt: skip
"""Gives a command the options of prefill and decode."""

layers = all_of(
    click.option("--layer", type=click.Choice(["ddp", "fsdp2"]),
                 help="Whole layers around attention, their gradients brought together by DDP or FSDP2."),
    click.option("--layers", type=int, help="With --layer, how many.  [default: 1]"),
    click.option("--mlp-size", type=int,
                 help="With --layer, of the gated MLP.  [default: 8/3 of heads x head-dim, up to 256 more]"),
    click.option("--checkpoint", is_flag=True, help="With --layer, compute each again in the backward pass."),
)  # fmt: skip
"""Gives a command the options of whole layers."""

scores_and_heads = all_of(
    click.option("--v-head-dim", type=click.IntRange(min=1), help="Size of v's heads, where it is smaller (MLA)."),
    click.option("--softcap", type=Number(min=0, min_open=True, max=1e9),
                 help="Scores s become softcap * tanh(s / softcap)."),
    click.option("--sinks", type=click.Choice(["learned"]),
                 help="A learned logit a head that takes part in the softmax."),
)  # fmt: skip
"""Gives a command the options of what is done to scores, and of heads of two sizes."""


def workload_of(options: Options, seq: int, *, backward: bool = True) -> Workload:
    """The problem that the options describe."""
    heads, kv_heads = options["heads"], options["kv_heads"]
    around = {"backward": backward, **phase_of(options, seq), **layer_of(options), **mask_of(options, seq)}
    return Workload(
        batch=options["batch"], seq=seq, heads=heads, kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=options["head_dim"], v_head_dim=_smaller(options.get("v_head_dim"), options["head_dim"]),
        dtype=options["dtype"], softcap=options.get("softcap"), sinks=options.get("sinks"), **around,
    )  # fmt: skip


def _refuse_beside(options: Options, other: str, names: Iterable[str]) -> None:
    for name in names:
        if options.get(name):
            raise UsageError(f"--{name.replace('_', '-')}: not made for {other}")


def layer_of(options: Options) -> JsonObject:
    """What a workload is told of whole layers; nothing where attention stands alone. Raises `UsageError`."""
    given = {name: options.get(name) for name in ("layers", "mlp_size", "checkpoint")}
    if options.get("layer") is None:
        unused = next((name for name, value in given.items() if value), None)
        if unused:
            raise UsageError(f"--{unused.replace('_', '-')} goes with --layer ddp or --layer fsdp2")
        return {}
    if options.get("phase", "training") != "training":
        raise UsageError("--layer: not made for prefill and decode")
    _refuse_beside(options, "--layer", _SCORES_AND_HEADS)
    refuse_below_one({"--layers": given["layers"], "--mlp-size": given["mlp_size"]})
    hidden = options["heads"] * options["head_dim"]
    mlp = given["mlp_size"] or -(-8 * hidden // 3 // 256) * 256
    layer = LayerAround(parallel=options["layer"], mlp_size=mlp, checkpoint=options["checkpoint"])
    return {"layer": layer, "layers": given["layers"] or 1}


def phase_of(options: Options, seq: int) -> JsonObject:
    """What a workload is told of its phase; nothing in training. Raises `UsageError`."""
    phase, keys = options.get("phase", "training"), options.get("kv_length")
    if phase == "training":
        if keys is not None:
            raise UsageError("--kv-length goes with --phase prefill or --phase decode")
        return {}
    if keys is None:
        raise UsageError(f"--phase {phase} needs --kv-length, the keys of each sequence")
    if keys < seq:
        raise UsageError(f"--kv-length {keys} holds the new tokens, too: at least {seq}")
    _refuse_beside(options, f"--phase {phase}", ("documents",))
    return {"phase": phase, "kv_length": keys, "backward": False}


def _smaller(of_v: int | None, size: int) -> int | None:
    """The size of v's heads where it is another than q's and k's."""
    if of_v is not None and of_v > size:
        raise UsageError(f"--v-head-dim {of_v}: heads of v are at most as large as those of q and k, {size}")
    return None if of_v == size else of_v


def request_of(options: Options, *, seq: int, strategy: str, backward: bool = True, **others: Any) -> RecordRequest:
    """What the options ask for; ``others`` are further fields of the request."""
    workload = workload_of(options, seq, backward=backward)
    chosen = {name: options[name] for name in _SAME}
    return RecordRequest(workload=workload, strategy=strategy, command=["ringprof", *sys.argv[1:]], **chosen, **others)


def mask_of(options: Options, seq: int) -> JsonObject:
    """What a workload of ``seq`` tokens is told of its mask. Raises `UsageError`."""
    documents, window, prefix = (options.get(name) for name in ("documents", "window_size", "prefix"))
    refuse_below_one({"--window-size": window, "--prefix": prefix})
    causal = options["causal"]
    if prefix is not None and window is None and causal:
        raise UsageError(f"--prefix {prefix} goes with --window-size, or (prefix LM) with --no-causal: else all see it")
    lengths = document_lengths(documents, seq) if documents else None
    return {"causal": causal, "documents": lengths, "window": window, "prefix": prefix}


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


def end_as_rank(rank: int, work: Callable[[], int], is_own: Callable[[RingprofError], bool]) -> NoReturn:
    """Do this rank's part, and end the process at once with the exit code that ``work`` returns.

    Leaving in the interpreter's good order can block in a communicator whose peers are gone. What all ranks refuse, or
    find wrong, rank 0 says for all; an error that ``is_own``, this rank's alone, it says itself.
    """
    try:
        code = work()
    except RingprofError as error:
        code = error.exit_code
        if rank == 0 or is_own(error):
            say(f"ringprof: {error}")
    except Exception:
        code = 3
        click.echo(f"ringprof: rank {rank} failed:\n{traceback.format_exc()}", err=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
