"""What is measured of one rank: iterations without the profiler, work done, memory, then a profile."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from ringprof.json_object import JsonObject
from ringprof.record.clock import clock_for
from ringprof.record.progress import Reporter
from ringprof.record.resolve import asks_of_kernels, mask_options, shape_of, torch_dtype
from ringprof.record.telemetry import watching
from ringprof.run import DeviceState, Sent, Work, Workload
from ringprof.strategies.algorithms.cached import Cached
from ringprof.strategies.transport.copy_engine import held_bytes

SINKS_SEED = 18
ITERATION = "ringprof::iteration"
"""The name of a profiled iteration in the trace."""


@dataclass
class WorkloadShard:
    """One rank's share of a workload, and one iteration over it."""

    strategy: Any
    """A `Strategy`, `Cached` where the workload has a cache."""
    causal: bool
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor | None
    """None: forward only."""
    cuda_graph: bool = False
    """Whether iterations after the warm-up are replays of one that is captured."""
    graph: torch.cuda.CUDAGraph | None = None
    options: JsonObject = field(default_factory=dict)
    """What `Strategy.attention` is told of the mask beside that."""
    asks: dict[str, bool] = field(default_factory=dict)
    """What the choice of a kernel is told of it."""
    sinks: Tensor | None = None
    """One logit a head (H), the same on every rank, over a cache of the heads that it returns; None without them."""
    captured: list[Results] = field(default_factory=list)
    """What the replays of the graph compute; empty without one."""

    @classmethod
    def of(cls, strategy: Any, workload: Workload, device: torch.device, *, cuda_graph: bool = False) -> WorkloadShard:
        """Random inputs, made where they are needed: the full tensors may fit no device. On ``meta`` shapes alone."""
        if workload.kv_length is not None:
            return cls._over_cache(strategy, workload, device, cuda_graph=cuda_graph)
        generator = seeded(device, 1 + strategy.comm.rank)
        local = workload.seq // strategy.comm.size

        def draw(heads: int, size: int) -> Tensor:
            shape = (workload.batch, local, heads, size)
            return torch.randn(shape, generator=generator, device=device, dtype=torch_dtype(workload))

        heads, kv_heads, trains = workload.heads, workload.kv_heads, workload.backward
        size, of_v = workload.head_dim, workload.v_head_dim or workload.head_dim
        sizes = ((heads, size), (kv_heads, size), (kv_heads, of_v))
        q, k, v = (draw(*count).requires_grad_(trains) for count in sizes)
        sinks = drawn_sinks(workload, device)
        return cls(
            strategy, workload.causal, q, k, v, draw(heads, of_v) if trains else None, cuda_graph,
            options=mask_options(workload, sinks), asks=asks_of_kernels(workload), sinks=sinks,
        )  # fmt: skip

    @classmethod
    def _over_cache(
        cls, strategy: Cached, workload: Workload, device: torch.device, *, cuda_graph: bool
    ) -> WorkloadShard:
        """New queries, which ranks may have in common, and each rank's keys and values."""
        dtype, shape = torch_dtype(workload), shape_of(workload)
        new = (shape.batch, shape.seq, shape.heads, shape.head_dim)
        queries = torch.randn(new, generator=seeded(device, 0), device=device, dtype=dtype)
        generator = seeded(device, 1 + strategy.comm.rank)
        kv = strategy.local_shapes(shape).kv
        sizes = (workload.head_dim, workload.v_head_dim or workload.head_dim)
        k, v = (torch.randn((*kv[:3], size), generator=generator, device=device, dtype=dtype) for size in sizes)
        q, sinks = strategy.shard(queries).contiguous(), drawn_sinks(workload, device)
        sinks = None if sinks is None else sinks[strategy.heads(shape.heads, shape.kv_heads).returned]
        return cls(
            strategy, workload.causal, q, k, v, None, cuda_graph, options=mask_options(workload, sinks),
            asks=asks_of_kernels(workload), sinks=sinks,
        )  # fmt: skip

    def kernel(self) -> Any:
        """The kernel that computes its blocks."""
        return self.strategy.kernel_for(self.q, **self.asks)

    def iteration(self) -> Results:
        """Forward, and backward with gradients of its own."""
        if self.graph is not None:
            self.graph.replay()
            return self.captured[0]
        out = self.strategy.attention(self.q, self.k, self.v, causal=self.causal, **self.options)
        if self.dout is None:
            return Results(out)
        leaves = (self.q, self.k, self.v, *(() if self.sinks is None else (self.sinks,)))
        return Results(out, *torch.autograd.grad(out, leaves, self.dout))

    @property
    def strategies(self) -> list[Any]:
        """Those that compute an iteration."""
        return [self.strategy]

    def results(self) -> Results:
        """One iteration, for what it computes."""
        return self.iteration()

    def capture(self) -> None:
        """Make this and all further iterations replays of one that is captured now, after some that were not."""
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog asks for events on a thread of its own meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            # Every replay writes to these.
            self.captured.append(self.iteration())
        self.graph = graph


