"""Measurement of a machine: kernels by shape, memory, host times and throttling; with two GPUs also links and
contention.

Every GPU computes at the same time, as in a run, and keeps computing, so that it is as warm as in a run. Results are
saved after every part, so that an interrupted measurement leaves a calibration.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import accumulate as running_sum
from itertools import pairwise
from statistics import median, pstdev
from typing import Any

import msgspec
import torch

from ringprof.common.json_object import JsonObject
from ringprof.dryrun.schedule import AttentionOp
from ringprof.errors import UnsupportedWorkloadError, UsageError
from ringprof.iteration.clock import clock_for
from ringprof.iteration.shard import WorkloadShard
from ringprof.prediction.calibration import (
    COLLECTIVES,
    PART_SHARES,
    TIME_SHARES,
    Calibration,
    HostPass,
    KernelFigures,
    KernelSample,
    Link,
    Nccl,
    Value,
    measured,
    unmeasured_kernel,
)
from ringprof.prediction.host_model import count_kinds, fit_host_times
from ringprof.prediction.kernel_model import SHAPE, block_of
from ringprof.prediction.measure_recurrences import measure_recurrences
from ringprof.prediction.microbenchmark import Bench, call_of
from ringprof.prediction.nccl_tests import hop_rates, with_hops
from ringprof.prediction.network import channels
from ringprof.prediction.schedules import schedule
from ringprof.ranks.machine import versions
from ringprof.recording.telemetry import device_telemetry
from ringprof.strategies import create
from ringprof.strategies.catalog import SPECS
from ringprof.strategies.kernels.merge import accumulate
from ringprof.strategies.kernels.registry import KERNELS
from ringprof.strategies.masks.mask_blocks import AttnRectangle, MaskBlocks
from ringprof.strategies.transport.communicator import Communicator
from ringprof.strategies.transport.message import Message
from ringprof.workload.mask import NO_LIMIT
from ringprof.workload.workload import Workload

Save = Callable[[Calibration], None]
_SAVE_INTERVAL_S = 30.0
"""Seconds between two saves of samples."""
_WARM_UP_S = 8.0
_LONG_BLOCK = block_of("forward", 16384, 16384, 40, 40, causal=False)
_CONTENTION_BLOCK, _CONTENTION_BYTES = msgspec.structs.replace(_LONG_BLOCK, q=8192, kv=8192), 1 << 30
"""A block, and the size of a message whose transfer takes longer than the block.

