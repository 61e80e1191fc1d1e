"""Watchdog for hops by copy engine, which no library watches: a stream would wait forever for a peer that has died."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol
from weakref import WeakSet

from ..errors import PeerLost, RankRaised

INTERVAL_S = 0.5
"""Seconds between two checks."""


class WatchedRing(Protocol):
    """A ring whose streams may be waiting."""

    processes: Mapping[int, int | None]
    """Process ID of each peer that the ring waits for, by global rank; None where this process cannot see it."""
    timeout_s: float
    """Seconds after which a hop counts as lost."""
    stopped: str | None
    """Why nothing is sent over this ring any more; None while hops can be made."""

    def waiting_since(self) -> float | None:
        """Return when the wait for the oldest unfinished hop began, by `time.monotonic`; None where there is none."""

    def release(self) -> None:
        """Let the waiting streams continue, with NaN in place of what did not arrive."""


class CopyWatchdog:
    """A thread that watches rings, and releases them when a peer has ended or a hop exceeds the group's timeout."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._rings: WeakSet[WatchedRing] = WeakSet()
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._handles: dict[int, int | None] = {}
        self.lost: str | None = None
        """Why a peer is lost; None while all are well. Once it is set nothing is sent any more."""

    def add(self, ring: WatchedRing) -> None:
        """Watch a ring for as long as it exists."""
        for process in ring.processes.values():
            if process is not None and process not in self._handles:
                self._handles[process] = _handle(process)
        self._rings.add(ring)
        if self._thread is None:
            self._thread = threading.Thread(target=self._check_forever, name="ringprof-hops", daemon=True)
            self._thread.start()

    def raise_if_lost(self, ring: WatchedRing) -> None:
        """Raise `RankRaised` if the ring was stopped, and `PeerLost` if a peer is lost."""
        if ring.stopped is not None:
            raise RankRaised(ring.stopped)
        if self.lost is not None:
            raise PeerLost(self.lost)

    def check(self) -> None:
        """Check all rings once, and release those that wait if a peer is lost."""
        rings = [(ring, since) for ring in list(self._rings) if (since := ring.waiting_since()) is not None]
        for ring, since in rings:
            if ring.stopped is not None:
                continue
            self.lost = self.lost or self._ended(ring) or self._late(ring, since)
        for ring, _ in rings:
            if self.lost is not None or ring.stopped is not None:
                ring.release()

    def _ended(self, ring: WatchedRing) -> str | None:
        """Return a sentence about a peer of the ring whose process has ended; None where there is none."""
        for rank, process in ring.processes.items():
            handle = None if process is None else self._handles.get(process)
            if handle is not None and select.select([handle], [], [], 0)[0]:
                return f"rank {rank} has ended (process {process}) while this rank waited for its hop"
        return None

    def _late(self, ring: WatchedRing, since: float) -> str | None:
        """Return a sentence about a hop that exceeds the timeout; None where it does not."""
        if self._clock() - since < ring.timeout_s:
            return None
        ranks = " and ".join(map(str, ring.processes))
        return (
            f"a hop between this rank and rank {ranks} was not over after {ring.timeout_s:.0f} s, the group's timeout"
        )

    def _check_forever(self) -> None:
        while True:
            time.sleep(INTERVAL_S)
            self.check()


def _handle(process: int) -> int | None:
    """Return a file descriptor that becomes readable when the process ends; None where the system has none."""
    with suppress(OSError, AttributeError):
        return os.pidfd_open(process)
    return None
