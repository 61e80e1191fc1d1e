"""A connection from every rank to rank 0, beside the process group: it tells at once who has failed, stopped or gone.

A collective whose peer is gone waits, on TCP for ever; Python sees nothing meanwhile. The system closes a dead
process's connection for it, and its keep-alive finds a host that is gone, however long the ranks' own threads are busy.
What travels is one line of JSON at a time, of limited length, and only from who knows the run's token.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from ringprof.decoding import decode_json

CONNECT_S = 20.0
KEEPALIVE_S = (5, 5, 3)
"""Silence before the first probe, time between probes, and how many go unanswered before a host counts as gone."""
MAX_LINE = 1 << 17
"""Room for the 18,000 characters of an outcome's message and detail, each at most 6 bytes in JSON."""
MAX_UNAUTHENTICATED_BYTES = 200
"""Most bytes that are read from a connection before it has shown the run's token."""
MOST_STRANGERS = 64
"""Connections beyond the ranks' own that may be open before they have said the token."""
LOOPBACK = "127.0.0.1"
WELCOME, END, COMPLETE = b"welcome\n", b"end\n", b"complete\n"


class RankOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How the run ended for one rank, in its own words: it failed, was stopped, or is done. Told once."""

    kind: str
    """``failed``, ``stopped`` or ``done``."""
    where: str = ""
    """Phase and step."""
    hops: int | None = None
    """Posted in this iteration."""
    reason: str = ""
    """The signal that stopped it, or the name of the error's class."""
    message: str = ""
    effect: bool = False
    """Whether the error is of the kind that a rank has when it loses a peer."""
    detail: str = ""
    """For the log."""


class _Hello(msgspec.Struct, frozen=True):
    rank: int
    token: str


@dataclass(eq=False)
class _Connection:
    """One connection to rank 0."""

    connection: socket.socket
    data: bytearray = field(default_factory=bytearray)
    rank: int | None = None


class HeartbeatServer:
    """Rank 0's side. ``on_trouble`` is called once, in a thread of its own, when a rank fails, stops or disconnects.

    ``outcomes`` are the other ranks' by rank, in the order in which they came; ``gone`` the ranks whose connection
    ended, or was given up by the system, before they had told an outcome.
    """

    def __init__(self, world: int, on_trouble: Callable[[], None], *, one_host: bool = True) -> None:
        """``one_host``: whether all ranks are on this host; then nobody else's connection is taken."""
        self.token = secrets.token_hex(16)
        self.outcomes: dict[int, RankOutcome] = {}
        self.gone: list[int] = []
        self._world = world
        self._on_trouble = on_trouble
        self._quiet = False
        self._closed = threading.Event()
        self._ranks: dict[int, _Connection] = {}
        self._selector = selectors.DefaultSelector()
        self._strangers: deque[_Connection] = deque()
        both = socket.has_dualstack_ipv6() and not one_host
        family, backlog = socket.AF_INET6 if both else socket.AF_INET, min(world + MOST_STRANGERS, 4096)
        here = (LOOPBACK if one_host else "", 0)
        self._listener = socket.create_server(here, family=family, dualstack_ipv6=both, backlog=backlog)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._serving = threading.Thread(target=self._serve, name="ringprof-lifelines", daemon=True)
        self._serving.start()

    def tell_all_to_end(self, seconds: float) -> None:
        """Tell every rank to end, and hear their outcomes for ``seconds`` at most."""
        for peer in list(self._ranks.values()):
            _send_line(peer.connection, END)
        deadline = time.monotonic() + seconds
        while self._ranks and time.monotonic() < deadline:
            time.sleep(0.02)

    def stop_reporting(self) -> None:
        """Ignore disconnects and outcomes from here on: the run is complete."""
        self._quiet = True

    def announce_complete(self) -> None:
        """Tell every rank that the run is complete, and close."""
        for peer in list(self._ranks.values()):
            _send_line(peer.connection, COMPLETE)
        self.close()

    def close(self) -> None:
        """Hear no more."""
        self._closed.set()
        self._serving.join()

    def _serve(self) -> None:
        while not self._closed.is_set():
            for key, _ in self._selector.select(0.2):
                if key.data is None:
                    self._welcome()
                else:
                    self._hear_or_leave(key.data)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _welcome(self) -> None:
        """Take the connections that are waiting, not more at a time than may be open."""
        with suppress(OSError):
            for _ in range(MOST_STRANGERS):
                self._take(self._listener.accept()[0])

    def _take(self, connection: socket.socket) -> None:
        keep_alive(connection)
        connection.setblocking(False)
        peer = _Connection(connection)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        self._strangers.append(peer)
        if len(self._strangers) > self._world + MOST_STRANGERS:
            # A rank says at once who it is: the longest silent is none.
            self._leave(self._strangers[0])

    def _hear_or_leave(self, peer: _Connection) -> None:
        """Read from one connection; whatever goes wrong with it ends that connection and no other."""
        if peer.connection.fileno() < 0:
            return  # turned away a moment ago
        try:
            stays = self._hear(peer)
        except BlockingIOError:
            return
        except Exception:  # this thread serves all ranks: no connection may end it
            stays = False
        if not stays:
            self._leave(peer)

    def _hear(self, peer: _Connection) -> bool:
        """Read what a connection has sent; whether it is to stay open."""
        most = MAX_LINE if peer.rank is not None else MAX_UNAUTHENTICATED_BYTES - len(peer.data)
        data = peer.connection.recv(most)
        peer.data += data
        *lines, rest = peer.data.split(b"\n")
        peer.data = bytearray(rest)
        if not data or not all(self._understand(peer, bytes(line)) for line in lines):
            return False
        return len(rest) <= MAX_LINE if peer.rank is not None else len(rest) < MAX_UNAUTHENTICATED_BYTES

    def _understand(self, peer: _Connection, line: bytes) -> bool:
        """Act on one line; False for what does not belong to this run. Raises `InputError` for what is no message."""
        if peer.rank is None:
            return self._authenticate(peer, decode_json(line, _Hello, "connection", "a rank's greeting"))
        outcome = decode_json(line, RankOutcome, f"rank {peer.rank}", "an outcome")
        self.outcomes.setdefault(peer.rank, outcome)
        if outcome.kind != "done":
            self._trouble()
        return True

    def _authenticate(self, peer: _Connection, hello: _Hello) -> bool:
        # As bytes: of texts, `compare_digest` takes ASCII alone.
        same = hmac.compare_digest(hello.token.encode("utf-8", "replace"), self.token.encode())
        if not same or not 0 < hello.rank < self._world or hello.rank in self._ranks:
            return False
        peer.rank = hello.rank
        self._ranks[hello.rank] = peer
        self._strangers.remove(peer)
        if len(self._ranks) == self._world - 1:
            self._let_nobody_else_in()
        return _send_line(peer.connection, WELCOME)

    def _let_nobody_else_in(self) -> None:
        self._selector.unregister(self._listener)
        self._listener.close()
        for stranger in list(self._strangers):
            self._leave(stranger)

    def _leave(self, peer: _Connection) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer.rank is None:
            self._strangers.remove(peer)
            return
        if peer.rank not in self.outcomes:
            self.gone.append(peer.rank)
            self._trouble()
        self._ranks.pop(peer.rank, None)

    def _trouble(self) -> None:
        if not self._quiet:
            self._quiet = True
            threading.Thread(target=self._on_trouble, name="ringprof-trouble", daemon=True).start()