If the transfer covered only a part of the block, the loss would be smaller than the difference between two calls.
"""
_CONTENTION_TURNS, _START_CYCLES = 15, 400_000
_COPY_BYTES = 256 << 20
_MATMUL_SIZE, _MATMUL_CALLS = 8192, 50
"""Rows and columns of the matrix product, and calls between two looks at the time left."""


def measure_machine(
    base: Calibration, bench: Bench, kernels: Sequence[str], seconds: float, save: Save,
    chosen: Collection[str] = TIME_SHARES.keys(),
) -> Calibration:  # fmt: skip
    """Measure the ``chosen`` parts of `PART_SHARES` within about ``seconds``; other figures of the base stay.

    ``save`` is called on rank 0 with the calibration so far. Raises `UsageError` without kernels.
    """
    if not kernels:
        raise UsageError("no attention kernel runs on this GPU: name recorded runs instead")
    start = time.monotonic()
    ends, share, total_share = {}, 0.0, sum(PART_SHARES[name] for name in chosen)
    for name, part_share in PART_SHARES.items():
        share += part_share * (name in chosen)
        ends[name] = start + share / total_share * seconds
    calibration = msgspec.structs.replace(
        base,
        created=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        nccl=_nccl(base.nccl, bench),
        transfer_margin={},
        family_spread_from_hosts=max(2, base.family_spread_from_hosts),
        environment=versions(bench.device),
    )
    heating_kernel, warm_up_failures = kernels[0], list[str]()
    if "kernels" in chosen:
        warm_up_s = min(_WARM_UP_S, (ends["kernels"] - start) / 5)
        heating_kernel, warm_up_failures = _warm_up(bench, kernels, warm_up_s)

    def update(**changes: Any) -> None:
        nonlocal calibration
        calibration = msgspec.structs.replace(calibration, **changes)
        if bench.rank == 0:
            save(calibration)

    if "kernels" in chosen:
        for samples, failed in _kernel_samples(bench, kernels, ends["kernels"]):
            update(kernels=_with_samples(calibration.kernels, samples), unmeasured=warm_up_failures + failed)
    steps: tuple[tuple[str, str, Callable[[], JsonObject]], ...] = (
        ("host", "host", lambda: _host(bench, calibration, kernels, ends["host"])),
        ("memory", "memory", lambda: _memory(bench, 1e3 * calibration.memory_op_us.value)),
        ("matmul", "matmul", lambda: _matmul(bench, ends["matmul"])),
        ("links", "links", lambda: {"same_host": _links(bench, calibration, ends["links"])}),
        ("links", "contention", lambda: _contention(bench, calibration, heating_kernel)),
        ("links", "copied hops", lambda: {"same_host": _copy_rate(bench, calibration.same_host)}),
        ("heat", "heat", lambda: _throttling(bench, heating_kernel, ends["heat"])),
        (
            "recurrences",
            "recurrences",
            lambda: {"recurrences": measure_recurrences(bench, ends["recurrences"]) or calibration.recurrences},
        ),
    )
    for part, name, measure in steps:
        if part in chosen:
            # Drop this step's failure in an earlier calibration.
            failures = [line for line in calibration.unmeasured if not line.startswith(f"{name}: ")]
            if part == "links" and bench.size == 1:
                update(unmeasured=[*failures, f"{name}: needs two GPUs"])
            else:
                try:
                    update(**{"unmeasured": failures, **measure()})
                except (RuntimeError, ValueError, UsageError) as error:  # other parts still run
                    update(unmeasured=[*failures, f"{name}: {_short_error(error)}"])
    return calibration


def _host(bench: Bench, calibration: Calibration, kernels: Sequence[str], deadline: float) -> JsonObject:
    """Measure passes of strategies and fit the host times to them."""
    passes = measure_passes(bench, kernels, deadline)
    fitted = fit_host_times(calibration, passes, "ringprof calibrate: passes of strategies")
    return {"host": fitted.host, "kernels": fitted.kernels, "passes": fitted.passes}


def _short_error(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def usable_kernels(device: torch.device) -> list[str]:
    """Return the usable kernels, fastest first, without the fallback, which compiles again for every shape."""
    return [
        name for name, kind in KERNELS.items()
        if name not in ("flex", "reference") and kind.why_unsupported(device, torch.bfloat16, 128) is None
    ]  # fmt: skip


def _nccl(current: Nccl, bench: Bench) -> Nccl:
    if bench.device.type != "cuda":
        return current
    version = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return msgspec.structs.replace(current, version=version)


# --- kernels ----------------------------------------------------------------------------------------


def _warm_up(bench: Bench, kernels: Sequence[str], seconds: float) -> tuple[str, list[str]]:
    """Compute for some seconds, until the device has reached its operating temperature.

    Returns the first kernel that runs, and the failures of the kernels before it.
    """
    failures: list[str] = []
    for kernel in kernels if bench.device.type == "cuda" else ():
        try:
            call, deadline = call_of(KERNELS[kernel](), _LONG_BLOCK, bench), time.monotonic() + seconds
            while time.monotonic() < deadline or bench.heater is None:
                bench.heater = call, median(bench.times_ns(call, 50))
        except RuntimeError as error:
            failures.append(f"{kernel}, to warm the GPU: {_short_error(error)}")
        else:
            return kernel, failures
    return kernels[0], failures


def _kernel_samples(
    bench: Bench, kernels: Sequence[str], deadline: float
) -> Iterable[tuple[list[KernelSample], list[str]]]:
    """Yield all ranks' samples and failures so far at every save interval; the ranks divide the shapes."""
    all_cases = kernel_cases(kernels)
    cases, total = all_cases[bench.rank :: bench.size], len(all_cases)
    samples: list[KernelSample] = []
    failures: list[str] = []
    instances = {name: KERNELS[name]() for name in kernels}
    finished = False
    while not finished:
        next_save = min(deadline, time.monotonic() + _SAVE_INTERVAL_S)
        while cases and time.monotonic() < next_save:
            name, block, parts = cases.pop(0)
            try:
                samples.append(_sample(bench, instances[name], block, parts))
            except RuntimeError as error:
                shape = f"{block.q} x {block.kv}, {block.heads} heads, {block.kv_heads} kv, causal={block.causal}"
                failures.append(f"{name} {block.phase} {shape}: {_short_error(error)}")
        # All ranks continue while one of them has shapes and time left.
        finished = all(bench.gather(not cases or time.monotonic() >= deadline, bool))
        left = sum(bench.gather(len(cases), int)) if finished else 0
        out_of_time = [f"kernels: {left} of {total} shapes, for lack of time: give more --seconds"] if left else []
        yield (
            [sample for rank_samples in bench.gather(samples, list[KernelSample]) for sample in rank_samples],
            [line for rank_failures in bench.gather(failures, list[str]) for line in rank_failures] + out_of_time,
        )