def seeded(device: torch.device, seed: int) -> torch.Generator | None:
    """A generator of random numbers; on ``meta`` there are none."""
    return None if device.type == "meta" else torch.Generator(device).manual_seed(seed)


@dataclass(frozen=True)
class Results:
    """What one iteration computed on this rank: as q, k and v, and None without a backward pass."""

    out: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dsinks: Tensor | None = None
    """This rank's share (H), to be added up over the ranks."""


def drawn_sinks(workload: Workload, device: torch.device) -> Tensor | None:
    """Logits (H) in float32, alike on every rank; None where the workload has none."""
    if workload.sinks is None:
        return None
    generator = torch.Generator().manual_seed(SINKS_SEED)
    return torch.randn(workload.heads, generator=generator).to(device).requires_grad_(workload.backward)


@dataclass
class Measurement:
    """The timed iterations of one rank."""

    iterations_ns: list[int]
    peak_bytes: int | None
    work: Work
    first_rows: Tensor
    """The `row_sums` of the first output, of warm-up where there was one."""
    last: Results | None
    """Of the last timed iteration; None when it has been looked at."""
    state: DeviceState | None = None
    """Of the GPU meanwhile."""


def measure(problem: WorkloadShard, device: torch.device, warmup: int, iters: int, reporter: Reporter) -> Measurement:
    """Warm up, then time every iteration; the work is counted in the first timed one."""
    kept: list[Results] = []
    first_rows = work = None

    def keeping() -> None:
        kept.append(problem.results())

    warm = clock_for(device)
    reporter.start("warm-up", warmup)
    for number in range(warmup):
        warm.run(problem.iteration if number else keeping)
        first_rows = row_sums(kept.pop().out) if kept else first_rows
        reporter.advance()
    warm.times_ns()
    reset_peak(device)
    reset_counts(problem.strategies)
    if problem.cuda_graph:
        # What is captured is counted, a replay is not: the host does not see it.
        problem.capture()
        work = counted_work(problem.strategies)
        warm.run(problem.iteration)
        warm.times_ns()
    clock = clock_for(device)
    reporter.start("iterations", iters)
    with watching(device) as watch:
        for number in range(iters):
            # What an iteration returns goes with its end; the last one's results are checked.
            kept.clear()
            clock.run(keeping if number == iters - 1 or first_rows is None else problem.iteration)
            work = work or counted_work(problem.strategies)
            first_rows = row_sums(kept[0].out) if first_rows is None else first_rows
            reporter.advance()
        # Waits for the device, so that it is watched to the end.
        times = clock.times_ns()
    assert work is not None and first_rows is not None
    return Measurement(times, peak_bytes(device), work, first_rows, kept[0], watch.state() if watch else None)


