"""What a recording is about to do: work, time and memory per device, and whether that will do.

Estimates, made before anything is started. The time is that of the blocks: where they are so small that launching and
sending cost more, as in a test on CPU, an iteration takes longer.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import psutil
import torch

from ringprof.devices import bandwidth_of, peak_of
from ringprof.errors import UnsupportedWorkloadError
from ringprof.process_pool import cpu_count
from ringprof.record.dryrun.fakes import KNOWN_KERNELS
from ringprof.record.dryrun.memory import peak_bytes
from ringprof.record.request import Request
from ringprof.record.resolve import fits, kernel_class, load_strategy, torch_dtype
from ringprof.run import Workload
from ringprof.strategies.base import Strategy
from ringprof.strategies.masks.sharded_mask import busiest_over_mean

CPU_LIMIT_S = 600.0
BUSY = 0.8
"""The share of a quiet machine below which it is said to be busy."""
_ALONE = 0.95
"""The share of the time that a process gets which nobody disturbs."""
SAMPLE_S = 0.3
"""How long a block is computed again and again on CPU: others take their turns in some milliseconds."""
CPU_START_S = 10.0
"""Starting the ranks and leaving again, with torch's import."""
GPU_START_S = 30.0
GPU_RESERVE_BYTES = 3 * 2**30
"""The device's memory that is not ours: CUDA context, NCCL's buffers, the profiler's."""
PROFILED_SLOWDOWN = 1.5
SAMPLE_TOKENS = 256
SAMPLE_KEYS = 8192
"""Of inference, where queries may be few."""
_MOST_TAPES = 8
"""In search of the largest problem that fits."""
TIME_LIMIT_S, TIME_LIMIT_FACTOR = 600.0, 10.0

KERNEL_SHARES = {"cudnn": (0.56, 1200.0), "flash-attn": (0.58, 340.0), "torch-flash": (0.55, 325.0)}
"""What a kernel reaches, forward and backward together: a share of the device's peak, and TFLOP/s at most. Measured on
H200 and A100; flash-attn 2, which torch's own is, makes no use of what came after Ampere."""
REFERENCE_RATE = 2.0
"""TFLOP/s of the float64 reference kernel, on any GPU."""
UNKNOWN_RATE = 100.0

_Device = tuple[str, "int | None", float, str, float]
"""Name, bytes of memory for us, FLOP/s and the source of that figure, and what share of it is to be had now."""


@dataclass(frozen=True)
class RecordingEstimate:
    """The estimates of one recording."""

    device: str
    """Name of one device."""
    kernel: str
    flops_per_device: int
    """Of one iteration, by the model formula."""
    rate: float
    """FLOP/s that one rank is assumed to reach."""
    rate_source: str
    memory_bytes: int | None
    """Per device; None where that cannot be told."""
    memory_note: str
    """Why it cannot, or what it rests on."""
    memory_limit: int | None
    """What a device has for us; None where nobody knows."""
    iterations: int
    """Weighted count of all iterations: warm-up, timed, profiled."""
    start_s: float

    imbalance: float | None
    """Work of the busiest rank over the mean; None where the strategy does not say."""
    reading_s: float = 0.0
    """What reading the keys and values of decode takes at least."""
    share: float = 1.0
    """What is to be had now of the speed of a quiet machine."""
    memory_of: Callable[[Workload], int] = lambda workload: 0
    """``memory_bytes`` of another workload. Raises `UnsupportedWorkloadError`."""

    @property
    def seconds_per_iteration(self) -> float:
        """Of the busiest rank, if everything else is hidden; of a mean rank where the imbalance is not known."""
        return max(self.flops_per_device * (self.imbalance or 1.0) / self.rate, self.reading_s)

    @property
    def total_seconds(self) -> float:
        """The whole command."""
        return self.start_s + self.iterations * self.seconds_per_iteration

    @property
    def time_limit(self) -> float:
        """Seconds after which the command counts as hung, where the user names none: generous, but not for ever."""
        return TIME_LIMIT_S + TIME_LIMIT_FACTOR * self.total_seconds / self.share


