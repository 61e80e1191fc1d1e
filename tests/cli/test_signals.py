"""Signals at random moments: every command ends within seconds, in good order, and no process of it stays."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT, TRACES
from tests.record.command import SMALL
from tests.scale.runs import write_ring
from tests.scale.test_command import obey_signals, running

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
IN_A_DESTRUCTOR = """
class Owned:
    def __del__(self):
        os.kill(os.getpid(), NUMBER)
Owned()
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("body", [DEAF, IN_AN_IMPORT, IN_A_DESTRUCTOR], ids=["deaf", "import", "destructor"])
def test_it_ends_even_where_the_error_is_lost(body: str, number: signal.Signals) -> None:
    program = f"NUMBER = {int(number)}\n{LOST}{textwrap.indent(body, '    ')}\ncli.run = run\ncli.main([])"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=ROOT, preexec_fn=obey_signals,
    )  # fmt: skip
    assert process.stdout is not None
    if body is DEAF:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (128 + number, "")


LOST = """
import os, time
from ringprof import cli
cli._Signals.PATIENCE_S = 0.2
def run(args):
"""

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WITHIN_S = 5.0
RUN, OTHER, LOG = (
    str(TRACES / "h200x4-zigzag-65536"),
    str(TRACES / "h200x4-burst-262144"),
    str(next((ROOT / "tests/data/logs").glob("*.txt"))),
)
RECORD = [*SMALL, "--world", "2", "--iters", "3"]
READING = {
    "report": ["report", RUN, "--steps", "--html", "page.html"],
    "compare": ["compare", RUN, OTHER],
    "export": ["export", RUN, "-o", "out.json"],
    "plot": ["plot", "breakdown", RUN, "-o", "out.png"],
    "logs": ["logs", LOG],
    "runs": ["runs", str(TRACES)],
}
RECORDING = {
    "record": ["record", "--strategy", "zigzag", *RECORD, "-o", "here/run.json"],
    "bench": ["bench", "--strategies", "zigzag,ring", *RECORD, "-o", "there/"],
}


def start(arguments: list[str], folder: Path) -> subprocess.Popen[str]:
    """A command in a folder of its own, whose temporary files lie there too."""
    (folder / "scratch").mkdir(parents=True)
    return subprocess.Popen(
        [sys.executable, "-m", "ringprof", *arguments],
        cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "scratch")}, preexec_fn=obey_signals,
    )  # fmt: skip


def heeds_signals(pid: int) -> bool:
    """Whether the process has set a handler for SIGTERM: Python itself has none."""
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


def disturb(arguments: list[str], folder: Path, number: signal.Signals, after_s: float) -> str:
    """Send a signal so long after the command has begun; what is wrong with how it ends, or nothing."""
    process = start(arguments, folder)
    assert until(lambda: process.poll() is not None or heeds_signals(process.pid), 60)
    time.sleep(after_s)
    process.send_signal(number)
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
    # What has ended by then, or is ending, ends as it would have; Python itself makes of some SIGINTs its own end.
    # A recording that is interrupted says so by 130, whoever wished it.
    if process.returncode not in (0, 130, 128 + number, -signal.SIGINT if number == signal.SIGINT else 0):
        return f"exits with {process.returncode}: {errors}"
    left = [path.name for path in (folder / "scratch").glob("ringprof-*") if "logs kept in" not in errors]
    return f"leaves {left}" if left else ""


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    write_ring(folder, 72, per_host=8)
    return folder


def moments(commands: list[list[str]], folder: Path, count: int) -> Iterator[tuple[list[str], signal.Signals, float]]:
    """Random commands, signals and moments, as far apart as the command takes when nothing disturbs it."""
    chance, lasts = random.Random(16), []
    for place, arguments in enumerate(commands):
        begin = time.monotonic()
        process = start(arguments, folder / f"whole{place}")
        _, errors = process.communicate()
        assert process.returncode == 0, errors
        lasts.append(time.monotonic() - begin)
    for _ in range(count):
        place = chance.randrange(len(commands))
        yield commands[place], chance.choice(ENDING), chance.uniform(0, lasts[place])


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("group", ["reading", "many ranks", "recording"])
def test_a_signal_at_any_moment_ends_a_command(group: str, many: Path, tmp_path: Path) -> None:
    if group == "recording":
        pytest.importorskip("torch")
    commands = {
        "reading": [*READING.values()],
        "many ranks": [["report", str(many), "--jobs", "2", "--steps"]],
        "recording": [*RECORDING.values()],
    }[group]
    wrong = []
    for place, (arguments, number, after_s) in enumerate(moments(commands, tmp_path, 200)):
        found = disturb(arguments, tmp_path / str(place), number, after_s)
        if found:
            wrong.append(f"{arguments[0]}, {number.name} after {after_s:.3f} s: {found}")
    assert not wrong, "\n".join(wrong)
