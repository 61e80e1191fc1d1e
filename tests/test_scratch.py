"""Scratch folders are removed when their process ends in any way, or by the next process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringprof.common.scratch import UNLOCKED_S

MAKE = "from ringprof.common.scratch import scratch_folder; (scratch_folder('trace') / 'rank0.json.gz').touch(); "


def run(program: str, folder: Path) -> int:
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=False).returncode


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("raise ValueError", 1),
        ("from ringprof.recording.shutdown import _exit_now; _exit_now(3)", 3),
    ],
)
def test_scratch_folder_is_removed_with_its_process(tmp_path: Path, end: str, code: int) -> None:
    if "record" in end:
        pytest.importorskip("torch")
    assert run(MAKE + end, tmp_path) == code
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("killed_at", ["os.open", "os.write"])
def test_scratch_folder_without_owner_is_removed_after_an_hour(tmp_path: Path, killed_at: str) -> None:
    """Kill the process when it opens or writes its owner file."""
    kill = "import os, signal, tempfile, ringprof.common.scratch; tempfile.gettempdir(); "
    kill += f"{killed_at} = lambda *_: os.kill(os.getpid(), signal.SIGKILL); "
    assert run(kill + MAKE, tmp_path) == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert [path.stat().st_size for path in left.iterdir()] == ([] if killed_at == "os.open" else [0])
    # A new folder may be locked at any moment; a folder with files may contain logs that were kept.
    kept = tmp_path / "ringprof-trace-kept"
    kept.mkdir()
    (kept / "rank0.log").write_text("why")
    hours_ago = time.time() - 2 * UNLOCKED_S
    os.utime(kept, (hours_ago, hours_ago))
    assert run(MAKE, tmp_path) == 0
    assert sorted(tmp_path.iterdir()) == sorted([left, kept])
    os.utime(left, (hours_ago, hours_ago))
    assert run(MAKE, tmp_path) == 0
    assert list(tmp_path.iterdir()) == [kept]


def test_scratch_folder_of_a_killed_process_is_removed_by_the_next(tmp_path: Path) -> None:
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert run(MAKE + kill, tmp_path) == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    living = subprocess.Popen(
        [sys.executable, "-c", MAKE + "print(flush=True); input()"],
        env={**os.environ, "TMPDIR": str(tmp_path)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert living.stdout is not None and living.stdout.readline() == b"\n"
    # The folder of a living process stays while other processes start and end.
    (other,) = tmp_path.iterdir()
    assert other != left and run(MAKE, tmp_path) == 0
    assert list(tmp_path.iterdir()) == [other]
    living.communicate(b"\n")
    assert list(tmp_path.iterdir()) == []