class Heartbeat:
    """Another rank's side. ``on_end`` is called once, in its own thread, with what rank 0 said last: `END`, or nothing
    where it has gone."""

    def __init__(self, address: str, port: int, token: str, rank: int, on_end: Callable[[bytes], None]) -> None:
        """Raises OSError where rank 0 cannot be reached."""
        self._connection = socket.create_connection((address, port), CONNECT_S)
        keep_alive(self._connection)
        self._connection.sendall(msgspec.json.encode(_Hello(rank, token)) + b"\n")
        # No more than the answer: what comes next is for the listening thread.
        if self._connection.recv(len(WELCOME)) != WELCOME:
            self._connection.close()
            raise ConnectionRefusedError("rank 0 does not know this rank")
        self._connection.settimeout(None)
        self._on_end = on_end
        self._closed = False
        threading.Thread(target=self._listen, name="ringprof-lifeline", daemon=True).start()

    def tell(self, outcome: RankOutcome) -> bool:
        """Tell rank 0; whether that could be done."""
        values = msgspec.structs.asdict(outcome)
        texts = {name: _escaped(value) for name, value in values.items() if isinstance(value, str)}
        texts |= {"message": texts["message"][:2000], "detail": texts["detail"][-16_000:]}
        fits = msgspec.structs.replace(outcome, **texts)
        try:
            self._connection.sendall(msgspec.json.encode(fits) + b"\n")
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Nothing that happens from here on is told."""
        self._closed = True

    def _listen(self) -> None:
        try:
            said = self._connection.recv(64)
        except OSError:
            said = b""
        if not self._closed and said != COMPLETE:
            self._on_end(said)


def _escaped(text: str) -> str:
    """Escape lone surrogates, which UTF-8 cannot encode."""
    return text.encode(errors="backslashreplace").decode()


def keep_alive(connection: socket.socket) -> None:
    """Have the system find out that the other host is gone, by probes that its system answers."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    idle, between, count = KEEPALIVE_S
    limit_ms = 1000 * (idle + between * count)
    options = {"TCP_KEEPIDLE": idle, "TCP_KEEPINTVL": between, "TCP_KEEPCNT": count, "TCP_USER_TIMEOUT": limit_ms}
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _send_line(connection: socket.socket, line: bytes) -> bool:
    """Send a few bytes, which always have room; whether that could be done."""
    try:
        connection.send(line)
    except OSError:
        return False
    return True
