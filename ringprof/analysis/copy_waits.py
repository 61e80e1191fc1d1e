"""How long a rank that runs nothing was blocked on a peer's copy-engine hop, and on which peer.

A copy by the copy engine waits without a kernel, so the waiting shows as a device that idles although its next
activity had been launched. Two cases are told apart:

* departure: the next activity is the rank's own copy, the first of its hop. It waits until the receiver posts the same
  hop: until the receiver's launch call for it has returned, and the work that the receiver launched before on its
  compute stream and on its copy stream has ended. The rest is wire time.
* arrival: the next activity starts soon after the end of a copy into this rank, which a peer's trace shows. Until that
  copy's hop begins the rank waits for the peer; while it runs, bytes are on the wire.

The n-th hop of a channel is the same on every rank of it. Only hops that ringprof's strategies post are known to be
hops: their launches lie in ranges called ``ringprof::send/<channel>``.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from ringprof.analysis.kinds.kinds import CODE
from ringprof.analysis.rank import Detail
from ringprof.analysis.timeline.idle import idle_stretches
from ringprof.analysis.transfers.hops import HostOfRank, PeerBlock
from ringprof.run import Run
from ringprof.trace.columns import NONE, Int64, Trace

_SEND = re.compile(r"ringprof::send/(?P<channel>[^/]+)(/to=(?P<to>[0-9]{1,7}))?")
SOON_NS = 20_000
"""An activity that waited for a copy into its rank starts within this time of the copy's end."""


class CopyHop(msgspec.Struct, frozen=True, gc=False):
    """One hop that the copy engine carries, as its sender's trace shows it; times by the sender's clock."""

    channel: str
    number: int
    """Which hop of its channel it is, from 0; equal on every rank of the channel."""
    activity: int
    """Index into the trace's activities of its first copy."""
    start_ns: int
    end_ns: int
    """End of its last copy."""
    launch: int
    """Index into the trace's launches of the first copy's."""
    posted_ns: int
    """When the rank was ready for the hop: its launch call had returned, and the work before it had ended."""
    device: int
    target_device: int
    """Device that it writes to, as the sender numbers devices; `NONE` where not given."""
    receiver: int | None
    """Rank that it goes to; None where the recording does not tell."""


def copy_hops(detail: Detail, rank: int, run: Run | None) -> tuple[CopyHop, ...]:
    """List the copy-engine hops in a rank's window, by channel and launch."""
    trace, launch = detail.classified.trace, detail.classified.launch
    rows = trace.activities
    chosen = detail.window.activities()
    copies = chosen[(detail.classified.kind[chosen] == CODE["copy_engine"]) & (launch[chosen] != NONE)]
    if detail.device is not None:
        copies = copies[rows.device[copies] == detail.device]
    ranges = _ranges_of_sends(trace)
    if not len(copies) or not ranges:
        return ()
    copies = copies[np.argsort(launch[copies], kind="stable")]
    place = _range_of(trace, launch[copies], ranges)
    receivers = _receivers(run, rank)
    posted = _Posting(detail)
    hops, count = [], dict[str, int]()
    for number in dict.fromkeys(place[place != NONE].tolist()):
        parts = copies[place == number]
        channel, to = ranges[number][3], ranges[number][4]
        first = int(parts[0])
        hops.append(
            CopyHop(
                channel=channel,
                number=count.setdefault(channel, 0),
                activity=first,
                start_ns=int(rows.start_ns[parts].min()),
                end_ns=int(rows.end_ns[parts].max()),
                launch=int(launch[first]),
                posted_ns=posted.of(first),
                device=int(rows.device[first]),
                target_device=int(rows.target_device[first]),
                receiver=receivers.get(channel) if to is None else to,
            )
        )
        count[channel] += 1
    return tuple(hops)


_Range = tuple[int, int, int, str, int | None]
"""Start, end and thread of a range, the channel that it names, and the rank that its hop goes to."""


def _ranges_of_sends(trace: Trace) -> list[_Range]:
    marks = trace.annotations
    names = {index: match for index, name in enumerate(trace.names) if (match := _SEND.fullmatch(name))}
    ranges: list[_Range] = []
    for row in np.flatnonzero(np.isin(marks.name, list(names))).tolist() if names else ():
        match = names[int(marks.name[row])]
        to = int(match["to"]) if match["to"] else None
        ranges.append((int(marks.start_ns[row]), int(marks.end_ns[row]), int(marks.thread[row]), match["channel"], to))
    return sorted(ranges)


