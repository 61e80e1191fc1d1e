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
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from ringprof.prediction import host_timing, measure, microbenchmark
from ringprof.prediction.calibration import Calibration, assumed
from ringprof.prediction.microbenchmark import Bench

CUDA = torch.device("cuda", 0)
UNITS, TILE = 132, 128
_LAUNCH_NS, _CYCLES_PER_NS = 3e3, 1.7
_RANK = threading.local()


@dataclass(frozen=True)
class Truth:
    """The constants of a simulated machine."""

    flops_per_ns: float = 600e3
    backward_rate: float = 0.8
    """Rate of backward calls, as a part of the forward rate."""
    call_ns: float = 15e3
    tile_columns: float = 300.0
    """Fixed cost of a tile of 128 rows, in columns."""
    grouped: float = 0.01
    """Time saved per doubling of the query heads that share a key head, as a part of the call."""
    noise: float = 0.01
    """Standard deviation of one call, as a part of its time."""
    heat: float = 0.1
    heat_ns: float = 0.1e9
    memory_gb_s: float = 3300.0
    reorder_gb_s: float = 1100.0
    touch_ns: float = 4e3
    latency_ns: float = 40e3
    copy_latency_ns: float = 15e3
    channel_gb_s: float = 18.0
    hop_gb_s: float = 350.0
    total_gb_s: float = 390.0
    copy_gb_s: float = 380.0
    collective_gb_s: float = 310.0
    contention: float = 0.8
    host_us: dict[str, float] = field(default_factory=dict)
    """Host time by kind of operation, as `ringprof.prediction.calibration.Host` names them."""
    host_unlike: float = 0.0
    """Standard deviation of the hosts' speeds."""

    def attention_ns(
        self, phase: str, q: int, kv: int, heads: int, kv_heads: int, *, causal: bool = False,
        pairs: int | None = None, sequences: int = 1, head_dim: int = 128,
    ) -> float:  # fmt: skip
        """Nanoseconds of a call on a cool device.

        Tiles of 128 x 128 that hold a visible pair are computed in full, in waves over the multiprocessors.
        """
        rows, columns = (q, kv) if phase == "forward" else (kv, q)
        high, wide = math.ceil(rows / TILE), math.ceil(columns / TILE)
        computed = high * (high + 1) / 2 if causal else high * wide
        if pairs is not None:
            high += sequences // 2
            computed = pairs / TILE**2 + high / 2
        flops = 4 if phase == "forward" else 10 / self.backward_rate
        a_tile = flops * head_dim * TILE * (computed * TILE / high + self.tile_columns) / (self.flops_per_ns / UNITS)
        waves = heads * high / UNITS
        waves = waves + 0.5 if causal or pairs is not None else math.ceil(waves)
        return self.call_ns + waves * a_tile * (1 - self.grouped * math.log2(heads / kv_heads))


class SimulatedGpu:
    """One rank's host and GPU: two clocks, a stream for each communicator, and how warm the GPU is."""

    def __init__(self, truth: Truth, rank: int, ranks: int, seed: int) -> None:
        self.truth, self.rank, self.ranks = truth, rank, ranks
        self.chance = random.Random(f"{seed}:{rank}")
        self.host_ns = self.stream_ns = self.warmth = 0.0
        self.side_ns = 0.0
        self.hop: tuple[float, float, float] | None = None
        """Begin and end of the hop in flight, and the part of the multiprocessors that it holds."""
        self.host_factor = self.chance.gauss(1, truth.host_unlike)
        self.calls = 0
        self.broken: Callable[[str, int, int], BaseException | None] = lambda phase, q, kv: None
        """What a call of an attention kernel raises; None: nothing."""

    def noisy(self, ns: float) -> float:
        return ns * max(self.chance.gauss(1, self.truth.noise), 0.5)

    def launch(self, ns: float, *, computes: bool = True) -> None:
        """Run a kernel on the compute stream; one that computes is slower on a warm device and beside a hop."""
        self.host_ns += _LAUNCH_NS
        start = max(self.stream_ns, self.host_ns)
        self._idle(start - self.stream_ns)
        if computes:
            ns = self.noisy(ns * (1 + self.truth.heat * self.warmth))
            self.warmth = 1 - (1 - self.warmth) * math.exp(-ns / self.truth.heat_ns)
        self.stream_ns = start + self._beside_hop(start, ns)

    def _idle(self, ns: float) -> None:
        self.warmth *= math.exp(-max(ns, 0.0) / self.truth.heat_ns)

    def _beside_hop(self, start: float, ns: float) -> float:
        if self.hop is None or not self.hop[0] <= start < self.hop[1]:
            return ns
        rate = 1 - self.truth.contention * self.hop[2]
        beside = self.hop[1] - start
        return ns / rate if ns / rate < beside else ns + beside * (1 - rate)

    def attention(self, phase: str, q: Any, k: Any, causal: bool, parts: Any) -> None:
        """Run an attention call on tensors (batch, tokens, heads, head_dim)."""
        (_, queries, heads, _), (_, keys, kv_heads, _) = q.shape, k.shape
        self.calls += 1
        error = self.broken(phase, queries, keys)
        if error is not None:
            raise error
        masked = {} if parts is None else {"pairs": parts.area, "sequences": len(parts.parts)}
        self.launch(self.truth.attention_ns(phase, queries, keys, heads, kv_heads, causal=causal, **masked))

    def transfer(self, size: float, gb_s: float, latency_ns: float, held: float = 0.0) -> _Arrival:
        """Begin a transfer behind the compute stream; all ranks transfer alike."""
        self.host_ns += _LAUNCH_NS
        start = max(self.stream_ns, self.host_ns)
        end = start + self.noisy(latency_ns + size / gb_s)
        self.hop = (start, end, held)
        return _Arrival(self, end)


