"""The watchdog of copied hops: a peer that ends, a hop that takes too long, and rings that are no longer in use."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest

from ringprof.strategies.errors import PeerLost, RankRaised
from ringprof.strategies.transport.copy_watchdog import CopyWatchdog


class Ring:
    """A stand-in for a ring that the watchdog watches."""

    timeout_s = 600.0
    stopped: str | None = None

    def __init__(self, since: float | None, processes: Mapping[int, int | None]) -> None:
        self.since, self.processes = since, processes
        self.released = 0

    def waiting_since(self) -> float | None:
        return self.since

    def release(self) -> None:
        self.released += 1


@pytest.fixture
def peer() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def watch_at(seconds: float) -> CopyWatchdog:
    """Return a watchdog at this time, whose thread does nothing."""
    watch = CopyWatchdog(clock=lambda: seconds)
    watch._check_forever = lambda: None  # type: ignore[method-assign]
    return watch


def test_watchdog_releases_ranks_waiting_for_an_ended_peer(peer):
    watch, waiting, idle = watch_at(1.0), Ring(0.0, {3: peer.pid}), Ring(None, {3: peer.pid})
    watch.add(waiting)
    watch.add(idle)
    watch.check()
    watch.raise_if_lost(waiting)
    assert waiting.released == 0
    peer.kill()
    peer.wait()
    watch.check()
    assert (waiting.released, idle.released) == (1, 0)
    with pytest.raises(PeerLost, match=rf"rank 3 has ended \(process {peer.pid}\) while this rank waited for its hop"):
        watch.raise_if_lost(waiting)


@pytest.mark.parametrize(("now", "released"), [(599.0, 0), (600.0, 1)])
def test_watchdog_enforces_the_group_timeout(now, released):
    watch, ring = watch_at(now), Ring(0.0, {1: None, 3: None})
    watch.add(ring)
    watch.check()
    assert ring.released == released
    if released:
        with pytest.raises(PeerLost, match="rank 1 and 3 was not over after 600 s, the group's timeout"):
            watch.raise_if_lost(ring)


def test_watchdog_ignores_a_peer_that_ended_after_its_last_hop(peer):
    watch, ring = watch_at(1.0), Ring(None, {3: peer.pid})
    watch.add(ring)
    peer.kill()
    peer.wait()
    watch.check()
    watch.raise_if_lost(ring)
    assert ring.released == 0


def test_watchdog_drops_rings_that_were_collected():
    watch, ring = watch_at(1e9), Ring(0.0, {1: None})
    watch.add(ring)
    del ring
    gc.collect()
    watch.check()
    watch.raise_if_lost(Ring(None, {}))


def test_watchdog_releases_a_stopped_ring_alone():
    watch, stopped, other = watch_at(1e9), Ring(0.0, {1: None}), Ring(1e9, {2: None})
    watch.add(stopped)
    watch.add(other)
    stopped.stopped = "rank 1 raised in call 3"
    watch.check()
    assert (stopped.released, other.released) == (1, 0)
    watch.raise_if_lost(other)
    with pytest.raises(RankRaised, match=r"^rank 1 raised in call 3$"):
        watch.raise_if_lost(stopped)


def test_watchdog_thread_is_a_daemon():
    watch = watch_at(0.0)
    watch.add(Ring(None, {}))
    assert watch._thread is not None and watch._thread.daemon
