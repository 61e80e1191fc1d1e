"""A watch over hops that no library watches: without it a stream waits for ever for a peer that has died."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol
from weakref import WeakSet

from ringprof.strategies.errors import PeerLost

INTERVAL_S = 0.5


class WatchedRing(Protocol):
    """A ring whose streams may be waiting."""

    processes: Mapping[int, int | None]
    """Of the peers that it waits for, by global rank: the process's number, None where it cannot be seen from here."""
    timeout_s: float

    def waiting_since(self) -> float | None:
        """When the oldest hop that is not over was posted, by `time.monotonic`; None where there is none."""

    def release(self) -> None:
        """Let the streams go on, with no numbers in place of what did not arrive."""


class CopyWatchdog:
    """Looks after rings, and lets them go where a peer has ended or a hop takes longer than the group's time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._rings: WeakSet[WatchedRing] = WeakSet()
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._handles: dict[int, int | None] = {}
        self.lost: str | None = None
        """What has happened to a peer; from then on nothing is sent."""

    def add(self, ring: WatchedRing) -> None:
        """Look after a ring for as long as it lives."""
        for process in ring.processes.values():
            if process is not None and process not in self._handles:
                self._handles[process] = _handle(process)
        self._rings.add(ring)
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep_looking, name="ringprof-hops", daemon=True)
            self._thread.start()

    def refuse(self) -> None:
        """Raises `PeerLost` where a peer is lost."""
        if self.lost is not None:
            raise PeerLost(self.lost)

    def check(self) -> None:
        """One look at all rings."""
        rings = [(ring, since) for ring in list(self._rings) if (since := ring.waiting_since()) is not None]
        for ring, since in rings:
            self.lost = self.lost or self._ended(ring) or self._late(ring, since)
        if self.lost is not None:
            for ring, _ in rings:
                ring.release()

    def _ended(self, ring: WatchedRing) -> str | None:
        for rank, process in ring.processes.items():
            handle = None if process is None else self._handles.get(process)
            if handle is not None and select.select([handle], [], [], 0)[0]:
                return f"rank {rank} has ended (process {process}) while this rank waited for its hop"
        return None

    def _late(self, ring: WatchedRing, since: float) -> str | None:
        if self._clock() - since < ring.timeout_s:
            return None
        ranks = " and ".join(map(str, ring.processes))
        return (
            f"a hop between this rank and rank {ranks} was not over after {ring.timeout_s:.0f} s, the group's timeout"
        )

    def _keep_looking(self) -> None:
        while True:
            time.sleep(INTERVAL_S)
            self.check()


def _handle(process: int) -> int | None:
    """A file descriptor that becomes readable when the process ends; None where the system has none."""
    with suppress(OSError, AttributeError):
        return os.pidfd_open(process)
    return None
