"""Estimate of a recording before it starts: work, time and memory per device, and whether they are acceptable.

The time is that of the attention blocks. If the blocks are so small that launching and sending cost more, as in a test
on CPU, an iteration takes longer.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import psutil
import torch

from ringprof.common.json_object import JsonObject
from ringprof.common.process_pool import cpu_count
from ringprof.dryrun.fakes import KNOWN_KERNELS
from ringprof.dryrun.memory import peak_bytes
from ringprof.errors import UnsupportedWorkloadError
from ringprof.iteration.recurrence import RecurrenceShard, single_rank_strategy
from ringprof.iteration.request import RecordRequest
from ringprof.iteration.resolve import kernel_class, load_strategy, torch_dtype, why_unsupported
from ringprof.strategies.kernels.kernel import Kernel
from ringprof.strategies.masks.sharded_mask import busiest_over_mean
from ringprof.workload.devices import bandwidth_of, peak_of
from ringprof.workload.recurrences import CHUNK
from ringprof.workload.workload import Workload

CPU_LIMIT_S = 600.0
SAMPLE_S = 0.3
"""Seconds for which a block is computed repeatedly on CPU. Other processes take turns within milliseconds."""
CPU_START_S = 10.0
"""Seconds to start the ranks, import torch, and end them."""
GPU_START_S = 30.0
GPU_RESERVE_BYTES = 3 * 2**30
"""Device memory that a recording cannot use: the CUDA context, NCCL's and the profiler's buffers."""
PROFILED_SLOWDOWN = 1.5
SAMPLE_TOKENS = 256
SAMPLE_KEYS = 8192
"""Most keys of the block that is timed for inference, where queries may be few."""
_MAX_DRY_RUNS = 8
"""Most dry runs in the search for the largest workload that fits."""
TIME_LIMIT_S, TIME_LIMIT_FACTOR = 600.0, 10.0

KERNEL_SHARES = {
    "flash-attn-3": (0.62, 1200.0), "flash-attn-4": (0.62, 1200.0), "cudnn": (0.56, 1200.0),
    "flash-attn": (0.58, 340.0), "torch-flash": (0.55, 325.0),
}  # fmt: skip
"""Assumed rate of each kernel, forward and backward together: share of the device's peak, and largest TFLOP/s.

