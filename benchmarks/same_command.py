"""Record one command again and again, each time in new processes: how far apart are runs between which nothing changed?

    python benchmarks/same_command.py --strategy zigzag --seq 16384 --heads 16 --out same.json
    python benchmarks/same_command.py --strategy burst --seq 1024 --heads 2 --head-dim 64 --seconds 60
    python benchmarks/same_command.py --device cuda --started 8 --seconds 150

Each recording is what `ringprof record --no-verify` times: ranks, process group, kernels and buffers of its
own, warm-up, then iterations without the profiler. Its ranks are forked from this process, which has loaded
torch and has not touched a GPU, so that a recording takes seconds. Most of these go into starting: with
`--started N` the ranks of N recordings start together, and measure one recording after the other while the rest
sleep. At the end: of how many neighbouring pairs `ringprof compare` would call the second slower or faster, which
should be one in twenty at most.
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
from ringprof.record.launcher import RankInfo
from ringprof.record.measure import WorkloadShard, measure
from ringprof.record.process_group import world_group
from ringprof.record.progress import SilentReporter
from ringprof.run import Workload
from ringprof.strategies import create

PATIENCE_S = 90
"""For one recording."""


def main() -> int:
    options = _options()
    found: dict[str, Any] = {"command": _command(options), "recordings": []}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        while len(found["recordings"]) < 2 * options.pairs and time.monotonic() - begun < options.seconds:
            done = len(found["recordings"])
            together = min(options.started, 2 * options.pairs - done)
            found["recordings"] += _record([Path(folder) / str(done + number) for number in range(together)], options)
            Path(options.out).write_text(json.dumps(found, separators=(",", ":")))
    took = time.monotonic() - begun
    print(f"{len(found['recordings'])} recordings in {took:.0f} s: {options.out}", *_verdict(found), sep="\n")
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
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no recording after these")
    # Asked of the file system: a process that has asked CUDA cannot fork.
    here = "cuda" if glob("/dev/nvidia[0-9]*") else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=here)
    parser.add_argument("--out", default="same_command.json")
    return parser.parse_args()


def _command(options: argparse.Namespace) -> str:
    names = ("strategy", "seq", "heads", "head_dim", "device", "world", "hops", "iters", "warmup")
    given = " ".join(f"--{name.replace('_', '-')} {getattr(options, name)}" for name in names)
    return f"ringprof record {given} --no-verify"


@dataclass
class _Recording:
    """Ranks that have been forked: they tell when they are ready and when they have measured, a byte each."""

    folder: Path
    ranks: list[int]
    told: int
    go: int

    def hear(self) -> None:
        for _ in self.ranks:
            if not os.read(self.told, 1):
                raise SystemExit("a rank failed: see above")

    def measure(self) -> dict[str, Any]:
        created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        os.write(self.go, b"." * len(self.ranks))
        self.hear()
        times = [json.loads((self.folder / f"{rank}.json").read_text()) for rank in range(len(self.ranks))]
        return {"created": created, "iterations_ns": times}

    def end(self) -> None:
        os.close(self.go)
        for rank in self.ranks:
            os.waitpid(rank, 0)
        os.close(self.told)


def _record(folders: list[Path], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Recordings whose ranks are started together, measure one recording after the other, and leave together."""
    sys.stdout.flush()
    recordings: list[_Recording] = []
    for folder in folders:
        recordings.append(_started(options, folder, [one.go for one in recordings]))
    for recording in recordings:
        recording.hear()
    found = [recording.measure() for recording in recordings]
    for recording in recordings:
        recording.end()
    return found


def _started(options: argparse.Namespace, folder: Path, others: list[int]) -> _Recording:
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (told, tells), (waits, go) = os.pipe(), os.pipe()
    ranks = []
    for rank in range(options.world):
        process = os.fork()
        if process:
            ranks.append(process)
            continue
        # What stays open in a rank would keep the others from seeing that this process has closed it.
        for pipe in (told, go, *others):
            os.close(pipe)
        _be_rank(options, folder, rank, port, _Orders(waits, tells))
    os.close(tells)
    os.close(waits)
    return _Recording(folder, ranks, told, go)


@dataclass
class _Orders:
    """A rank's ends of the pipes."""

    waits: int
    tells: int

    def ready(self) -> None:
        os.write(self.tells, b".")
        if not os.read(self.waits, 1):
            os._exit(1)

    def measured(self) -> None:
        os.write(self.tells, b".")
        os.read(self.waits, 1)


def _be_rank(options: argparse.Namespace, folder: Path, rank: int, port: int, orders: _Orders) -> NoReturn:
    signal.alarm(PATIENCE_S)
    try:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
        os.environ.update(where, LOCAL_RANK=str(rank), WORLD_SIZE=str(options.world))
        _time(options, rank, folder / f"{rank}.json", orders)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _time(options: argparse.Namespace, rank: int, into: Path, orders: _Orders) -> None:
    """Nanoseconds of every iteration of this rank, written to a file."""
    workload = Workload(
        batch=1, seq=options.seq, heads=options.heads, kv_heads=options.heads, head_dim=options.head_dim, causal=True,
        dtype="bf16", backward=True,
    )  # fmt: skip
    if options.device == "cpu":
        torch.set_num_threads(1)
    place = RankInfo(rank, options.world, rank, options.world)
    with world_group(place, options.device, PATIENCE_S) as device:
        problem = WorkloadShard.create(create(options.strategy, hops=options.hops), workload, device)
        # Kernels are loaded and channels opened in the first iteration, which takes seconds.
        problem.run_iteration()
        if options.device == "cuda":
            torch.cuda.synchronize()
        orders.ready()
        times = measure(problem, device, options.warmup, options.iters, SilentReporter()).iterations_ns
        into.write_text(json.dumps(times))
        orders.measured()


def _verdict(found: dict[str, Any]) -> list[str]:
    levels = [[max(times) / 1e6 for times in zip(*one["iterations_ns"], strict=True)] for one in found["recordings"]]
    pairs = list(zip(levels[::2], levels[1::2], strict=False))
    middles = [median(times) for times in levels] or [0.0]
    called = sum(significantly_different([one], [two], spread=_assumed_spread(one, two)) for one, two in pairs)
    return [
        f"{called} of {len(pairs)} pairs are called different",
        f"medians of the recordings: {min(middles):.3f} to {max(middles):.3f} ms",
    ]


def _assumed_spread(one: Sequence[float], two: Sequence[float]) -> float:
    """Return what `ringprof compare` assumes of the ratio of two recordings of one session."""
    return math.hypot(SAME_SESSION.share_of(median(one)), SAME_SESSION.share_of(median(two)))


if __name__ == "__main__":
    sys.exit(main())