def estimate_of(request: Request, per_host: int | None = None) -> RecordingEstimate:
    """The plan of a resolved request, of whose ranks ``per_host`` share a host (None: all).

    On CPU it measures the kernel on a small block, for some milliseconds.
    """
    assert request.world is not None and request.warmup is not None and request.iters is not None
    kernel, strategy = kernel_class(request), load_strategy(request.strategy)
    on_gpu = request.device == "cuda"
    held_by = partial(peak_bytes, request, kernel=kernel.name, per_host=per_host or request.world)
    # First: flex, of which a block on CPU is measured, computes gradients, and then no fork of this process can.
    held, note = _told(held_by, request.workload, kernel.name)
    name, limit, rate, source, share = _gpu(request, kernel.name) if on_gpu else _cpu(request, kernel)
    # On CPU, as it is measured there, with all that a process holds.
    beside = 0 if on_gpu else psutil.Process().memory_info().rss
    profiled = PROFILED_SLOWDOWN * (1 + request.profile_iters)
    return RecordingEstimate(
        device=name,
        kernel=kernel.name,
        flops_per_device=request.workload.model_flops() // request.world,
        rate=rate,
        rate_source=source,
        memory_bytes=None if held is None else held + beside,
        memory_note=note,
        memory_of=lambda workload: held_by(workload) + beside,
        memory_limit=limit,
        iterations=round(request.warmup + request.iters + profiled + _control_iterations(request)),
        start_s=GPU_START_S if on_gpu else CPU_START_S,
        imbalance=_imbalance(strategy, request),
        reading_s=_reading_s(request.workload, request.world, name) if on_gpu else 0.0,
        share=share,
    )


def _reading_s(workload: Workload, world: int, device: str) -> float:
    """Keys and values of a rank over the rate of its memory; 0 where that is not known, or other work counts more."""
    gbps = bandwidth_of(device)
    return workload.cache_bytes() / world / gbps / 1e9 if gbps and workload.phase == "decode" else 0.0


def _imbalance(strategy: type[Strategy], request: Request) -> float | None:
    """Work of the busiest rank over the mean; None where that is not known."""
    workload, mask = request.workload, request.workload.mask()
    assert request.world is not None
    if mask.plain:
        return strategy.imbalance(request.world, causal=workload.causal, **request.params)
    return busiest_over_mean(strategy.sharded_mask(mask, workload.seq, request.world, **request.params).areas())


def _control_iterations(request: Request) -> int:
    """Ordinary iterations and three controls in four rounds, the warm-ups of the three; none costs more than one."""
    assert request.warmup is not None and request.iters is not None
    return 3 * request.warmup + 4 * (request.iters + 3) if request.controls else 0


def _told(held_by: Callable[[Workload], int], workload: Workload, kernel: str) -> tuple[int | None, str]:
    """Bytes that one rank will hold at its peak, and what there is to say of them."""
    try:
        held = held_by(workload)
    except UnsupportedWorkloadError as error:
        return None, str(error)
    return held, "" if kernel in KNOWN_KERNELS else f", with what flash attention holds for {kernel}"


def describe(request: Request, plan: RecordingEstimate) -> list[str]:
    """The plan in words, a line each."""
    workload, world = request.workload, request.world
    devices = f"{world} x {plan.device}" if request.device == "cuda" else f"{world} CPU processes"
    mask = "full attention" if workload.mask().plain and not workload.causal else str(workload.mask())
    tokens = f"sequence {workload.seq}"
    if workload.kv_length is not None:
        new = "1 new token" if workload.seq == 1 else f"{workload.seq} new tokens"
        tokens = f"{workload.phase} of {new} a sequence over {workload.kv_length} keys"
    size, note = plan.memory_bytes, plan.memory_note
    memory = f"memory unknown: {note}" if size is None else f"about {_bytes(size)} of memory{note}"
    lines = [
        f"{request.strategy} on {devices}: {tokens}, batch {workload.batch},"
        f" {workload.heads_in_words()}, {', '.join([mask, *workload.extras()])}, {workload.dtype},"
        f" {'forward and backward' if workload.backward else 'forward only'}",
        f"plan per device: {_si(plan.flops_per_device)}FLOPs an iteration,"
        f" about {_each(plan)} ({_si(plan.rate)}FLOP/s {plan.kernel},"
        f" {plan.rate_source}), {memory}",
    ]
    if plan.kernel == "flex" and request.device == "cuda":
        lines.append("flex is compiled first, forward and backward: some 15 s before the first check")
    if request.cp_sizes:
        sizes = ", ".join(map(str, request.cp_sizes))
        lines.append(f"steps of an iteration: {sizes} ranks a sequence, as many tokens a rank in each")
    if workload.layer is not None:
        lines.append(f"{workload.layers} x {workload.layer}")
    if plan.imbalance is None:
        lines.append(f"how evenly {request.strategy} deals out work is not known: the time is that of a mean rank")
    if world == 1:
        lines.append("one device: nothing is communicated")
    return lines


