"""Simulated GPUs with known constants, on which the calibration runs as on real ones: no CUDA, no waiting.

Every rank is a thread with a GPU and a host clock of its own. Tensors are on torch's meta device; kernels, memory
operations and transfers advance simulated time by closed formulas and Gaussian noise.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from ringprof.prediction import measure, microbenchmark
from ringprof.prediction.calibration import Calibration, assumed_calibration
from ringprof.prediction.microbenchmark import Bench
from ringprof.strategies.kernels.registry import KERNELS

CUDA = torch.device("cuda", 0)
MULTIPROCESSORS, TILE = 132, 128
_LAUNCH_NS, _CYCLES_PER_NS = 3e3, 1.7
_RANK = threading.local()


KernelError = Callable[[str, int, int], BaseException | None]
"""Function of phase, queries and keys that returns the exception of an attention call, or None."""


@dataclass(frozen=True)
class Truth:
    """The constants of a simulated machine."""

    flops_per_ns: float = 600e3
    backward_rate: float = 0.8
    """Rate of backward calls, as a fraction of the forward rate."""
    call_ns: float = 15e3
    tile_columns: float = 300.0
    """Fixed cost of a tile of 128 rows, in columns."""
    grouped_saving: float = 0.01
    """Time saved per doubling of the query heads that share a kv head, as a fraction of the call."""
    noise: float = 0.01
    """Standard deviation of one call, as a fraction of its time."""
    matmul_flops_per_ns: float = 800e3
    """Rate of matrix products on a cool device."""
    clock_mhz: int | None = 1500
    """The clock that the driver reports; None: it reports nothing."""
    throttling: float = 0.1
    """Slowdown of a hot device, as a fraction of the time on a cool device."""
    throttling_ns: float = 0.1e9
    """Time constant of the device's warmth."""
    memory_gb_s: float = 3300.0
    reorder_gb_s: float = 1100.0
    memory_op_ns: float = 4e3
    """Fixed time of a kernel that moves memory."""
    latency_ns: float = 40e3
    copy_latency_ns: float = 15e3
    channel_gb_s: float = 18.0
    hop_gb_s: float = 350.0
    total_gb_s: float = 390.0
    copy_gb_s: float = 380.0
    collective_gb_s: float = 310.0
    contention: float = 0.8
    host_us: dict[str, float] = field(default_factory=dict)
    """Host microseconds per kind of operation, by the field names of `ringprof.prediction.calibration.Host`."""
    host_variation: float = 0.0
    """Relative standard deviation of host speed between ranks."""

    def attention_ns(
        self, phase: str, q: int, kv: int, heads: int, kv_heads: int, *, causal: bool = False,
        pairs: int | None = None, sequences: int = 1, head_dim: int = 128,
    ) -> float:  # fmt: skip
        """Return nanoseconds of a call on a cool device.

        Tiles of 128 x 128 that hold a visible pair are computed in full, in waves over the multiprocessors.
        """
        rows, columns = (q, kv) if phase == "forward" else (kv, q)
        row_tiles, column_tiles = math.ceil(rows / TILE), math.ceil(columns / TILE)
        tiles = row_tiles * (row_tiles + 1) / 2 if causal else row_tiles * column_tiles
        if pairs is not None:
            row_tiles += sequences // 2
            tiles = pairs / TILE**2 + row_tiles / 2
        flops = 4 if phase == "forward" else 10 / self.backward_rate
        columns_per_row = tiles * TILE / row_tiles + self.tile_columns
        tile_row_ns = flops * head_dim * TILE * columns_per_row / (self.flops_per_ns / MULTIPROCESSORS)
        waves = heads * row_tiles / MULTIPROCESSORS
        waves = waves + 0.5 if causal or pairs is not None else math.ceil(waves)
        return self.call_ns + waves * tile_row_ns * (1 - self.grouped_saving * math.log2(heads / kv_heads))


