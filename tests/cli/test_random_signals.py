"""Random signals, SIGKILL and SIGQUIT among them, to a command's leader, to one of its processes or to its whole group.

`tests.cli.test_signals` holds the promises for SIGINT, SIGTERM and SIGHUP; here the process may also get no chance to
clean up. Then no process stays, no half-written file has a result's name, and the next command of the kind removes the
rest.
"""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.test_signals import (
    COMMANDS,
    OTHER,
    RECORD,
    RUN,
    WITHIN_S,
    WORKLOAD,
    half_written,
    handles_signals,
    until,
)
from tests.cli.test_signals import start as start_program
from tests.paths import ROOT
from tests.recording.command import HANGS_S, TORCHRUN
from tests.scale.runs import write_ring
from tests.scale.test_command import running

CAPTURED = """
import torch
import torch.distributed as dist

import ringprof

dist.init_process_group("gloo")
for number in range(3):
    with ringprof.capture(f"captured/{number}"):
        x = torch.ones(64, 64)
        dist.all_reduce(x @ x)
dist.destroy_process_group()
"""
CHECK = next(arguments for arguments in COMMANDS["recording"] if arguments[0] == "check")
PROGRAMS = {
    "bench": ["bench", "--strategies", "zigzag", *RECORD, "-o", "there/sweep.json"],
    "record": ["record", "--strategy", "zigzag", *RECORD, "-o", "here/run.json"],
    "check": CHECK,
    "capture": [],
    "report": ["report", RUN, "--show", "steps", "--format", "json", "-o", "report.json", "--html", "page.html"],
    "report of many ranks": ["report", "many", "--jobs", "2", "--format", "json", "-o", "report.json"],
    "export": ["export", RUN, "-o", "out.json.gz"],
    "compare": ["compare", RUN, OTHER, "--html", "page.html"],
    "predict": ["predict", *WORKLOAD, "--strategy", "burst", "-o", "predicted"],
    "advise": ["advise", *WORKLOAD, "--html", "page.html"],
    "calibrate": ["calibrate", RUN, "-o", "machine.json"],
}
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SIGNALS = (*HANDLED, signal.SIGQUIT, signal.SIGKILL)
TARGETS = ("leader", "rank", "group")
FAILED = 3
"""Exit code of a recording that lost a rank."""
UNREAD = 2
"""Exit code of a report that lost a process that read traces."""
RECORDING = ("bench", "record", "check")
COUNT, SEED = int(os.environ.get("RINGPROF_RANDOM_SIGNALS", "100")), int(os.environ.get("RINGPROF_SEED", "29"))
GOES_ON_S = 180.0
"""Time for a command that lost a rank to end, or to go on with what it can do without it."""
OUTLIVES_S = 60.0
"""Time for ranks to see that their leader was killed: one that still imports torch looks when that is done."""
KEPT_LOGS = re.compile(r"ringprof-ranks-[0-9a-f]{16}")
CALLERS_OWN = ("KeyboardInterrupt", "SignalException", "ChildFailedError")
"""Exceptions that a user's program under torchrun, and torchrun itself, raise for a signal."""


@dataclass
class Strike:
    """One signal: which, to whom, and how many seconds after the start."""

    number: signal.Signals
    target: str
    after_s: float

    def __str__(self) -> str:
        return f"{self.number.name} to the {self.target} after {self.after_s:.3f} s"

    @property
    def cleans_up(self) -> bool:
        """Whether the command can still act after it."""
        return self.number in HANDLED or self.target == "rank"

    def send(self, process: subprocess.Popen[str], scratch: Path, chance: random.Random) -> None:
        ranks = sorted(set(running(scratch)) - {process.pid})
        if self.target == "rank" and not ranks:
            self.target = "leader"
        pid = chance.choice(ranks) if self.target == "rank" else process.pid
        try:
            (os.killpg if self.target == "group" else os.kill)(pid, self.number)
        except ProcessLookupError:
            return  # it has just ended


def start(command: str, folder: Path) -> subprocess.Popen[str]:
    if command != "capture":
        return start_program(PROGRAMS[command], folder)
    folder.mkdir(exist_ok=True)
    (folder / "captured.py").write_text(CAPTURED)
    return start_program(["captured.py"], folder, TORCHRUN)


def whole_code(command: str) -> int:
    """Exit code of the undisturbed command: the checked function is wrong."""
    return int(command == "check")


def allowed_codes(command: str, strike: Strike) -> set[int]:
    """Exit codes that the documentation allows after a signal."""
    number = int(strike.number)
    if command == "capture":
        return {0, 1, -number, 128 + number}  # torchrun's own
    if strike.target == "rank":
        return {whole_code(command), FAILED if command in RECORDING else UNREAD}
    return {whole_code(command), -number, 128 + number, 130}