def reset_peak(device: torch.device) -> None:
    """Start to look for the peak from here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        # Linux: 5 resets the high-water mark of the resident memory.
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int | None:
    """On a GPU the allocator's peak and the memory that copied hops arrive in. On the CPU the process's resident peak,
    libraries included; None where unknown.

    Without a reset the resident peak is that of the whole process, which verification may have set: an upper bound.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) + held_bytes()
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def row_sums(out: Tensor) -> Tensor:
    """The sum of the bits of every row of an output (B, S, H, D): int64 (B, S), by which two outputs are told apart."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[out.element_size()]
    return out.detach().view(bits).flatten(2).sum(2, dtype=torch.int64)


def profile_iterations(
    problem: WorkloadShard, device: torch.device, iters: int, path: Path, reporter: Reporter
) -> list[int]:
    """Profile iterations and write the trace to ``path``; returns their times by the clock of `measure`.

    All ranks start each iteration together, behind a barrier that lies outside the marked range.
    """
    reporter.start("profile", iters)
    warm, clock = clock_for(device), clock_for(device)

    def marked() -> None:
        with record_function(ITERATION):
            problem.iteration()

    with profiler() as recording:
        warm.run(problem.iteration)
        warm.times_ns()
        recording.step()
        for _ in range(iters):
            clock.run(marked)
            reporter.advance()
        # Waits for the device, so that every kernel ends inside the window.
        times = clock.times_ns()
        recording.step()
    reporter.start("export", 1)
    recording.export_chrome_trace(str(path))
    reporter.advance()
    return times


_at_work: list[Any] = []
"""Profilers of ringprof's own, which warm up or collect."""


def profiler_is_busy() -> bool:
    """Whether a profiler is at work in this process, where a second one would end the first, or the process itself.

    One that is not ringprof's and only warms up cannot be told.
    """
    untyped: Any = torch.autograd
    return bool(_at_work) or untyped._profiler_enabled()


@contextmanager
def profiler(*, record_shapes: bool = False) -> Iterator[Any]:
    """The profiler, collecting between its first and second ``step()``; before that it warms up and drops all."""
    activities, experimental = [ProfilerActivity.CPU], None
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
        # Which event each stream waits for, beside what runs on the streams.
        experimental = _ExperimentalConfig(enable_cuda_sync_events=True)
    once = schedule(wait=0, warmup=1, active=1, repeat=1)
    with warnings.catch_warnings():
        # torch 2.11 advises how to keep the events of earlier cycles; here there is one.
        warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
        with profile(
            activities=activities, schedule=once, record_shapes=record_shapes, experimental_config=experimental
        ) as recording:
            _at_work.append(recording)
            try:
                yield recording
            finally:
                _at_work.remove(recording)


def reset_counts(strategies: Sequence[Any]) -> None:
    """Count the strategies' work anew from here."""
    for strategy in strategies:
        strategy.comm.meter.clear()
        for kernel in strategy.kernels():
            kernel.flops = 0
            kernel.calls = dict.fromkeys(kernel.calls, 0)


def counted_work(strategies: Sequence[Any]) -> Work:
    """What the strategies of this rank have computed and sent since `reset_counts`, together.

    None stands for what no kernel and no channel of theirs has counted.
    """
    flops, calls = 0, Counter[str]()
    sent: dict[tuple[str, str, str, str, int | None], list[int]] = {}
    for strategy in strategies:
        for kernel in strategy.kernels():
            flops += kernel.flops
            calls.update(kernel.calls)
        meter = strategy.comm.meter
        for (channel, *how), counts in meter.sent.items():
            total = sent.setdefault((channel, *how, meter.goes_to.get(channel)), [0, 0])
            total[:] = [one + other for one, other in zip(total, counts, strict=True)]
    entries = [
        Sent(channel=channel, phase=phase, operation=operation, link=link, to=to, count=count, sent_bytes=size)
        for (channel, phase, operation, link, to), (count, size) in sent.items()
    ]
    alone = all(strategy.comm.size == 1 for strategy in strategies)
    computed = bool(sum(calls.values()))
    return Work(
        block_flops=flops if computed else None, block_calls=dict(calls), sent=entries if entries or alone else None
    )
