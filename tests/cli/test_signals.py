"""Signals at random moments: every command ends cleanly within seconds, and leaves no process."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ringprof import cli
from tests.paths import ROOT, TRACES
from tests.recording.command import RINGPROF, SMALL
from tests.scale.runs import write_ring
from tests.scale.test_command import obey_signals, running

LOST = """
import os, signal, time
from ringprof import cli
cli._Signals.PATIENCE_S, cli._Signals.AGAIN_S = PATIENCE, 0.01
def run(args):
"""
DEAF = """
while True:
    try:
        print("begun", flush=True)
        time.sleep(600)
    except BaseException:
        pass
"""
IN_AN_IMPORT = """
try:
    os.kill(os.getpid(), NUMBER)
except BaseException:
    raise ImportError("a library's word for it")
"""
DROPPED = """
try:
    os.kill(os.getpid(), NUMBER)
except BaseException:
    pass  # as C code does that looks for something optional
time.sleep(600)
"""
IN_A_DESTRUCTOR = """
class Owned:
    def __del__(self):
        os.kill(os.getpid(), NUMBER)
Owned()
time.sleep(600)
"""
WHILE_CLEANING = """
class Folder:
    def __enter__(self):
        return self
    def __exit__(self, *_):
        time.sleep(0.2)
        print("left", flush=True)
try:
    with Folder():
        try:
            os.kill(os.getpid(), NUMBER)
        finally:
            time.sleep(0.2)
            print("cleaned", flush=True)
except BaseException:
    try:
        raise ValueError("in other words") from None
    finally:
        time.sleep(0.2)
        print("told", flush=True)
"""

AFTER_A_RECORDING = """
ignore = cli._Signals.ignore
def ignore_after_a_repetition(signals):
    cli._Signals.ignore = ignore
    signal.raise_signal(signal.SIGALRM)
    ignore(signals)
try:
    os.kill(os.getpid(), NUMBER)
except BaseException:
    cli._Signals.ignore = ignore_after_a_repetition
    return cli.INTERRUPTED
"""


def lost(body: str, number: signal.Signals, patience_s: float) -> subprocess.Popen[str]:
    """Start a command that loses the exception of a signal in the way of ``body``."""
    begin = LOST.replace("PATIENCE,", f"{patience_s},")
    program = f"NUMBER = {int(number)}\n{begin}{textwrap.indent(body, '    ')}\ncli.run = run\ncli.main([])"
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=ROOT, preexec_fn=obey_signals,
    )  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("body", [IN_AN_IMPORT, DROPPED, IN_A_DESTRUCTOR], ids=["import", "dropped", "destructor"])
def test_swallowed_interrupt_is_raised_again(body: str, number: signal.Signals) -> None:
    process = lost(body, number, patience_s=600)
    assert (*process.communicate(), process.returncode) == ("", "", 128 + number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_cleanup_is_not_interrupted(number: signal.Signals) -> None:
    process = lost(WHILE_CLEANING, number, patience_s=600)
    assert (*process.communicate(), process.returncode) == ("cleaned\nleft\ntold\n", "", 128 + number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_repeated_before_exit_keeps_the_exit_code(number: signal.Signals) -> None:
    process = lost(AFTER_A_RECORDING, number, patience_s=600)
    assert (*process.communicate(), process.returncode) == ("", "", cli.INTERRUPTED)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_a_process_that_swallows_every_interrupt(number: signal.Signals) -> None:
    process = lost(DEAF, number, patience_s=0.2)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    process.send_signal(number)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (128 + number, "")


ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WITHIN_S = 5.0
MOMENTS, SEED = int(os.environ.get("RINGPROF_SIGNALS", "200")), int(os.environ.get("RINGPROF_SEED", "16"))
RUN, OTHER, LOG = (
    str(TRACES / "h200x4-zigzag-65536"),
    str(TRACES / "h200x4-burst-262144"),
    str(next((ROOT / "tests/data/logs").glob("*.txt"))),
)
RECORD = [*SMALL, "--world", "2", "--iters", "3"]
WORKLOAD = ["--seq", "128k", "--heads", "40", "--nodes", "1", "--gpus-per-node", "4", "--machine", "h100"]
CHECKED = """
import torch