Measured on H200, H100 and A100. flash-attn 2, which torch contains, makes no use of features newer than Ampere."""
REFERENCE_RATE = 2.0
"""Rate of the float64 reference kernel on any GPU, in TFLOP/s."""
UNKNOWN_RATE = 100.0
RECURRENCE_RATE, RECURRENCE_REFERENCE_RATE = 60.0, 0.5
"""Assumed TFLOP/s of a recurrence on a GPU, forward and backward: by Triton kernels, and in plain torch."""


@dataclass(frozen=True)
class RecordingEstimate:
    """Estimate of one recording."""

    device: str
    """Name of one device."""
    kernel: str
    flops_per_device: int
    """FLOPs of one iteration per device, by the model formula."""
    rate: float
    """FLOP/s that one rank is assumed to reach."""
    rate_source: str
    memory_bytes: int | None
    """Peak memory per device in bytes; None if it cannot be estimated."""
    memory_note: str
    """Reason why the memory cannot be estimated, or the assumption that the estimate rests on."""
    memory_limit: int | None
    """Available memory per device in bytes; None if unknown."""
    iterations: int
    """Weighted count of all iterations: warm-up, timed, profiled, and those of the baselines."""
    start_s: float

    imbalance: float | None
    """Work of the busiest rank, divided by the mean over the ranks; None if the strategy does not tell it."""
    reading_s: float = 0.0
    """Least time per iteration to read the keys and values of decode, in seconds."""
    slowdown: float = 1.0
    """Wall time of the measured sample, divided by its CPU time: above 1 where other processes use the CPU, too."""
    memory_of: Callable[[Workload], int] = lambda workload: 0
    """Function that estimates ``memory_bytes`` of another workload. Raises `UnsupportedWorkloadError`."""

    @property
    def seconds_per_iteration(self) -> float:
        """Seconds per iteration of the busiest rank (or a mean rank, if unknown), if its kernels hide all else."""
        return max(self.flops_per_device * (self.imbalance or 1.0) / self.rate, self.reading_s)

    @property
    def total_seconds(self) -> float:
        """Seconds that the whole command takes."""
        return self.start_s + self.iterations * self.seconds_per_iteration

    @property
    def time_limit(self) -> float:
        """Seconds after which the command counts as hung, if the user names no limit."""
        return TIME_LIMIT_S + TIME_LIMIT_FACTOR * self.total_seconds * self.slowdown


def estimate_of(request: RecordRequest, per_host: int | None = None) -> RecordingEstimate:
    """Estimate a resolved request, of whose ranks ``per_host`` share a host (None: all).

    On CPU this times the kernel on a small block, or on a short sequence of a recurrence, for `SAMPLE_S` seconds. The
    memory of a recurrence is known only for kernels that do not run under autograd.
    """
    workload, world = request.workload, request.world
    assert world is not None and request.warmup is not None and request.iters is not None
    on_gpu, peak, note, kernel = request.device == "cuda", None, "", request.kernel
    # On CPU the measured peak is that of the whole process, so the estimate includes what a process holds anyway.
    other_bytes = 0 if on_gpu or workload.recurrent else psutil.Process().memory_info().rss
    # The memory first, in forks of this process: timing a flex block on CPU computes gradients, and then no fork can.
    if workload.recurrent:
        memory_of: Callable[[Workload], int] = partial(recurrence_bytes, world=world)
        sample = "measured on a short sequence", partial(_sequence_of, workload)
    else:
        kind = kernel_class(request)
        kernel, sample = kind.name, ("measured on a small block", partial(_block_of, kind, workload))
        memory_of = partial(peak_bytes, request, kernel=kernel, per_host=per_host or world)
        note = "" if kernel in KNOWN_KERNELS else f", assuming flash attention's memory for {kernel}"
    if workload.recurrent and kernel == "reference":
        note = "plain torch keeps what autograd needs"
    else:
        try:
            peak = memory_of(workload) + other_bytes
        except UnsupportedWorkloadError as error:
            note = str(error)
    device = _describe_gpu(request, kernel) if on_gpu else _describe_cpu(request, *sample)
    # Ordinary iterations and three baselines in four rounds, and three warm-ups; none costs more than an ordinary one.
    baselines = 3 * request.warmup + 4 * (request.iters + 3) if request.controls else 0
    profiled = PROFILED_SLOWDOWN * (1 + request.profile_iters)
    return RecordingEstimate(
        kernel=kernel,
        flops_per_device=workload.model_flops() // world,
        memory_bytes=peak,
        memory_note=note,
        memory_of=lambda workload: memory_of(workload) + other_bytes,
        iterations=round(request.warmup + request.iters + profiled + baselines),
        start_s=GPU_START_S if on_gpu else CPU_START_S,
        imbalance=_imbalance(request),
        reading_s=_reading_s(workload, world, device["device"]) if on_gpu else 0.0,
        **device,
    )


def recurrence_bytes(workload: Workload, world: int) -> int:
    """Estimate the peak memory of a rank that computes a recurrence by kernels: about what they hold at once.

    That is inputs, outputs and gradients twice, as a layer's projections and the kernel's products of the same size,
    and the states of all chunks, of which the backward pass holds two sets.
    """
    tokens, width = workload.batch * workload.seq // world, 4 if workload.dtype == "fp32" else 2
    keys, values = workload.kv_heads * workload.head_dim, workload.heads * workload.value_dim
    repeated = workload.heads * workload.head_dim
    numbers = 2 * keys + 2 * values + 2 * repeated
    states = 2 * workload.heads * workload.head_dim * workload.value_dim // CHUNK
    copies = 4 if workload.backward else 2
    return tokens * width * (copies * numbers + states)


def _reading_s(workload: Workload, world: int, device: str) -> float:
    """Return the seconds in which a rank's memory can read its keys and values; 0 if unknown, or not in decode."""
    gbps = bandwidth_of(device)
    return workload.cache_bytes() / world / gbps / 1e9 if gbps and workload.phase == "decode" else 0.0


