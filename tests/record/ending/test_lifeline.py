"""Rank 0 hears at once who fails or goes, listens to nobody else, and its word ends the others."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from ringprof.record.ending.lifeline import MAX_LINE, Lifeline, LifelineServer, RankOutcome
from tests.record.command import wait_until


class Heard:
    """Counts calls, and keeps what they said."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def __call__(self, *said: object) -> None:
        self.calls.append(said)


@pytest.fixture
def trouble() -> Heard:
    return Heard()


def connected(hub: LifelineServer, rank: int, on_end: Callable[[bool], None]) -> Lifeline:
    return Lifeline("127.0.0.1", hub.port, hub.token, rank, on_end)


def cut_off(line: Lifeline) -> None:
    """What the system does for a process that dies."""
    line.close()
    line._connection.shutdown(socket.SHUT_RDWR)
    line._connection.close()


def test_words_arrive_and_the_first_counts(trouble: Heard) -> None:
    hub = LifelineServer(3, trouble)
    line = connected(hub, 2, Heard())
    assert line.tell(RankOutcome(kind="failed", message="first")) and line.tell(RankOutcome(kind="stopped"))
    wait_until(lambda: bool(trouble.calls), 5)
    assert hub.outcomes[2].message == "first" and hub.gone == [] and len(trouble.calls) == 1
    hub.close()
    cut_off(line)


def test_one_who_is_done_may_go_and_one_who_is_not_has_gone(trouble: Heard) -> None:
    hub = LifelineServer(3, trouble)
    done, killed = connected(hub, 1, Heard()), connected(hub, 2, Heard())
    done.tell(RankOutcome(kind="done"))
    wait_until(lambda: 1 in hub.outcomes, 5)
    cut_off(done)
    time.sleep(0.3)
    assert trouble.calls == []
    cut_off(killed)
    wait_until(lambda: bool(trouble.calls), 5)
    assert hub.gone == [2]
    hub.close()


def test_a_long_last_word_is_shortened(trouble: Heard) -> None:
    hub = LifelineServer(2, trouble)
    line = connected(hub, 1, Heard())
    line.tell(RankOutcome(kind="failed", message="m" * 10**6, detail="d" * 10**6))
    wait_until(lambda: 1 in hub.outcomes, 5)
    assert len(hub.outcomes[1].message) == 2000 and len(hub.outcomes[1].detail) == 16_000
    hub.close()
    cut_off(line)


def test_all_are_told_to_end(trouble: Heard) -> None:
    hub, ended = LifelineServer(3, trouble), {1: Heard(), 2: Heard()}
    lines: dict[int, Lifeline] = {}

    def leave(rank: int, told: bool) -> None:
        ended[rank](told)
        cut_off(lines[rank])

    for rank in ended:
        lines[rank] = connected(hub, rank, partial(leave, rank))
    begin = time.monotonic()
    hub.tell_all_to_end(10)
    assert time.monotonic() - begin < 5
    assert [heard.calls for heard in ended.values()] == [[(True,)], [(True,)]]
    hub.close()


def test_a_complete_run_is_no_end(trouble: Heard) -> None:
    hub, ended = LifelineServer(2, trouble), Heard()
    line = connected(hub, 1, ended)
    hub.announce_complete()
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
    line = Lifeline("127.0.0.1", listener.getsockname()[1], "", 1, ended)
    wait_until(lambda: bool(ended.calls), 5)
    assert ended.calls == [(False,)]
    serving.join()
    listener.close()
    cut_off(line)


def hello(rank: object, token: str) -> bytes:
    return json.dumps({"rank": rank, "token": token}).encode() + b"\n"


@pytest.mark.parametrize("rank", [0, 2, -1, 10**30, "1", None])
def test_ranks_that_there_are_not_are_turned_away(trouble: Heard, rank: object) -> None:
    hub = LifelineServer(2, trouble)
    turned_away(hub, hello(rank, hub.token))
    hub.close()
    assert trouble.calls == [] and hub.outcomes == {} and hub.gone == []


@pytest.mark.parametrize("data", [hello(1, "guess"), b"x\n", b"\xff\n", b"[" * 1000 + b"\n", b"a" * (2 * MAX_LINE)])
def test_strangers_are_turned_away(trouble: Heard, data: bytes) -> None:
    hub = LifelineServer(2, trouble)
    turned_away(hub, data)
    # Nor do they keep a rank out.
    line = connected(hub, 1, Heard())
    hub.close()
    assert trouble.calls == [] and hub.outcomes == {}
    cut_off(line)


def turned_away(hub: LifelineServer, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", hub.port), 5) as stranger:
        try:
            stranger.sendall(data)
            assert stranger.recv(100) == b""
        except ConnectionError:
            pass  # closed while we were still talking
