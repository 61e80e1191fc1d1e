"""Helpers that run ``ringprof record`` as a process, small enough for two cores, and strategies of a user for it."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

from ringprof import cli
from tests.paths import ROOT

HANGS_S = 600
"""Seconds after which a process counts as hung: far more than it needs on a machine with twenty others."""
SMALL = ["--heads", "2", "--head-dim", "16", "--seq", "512", "--device", "cpu"]
RINGPROF = [sys.executable, "-m", "ringprof"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

STRATEGIES = '''
import os
import signal
import time

import torch
import torch.distributed as dist

from ringprof.strategies.base import Strategy
from ringprof.strategies.masks.layouts import LAYOUTS
from ringprof.strategies.algorithms.zigzag import Zigzag


class Wrong(Zigzag):
    """Rank 1's output is 5 % too large."""

    def forward(self, blocks, q, k, v):
        out, lse = super().forward(blocks, q, k, v)
        return (out * 1.05 if self.comm.rank == 1 else out), lse


class NotANumber(Zigzag):
    """One element of rank 1's dv is not a number."""

    def backward(self, blocks, rows, q, k, v):
        dq, dk, dv = super().backward(blocks, rows, q, k, v)
        if self.comm.rank == 1:
            dv[0, 0, 0, 0] = float("nan")
        return dq, dk, dv


class LongOnly(Zigzag):
    """Leaves out a block where a rank holds more tokens than the check before timing gives it."""

    def block(self, blocks, kv_rank, q):
        last = (self.comm.rank - kv_rank) % self.comm.size == self.comm.size - 1
        return None if q.shape[1] > 64 and last else super().block(blocks, kv_rank, q)


class SecondCall(Zigzag):
    """Right in the first call, then nothing forward and no numbers backward: a stale buffer, a missing wait."""

    calls = 0

    def forward(self, blocks, q, k, v):
        self.calls += 1
        out, lse = super().forward(blocks, q, k, v)
        return (out * 0 if self.calls > 1 else out), lse

    def backward(self, blocks, rows, q, k, v):
        gradients = super().backward(blocks, rows, q, k, v)
        return tuple(x * float("nan") for x in gradients) if self.calls > 1 else gradients


class Leaves(Zigzag):
    """All ranks end well, they say, in the midst of their work."""

    def forward(self, blocks, q, k, v):
        os._exit(0)


class Slow(Zigzag):
    """Half a second an iteration, to be interrupted."""

    def forward(self, blocks, q, k, v):
        time.sleep(0.5)
        return super().forward(blocks, q, k, v)


class Later(Zigzag):
    """Something happens on one rank in one call: the first verifies, the second warms up, the third is timed."""

    def __init__(
        self, context, *, what: str = "", call: int = 3, on: int = 1, deterministic: bool = False
    ):
        super().__init__(context, deterministic=deterministic)
        self.parameters |= {"what": what, "call": call, "on": on}
        self.calls = 0

    def forward(self, blocks, q, k, v):
        self.calls += 1
        if self.comm.rank == self.parameters["on"] and self.calls == self.parameters["call"]:
            getattr(self, self.parameters["what"])()
        return super().forward(blocks, q, k, v)

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self):
        os._exit(0)

    def leave_badly(self):
        os._exit(7)

    def hang(self):
        time.sleep(1000)

    def never_let_go(self):
        """Native code that keeps the interpreter's lock: no other thread of this process runs again."""
        import re

        re.match("(a+)+$", "a" * 60 + "b")

    def out_of_memory(self):
        import torch

        torch.empty(1 << 50)

    def gpu_out_of_memory(self):
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 GiB")


