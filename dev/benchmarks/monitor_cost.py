"""Measure the overhead of ``ringprof.monitor`` on a training loop on CPU: interleaved loops with and without it.

    python dev/benchmarks/monitor_cost.py [--steps 200] [--every 100] [--size 1600] [--rounds 2]

Prints the median time of a loop with and without the monitor, and the share that the monitor itself reports. The first
sample of a process also starts the profiler, so one loop with the monitor runs before those that count.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import ringprof


def loop(steps: int, size: int) -> None:
    weight = torch.randn(size, size, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1e-9)
    for _ in range(steps):
        optimizer.zero_grad()
        (weight @ weight).square().mean().backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--size", type=int, default=1600)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    times: dict[str, list[float]] = {"without": [], "with": []}
    shares = []
    with ringprof.monitor(every=2):
        loop(5, options.size)
    for _ in range(options.rounds):
        start = time.perf_counter()
        loop(options.steps, options.size)
        times["without"].append(time.perf_counter() - start)
        start = time.perf_counter()
        with ringprof.monitor(every=options.every) as monitor:
            loop(options.steps, options.size)
        times["with"].append(time.perf_counter() - start)
        shares.append(monitor.spent_ns / 1e9 / times["with"][-1])
    plain_s, monitored_s = (statistics.median(loop_times) for loop_times in times.values())
    print(
        f"{options.steps} steps, {plain_s / options.steps * 1e3:.0f} ms each:"
        f" {plain_s:.2f} s without, {monitored_s:.2f} s with"
    )
    print(
        f"a sample every {options.every} steps: {100 * (monitored_s / plain_s - 1):+.2f} %; by the monitor's own count"
        f" {100 * statistics.median(shares):.2f} %"
    )


if __name__ == "__main__":
    main()
