"""From what was asked to what will run: strategy, parameters, device, counts.

The one place where the errors of the strategies become ringprof's own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import torch

from ringprof.errors import RecordError, UnknownStrategyError, UnsupportedWorkloadError, UsageError
from ringprof.json_object import JsonObject, Params
from ringprof.record.launcher import RankPlace
from ringprof.record.request import DTYPES, MIN_GPU_WARMUP, Request, check_numbers
from ringprof.run import Workload
from ringprof.strategies import UnknownName, Unsupported, find, for_inference, names
from ringprof.strategies.base import NO_SOFTCAP, Shape, Strategy
from ringprof.strategies.kernels.kernel import Kernel
from ringprof.strategies.registry import check_parameters, parse_parameter

CPU_RANKS = 4
NO_SINKS = "gives no LSE, which sinks need: the bundled strategies do"


@contextmanager
def strategy_errors() -> Iterator[None]:
    """Turn what `ringprof.strategies` raises into ringprof's own errors."""
    try:
        yield
    except UnknownName as error:
        raise UnknownStrategyError(str(error.args[0])) from None
    except Unsupported as error:
        raise UnsupportedWorkloadError(str(error)) from None


def load_strategy(name: str) -> type[Strategy]:
    """The class of a strategy by name or ``package.module:Class``; the current folder's modules may be named.

    Importing a class by its path runs that module's code. Raises `UnknownStrategyError`.
    """
    if ":" in name and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with strategy_errors():
        spec = find(name)
        try:
            loaded = spec.load()
        except LookupError:
            raise
        except Exception as error:
            raise UnknownStrategyError(
                f"strategy {name!r} cannot be imported: {type(error).__name__}: {error}"
            ) from error
    if not (isinstance(loaded, type) and issubclass(loaded, Strategy)):
        raise UnknownStrategyError(f"strategy {name!r} is not a class derived from ringprof.strategies.base.Strategy")
    return loaded


def resolve(request: Request, place: RankPlace | None) -> Request:
    """The request with every open choice made. ``place`` is this process's rank where a launcher made it one.

    Raises `UsageError`, `UnknownStrategyError` and `UnsupportedWorkloadError`.
    """
    check_numbers(request)
    if request.workload.dtype not in DTYPES:
        raise UsageError(f"--dtype {request.workload.dtype!r} is not one of {', '.join(DTYPES)}")
    strategy = load_strategy(request.strategy)
    _check_what_is_made(strategy, request)
    device = device_of(request.device)
    if request.hops == "copy" and device == "cpu":
        raise UsageError("--hops copy: copy engines are GPUs'; on CPU hops go by gloo (leave --hops out)")
    if request.cuda_graph:
        _check_graph(request, device)
    if request.hops == "auto" and (device == "cpu" or request.cuda_graph):
        request = msgspec.structs.replace(request, hops="nccl")
    world = world_of(request.world, device, place)
    params = strategy.with_placement(
        world, ranks_per_host(request, place, world), **typed_params(strategy, request.strategy, request.params)
    )
    if request.cp_sizes:
        # Degrees that are not given follow from each size.
        params = typed_params(strategy, request.strategy, request.params)
        request = _with_sizes(strategy, request, params, world)
    else:
        _check_fit(strategy, request, params, world)
    warmup, iters = _counts(request, device)
    return msgspec.structs.replace(request, device=device, world=world, params=params, warmup=warmup, iters=iters)


