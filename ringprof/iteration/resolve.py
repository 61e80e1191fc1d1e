"""Resolution of a request into what will run: strategy, parameters, device, counts.

Errors of `ringprof.strategies` become ringprof's own errors here, and nowhere else.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import torch

from ringprof.common.json_object import JsonObject, Params
from ringprof.errors import RecordError, UnknownStrategyError, UnsupportedWorkloadError, UsageError
from ringprof.iteration.request import DTYPES, MIN_GPU_WARMUP, RecordRequest, check_numbers
from ringprof.ranks.launcher import RankInfo
from ringprof.strategies import UnknownName, Unsupported, find, for_inference, for_recurrences, names
from ringprof.strategies.base import NO_SOFTCAP, Shape, Strategy
from ringprof.strategies.kernels.kernel import Kernel
from ringprof.strategies.recurrent.kernel import Inputs
from ringprof.strategies.recurrent.kernels import NAMES as RECURRENCE_KERNELS
from ringprof.strategies.recurrent.kernels import choose_kernel
from ringprof.strategies.recurrent.state_strategies import RecurrentStrategy
from ringprof.strategies.registry import check_parameters, parse_parameter
from ringprof.workload.combinations import raise_if_refused
from ringprof.workload.workload import Workload

CPU_RANKS = 4
NO_SINKS = "gives no LSE, which sinks need: the bundled strategies do"


@contextmanager
def strategy_errors() -> Iterator[None]:
    """Turn exceptions of `ringprof.strategies` into ringprof's own errors."""
    try:
        yield
    except UnknownName as error:
        raise UnknownStrategyError(str(error.args[0])) from None
    except Unsupported as error:
        raise UnsupportedWorkloadError(str(error)) from None


def load_strategy(name: str) -> type[Strategy]:
    """Return the class of a strategy for attention by name or ``package.module:Class``.

    Modules of the current folder are found, too. Importing a class by its path runs that module's code. Raises
    `UnknownStrategyError`, also for a strategy for recurrences.
    """
    loaded = load_any_strategy(name)
    if not issubclass(loaded, Strategy):
        raise UnknownStrategyError(f"strategy {name!r} is for recurrences: ringprof record --operator gdn")
    return loaded


def load_recurrent_strategy(name: str, operator: str) -> type[RecurrentStrategy]:
    """Return the class of a strategy for recurrences, as `load_strategy` does; ``operator`` is that of the request.

    Raises `UnknownStrategyError`, also for a strategy for attention.
    """
    loaded = load_any_strategy(name)
    if not issubclass(loaded, RecurrentStrategy):
        known = ", ".join(for_recurrences())
        raise UnknownStrategyError(f"strategy {name!r} is for attention; for --operator {operator} there are: {known}")
    return loaded


def load_any_strategy(name: str) -> type[Strategy] | type[RecurrentStrategy]:
    """Return the class of a strategy for attention or for recurrences. Raises `UnknownStrategyError`."""
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
    if not (isinstance(loaded, type) and issubclass(loaded, (Strategy, RecurrentStrategy))):
        raise UnknownStrategyError(f"strategy {name!r} is not a class derived from ringprof.strategies.base.Strategy")
    return loaded


