"""Options of the commands that record, defined once, and the request built from them."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any, get_args

import click

from ringprof.cli.options import Advanced, Decorator, OneOf, all_of
from ringprof.cli.values import FOR_RECURRENCES, ListOf, Number, Tokens, Whole
from ringprof.cli.write import say
from ringprof.common.json_object import JsonObject, Options
from ringprof.common.validation import refuse_below_one
from ringprof.errors import RingprofError, UsageError
from ringprof.iteration.request import DTYPES
from ringprof.proof.result import BATCH, HEADS, KV_HEADS
from ringprof.ranks.launcher import launcher_rank
from ringprof.recording import RecordRequest
from ringprof.workload.combinations import raise_if_refused
from ringprof.workload.documents import document_lengths
from ringprof.workload.recurrences import OPERATORS
from ringprof.workload.workload import LayerAround, Phase, Workload

_REQUEST_OPTIONS = ("hops", "device", "world", "ranks_per_host", "warmup", "iters", "controls", "verify")
"""Options that are fields of a request under the same name."""
_WORKLOAD_OPTIONS = ("phase", "kv_length", "softcap", "sinks", "operator", "conv_width")
"""Options that are fields of a workload under the same name."""


def workload_options(*, heads: int | None = 40, head_dim: int = 128) -> Decorator:
    """Add the options of the attention to a command, except the sequence length.

    With ``heads`` None, batch and heads default to those of a check.
    """
    checks = heads is None
    return all_of(
        click.option("--batch", type=Whole(min=1), default=None if checks else 1,
                     show_default=str(BATCH) if checks else True, help="Batch size."),
        click.option("--heads", type=Whole(min=1), default=heads,
                     show_default=str(HEADS) if checks else True, help="Number of query heads."),
        click.option("--kv-heads", type=Whole(min=1),
                     help="Number of key and value heads (grouped-query attention)."
                     f"  [default: {f'{KV_HEADS}, or --heads if set' if checks else '--heads'}]"),
        click.option("--head-dim", type=Whole(min=1), default=head_dim, show_default=True,
                     help="Head size."),
        click.option("--causal/--no-causal", default=True, show_default=True, help="Causal mask or full attention."),
        click.option("--dtype", type=OneOf(list(DTYPES)), default="bf16", show_default=True,
                     help="Data type of the inputs."),
        click.option("--forward-only", is_flag=True, help="Skip the backward pass."),
    )  # fmt: skip


on_ranks = all_of(
    click.option("--device", type=OneOf(["auto", "cuda", "cpu"]), default="auto", show_default=True,
                 help="GPUs with NCCL, or CPU processes with gloo."),
    click.option("--world", type=int, help="Number of ranks.  [default: all GPUs; 4 on CPU]"),
)  # fmt: skip
"""Decorator that adds the options for the device and the number of ranks."""

records = all_of(
    workload_options(),
    on_ranks,
    click.option("--hops", cls=Advanced, type=OneOf(["auto", "nccl", "copy"]), default="auto", show_default=True,
                 help="Intra-node transport: NCCL or CUDA copy engines (auto: copy engines if every rank supports"
                 " them)."),
    click.option("--ranks-per-node", "ranks_per_host", cls=Advanced, type=int,
                 help="Ranks per node; neighbouring ranks are treated as one node.  [default: as launched]"),
    click.option("--warmup", cls=Advanced, type=int,
                 help="Number of untimed iterations.  [default: 3 on GPU, 1 on CPU]"),
    click.option("--iters", type=int, help="Number of timed iterations.  [default: 10 on GPU, 3 on CPU]"),
    click.option("--controls", cls=Advanced, is_flag=True,
                 help="Also time three baselines: kernels only, without communication, without computation."),
    click.option("--verify/--no-verify", default=True, show_default=True,
                 help="Compare the result with a float64 reference before timing."),
)  # fmt: skip
"""Decorator that adds the options of every recording."""


masks = all_of(
    click.option("--documents", metavar="LENGTHS",
                 help="Packed documents: 65536,32768x4, a file of lengths, or lognormal:mean=8192,sigma=1.2,seed=7."),
    click.option("--window-size", cls=Advanced, type=Tokens(),
                 help="Sliding window: number of keys that a token attends to, its own included."),
    click.option("--prefix", cls=Advanced, type=Tokens(),
                 help="Always attend to the first N tokens of the document (global prefix), in addition to a window;"
                 " with --no-causal and no window, a prefix LM."),
)  # fmt: skip
"""Decorator that adds the options for packed documents, windows and prefixes."""

phases = all_of(
    click.option("--phase", type=OneOf(get_args(Phase)), default="training", show_default=True,
                 help="Training, or inference: prefill and decode compute new tokens over a K/V cache, forward only."
                 " `ringprof strategies` lists the strategies for inference."),
    click.option("--kv-length", type=Tokens(),
                 help="Inference: keys per sequence, including those of the new tokens (--seq; decode: 1)."),
)  # fmt: skip
"""Decorator that adds the options of prefill and decode."""

recurrences = all_of(
    click.option("--operator", type=OneOf(OPERATORS), default="attention", show_default=True,
                 help="What mixes the tokens: softmax attention, or a linear recurrence: gated delta net (gdn),"
                 " Mamba-2, gated linear attention with one decay per head (simple-gla) or per key channel (gla). For a"
                 " recurrence, `ringprof strategies` lists the strategies; --heads counts the heads of values,"
                 " --kv-heads those of queries and keys; --head-dim is the size of a key, --v-head-dim of a value."),
    click.option("--conv-width", cls=Advanced, type=Whole(min=1),
                 help="Width in tokens of the causal convolution before the recurrence.  [default: no convolution]"),
)  # fmt: skip
"""Decorator that adds the options of linear recurrences."""

layers = all_of(
    click.option("--layer", cls=Advanced, type=OneOf(["ddp", "fsdp2"]),
                 help="Run whole transformer layers, with their gradients reduced by DDP or FSDP2."),
    click.option("--layers", cls=Advanced, type=int,
                 help="With --layer: number of layers, a multiple of those of --pattern.  [default: 1; one pattern]"),
    click.option("--pattern", cls=Advanced, type=ListOf(OneOf(OPERATORS)), metavar="OPERATOR,...",
                 help="With --layer: operators of a hybrid model's layers, such as gdn,gdn,gdn,attention. --strategy"
                 " computes the attention and must have the contiguous layout."),
    click.option("--recurrent-strategy", cls=Advanced, type=OneOf(FOR_RECURRENCES),
                 help="With --pattern: strategy of the recurrences.  [default: state-scan]"),
    click.option("--mlp-size", cls=Advanced, type=int,
                 help="With --layer: intermediate size of the gated MLP.  [default: 8/3 of heads x head-dim, rounded up"
                 " to a multiple of 256]"),
    click.option("--checkpoint", cls=Advanced, is_flag=True,
                 help="With --layer: activation checkpointing (recompute each layer in the backward pass)."),
)  # fmt: skip
"""Decorator that adds the options of whole layers."""

scores_and_heads = all_of(
    click.option("--v-head-dim", cls=Advanced, type=Whole(min=1),
                 help="Head size of v, if it is smaller than --head-dim (MLA); with a recurrence, if it differs."),
    click.option("--softcap", cls=Advanced, type=Number(min=0, min_open=True, max=1e9),
                 help="Soft cap on the scores: s becomes softcap * tanh(s / softcap)."),
    click.option("--sinks", cls=Advanced, type=OneOf(["learned"]),
                 help="Attention sinks: one learned logit per head takes part in the softmax."),
)  # fmt: skip
"""Decorator that adds the options for v's head size, the soft cap and attention sinks."""