class Past(Strategy):
    """Right, and past ringprof's kernels and channels: what it computes and sends is not counted."""

    layout = LAYOUTS["contiguous"]

    def whole(self, x):
        pieces = [torch.empty_like(x) for _ in range(self.comm.size)]
        dist.all_gather(pieces, x.contiguous())
        return torch.cat(pieces, dim=1)

    def weights(self, blocks, q, k):
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * blocks.scale
        if blocks.causal:
            later = torch.arange(k.shape[1]) > self.positions(k.shape[1])[:, None]
            scores = scores.masked_fill(later, float("-inf"))
        return scores.softmax(-1), scores.logsumexp(-1)

    def forward(self, blocks, q, k, v):
        weights, lse = self.weights(blocks, q.float(), self.whole(k.float()))
        return torch.einsum("bhqk,bkhd->bqhd", weights, self.whole(v.float())).to(q.dtype), lse

    def backward(self, blocks, rows, q, k, v):
        wide_k, wide_v, dout = self.whole(k.float()), self.whole(v.float()), rows.dout.float()
        weights, _ = self.weights(blocks, q.float(), wide_k)
        dweights = torch.einsum("bqhd,bkhd->bhqk", dout, wide_v)
        dscores = weights * (dweights - (weights * dweights).sum(-1, keepdim=True)) * blocks.scale
        sums = torch.stack([
            torch.einsum("bhqk,bqhd->bkhd", dscores, q.float()), torch.einsum("bhqk,bqhd->bkhd", weights, dout)
        ])
        dist.all_reduce(sums)
        dk, dv = sums[:, :, self.comm.rank * k.shape[1]:][:, :, : k.shape[1]]
        return torch.einsum("bhqk,bkhd->bqhd", dscores, wide_k).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class Starred(Zigzag):
    def __init__(self, context, **params):
        super().__init__(context)


def not_a_class():
    pass
'''


def environment(**more: str) -> dict[str, str]:
    """Return environment variables for a process: this one's without a launcher's, and ``more``."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in launcher and not name.startswith("SLURM_")}
    # The tests may find packages by PYTHONPATH only.
    path = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    return {**env, "PYTHONPATH": path, **more}


def run(
    arguments: list[str], folder: Path, program: list[str] = RINGPROF, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run ``program`` with ``arguments`` in ``folder`` to its end."""
    return subprocess.run(
        [*program, *arguments], cwd=folder, env=environment(**env), capture_output=True, text=True, timeout=HANGS_S
    )


def report_of(folder: Path, *options: str) -> str:
    """Return the report on the newest run below ``folder``, printed by this process: quicker than a new one."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert cli.run(["report", str(folder / "traces/run.json"), "--width", "200", *options]) == 0
    return printed.getvalue()


def run_and_disturb(
    arguments: list[str],
    folder: Path,
    disturb: Callable[[subprocess.Popen[str]], None],
    program: list[str] = RINGPROF,
) -> tuple[int, str]:
    """Start ``program``, call ``disturb`` while iterations are timed, and return the exit code and stderr.

    Fails if any process of it survives.
    """
    output = folder / "stderr.txt"
    with output.open("w") as stderr:
        process = subprocess.Popen(
            [*program, *arguments], cwd=folder, env=environment(TMPDIR=str(folder)), stdout=subprocess.DEVNULL,
            stderr=stderr, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            wait_until(lambda: "iterations" in output.read_text())
            time.sleep(0.3)
            disturb(process)
            process.wait(HANGS_S)
            wait_until(lambda: not started_in(folder))
            return process.returncode, output.read_text()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def started_in(folder: Path) -> list[int]:
    """Return the ids of the living processes whose working directory is ``folder``."""
    pids = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and Path(os.readlink(entry / "cwd")) == folder.resolve() and _alive(entry):
                pids.append(int(entry.name))
        except OSError:
            continue
    return pids


def rank_process(folder: Path, rank: int) -> int:
    """Return the process id of one rank that runs in ``folder``."""
    for pid in started_in(folder):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in variables:
            return pid
    raise AssertionError(f"no rank {rank} runs in {folder}")


def wait_until(condition: Callable[[], bool], seconds: float = HANGS_S) -> None:
    """Wait until the condition is true. Raises TimeoutError after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.05)


def _alive(entry: Path) -> bool:
    return entry.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "Z"