def resolve(request: RecordRequest, rank_info: RankInfo | None) -> RecordRequest:
    """Return the request with every default resolved.

    ``rank_info`` is the rank of this process, if a launcher started it as one. Raises `UsageError`,
    `UnknownStrategyError` and `UnsupportedWorkloadError`.
    """
    check_numbers(request)
    if request.workload.dtype not in DTYPES:
        raise UsageError(f"--dtype {request.workload.dtype!r} is not one of {', '.join(DTYPES)}")
    device = resolve_device(request.device)
    raise_if_refused({
        **request.workload.features(), "hops": request.hops, "controls": request.controls,
        "cuda_graph": request.cuda_graph, "cp_sizes": request.cp_sizes, "ranks_per_host": request.ranks_per_host,
        "param": request.params, "cpu": device == "cpu",
    })  # fmt: skip
    world = resolve_world_size(request.world, device, rank_info)
    if request.ranks_per_host is not None and world % request.ranks_per_host:
        raise UnsupportedWorkloadError(f"--ranks-per-node {request.ranks_per_host} does not divide the {world} ranks")
    if request.hops == "auto" and (device == "cpu" or request.cuda_graph or request.workload.recurrent):
        request = msgspec.structs.replace(request, hops="nccl")
    if request.workload.recurrent:
        kernel = _recurrence_kernel(request, device, world)
        return msgspec.structs.replace(
            request, device=device, world=world, kernel=kernel, **_iterations(request, device)
        )
    strategy = load_strategy(request.strategy)
    _check_phase(strategy, request)
    params = strategy.with_placement(
        world, ranks_per_host(request, rank_info, world), **typed_params(strategy, request.strategy, request.params)
    )
    if request.cp_sizes:
        # Degrees that the user leaves out follow from each size.
        params = typed_params(strategy, request.strategy, request.params)
        request = _with_sequences(strategy, request, params, world)
    else:
        with strategy_errors():
            reason = why_unsupported(strategy, request.workload, world, params)
        if reason:
            raise UnsupportedWorkloadError(f"strategy {request.strategy!r} cannot run this: {reason}")
        _check_pattern(strategy, request, world)
    return msgspec.structs.replace(request, device=device, world=world, params=params, **_iterations(request, device))


def _iterations(request: RecordRequest, device: str) -> dict[str, int]:
    """Return the numbers of warm-up and timed iterations by field. Raises `UsageError`."""
    warmup = request.warmup if request.warmup is not None else (MIN_GPU_WARMUP if device == "cuda" else 1)
    if device == "cuda" and warmup < MIN_GPU_WARMUP:
        raise UsageError(f"--warmup {warmup}: at least {MIN_GPU_WARMUP} on GPUs, the first iterations set things up")
    return {"warmup": warmup, "iters": request.iters or (10 if device == "cuda" else 3)}


def _recurrence_kernel(request: RecordRequest, device: str, world: int) -> str:
    """Check the request of a recurrence, and return the name of its kernel. Raises `UsageError` and its subclasses."""
    workload = request.workload
    strategy = load_recurrent_strategy(request.strategy, workload.operator)
    if request.kernel not in RECURRENCE_KERNELS:
        raise UsageError(f"no kernel {request.kernel!r} for recurrences; there are: {', '.join(RECURRENCE_KERNELS)}")
    _refuse_recurrence(strategy, request.strategy, workload, world, cuda_graph=request.cuda_graph)
    sizes = (workload.heads, workload.head_dim), (workload.heads, workload.value_dim)
    k, v = (torch.empty(1, 1, *size, dtype=torch_dtype(workload), device=device) for size in sizes)
    gate = torch.empty(1, 1, workload.heads, workload.head_dim if workload.traits.channel_decay else 1, device=device)
    beta = gate.squeeze(-1) if workload.traits.delta_rule else None
    with strategy_errors(), warnings.catch_warnings():
        # The plan names the kernel, and the ranks warn of a slow one.
        warnings.simplefilter("ignore")
        return choose_kernel(request.kernel, Inputs(k, k, v, gate, beta, 1.0)).name


def _refuse_recurrence(
    strategy: type[RecurrentStrategy], name: str, workload: Workload, world: int, *, cuda_graph: bool = False
) -> None:
    """Raise `UnsupportedWorkloadError` where a strategy cannot run a recurrence on ``world`` ranks."""
    reason, local = strategy.why_unsupported(workload.seq, workload.heads, world), workload.seq // world
    if workload.operator not in strategy.operators:
        reason = f"it computes {', '.join(strategy.operators)} alone"
    elif cuda_graph and not strategy.counts_all_sent:
        reason = "no CUDA graph of another package's calls has been tried (record it without --cuda-graph)"
    elif workload.batch > 1 and not strategy.takes_batches:
        reason = f"it takes one batch entry, not {workload.batch}"
    elif workload.conv_width is not None and local < workload.conv_width - 1:
        reason = reason or f"{local} tokens per rank are fewer than the {workload.conv_width - 1} that a rank sends on"
    if reason:
        raise UnsupportedWorkloadError(f"strategy {name!r} cannot run this: {reason}")


