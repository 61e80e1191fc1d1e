"""Rank 0 hears at once who fails or goes, listens to nobody else, and its word ends the others."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from ringprof.record.shutdown.heartbeat import MAX_LINE, MOST_STRANGERS, Heartbeat, HeartbeatServer, RankOutcome
from tests.record.command import HANGS_S, wait_until


class Heard:
    """Counts calls, and keeps what they said."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def __call__(self, *said: object) -> None:
        self.calls.append(said)


@pytest.fixture
def trouble() -> Heard:
    return Heard()


def connected(server: HeartbeatServer, rank: int, on_end: Callable[[bytes], None]) -> Heartbeat:
    return Heartbeat("127.0.0.1", server.port, server.token, rank, on_end)


def cut_off(line: Heartbeat) -> None:
    """What the system does for a process that dies."""
    line.close()
    with contextlib.suppress(OSError):  # where the other side is gone already
        line._connection.shutdown(socket.SHUT_RDWR)
    line._connection.close()


def test_words_arrive_and_the_first_counts(trouble: Heard) -> None:
    server = HeartbeatServer(3, trouble)
    line = connected(server, 2, Heard())
    assert line.tell(RankOutcome(kind="failed", message="first")) and line.tell(RankOutcome(kind="stopped"))
    wait_until(lambda: bool(trouble.calls))
    assert server.outcomes[2].message == "first" and server.gone == [] and len(trouble.calls) == 1
    server.close()
    cut_off(line)


def test_one_who_is_done_may_go_and_one_who_is_not_has_gone(trouble: Heard) -> None:
    server = HeartbeatServer(3, trouble)
    done, killed = connected(server, 1, Heard()), connected(server, 2, Heard())
    done.tell(RankOutcome(kind="done"))
    wait_until(lambda: 1 in server.outcomes)
    cut_off(done)
    time.sleep(0.3)
    assert trouble.calls == []
    cut_off(killed)
    wait_until(lambda: bool(trouble.calls))
    assert server.gone == [2]
    server.close()


def test_a_long_last_word_is_shortened(trouble: Heard) -> None:
    server = HeartbeatServer(2, trouble)
    line = connected(server, 1, Heard())
    line.tell(RankOutcome(kind="failed", message="m" * 10**6, detail="d" * 10**6))
    wait_until(lambda: 1 in server.outcomes)
    assert len(server.outcomes[1].message) == 2000 and len(server.outcomes[1].detail) == 16_000
    server.close()
    cut_off(line)


@pytest.mark.parametrize("text", ["\udcff", "\0", "\U0001f4a5"], ids=["lone surrogate", "control", "4 bytes"])
def test_text_that_grows_when_encoded_arrives(trouble: Heard, text: str) -> None:
    """A lone surrogate is no UTF-8; a control character takes 6 bytes in JSON, and a line has a largest length."""
    server = HeartbeatServer(2, trouble)
    line = connected(server, 1, Heard())
    assert line.tell(RankOutcome(kind="failed", message=f"why {text}", detail=text * 16_000 + "the end"))
    wait_until(lambda: bool(trouble.calls))
    assert server.gone == [] and server.outcomes[1].detail.endswith("the end")
    assert server.outcomes[1].message == ("why \\udcff" if text == "\udcff" else f"why {text}")
    server.close()
    cut_off(line)


def test_all_are_told_to_end(trouble: Heard) -> None:
    server, ended = HeartbeatServer(3, trouble), {1: Heard(), 2: Heard()}
    lines: dict[int, Heartbeat] = {}

    def leave(rank: int, told: bytes) -> None:
        ended[rank](told)
        cut_off(lines[rank])

    for rank in ended:
        lines[rank] = connected(server, rank, partial(leave, rank))
    server.tell_all_to_end(3600)  # it does not wait for those that have ended
    assert [heard.calls for heard in ended.values()] == [[(b"end\n",)], [(b"end\n",)]]
    server.close()


def test_a_complete_run_is_no_end(trouble: Heard) -> None:
    server, ended = HeartbeatServer(2, trouble), Heard()
    line = connected(server, 1, ended)
    server.announce_complete()
    time.sleep(0.3)
    assert ended.calls == [] and trouble.calls == []
    cut_off(line)


def test_rank_0s_end_is_noticed(trouble: Heard) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    ended = Heard()

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
    cut_off(line)


