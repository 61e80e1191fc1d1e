"""Measurements of one rank: iterations without the profiler, work done, memory, then a profile."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch
from torch.profiler import record_function

from ringprof.iteration.layer_ranges import named_layers
from ringprof.iteration.shard import (
    ITERATION,
    Measurement,
    Results,
    WorkloadShard,
    counted_work,
    profiler,
    reset_counts,
    row_sums,
)
from ringprof.ranks.progress import Reporter
from ringprof.recording.telemetry import device_telemetry
from ringprof.strategies.transport.copy_engine import held_bytes


def reset_peak(device: torch.device) -> None:
    """Reset the peak that `peak_bytes` reports."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        # Linux: 5 resets the high-water mark of the resident memory.
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int | None:
    """Return the peak memory of this rank in bytes since `reset_peak`; None if unknown.

    On a GPU it is the allocator's peak plus the receive buffers of copied hops. On CPU it is the peak resident memory
    of the process, libraries included. Where the reset fails, that peak is an upper bound: verification may have set
    it.
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


def measure(shard: WorkloadShard, warmup: int, iters: int, reporter: Reporter) -> Measurement:
    """Warm up, then time every iteration; count the work in the first timed iteration or in the captured one."""
    results: list[Results] = []
    first_rows = work = None

    def run_and_keep() -> None:
        results.append(shard.run_for_verification())

    warmup_clock = shard.clock()
    reporter.start("warm-up", warmup)
    for number in range(warmup):
        warmup_clock.run(shard.run_iteration if number else run_and_keep)
        first_rows = row_sums(results.pop().out) if results else first_rows
        reporter.advance()
    warmup_clock.times_ns()
    reset_peak(shard.device)
    reset_counts(shard.strategies)
    if shard.cuda_graph:
        # The host counts the work when an iteration is captured; it does not see the replays.
        shard.capture_graph()
        work = counted_work(shard.strategies)
        warmup_clock.run(shard.run_iteration)
        warmup_clock.times_ns()
    clock = shard.clock()
    reporter.start("iterations", iters)
    with device_telemetry(shard.device) as telemetry:
        for number in range(iters):
            # The results of an iteration are freed before the next; those of the last one are verified.
            results.clear()
            clock.run(run_and_keep if number == iters - 1 or first_rows is None else shard.run_iteration)
            work = work or counted_work(shard.strategies)
            first_rows = row_sums(results[0].out) if first_rows is None else first_rows
            reporter.advance()
        # Waits for the device, so that the telemetry covers all iterations.
        times = clock.times_ns()
    assert work is not None and first_rows is not None
    return Measurement(
        times, peak_bytes(shard.device), work, first_rows, results[0], telemetry.state() if telemetry else None
    )


def profile_iterations(shard: WorkloadShard, iters: int, path: Path, reporter: Reporter) -> list[int]:
    """Profile iterations, write the trace to ``path``, and return their times in nanoseconds.

    All ranks start each iteration together, behind a barrier that is outside the marked range, as in `measure`.
    """
    reporter.start("profile", iters)
    warmup_clock, clock = shard.clock(), shard.clock()

    def run_marked() -> None:
        with record_function(ITERATION), named_layers(getattr(shard, "model", None)):
            shard.run_iteration()

    with profiler() as recording:
        warmup_clock.run(shard.run_iteration)
        warmup_clock.times_ns()
        recording.step()
        for _ in range(iters):
            clock.run(run_marked)
            reporter.advance()
        # Waits for the device, so that every kernel ends inside the window.
        times = clock.times_ns()
        recording.step()
    reporter.start("export", 1)
    recording.export_chrome_trace(str(path))
    reporter.advance()
    return times
