"""Hops without kernels: time the steps of a ring that computes and communicates in one Triton kernel.

torchrun --nproc-per-node 2 examples/fused_ring_stamps.py traces/stamps

A profiler shows the whole ring as one kernel. Here the kernel stamps the GPU's timer at each step; afterwards the
stamps are put on the profiler's clock and written into its traces, as ranges below the kernel. To check them, each
rank in turn sends late by a known time, and the other one's waiting must show it to 2 µs. Needs 2 GPUs with peer
access and Triton.
"""

import json
import os
import statistics
import sys

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
import triton
import triton.language as tl
from torch.profiler import ProfilerActivity, profile
from triton.language.extra.cuda import globaltimer

STEPS, PROGRAMS, SIZE = 12, 8, 1024  # steps of a ring; programs of the kernel; elements that each one sends per step
DELAYS_US = (0, 3, 10, 30, 100, 300)  # how late a rank sends, in one launch each
TOLERANCE_US = 2.0


@triton.jit
def ring_kernel(block, peer_block, flags, peer_flags, delays, stamps, out, first, steps, SIZE: tl.constexpr):
    """Add up the blocks that come round the ring, and stamp the GPU's timer in ns.

    A program's part of a block has SIZE elements. ``delays`` (steps): ns to wait before sending. ``stamps`` (steps,
    programs, 3): when a step began, had sent, and had its next block. ``first`` counts the steps of earlier launches.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    lanes = program * SIZE + tl.arange(0, SIZE)
    half = programs * SIZE  # a block is read in one half of the buffer while the next arrives in the other
    total = tl.zeros([SIZE], tl.float32)
    for step in range(steps):
        begun = globaltimer()
        held = tl.load(block + (step % 2) * half + lanes)
        total += held
        until = begun + tl.load(delays + step)
        now = begun
        while now < until:
            now = globaltimer()
        tl.store(peer_block + ((step + 1) % 2) * half + lanes, held)
        tl.debug_barrier()
        sent = globaltimer()
        tl.atomic_xchg(peer_flags + program, first + step + 1, sem="release", scope="sys")
        seen = tl.atomic_cas(flags + program, -1, -1, sem="acquire", scope="sys")
        while seen < first + step + 1:
            seen = tl.atomic_cas(flags + program, -1, -1, sem="acquire", scope="sys")
        tl.debug_barrier()
        arrived = globaltimer()
        row = stamps + (step * programs + program) * 3
        tl.store(row, begun)
        tl.store(row + 1, sent)
        tl.store(row + 2, arrived)
    tl.store(out + lanes, total)


def main(folder: str) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    peer, device = 1 - rank, torch.device("cuda", rank)
    block = symmetric.empty(2 * PROGRAMS * SIZE, dtype=torch.float32, device=device)
    flags = symmetric.empty(PROGRAMS, dtype=torch.int32, device=device)
    flags.zero_()
    torch.cuda.synchronize()
    handles = symmetric.rendezvous(block, dist.group.WORLD), symmetric.rendezvous(flags, dist.group.WORLD)
    peer_block = handles[0].get_buffer(peer, block.shape, block.dtype)
    peer_flags = handles[1].get_buffer(peer, flags.shape, flags.dtype)
    out = torch.empty(PROGRAMS * SIZE, device=device)
    launches = [(late, 0) for late in (0, 1)]  # (late rank, delay in µs): two to warm up
    launches += [(late, delay) for delay in DELAYS_US for late in (0, 1)]
    stamps = torch.zeros(len(launches), STEPS, PROGRAMS, 3, dtype=torch.int64, device=device)

    def launch(number: int) -> None:
        late, delay = launches[number]
        delays = torch.zeros(STEPS, dtype=torch.int64, device=device)
        if rank == late:
            delays[STEPS // 2] = delay * 1000
        block.fill_(rank + 1.0)
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        ring_kernel[(PROGRAMS,)](
            block, peer_block, flags, peer_flags, delays, stamps[number], out, number * STEPS, STEPS, SIZE
        )
        torch.cuda.synchronize()
        assert torch.equal(out, torch.full_like(out, 1.5 * STEPS)), "the ring computed a wrong sum"

    launch(0)
    launch(1)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for number in range(2, len(launches)):
            launch(number)
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"rank{rank}.json")
    profiler.export_chrome_trace(path)
    measured = stamps[2:].cpu()
    with open(path, encoding="utf-8") as file:
        trace = json.load(file)
    offset, error = clock_offset(trace, measured)
    add_ranges(trace, measured + offset, peer)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(trace, file)
    print(f"rank {rank}: the GPU's timer is on the profiler's clock to ±{error / 1000:.2f} µs", flush=True)

    both = [torch.zeros_like(measured, device=device) for _ in range(2)]
    dist.all_gather(both, (measured + offset).to(device))
    failed = delay_missed([item.cpu() for item in both]) if rank == 0 else False
    dist.destroy_process_group()
    sys.exit(1 if failed else 0)


def kernels_of(trace: dict) -> list[tuple[int, int, dict]]:
    """Return start and end of the ring's kernels in nanoseconds, and their events."""
    base = int(trace.get("baseTimeNanoseconds", 0))
    events = [
        event for event in trace["traceEvents"] if event.get("cat") == "kernel" and "ring_kernel" in event["name"]
    ]
    rows = [(base + round(e["ts"] * 1000), base + round((e["ts"] + e["dur"]) * 1000), e) for e in events]
    return sorted(rows, key=lambda row: row[0])