class SimulatedGpu:
    """Host and GPU of one rank: two clocks, a compute and a side stream, and the GPU's warmth."""

    def __init__(self, truth: Truth, rank: int, ranks: int, seed: int) -> None:
        self.truth, self.rank, self.ranks = truth, rank, ranks
        self.generator = random.Random(f"{seed}:{rank}")
        self.host_ns = self.stream_ns = self.warmth = 0.0
        self.side_ns = 0.0
        self.hop: tuple[float, float, float] | None = None
        """Start and end of the hop in flight, and the fraction of the multiprocessors that it holds."""
        self.host_factor = self.generator.gauss(1, truth.host_variation)
        self.calls = 0
        self.kernel_error: KernelError = lambda phase, q, kv: None
        """Exception that a call of an attention kernel raises, or None."""

    def noisy(self, ns: float) -> float:
        """Return a time with random noise."""
        return ns * max(self.generator.gauss(1, self.truth.noise), 0.5)

    def launch(self, ns: float, *, computes: bool = True) -> None:
        """Run a kernel on the compute stream; it is slower beside a hop, and on a warm device if it computes."""
        self.host_ns += _LAUNCH_NS
        start = max(self.stream_ns, self.host_ns)
        self._idle(start - self.stream_ns)
        if computes:
            ns = self.noisy(ns * (1 + self.truth.throttling * self.warmth))
            self.warmth = 1 - (1 - self.warmth) * math.exp(-ns / self.truth.throttling_ns)
        self.stream_ns = start + self._beside_hop(start, ns)

    def _idle(self, ns: float) -> None:
        """Cool down for a time."""
        self.warmth *= math.exp(-max(ns, 0.0) / self.truth.throttling_ns)

    def _beside_hop(self, start: float, ns: float) -> float:
        """Return the time of a kernel that takes ``ns`` alone, prolonged while a hop is in flight."""
        if self.hop is None or not self.hop[0] <= start < self.hop[1]:
            return ns
        rate = 1 - self.truth.contention * self.hop[2]
        overlap = self.hop[1] - start
        return ns / rate if ns / rate < overlap else ns + overlap * (1 - rate)

    def attention(self, phase: str, q: Any, k: Any, causal: bool, parts: Any) -> None:
        """Run an attention call on tensors (batch, tokens, heads, head_dim)."""
        (_, queries, heads, _), (_, keys, kv_heads, _) = q.shape, k.shape
        self.calls += 1
        error = self.kernel_error(phase, queries, keys)
        if error is not None:
            raise error
        masked = {} if parts is None else {"pairs": parts.area, "sequences": len(parts.parts)}
        self.launch(self.truth.attention_ns(phase, queries, keys, heads, kv_heads, causal=causal, **masked))

    def transfer(self, size: float, gb_s: float, latency_ns: float, held_share: float = 0.0) -> _Arrival:
        """Start a transfer after the compute stream's work; all ranks make the same transfers."""
        self.host_ns += _LAUNCH_NS
        start = max(self.stream_ns, self.host_ns)
        end = start + self.noisy(latency_ns + size / gb_s)
        self.hop = (start, end, held_share)
        return _Arrival(self, end)


@dataclass
class _Arrival:
    """A transfer in flight."""

    gpu: SimulatedGpu
    end_ns: float

    def wait(self) -> None:
        """Make the current stream wait."""
        if _RANK.side:
            self.gpu.side_ns = max(self.gpu.side_ns, self.end_ns)
        else:
            self.gpu.stream_ns = max(self.gpu.stream_ns, self.end_ns)


# --- torch on a simulated GPU -------------------------------------------------------------------------


def gpu() -> SimulatedGpu:
    """Return the GPU of the current thread's rank."""
    current: SimulatedGpu = _RANK.gpu
    return current


class _Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.ns = 0.0

    def record(self, stream: object = None) -> None:
        device = gpu()
        device.host_ns += 500
        self.ns = max(device.side_ns if stream is not None else device.stream_ns, device.host_ns)

    def synchronize(self) -> None:
        gpu().host_ns = max(gpu().host_ns, self.ns)

    def elapsed_time(self, end: _Event) -> float:
        return (end.ns - self.ns) / 1e6


@contextmanager
def _stream(stream: object) -> Iterator[None]:
    _RANK.side = True
    yield
    _RANK.side = False


def _synchronize() -> None:
    device = gpu()
    device.host_ns = max(device.host_ns, device.stream_ns, device.side_ns)


