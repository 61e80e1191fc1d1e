"""Heartbeat connections from every rank to rank 0, separate from the process group.

They report at once which rank failed, was stopped or disconnected. A collective whose peer is dead waits, on TCP for
ever, and Python code does not run meanwhile. The operating system closes the connection of a dead process, and TCP
keep-alive detects a host that is down, however long the ranks' own threads are busy. Each message is one line of JSON
of limited length. Messages are accepted only from a connection that has sent the run's token.
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
from dataclasses import dataclass

import msgspec

from ringprof.common.decoding import decode_json
from ringprof.errors import InputError
from ringprof.ranks.rank_errors import RankOutcome

CONNECT_S = 20.0
KEEPALIVE_S = (5, 5, 3)
"""TCP keep-alive: idle seconds before the first probe, seconds between probes, unanswered probes until disconnect."""
MAX_LINE = 1 << 17
"""Most bytes of one message: 18,000 characters of an outcome's message and detail, each at most 6 bytes in JSON."""
MAX_UNAUTHENTICATED_BYTES = 200
"""Most bytes that are read from a connection before it has sent the run's token."""
MAX_UNAUTHENTICATED_CONNECTIONS = 64
"""Most connections, beyond one per rank, that may be open without having sent the run's token."""
LOOPBACK = "127.0.0.1"
WELCOME, END, COMPLETE = b"welcome\n", b"end\n", b"complete\n"


class _Credentials(msgspec.Struct, frozen=True):
    """First message of every connection: the sender's rank and the run's token."""

    rank: int
    token: str


@dataclass(eq=False)
class _Connection:
    """One open connection to rank 0."""

    connection: socket.socket
    data: bytes = b""
    """Bytes received after the last complete line."""
    rank: int | None = None
    """The rank at the other end; None until it has sent its credentials."""


class HeartbeatServer:
    """Rank 0's end of the heartbeat connections.

    The first time a rank fails, is stopped or disconnects, ``on_trouble`` is called once in a separate thread.
    ``outcomes`` maps each other rank to its outcome, in order of arrival. ``disconnected`` lists the ranks whose
    connection ended, or timed out, before they had sent an outcome.
    """

    def __init__(self, world: int, on_trouble: Callable[[], None], *, one_host: bool = True) -> None:
        """Listen for ``world`` - 1 ranks; with ``one_host``, for those on the loopback interface only."""
        self.token = secrets.token_hex(16)
        self.outcomes: dict[int, RankOutcome] = {}
        self.disconnected: list[int] = []
        self._world = world
        self._on_trouble = on_trouble
        self._reporting_stopped = False
        self._closed = threading.Event()
        self._ranks: dict[int, _Connection] = {}
        self._selector = selectors.DefaultSelector()
        self._unauthenticated: deque[_Connection] = deque()
        dual_stack = socket.has_dualstack_ipv6() and not one_host
        family = socket.AF_INET6 if dual_stack else socket.AF_INET
        backlog = min(world + MAX_UNAUTHENTICATED_CONNECTIONS, 4096)
        address = (LOOPBACK if one_host else "", 0)
        self._listener = socket.create_server(address, family=family, dualstack_ipv6=dual_stack, backlog=backlog)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._serving = threading.Thread(target=self._serve, name="ringprof-heartbeats", daemon=True)
        self._serving.start()

    def end_all_ranks(self, seconds: float) -> None:
        """Send `END` to every rank, and receive their outcomes for at most ``seconds``."""
        self._send_to_all(END)
        deadline = time.monotonic() + seconds
        while self._ranks and time.monotonic() < deadline:
            time.sleep(0.02)

    def stop_reporting(self) -> None:
        """Stop calling ``on_trouble`` for outcomes and disconnects: the run is complete."""
        self._reporting_stopped = True

    def announce_complete(self) -> None:
        """Send `COMPLETE` to every rank, and close all connections."""
        self._send_to_all(COMPLETE)
        self.close()

    def _send_to_all(self, line: bytes) -> None:
        for peer in list(self._ranks.values()):
            with suppress(OSError):  # the rank has gone
                peer.connection.send(line)

    def close(self) -> None:
        """Close all connections and wait for the serving thread to end."""
        self._closed.set()
        self._serving.join()

    def _serve(self) -> None:
        """Accept connections and handle messages until `close`; then close all sockets."""
        while not self._closed.is_set():
            for key, _ in self._selector.select(0.2):
                if key.data is None:
                    self._accept_waiting()
                # A connection may be closed while this batch of events is handled.
                elif key.data.connection.fileno() >= 0 and not self._stays_open(key.data):
                    self._close_connection(key.data)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _accept_waiting(self) -> None:
        """Accept waiting connections, a limited number at a time; close the oldest that have sent no credentials."""
        with suppress(OSError):
            for _ in range(MAX_UNAUTHENTICATED_CONNECTIONS):
                peer = _Connection(self._listener.accept()[0])
                keep_alive(peer.connection)
                peer.connection.setblocking(False)
                self._selector.register(peer.connection, selectors.EVENT_READ, peer)
                self._unauthenticated.append(peer)
                if len(self._unauthenticated) > self._world + MAX_UNAUTHENTICATED_CONNECTIONS:
                    # A rank sends its credentials at once, so the oldest connection without them is no rank.
                    self._close_connection(self._unauthenticated[0])

    def _stays_open(self, peer: _Connection) -> bool:
        """Read and handle what a connection has sent; return whether it stays open. An error closes it alone."""
        try:
            data = peer.connection.recv(
                MAX_LINE if peer.rank is not None else MAX_UNAUTHENTICATED_BYTES - len(peer.data)
            )
            *lines, incomplete_line = (peer.data + data).split(b"\n")
            peer.data = incomplete_line
            for line in lines:
                self._handle_line(peer, line)
        except BlockingIOError:
            return True
        except Exception:  # this thread serves all ranks: no connection may end it
            return False
        max_bytes = MAX_LINE + 1 if peer.rank is not None else MAX_UNAUTHENTICATED_BYTES
        return bool(data) and len(incomplete_line) < max_bytes

    def _handle_line(self, peer: _Connection, line: bytes) -> None:
        """Handle one message. Raises `InputError` where it is not valid, or the sender does not belong to this run."""
        if peer.rank is not None:
            outcome = decode_json(line, RankOutcome, f"rank {peer.rank}", "an outcome")
            self.outcomes.setdefault(peer.rank, outcome)
            if outcome.kind != "done":
                self._report_trouble()
            return
        credentials = decode_json(line, _Credentials, "connection", "a rank's credentials")
        rank = credentials.rank
        # `compare_digest` accepts only ASCII strings, but any bytes.
        token_matches = hmac.compare_digest(credentials.token.encode("utf-8", "replace"), self.token.encode())
        if not token_matches or not 0 < rank < self._world or rank in self._ranks:
            raise InputError("connection: not of a rank of this run")
        peer.rank, self._ranks[rank] = rank, peer
        self._unauthenticated.remove(peer)
        if len(self._ranks) == self._world - 1:
            # All ranks are connected: nobody else is let in.
            self._selector.unregister(self._listener)
            self._listener.close()
            for other in list(self._unauthenticated):
                self._close_connection(other)
        peer.connection.send(WELCOME)

    def _close_connection(self, peer: _Connection) -> None:
        """Close a connection; report a rank that disconnects before it has sent an outcome."""
        self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer.rank is None:
            self._unauthenticated.remove(peer)
            return
        if peer.rank not in self.outcomes:
            self.disconnected.append(peer.rank)
            self._report_trouble()
        self._ranks.pop(peer.rank, None)

    def _report_trouble(self) -> None:
        """Call ``on_trouble`` in a separate thread, the first time only."""
        if not self._reporting_stopped:
            self._reporting_stopped = True
            threading.Thread(target=self._on_trouble, name="ringprof-trouble", daemon=True).start()


