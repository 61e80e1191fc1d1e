"""Rank 0 receives failures and disconnects at once, ignores unauthenticated connections and can end the other ranks."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from ringprof.ranks.heartbeat import MAX_LINE, MAX_UNAUTHENTICATED_CONNECTIONS, Heartbeat, HeartbeatServer
from ringprof.ranks.rank_errors import RankOutcome
from tests.recording.command import HANGS_S, wait_until


class CallLog:
    """A callback that records the arguments of its calls."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def __call__(self, *arguments: object) -> None:
        self.calls.append(arguments)


@pytest.fixture
def trouble() -> CallLog:
    return CallLog()


def connected(server: HeartbeatServer, rank: int, on_end: Callable[[bytes], None]) -> Heartbeat:
    return Heartbeat("127.0.0.1", server.port, server.token, rank, on_end)


def disconnect(line: Heartbeat) -> None:
    """Close a connection without an outcome, like the operating system when a process dies."""
    line.close()
    with contextlib.suppress(OSError):  # the other side has closed it already
        line._connection.shutdown(socket.SHUT_RDWR)
    line._connection.close()


def test_first_outcome_of_a_rank_counts(trouble: CallLog) -> None:
    server = HeartbeatServer(3, trouble)
    line = connected(server, 2, CallLog())
    assert line.send(RankOutcome(kind="failed", message="first")) and line.send(RankOutcome(kind="stopped"))
    wait_until(lambda: bool(trouble.calls))
    assert server.outcomes[2].message == "first" and server.disconnected == [] and len(trouble.calls) == 1
    server.close()
    disconnect(line)


def test_disconnecting_is_an_error_only_before_an_outcome(trouble: CallLog) -> None:
    server = HeartbeatServer(3, trouble)
    done, killed = connected(server, 1, CallLog()), connected(server, 2, CallLog())
    done.send(RankOutcome(kind="done"))
    wait_until(lambda: 1 in server.outcomes)
    disconnect(done)
    time.sleep(0.3)
    assert trouble.calls == []
    disconnect(killed)
    wait_until(lambda: bool(trouble.calls))
    assert server.disconnected == [2]
    server.close()


def test_long_outcome_is_shortened(trouble: CallLog) -> None:
    server = HeartbeatServer(2, trouble)
    line = connected(server, 1, CallLog())
    line.send(RankOutcome(kind="failed", message="m" * 10**6, detail="d" * 10**6))
    wait_until(lambda: 1 in server.outcomes)
    assert len(server.outcomes[1].message) == 2000 and len(server.outcomes[1].detail) == 16_000
    server.close()
    disconnect(line)


@pytest.mark.parametrize("text", ["\udcff", "\0", "\U0001f4a5"], ids=["lone surrogate", "control", "4 bytes"])
def test_message_that_grows_when_encoded_arrives(trouble: CallLog, text: str) -> None:
    """A lone surrogate is not UTF-8; a control character takes 6 bytes in JSON, and a line has a largest length."""
    server = HeartbeatServer(2, trouble)
    line = connected(server, 1, CallLog())
    assert line.send(RankOutcome(kind="failed", message=f"why {text}", detail=text * 16_000 + "the end"))
    wait_until(lambda: bool(trouble.calls))
    assert server.disconnected == [] and server.outcomes[1].detail.endswith("the end")
    assert server.outcomes[1].message == ("why \\udcff" if text == "\udcff" else f"why {text}")
    server.close()
    disconnect(line)


def test_end_all_ranks_notifies_every_rank(trouble: CallLog) -> None:
    server, ended = HeartbeatServer(3, trouble), {1: CallLog(), 2: CallLog()}
    lines: dict[int, Heartbeat] = {}

    def end_and_disconnect(rank: int, message: bytes) -> None:
        ended[rank](message)
        disconnect(lines[rank])

    for rank in ended:
        lines[rank] = connected(server, rank, partial(end_and_disconnect, rank))
    server.end_all_ranks(3600)  # does not wait for ranks that have ended
    assert [call_log.calls for call_log in ended.values()] == [[(b"end\n",)], [(b"end\n",)]]
    server.close()


def test_completion_of_the_run_ends_no_rank(trouble: CallLog) -> None:
    server, ended = HeartbeatServer(2, trouble), CallLog()
    line = connected(server, 1, ended)
    server.announce_complete()
    time.sleep(0.3)
    assert ended.calls == [] and trouble.calls == []
    disconnect(line)


def test_disconnect_of_rank_0_ends_a_rank(trouble: CallLog) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    ended = CallLog()

    def rank_0() -> None:
        connection, _ = listener.accept()
        connection.recv(1000)
        connection.send(b"welcome\n")
        connection.close()

    serving = threading.Thread(target=rank_0)
    serving.start()
    line = Heartbeat("127.0.0.1", listener.getsockname()[1], "", 1, ended)
    wait_until(lambda: bool(ended.calls))
    assert ended.calls == [(b"",)]
    serving.join()
    listener.close()
    disconnect(line)


