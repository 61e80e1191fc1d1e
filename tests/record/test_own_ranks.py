"""Ranks of our own: who can reach the store that they meet at."""

from __future__ import annotations

import socket

import psutil
import pytest

pytest.importorskip("torch", reason="recording needs torch")

from ringprof.record.own_ranks import _store


def test_the_ranks_meet_where_no_other_host_can_connect() -> None:
    with _store() as port:
        listening = [at.laddr for at in psutil.Process().net_connections("tcp") if at.status == psutil.CONN_LISTEN]
        assert [address.ip for address in listening if address.port == port] == ["127.0.0.1"]
        socket.create_connection(("127.0.0.1", port), 5).close()