@contextmanager
def _telemetry(device: object) -> Iterator[Any]:
    clock_mhz = gpu().truth.clock_mhz
    yield None if clock_mhz is None else SimpleNamespace(state=lambda: SimpleNamespace(sm_clock_mhz=clock_mhz))


class _OnMeta(TorchFunctionMode):
    """Function mode that puts CUDA tensors on the meta device; additions and stacks take the time of their bytes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(kwargs.get("device"), "type", "") == "cuda":
            kwargs["device"] = "meta"
        result = func(*args, **kwargs)
        name, truth = getattr(func, "__name__", ""), gpu().truth
        if name == "mm":
            (rows, inner), (_, columns) = args[0].shape, args[1].shape
            gpu().launch(2 * rows * inner * columns / truth.matmul_flops_per_ns)
        elif name == "stack":
            gpu().launch(gpu().noisy(truth.memory_op_ns + 2 * result.nbytes / truth.reorder_gb_s), computes=False)
        elif name in ("__iadd__", "add_"):
            moved_bytes = 2 * args[0].nbytes + args[1].nbytes
            gpu().launch(gpu().noisy(truth.memory_op_ns + moved_bytes / truth.memory_gb_s), computes=False)
        return result


class _Kernel:
    """Attention kernel of the simulated GPU."""

    def __init__(self, name: str) -> None:
        self.name = name

    def forward(self, q: Any, k: Any, v: Any, *, scale: float, causal: bool, parts: Any) -> tuple[Any, Any]:
        gpu().attention("forward", q, k, causal, parts)
        return q, q

    def backward(
        self, dout: Any, q: Any, k: Any, v: Any, lse: Any, *, out: Any, scale: float, causal: bool, parts: Any
    ) -> None:
        gpu().attention("backward", q, k, causal, parts)


def _kernel_named(name: str) -> Any:
    """Return what creates a kernel of this name, with the masks of the real one."""
    create: Any = partial(_Kernel, name)
    create.takes_windows, create.varlen = KERNELS[name].takes_windows, KERNELS[name].varlen
    return create


class _Communicator:
    """Hops and collectives over simulated links."""

    def __init__(self, hops: str = "nccl") -> None:
        self._hops = hops

    def ring(self, name: str) -> Any:
        return SimpleNamespace(post=self._post)

    def _post(self, message: Any) -> _Arrival:
        size, truth, device = message.size_bytes, gpu().truth, gpu()
        if self._hops == "copy":
            return device.transfer(size, truth.copy_gb_s, truth.copy_latency_ns)
        # NCCL's rule for one host: the ranks share the channels. A hop's number doubles, up to all of them, until each
        # carries at most 16 MiB.
        count = 32 // device.ranks
        while count < 32 and size > count * (16 << 20):
            count *= 2
        rate = min(count * truth.channel_gb_s, truth.hop_gb_s)
        earlier = device.hop
        arrival = device.transfer(size, rate, truth.latency_ns, count / MULTIPROCESSORS)
        if earlier is not None and earlier[1] > device.stream_ns:  # two concurrent rings share the links
            arrival.end_ns = device.stream_ns + device.noisy(truth.latency_ns + 2 * size / truth.total_gb_s)
        return arrival

    def collective(self, name: str) -> Any:
        return SimpleNamespace(
            all_to_all=self._all_to_all, reduce_scatter=self._all_to_all, all_gather=self._all_gather
        )

    def _all_to_all(self, tensor: Any) -> _Arrival:
        ranks, truth = gpu().ranks, gpu().truth
        return gpu().transfer(tensor.nbytes * (ranks - 1) / ranks, truth.collective_gb_s, truth.latency_ns)

    def _all_gather(self, tensor: Any) -> _Arrival:
        truth = gpu().truth
        return gpu().transfer(tensor.nbytes * (gpu().ranks - 1), truth.collective_gb_s, truth.latency_ns)


# --- the hosts' passes --------------------------------------------------------------------------------


class _Pass:
    """Pass of a strategy; its host time is the sum of its operations' times."""

    def __init__(self, kinds: dict[str, int]) -> None:
        self._kinds = kinds

    def run_iteration(self) -> None:
        device = gpu()
        us = sum(device.truth.host_us[kind] * count for kind, count in self._kinds.items())
        device.host_ns += device.noisy(us * 1e3 * device.host_factor)