def credentials(rank: object, token: str) -> bytes:
    return json.dumps({"rank": rank, "token": token}).encode() + b"\n"


@pytest.mark.parametrize("rank", [0, 2, -1, 10**30, "1", None])
def test_invalid_ranks_are_refused(trouble: CallLog, rank: object) -> None:
    server = HeartbeatServer(2, trouble)
    assert_connection_closed(server, credentials(rank, server.token))
    server.close()
    assert trouble.calls == [] and server.outcomes == {} and server.disconnected == []


DEEP = b'{"x":' + b"[" * 3000 + b"]" * 3000 + b"}\n"


@pytest.mark.parametrize(
    "data",
    [credentials(1, "guess"), credentials(1, "é"), b"x\n", b"\xff\n", b"[" * 150 + b"\n", DEEP, b"a" * (2 * MAX_LINE)],
)
def test_unauthenticated_connections_are_closed(trouble: CallLog, data: bytes) -> None:
    server = HeartbeatServer(2, trouble)
    assert_connection_closed(server, data)
    # A rank can still connect afterwards.
    line = connected(server, 1, CallLog())
    server.close()
    assert trouble.calls == [] and server.outcomes == {}
    disconnect(line)


def test_at_most_200_unauthenticated_bytes_are_read(trouble: CallLog) -> None:
    server = HeartbeatServer(2, trouble)
    message = credentials(1, server.token)
    padded = message[:-2] + b" " * (200 - len(message)) + message[-2:]
    with socket.create_connection(("127.0.0.1", server.port), 5) as waiting:
        waiting.sendall(b" " * 199)
        waiting.settimeout(0.5)
        with pytest.raises(TimeoutError):
            waiting.recv(1)
        waiting.sendall(b" ")
        waiting.settimeout(5)
        assert waiting.recv(1) == b""
    assert_connection_closed(server, b" " + padded)
    with socket.create_connection(("127.0.0.1", server.port), 5) as rank:
        rank.sendall(padded)
        assert rank.recv(100) == b"welcome\n"
    wait_until(lambda: server.disconnected == [1])
    server.close()


def test_invalid_message_closes_only_its_own_connection(trouble: CallLog) -> None:
    """The message is so deeply nested that decoding raises RecursionError; rank 0 still serves the other rank."""
    server = HeartbeatServer(3, trouble)
    broken, sound = connected(server, 1, CallLog()), connected(server, 2, CallLog())
    broken._connection.sendall(DEEP)
    wait_until(lambda: server.disconnected == [1])
    sound.send(RankOutcome(kind="stopped", reason="SIGTERM"))
    wait_until(lambda: 2 in server.outcomes)
    assert server.outcomes[2].reason == "SIGTERM" and len(trouble.calls) == 1
    server.close()
    disconnect(broken)
    disconnect(sound)


def test_many_unauthenticated_connections_do_not_block_ranks(trouble: CallLog) -> None:
    server = HeartbeatServer(3, trouble)
    port = ("127.0.0.1", server.port)
    connections = [socket.create_connection(port, HANGS_S) for _ in range(2 * MAX_UNAUTHENTICATED_CONNECTIONS)]
    first = connected(server, 1, CallLog())
    open_connections = len(server._selector.get_map()) - 1
    assert open_connections <= 3 + MAX_UNAUTHENTICATED_CONNECTIONS + 1
    last = connected(server, 2, CallLog())
    # All ranks are connected, so rank 0 closes every other connection and its listener.
    for connection in connections:
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(port, 5)
    first.send(RankOutcome(kind="failed", message="mine"))
    wait_until(lambda: bool(trouble.calls))
    assert server.outcomes[1].message == "mine" and server.disconnected == []
    server.close()
    disconnect(first)
    disconnect(last)
    for connection in connections:
        connection.close()


@pytest.mark.parametrize(("one_host", "address"), [(True, "127.0.0.1"), (False, "::")])
def test_other_hosts_cannot_connect_to_a_run_on_one_host(trouble: CallLog, one_host: bool, address: str) -> None:
    server = HeartbeatServer(2, trouble, one_host=one_host)
    expected = {address} if socket.has_dualstack_ipv6() or one_host else {"0.0.0.0"}
    assert server._listener.getsockname()[0] in expected
    server.close()


def assert_connection_closed(server: HeartbeatServer, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 5) as connection:
        try:
            connection.sendall(data)
            assert connection.recv(100) == b""
        except ConnectionError:
            pass  # closed during the send