def _sample(bench: Bench, kernel: Any, block: AttentionOp, parts: MaskBlocks | None) -> KernelSample:
    """Measure one block. Raises RuntimeError if memory is too small or the kernel does not support the block."""
    try:
        ns, spread, count = bench.typical_ns(call_of(kernel, block, bench, parts))
    finally:
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
    shape = {name: getattr(block, name) for name in SHAPE}
    return KernelSample(**shape, ns=ns, spread=min(spread, 1.0), count=count, origin="measured", source=kernel.name)


def _with_samples(current: Sequence[KernelFigures], samples: Sequence[KernelSample]) -> list[KernelFigures]:
    """Return the kernels with their samples; a sample's source names its kernel."""
    by_name = {kernel.name: kernel for kernel in current}
    for name in {sample.source for sample in samples}:
        kernel_samples = [
            msgspec.structs.replace(sample, source="ringprof calibrate") for sample in samples if sample.source == name
        ]
        by_name[name] = msgspec.structs.replace(by_name.get(name) or unmeasured_kernel(name), samples=kernel_samples)
    return [kernel for kernel in by_name.values() if kernel.samples] or list(current)


# --- memory -----------------------------------------------------------------------------------------


def _memory(bench: Bench, memory_op_ns: float) -> dict[str, Value]:
    """Measure the rates of kernels that move memory, without and with a change of order.

    ``memory_op_ns``, the fixed time of such a kernel, is subtracted.
    """
    shape = (1, 32768, 40, 128) if bench.device.type == "cuda" else (1, 512, 4, 64)
    total, block = torch.zeros(shape, device=bench.device), bench.random_tensor(*shape)
    add_ns, add_spread, _ = bench.typical_ns(lambda: accumulate(total, block))
    pack_ns, pack_spread, _ = bench.typical_ns(lambda: torch.stack(block.chunk(2, dim=2)))
    moved_bytes = 2 * total.numel() * 4 + block.numel() * 2
    return {
        "memory_gb_s": measured(moved_bytes / max(add_ns - memory_op_ns, add_ns / 2), add_spread),
        "reorder_gb_s": measured(
            2 * block.numel() * 2 / max(pack_ns - memory_op_ns, pack_ns / 2), max(pack_spread, 0.1)
        ),
    }