def clock_offset(trace: dict, stamps: torch.Tensor) -> tuple[int, float]:
    """Return the ns to add to the stamps for the profiler's clock, and the largest error of that number in ns.

    All stamps of a launch lie within its kernel, which bounds the difference of the clocks from both sides.
    """
    kernels = kernels_of(trace)
    assert len(kernels) == len(stamps), f"{len(kernels)} kernels in the trace, {len(stamps)} launches"
    least = max(start - int(own.min()) for (start, _, _), own in zip(kernels, stamps, strict=True))
    most = min(end - int(own.max()) for (_, end, _), own in zip(kernels, stamps, strict=True))
    return (least + most) // 2, abs(most - least) / 2


def add_ranges(trace: dict, stamps: torch.Tensor, peer: int) -> None:
    """Add ranges of the device to a trace: each step's computing, and its waiting for rank ``peer``.

    ``stamps`` (launches, STEPS, PROGRAMS, 3) are in ns on the profiler's clock.
    """
    base = int(trace.get("baseTimeNanoseconds", 0))
    for (_, _, event), launch in zip(kernels_of(trace), stamps, strict=True):
        for step, programs in enumerate(launch):
            begun, sent, arrived = (int(programs[:, 0].min()), int(programs[:, 1].max()), int(programs[:, 2].max()))
            for name, start, end in (("compute and send", begun, sent), (f"wait for rank {peer}", sent, arrived)):
                trace["traceEvents"].append({
                    "ph": "X", "cat": "gpu_user_annotation", "name": f"ring step {step}: {name}", "pid": event["pid"],
                    "tid": event["tid"], "ts": (start - base) / 1000, "dur": (end - start) / 1000,
                })  # fmt: skip


def delay_missed(both: list[torch.Tensor]) -> bool:
    """Print each injected delay beside the one that the other rank's stamps show.

    Returns True where they differ by more than TOLERANCE_US. ``both`` holds the stamps of rank 0 and of rank 1.
    """
    failed, step = False, STEPS // 2
    for number in range(len(both[0])):
        delay, late = DELAYS_US[number // 2], number % 2
        waiting = (both[1 - late][number, 1:, :, 2] - both[1 - late][number, 1:, :, 1]).double().mean(dim=1) / 1000
        usual = statistics.median(waiting[[i for i in range(STEPS - 1) if i != step - 1]].tolist())
        shown = float(waiting[step - 1]) - usual
        # On one clock, a block arrives after it was sent, by as much as the link takes.
        travel = (both[1 - late][number, :, :, 2] - both[late][number, :, :, 1]).double() / 1000
        missed = abs(shown - delay) > TOLERANCE_US
        failed |= missed
        print(
            f"rank {late} sends {delay:3d} µs late in step {step}: rank {1 - late} waits {shown:7.2f} µs longer than in"
            f" other steps ({shown - delay:+.2f} µs{', MISSED' if missed else ''}); sent to arrived"
            f" {float(travel[1:].min()):.2f} to {float(travel[1:].max()):.2f} µs",
            flush=True,
        )
    return failed


if __name__ == "__main__":
    main(sys.argv[1])
