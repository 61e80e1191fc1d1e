"""Incomplete runs: who owns them, and that only those of killed processes are removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ringprof.common import scratch
from ringprof.common.scratch import OWNER_FILE, has_token, is_abandoned, lock, remove_abandoned, unlock
from tests.recording.command import environment

HOLD = "import sys, pathlib; from ringprof.common.scratch import lock; "
HOLD += "lock(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"


def partial(parent: Path, name: str) -> Path:
    folder = parent / f".{name}.partial"
    folder.mkdir()
    return folder


def holder(folder: Path) -> subprocess.Popen[str]:
    """Start another process that holds the lock of a run's folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_named_pipe_as_owner_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(partial(tmp_path, "strange") / OWNER_FILE)
    assert remove_abandoned(tmp_path) == []


def test_token_identifies_a_folder(tmp_path: Path) -> None:
    folder = partial(tmp_path, "mine")
    token = lock(folder)
    assert has_token(folder, token) and not has_token(folder, token[::-1])
    assert not has_token(tmp_path / "elsewhere", token)
    unlock(folder)
    assert not has_token(folder, token) and list(folder.iterdir()) == []


def test_only_folders_of_dead_processes_are_removed(tmp_path: Path) -> None:
    mine, theirs, foreign, other = (partial(tmp_path, name) for name in ("mine", "theirs", "foreign", "other"))
    lock(mine)
    with holder(theirs) as process:
        # The lock was taken on another machine or before this one's boot: its owner cannot be checked here.
        (other / OWNER_FILE).write_text('{"token": "t", "machine": "elsewhere 1"}')
        assert remove_abandoned(tmp_path) == [] and not is_abandoned(theirs)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert is_abandoned(theirs) and remove_abandoned(tmp_path) == [theirs.name]
    assert sorted(tmp_path.iterdir()) == sorted([mine, foreign, other])
    unlock(mine)


def test_folder_removed_concurrently_is_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial(tmp_path, "mine")

    def vanished(folder: Path) -> bool:
        folder.rmdir()
        raise FileNotFoundError(folder)

    monkeypatch.setattr(scratch, "is_abandoned", vanished)
    assert remove_abandoned(tmp_path) == []


def test_invalid_owner_files_are_ignored(tmp_path: Path) -> None:
    folder = partial(tmp_path, "odd")
    for text in ("", "[]", "{", "x" * 10_000):
        (folder / OWNER_FILE).write_text(text)
        assert not has_token(folder, "") and not is_abandoned(folder)
