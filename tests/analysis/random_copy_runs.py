"""Random runs with copy-engine hops, host events of every kind, and the defects of real traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from ringprof.run import RankTrace, Run, Sent, StrategyUsed, Topology, Work, write_run
from tests.analysis.recorded import recorded_run
from tests.analysis.trace_text import TraceText

ITERATION_NS = 600_000
CHANNELS = {"kv": 1, "dkv": -1}
"""How far round the ring each channel sends."""
STREAMS = {"kv": 20, "dkv": 21}
CALLS = (
    "cudaStreamIsCapturing", "cudaMalloc", "cudaFree", "cudaDeviceSynchronize", "cudaStreamSynchronize",
    "cudaEventRecord", "cudaHostAlloc", "cudaStreamBeginCapture", "cudaGraphInstantiate",
    "cudaOccupancyMaxActiveBlocksPerMultiprocessor",
)  # fmt: skip
HOST_EVENTS = {
    "cpu_op": ("aten::mm", "aten::copy_", "aten::empty", "record_param_comms", "TorchDynamo Cache Lookup"),
    "user_annotation": (
        "forward", "ringprof::fwd/step=1/block", "Optimizer.step#Adam.step", "nccl:all_reduce", "PyTorch Profiler (0)",
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
    ),
    "cuda_runtime": CALLS,
    "cuda_driver": ("cuMemAlloc_v2", "cuEventQuery"),
    "python_function": ("torch/nn/modules/module.py(1553): _call_impl",),
}  # fmt: skip
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernelEx", "cudaMemsetAsync", "cudaGraphLaunch")
ACTIVITIES = (
    ("kernel", "flash_fwd_kernel<Flash_fwd_kernel_traits<128>>"), ("kernel", "ampere_sgemm_128x64_tn"),
    ("kernel", "elementwise_kernel"), ("gpu_memset", "Memset (Device)"),
    ("gpu_memcpy", "Memcpy DtoD (Device -> Device)"), ("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)"),
)  # fmt: skip
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@dataclass(frozen=True)
class Choices:
    """Form of one random run."""

    world: int
    hosts: int
    iterations: int
    mark: str
    run_file: str
    """``none``, ``to``, ``old`` (hops without receiver) or ``nccl`` (no hops by copies)."""
    renumbered: bool
    """Whether each process calls its device 0, as with CUDA_VISIBLE_DEVICES."""
    missing: int | None
    """Rank without a trace."""
    second_device: bool
    nested: bool
    """Whether host events nest; else they may overlap in part."""
    plan: tuple[tuple[str, int], ...]
    """Channel and time of each hop of an iteration."""

    def device(self, rank: int) -> int:
        return 0 if self.renumbered else rank

    def host(self, rank: int) -> int:
        return rank * self.hosts // self.world


def choose(rng: Random) -> Choices:
    """Draw the form of a run."""
    world = rng.choice((1, 2, 2, 3, 4, 5))
    times = sorted(rng.sample(range(20_000, ITERATION_NS - 150_000, 100_000), rng.randint(0, 4)))
    return Choices(
        world=world,
        hosts=2 if world > 1 and rng.random() < 0.25 else 1,
        iterations=rng.choice((0, 1, 1, 2, 3)),
        mark=rng.choice(("ringprof::iteration", "ProfilerStep#{}")),
        run_file=rng.choice(("none", "to", "to", "old", "nccl")),
        renumbered=rng.random() < 0.4,
        missing=rng.randrange(world) if world > 1 and rng.random() < 0.25 else None,
        second_device=rng.random() < 0.3,
        nested=rng.random() < 0.5,
        plan=tuple((rng.choice(list(CHANNELS)), time) for time in times),
    )


class RandomRank(TraceText):
    """Random trace of one rank."""

    def __init__(self, rng: Random, choices: Choices, rank: int, hop_ends: list[int]) -> None:
        """``hop_ends`` grows by the end of each hop, in true time: activities of later ranks start near them."""
        super().__init__(rank, choices.world, choices.device(rank))
        self.rng, self.choices, self.hop_ends = rng, choices, hop_ends
        self.shift_ns = choices.host(rank) * 7_777_777
        self.free_ns = dict.fromkeys(CHANNELS, 0)
        self.sending: list[tuple[int, int, int]] = []

    def random_hop(self, channel: str, start: int) -> None:
        """Write a hop of one to three copies, of which a few are not recorded."""
        rng, thread, now = self.rng, self.rng.choice((1, 2)), start + 1000
        target = self.choices.device((self.rank + CHANNELS[channel]) % self.choices.world) + self.choices.renumbered
        copied = start + rng.choice((1500, 20_000, 100_000)) + rng.randint(0, 5000)
        copied = max(copied, self.free_ns[channel] + rng.randint(1, 9))
        copies = []
        for _ in range(rng.randint(1, 3)):
            copies.append((now, now + rng.randint(100, 9000), copied, copied + rng.randint(1, 20_000)))
            self.free_ns[channel] = copies[-1][3]
            now, copied = now + 10_000, copies[-1][3] + rng.choice((0, 1, 300, 9000))
        self.hop(channel, target, *copies, stream=STREAMS[channel], thread=thread)
        self.rows = [row for row in self.rows if "PtoP" not in row["name"] or rng.random() < 0.998]
        self.sending.append((start, now, thread))
        self.hop_ends.append(self.free_ns[channel])

    def random_work(self, start: int) -> None:
        """Write a launch call and what it launches: one activity, or those of a graph; some join no launch."""
        rng, name = self.rng, self.rng.choice(LAUNCHES)
        busy = {thread for begin, end, thread in self.sending if begin <= start <= end}
        thread = rng.choice([thread for thread in (1, 1, 2, 3) if thread not in busy])
        joins = self.call(name, start, start + rng.choice((0, 900, 4000, 15_000)), thread)
        for _ in range(rng.choice((1, 3)) if name == "cudaGraphLaunch" else 1):
            begin = start + rng.choice((100, 3000, 30_000)) + rng.randint(0, 3000)
            near = [end for end in self.hop_ends if start < end < start + 200_000]
            if near and rng.random() < 0.6:
                begin = rng.choice(near) + rng.randint(-2000, 24_000)
            end = begin + rng.choice((0, 700, 8000, 30_000)) + rng.choice((0, *range(20)))
            stream = rng.choice((7, 7, 13, 20))
            launched: dict[str, Any] = {} if rng.random() < 0.1 else {"correlation": joins}
            device = self.device + 8 * (self.choices.second_device and rng.random() < 0.2)
            self.activity(*rng.choice(ACTIVITIES), begin, end, stream, device=device, **launched)

    def random_host_events(self, first: int, last: int) -> None:
        """Write host events of every category, some of them empty."""
        rng = self.rng
        spans = [(first, last)]
        for _ in range(rng.randint(10, 60)):
            low, high = rng.choice(spans) if self.choices.nested else (first, last)
            start = rng.randint(low, high)
            end = start + rng.choice((0, 1, 300, 5000, 40_000, 200_000))
            if self.choices.nested:
                # Halves of a span that holds another event already do not nest in it: each span is used up.
                end = min(end, high)
                spans.remove((low, high))
                spans += [(low, start), (start, end), (end, high)]
            category = rng.choice(["cpu_op", *HOST_EVENTS])
            self.event(category, rng.choice(HOST_EVENTS[category]), start, end, rng.choice((1, 1, 2, 3)))

    def all_reduce(self, start: int, end: int, number: int) -> None:
        """Write a collective of all ranks, by which the clocks of hosts are fitted."""
        ranks = list(range(self.choices.world))
        record = {
            "Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "Float",
            "Group size": len(ranks), "Process Group Name": "0", "Process Group Ranks": str(ranks), "Seq": number,
        }  # fmt: skip
        joins = self.call("cuLaunchKernelEx", start - 5000, start - 1000, category="cuda_driver")
        self.activity("kernel", ALL_REDUCE, start, end, 30, correlation=joins, **record)

    def random_iteration(self, number: int, plan: Sequence[tuple[str, int]]) -> None:
        """Write one iteration; that before the first is not marked."""
        rng, start = self.rng, (number + 1) * ITERATION_NS
        end = start + ITERATION_NS - 20_000
        for channel, time in plan:
            self.random_hop(channel, start + time + rng.choice((0, 5000, 50_000)) + rng.randint(0, 5000))
        for _ in range(rng.randint(3, 14)):
            self.random_work(start + rng.randint(10_000, ITERATION_NS - 60_000))
        for index in range(3 if self.choices.hosts == 2 else 0):
            time = start + 100_000 + 150_000 * index
            self.all_reduce(time + rng.randint(0, 40_000), time + 50_000 + rng.randint(0, 3000), index)
        self.random_host_events(start, end)
        if number >= 0 and self.choices.iterations:
            self.range(self.choices.mark.format(number), start, end)
            self.range("part", start + 50_000, start + rng.randint(200_000, 500_000))


def write_random_run(seed: int, folder: Path) -> Choices:
    """Write the traces of a run, and its run.json where it has one."""
    rng = Random(seed)
    choices, hop_ends = choose(rng), [0]
    for rank in range(choices.world):
        trace = RandomRank(rng, choices, rank, hop_ends)
        trace.random_iteration(-1, choices.plan[:1])
        for number in range(max(choices.iterations, 1)):
            trace.random_iteration(number, choices.plan)
        rng.shuffle(trace.rows)
        if rank != choices.missing:
            trace.write(folder)
    if choices.run_file != "none":
        operation = "send_recv" if choices.run_file == "nccl" else "copy"
        to = {channel: by if choices.run_file == "to" else None for channel, by in CHANNELS.items()}
        hosts = [f"node{choices.host(rank)}" for rank in range(choices.world)]
        present = [rank for rank in range(choices.world) if rank != choices.missing]
        hops = {channel: to[channel] for channel, _ in choices.plan}
        write_run(run_with_hops(hosts, hops, operation, present), folder / "run.json")
    return choices


def run_with_hops(
    hosts: Sequence[str], hops: dict[str, int | None], operation: str = "copy", present: Sequence[int] | None = None
) -> Run:
    """Return a run whose ranks send on each channel so many ranks further, None where the run does not tell."""
    world = len(hosts)

    def sent(rank: int, channel: str, by: int | None) -> Sent:
        to = None if by is None else (rank + by) % world
        return Sent(
            channel=channel, phase="forward", operation=operation, link="same_host", count=1, sent_bytes=1 << 20, to=to
        )

    return recorded_run(
        world,
        work=[
            Work(
                block_flops=10**9,
                block_calls={"forward": 1, "backward": 0},
                sent=[sent(rank, *hop) for hop in hops.items()],
            )
            for rank in range(world)
        ],
        topology=Topology(
            world_size=world, hosts=list(hosts), local_ranks=list(range(world)), ranks_per_host=world,
            device_type="cuda", backend="nccl",
        ),
        strategy=StrategyUsed(name="ring", target="m:C", params={}, hops="copy" if operation == "copy" else "nccl"),
        traces=[RankTrace(rank=rank, path=f"rank{rank}.json") for rank in present or range(world)],
    )  # fmt: skip