def _imbalance(request: RecordRequest) -> float | None:
    """Return the work of the busiest rank, divided by the mean over the ranks; None if unknown."""
    workload, mask = request.workload, request.workload.mask()
    assert request.world is not None
    if workload.recurrent:
        return 1.0
    strategy = load_strategy(request.strategy)
    if mask.plain:
        return strategy.imbalance(request.world, causal=workload.causal, **request.params)
    return busiest_over_mean(strategy.sharded_mask(mask, workload.seq, request.world, **request.params).areas())


def describe(request: RecordRequest, estimate: RecordingEstimate) -> list[str]:
    """Describe the request and its estimate for the user, as lines of text."""
    workload, world = request.workload, request.world
    devices = f"{world} x {estimate.device}" if request.device == "cuda" else f"{world} CPU processes"
    mask = "full attention" if workload.mask().plain and not workload.causal else workload.mask_in_words()
    tokens = f"sequence {workload.seq}"
    if workload.kv_length is not None:
        new = "1 new token" if workload.seq == 1 else f"{workload.seq} new tokens"
        tokens = f"{workload.phase} of {new} per sequence over {workload.kv_length} keys"
    size, note = estimate.memory_bytes, estimate.memory_note
    memory = f"memory unknown: {note}" if size is None else f"about {_bytes(size)} of memory{note}"
    lines = [
        f"{request.strategy} on {devices}: {tokens}, batch {workload.batch},"
        f" {workload.heads_in_words()}, {', '.join([mask, *workload.extras()])}, {workload.dtype},"
        f" {'forward and backward' if workload.backward else 'forward only'}",
        f"plan per device: {_si(estimate.flops_per_device)}FLOPs per iteration,"
        f" about {_seconds(estimate.seconds_per_iteration)} each ({_si(estimate.rate)}FLOP/s {estimate.kernel},"
        f" {estimate.rate_source}), {memory}",
    ]
    if estimate.kernel == "flex" and request.device == "cuda":
        lines.append("flex is compiled first, forward and backward: some 15 s before the first check")
    if estimate.kernel == "fla":
        lines.append("fla's kernels are compiled and tuned on first use, which takes minutes; Triton keeps the result")
    if request.cp_sizes:
        sizes = ", ".join(map(str, request.cp_sizes))
        lines.append(f"steps of an iteration: {sizes} ranks per sequence, with equal tokens per rank")
    if workload.layer is not None:
        lines.append(f"{workload.layers} x {workload.layer}")
    if estimate.imbalance is None:
        lines.append(f"how evenly {request.strategy} deals out work is not known: the time is that of a mean rank")
    if world == 1:
        lines.append("one device: nothing is communicated")
    return lines


