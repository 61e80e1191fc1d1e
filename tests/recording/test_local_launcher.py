"""Local launcher: the folders that it leaves, and which processes can reach the ranks' rendezvous store."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch", reason="recording needs torch")

from ringprof.errors import RecordError, UsageError
from ringprof.ranks import local_launcher
from ringprof.ranks.local_launcher import LocalLauncher, _store
from ringprof.ranks.progress import SilentReporter
from tests.recording.command import HANGS_S, RINGPROF, SMALL, environment
from tests.recording.fake_launcher import FakeJob


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


def test_a_refused_job_leaves_no_scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    job = FakeJob(UsageError("refused"))
    with pytest.raises(UsageError, match="refused"):
        LocalLauncher().run(job, SilentReporter())
    assert job.task is not None and Path(job.task.scratch).parent == tmp_path
    assert list(tmp_path.iterdir()) == [] and not job.task.discarded


@pytest.mark.parametrize("failure", [None, RecordError("rank 1 failed"), KeyboardInterrupt()])
def test_only_a_failed_job_is_discarded(
    failure: BaseException | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_ranks(*_: object) -> None:
        if failure is not None:
            raise failure

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(local_launcher, "_run_ranks", run_ranks)
    job = FakeJob()
    if failure is None:
        scratch = LocalLauncher().run(job, SilentReporter())
        assert Path(scratch).parent == tmp_path and list(tmp_path.iterdir()) == []
    else:
        with pytest.raises(type(failure)):
            LocalLauncher().run(job, SilentReporter())
    assert job.task is not None and job.task.discarded == (failure is not None)