def workload_of(options: Options, seq: int, *, backward: bool = True) -> Workload:
    """Build the workload that the options describe. Raises `UsageError`."""
    raise_if_refused(options)
    heads, kv_heads = options["heads"], options["kv_heads"]
    fields = {"backward": backward and options.get("phase", "training") == "training", **mask_of(options, seq)}
    fields |= {name: options[name] for name in _WORKLOAD_OPTIONS if name in options} | layer_of(options)
    head_dim, v_size = options["head_dim"], options.get("v_head_dim")
    try:
        return Workload(
            batch=options["batch"], seq=seq, heads=heads, kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim, v_head_dim=None if v_size == head_dim else v_size, dtype=options["dtype"], **fields,
        )  # fmt: skip
    except ValueError as error:
        raise UsageError(str(error)) from None


def layer_of(options: Options) -> JsonObject:
    """Return the workload's fields for whole layers; empty for attention alone. Raises `UsageError`."""
    if options.get("layer") is None:
        return {}
    layers, mlp_size = options.get("layers"), options.get("mlp_size")
    refuse_below_one({"--layers": layers, "--mlp-size": mlp_size})
    hidden = options["heads"] * options["head_dim"]
    pattern = tuple(options.get("pattern") or ())
    strategy = (options.get("recurrent_strategy") or "state-scan") if set(pattern) - {"attention"} else None
    layer = LayerAround(
        parallel=options["layer"], mlp_size=mlp_size or -(-8 * hidden // 3 // 256) * 256,
        checkpoint=bool(options.get("checkpoint")), pattern=pattern or None, recurrent_strategy=strategy,
    )  # fmt: skip
    size = len(pattern or (1,))
    count = layers or size
    if count % size:
        raise UsageError(f"--layers {count} is not a multiple of the {size} layers of --pattern")
    return {"layer": layer, "layers": count}


def request_of(options: Options, *, seq: int, strategy: str, backward: bool = True, **others: Any) -> RecordRequest:
    """Build the request that the options describe; ``others`` are further fields of the request."""
    workload = workload_of(options, seq, backward=backward)
    chosen = {name: options[name] for name in _REQUEST_OPTIONS}
    return RecordRequest(workload=workload, strategy=strategy, command=["ringprof", *sys.argv[1:]], **chosen, **others)


def mask_of(options: Options, seq: int) -> JsonObject:
    """Return the mask fields of a workload of ``seq`` tokens. Raises `UsageError`."""
    documents, window, prefix = (options.get(name) for name in ("documents", "window_size", "prefix"))
    refuse_below_one({"--window-size": window, "--prefix": prefix})
    causal = options["causal"]
    raise_if_refused({"window_size": window, "prefix": prefix, "causal": causal})
    lengths = document_lengths(documents, seq) if documents else None
    return {"causal": causal, "documents": lengths, "window": window, "prefix": prefix}


def params_of(texts: Iterable[str], form: str) -> dict[str, str]:
    """Parse values of --param, ``KEY=VALUE``, into a dict; dashes in the last part of a key become underscores.

    Raises `click.BadParameter` for a text that is not of the form named by ``form``.
    """
    params = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{text!r} is not {form}", param_hint="--param")
        owner, dot, name = key.rpartition(".")
        params[f"{owner}{dot}{name.replace('-', '_')}"] = value
    return params


def run_on_ranks(work: Callable[[int], int], is_own: Callable[[RingprofError, int], bool]) -> int:
    """Call ``work`` with the number of this rank, 0 if no launcher started this process, and return its exit code.

    A launcher's rank ends the process at once with that code, because a normal exit of the interpreter can block in a
    communicator whose peers are gone. Errors common to all ranks are printed by rank 0 only; an error of this rank
    alone, for which ``is_own`` returns true, is printed by this rank.
    """
    rank_info = launcher_rank()
    if rank_info is None:
        return work(0)
    rank = rank_info.rank
    try:
        code = work(rank)
    except RingprofError as error:
        code = error.exit_code
        if rank == 0 or is_own(error, rank):
            say(f"ringprof: {error}")
    except Exception:
        code = 3
        click.echo(f"ringprof: rank {rank} failed:\n{traceback.format_exc()}", err=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
