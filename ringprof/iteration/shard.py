"""Shares of a workload on one rank: tensors, results, counts and the profiler around an iteration."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.autograd.graph import _engine_run_backward
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from ringprof.common.json_object import JsonObject
from ringprof.iteration.clock import CpuClock, CudaClock, clock_for
from ringprof.iteration.resolve import attention_options, kernel_options, layout_options, shape_of, torch_dtype
from ringprof.run import DeviceState, Sent, Work
from ringprof.strategies.algorithms.cached import Cached
from ringprof.workload.workload import Workload

SINKS_SEED = 18
ITERATION = "ringprof::iteration"
"""Name of a profiled iteration in the trace."""


@dataclass
class WorkloadShard:
    """One rank's share of a workload, and one iteration over it."""

    strategy: Any
    """Strategy that computes the workload: a `Strategy`, or `Cached` if the workload has a cache."""
    causal: bool
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor | None
    """Gradient of the output; None: forward only."""
    cuda_graph: bool = False
    """Whether iterations after the warm-up are replays of a captured CUDA graph."""
    graph: torch.cuda.CUDAGraph | None = None
    attention_options: JsonObject = field(default_factory=dict)
    """Keyword arguments of `Strategy.attention` for the mask and the scores, except ``causal``."""
    kernel_options: dict[str, bool] = field(default_factory=dict)
    """Keyword arguments of `Strategy.kernel_for`: features of the mask and the scores that the kernel must support."""
    sinks: Tensor | None = None
    """One logit per head (H), the same on every rank; None without sinks. Over a cache: only of the returned heads."""
    graph_results: list[Results] = field(default_factory=list)
    """Results that every replay of the graph overwrites; empty without a graph."""

    @classmethod
    def create(
        cls, strategy: Any, workload: Workload, device: torch.device, *, cuda_graph: bool = False
    ) -> WorkloadShard:
        """Create one rank's share with random inputs, drawn on ``device``; on ``meta`` it has shapes only.

        Each rank draws its own share, because the full tensors may fit no device.
        """
        if workload.kv_length is not None:
            return cls._create_over_cache(strategy, workload, device, cuda_graph=cuda_graph)
        generator = seeded(device, 1 + strategy.comm.rank)
        local = workload.seq // strategy.comm.size

        def draw(heads: int, size: int) -> Tensor:
            shape = (workload.batch, local, heads, size)
            return torch.randn(shape, generator=generator, device=device, dtype=torch_dtype(workload))

        heads, kv_heads, trains = workload.heads, workload.kv_heads, workload.backward
        size, v_head_dim = workload.head_dim, workload.v_head_dim or workload.head_dim
        sizes = ((heads, size), (kv_heads, size), (kv_heads, v_head_dim))
        q, k, v = (draw(*count).requires_grad_(trains) for count in sizes)
        sinks = drawn_sinks(workload, device)
        # Ask for the layout, as a program does that shards its tokens by the documents.
        strategy.layout_of(**layout_options(workload))
        return cls(
            strategy, workload.causal, q, k, v, draw(heads, v_head_dim) if trains else None, cuda_graph,
            attention_options=attention_options(workload, sinks), kernel_options=kernel_options(workload), sinks=sinks,
        )  # fmt: skip

    @classmethod
    def _create_over_cache(
        cls, strategy: Cached, workload: Workload, device: torch.device, *, cuda_graph: bool
    ) -> WorkloadShard:
        """Create one rank's share of prefill or decode: new queries, which ranks may share, and its keys and values."""
        dtype, shape = torch_dtype(workload), shape_of(workload)
        q_shape = (shape.batch, shape.seq, shape.heads, shape.head_dim)
        queries = torch.randn(q_shape, generator=seeded(device, 0), device=device, dtype=dtype)
        generator = seeded(device, 1 + strategy.comm.rank)
        _, kv = strategy.local_shapes(shape)
        sizes = (workload.head_dim, workload.v_head_dim or workload.head_dim)
        k, v = (torch.randn((*kv[:3], size), generator=generator, device=device, dtype=dtype) for size in sizes)
        q, sinks = strategy.shard(queries).contiguous(), drawn_sinks(workload, device)
        sinks = None if sinks is None else sinks[strategy.heads(shape.heads, shape.kv_heads).returned]
        return cls(
            strategy, workload.causal, q, k, v, None, cuda_graph, attention_options=attention_options(workload, sinks),
            kernel_options=kernel_options(workload), sinks=sinks,
        )  # fmt: skip

    def kernel(self) -> Any:
        """Return the kernel that computes the attention blocks."""
        return self.strategy.kernel_for(self.q, **self.kernel_options)

    def run_iteration(self) -> Results:
        """Run one iteration, forward and backward if there is ``dout``, and return its results."""
        if self.graph is not None:
            self.graph.replay()
            return self.graph_results[0]
        out = self.strategy.attention(self.q, self.k, self.v, causal=self.causal, **self.attention_options)
        if self.dout is None:
            return Results(out)
        leaves = (self.q, self.k, self.v, *(() if self.sinks is None else (self.sinks,)))
        if self.dout.is_meta:
            # torch.autograd.grad would load sympy, for half a second of processor time, to compare two shapes.
            return Results(out, *_engine_run_backward((out,), (self.dout,), False, False, leaves, False))
        return Results(out, *torch.autograd.grad(out, leaves, self.dout))

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.q.device

    def clock(self) -> CpuClock | CudaClock:
        """Create a clock for the device."""
        return clock_for(self.device)

    @property
    def strategies(self) -> list[Any]:
        """Strategies that compute an iteration."""
        return [self.strategy]

    def run_for_verification(self) -> Results:
        """Run one iteration and return the results that are verified."""
        return self.run_iteration()

    def capture_graph(self) -> None:
        """Capture one iteration in a CUDA graph, which all further iterations replay; needs a warm-up before it."""
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog thread queries events meanwhile, which the global capture mode would refuse.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            # Every replay writes to these tensors.
            self.graph_results.append(self.run_iteration())
        self.graph = graph


