"""Local launcher: which processes can reach the ranks' rendezvous store."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch", reason="recording needs torch")

from ringprof.record.local_launcher import _store
from tests.record.command import HANGS_S, RINGPROF, SMALL, environment


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
