"""Estimates of a recording, compared with real runs, and refusals that name the largest size that fits."""

from __future__ import annotations

import re
import weakref
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch", reason="recording needs torch")

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ringprof.dryrun.memory import peak_bytes
from ringprof.errors import MissingExtraError, UnsupportedWorkloadError, UsageError, require_packages
from ringprof.iteration.request import RecordRequest
from ringprof.iteration.resolve import resolve
from ringprof.iteration.shard import WorkloadShard
from ringprof.ranks.launcher import RankInfo
from ringprof.recording import estimate as estimate_module
from ringprof.recording.estimate import (
    RecordingEstimate,
    _reading_s,
    describe,
    estimate_of,
    kernel_rate,
    largest_not_over,
    largest_seq,
    raise_if_too_large,
)
from ringprof.strategies import create, find, names
from ringprof.strategies.algorithms.zigzag import Zigzag
from ringprof.strategies.transport.baselines import NoOpKernel, use_kernel
from ringprof.workload.workload import Workload

GIB = 2**30


def request(**changes: object) -> RecordRequest:
    base = RecordRequest(
        workload=Workload(seq=1024, heads=4, kv_heads=4, head_dim=32), strategy="zigzag", device="cpu", world=4,
        warmup=1, iters=3,
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


def plan(**changes: object) -> RecordingEstimate:
    base = RecordingEstimate(
        device="NVIDIA H200", kernel="cudnn", flops_per_device=10**15, rate=5e14, rate_source="assumed",
        memory_bytes=10 * GIB, memory_note="", memory_limit=100 * GIB, iterations=16, start_s=30.0, imbalance=1.0,
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("slowdown", [1.0, 12.0])
def test_time_limit_grows_with_the_load_and_the_rate_does_not(slowdown: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock in which the CPU is given to the sample for one of ``slowdown`` seconds, in long turns."""
    steps = [slowdown * 3 - 2, 1, 1]  # the first of three runs waits for its turn, the others do not

    class Clock:
        now, cpu = 0.0, 0.0

        def perf_counter(self) -> float:
            return self.now

        def process_time(self) -> float:
            return self.cpu

    clock = Clock()

    def run_sample() -> int:
        clock.now, clock.cpu = clock.now + steps.pop(0), clock.cpu + 1
        return 7

    monkeypatch.setattr(estimate_module, "time", clock)
    monkeypatch.setattr(estimate_module, "cpu_count", lambda: 4)
    fields = estimate_module._describe_cpu(request(world=4), "a sample", lambda: run_sample)
    rate, measured = fields["rate"], fields["slowdown"]
    assert (rate, measured) == (7.0, slowdown)
    assert plan(slowdown=measured).time_limit == 600 + 10 * plan().total_seconds * slowdown
    assert describe(request(), plan(slowdown=measured)) == describe(request(), plan())


def test_time_counts_every_iteration_and_the_busiest_rank() -> None:
    assert plan().seconds_per_iteration == 2.0
    assert plan().total_seconds == 30 + 16 * 2
    assert plan(imbalance=1.75).seconds_per_iteration == 3.5


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("causal", [True, False])
def test_work_of_the_busiest_rank_counts_mask_cells(name: str, size: int, causal: bool) -> None:
    """Every rank's cells counted by its tokens' positions; strategies that share out the heads share the cells."""
    strategy = find(name).load()
    layouts = {"usp": ("contiguous", "zigzag", "stripe"), "allgather": ("contiguous", "zigzag")}.get(name, (None,))
    for layout in layouts:
        params = {} if layout is None else {"layout": layout}
        imbalance = strategy.imbalance(size, causal=causal, **params)
        seq = 64 * strategy.layout_for(size, **params).divisor(size)
        assert imbalance == pytest.approx(busiest_over_mean(strategy, size, seq, causal, params), rel=0.02), layout


def busiest_over_mean(strategy: Any, size: int, seq: int, causal: bool, params: dict[str, Any]) -> float:
    layout: Any = strategy.layout_for(size, **params)
    cells = [int((layout.positions(seq, size, rank) + 1).sum()) if causal else seq for rank in range(size)]
    if strategy.__name__ == "Ulysses":
        cells = [sum(cells)]
    if strategy.__name__ == "USP":
        cells = [sum(cells[member] for member in layout.grid.ulysses_group(rank)) for rank in range(size)]
    return max(cells) / (sum(cells) / len(cells))


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("backward", [True, False])
def test_memory_estimate_of_one_rank_equals_its_tensors(name: str, kv_heads: int, backward: bool) -> None:
    """Estimate one rank, which sends nothing. The kernel allocates its results without computing them."""
    workload = Workload(seq=1024, heads=8, kv_heads=kv_heads, head_dim=32, backward=backward)
    estimate = peak_bytes(request(world=1, strategy=name), workload, "flash-attn-3", 1)
    assert estimate == pytest.approx(peak_of_tensors(create(name), workload), rel=0.02)


def peak_of_tensors(strategy: Any, workload: Workload) -> int:
    """Return the peak bytes of all living tensors in two iterations of one rank."""
    tensors = Tensors()
    with tensors, use_kernel(strategy, KernelsRoom()):
        shard = WorkloadShard.create(strategy, workload, torch.device("cpu"))
        for _ in range(2):
            shard.run_iteration()
    return tensors.peak


class KernelsRoom(NoOpKernel):
    """Kernel that computes nothing and allocates flash-attn 3's buffers.

    They hold the sum of dQ in float32, the rows' sums, and the sums of dK and dV over a group in float32."""

    takes_delta = False

    def _backward(self, dout: Any, q: Any, k: Any, *arguments: Any) -> Any:
        buffers = [torch.empty(q.shape, dtype=torch.float32), torch.empty(q.shape[:3])]
        if q.shape[2] != k.shape[2]:
            buffers.append(torch.empty((2, *k.shape), dtype=torch.float32))
        gradients = super()._backward(dout, q, k, *arguments)
        del buffers
        return gradients


class Tensors(TorchDispatchMode):
    """Dispatch mode that sums the living storages that operators have returned."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.held:
                storage = tensor.untyped_storage()
                self.held[storage.data_ptr()] = storage.nbytes()
                weakref.finalize(storage, self.held.pop, storage.data_ptr(), None)
                self.peak = max(self.peak, sum(self.held.values()))
        return result


class Mine(Zigzag):
    """User's strategy that inherits from a bundled one and states no imbalance of its own."""


class Looks(Zigzag):
    """User's strategy that depends on tensor values."""

    def forward(self, blocks: Any, q: Any, k: Any, v: Any) -> Any:
        return super().forward(blocks, q, k, v) if k.sum().item() else (q, q)


def test_user_strategy_without_imbalance_inherits_none() -> None:
    resolved = resolve(request(strategy="tests.recording.test_estimate:Mine"), None)
    estimate = estimate_of(resolved)
    assert estimate.imbalance is None
    assert estimate.memory_bytes == pytest.approx(estimate_of(resolve(request(), None)).memory_bytes, rel=0.1)
    assert "not known" in describe(resolved, estimate)[2]


def test_unpredictable_memory_is_unknown_with_the_reason() -> None:
    resolved = resolve(request(strategy="tests.recording.test_estimate:Looks"), None)
    estimate = estimate_of(resolved)
    assert estimate.memory_bytes is None
    assert re.search(
        r"memory unknown: strategy .* looks at values \(test_estimate.py, line", describe(resolved, estimate)[1]
    )
    raise_if_too_large(resolved, estimate)


def test_plan_states_assumptions_about_a_kernel() -> None:
    resolved = resolve(request(kernel="flex"), None)
    assert describe(resolved, estimate_of(resolved))[1].endswith(
        " of memory, assuming flash attention's memory for flex"
    )


def test_bundled_strategy_must_declare_its_imbalance() -> None:
    body: dict[str, Any] = {"__module__": "ringprof.strategies.algorithms.new"}
    with pytest.raises(TypeError, match=r"ringprof.strategies.algorithms.new.New must say imbalance itself"):
        type("New", (Zigzag,), body)
    type("New", (Zigzag,), {**body, "imbalance": None})


@pytest.mark.parametrize(
    ("device", "kernel", "tflops"),
    [("NVIDIA H200", "cudnn", 0.56 * 989), ("NVIDIA H200", "flash-attn", 340),
     ("NVIDIA A100-SXM4-80GB", "flash-attn", 181), ("NVIDIA H200", "reference", 2), ("some card", "cudnn", 100)],
)  # fmt: skip
def test_the_rate_follows_from_the_devices_peak(device: str, kernel: str, tflops: float) -> None:
    rate, source = kernel_rate(device, kernel, "bf16")
    assert rate / 1e12 == pytest.approx(tflops, rel=0.01) and source.startswith("assumed")


def test_decode_reads_a_ranks_share_of_the_cache() -> None:
    """1.2 million keys of 8 heads of 128, K and V in bf16: 4.9152 GB, a quarter each at the H200's 4800 GB/s."""
    workload = Workload(seq=1, kv_length=1_200_000, phase="decode", heads=8, kv_heads=8, head_dim=128, backward=False)
    assert _reading_s(workload, 4, "NVIDIA H200") == pytest.approx(4.9152 / 4 / 4800)


def test_controls_count_as_iterations() -> None:
    alone, controlled = (estimate_of(resolve(request(controls=controls), None)) for controls in (False, True))
    # Three warm-ups of one, and three of each of the four in turns.
    assert controlled.iterations - alone.iterations >= 3 * 1 + 4 * 3


SIX_RANKS = {"strategy": "usp", "world": 6, "workload": Workload(seq=1200, heads=3, kv_heads=3, head_dim=32)}
ON_HOSTS_OF_THREE = RankInfo(rank=0, world_size=6, local_rank=0, local_world_size=3)


def test_plan_chooses_degrees_by_the_hosts_of_the_run() -> None:
    """On hosts of three the groups are of three, which 3 heads allow; on one host of six they are of two."""
    assert resolve(request(**SIX_RANKS, ranks_per_host=3), None).params["ulysses_degree"] == 3
    assert resolve(request(**SIX_RANKS), ON_HOSTS_OF_THREE).params["ulysses_degree"] == 3
    ring_first = resolve(request(**SIX_RANKS, ranks_per_host=2, params={"placement": "ring-first"}), None)
    assert ring_first.params["ulysses_degree"] == 3
    with pytest.raises(UnsupportedWorkloadError, match="Ulysses degree of 2 does not divide 3 heads"):
        resolve(request(**SIX_RANKS), None)


def test_plan_refuses_what_the_run_would_refuse() -> None:
    four_heads = Workload(seq=1200, heads=4, kv_heads=4, head_dim=32)
    for hosts, rank_info in ((3, None), (None, ON_HOSTS_OF_THREE)):
        with pytest.raises(UnsupportedWorkloadError, match="Ulysses degree of 3 does not divide 4 heads"):
            resolve(request(strategy="usp", world=6, workload=four_heads, ranks_per_host=hosts), rank_info)
    resolved = resolve(
        request(strategy="usp", world=6, workload=four_heads, ranks_per_host=3, params={"ulysses_degree": "2"}), None
    )
    assert resolved.params == {"ulysses_degree": 2}


def test_too_much_memory_error_states_the_largest_sequence() -> None:
    recording = request(device="cuda", workload=Workload(seq=2**20, heads=40, kv_heads=40, head_dim=128), world=8)
    sizes: list[int] = []

    def memory_of(workload: Workload) -> int:
        sizes.append(workload.seq)
        return peak_bytes(recording, workload, "cudnn", 8)

    needed = memory_of(recording.workload)
    tight = plan(memory_bytes=needed, memory_limit=needed // 3, memory_of=memory_of)
    largest = largest_seq(recording, tight)
    # Memory is nearly in proportion, and 8 chunks of the layout, 128 tokens, are 4 MiB at most.
    assert largest % 16 == 0 and largest == pytest.approx(2**20 / 3, rel=0.005)
    assert peak_bytes(recording, recording.workload.at(largest), "cudnn", 8) <= needed // 3
    assert peak_bytes(recording, recording.workload.at(largest + 1024), "cudnn", 8) > needed // 3
    assert len(sizes) <= 10
    with pytest.raises(UnsupportedWorkloadError, match=f"largest sequence that fits is {largest} .*--force"):
        raise_if_too_large(recording, tight)
    raise_if_too_large(msgspec.structs.replace(recording, force=True), tight)
    raise_if_too_large(recording, replace(tight, memory_limit=None))


def test_too_long_cache_error_states_the_largest_that_fits() -> None:
    workload = Workload(
        seq=1, batch=4, heads=8, kv_heads=8, head_dim=128, backward=False, phase="decode", kv_length=2**20 + 1
    )
    recording = request(strategy="dcp", device="cuda", workload=workload, world=8)
    tight = plan(
        memory_bytes=2**40, memory_limit=GIB, memory_of=lambda work: peak_bytes(recording, work, "flash-attn", 8)
    )  # fmt: skip
    # K and V of a key and 4 sequences are 16 KiB over all ranks, 2 KiB a rank; 32 MiB are workspace.
    with pytest.raises(UnsupportedWorkloadError, match=r"--kv-length (\d+) fits") as refused:
        raise_if_too_large(recording, tight)
    kv_length = int(re.search(r"--kv-length (\d+)", str(refused.value))[1])  # type: ignore[index]
    assert kv_length == pytest.approx(8 * (GIB - (32 << 20)) // (16 << 10), rel=0.01)


@pytest.mark.parametrize(
    ("excess", "largest"),
    [
        (lambda n: 3 * n - 100, 33),
        (lambda n: 3 * n + 50 - 100, 16),
        # In steps, as memory is rounded up.
        (lambda n: n // 10 * 30 - 100, 39),
        (lambda n: n * n - 100, 10),
        (lambda n: n - 2000, 1000),
        (lambda n: n + 1, 0),
    ],
)
def test_search_finds_the_largest_value_in_few_evaluations(excess: Any, largest: int) -> None:
    numbers: list[int] = []

    def counted(number: int) -> int:
        numbers.append(number)
        return int(excess(number))

    result = largest_not_over(counted, 1000)
    assert excess(result) <= 0 or not result
    assert largest - 6 <= result <= largest and len(numbers) <= 9
    assert largest_not_over(excess, 0) == 0


def test_iterations_of_ten_minutes_are_refused_on_cpu_only() -> None:
    recording = request()
    slow = plan(rate=recording.workload.model_flops() / 4 / 60, flops_per_device=recording.workload.model_flops() // 4)
    with pytest.raises(UnsupportedWorkloadError, match="over 10 minutes; the largest sequence that fits is"):
        raise_if_too_large(recording, slow)
    largest = largest_seq(recording, slow)
    shorter = msgspec.structs.replace(recording.workload, seq=largest)
    assert largest % 8 == 0 and 30 + 16 * shorter.model_flops() / 4 / slow.rate <= 600
    raise_if_too_large(msgspec.structs.replace(recording, device="cuda"), slow)


def test_plan_is_described_in_text() -> None:
    first, second = describe(request(device="cuda"), plan())
    assert first.startswith("zigzag on 4 x NVIDIA H200: sequence 1024") and "forward and backward" in first
    assert "1 PFLOPs per iteration, about 2 s each (500 TFLOP/s cudnn, assumed)" in second
    assert "about 10.0 GiB of memory" in second
    assert describe(request(world=1), plan())[-1] == "one device: nothing is communicated"


def test_unset_options_default_to_the_machine() -> None:
    done = resolve(request(world=None, warmup=None, iters=None, params={"grad_wire": "input"}), None)
    assert (done.device, done.world, done.warmup, done.iters) == ("cpu", 4, 1, 3)
    assert done.params == {"grad_wire": "input"}
    assert resolve(done, None) == done


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"iters": 0}, "--iters must be at least 1"),
        ({"profile_iters": 0}, "--profile-iters"),
        ({"world": 0}, "--world"),
        ({"warmup": -1}, "--warmup"),
        ({"time_limit": 0.0}, "--time-limit"),
        ({"workload": Workload(seq=-8, heads=4, kv_heads=4, head_dim=32)}, "--seq"),
        ({"workload": Workload(seq=8, heads=4, kv_heads=4, head_dim=32, dtype="fp8")}, "--dtype"),
    ],
)
def test_invalid_iteration_counts_are_refused(changes: dict[str, object], part: str) -> None:
    with pytest.raises(UsageError, match=part):
        resolve(request(**changes), None)


@pytest.mark.parametrize("missing", ["torch", "psutil"])
def test_missing_package_error_names_the_extra(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringprof.errors.find_spec", lambda name: None if name == missing else find_spec(name))
    with pytest.raises(MissingExtraError, match=rf"needs {missing}: pip install '\.\[record\]'"):
        require_packages("torch", "psutil")