@dataclass
class _Arrival:
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
    """The GPU of the running rank."""
    current: SimulatedGpu = _RANK.gpu
    return current


class _Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.ns = 0.0

    def record(self, stream: object = None) -> None:
        here = gpu()
        here.host_ns += 500
        self.ns = max(here.side_ns if stream is not None else here.stream_ns, here.host_ns)

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
    here = gpu()
    here.host_ns = max(here.host_ns, here.stream_ns, here.side_ns)


class _OnMeta(TorchFunctionMode):
    """Tensors of the GPU on the meta device; additions and stacks take the time of their bytes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(kwargs.get("device"), "type", "") == "cuda":
            kwargs["device"] = "meta"
        result = func(*args, **kwargs)
        name, truth = getattr(func, "__name__", ""), gpu().truth
        if name == "stack":
            gpu().launch(gpu().noisy(truth.touch_ns + 2 * result.nbytes / truth.reorder_gb_s), computes=False)
        elif name in ("__iadd__", "add_"):
            moved = 2 * args[0].nbytes + args[1].nbytes
            gpu().launch(gpu().noisy(truth.touch_ns + moved / truth.memory_gb_s), computes=False)
        return result


class _Kernel:
    """An attention kernel of the simulated GPU."""

    def __init__(self, name: str) -> None:
        self.name = name

    def forward(self, q: Any, k: Any, v: Any, *, scale: float, causal: bool, parts: Any) -> tuple[Any, Any]:
        gpu().attention("forward", q, k, causal, parts)
        return q, q

    def backward(
        self, dout: Any, q: Any, k: Any, v: Any, lse: Any, *, out: Any, scale: float, causal: bool, parts: Any
    ) -> None:
        gpu().attention("backward", q, k, causal, parts)


class _Communicator:
    """Hops and collectives over simulated links."""

    def __init__(self, hops: str = "nccl") -> None:
        self._hops = hops

    def ring(self, name: str) -> Any:
        return SimpleNamespace(post=self._post)

    def _post(self, parcel: Any) -> _Arrival:
        size, truth, here = parcel.size_bytes, gpu().truth, gpu()
        if self._hops == "copy":
            return here.transfer(size, truth.copy_gb_s, truth.copy_latency_ns)
        # NCCL's rule for one host: channels that the ranks share, doubled for every 16 MiB that one would carry.
        count = 32 // here.ranks
        while count < 32 and size > count * (16 << 20):
            count *= 2
        rate = min(count * truth.channel_gb_s, truth.hop_gb_s)
        earlier = here.hop
        arrival = here.transfer(size, rate, truth.latency_ns, count / UNITS)
        if earlier is not None and earlier[1] > here.stream_ns:  # two rings at once share the links
            arrival.end_ns = here.stream_ns + here.noisy(truth.latency_ns + 2 * size / truth.total_gb_s)
        return arrival

    def collective(self, name: str) -> Any:
        return SimpleNamespace(all_to_all=self._all, reduce_scatter=self._all, all_gather=self._gather)

    def _all(self, tensor: Any) -> _Arrival:
        ranks, truth = gpu().ranks, gpu().truth
        return gpu().transfer(tensor.nbytes * (ranks - 1) / ranks, truth.collective_gb_s, truth.latency_ns)

    def _gather(self, tensor: Any) -> _Arrival:
        truth = gpu().truth
        return gpu().transfer(tensor.nbytes * (gpu().ranks - 1), truth.collective_gb_s, truth.latency_ns)


# --- the hosts' passes --------------------------------------------------------------------------------


class _Pass:
    """A strategy's pass that takes the host the sum of its operations' times."""

    def __init__(self, kinds: dict[str, int]) -> None:
        self._kinds = kinds

    def iteration(self) -> None:
        here = gpu()
        us = sum(here.truth.host_us[kind] * count for kind, count in self._kinds.items())
        here.host_ns += here.noisy(us * 1e3 * here.host_factor)


class _Clock:
    def __init__(self) -> None:
        self._times: list[int] = []

    def run(self, body: Callable[[], object]) -> None:
        begin = gpu().host_ns
        body()
        self._times.append(round(gpu().host_ns - begin))

    def times_ns(self) -> list[int]:
        return self._times


@cache
def _passes(ranks: int, kernels: tuple[str, ...]) -> list[tuple[Any, Any]]:
    """The passes that a calibration wants, counted once: counting runs every strategy on shapes."""
    return list(_WANTED(Bench(CUDA, 0, ranks), kernels))


_WANTED = host_timing._wanted


# --- a calibration ------------------------------------------------------------------------------------


class _SimulatedBench(Bench):
    """A rank's bench whose ranks meet at a barrier between threads."""

    def __init__(self, rank: int, ranks: int, shared: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(CUDA, rank, ranks)
        self._shared, self._barrier = shared, barrier

    def together(self, part: Any, kind: Any) -> list[Any]:
        self._shared[self.rank] = part
        self._barrier.wait()
        everyone = list(self._shared)
        self._barrier.wait()
        return everyone


def simulate_torch(patch: pytest.MonkeyPatch) -> None:
    """Put the simulated GPU in the place of CUDA, of the kernels, of the links and of the clocks."""
    clock = SimpleNamespace(
        monotonic=lambda: gpu().host_ns / 1e9, perf_counter_ns=lambda: round(gpu().host_ns),
        sleep=lambda s: setattr(gpu(), "host_ns", gpu().host_ns + s * 1e9),
    )  # fmt: skip
    for module in (microbenchmark, measure, host_timing):
        patch.setattr(module, "time", clock)
    for name, value in {
        "Event": _Event, "Stream": lambda device: "side", "stream": _stream, "synchronize": _synchronize,
        "empty_cache": lambda: None, "_sleep": lambda cycles: gpu().launch(cycles / _CYCLES_PER_NS, computes=False),
    }.items():  # fmt: skip
        patch.setattr(torch.cuda, name, value)
    patch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    patch.setattr(measure, "KERNELS", {name: lambda name=name: _Kernel(name) for name in ("cudnn", "flash-attn")})
    patch.setattr(measure, "Communicator", _Communicator)
    patch.setattr(host_timing, "_wanted", lambda microbenchmark, kernels: _passes(microbenchmark.size, tuple(kernels)))
    patch.setattr(host_timing, "_made", lambda microbenchmark, about, _: host_timing._Timed(about, _Pass(about.kinds)))  # type: ignore[arg-type]
    patch.setattr(host_timing, "clock_for", lambda device: _Clock())


def calibrated(
    patch: pytest.MonkeyPatch, truth: Truth, parts: Sequence[str], *, seed: int = 0, ranks: int = 1,
    seconds: float = 400.0, kernels: Sequence[str] = ("cudnn",), base: Calibration | None = None,
    broken: Callable[[str, int, int], BaseException | None] | None = None,
    save: Callable[[Calibration], None] = lambda known: None,
) -> Calibration:  # fmt: skip
    """Calibrate a simulated machine by `measure_machine`; return what rank 0 knows at the end."""
    simulate_torch(patch)
    shared, barrier = [None] * ranks, threading.Barrier(ranks)
    begin = base or assumed("simulated", "simulated", UNITS, 80 << 30)
    if "host" in parts:
        _passes(ranks, tuple(kernels))

    def rank_main(rank: int) -> Calibration:
        _RANK.gpu, _RANK.side = SimulatedGpu(truth, rank, ranks, seed), False
        _RANK.gpu.broken = broken or _RANK.gpu.broken
        try:
            with _OnMeta():
                return measure.measure_machine(
                    begin, _SimulatedBench(rank, ranks, shared, barrier), kernels, seconds, save, parts
                )
        except BaseException:
            barrier.abort()
            raise

    if ranks == 1:
        return rank_main(0)
    with ThreadPoolExecutor(ranks) as threads:
        first, *_ = list(threads.map(rank_main, range(ranks)))
        return first
