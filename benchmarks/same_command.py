"""Record one command again and again, each time in new processes: how far apart are runs between which nothing changed?

    python benchmarks/same_command.py --strategy zigzag --seq 16384 --heads 16 --out same.json
    python benchmarks/same_command.py --strategy burst --seq 1024 --heads 2 --head-dim 64 --seconds 60

Each recording is what `ringprof record --no-verify` times: ranks, process group, kernels and buffers of its
own, warm-up, then iterations without the profiler. Its ranks are forked from this process, which has loaded
torch and has not touched a GPU, so that a recording takes seconds. At the end: of how many neighbouring pairs
`ringprof compare` would call the second slower or faster, which should be one in twenty at most.
tests/data/same_command holds such files.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from datetime import datetime, timezone
from glob import glob
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ringprof.analysis.findings.uncertainty import differ
from ringprof.record.launcher import RankPlace
from ringprof.record.measure import Problem, measure
from ringprof.record.progress import SilentReporter
from ringprof.record.world_group import world_group
from ringprof.run import Workload
from ringprof.strategies import create

PATIENCE_S = 90
"""For one recording."""


def main() -> int:
    options = _options()
    found: dict[str, Any] = {"command": _command(options), "recordings": []}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(2 * options.pairs):
            if time.monotonic() - begun > options.seconds:
                break
            found["recordings"].append(_record(options, Path(folder) / str(number)))
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


def _record(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One recording: its ranks forked, and waited for."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    created = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    sys.stdout.flush()
    ranks = [_forked(options, folder, rank, port) for rank in range(options.world)]
    failed = False
    for process in ranks:
        failed |= os.waitpid(process, 0)[1] != 0
    if failed:
        raise SystemExit("a rank failed: see above")
    times = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(options.world)]
    return {"created": created, "iterations_ns": times}


def _forked(options: argparse.Namespace, folder: Path, rank: int, port: int) -> int:
    process = os.fork()
    if process:
        return process
    signal.alarm(PATIENCE_S)
    try:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
        os.environ.update(where, LOCAL_RANK=str(rank), WORLD_SIZE=str(options.world))
        (folder / f"{rank}.json").write_text(json.dumps(_timed(options, rank)))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _timed(options: argparse.Namespace, rank: int) -> list[int]:
    """Nanoseconds of every iteration of this rank."""
    workload = Workload(
        batch=1, seq=options.seq, heads=options.heads, kv_heads=options.heads, head_dim=options.head_dim, causal=True,
        dtype="bf16", backward=True,
    )  # fmt: skip
    if options.device == "cpu":
        torch.set_num_threads(1)
    place = RankPlace(rank, options.world, rank, options.world)
    with world_group(place, options.device, PATIENCE_S) as device:
        problem = Problem.of(create(options.strategy, hops=options.hops), workload, device)
        return measure(problem, device, options.warmup, options.iters, SilentReporter()).iterations_ns


def _verdict(found: dict[str, Any]) -> list[str]:
    levels = [[max(times) / 1e6 for times in zip(*one["iterations_ns"], strict=True)] for one in found["recordings"]]
    pairs = list(zip(levels[::2], levels[1::2], strict=False))
    middles = [median(times) for times in levels] or [0.0]
    called = sum(differ([one], [two]) for one, two in pairs)
    return [
        f"{called} of {len(pairs)} pairs are called different",
        f"medians of the recordings: {min(middles):.3f} to {max(middles):.3f} ms",
    ]


if __name__ == "__main__":
    sys.exit(main())