def _range_of(trace: Trace, launch: Int64, ranges: Sequence[_Range]) -> Int64:
    """For each launch the range on its thread that it lies in, as a place in ``ranges``, or `NONE`."""
    result = np.full(len(launch), NONE, np.int64)
    time, thread = trace.launches.start_ns[launch], trace.launches.thread[launch]
    for number in {entry[2] for entry in ranges}:
        mine = np.array([place for place, entry in enumerate(ranges) if entry[2] == number], np.int64)
        start = np.array([ranges[place][0] for place in mine.tolist()], np.int64)
        end = np.array([ranges[place][1] for place in mine.tolist()], np.int64)
        at = np.searchsorted(start, time, side="right") - 1
        inside = (thread == number) & (at >= 0) & (time < end[np.maximum(at, 0)])
        result[inside] = mine[at[inside]]
    return result


def _receivers(run: Run | None, rank: int) -> dict[str, int]:
    """Channel -> the rank that its hops go to, as far as the recorder told."""
    work = run.work_of(rank) if run else None
    if run is None or work is None:
        return {}
    copied = [entry for entry in work.sent or () if entry.operation == "copy"]
    found = {entry.channel: entry.to for entry in copied if entry.to is not None}
    ranks = list(run.ranks())
    if len(ranks) == 2:
        other = ranks[0] if ranks[1] == rank else ranks[1]
        found |= {entry.channel: other for entry in copied if entry.channel not in found}
    return found


class _Posting:
    """When a rank was ready for each of its hops; activities before the window count."""

    def __init__(self, detail: Detail) -> None:
        trace, self._launch = detail.classified.trace, detail.classified.launch
        self._rows, self._launches = trace.activities, trace.launches
        on_device = self._rows.device == detail.device
        known = np.flatnonzero((self._launch != NONE) & on_device)
        self._order = known[np.argsort(self._launch[known], kind="stable")]
        self._copies = detail.classified.kind == CODE["copy_engine"]
        self._latest: dict[int, tuple[Int64, Int64]] = {}

    def of(self, copy: int) -> int:
        """The posting time of the hop whose first copy this is."""
        launch = int(self._launch[copy])
        before = self._order[: np.searchsorted(self._launch[self._order], launch)]
        computing = before[~self._copies[before]]
        returned = int(self._launches.end_ns[launch])
        streams = {int(self._rows.stream[copy])}
        if len(computing):
            streams.add(int(self._rows.stream[computing[-1]]))
        return max([returned, *(self._ended(stream, launch) for stream in streams)])

    def _ended(self, stream: int, launch: int) -> int:
        """When the work of a stream that was launched before a launch had ended."""
        if stream not in self._latest:
            mine = self._order[self._rows.stream[self._order] == stream]
            self._latest[stream] = self._launch[mine], np.maximum.accumulate(self._rows.end_ns[mine])
        launched, ended = self._latest[stream]
        place = int(np.searchsorted(launched, launch))
        return int(ended[place - 1]) if place else 0


# --- with the other ranks' hops -------------------------------------------------------------------------


def with_receivers(
    hops: Mapping[int, Sequence[CopyHop]], hosts: HostOfRank, world_size: int
) -> dict[int, tuple[CopyHop, ...]]:
    """Name receivers that no recording names: of two ranks the other one, else by the device that the copies write to.

    The device tells the rank only where all ranks of a host number the devices alike: each has a device of its own, and
    is written to by one other.
    """
    device = {rank: mine[0].device for rank, mine in hops.items() if mine}
    places: dict[tuple[str | None, int], list[int]] = defaultdict(list)
    for rank, number in device.items():
        places[hosts.get(rank), number].append(rank)

    def receiver(rank: int, hop: CopyHop) -> int | None:
        if world_size == 2:
            return next((other for other in hops if other != rank), None)
        ranks = places.get((hosts.get(rank), hop.target_device), [])
        return ranks[0] if len(ranks) == 1 and ranks[0] != rank else None

    alike = world_size == 2 or all(len(ranks) == 1 for ranks in places.values())
    named = {
        rank: tuple(
            hop if hop.receiver is not None or not alike else msgspec.structs.replace(hop, receiver=receiver(rank, hop))
            for hop in mine
        )
        for rank, mine in hops.items()
    }
    return named


class CopyPeers(msgspec.Struct, frozen=True):
    """Copy hops of the other ranks, for one rank; times by the clocks of those ranks."""

    sent: tuple[CopyHop, ...] = ()
    """Its own."""
    posted: dict[int, tuple[CopyHop, ...]] = msgspec.field(default_factory=dict)
    """Rank that it sends to -> that rank's hops."""
    arriving: dict[int, tuple[CopyHop, ...]] = msgspec.field(default_factory=dict)
    """Rank that sends to it -> the hops of that rank which go here and are matched."""