class _Clock:
    """Recorder's clock on simulated time."""

    def __init__(self) -> None:
        self._times: list[int] = []

    def run(self, body: Callable[[], object]) -> None:
        start_ns = gpu().host_ns
        body()
        self._times.append(round(gpu().host_ns - start_ns))

    def times_ns(self) -> list[int]:
        return self._times


@cache
def _passes(ranks: int, kernels: tuple[str, ...]) -> list[tuple[Any, Any]]:
    """Return the passes that a calibration measures; cached, because counting their operations runs every strategy."""
    return list(_PASSES_TO_MEASURE(Bench(CUDA, 0, ranks), kernels))


_PASSES_TO_MEASURE = measure._passes_to_measure


# --- a calibration ------------------------------------------------------------------------------------


class _SimulatedBench(Bench):
    """Bench of a rank that runs as a thread; values are gathered at a barrier between the threads."""

    def __init__(self, rank: int, ranks: int, shared: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(CUDA, rank, ranks)
        self._shared, self._barrier = shared, barrier

    def gather(self, value: Any, type_: Any) -> list[Any]:
        self._shared[self.rank] = value
        self._barrier.wait()
        values = list(self._shared)
        self._barrier.wait()
        return values


def simulate_torch(patch: pytest.MonkeyPatch) -> None:
    """Replace CUDA, kernels, links and clocks by the simulated GPU's."""
    clock = SimpleNamespace(
        monotonic=lambda: gpu().host_ns / 1e9, perf_counter_ns=lambda: round(gpu().host_ns),
        sleep=lambda s: setattr(gpu(), "host_ns", gpu().host_ns + s * 1e9),
    )  # fmt: skip
    for module in (microbenchmark, measure):
        patch.setattr(module, "time", clock)
    for name, value in {
        "Event": _Event, "Stream": lambda device: "side", "stream": _stream, "synchronize": _synchronize,
        "empty_cache": lambda: None, "_sleep": lambda cycles: gpu().launch(cycles / _CYCLES_PER_NS, computes=False),
    }.items():  # fmt: skip
        patch.setattr(torch.cuda, name, value)
    patch.setattr(measure, "device_telemetry", _telemetry)
    patch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    patch.setattr(measure, "KERNELS", {name: _kernel_named(name) for name in ("cudnn", "flash-attn")})
    patch.setattr(measure, "Communicator", _Communicator)
    patch.setattr(measure, "_passes_to_measure", lambda bench, kernels: _passes(bench.size, tuple(kernels)))
    patch.setattr(
        measure,
        "_prepare",
        lambda bench, host_pass, _: measure._TimedPass(host_pass, _Pass(host_pass.kinds)),  # type: ignore[arg-type]
    )
    patch.setattr(measure, "clock_for", lambda device: _Clock())


def calibrate(
    patch: pytest.MonkeyPatch, truth: Truth, parts: Sequence[str], *, seed: int = 0, ranks: int = 1,
    seconds: float = 400.0, kernels: Sequence[str] = ("cudnn",), base: Calibration | None = None,
    kernel_error: KernelError | None = None,
    save: Callable[[Calibration], None] = lambda calibration: None,
) -> Calibration:  # fmt: skip
    """Calibrate a simulated machine with `measure_machine`; return rank 0's calibration."""
    simulate_torch(patch)
    shared, barrier = [None] * ranks, threading.Barrier(ranks)
    base = base or assumed_calibration("simulated", "simulated", MULTIPROCESSORS, 80 << 30)
    if "host" in parts:
        _passes(ranks, tuple(kernels))

    def rank_main(rank: int) -> Calibration:
        _RANK.gpu, _RANK.side = SimulatedGpu(truth, rank, ranks, seed), False
        _RANK.gpu.kernel_error = kernel_error or _RANK.gpu.kernel_error
        try:
            with _OnMeta():
                return measure.measure_machine(
                    base, _SimulatedBench(rank, ranks, shared, barrier), kernels, seconds, save, parts
                )
        except BaseException:
            barrier.abort()
            raise

    if ranks == 1:
        return rank_main(0)
    with ThreadPoolExecutor(ranks) as threads:
        first, *_ = list(threads.map(rank_main, range(ranks)))
        return first