def hello(rank: object, token: str) -> bytes:
    return json.dumps({"rank": rank, "token": token}).encode() + b"\n"


@pytest.mark.parametrize("rank", [0, 2, -1, 10**30, "1", None])
def test_ranks_that_there_are_not_are_turned_away(trouble: Heard, rank: object) -> None:
    server = HeartbeatServer(2, trouble)
    turned_away(server, hello(rank, server.token))
    server.close()
    assert trouble.calls == [] and server.outcomes == {} and server.gone == []


DEEP = b'{"x":' + b"[" * 3000 + b"]" * 3000 + b"}\n"


@pytest.mark.parametrize(
    "data", [hello(1, "guess"), hello(1, "é"), b"x\n", b"\xff\n", b"[" * 150 + b"\n", DEEP, b"a" * (2 * MAX_LINE)]
)
def test_strangers_are_turned_away(trouble: Heard, data: bytes) -> None:
    server = HeartbeatServer(2, trouble)
    turned_away(server, data)
    # Nor do they keep a rank out.
    line = connected(server, 1, Heard())
    server.close()
    assert trouble.calls == [] and server.outcomes == {}
    cut_off(line)


def test_a_stranger_is_heard_for_200_bytes_and_no_more(trouble: Heard) -> None:
    server = HeartbeatServer(2, trouble)
    known = hello(1, server.token)
    padded = known[:-2] + b" " * (200 - len(known)) + known[-2:]
    with socket.create_connection(("127.0.0.1", server.port), 5) as waiting:
        waiting.sendall(b" " * 199)
        waiting.settimeout(0.5)
        with pytest.raises(TimeoutError):
            waiting.recv(1)
        waiting.sendall(b" ")
        waiting.settimeout(5)
        assert waiting.recv(1) == b""
    turned_away(server, b" " + padded)
    with socket.create_connection(("127.0.0.1", server.port), 5) as rank:
        rank.sendall(padded)
        assert rank.recv(100) == b"welcome\n"
    wait_until(lambda: server.gone == [1])
    server.close()


def test_a_message_that_cannot_be_read_ends_its_own_connection_alone(trouble: Heard) -> None:
    """Nested so deeply that decoding it raises RecursionError; the other rank is still heard."""
    server = HeartbeatServer(3, trouble)
    broken, sound = connected(server, 1, Heard()), connected(server, 2, Heard())
    broken._connection.sendall(DEEP)
    wait_until(lambda: server.gone == [1])
    sound.tell(RankOutcome(kind="stopped", reason="SIGTERM"))
    wait_until(lambda: 2 in server.outcomes)
    assert server.outcomes[2].reason == "SIGTERM" and len(trouble.calls) == 1
    server.close()
    cut_off(broken)
    cut_off(sound)


def test_many_silent_strangers_keep_no_rank_out(trouble: Heard) -> None:
    server = HeartbeatServer(3, trouble)
    port = ("127.0.0.1", server.port)
    strangers = [socket.create_connection(port, HANGS_S) for _ in range(2 * MOST_STRANGERS)]
    first = connected(server, 1, Heard())
    open_ones = len(server._selector.get_map()) - 1
    assert open_ones <= 3 + MOST_STRANGERS + 1
    last = connected(server, 2, Heard())
    # All are here: nobody else needs to be heard, and whoever is not a rank costs the run nothing any more.
    for stranger in strangers:
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(port, 5)
    first.tell(RankOutcome(kind="failed", message="mine"))
    wait_until(lambda: bool(trouble.calls))
    assert server.outcomes[1].message == "mine" and server.gone == []
    server.close()
    cut_off(first)
    cut_off(last)
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize(("one_host", "address"), [(True, "127.0.0.1"), (False, "::")])
def test_where_all_ranks_are_on_one_host_no_other_can_connect(trouble: Heard, one_host: bool, address: str) -> None:
    server = HeartbeatServer(2, trouble, one_host=one_host)
    expected = {address} if socket.has_dualstack_ipv6() or one_host else {"0.0.0.0"}
    assert server._listener.getsockname()[0] in expected
    server.close()


def turned_away(server: HeartbeatServer, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 5) as stranger:
        try:
            stranger.sendall(data)
            assert stranger.recv(100) == b""
        except ConnectionError:
            pass  # closed while we were still talking