def _each(plan: RecordingEstimate) -> str:
    quiet = plan.seconds_per_iteration
    if plan.share >= BUSY:
        return f"{_seconds(quiet)} each"
    return f"{_seconds(quiet)} each on a quiet machine, {_seconds(quiet / plan.share)} on one as busy as this is now"


def refuse_too_large(request: Request, plan: RecordingEstimate) -> None:
    """Raises `UnsupportedWorkloadError` with the largest sequence that fits, where memory or (on CPU) time will not
    do."""
    if request.force:
        return
    workload, world = request.workload, request.world or 1
    if plan.memory_bytes and plan.memory_limit and plan.memory_bytes > plan.memory_limit:
        reason = f"needs about {_bytes(plan.memory_bytes)} per device, {_bytes(plan.memory_limit)} are there"
    elif request.device == "cpu" and plan.total_seconds > CPU_LIMIT_S:
        reason = f"would take about {_seconds(plan.total_seconds)} on this CPU, over {CPU_LIMIT_S / 60:.0f} minutes"
    else:
        return
    if workload.kv_length is not None:
        cached = (workload.kv_length - workload.seq) // world

        def over(count: int) -> Workload:
            return msgspec.structs.replace(workload, kv_length=workload.seq + count * world)

        longest = over(_most(request, plan, over, cached)).kv_length
        advice = f"--kv-length {longest} fits" if longest != workload.seq else "no cache fits"
        raise UnsupportedWorkloadError(
            f"{workload.kv_length} keys a sequence {reason}; {advice} (--force runs it anyway)"
        )
    largest = largest_seq(request, plan)
    advice = f"the largest sequence that fits is {largest}" if largest else "no sequence fits"
    raise UnsupportedWorkloadError(f"sequence {workload.seq} {reason}; {advice} (--force runs it anyway)")