def dense(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
"""
"""Attention that is wrong, as it ignores the other ranks' tokens; checking it takes as long as a right one."""
COMMANDS = {
    "reading": [
        ["report", RUN, "--show", "steps", "--html", "page.html"],
        ["report", RUN, "--format", "json", "-o", "report.json"],
        ["compare", RUN, OTHER, "--html", "page.html"],
        ["export", RUN, "-o", "out.json.gz"],
        ["plot", "breakdown", RUN, "-o", "out.png"],
        ["report", LOG, "--show", "rows", "--format", "json", "-o", "out.json"],
        ["report", str(TRACES), "--csv", "runs"],
        ["advise", "--seq", "64k", "--documents", "lognormal:mean=8192,sigma=1.2,seed=7", "--window-size", "4096"],
        ["kernels", "--format", "json", "-o", "out.json"],
        ["strategies", "burst"],
    ],
    "prediction": [
        ["predict", *WORKLOAD, "--strategy", "burst", "-o", "predicted"],
        ["predict", "--like", RUN, "--machine", "h200", "-o", "predicted"],
        ["advise", *WORKLOAD, "--html", "page.html"],
        ["predict", "--replay", RUN, "--hops", "copy"],
        ["calibrate", RUN, "-o", "machine.json"],
    ],
    "recording": [
        ["record", "--strategy", "zigzag", *RECORD, "-o", "here/run.json"],
        ["bench", "--strategies", "zigzag,ring", *RECORD, "-o", "there/"],
        ["check", "attention:dense", "--layout", "contiguous", "--device", "cpu", "--world", "2", "--heads", "2"],
        ["calibrate", "--rates", "--device", "cpu", "--seq", "64", "--heads", "2", "--head-dim", "16"],
    ],
}


def start(arguments: list[str], folder: Path, program: list[str] = RINGPROF) -> subprocess.Popen[str]:
    """Start a command in its own folder, which also contains its temporary files."""
    (folder / "scratch").mkdir(parents=True, exist_ok=True)
    (folder / "attention.py").write_text(CHECKED)
    return subprocess.Popen(
        [*program, *arguments],
        cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "scratch")}, preexec_fn=obey_signals,
        start_new_session=True,
    )  # fmt: skip


def ends_with(arguments: list[str]) -> int:
    """Return the exit code of a command that no signal interrupts."""
    return int(arguments[0] == "check")


def handles_signals(pid: int) -> bool:
    """Return whether the process has installed a handler for SIGTERM; Python itself has none."""
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = (int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def until(holds: Callable[[], bool], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def half_written(folder: Path) -> list[str]:
    """List the incomplete files of a command, and its temporary files next to them."""
    wrong = []
    for path in (path for path in folder.rglob("*") if path.is_file() and folder / "scratch" not in path.parents):
        data = path.read_bytes()
        try:
            data = gzip.decompress(data) if path.suffix == ".gz" else data
            complete = {
                ".json": lambda text: bool(json.loads(text)),
                ".html": lambda text: text.rstrip().endswith(b"</html>"),
                ".png": lambda text: text.endswith(b"IEND\xaeB`\x82"),
            }.get(path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix, bool)(data)
        except (ValueError, EOFError, zlib.error):
            complete = False
        if path.name.startswith(".ringprof-") or not complete:
            wrong.append(str(path.relative_to(folder)))
    return wrong


def disturb(arguments: list[str], folder: Path, number: signal.Signals, after_s: float, *, group: bool) -> str:
    """Send a signal ``after_s`` seconds after the start of a command; returns what is wrong with its end, or nothing.

    ``group`` sends the signal to its ranks as well, like a terminal's Ctrl-C.
    """
    process = start(arguments, folder)
    assert until(lambda: process.poll() is not None or handles_signals(process.pid), 60)
    time.sleep(after_s)
    if process.poll() is None:
        (os.killpg if group else os.kill)(process.pid, number)
    try:
        _, errors = process.communicate(timeout=WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return "runs on"
    if not until(lambda: not running(folder / "scratch"), WITHIN_S):
        return "leaves a process"
    if "Traceback" in errors or "Exception ignored" in errors:
        return errors
    # A command that has already ended keeps its exit code, and Python itself handles some SIGINTs (-2). An interrupted
    # recording exits with 130 after any signal.
    if process.returncode not in (ends_with(arguments), 130, 128 + number, -2 if number == signal.SIGINT else 0):
        return f"exits with {process.returncode}: {errors}"
    left = [path.name for path in (folder / "scratch").glob("ringprof-*") if "logs kept in" not in errors]
    left += half_written(folder)
    return f"leaves {left}" if left else ""


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    write_ring(folder, 72, per_host=8)
    return folder


def moments(commands: list[list[str]], folder: Path, count: int) -> Iterator[tuple[Any, ...]]:
    """Yield random commands, signals and moments within the run time of the uninterrupted command."""
    chance, lasts = random.Random(SEED), []
    for index, arguments in enumerate(commands):
        begin = time.monotonic()
        process = start(arguments, folder / f"whole{index}")
        _, errors = process.communicate()
        assert process.returncode == ends_with(arguments), errors
        lasts.append(time.monotonic() - begin)
    for _ in range(count):
        index = chance.randrange(len(commands))
        yield commands[index], chance.choice(ENDING), chance.uniform(0, lasts[index]), chance.random() < 0.5


@pytest.mark.long
@pytest.mark.timeout(14400)
@pytest.mark.parametrize("group", [*COMMANDS, "many ranks"])
def test_signal_at_any_moment_ends_a_command(group: str, many: Path, tmp_path: Path) -> None:
    """Send signals at random moments: 200 per group, or RINGPROF_SIGNALS."""
    if group in ("recording", "prediction"):
        pytest.importorskip("torch")
    commands = COMMANDS.get(group, [["report", str(many), "--jobs", "2", "--show", "steps"]])
    wrong = []
    for index, (arguments, number, after_s, to_all) in enumerate(moments(commands, tmp_path, MOMENTS)):
        problem = disturb(arguments, tmp_path / str(index), number, after_s, group=to_all)
        if problem:
            wrong.append(f"{arguments[:3]}, {number.name} {'to all ' * to_all}after {after_s:.3f} s: {problem}")
        shutil.rmtree(tmp_path / str(index))
    assert not wrong, "\n".join(wrong)