class Heartbeat:
    """The heartbeat connection of a rank other than 0.

    ``on_end`` is called once, in a separate thread, when the rank must end: with `END` where rank 0 sent that, with
    empty bytes where rank 0 has disconnected.
    """

    def __init__(self, address: str, port: int, token: str, rank: int, on_end: Callable[[bytes], None]) -> None:
        """Connect to rank 0 and authenticate. Raises OSError where rank 0 cannot be reached or refuses this rank."""
        self._connection = socket.create_connection((address, port), CONNECT_S)
        keep_alive(self._connection)
        self._connection.sendall(msgspec.json.encode(_Credentials(rank, token)) + b"\n")
        # Read only the answer to the credentials: later messages are for the listening thread.
        if self._connection.recv(len(WELCOME)) != WELCOME:
            self._connection.close()
            raise ConnectionRefusedError("rank 0 does not know this rank")
        self._connection.settimeout(None)
        self._on_end = on_end
        self._closed = False
        threading.Thread(target=self._listen, name="ringprof-heartbeat", daemon=True).start()

    def send(self, outcome: RankOutcome) -> bool:
        """Send an outcome to rank 0, with long texts shortened; return whether it was sent."""
        values = msgspec.structs.asdict(outcome)
        # UTF-8 cannot encode lone surrogates.
        texts = {k: v.encode(errors="backslashreplace").decode() for k, v in values.items() if isinstance(v, str)}
        texts |= {"message": texts["message"][:2000], "detail": texts["detail"][-16_000:]}
        shortened = msgspec.structs.replace(outcome, **texts)
        try:
            self._connection.sendall(msgspec.json.encode(shortened) + b"\n")
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Ignore all later messages, and rank 0's disconnect; the socket stays open."""
        self._closed = True

    def _listen(self) -> None:
        """Wait for rank 0's last message, and call ``on_end`` unless the run is complete."""
        try:
            message = self._connection.recv(64)
        except OSError:
            message = b""
        if not self._closed and message != COMPLETE:
            self._on_end(message)


def keep_alive(connection: socket.socket) -> None:
    """Enable TCP keep-alive, so that the operating system detects a host that is down, and disable Nagle's delay."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    idle, between, count = KEEPALIVE_S
    limit_ms = 1000 * (idle + between * count)
    options = {"TCP_KEEPIDLE": idle, "TCP_KEEPINTVL": between, "TCP_KEEPCNT": count, "TCP_USER_TIMEOUT": limit_ms}
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