def raise_if_too_large(request: RecordRequest, estimate: RecordingEstimate) -> None:
    """Refuse a run that exceeds the memory or, on CPU, the time, unless the request forces it.

    Raises `UnsupportedWorkloadError`, which names the largest sequence that fits.
    """
    if request.force:
        return
    workload, world = request.workload, request.world or 1
    if estimate.memory_bytes and estimate.memory_limit and estimate.memory_bytes > estimate.memory_limit:
        reason = f"needs about {_bytes(estimate.memory_bytes)} per device; {_bytes(estimate.memory_limit)} available"
    elif request.device == "cpu" and estimate.total_seconds > CPU_LIMIT_S:
        reason = f"would take about {_seconds(estimate.total_seconds)} on this CPU, over {CPU_LIMIT_S / 60:.0f} minutes"
    else:
        return
    if workload.kv_length is not None:
        cached = (workload.kv_length - workload.seq) // world

        def with_keys(count: int) -> Workload:
            return msgspec.structs.replace(workload, kv_length=workload.seq + count * world)

        longest = with_keys(_largest_count(request, estimate, with_keys, cached)).kv_length
        advice = f"--kv-length {longest} fits" if longest != workload.seq else "no cache fits"
        raise UnsupportedWorkloadError(
            f"{workload.kv_length} keys per sequence {reason}; {advice} (--force runs it anyway)"
        )
    largest = largest_seq(request, estimate)
    advice = f"the largest sequence that fits is {largest}" if largest else "no sequence fits"
    raise UnsupportedWorkloadError(f"sequence {workload.seq} {reason}; {advice} (--force runs it anyway)")