def _matmul(bench: Bench, deadline: float) -> JsonObject:
    """Measure the rate of a large matrix product until the deadline, and the clock that the device keeps meanwhile.

    The first half of the calls warms the device. The slowest device's rate counts.
    """
    if bench.device.type != "cuda":
        return {}
    a, b = (bench.random_tensor(_MATMUL_SIZE, _MATMUL_SIZE) for _ in range(2))
    out = torch.empty_like(a)
    times: list[float] = []
    with device_telemetry(bench.device) as telemetry:
        while not times or time.monotonic() < deadline:
            times += bench.times_ns(lambda: torch.mm(a, b, out=out), _MATMUL_CALLS)
    state = None if telemetry is None else telemetry.state()
    warm = times[len(times) // 2 :]
    tflops = 2 * _MATMUL_SIZE**3 / median(warm) / 1e3
    # Random numbers: a product of zeros toggles fewer wires, draws less power and keeps a higher clock.
    ranks = bench.gather(
        (tflops, pstdev(warm) / median(warm), state and state.sm_clock_mhz), tuple[float, float, int | None]
    )
    slowest_tflops, spread, clock_mhz = min(ranks, key=lambda rank: rank[0])
    return {"matmul_tflops": measured(slowest_tflops, spread), "matmul_clock_mhz": clock_mhz}


# --- links ------------------------------------------------------------------------------------------


def _links(bench: Bench, calibration: Calibration, deadline: float) -> Link:
    """Measure hops by message size, two rings at once and collectives.

    All ranks measure the same transfers; rank 0's figures count.
    """
    comm = Communicator()
    ring, second_ring = comm.ring("calibrate"), comm.ring("calibrate_beside")
    sizes = MESSAGES if bench.device.type == "cuda" else (1 << 16, 1 << 20)
    times = {}
    for size in sizes:
        tensor = torch.zeros(size, dtype=torch.uint8, device=bench.device)
        if all(bench.gather(time.monotonic() < deadline, bool)):
            times[size] = bench.collective_ns(lambda: ring.post(Message([tensor])).wait())  # noqa: B023
    if not times:
        raise UsageError("no time was left")
    latency = times[min(times)]
    tensor = torch.zeros(sizes[-1] // 4, dtype=torch.uint8, device=bench.device)
    both_ns = bench.collective_ns(
        lambda: [hop.wait() for hop in (ring.post(Message([tensor])), second_ring.post(Message([tensor])))]
    )
    both_ns = max(both_ns - latency, both_ns / 2)
    rates = hop_rates(times, sizes[-1] // 32, bench.size, calibration.nccl)
    link = with_hops(calibration.same_host, latency, rates, "ringprof calibrate")
    return msgspec.structs.replace(
        link,
        total_gb_s=measured(2 * tensor.numel() / both_ns, 0.03),
        collective_gb_s={**calibration.same_host.collective_gb_s, **_collectives(bench, comm)},
    )


def _collectives(bench: Bench, comm: Communicator) -> dict[str, Value]:
    """Measure the rate of each collective."""
    channel = comm.collective("calibrate_all")
    values = {}
    for name in COLLECTIVES:
        rates = []
        for size in COLLECTIVE_BYTES if bench.device.type == "cuda" else (1 << 16,):
            piece = torch.zeros(size // 2, dtype=torch.bfloat16, device=bench.device)
            tensor = piece if name == "all_gather" else piece.expand(bench.size, -1).contiguous()
            ns = bench.collective_ns(lambda: getattr(channel, name)(tensor).wait())  # noqa: B023
            rates.append((bench.size - 1) * size / ns)
        values[name] = measured(max(rates), 0.05)
    return values


def _copy_rate(bench: Bench, link: Link) -> Link:
    """Return the link with the rate of hops by copy engine."""
    if bench.device.type != "cuda":
        return link
    ring = Communicator(hops="copy").ring("calibrate_copied")
    whole = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=bench.device)
    part = whole[: _COPY_BYTES // 4]
    # The difference of two sizes leaves the latency out of the rate.
    whole_ns, part_ns = (
        bench.collective_ns(lambda: ring.post(Message([tensor])).wait())  # noqa: B023
        for tensor in (whole, part)
    )
    gb_s = (whole.numel() - part.numel()) / max(whole_ns - part_ns, whole_ns / 2)
    return msgspec.structs.replace(link, copy_gb_s=measured(gb_s, 0.02))


def _contention(bench: Bench, calibration: Calibration, kernel: str) -> JsonObject:
    """Measure what a block loses to a concurrent transfer kernel, alternating with the block alone at equal
    temperature."""
    if bench.device.type != "cuda":
        return {}
    ring, call = Communicator().ring("calibrate_contention"), call_of(KERNELS[kernel](), _CONTENTION_BLOCK, bench)
    message = torch.zeros(_CONTENTION_BYTES, dtype=torch.uint8, device=bench.device)
    stream: Any = torch.cuda.Stream(bench.device)  # type: ignore[no-untyped-call]
    held_share = channels(_CONTENTION_BYTES, bench.size, 1, calibration.nccl, 0.0) / calibration.multiprocessors
    alone, with_hop = [], []
    for _ in range(_CONTENTION_TURNS):
        alone.append(_time_beside(call, stream)[0])
        with_hop.append(_time_beside(call, stream, lambda: ring.post(Message([message]))))
    block_ns, overlap_ns = (median(times) for times in zip(*with_hop, strict=True))
    lost_share = (block_ns - median(alone)) / overlap_ns / held_share
    lost_shares = bench.gather(lost_share, float)
    contention = min(max(sum(lost_shares) / len(lost_shares), 0.0), 1.5)
    return {"contention": measured(contention, pstdev(lost_shares) / max(contention, 0.1) + 0.1)}


def _time_beside(call: Callable[[], object], stream: Any, post: Callable[[], Any] | None = None) -> tuple[float, float]:
    """Return nanoseconds of a block, and how many of them overlap the hop that ``post`` starts before."""
    start, stop, arrived = (torch.cuda.Event(enable_timing=True) for _ in range(3))  # type: ignore[no-untyped-call]
    call()
    hop = post() if post else None
    # Wait until the hop's kernel occupies its multiprocessors.
    torch.cuda._sleep(_START_CYCLES)  # type: ignore[no-untyped-call]
    start.record()
    call()
    stop.record()
    with torch.cuda.stream(stream):
        if hop is not None:
            hop.wait()
        arrived.record(stream)
    torch.cuda.synchronize()
    block_ns, arrived_ns = start.elapsed_time(stop) * 1e6, start.elapsed_time(arrived) * 1e6
    return block_ns, min(block_ns, arrived_ns)


# --- throttling ----------------------------------------------------------------------------------


def _throttling(bench: Bench, kernel: str, deadline: float) -> dict[str, Value]:
    """Measure how much longer a block takes back to back than with pauses of four times its length."""
    if bench.device.type != "cuda":
        return {}
    call = call_of(KERNELS[kernel](), _LONG_BLOCK, bench)
    phase_s = min(6.0, max(1.0, (deadline - time.monotonic()) / 2))
    hot_ns = cool_ns = 0.0
    phase_end = time.monotonic() + phase_s
    while time.monotonic() < phase_end:
        hot_ns = median(bench.times_ns(call, 20))
    cool_times = []
    phase_end = time.monotonic() + phase_s
    while time.monotonic() < phase_end:
        cool_times.append(bench.times_ns(call, 1)[0])
        time.sleep(4 * cool_times[-1] / 1e9)
    cool_ns = median(cool_times[len(cool_times) // 2 :])
    # The pauses leave a utilisation of a fifth: see `KernelSample.utilisation`.
    slowdown = (hot_ns - cool_ns) / (cool_ns - 0.2 * hot_ns)
    return {"throttling": measured(min(max(slowdown, 0.0), 0.5), 0.2)}


# --- measured passes of strategies over so few tokens that the host is the bound; input of `ringprof.prediction.host_m
_WARM_UP_PASSES, _PASSES_PER_TURN, _SKIPPED_PASSES, _MIN_TURNS = 5, 14, 4, 3
"""Passes before the first timed one; passes per turn; skipped first passes of a turn; and the minimum number of turns.

The first passes of a turn are skipped because the processor's caches still hold another strategy's code.
"""
_TOKENS, _HEADS = 256, 8
"""Tokens per rank, and heads per rank."""
_PARAMS: dict[str, JsonObject] = {"allgather": {"layout": "zigzag"}}


@dataclass
class _TimedPass:
    """A strategy's pass with the times of its turns on this rank."""

    host_pass: HostPass
    shard: WorkloadShard
    turns_us: list[list[float]] = field(default_factory=list)
    """Microseconds per turn and pass, by the recorder's clock."""
    issued_us: list[float] = field(default_factory=list)
    """Median microseconds per turn from the call of a pass to its return."""

    def run_turn(self, bench: Bench) -> None:
        """Run several passes one after another, as a recording does."""
        host_us = []

        def run_pass() -> None:
            start_ns = time.perf_counter_ns()
            self.shard.run_iteration()
            host_us.append((time.perf_counter_ns() - start_ns) / 1e3)

        if bench.size == 1:
            for _ in range(_PASSES_PER_TURN):
                run_pass()
            times_us = host_us
        else:
            clock = clock_for(bench.device)
            for _ in range(_PASSES_PER_TURN):
                clock.run(run_pass)
            times_us = [ns / 1e3 for ns in clock.times_ns()]
        self.turns_us.append(times_us[_SKIPPED_PASSES:])
        self.issued_us.append(median(host_us[_SKIPPED_PASSES:]))


def measure_passes(bench: Bench, kernels: Sequence[str], deadline: float) -> list[HostPass]:
    """Measure passes of all strategies in turns until the deadline. Raises RuntimeError if no strategy runs."""
    timed_passes = [
        timed_pass
        for host_pass, workload in _passes_to_measure(bench, kernels)
        if (timed_pass := _prepare(bench, host_pass, workload)) is not None
    ]
    if not timed_passes:
        raise RuntimeError("no strategy ran")
    turns = 0
    while not any(bench.gather(turns >= _MIN_TURNS and time.monotonic() > deadline, bool)):
        for timed_pass in timed_passes:
            timed_pass.run_turn(bench)
        turns += 1
    return [_with_times(bench, timed_pass) for timed_pass in timed_passes]


def _passes_to_measure(bench: Bench, kernels: Sequence[str]) -> Iterator[tuple[HostPass, Workload]]:
    """Yield every strategy with every kernel, without and with backward pass, with NCCL and with copied hops."""
    heads = _HEADS * bench.size
    for kernel in kernels:
        for name in SPECS:
            for hops in ("nccl", "copy") if bench.device.type == "cuda" and bench.size > 1 else ("nccl",):
                for backward in (False, True):
                    workload = Workload(
                        seq=_TOKENS * bench.size, heads=heads, kv_heads=heads, head_dim=HEAD_DIM, causal=name != "ring",
                        backward=backward,
                    )  # fmt: skip
                    try:
                        params = dict(_PARAMS.get(name, {}))
                        dry_run = schedule(
                            name, workload, bench.size, kernel=kernel, hops=hops, params=params, ranks=[0]
                        )
                    except UnsupportedWorkloadError:
                        continue
                    counts = dict(count_kinds(dry_run.programs[0]))
                    if counts and (hops == "nccl" or "copy_us" in counts):
                        yield HostPass(strategy=name, kernel=kernel, hops=hops, ranks=bench.size, backward=backward,
                                       kinds=counts, us=1.0, source="ringprof calibrate"), workload  # fmt: skip


def _prepare(bench: Bench, host_pass: HostPass, workload: Workload) -> _TimedPass | None:
    """Create and warm up a pass; return None if it cannot run, which is the same on all ranks."""
    try:
        strategy = create(
            host_pass.strategy, kernel=host_pass.kernel, hops=host_pass.hops, **_PARAMS.get(host_pass.strategy, {})
        )
        shard = WorkloadShard.create(strategy, workload, bench.device)
        for _ in range(_WARM_UP_PASSES):
            shard.run_iteration()
    except (RuntimeError, ValueError):
        return None
    return _TimedPass(host_pass, shard)


def _with_times(bench: Bench, timed_pass: _TimedPass) -> HostPass:
    """Return the pass with its measured times; an iteration takes as long as on the slowest rank."""
    all_turns_us = bench.gather(timed_pass.turns_us, list[list[float]])
    medians = [
        median(max(rank_times) for rank_times in zip(*rank_turns, strict=True))
        for rank_turns in zip(*all_turns_us, strict=True)
    ]
    us = median(medians)
    host_us = [median(rank_host_us) for rank_host_us in bench.gather(timed_pass.issued_us, list[float])]
    spread = min(1.0, pstdev(medians) / us)
    return msgspec.structs.replace(timed_pass.host_pass, us=us, spread=spread, turns=len(medians), ranks_us=host_us)


# --- blocks and messages to measure: blocks are those that layouts produce from 512 to 131,072 tokens, from MHA to MQA;
# kernels that support them are also measured on packed documents and sliding windows ---

HEADS = ((40, 40), (32, 8), (64, 8), (24, 4), (64, 1), (10, 10))
HEAD_DIM = 128
_PHASES = ("forward", "backward")
_LENGTHS, _SHORT_LIST_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072), (1024, 4096, 16384, 65536)
_INTERMEDIATE_LENGTHS = (3072, 6144, 12288, 24576, 49152)
_GATHERED = ((4096, 32768), (8192, 65536), (8192, 131072), (16384, 131072))
"""Numbers of queries and keys of a rank that has gathered all keys."""
_WINDOWS = ((4096, 1024), (16384, 1024), (16384, 4096), (65536, 1024), (65536, 4096), (65536, 16384))
"""Numbers of tokens, and of keys that each token sees."""
_DOCUMENTS = ((4096, 4), (16384, 4), (16384, 32), (65536, 8), (65536, 64))
"""Numbers of tokens, and of documents that they are packed from."""
_MAX_FLOPS = 5e14
"""Calls with more FLOPs are left out; such a call takes a second on an H200."""
_MIB = 1 << 20
MESSAGES = tuple(size * _MIB for size in (1, 4, 16, 32, 64, 128, 256, 512, 1024))
COLLECTIVE_BYTES = tuple(size * _MIB for size in (16, 128, 512))


KernelCase = tuple[str, AttentionOp, MaskBlocks | None]
"""A block to measure with a kernel: the kernel's name, the block, and the parts of its mask."""


def kernel_cases(kernels: Sequence[str]) -> list[KernelCase]:
    """Return the blocks to measure, ordered so that every prefix of the list is useful.

    The first kernel gets all shapes; other kernels get equal heads and one grouped-query shape.
    """
    cases: list[KernelCase] = []
    for number, kernel in enumerate(kernels):
        for heads, kv_heads in HEADS if number == 0 else HEADS[:2]:
            is_first_shape = (heads, kv_heads) == HEADS[0]
            lengths = (
                (*_LENGTHS, *(_INTERMEDIATE_LENGTHS if number == 0 else ())) if is_first_shape else _SHORT_LIST_LENGTHS
            )
            shapes = [*_square_blocks(lengths, heads, kv_heads)]
            for q, kv in _GATHERED if is_first_shape else ():
                shapes += [block_of(phase, q, kv, heads, kv_heads, causal=False) for phase in _PHASES]
            cases += [(kernel, block, None) for block in shapes if block.flops() < _MAX_FLOPS]
        if KERNELS[kernel].takes_windows and KERNELS[kernel].varlen:
            cases += _masked_cases(kernel)
    random.Random(0).shuffle(cases)
    # Take the same fraction of every kernel's cases, so that none is left out if time is short.
    totals, counts = Counter(kernel for kernel, _, _ in cases), dict.fromkeys(kernels, 0)
    order = []
    for number, kernel in enumerate(kernel for kernel, _, _ in cases):
        counts[kernel] += 1
        order.append((counts[kernel] / totals[kernel], number))
    return [cases[index] for _, index in sorted(order)]


def _square_blocks(lengths: Sequence[int], heads: int, kv_heads: int) -> Iterator[AttentionOp]:
    """Yield the blocks that layouts make of a rank's share of a sequence."""
    for length in lengths:
        half = length // 2
        for phase in _PHASES:
            # The local block; a full block; zigzag's halves; stripe's triangle, one row and one column short.
            yield block_of(phase, length, length, heads, kv_heads, causal=True)
            yield block_of(phase, length, length, heads, kv_heads, causal=False)
            yield block_of(phase, half, length, heads, kv_heads, causal=False)
            yield block_of(phase, length, half, heads, kv_heads, causal=False)
            if length in _SHORT_LIST_LENGTHS and heads == kv_heads:
                yield block_of(phase, length - 1, length - 1, heads, kv_heads, causal=True)


def _masked_cases(kernel: str) -> Iterator[KernelCase]:
    """Yield sliding windows over one document, and packed documents of uneven lengths with causal masks."""
    for heads, kv_heads in HEADS[:2]:
        for tokens, window in _WINDOWS:
            yield from _mask_cases(kernel, [AttnRectangle(0, tokens, 0, tokens, window - 1, 0)], heads, kv_heads)
        for tokens, count in _DOCUMENTS:
            # The longest document is several times the mean, as in packed text.
            generator = random.Random(count)
            weights = [generator.lognormvariate(0.0, 1.0) for _ in range(count)]
            ends = [round(tokens * end / sum(weights)) for end in running_sum(weights)]
            spans = [(a, b) for a, b in pairwise([0, *ends]) if b > a]
            yield from _mask_cases(kernel, [AttnRectangle(a, b, a, b, NO_LIMIT, 0) for a, b in spans], heads, kv_heads)


def _mask_cases(kernel: str, rectangles: Sequence[AttnRectangle], heads: int, kv_heads: int) -> Iterator[KernelCase]:
    """Yield the forward and the backward pass over a mask's rectangles."""
    mask_blocks = MaskBlocks(tuple(rectangles), rectangles[-1].q_end, rectangles[-1].kv_end)
    for phase in _PHASES:
        block = block_of(
            phase, mask_blocks.queries, mask_blocks.keys, heads, kv_heads, causal=rectangles[0].left == NO_LIMIT
        )
        yield (
            kernel, msgspec.structs.replace(block, pairs=mask_blocks.area, sequences=len(rectangles)), mask_blocks
        )  # fmt: skip
