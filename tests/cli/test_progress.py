"""Progress of what takes seconds: lines in a log, a bar on a terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import threading

import pytest

from ringprof import cli
from ringprof.cli.progress import LineProgress, show_progress
from tests.paths import ROOT
from tests.recording.command import HANGS_S


class Log(io.StringIO):
    """A stderr that is no terminal, and counts its lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = threading.Semaphore(0)

    def write(self, text: str) -> int:
        length = super().write(text)
        for _ in range(text.count("\n")):
            self.lines.release()
        return length

    def wait(self) -> None:
        assert self.lines.acquire(timeout=HANGS_S)


def test_log_gets_lines_with_the_current_step(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    monkeypatch.setattr(sys, "stderr", log)
    monkeypatch.setenv("RINGPROF_PROGRESS_S", "0.01")
    with show_progress("loading") as notify:
        log.wait()
        notify("ranks", 3, 64)
        # The line that was being printed may be of the step before.
        log.wait()
        log.wait()
    lines = log.getvalue().splitlines()
    assert re.fullmatch(r"loading: \d+ s so far", lines[0])
    assert re.fullmatch(r"ranks: 3 of 64, \d+ s so far", lines[-1])


@pytest.mark.parametrize("seconds", ["3600", "not a number", "0", "-1", "nan", "inf"])
def test_short_work_prints_nothing(
    seconds: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RINGPROF_PROGRESS_S", seconds)
    threads = threading.active_count()
    with show_progress("loading") as notify:
        notify("ranks", 1, 2)
    assert capsys.readouterr().err == "" and threading.active_count() == threads


def test_error_ends_the_progress() -> None:
    threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt), show_progress("loading"):
        raise KeyboardInterrupt
    assert threading.active_count() == threads


def test_long_phase_of_a_recording_gets_lines_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for seconds, expected in (("1e-9", "timing: 3\ntiming: 1 of 3\ntiming: 2 of 3\n"), ("3600", "timing: 3\n")):
        monkeypatch.setenv("RINGPROF_PROGRESS_S", seconds)
        progress = LineProgress()
        progress.start("timing", 3)
        for _ in range(3):
            progress.advance()
        assert capsys.readouterr().err == expected


PROGRAM = """
import sys, time
from ringprof.cli import progress
progress._BAR_AFTER_S = 0.0
with progress.show_progress("loading") as notify:
    notify("ranks", 3, 64)
    sys.stdin.read(1)  # until the test has seen the bar
print("done")
"""


def test_terminal_shows_a_bar() -> None:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=slave, cwd=ROOT,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    )  # fmt: skip
    os.close(slave)
    shown = b""
    while b"3/64" not in shown:
        shown += os.read(master, 4096)
    assert b"ranks" in shown
    assert process.communicate(b"x", timeout=HANGS_S)[0] == b"done\n"
    os.close(master)


LINE = r"[a-z ]+: (\d+ of \d+, )?\d+ s so far"


@pytest.mark.parametrize(
    "arguments",
    [["predict", "--replay", "traces/h200x4-zigzag-65536", "--hops", "copy"],
     ["predict", "--strategy", "zigzag", "--seq", "64k", "--gpus-per-node", "2", "--machine", "h200"],
     ["advise", "--strategy", "zigzag", "--seq", "64k", "--gpus-per-node", "2", "--machine", "h200"],
     ["advise", "--seq", "64k", "--gpus-per-node", "64"], ["report", "traces/h200x4-zigzag-65536"],
     pytest.param(
         ["calibrate", "--rates", "--device", "cpu", "--seq", "16", "--heads", "1", "--head-dim", "8"],
         marks=pytest.mark.processes,
     )],
    ids=lambda arguments: arguments[0],
)  # fmt: skip
def test_every_slow_command_says_in_a_log_how_far_it_is(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("RINGPROF_PROGRESS_S", "0.0005")
    assert cli.run(arguments) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("ringprof: no --machine")]
    assert lines and all(re.fullmatch(LINE, line) for line in lines)


def test_kernels_says_in_a_log_how_far_it_is() -> None:
    """Check it in a process of its own: once torch is imported, it is done before a line is due."""
    done = subprocess.run(
        [sys.executable, "-m", "ringprof", "kernels"], cwd=ROOT, env={**os.environ, "RINGPROF_PROGRESS_S": "0.0005"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = done.stderr.splitlines()
    assert lines and all(re.fullmatch(LINE, line) for line in lines)
