"""Record one command repeatedly, each time in new processes, to measure the spread between unchanged runs.

    python dev/benchmarks/same_command.py --strategy zigzag --seq 16384 --heads 16 --out same.json
    python dev/benchmarks/same_command.py --strategy burst --seq 1024 --heads 2 --head-dim 64 --seconds 60
    python dev/benchmarks/same_command.py --device cuda --started 8 --seconds 150

Each recording is what `ringprof record --no-verify` times: its own ranks, process group, kernels and buffers, warm-up,
then iterations without the profiler. Its ranks are forked from this process, which has loaded torch and has not used a
GPU, so that a recording takes seconds. Most of the time is start-up: with `--started N` the ranks of N recordings start
together, and measure one recording after the other while the rest sleep. At the end, the script prints for how many
neighbouring pairs `ringprof compare` would call the second slower or faster; that should be one in twenty at most.
tests/data/same_command holds such files.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from glob import glob
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch

from ringprof.analysis.findings.recording_spread import SAME_SESSION
from ringprof.analysis.findings.uncertainty import significantly_different
from ringprof.iteration.shard import WorkloadShard
from ringprof.ranks.launcher import RankInfo
from ringprof.ranks.process_group import world_group
from ringprof.ranks.progress import SilentReporter
from ringprof.recording.measure import measure
from ringprof.strategies import create
from ringprof.workload.workload import Workload

PATIENCE_S = 90
"""Time limit for one recording in seconds."""


def main() -> int:
    options = _options()
    results: dict[str, Any] = {"command": _command(options), "recordings": []}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        while len(results["recordings"]) < 2 * options.pairs and time.monotonic() - start < options.seconds:
            done = len(results["recordings"])
            together = min(options.started, 2 * options.pairs - done)
            results["recordings"] += _record([Path(folder) / str(done + number) for number in range(together)], options)
            Path(options.out).write_text(json.dumps(results, separators=(",", ":")))
    took = time.monotonic() - start
    print(f"{len(results['recordings'])} recordings in {took:.0f} s: {options.out}", *_verdict(results), sep="\n")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="zigzag")
    parser.add_argument("--seq", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--hops", default="nccl")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--started", type=int, default=1, help="recordings whose ranks start together")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no recording after this time")
    # GPUs are looked up in the file system, since a process that has initialised CUDA cannot fork.
    device = "cuda" if glob("/dev/nvidia[0-9]*") else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=device)
    parser.add_argument("--out", default="same_command.json")
    return parser.parse_args()


def _command(options: argparse.Namespace) -> str:
    names = ("strategy", "seq", "heads", "head_dim", "device", "world", "hops", "iters", "warmup")
    options_text = " ".join(f"--{name.replace('_', '-')} {getattr(options, name)}" for name in names)
    return f"ringprof record {options_text} --no-verify"


@dataclass
class _Recording:
    """Forked ranks of one recording. Each rank sends a byte when it is ready, and another when it has measured."""

    folder: Path
    ranks: list[int]
    """Process ids."""
    answers: int
    """Pipe from which the bytes of the ranks are read."""
    go: int
    """Pipe to which one byte per rank is written to start the measurement."""

    def wait_for_ranks(self) -> None:
        for _ in self.ranks:
            if not os.read(self.answers, 1):
                raise SystemExit("a rank failed: see above")

    def measure(self) -> dict[str, Any]:
        created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        os.write(self.go, b"." * len(self.ranks))
        self.wait_for_ranks()
        times = [json.loads((self.folder / f"{rank}.json").read_text()) for rank in range(len(self.ranks))]
        return {"created": created, "iterations_ns": times}

    def end(self) -> None:
        os.close(self.go)
        for rank in self.ranks:
            os.waitpid(rank, 0)
        os.close(self.answers)


def _record(folders: list[Path], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Start the ranks of several recordings together, measure one recording after the other, and end all together."""
    sys.stdout.flush()
    recordings: list[_Recording] = []
    for folder in folders:
        recordings.append(_start(options, folder, [recording.go for recording in recordings]))
    for recording in recordings:
        recording.wait_for_ranks()
    results = [recording.measure() for recording in recordings]
    for recording in recordings:
        recording.end()
    return results


def _start(options: argparse.Namespace, folder: Path, others: list[int]) -> _Recording:
    """Fork the ranks of one recording; ``others`` are the pipes of recordings that were started before."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (answers, answer), (wait, go) = os.pipe(), os.pipe()
    ranks = []
    for rank in range(options.world):
        process = os.fork()
        if process:
            ranks.append(process)
            continue
        # A pipe that stays open in a rank would hide from the others that this process has closed it.
        for pipe in (answers, go, *others):
            os.close(pipe)
        _run_rank(options, folder, rank, port, _RankPipes(wait, answer))
    os.close(answer)
    os.close(wait)
    return _Recording(folder, ranks, answers, go)


@dataclass
class _RankPipes:
    """Ends of the pipes in a rank."""

    wait: int
    answer: int

    def ready(self) -> None:
        os.write(self.answer, b".")
        if not os.read(self.wait, 1):
            os._exit(1)

    def measured(self) -> None:
        os.write(self.answer, b".")
        os.read(self.wait, 1)


def _run_rank(options: argparse.Namespace, folder: Path, rank: int, port: int, pipes: _RankPipes) -> NoReturn:
    signal.alarm(PATIENCE_S)
    try:
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
        os.environ.update(variables, LOCAL_RANK=str(rank), WORLD_SIZE=str(options.world))
        _time(options, rank, folder / f"{rank}.json", pipes)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _time(options: argparse.Namespace, rank: int, output: Path, pipes: _RankPipes) -> None:
    """Write the nanoseconds of every iteration of this rank to a file."""
    workload = Workload(
        batch=1, seq=options.seq, heads=options.heads, kv_heads=options.heads, head_dim=options.head_dim, causal=True,
        dtype="bf16", backward=True,
    )  # fmt: skip
    if options.device == "cpu":
        torch.set_num_threads(1)
    rank_info = RankInfo(rank, options.world, rank, options.world)
    with world_group(rank_info, options.device, PATIENCE_S) as device:
        problem = WorkloadShard.create(create(options.strategy, hops=options.hops), workload, device)
        # The first iteration loads kernels and opens channels, which takes seconds.
        problem.run_iteration()
        if options.device == "cuda":
            torch.cuda.synchronize()
        pipes.ready()
        times = measure(problem, options.warmup, options.iters, SilentReporter()).iterations_ns
        output.write_text(json.dumps(times))
        pipes.measured()


def _verdict(results: dict[str, Any]) -> list[str]:
    """Summarise how many neighbouring pairs are called different, and the range of the medians."""
    recordings = [
        [max(times) / 1e6 for times in zip(*recording["iterations_ns"], strict=True)]
        for recording in results["recordings"]
    ]
    pairs = list(zip(recordings[::2], recordings[1::2], strict=False))
    medians = [median(times) for times in recordings] or [0.0]
    different = sum(
        significantly_different([first], [second], spread=_assumed_spread(first, second)) for first, second in pairs
    )
    return [
        f"{different} of {len(pairs)} pairs are called different",
        f"medians of the recordings: {min(medians):.3f} to {max(medians):.3f} ms",
    ]


def _assumed_spread(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the spread that `ringprof compare` assumes for the ratio of two recordings of one session."""
    return math.hypot(SAME_SESSION.share_of(median(first)), SAME_SESSION.share_of(median(second)))


if __name__ == "__main__":
    sys.exit(main())
