"""Scratch folders go with the process that made them, however it ends, or with the next one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

MAKE = "from ringprof.owned_folders import scratch_folder; (scratch_folder('trace') / 'rank0.json.gz').touch(); "


def run(program: str, folder: Path) -> int:
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=False).returncode


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("raise ValueError", 1),
        ("from ringprof.record.ending.shutdown import _leave; _leave(3)", 3),
    ],
)
def test_it_goes_with_its_process(tmp_path: Path, end: str, code: int) -> None:
    if "record" in end:
        pytest.importorskip("torch")
    assert run(MAKE + end, tmp_path) == code
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_goes_with_the_next(tmp_path: Path) -> None:
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert run(MAKE + kill, tmp_path) == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    living = subprocess.Popen(
        [sys.executable, "-c", MAKE + "print(flush=True); input()"],
        env={**os.environ, "TMPDIR": str(tmp_path)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert living.stdout is not None and living.stdout.readline() == b"\n"
    # That of the living one stays while others come and go.
    (other,) = tmp_path.iterdir()
    assert other != left and run(MAKE, tmp_path) == 0
    assert list(tmp_path.iterdir()) == [other]
    living.communicate(b"\n")
    assert list(tmp_path.iterdir()) == []