def _with_sizes(strategy: type[Strategy], request: Request, params: Params, world: int) -> Request:
    """The request with the sequences of each step. Raises `UsageError` and `UnsupportedWorkloadError`."""
    workload = request.workload
    for size in request.cp_sizes:
        if size < 1 or world % size:
            raise UsageError(f"--cp-sizes: groups of {size} ranks do not divide {world}")
        if workload.seq % (world // size):
            raise UnsupportedWorkloadError(f"{workload.seq} tokens are not {world // size} even sequences")
        with strategy_errors():
            reason = fits(strategy, workload.step(world // size), size, params)
        if reason:
            raise UnsupportedWorkloadError(f"strategy {request.strategy!r} cannot run this on {size} ranks: {reason}")
    sequences = tuple(world // size for size in request.cp_sizes)
    return msgspec.structs.replace(request, workload=msgspec.structs.replace(workload, sequences=sequences))


def fits(
    strategy: type[Strategy], workload: Workload, world: int, params: Params, seq: int | None = None
) -> str | None:
    """Why the workload (at ``seq``, where given) cannot run on ``world`` ranks; None where it can."""
    if seq is not None:
        workload = workload.at(seq)
    reason: str | None = strategy.why_unsupported(shape_of(workload), world, **params)
    if not strategy.takes_softcap and (workload.softcap or workload.sinks):
        reason = reason or (NO_SOFTCAP if workload.softcap else NO_SINKS)
    return reason or strategy.why_mask_unsupported(workload.mask(), workload.seq, world, **params)


def shape_of(workload: Workload) -> Shape:
    """The sizes of a workload, as strategies are told them."""
    heads = workload.heads, workload.kv_heads, workload.head_dim
    return Shape(workload.batch, workload.seq, *heads, workload.kv_length)


def mask_options(workload: Workload, sinks: torch.Tensor | None = None) -> JsonObject:
    """What `Strategy.attention` is told of the workload's mask and scores, beside whether it is causal."""
    mask = workload.mask()
    found: JsonObject = {} if mask.plain else {"documents": mask.documents, "window_size": mask.window}
    if workload.kv_length is not None:
        found = {"kv_length": workload.kv_length} | ({"window_size": mask.window} if mask.windowed else {})
    found |= {"prefix": mask.prefix} if mask.prefix else {}
    found |= {} if sinks is None else {"sinks": sinks}
    return found | ({"softcap": workload.softcap} if workload.softcap else {})


def asks_of_kernels(workload: Workload) -> JsonObject:
    """What the choice of a kernel is told beside device, type and head size."""
    return workload.mask().asks_of_kernels() | ({"softcap": workload.softcap} if workload.softcap else {})


def layout_options(workload: Workload) -> JsonObject:
    """What a strategy's `shard`, `positions` and `layout_of` are told of the workload's documents."""
    return {} if workload.documents is None else {"documents": workload.mask().documents}


def kernel_of(strategy: Strategy, q: torch.Tensor, workload: Workload) -> Kernel:
    """The kernel that computes a strategy's blocks of tensors like ``q``."""
    return strategy.kernel_for(q, **asks_of_kernels(workload))


def torch_dtype(workload: Workload) -> torch.dtype:
    """The torch type of a workload's tensors."""
    dtype: torch.dtype = getattr(torch, DTYPES[workload.dtype])
    return dtype


def kernel_class(request: Request) -> type[Kernel]:
    """The kernel that a resolved request will run with. Raises `UsageError` and `UnsupportedWorkloadError`."""
    workload = request.workload
    try:
        return load_strategy(request.strategy).kernel_class(
            request.kernel, torch.device(request.device, 0), torch_dtype(workload), workload.head_dim,
            deterministic=bool(request.params.get("deterministic")), **asks_of_kernels(workload),
        )  # fmt: skip
    except UnknownName as error:
        raise UsageError(str(error.args[0])) from None
    except Unsupported as error:
        raise UnsupportedWorkloadError(str(error)) from None


def _check_what_is_made(strategy: type[Strategy], request: Request) -> None:
    phase = request.workload.phase
    if strategy.phase != phase:
        there = [name for name in (*names(), *for_inference()) if find(name).load().phase == phase]
        raise UsageError(
            f"strategy {request.strategy!r} is for {strategy.phase}; for --phase {phase} there are: {', '.join(there)}"
        )
    _check_together(request)


def _check_together(request: Request) -> None:
    """Refuse options that are not made for each other. Raises `UsageError`."""
    work, none = request.workload, ("softcap", "sinks", "v-head-dim")
    given = {
        "controls": request.controls, "cuda-graph": request.cuda_graph, "layer": work.layer, "phase": work.kv_length,
        "documents": work.documents, "window-size": work.window, "prefix": work.prefix,
        "ranks-per-host": request.ranks_per_host, "softcap": work.softcap, "sinks": work.sinks,
        "v-head-dim": work.v_head_dim,
    }  # fmt: skip
    excluded = {
        f"phase {work.phase}": (work.kv_length, ("controls", "documents")),
        "layer": (work.layer, ("controls", "cuda-graph", *none)),
        "cp-sizes": (request.cp_sizes, tuple(given)),
    }
    for asked, (there, others) in excluded.items():
        for option in others:
            if there and given[option]:
                raise UsageError(f"--{option}: not made for --{asked} (record it without --{option})")


def _check_graph(request: Request, device: str) -> None:
    if device == "cpu":
        raise UsageError("--cuda-graph needs GPUs")
    if request.hops == "copy":
        raise UsageError("--cuda-graph: copied hops count on, and a graph repeats itself: use --hops nccl")
    if request.controls:
        raise UsageError("--cuda-graph: the controls run other calls than the graph: leave --controls out")


def device_of(asked: str) -> str:
    """``cuda`` or ``cpu``. Raises `UsageError`."""
    if asked not in ("auto", "cuda", "cpu"):
        raise UsageError(f"--device {asked!r} is not one of auto, cuda, cpu")
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise UsageError("--device cuda: torch sees no GPU here (--device cpu runs on processes)")
    return "cuda" if available and asked != "cpu" else "cpu"


def world_of(asked: int | None, device: str, place: RankPlace | None) -> int:
    """The number of ranks. Raises `UsageError`."""
    gpus = torch.cuda.device_count() if device == "cuda" else None
    if place is not None:
        if asked not in (None, place.world_size):
            raise UsageError(f"--world {asked}: the launcher started {place.world_size} ranks; leave --world out")
        # A launcher may show each rank its own GPU alone (srun --gpus-per-task=1).
        if gpus is not None and gpus > 1 and place.local_rank >= gpus:
            # Only this rank knows.
            raise RecordError(f"rank {place.rank} is local rank {place.local_rank}, and its host has {gpus} GPUs")
        return place.world_size
    if gpus is None:
        return asked or CPU_RANKS
    if asked is not None and asked > gpus:
        raise UsageError(f"--world {asked}: there are {gpus} GPUs here (--device cpu takes any number of ranks)")
    return asked or gpus


def _counts(request: Request, device: str) -> tuple[int, int]:
    on_gpu = device == "cuda"
    warmup = request.warmup if request.warmup is not None else (MIN_GPU_WARMUP if on_gpu else 1)
    if on_gpu and warmup < MIN_GPU_WARMUP:
        raise UsageError(f"--warmup {warmup}: at least {MIN_GPU_WARMUP} on GPUs, the first iterations set things up")
    return warmup, request.iters or (10 if on_gpu else 3)


def typed_params(strategy: type[Strategy], name: str, params: Params) -> Params:
    """The parameters of strategy ``name`` as what they are. Raises `UnsupportedWorkloadError` for one it does not
    take."""
    with strategy_errors():
        typed = {
            key: parse_parameter(strategy, name, key, value) if isinstance(value, str) else value
            for key, value in params.items()
        }
        check_parameters(strategy, name, typed)
    return typed


def ranks_per_host(request: Request, place: RankPlace | None, world: int | None = None) -> int:
    """Ranks that will share a host, as the ranks' communicator will see it; refused later where it does not divide."""
    world = world or request.world or 1
    launched = world if place is None else place.local_world_size
    per_host = request.ranks_per_host or launched
    return per_host if world % per_host == 0 else world


def _check_fit(strategy: type[Strategy], request: Request, params: Params, world: int) -> None:
    if request.ranks_per_host is not None and world % request.ranks_per_host:
        raise UnsupportedWorkloadError(f"--ranks-per-host {request.ranks_per_host} does not divide the {world} ranks")
    with strategy_errors():
        reason = fits(strategy, request.workload, world, params)
    if reason:
        raise UnsupportedWorkloadError(f"strategy {request.strategy!r} cannot run this: {reason}")