def seeded(device: torch.device, seed: int) -> torch.Generator | None:
    """Return a generator of random numbers with this seed; None on ``meta``, which has no numbers."""
    return None if device.type == "meta" else torch.Generator(device).manual_seed(seed)


@dataclass(frozen=True)
class Results:
    """Output and gradients that one iteration computed on this rank; gradients are None without a backward pass."""

    out: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dsinks: Tensor | None = None
    """This rank's summand (H) of the sinks' gradient, to be summed over the ranks."""


_RESULTS = ("out", "dq", "dk", "dv")


@dataclass(kw_only=True)
class DynamicCpShard(WorkloadShard):
    """One rank's share of dynamic context parallelism: steps, each with its own number of ranks per sequence.

    Every step has as many tokens per rank. With 4 ranks and sizes 4, 2 and 1, the first step has one sequence of all
    tokens, the second has two of half the length, each on two neighbours, and the third has four, one per rank. The
    strategies of all sizes are created once. The inherited attributes are those of the first step.
    """

    steps: list[WorkloadShard]
    workloads: list[Workload]
    """Workload of one group of ranks, for each step."""
    timestamps: list[list[Any]] = field(default_factory=list)
    """For each iteration, the start of each step and the end of the last: CUDA events, or nanoseconds on CPU."""

    @classmethod
    def from_dynamic(
        cls, dynamic: Any, workload: Workload, sizes: tuple[int, ...], device: torch.device
    ) -> DynamicCpShard:
        """Create the shards of all steps from ``dynamic``, a `ringprof.strategies.Dynamic`.

        Collective: every rank must call this, because the strategies are created here.
        """
        workloads = [workload.step(dynamic.comm.size // size) for size in sizes]
        strategies = [dynamic.of(size) for size in sizes]
        steps = [
            WorkloadShard.create(strategy, step_workload, device)
            for strategy, step_workload in zip(strategies, workloads, strict=True)
        ]
        first = steps[0]
        return cls(
            first.strategy, first.causal, first.q, first.k, first.v, first.dout, steps=steps, workloads=workloads
        )

    @property
    def strategies(self) -> list[Any]:
        """Strategies of all steps, each once."""
        return list({id(step.strategy): step.strategy for step in self.steps}.values())

    def run_iteration(self) -> Results:
        """Run all steps and return the results of the last one."""
        return self._run_steps()[-1]

    def run_for_verification(self) -> Results:
        """Run all steps and return their results, concatenated along the tokens; see `results_of_step`."""
        step_results = self._run_steps()
        tensors = {name: [getattr(results, name) for results in step_results] for name in _RESULTS}
        return Results(**{name: torch.cat(parts, 1) for name, parts in tensors.items() if parts[0] is not None})

    def _run_steps(self) -> list[Results]:
        results, timestamps = [], [self._timestamp()]
        for step in self.steps:
            with record_function(f"cp_size={step.strategy.comm.size}"):
                results.append(step.run_iteration())
            timestamps.append(self._timestamp())
        self.timestamps.append(timestamps)
        return results

    def results_of_step(self, results: Results, number: int) -> Results:
        """Return the part of ``results`` (those of `run_for_verification`) that belongs to step ``number``."""
        tensors = {name: x for name in _RESULTS if (x := getattr(results, name)) is not None}
        return Results(**{name: x.chunk(len(self.steps), 1)[number] for name, x in tensors.items()})

    def step_times_ns(self, iterations: int) -> list[int]:
        """Return the median time of each step over the last ``iterations``, in nanoseconds.

        The device must have finished.
        """
        on_gpu = self.device.type == "cuda"
        times = [
            [round(begin.elapsed_time(end) * 1e6) if on_gpu else end - begin for begin, end in pairwise(timestamps)]
            for timestamps in self.timestamps[-iterations:]
        ]
        return [int(median(times_of_step)) for times_of_step in zip(*times, strict=True)]

    def _timestamp(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter_ns()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def drawn_sinks(workload: Workload, device: torch.device) -> Tensor | None:
    """Draw the sinks' logits (H) in float32, the same on every rank; None if the workload has no sinks."""
    if workload.sinks is None:
        return None
    generator = torch.Generator().manual_seed(SINKS_SEED)
    return torch.randn(workload.heads, generator=generator).to(device).requires_grad_(workload.backward)


@dataclass
class Measurement:
    """Measurements of one rank's timed iterations."""

    iterations_ns: list[int]
    peak_bytes: int | None
    work: Work
    first_rows: Tensor
    """`row_sums` of the first output, which is one of the warm-up if there was any."""
    last: Results | None
    """Results of the last timed iteration; None after they are verified."""
    state: DeviceState | None = None
    """State of the GPU during the timed iterations."""


def row_sums(out: Tensor) -> Tensor:
    """Return a checksum of every row of an output (B, S, H, D), to compare two outputs: int64 (B, S)."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[out.element_size()]
    return out.detach().view(bits).flatten(2).sum(2, dtype=torch.int64)


_active_profilers: list[Any] = []
"""Profilers of ringprof in this process, which warm up or collect."""


def profiler_is_busy() -> bool:
    """Return whether a profiler is active in this process. A second one would end the first, or the process.

    A profiler that is not ringprof's and only warms up cannot be detected.
    """
    untyped: Any = torch.autograd
    return bool(_active_profilers) or untyped._profiler_enabled()


@contextmanager
def profiler(*, record_shapes: bool = False) -> Iterator[Any]:
    """Run the block under torch's profiler, which collects between its first and second ``step()``.

    Before the first ``step()`` the profiler warms up and drops all events.
    """
    activities, experimental = [ProfilerActivity.CPU], None
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
        # Record which event each stream waits for, too.
        experimental = _ExperimentalConfig(enable_cuda_sync_events=True)
    once = schedule(wait=0, warmup=1, active=1, repeat=1)
    with warnings.catch_warnings():
        # torch 2.11 advises how to keep the events of earlier cycles; here there is one.
        warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
        with profile(
            activities=activities, schedule=once, record_shapes=record_shapes, experimental_config=experimental
        ) as recording:
            _active_profilers.append(recording)
            try:
                yield recording
            finally:
                _active_profilers.remove(recording)


def reset_counts(strategies: Sequence[Any]) -> None:
    """Reset the strategies' counters of work, from which `counted_work` counts."""
    for strategy in strategies:
        strategy.comm.meter.clear()
        for kernel in strategy.kernels():
            kernel.flops = 0
            kernel.calls = dict.fromkeys(kernel.calls, 0)


def counted_work(strategies: Sequence[Any]) -> Work:
    """Return the work that the strategies of this rank have computed and sent since `reset_counts`, summed.

    A figure is None if no kernel, or no channel, of the strategies has counted anything.
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
            total[:] = [before + added for before, added in zip(total, counts, strict=True)]
    entries = [
        Sent(channel=channel, phase=phase, operation=operation, link=link, to=to, count=count, sent_bytes=size)
        for (channel, phase, operation, link, to), (count, size) in sent.items()
    ]
    # A recurrence sends nothing where every border of ranks is one of documents.
    alone = all(strategy.comm.size == 1 or getattr(strategy, "counts_all_sent", False) for strategy in strategies)
    computed = bool(sum(calls.values()))
    return Work(
        block_flops=flops if computed else None, block_calls=dict(calls), sent=entries if entries or alone else None
    )
