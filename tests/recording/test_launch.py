"""Start of local ranks: the folders that are left, and which processes can reach the ranks' rendezvous store."""

from __future__ import annotations

import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch", reason="recording needs torch")

from ringprof.errors import RecordError, UsageError
from ringprof.ranks import launch
from ringprof.ranks.launch import _store, run_local_ranks
from ringprof.ranks.launcher import RankInfo
from ringprof.ranks.progress import PositionReporter, SilentReporter
from tests.recording.command import HANGS_S, RINGPROF, SMALL, environment


@dataclass
class FakeTask:
    """Task whose result is its scratch folder."""

    discarded: bool = False
    job = "fake"
    request = None

    def limit_of(self, phase: str | None) -> float | None:
        return 1.0 if phase is None else None

    def run(self, rank_info: RankInfo, position: PositionReporter, scratch: Path) -> None:
        raise NotImplementedError

    def result(self, scratch: Path) -> Path:
        return scratch

    def discard(self) -> None:
        self.discarded = True


def test_local_store_listens_on_loopback_only() -> None:
    with _store() as port:
        listening = [
            connection.laddr
            for connection in psutil.Process().net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert [address.ip for address in listening if address.port == port] == ["127.0.0.1"]
        socket.create_connection(("127.0.0.1", port), 5).close()


@pytest.mark.processes
def test_missing_loopback_is_a_one_line_error(tmp_path: Path) -> None:
    """Run in a network namespace whose loopback is down, as in a container without network."""
    apart = ["unshare", "--net"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("network namespaces are not permitted here")
    command = [*apart, *RINGPROF, "record", "--strategy", "zigzag", *SMALL, "--world", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=HANGS_S)
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, "Traceback" in done.stderr) == (3, False)
    assert last == (
        "ringprof: ranks cannot meet on 127.0.0.1 (Network is unreachable): bring it up (ip link set lo up)"
    )


def test_a_refused_task_leaves_no_scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare() -> FakeTask:
        assert [path.name.startswith("ringprof-ranks-") for path in tmp_path.iterdir()] == [True]
        raise UsageError("refused")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(UsageError, match="refused"):
        run_local_ranks(prepare, SilentReporter())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failure", [None, RecordError("rank 1 failed"), KeyboardInterrupt()])
def test_only_a_failed_task_is_discarded(
    failure: BaseException | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_ranks(*_: object) -> None:
        if failure is not None:
            raise failure

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(launch, "_run_ranks", run_ranks)
    task = FakeTask()
    if failure is None:
        scratch = run_local_ranks(lambda: task, SilentReporter())
        assert scratch.parent == tmp_path and list(tmp_path.iterdir()) == []
    else:
        with pytest.raises(type(failure)):
            run_local_ranks(lambda: task, SilentReporter())
    assert task.discarded == (failure is not None)
