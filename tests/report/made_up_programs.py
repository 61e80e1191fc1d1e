"""Synthetic programs meant to prove sentences wrong: each differs from a recorded ring in one way.

A program is a function that returns the builders of its ranks, and the run that recorded them where there is one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from ringprof.run import Baselines, Predicted, Run, Sent, StrategyUsed, Work
from ringprof.trace.columns import MEMCPY, OPERATOR
from ringprof.workload.workload import LayerAround, Workload
from tests.analysis.build import FLASH, NCCL, Builder, collective
from tests.analysis.findings.test_step_rates import Step
from tests.analysis.recorded import recorded_run
from tests.analysis.rings import MERGE, causal, ring_pass, uniform_blocks

MS, US = 1_000_000, 1_000
GEMM, ADD, COPY = "sm90_xmma_gemm_bf16", "elementwise_kernel", "Memcpy PtoP (Device -> Device)"
Program = tuple[Sequence[Builder | Step], Run | None]


def recorded(world: int = 2, *, flops: Sequence[int] = (), sent: str = "send_recv", **changes: Any) -> Run:
    """Return a run whose ranks have ``flops`` and sent their hops by the operation ``sent``."""
    entry = Sent(channel="kv", phase="forward", operation=sent, link="same_host", count=2, sent_bytes=2_000_000)
    work = [
        Work(block_flops=rank_flops, block_calls={}, sent=[entry] if sent else [])
        for rank_flops in flops or [10**9] * world
    ]
    return recorded_run(world, work=work, **changes)


def strategy(name: str = "zigzag", **fields: Any) -> StrategyUsed:
    return StrategyUsed(name=name, target=f"ringprof.strategies.{name}:S", params=fields.pop("params", {}), **fields)


def world_of(builders: Sequence[Builder]) -> Sequence[Builder]:
    for builder in builders:
        builder.world_size = len(builders)
    return builders


# --- without communication ------------------------------------------------------------------------------------


def one_gpu(*rows: tuple[str, int, int, int], **fields: Any) -> Builder:
    """Return one rank that ran (name, start, end, launched) in microseconds; a negative launch is not recorded."""
    b = Builder(world_size=1)
    for name, start, end, launched in rows:
        b.run(name, start * US, end * US, launched=None if launched < 0 else launched * US, **fields)
    return b


def launch_bound() -> Program:
    b = one_gpu(*((ADD, 50 * n, 50 * n + 10, 50 * n - 8) for n in range(100)))
    for n in range(100):
        b.on_host("aten::add", (50 * n - 30) * US, (50 * n - 5) * US, category=OPERATOR)
    return [b], None


def one_slow_stretch() -> Program:
    """Return a program with a thousand short calls in one stretch of 20 ms: no gap between launches is short."""
    b = one_gpu((GEMM, 0, 5000, -1 + 1), (GEMM, 25_000, 30_000, 24_990))
    for n in range(1000):
        b.on_host("aten::empty", (5000 + 20 * n) * US, (5015 + 20 * n) * US, category=OPERATOR)
    return [b], None


def communicates_outside(correlation: int | None = None) -> Program:
    """Return an iteration without communication in a trace that has some, launched later or before profiling."""
    b = one_gpu((GEMM, 10, 400, 5), (GEMM, 900, 1000, 20)).mark("ProfilerStep#1", 0, 100 * US)
    start = 200 * US if correlation else 2 * MS
    b.run(f"{NCCL[:15]}AllReduce", start, start + 100 * US, launched=1900 * US, correlation=correlation, stream=20)
    return [b], None


def written_by(producer: str, program: Program, gpu: str = "NVIDIA H200") -> Program:
    """Return a program whose traces another profiler wrote, or of another GPU."""
    builders, run = program
    for builder in builders:
        assert isinstance(builder, Builder)
        builder.producer, builder.gpu = producer, gpu
    return builders, run


def partly_replayed(single: int) -> Program:
    """Return a program in which one call launches 20 kernels, and as many calls as asked for one kernel each."""
    b = Builder(world_size=1)
    b.run(GEMM, 0, 10 * US, launched=1)
    for n in range(1, 20):
        b.run(GEMM, 20 * n * US, (20 * n + 10) * US, correlation=b.activities[0][6])
    for n in range(single):
        b.run(ADD, (400 + 50 * n) * US, (410 + 50 * n) * US, launched=(392 + 50 * n) * US)
        b.operate("aten::addmm", (390 + 50 * n) * US, (399 + 50 * n) * US)
    return [b], None


def touches_managed_memory() -> Program:
    b = Builder(world_size=1).run(GEMM, 0, 100 * US, launched=1)
    for n in range(5):
        b.run("Page migration to the host", (200 + 50 * n) * US, (210 + 50 * n) * US, category=MEMCPY)
    return [b.run(GEMM, 460 * US, 500 * US, launched=2)], None


def unknown_kernels(share: int) -> Program:
    """Return two ranks whose kernels of unknown kind, which may communicate, take ``share`` percent of the time."""
    builders = [Builder(rank=rank, world_size=2) for rank in (0, 1)]
    for b in builders:
        b.run("ring_42", 0, share - 1).run("ring_43", share - 1, share).run(GEMM, share, 100)
    return builders, None


def launched_far_ahead() -> Program:
    """Return a program that launches every kernel long before it runs, with 3 us between kernels."""
    return [one_gpu(*((ADD, 13 * n, 13 * n + 10, n // 100) for n in range(200)))], None


def stalled_in(call: str, category: int = 2) -> Program:
    """Return a program whose host is in one call for 40 ms while the device idles."""
    b = one_gpu((GEMM, 0, 10_000, 0), (ADD, 50_000, 52_000, 49_990))
    if call:
        b.on_host(call, 10_000 * US, 49_980 * US, category=category)
    return [b.on_host("aten::add", 49_985 * US, 49_999 * US, category=OPERATOR)], None


def blocked(*streams: int, unlaunched: int = 0) -> Program:
    b, time_us = Builder(world_size=1), 0
    for stream in streams:
        b.run(GEMM, time_us * US, (time_us + 100) * US, launched=time_us // 100 + 1, stream=stream)
        time_us += 200 if stream == 7 else 110
    for _ in range(unlaunched):
        b.run(ADD, time_us * US, (time_us + 100) * US)
        time_us += 220
    return [b], None


def host_copies() -> Program:
    b = Builder(world_size=1)
    for n in range(10):
        name = "Memcpy DtoH (Device -> Pageable)"
        b.run(name, 1000 * n * US, (1000 * n + 900) * US, launched=1000 * n * US, category=MEMCPY, size=10**6)
        b.run(ADD, (1000 * n + 900) * US, (1000 * n + 1000) * US, launched=(1000 * n + 1) * US)
    return [b], None


def two_streams_at_once() -> Program:
    """Return a program with elementwise kernels on two streams, which both run at every instant."""
    b = Builder(world_size=1)
    for stream in (7, 8):
        b.run(ADD, 0, MS, launched=stream, stream=stream)
    return [b], None


def two_devices() -> Program:
    b = one_gpu((GEMM, 0, 900, 0), (GEMM, 900, 950, 0))
    b.world_size = None
    return [b.run(GEMM, 0, 500 * US, launched=3, device=1)], None


def replayed() -> Program:
    """Return a program whose kernels a CUDA graph replays, with a slow host between graphs."""
    b = Builder(world_size=1)
    for n in range(20):
        b.run(GEMM, 100 * n * US, (100 * n + 30) * US, launched=(100 * n - 10) * US, node=n + 1)
        b.on_host("aten::item", (100 * n + 31) * US, (100 * n + 85) * US, category=OPERATOR)
    return [b], None


def merges() -> Program:
    return [Builder(world_size=1).run(FLASH, 0, 600 * US, launched=1).run(MERGE, 600 * US, MS, launched=2)], None


def several_small_losses() -> Program:
    """Return a program that loses 1 % each to exposed wire, waiting and imbalance, and 2.5 % to merges."""
    builders = []
    for rank, (computes, begins) in enumerate([(950, 950), (960, 970)]):
        b = Builder(rank=rank, world_size=2).run(FLASH, 0, computes * US, launched=1)
        fields: dict[str, Any] = {"group_ranks": (0, 1), "group_size": 2, "elements": 1000}
        b.batch(100, begins * US, 980 * US, to=1 - rank, source=1 - rank, tensors=1, **fields)
        builders.append(b.run(MERGE, 980 * US, 1005 * US, launched=200))
    return builders, None


# --- with communication -----------------------------------------------------------------------------------------


def ring(
    computes: Sequence[int], hops: Sequence[tuple[int, int]], after: Sequence[int] = (), kernel: str = FLASH
) -> Sequence[Builder]:
    """Return ranks that compute from 0 on, exchange one hop at (start, end), then compute again; microseconds."""
    builders, world = [], len(computes)
    for rank, (compute, (start, end)) in enumerate(zip(computes, hops, strict=True)):
        b = Builder(rank=rank, world_size=world).run(kernel, 0, compute * US, launched=1)
        fields: dict[str, Any] = {"group_ranks": tuple(range(world)), "group_size": world, "elements": 500_000}
        b.batch(200, start * US, end * US, to=(rank + 1) % world, source=(rank - 1) % world, tensors=1, **fields)
        if after:
            b.run(kernel, end * US, (end + after[rank]) * US, launched=300)
        builders.append(b)
    return builders


def copied(computes: Sequence[int], *, hops: str = "copy") -> Program:
    """Return a ring whose hop the copy engine carries: it begins when the receiver has computed, and takes 100 us."""
    builders, world = [], len(computes)
    posted = [compute + 20 for compute in computes]
    copy_starts = [max(posted[rank], posted[(rank + 1) % world]) for rank in range(world)]
    for rank, compute in enumerate(computes):
        b = Builder(rank=rank, world_size=world)
        b.run(FLASH, 0, compute * US, launched=1)
        b.mark(f"ringprof::send/kv/to={(rank + 1) % world}", 90, 200)
        start, received_at = copy_starts[rank] * US, (copy_starts[rank - 1] + 100) * US
        b.run(COPY, start, start + 100 * US, launched=100, stream=20, category=MEMCPY, size=10**6)
        b.run(FLASH, max(start + 100 * US, received_at + 2 * US), 2000 * US, launched=300)
        builders.append(b)
    sent = recorded(world, sent="copy", strategy=strategy(hops=hops, layout="zigzag"))
    return builders, sent


def data_parallel(computes: Sequence[int], wire: int = 300) -> Program:
    """Return a program that reduces gradients when the last rank is ready; the optimizer follows."""
    builders, ready = [], max(computes)
    for rank, compute in enumerate(computes):
        b = Builder(rank=rank, world_size=len(computes)).run(GEMM, 0, compute * US, launched=1)
        own = collective("allreduce", group_ranks=tuple(range(len(computes))), group_size=len(computes))
        b.run(f"{NCCL[:15]}AllReduce", compute * US, (ready + wire) * US, launched=2, own=own, stream=20)
        end = (ready + wire) * US
        builders.append(b.run("multi_tensor_apply_kernel<FusedAdamMathFunctor>", end, end + 50 * US, launched=3))
    return builders, None


def clocks_apart() -> Program:
    """Return two ranks that reduce twice, the second by a clock that is 2 ms ahead: no host is named."""
    builders = []
    for rank, ahead in enumerate((0, 2 * MS)):
        b = Builder(rank=rank, world_size=2)
        for number in range(2):
            start = number * 2 * MS + ahead
            own = collective("allreduce", group_ranks=(0, 1), group_size=2)
            b.run(GEMM, start, start + MS, launched=start + 1)
            b.run(f"{NCCL[:15]}AllReduce", start + MS, start + 1_500_000, launched=start + 2, own=own, stream=20)
        builders.append(b)
    return builders, None


def two_groups_at_once() -> Program:
    """Return a sharded step that computes for 3 ms, then gathers and scatters in two groups that overlap in time."""
    builders = []
    for rank in range(2):
        b = Builder(rank=rank, world_size=2).run(GEMM, 0, 3 * MS, launched=1)
        for name, start, stream in (("_allgather_base", 3, 20), ("_reduce_scatter_base", 8, 21)):
            own = collective(name, group=name, group_ranks=(0, 1), group_size=2, elements=1 << 22)
            kernel = f"{NCCL[:15]}{'AllGather' if stream == 20 else 'ReduceScatter'}"
            b.run(kernel, start * MS, (start + 10) * MS, launched=stream, own=own, stream=stream)
        builders.append(b.run(GEMM, 18 * MS, 21 * MS, launched=30))
    return builders, None


def with_shapes() -> Program:
    """Return a training step whose shapes are recorded for half of its matrix products."""
    builders = []
    for rank in range(2):
        step = Step(rank=rank, world=2).product(100, 102, launched=10).product(200, 202, launched=20, dims=None)
        step.run("elementwise_kernel", 202, 203, launched=30)
        builders.append(step.run(f"{NCCL[:15]}AllReduce", 203, 260, launched=40, stream=20))
    return builders, None


def with_few_shapes() -> Program:
    """Return a training step whose shapes are recorded for a thirtieth of its matrix products."""
    step = Step(rank=0, world=1).product(100, 102, launched=10).product(200, 258, launched=20, dims=None)
    return [step.run("elementwise_kernel", 258, 259, launched=30)], None


def unrecorded_sharding() -> Program:
    """Return two ranks whose long collectives have no record, so that waiting and wire cannot be separated."""
    builders = []
    for rank in range(2):
        b = Builder(rank=rank, world_size=2).run(GEMM, 0, 50 * US, launched=1)
        b.run("ncclDevKernel_AllGather_RING_LL", 50 * US, (900 + 300 * rank) * US, launched=2, stream=20)
        builders.append(b.run(GEMM, (900 + 300 * rank) * US, 1300 * US, launched=3))
    return builders, None


def two_kinds_between_hosts() -> Program:
    """Return a program with an all-to-all between hosts, and send/recv within each host."""
    builders = []
    for rank in range(4):
        b = Builder(rank=rank, world_size=4, host=f"node{rank // 2}").run(FLASH, 0, 100 * US, launched=1)
        own = collective("all_to_all", group_ranks=(rank % 2, rank % 2 + 2), group_size=2, elements=10**6)
        own = msgspec.structs.replace(own, group=f"across{rank % 2}")
        b.run(NCCL, 100 * US, 900 * US, launched=200, own=own, stream=20)
        pair = rank // 2 * 2, rank // 2 * 2 + 1
        peer = pair[1] if rank == pair[0] else pair[0]
        fields: dict[str, Any] = {"group": f"in{rank // 2}", "group_ranks": pair, "group_size": 2, "elements": 10**6}
        builders.append(b.batch(300, 900 * US, 910 * US, to=peer, source=peer, tensors=1, **fields))
    return builders, None


def on_cpu(hosts: Sequence[str], *, marks: bool = True) -> Program:
    entry = Sent(channel="kv", phase="forward", operation="send_recv", link="other_host", count=1, sent_bytes=10**6)
    builders = []
    for rank in range(len(hosts)):
        b = Builder(rank=rank, world_size=len(hosts)).mark("ringprof::iteration", 0, 10 * MS)
        b.operate("aten::_scaled_dot_product_flash_attention_for_cpu", 0, (5 - rank) * MS)
        b.operate("aten::index_select", 6 * MS, 7 * MS)
        builders.append(b.mark("ringprof::wait/kv", 7 * MS, 9 * MS) if marks else b)
    run = recorded(len(hosts), strategy=strategy("burst"))
    topology = msgspec.structs.replace(run.topology, hosts=list(hosts), device_type="cpu", backend="gloo")
    work = [msgspec.structs.replace(rank_work, sent=[entry]) for rank_work in run.work or []]
    return builders, msgspec.structs.replace(run, topology=topology, work=work) if marks else None


UNEVEN = ([300, 900], [(300, 1000), (900, 1000)])
LATE = ([500, 500], [(500, 1000), (900, 1000)])
SLOW = ([100] * 4, [(100, 110), (100, 200), (100, 110), (100, 110)])
SOLO = Baselines(
    warmup=1, rounds=1, ordinary_ns=[[1_500_000]] * 2, solo_ns=[[500_000]] * 2, solo_flops=[7 * 2**36] * 2,
    compute_only_ns=[[10**6]] * 2, communication_only_ns=[[10**5]] * 2,
)  # fmt: skip
LARGE = Workload(seq=8192, heads=8, kv_heads=8, head_dim=128, causal=False)
"""Workload of 14 x 8 x 128 x 8192 x 8192 FLOPs for forward and backward."""
PREDICTION = Predicted(machine="h200", evidence="measured", simulated_ranks=2, p10_ns=MS, p50_ns=MS, p90_ns=MS)


def with_run(make: Callable[[], Sequence[Builder]], **fields: Any) -> Program:
    builders = make()
    return builders, recorded(len(builders), **fields)


SCAN = "chunk_gated_delta_rule_fwd_kernel_h_blockdim64"
GDN = Workload(seq=1024, heads=8, kv_heads=8, head_dim=64, operator="gdn")


def recurrence(
    name: str, make: Callable[[], Sequence[Builder]], hosts: Sequence[str] = (), *, counted: bool = True, **fields: Any
) -> Program:
    """Return a recorded recurrence; without ``counted``, one of a peer that counts neither FLOPs nor bytes."""
    builders, run = with_run(make, strategy=strategy(name, layout="contiguous"), **{"workload": GDN, **fields})
    assert run is not None
    if hosts:
        run = msgspec.structs.replace(run, topology=msgspec.structs.replace(run.topology, hosts=list(hosts)))
    if not counted:
        work = [msgspec.structs.replace(rank_work, block_flops=None, sent=None) for rank_work in run.work or []]
        run = msgspec.structs.replace(run, work=work)
    return builders, run


def at_random(seed: int) -> Program:
    """Return ranks that compute, idle, copy and communicate at random, with kernels of random kinds."""
    generator = random.Random(seed)
    world = generator.randint(1, 4)
    names = generator.sample([FLASH, GEMM, ADD, MERGE, "multi_tensor_apply_kernel<FusedAdamMathFunctor>"], 3)
    steps = [generator.choice(["hop", "all_reduce", "none", "none"]) for _ in range(generator.randint(1, 6))]
    clock, cpu = [0] * world, 1000
    hosts = [generator.choice([None, None, f"node{rank % 2}"]) for rank in range(world)]
    builders = [Builder(rank=rank, world_size=world, host=host) for rank, host in enumerate(hosts)]
    for step in steps:
        for rank, b in enumerate(builders):
            for _ in range(generator.randint(1, 3)):
                idle = generator.choice([0, 0, 2, 30, 400]) * US
                # No two ranks start in the same nanosecond: it would be ambiguous which of them is waited for.
                start, length = clock[rank] + idle + 7 * rank, generator.choice([5, 50, 800]) * US
                launched = generator.choice([None, max(cpu, start - 10 * US), cpu, cpu])
                name = generator.choice([*names, "Memcpy HtoD (Pageable -> Device)"])
                b.run(name, start, start + length, launched=launched, category=int(name.startswith("Memcpy")))
                clock[rank] = start + length
        cpu += 500
        wire = generator.choice([10, 900]) * US
        for rank, b in enumerate(builders):
            if step == "none" or world == 1:
                continue
            end = max(clock) + wire
            group: dict[str, Any] = {"group_ranks": tuple(range(world)), "group_size": world, "elements": 500_000}
            if step == "hop":
                b.batch(cpu, clock[rank], end, to=(rank + 1) % world, source=(rank - 1) % world, **group)
            else:
                b.run(f"{NCCL[:15]}AllReduce", clock[rank], end, launched=cpu, own=collective("allreduce", **group),
                      stream=20)  # fmt: skip
        if step != "none" and world > 1:
            clock = [max(clock) + wire] * world
    traced_ranks = builders[: generator.choice([world, world, max(1, world - 1)])]
    return traced_ranks, None


WRITERS = ("nsys", "rocprof", "ascend", "xla")
PROGRAMS: dict[str, Callable[[], Program]] = {
    "no communication": lambda: ([Builder(rank=r, world_size=2).run(GEMM, 0, MS, launched=1) for r in (0, 1)], None),
    "communication after the iteration": communicates_outside,
    "communication launched before profiling": partial(communicates_outside, 9),
    **{f"launch-bound, by {name}": partial(lambda name: written_by(name, launch_bound()), name) for name in WRITERS},
    **{f"no phases, by {name}": partial(lambda name: written_by(name, stalled_in("")), name) for name in WRITERS},
    **{f"no launches, by {name}": partial(lambda name: written_by(name, blocked(unlaunched=5)), name)
       for name in WRITERS},
    "launch-bound on an AMD GPU": lambda: written_by("torch", launch_bound(), "AMD Instinct MI300X"),
    "partly replayed": partial(partly_replayed, 40),
    "partly replayed on an AMD GPU": lambda: written_by("torch", partly_replayed(40), "AMD Instinct MI300X"),
    "compiled": lambda: ([one_gpu(*(("triton_poi_fused_add_0", 50 * n, 50 * n + 10, 50 * n - 8) for n in range(99)))],
                         None),
    "other compute, one kernel": lambda: ([one_gpu(("void divergence<float>(float*)", 0, 700, 0),
                                                    ("lap", 700, 900, 1))], None),
    "other compute, several": lambda: ([one_gpu(*((f"step{n}", 100 * n, 100 * n + 100, n) for n in range(9)))], None),
    "managed memory": touches_managed_memory,
    "kernels of unknown kind": partial(unknown_kernels, 62),
    "few kernels of unknown kind": partial(unknown_kernels, 9),
    "one rank, merging": merges,
    "launch-bound": launch_bound,
    "many short calls in one stretch": one_slow_stretch,
    "launched far ahead": launched_far_ahead,
    "data loader": partial(stalled_in, "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 1),
    "hipFree": partial(stalled_in, "hipFree"),
    "one slow launch": partial(stalled_in, "cudaLaunchKernel"),
    "one slow launch on an AMD GPU": partial(stalled_in, "hipLaunchKernel"),
    "synchronisation": partial(stalled_in, "cudaStreamSynchronize"),
    "graph capture": partial(stalled_in, "cudaGraphInstantiate"),
    "nothing recorded": partial(stalled_in, ""),
    "blocked, cause unknown": partial(blocked, 7, 7, 7, 7),
    "blocked on another stream": partial(blocked, 8, 9, 8, 9, 8, 9),
    "no launch records": partial(blocked, unlaunched=5),
    "blocked, and some without launch": partial(blocked, 7, 7, 7, 7, 7, unlaunched=2),
    "host copies": host_copies,
    "two streams at once": two_streams_at_once,
    "two devices in one trace": two_devices,
    "replayed by a CUDA graph": replayed,
    "several small losses": several_small_losses,
    "ring that hides its hops": lambda: (ring_pass(), None),
    "contiguous causal ring by traces alone": lambda: (ring_pass(block=causal(900)), None),
    "hops longer than blocks": lambda: (ring_pass(block=uniform_blocks(600), hop_ns=800), None),
    "a rank is missing": lambda: (ring_pass(block=uniform_blocks(600), hop_ns=800)[:3], None),
    "one rank of several": lambda: (ring_pass(block=uniform_blocks(600), hop_ns=800)[:1], None),
    "uneven work": lambda: (ring(*UNEVEN), None),
    "a late rank": lambda: (ring(*LATE), None),
    "uneven after the last hop": lambda: (ring([300, 300], [(300, 310)] * 2, after=[100, 900]), None),
    "a late rank that ends late": lambda: (ring([300, 300], [(300, 400), (380, 400)], after=[500, 510]), None),
    "a slow link": lambda: (ring(*SLOW), None),
    "copies, 2 ranks": partial(copied, [400, 900]),
    "copies, 3 ranks": partial(copied, [400, 900, 500]),
    "copies, one of 2 ranks": lambda: (copied([400, 900])[0][:1], copied([400, 900])[1]),
    "data parallel": partial(data_parallel, [600, 600, 610]),
    "data parallel, one late": partial(data_parallel, [600, 900], 20),
    "data parallel, one computes longest": partial(data_parallel, [300, 310, 900, 305], 20),
    "data parallel, two compute longest": partial(data_parallel, [300, 900, 310, 880, 305, 300], 20),
    "clocks apart": clocks_apart,
    "two groups at once": two_groups_at_once,
    "data parallel with shapes": with_shapes,
    "few shapes": with_few_shapes,
    "sharded without records": unrecorded_sharding,
    "two kinds between hosts": two_kinds_between_hosts,
    "CPU, one host": partial(on_cpu, ["a", "a"]),
    "CPU, two hosts": partial(on_cpu, ["a", "b"]),
    "CPU, no marks": partial(on_cpu, ["a", "a"], marks=False),
    "ulysses, one slow GPU": lambda: with_run(
        lambda: ring(*UNEVEN), strategy=strategy("ulysses", layout="contiguous"), sent=""
    ),
    "contiguous ring": lambda: with_run(
        lambda: ring(*UNEVEN), flops=(10**9, 3 * 10**9), strategy=strategy("ring", layout="contiguous")
    ),
    "equal attention, uneven rest": lambda: with_run(lambda: ring(*UNEVEN, kernel=ADD), strategy=strategy()),
    "someone else's strategy": lambda: with_run(
        lambda: ring(*SLOW), sent="", strategy=strategy("ring-flash-attn/zigzag", layout="zigzag")
    ),
    "CUDA graph": lambda: (launch_bound()[0], recorded(1, strategy=strategy(cuda_graph=True))),
    "launch-bound, recorded": lambda: (launch_bound()[0], recorded(1, strategy=strategy())),
    "launch-bound layer": lambda: (launch_bound()[0], recorded(1, strategy=strategy(), workload=Workload(
        seq=1024, heads=8, kv_heads=8, head_dim=64, layer=LayerAround(parallel="ddp", mlp_size=64)))),
    "decode": lambda: (launch_bound()[0], recorded(1, sent="all_gather", strategy=strategy("dcp"), workload=Workload(
        seq=1, heads=8, kv_heads=8, head_dim=64, phase="decode", kv_length=1024, backward=False))),
    "slower beside communication": lambda: with_run(
        lambda: ring([1000, 1000], [(0, 990), (0, 990)]), flops=(7 * 2**36, 7 * 2**36), controls=SOLO, workload=LARGE,
        strategy=strategy(),
    ),
    "captured block": lambda: with_run(lambda: ring(*SLOW), timings=None, strategy=strategy()),
    "predicted": lambda: (launch_bound()[0], recorded(1, strategy=strategy(), predicted=PREDICTION)),
    "packed documents": lambda: with_run(
        lambda: ring(*UNEVEN), flops=(10**9, 3 * 10**9), strategy=strategy("ring", layout="contiguous"),
        workload=Workload(seq=1024, heads=8, kv_heads=8, head_dim=64, documents=(1000, 24)),
    ),
    "recurrence, a late rank": lambda: recurrence("state-ring", lambda: ring(*UNEVEN, kernel=SCAN)),
    "recurrence, 4 ranks one after another": lambda: recurrence("state-ring", lambda: ring(
        [100] * 4, [(100, 110), (100, 200), (100, 300), (100, 400)], after=[10, 100, 200, 300], kernel=SCAN)),
    "recurrence, slow all-to-all": lambda: recurrence("state-a2a", lambda: ring(*SLOW, kernel=SCAN)),
    "recurrence, exposed wire": lambda: recurrence(
        "state-scan", lambda: ring([300, 300], [(300, 900), (300, 900)], kernel=SCAN)),
    "recurrence, exposed all-to-all": lambda: recurrence(
        "state-a2a", lambda: ring([300, 300], [(300, 900), (300, 900)], kernel=SCAN)),
    "recurrence, launch-bound": lambda: recurrence(
        "state-scan", lambda: [one_gpu(*((ADD, 50 * n, 50 * n + 10, 50 * n - 8) for n in range(1, 100)))]
    ),
    "recurrence, CUDA graph": lambda: (launch_bound()[0], recorded(
        1, strategy=strategy("state-scan", layout="contiguous", cuda_graph=True), workload=GDN)),
    "recurrence, documents": lambda: recurrence("state-scan", lambda: ring(*UNEVEN, kernel=SCAN),
        workload=msgspec.structs.replace(GDN, documents=(1000, 24))),
    "recurrence, of a peer": lambda: recurrence("fla/cp", lambda: ring(*UNEVEN, kernel=SCAN), counted=False),
    "recurrence, between hosts": lambda: recurrence(
        "state-scan", lambda: ring([300, 300], [(300, 900), (300, 900)], kernel=SCAN), ["a", "b"]),
    "recurrence, controls": lambda: recurrence(
        "state-scan", lambda: ring([1000, 1000], [(0, 990), (0, 990)], kernel=SCAN), controls=SOLO),
    "recurrence, beside products": lambda: recurrence(
        "state-scan", lambda: ring([900, 900], [(900, 910), (900, 910)], kernel=GEMM, after=[100, 100])),
    **{f"at random, {seed}": partial(at_random, seed) for seed in range(40)},
}  # fmt: skip