def _with_sequences(strategy: type[Strategy], request: RecordRequest, params: Params, world: int) -> RecordRequest:
    """Return the request with the number of sequences in each step of dynamic CP.

    Raises `UsageError` and `UnsupportedWorkloadError`.
    """
    workload = request.workload
    for size in request.cp_sizes:
        if size < 1 or world % size:
            raise UsageError(f"--cp-sizes: groups of {size} ranks do not divide {world}")
        if workload.seq % (world // size):
            raise UnsupportedWorkloadError(f"{workload.seq} tokens are not {world // size} even sequences")
        with strategy_errors():
            reason = why_unsupported(strategy, workload.step(world // size), size, params)
        if reason:
            raise UnsupportedWorkloadError(f"strategy {request.strategy!r} cannot run this on {size} ranks: {reason}")
    sequences = tuple(world // size for size in request.cp_sizes)
    return msgspec.structs.replace(request, workload=msgspec.structs.replace(workload, sequences=sequences))


def why_unsupported(
    strategy: type[Strategy], workload: Workload, world: int, params: Params, seq: int | None = None
) -> str | None:
    """Return why the workload (with sequence length ``seq``, if given) cannot run on ``world`` ranks; None if it can.

    Covers the strategy's shape, mask, softcap and sinks.
    """
    if seq is not None:
        workload = workload.at(seq)
    reason: str | None = strategy.why_unsupported(shape_of(workload), world, **params)
    if not strategy.takes_softcap and (workload.softcap or workload.sinks):
        reason = reason or (NO_SOFTCAP if workload.softcap else NO_SINKS)
    return reason or strategy.why_mask_unsupported(workload.mask(), workload.seq, world, **params)


def shape_of(workload: Workload) -> Shape:
    """Return the tensor sizes of a workload, as the strategies take them."""
    heads = workload.heads, workload.kv_heads, workload.head_dim
    return Shape(workload.batch, workload.seq, *heads, workload.kv_length)


def attention_options(workload: Workload, sinks: torch.Tensor | None = None) -> JsonObject:
    """Return the keyword arguments of `Strategy.attention` for the workload's mask and scores, except ``causal``."""
    mask = workload.mask()
    options: JsonObject = {} if mask.plain else {"documents": mask.documents, "window_size": mask.window}
    if workload.kv_length is not None:
        options = {"kv_length": workload.kv_length} | ({"window_size": mask.window} if mask.windowed else {})
        options |= {"kv_chunks": "contiguous"} if workload.phase == "prefill" else {}
    options |= {"prefix": mask.prefix} if mask.prefix else {}
    options |= {} if sinks is None else {"sinks": sinks}
    return options | ({"softcap": workload.softcap} if workload.softcap else {})


def kernel_options(workload: Workload) -> JsonObject:
    """Return the keyword arguments of a kernel's choice: features of the mask and the scores that it must support."""
    return workload.mask().asks_of_kernels() | ({"softcap": workload.softcap} if workload.softcap else {})


def layout_options(workload: Workload) -> JsonObject:
    """Return the keyword arguments of a strategy's `shard`, `positions` and `layout_of` for packed documents."""
    return {} if workload.documents is None else {"documents": workload.mask().documents}


def kernel_of(strategy: Strategy, q: torch.Tensor, workload: Workload) -> Kernel:
    """Return the kernel that computes a strategy's blocks of tensors like ``q``."""
    return strategy.kernel_for(q, **kernel_options(workload))


def torch_dtype(workload: Workload) -> torch.dtype:
    """Return the torch dtype of a workload's tensors."""
    dtype: torch.dtype = getattr(torch, DTYPES[workload.dtype])
    return dtype


def kernel_class(request: RecordRequest) -> type[Kernel]:
    """Return the kernel class that a resolved request will use. Raises `UsageError` and `UnsupportedWorkloadError`."""
    workload = request.workload
    try:
        return load_strategy(request.strategy).kernel_class(
            request.kernel, torch.device(request.device, 0), torch_dtype(workload), workload.head_dim,
            deterministic=bool(request.params.get("deterministic")), **kernel_options(workload),
        )  # fmt: skip
    except UnknownName as error:
        raise UsageError(str(error.args[0])) from None
    except Unsupported as error:
        raise UnsupportedWorkloadError(str(error)) from None


def _check_phase(strategy: type[Strategy], request: RecordRequest) -> None:
    """Refuse a strategy that is not for the workload's phase. Raises `UsageError`."""
    phase = request.workload.phase
    if strategy.phase != phase:
        available = [name for name in (*names(), *for_inference()) if find(name).load().phase == phase]
        listing = ", ".join(available)
        raise UsageError(
            f"strategy {request.strategy!r} is for {strategy.phase}; for --phase {phase} there are: {listing}"
        )


def _check_pattern(strategy: type[Strategy], request: RecordRequest, world: int) -> None:
    """Refuse a pattern of layers that its strategies cannot run. Raises `UsageError` and `UnsupportedWorkloadError`."""
    workload, layer = request.workload, request.workload.layer
    if layer is None or layer.recurrent_strategy is None:
        return
    if strategy.layout.name != "contiguous" or request.params.get("layout", "contiguous") != "contiguous":
        contiguous = ", ".join(name for name in names() if find(name).load().layout.name == "contiguous")
        raise UsageError(
            f"--pattern: recurrences take the tokens in their order, and strategy {request.strategy!r} spreads them;"
            f" strategies with the contiguous layout are {contiguous}"
        )
    recurrent = load_recurrent_strategy(layer.recurrent_strategy, "recurrences")
    for operator in dict.fromkeys(workload.pattern):
        part = workload.part(operator)
        if part is not None and part.recurrent:
            _refuse_recurrence(recurrent, layer.recurrent_strategy, part, world)


def resolve_device(device: str) -> str:
    """Return the device type, ``cuda`` or ``cpu``, for the option ``--device``. Raises `UsageError`."""
    if device not in ("auto", "cuda", "cpu"):
        raise UsageError(f"--device {device!r} is not one of auto, cuda, cpu")
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise UsageError("--device cuda: torch sees no GPU here (--device cpu runs on processes)")
    return "cuda" if available and device != "cpu" else "cpu"


def resolve_world_size(world: int | None, device: str, rank_info: RankInfo | None) -> int:
    """Return the number of ranks for the option ``--world``.

    Raises `UsageError`, and `RecordError` if a launcher started more ranks on this host than it has GPUs.
    """
    gpus = torch.cuda.device_count() if device == "cuda" else None
    if rank_info is not None:
        if world not in (None, rank_info.world_size):
            raise UsageError(f"--world {world}: the launcher started {rank_info.world_size} ranks; leave --world out")
        # A launcher may make only its own GPU visible to each rank (srun --gpus-per-task=1).
        if gpus is not None and gpus > 1 and rank_info.local_rank >= gpus:
            # Other ranks may not see this, so it is not a UsageError, which every rank raises.
            raise RecordError(
                f"rank {rank_info.rank} is local rank {rank_info.local_rank}, and its host has {gpus} GPUs"
            )
        return rank_info.world_size
    if gpus is None:
        return world or CPU_RANKS
    if world is not None and world > gpus:
        raise UsageError(f"--world {world}: there are {gpus} GPUs here (--device cpu takes any number of ranks)")
    return world or gpus


def typed_params(strategy: type[Strategy], name: str, params: Params) -> Params:
    """Convert text values in the parameters of strategy ``name`` to their types.

    Raises `UnsupportedWorkloadError` for a parameter or value that the strategy does not take.
    """
    with strategy_errors():
        typed = {
            key: parse_parameter(strategy, name, key, value) if isinstance(value, str) else value
            for key, value in params.items()
        }
        check_parameters(strategy, name, typed)
    return typed


def ranks_per_host(request: RecordRequest, rank_info: RankInfo | None, world: int | None = None) -> int:
    """Return how many ranks share a host, as the communicator will see it; all ranks if it does not divide them.

    A number that does not divide the world is refused later.
    """
    world = world or request.world or 1
    launched = world if rank_info is None else rank_info.local_world_size
    per_host = request.ranks_per_host or launched
    return per_host if world % per_host == 0 else world