def largest_seq(request: Request, plan: RecordingEstimate) -> int:
    """The longest sequence, as the layout needs it, that memory and time allow; 0 where none does."""
    strategy = load_strategy(request.strategy)
    assert request.world is not None
    divisor = strategy.layout_for(request.world, **request.params).divisor(request.world)
    best = _most(request, plan, lambda count: request.workload.at(count * divisor), request.workload.seq // divisor)
    while best and fits(strategy, request.workload, request.world, request.params, best * divisor):
        best -= 1
    return int(best * divisor)


def _most(request: Request, plan: RecordingEstimate, workload: Callable[[int], Workload], top: int) -> int:
    """The largest number up to ``top``, or nearly, whose ``workload`` memory and time allow; 0 where none does."""
    assert request.world is not None
    if request.device == "cpu":
        left = (CPU_LIMIT_S - plan.start_s) * plan.rate * request.world / plan.iterations / (plan.imbalance or 1.0)
        top = bisect_right(range(1, top + 1), left, key=lambda count: workload(count).model_flops())
    limit = plan.memory_limit
    if plan.memory_bytes is None or limit is None:
        return top
    held = plan.memory_bytes

    def over(count: int) -> int:
        try:
            return plan.memory_of(workload(count)) - limit
        except UnsupportedWorkloadError:
            # This very number does not go; one near it may.
            return held * count // top - limit

    return root_below(over, top)


def root_below(over: Callable[[int], int], top: int) -> int:
    """The largest number from 1 to ``top``, or nearly, of which ``over`` is not positive; 0 where there is none.

    ``over`` grows about in proportion, in steps, and costs much: it is asked where the line through two points crosses
    0, of which one that stays twice counts half (Illinois's rule).
    """
    low, high = (0, 0), (top, over(top) if top else 0)
    if high[1] <= 0:
        return top
    guess, before = 1, None
    for _ in range(_MOST_TAPES):
        if high[0] - low[0] < 2:
            break
        found = over(guess)
        under = found <= 0
        stays = 2 if under == before else 1
        low, high = (
            ((guess, found), (high[0], high[1] // stays)) if under else ((low[0], low[1] // stays), (guess, found))
        )
        before = under
        crossing = low[0] - low[1] * (high[0] - low[0]) // max(high[1] - low[1], 1)
        guess = min(max(crossing, low[0] + 1), high[0] - 1)
    return low[0]


def _cpu(request: Request, kernel: Any) -> _Device:
    assert request.world is not None
    # What the host can still give, shared among the ranks.
    memory = psutil.virtual_memory().available // request.world
    rate, share = _cpu_rate(kernel, request.workload, request.world)
    return "CPU process", memory, rate, "measured on a small block", share


def _gpu(request: Request, kernel: str) -> _Device:
    """For the smallest of the GPUs."""
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    smallest = min(properties, key=lambda found: int(found.total_memory))
    rate, source = kernel_rate(smallest.name, kernel, request.workload.dtype)
    return smallest.name, int(smallest.total_memory) - GPU_RESERVE_BYTES, rate, source, 1.0


def kernel_rate(device: str, kernel: str, dtype: str) -> tuple[float, str]:
    """FLOP/s that a kernel is assumed to reach on a device, and why so many."""
    if kernel == "reference":
        return REFERENCE_RATE * 1e12, "assumed"
    peak, (share, most) = peak_of(device, dtype), KERNEL_SHARES.get(kernel, (0.0, 0.0))
    if peak is None or not share:
        return UNKNOWN_RATE * 1e12, "assumed: this device or kernel is not known"
    return min(share * peak.tflops, most) * 1e12, f"assumed from the peak of {device}"


def _cpu_rate(kernel: Any, workload: Workload, world: int) -> tuple[float, float]:
    """FLOP/s of one rank on a quiet machine, by one full block on one of a rank's threads; its share of that now.

    One, for on a busy machine threads that wait for each other take a thousand times as long.
    """
    before, threads = torch.get_num_threads(), max(1, cpu_count() // world)
    torch.set_num_threads(1)
    try:
        began, spent = time.perf_counter(), time.process_time()
        seconds, flops = _time_block(kernel(), workload)
        got = (time.process_time() - spent) / (time.perf_counter() - began)
    finally:
        torch.set_num_threads(before)
    rate = flops / seconds * threads * min(1.0, cpu_count() / world)
    return rate, share_of_ranks(got, cpu_count(), world * threads)


def share_of_ranks(got: float, places: float, wanted: int) -> float:
    """What ranks get of a quiet machine's speed, where one thread alone ``got`` this share of the time that it wanted.

    ``places``: threads that can run at once; ``wanted``: the ranks' own. With ``places / got - 1`` others one gets that
    much; the ranks' share with these and with each other.
    """
    others = places / max(got, 1e-3) - 1 if got < _ALONE else 0.0
    return min(1.0, places / (others + wanted)) / min(1.0, places / wanted)


def _time_block(kernel: Any, workload: Workload) -> tuple[float, int]:
    keys = min(SAMPLE_TOKENS if workload.kv_length is None else SAMPLE_KEYS, workload.kv_length or workload.seq)
    q, k = (torch.randn(1, tokens, 1, workload.head_dim).to(torch_dtype(workload))
            for tokens in (min(SAMPLE_TOKENS, workload.seq), keys))  # fmt: skip
    scale, best = workload.head_dim**-0.5, float("inf")
    end, calls = time.perf_counter() + SAMPLE_S, 0
    while calls < 3 or time.perf_counter() < end:
        calls, kernel.flops = calls + 1, 0
        start = time.perf_counter()
        out, lse = kernel.forward(q, k, k, scale=scale, causal=False)
        if workload.backward:
            kernel.backward(q, q, q, q, lse, out=out, scale=scale, causal=False)
        best = min(best, time.perf_counter() - start)
    return best, int(kernel.flops)


def _si(value: float) -> str:
    for factor, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}"
    return f"{value:.0f} "


def _seconds(value: float) -> str:
    if value >= 120:
        return f"{value / 60:.0f} minutes"
    if value >= 10:
        return f"{value:.0f} s"
    return f"{value:.2g} s" if value >= 1 else f"{value * 1e3:.0f} ms" if value >= 0.01 else f"{value * 1e3:.2g} ms"


def _bytes(value: int) -> str:
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"