def bad_text(command: str, errors: str) -> str:
    """Return what the command should not have written on stderr; empty where there is nothing."""
    if "Exception ignored" in errors:
        return errors
    if command != "capture":
        sentences = [line for line in errors.splitlines() if line.startswith("ringprof: ")]
        return errors if "Traceback" in errors or len(sentences) > 1 else ""
    # Of a traceback, the innermost frame and the error's line.
    for block in errors.split("Traceback (most recent call last):")[1:]:
        frames = re.findall(r'File "([^"]+)"', block)
        if frames and str(ROOT / "ringprof") in frames[-1] and not any(word in block for word in CALLERS_OWN):
            return block
    return ""


def left_over(folder: Path, strike: Strike, errors: str, before: set[Path]) -> list[str]:
    """Half-written files, and scratch that no later command would remove."""
    rows = [path.read_text() for path in folder.glob("there/sweep.json")]  # a row that failed names its logs, too
    kept = set(KEPT_LOGS.findall("".join([errors, *rows])))
    for name in kept:
        shutil.rmtree(folder / "scratch" / name, ignore_errors=True)
    wrong = half_written(folder)
    if not strike.cleans_up:
        return [name for name in wrong if not any(part.startswith(".") for part in Path(name).parts)]
    return wrong + [path.name for path in set((folder / "scratch").glob("ringprof-*")) - before]


def fault_of(command: str, folder: Path, strike: Strike, chance: random.Random) -> str:
    """Start the command, send the signal; what is wrong with how it ends, or nothing."""
    scratch = folder / "scratch"
    before = set(scratch.glob("ringprof-*"))
    process = start(command, folder)
    assert until(lambda: process.poll() is not None or handles_signals(process.pid), HANGS_S)
    time.sleep(strike.after_s)
    if process.poll() is None:
        strike.send(process, scratch, chance)
    limit_s = WITHIN_S if strike.target != "rank" and command != "capture" else GOES_ON_S
    try:
        # The ranks of a killed torchrun are the user's program: they keep the pipe, and run to their end.
        _, errors = process.communicate(timeout=limit_s if strike.cleans_up else OUTLIVES_S)
    except subprocess.TimeoutExpired:
        for pid in (process.pid, *running(scratch)):
            os.kill(pid, signal.SIGKILL)
        process.communicate()
        return "" if command == "capture" and not strike.cleans_up else "runs on"
    if not until(lambda: not running(scratch), WITHIN_S if strike.cleans_up else OUTLIVES_S):
        return f"leaves processes {running(scratch)}"
    if text := bad_text(command, errors):
        return text
    if process.returncode not in allowed_codes(command, strike):
        return f"exits with {process.returncode}: {errors}"
    left = left_over(folder, strike, errors, before)
    return f"leaves {left}: {errors}" if left else ""


def clear(folder: Path) -> None:
    """Remove results, and what a killed command left beside them, which the documentation leaves to the user."""
    for path in folder.rglob("*"):
        inside = path.relative_to(folder).parts
        if path.is_file() and inside[0] not in ("scratch", "many") and not any(".partial" in part for part in inside):
            path.unlink()


def remains(folder: Path) -> list[str]:
    """Scratch folders and half-written recordings that are there when a later command has run to its end.

    An empty folder goes only after an hour (`tests.test_scratch`).
    """
    folders = [*(folder / "scratch").glob("ringprof-*"), *folder.rglob(".*.partial")]
    return [str(path) for path in folders if any(path.iterdir())]


@pytest.fixture
def no_core_files() -> Iterator[None]:
    """SIGQUIT writes none."""
    limits = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_CORE, limits)


@pytest.mark.long
@pytest.mark.timeout(14400)
@pytest.mark.usefixtures("no_core_files")
@pytest.mark.parametrize("command", PROGRAMS)
def test_random_signals_end_commands_cleanly(command: str, tmp_path: Path) -> None:
    """Set RINGPROF_RANDOM_SIGNALS for other than 100 signals per command, RINGPROF_SEED for others."""
    if command not in ("report", "report of many ranks", "export", "compare"):
        pytest.importorskip("torch")
    if command == "report of many ranks":
        (tmp_path / "many").mkdir()
        write_ring(tmp_path / "many", 72, per_host=8)
    begin = time.monotonic()
    assert ends_whole(command, tmp_path)
    clear(tmp_path)
    lasts_s, chance, faults = time.monotonic() - begin, random.Random(f"{SEED} {command}"), []
    for _ in range(COUNT):
        strike = Strike(chance.choice(SIGNALS), chance.choice(TARGETS), chance.uniform(0, lasts_s))
        if fault := fault_of(command, tmp_path, strike, chance):
            faults.append(f"{command}: {strike}: {fault}")
        print(f"{command}: {strike}: {fault or 'clean'}", flush=True)
        clear(tmp_path)
    assert ends_whole(command, tmp_path)
    faults += [f"{command} leaves for good {path}" for path in remains(tmp_path)]
    assert not faults, "\n".join(faults)


def ends_whole(command: str, folder: Path) -> bool:
    """Whether the command, undisturbed, ends as it should."""
    process = start(command, folder)
    _, errors = process.communicate()
    return process.returncode == whole_code(command) or print(errors) is not None