def peers_of_ranks(hops: Mapping[int, Sequence[CopyHop]]) -> dict[int, CopyPeers]:
    """Collect for each rank that posts copy hops what it must know of the others'."""
    into: dict[int, dict[int, list[CopyHop]]] = defaultdict(lambda: defaultdict(list))
    count = Counter((rank, hop.channel) for rank, mine in hops.items() for hop in mine)
    for sender, mine in hops.items():
        for hop in mine:
            # Where two ranks count the hops of a channel differently, the n-th are not the same.
            if hop.receiver is not None and count[hop.receiver, hop.channel] == count[sender, hop.channel]:
                into[hop.receiver][sender].append(hop)
    return {
        rank: CopyPeers(
            sent=tuple(mine),
            posted={one: tuple(hops[one]) for one in {hop.receiver for hop in mine} if one is not None and one in hops},
            arriving={sender: tuple(theirs) for sender, theirs in into[rank].items()},
        )
        for rank, mine in hops.items()
        if mine
    }


def unequal_hops(peers: Mapping[int, CopyPeers]) -> int:
    """Count the hops of channels of which a rank and its receiver post different numbers: they match nothing."""
    count = 0
    for mine in peers.values():
        sent = Counter((hop.channel, hop.receiver) for hop in mine.sent)
        for (channel, receiver), number in sent.items():
            theirs = sum(hop.channel == channel for hop in mine.posted.get(NONE if receiver is None else receiver, ()))
            count += number if theirs and theirs != number else 0
    return count


def blocked_on_peers(
    detail: Detail, peers: CopyPeers, offset_ns: Mapping[int, int], rank: int, *, recorded: bool
) -> tuple[PeerBlock, ...]:
    """Find the idle time of a rank that a peer caused, by start.

    ``offset_ns`` is what to add to each rank's times for one clock. ``recorded``: whether a run.json names hops by the
    copy engine, so that a hop whose receiver has no trace is known to wait for it, too.
    """
    if not peers.sent:
        return ()
    rows = detail.rows()
    stretches = idle_stretches(detail.classified, rows, detail.background(rows))
    waited = np.flatnonzero(stretches.launched_ns < stretches.end_ns)
    own = {hop.activity: hop for hop in peers.sent}
    arrivals = _Arrivals(peers, offset_ns, rank)
    found: list[PeerBlock] = []
    for place in waited.tolist():
        activity = int(stretches.activity[place])
        start, end = int(stretches.launched_ns[place]), int(stretches.end_ns[place])
        if activity in own:
            found += _departure(own[activity], start, end, peers, offset_ns, rank, recorded=recorded)
        elif detail.classified.kind[activity] not in (CODE["copy_engine"], CODE["memset"]):
            found += arrivals.into(start, end, int(stretches.launch[place]))
    return tuple(part for part in found if part.end_ns > part.start_ns)


def _departure(
    hop: CopyHop, start: int, end: int, peers: CopyPeers, offset_ns: Mapping[int, int], rank: int, *, recorded: bool
) -> list[PeerBlock]:
    """The wait of a rank's own hop for its receiver, and the rest, which is wire."""
    posted = peers.posted.get(-1 if hop.receiver is None else hop.receiver, ())
    theirs, mine = ([one for one in hops if one.channel == hop.channel] for hops in (posted, peers.sent))
    if hop.receiver is None or len(theirs) != len(mine):
        return [PeerBlock(start, end, "unsplit", hop.receiver, hop.activity)] if recorded else []
    ready = theirs[hop.number].posted_ns + offset_ns.get(hop.receiver, 0) - offset_ns.get(rank, 0)
    ready = min(max(ready, start), end)
    return [
        PeerBlock(start, ready, "wait", hop.receiver, hop.activity),
        PeerBlock(ready, end, "wire", hop.receiver, hop.activity),
    ]


class _Arrivals:
    """The hops that arrive at a rank, by their end on its clock."""

    def __init__(self, peers: CopyPeers, offset_ns: Mapping[int, int], rank: int) -> None:
        self._own = {(hop.channel, hop.number): hop for hop in peers.sent}
        self._hops = sorted(
            (hop.end_ns + shift, hop.start_ns + shift, sender, hop.channel, hop.number)
            for sender, hops in peers.arriving.items()
            for shift in (offset_ns.get(sender, 0) - offset_ns.get(rank, 0),)
            for hop in hops
        )
        self._ends = [entry[0] for entry in self._hops]

    def into(self, start: int, end: int, launch: int) -> list[PeerBlock]:
        """The waiting for the hop whose arrival let an activity start, with ``launch`` its own launch."""
        last = int(np.searchsorted(self._ends, end, side="right"))
        first = int(np.searchsorted(self._ends, max(end - SOON_NS, start)))
        for arrived, begun, sender, channel, number in reversed(self._hops[first:last]):
            own = self._own[channel, number]
            # It waits for a hop that the rank exchanged at the same time, so it was launched after that.
            if own.launch <= launch:
                begun = min(max(begun, start), end)
                return [
                    PeerBlock(start, begun, "wait", sender, own.activity),
                    PeerBlock(begun, min(arrived, end), "wire", sender, own.activity),
                ]
        return []