def largest_seq(request: RecordRequest, estimate: RecordingEstimate) -> int:
    """Return the longest sequence, divisible as the layout needs it, that memory and time allow; 0 if none fits."""
    workload, world = request.workload, request.world
    assert world is not None
    strategy = None if workload.recurrent else load_strategy(request.strategy)
    divisor = world if strategy is None else int(strategy.layout_for(world, **request.params).divisor(world))
    best = _largest_count(request, estimate, lambda count: workload.at(count * divisor), workload.seq // divisor)
    while best and strategy and why_unsupported(strategy, workload, world, request.params, best * divisor):
        best -= 1
    return best * divisor


def _largest_count(
    request: RecordRequest, estimate: RecordingEstimate, workload: Callable[[int], Workload], top: int
) -> int:
    """Return about the largest count up to ``top`` whose ``workload(count)`` memory and time allow; 0 if none fits."""
    assert request.world is not None
    if request.device == "cpu":
        time_s = CPU_LIMIT_S - estimate.start_s
        max_flops = time_s * estimate.rate * request.world / estimate.iterations / (estimate.imbalance or 1.0)
        top = bisect_right(range(1, top + 1), max_flops, key=lambda count: workload(count).model_flops())
    limit = estimate.memory_limit
    if estimate.memory_bytes is None or limit is None:
        return top
    peak = estimate.memory_bytes

    def excess(count: int) -> int:
        try:
            return estimate.memory_of(workload(count)) - limit
        except UnsupportedWorkloadError:
            # The strategy cannot run exactly this count; it may run one near it.
            return peak * count // top - limit

    return largest_not_over(excess, top)


def largest_not_over(excess: Callable[[int], int], top: int) -> int:
    """Return about the largest number from 1 to ``top`` whose ``excess`` is not positive; 0 if there is none.

    ``excess`` must grow about linearly; it may grow in steps, and a call is expensive. The search is regula falsi with
    the Illinois rule: the value of an end point that stays twice is halved.
    """
    low, high = (0, 0), (top, excess(top) if top else 0)
    if high[1] <= 0:
        return top
    guess, previous = 1, None
    for _ in range(_MAX_DRY_RUNS):
        if high[0] - low[0] < 2:
            break
        value = excess(guess)
        negative = value <= 0
        divisor = 2 if negative == previous else 1
        low, high = (
            ((guess, value), (high[0], high[1] // divisor))
            if negative
            else ((low[0], low[1] // divisor), (guess, value))
        )
        previous = negative
        crossing = low[0] - low[1] * (high[0] - low[0]) // max(high[1] - low[1], 1)
        guess = min(max(crossing, low[0] + 1), high[0] - 1)
    return low[0]


def _describe_cpu(request: RecordRequest, source: str, sample: Callable[[], Callable[[], int]]) -> JsonObject:
    """Return the estimate's fields of a CPU rank, whose rate is that of a function that ``sample`` returns.

    That function returns the FLOPs that it has computed.

    The sample runs on a single thread: on a busy machine, threads that wait for each other take a thousand times as
    long. Its shortest run gives the rate of a quiet machine.
    """
    assert request.world is not None
    threads_before, threads = torch.get_num_threads(), max(1, cpu_count() // request.world)
    torch.set_num_threads(1)
    best, calls, flops, run_sample = float("inf"), 0, 0, sample()
    begin, cpu_begin = time.perf_counter(), time.process_time()
    try:
        while calls < 3 or time.perf_counter() < begin + SAMPLE_S:
            calls, start = calls + 1, time.perf_counter()
            flops = run_sample()
            best = min(best, time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads_before)
    slowdown = max(1.0, (time.perf_counter() - begin) / (time.process_time() - cpu_begin))
    rate = flops / best * threads * min(1.0, cpu_count() / request.world)
    # The host's available memory, shared among the ranks.
    memory = psutil.virtual_memory().available // request.world
    return {
        "device": "CPU process", "memory_limit": memory, "rate": rate, "rate_source": source, "slowdown": slowdown,
    }  # fmt: skip


def _describe_gpu(request: RecordRequest, kernel: str) -> JsonObject:
    """Return the estimate's fields of the visible GPU with the least memory."""
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    smallest = min(properties, key=lambda gpu: int(gpu.total_memory))
    rate, source = kernel_rate(smallest.name, kernel, request.workload.dtype)
    if request.workload.recurrent:
        rate, source = (RECURRENCE_REFERENCE_RATE if kernel == "reference" else RECURRENCE_RATE) * 1e12, "assumed"
    memory = int(smallest.total_memory) - GPU_RESERVE_BYTES
    return {"device": smallest.name, "memory_limit": memory, "rate": rate, "rate_source": source}


def kernel_rate(device: str, kernel: str, dtype: str) -> tuple[float, str]:
    """Return the FLOP/s that a kernel is assumed to reach on a device, and the source of the figure."""
    if kernel == "reference":
        return REFERENCE_RATE * 1e12, "assumed"
    peak, (share, max_tflops) = peak_of(device, dtype), KERNEL_SHARES.get(kernel, (0.0, 0.0))
    if peak is None or not share:
        return UNKNOWN_RATE * 1e12, "assumed: this device or kernel is not known"
    return min(share * peak.tflops, max_tflops) * 1e12, f"assumed from the peak of {device}"


def _block_of(kind: type[Kernel], workload: Workload) -> Callable[[], int]:
    """Return a function that computes a small block, with its backward pass if any, and returns its FLOPs."""
    keys = min(SAMPLE_TOKENS if workload.kv_length is None else SAMPLE_KEYS, workload.kv_length or workload.seq)
    q, k = (torch.randn(1, tokens, 1, workload.head_dim).to(torch_dtype(workload))
            for tokens in (min(SAMPLE_TOKENS, workload.seq), keys))  # fmt: skip
    scale, kernel = workload.head_dim**-0.5, kind()

    def run() -> int:
        kernel.flops = 0
        out, lse = kernel.forward(q, k, k, scale=scale, causal=False)
        if workload.backward:
            kernel.backward(q, q, q, q, lse, out=out, scale=scale, causal=False)
        return int(kernel.flops)

    return run


def _sequence_of(workload: Workload) -> Callable[[], int]:
    """Return a function that computes a short sequence, with its backward pass if any, and returns its FLOPs."""
    short = msgspec.structs.replace(
        workload, batch=1, seq=min(SAMPLE_TOKENS, workload.seq), documents=None, heads=1, kv_heads=1, conv_width=None
    )
    shard = RecurrenceShard.create(single_rank_strategy("reference"), short, torch.device("cpu"))

    def run() -> int:
        shard.run_iteration()
        return short.model_flops()

    return run


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
