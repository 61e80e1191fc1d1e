"""Idle time of a rank that is caused by a peer's copy-engine hop, with the peer.

A copy by the copy engine waits without a kernel. The wait shows as a device that idles although its next activity has
been launched. There are two cases:

* departure: the next activity is the rank's own copy, the first of its hop. The copy waits until the receiver posts the
  same hop. The receiver has posted the hop when two things are done: its launch call for the hop, and its earlier work
  on its compute stream and its copy stream. The rest is wire time.
* arrival: the next activity starts soon after the end of a copy into this rank, which a peer's trace shows. Until the
  hop of that copy begins, the rank waits for the peer. While the hop runs, bytes are on the wire.

The n-th hop of a channel is the same on every rank of the channel. Only hops that ringprof's strategies post are
recognised: their launches lie in ranges called ``ringprof::send/<channel>``.
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
from ringprof.trace.columns import NONE, Int64, among, enclosing_rows

_SEND = re.compile(r"ringprof::send/(?P<channel>[^/]+)(/to=(?P<to>[0-9]{1,7}))?")
SOON_NS = 20_000
"""Longest time in nanoseconds from the end of a copy into a rank to the start of an activity that waited for it."""


class CopiedHop(msgspec.Struct, frozen=True, gc=False):
    """One hop by the copy engine, from its sender's trace; times by the sender's clock."""

    channel: str
    number: int
    """Index of the hop in its channel, from 0; equal on every rank of the channel."""
    activity: int
    """Index of the hop's first copy in the trace's activities."""
    start_ns: int
    end_ns: int
    """End of the hop's last copy."""
    launch: int
    """Index of the first copy's launch in the trace's launches."""
    posted_ns: int
    """Time at which the rank was ready for the hop: the launch call had returned and the earlier work had ended."""
    device: int
    """Device that runs the copies."""
    target_device: int
    """Device that the copies write to, in the sender's numbering; `NONE` where the trace does not state it."""
    receiver: int | None
    """Rank that receives the hop; None where the recording does not state it."""


def copy_hops(detail: Detail, rank: int, run: Run | None) -> tuple[CopiedHop, ...]:
    """Return the copy-engine hops in a rank's window, in order of launch."""
    trace, launch = detail.classified.trace, detail.classified.launch
    activities = trace.activities
    in_window = detail.window.activities()
    copies = in_window[(detail.classified.kind[in_window] == CODE["copy_engine"]) & (launch[in_window] != NONE)]
    if detail.device is not None:
        copies = copies[activities.device[copies] == detail.device]
    matches = {index: match for index, name in enumerate(trace.names) if (match := _SEND.fullmatch(name))}
    send_ranges = np.flatnonzero(among(trace.annotations.name, np.array(list(matches), np.int32)))
    if not len(copies) or not len(send_ranges):
        return ()
    copies = copies[np.argsort(launch[copies], kind="stable")]
    ranges, calls = trace.annotations, launch[copies]
    range_of_copy = enclosing_rows(
        (ranges.start_ns[send_ranges], ranges.end_ns[send_ranges], ranges.thread[send_ranges]),
        trace.launches.start_ns[calls],
        trace.launches.thread[calls],
    )
    receivers = _recorded_receivers(run, rank)
    posting = _Posting(detail)
    hops, hops_of_channel = [], dict[str, int]()
    copies_of_range: dict[int, list[int]] = {}
    for range_index, copy in zip(range_of_copy.tolist(), copies.tolist(), strict=True):
        copies_of_range.setdefault(range_index, []).append(copy)
    copies_of_range.pop(NONE, None)
    for range_index, hop_copies in copies_of_range.items():
        match = matches[int(ranges.name[send_ranges[range_index]])]
        channel = match["channel"]
        first_copy = hop_copies[0]
        hops.append(
            CopiedHop(
                channel=channel,
                number=hops_of_channel.setdefault(channel, 0),
                activity=first_copy,
                start_ns=int(activities.start_ns[hop_copies].min()),
                end_ns=int(activities.end_ns[hop_copies].max()),
                launch=int(launch[first_copy]),
                posted_ns=posting.posted_ns(first_copy),
                device=int(activities.device[first_copy]),
                target_device=int(activities.target_device[first_copy]),
                receiver=int(match["to"]) if match["to"] else receivers.get(channel),
            )
        )
        hops_of_channel[channel] += 1
    return tuple(hops)


def _recorded_receivers(run: Run | None, rank: int) -> dict[str, int]:
    """Map each channel to the rank that receives its hops, as far as the recorder stated it.

    With two ranks the receiver is the other rank.
    """
    work = run.work_of(rank) if run else None
    if run is None or work is None:
        return {}
    copies = [sent for sent in work.sent or () if sent.operation == "copy"]
    receivers = {sent.channel: sent.to for sent in copies if sent.to is not None}
    ranks = list(run.ranks())
    if len(ranks) == 2:
        partner = ranks[0] if ranks[1] == rank else ranks[1]
        receivers |= {sent.channel: partner for sent in copies if sent.channel not in receivers}
    return receivers


class _Posting:
    """Computes when a rank was ready for each of its hops; activities before the window count."""

    def __init__(self, detail: Detail) -> None:
        trace, self._launch = detail.classified.trace, detail.classified.launch
        self._rows, self._launches = trace.activities, trace.launches
        on_device = self._rows.device == detail.device
        known = np.flatnonzero((self._launch != NONE) & on_device)
        self._order = known[np.argsort(self._launch[known], kind="stable")]
        self._computing = self._order[detail.classified.kind[self._order] != CODE["copy_engine"]]
        self._computing_launch = self._launch[self._computing]
        self._latest: dict[int, tuple[Int64, Int64]] = {}

    def posted_ns(self, copy: int) -> int:
        """Return the time at which the rank posted the hop whose first copy is activity ``copy``."""
        launch = int(self._launch[copy])
        computing_before = int(np.searchsorted(self._computing_launch, launch))
        returned = int(self._launches.end_ns[launch])
        streams = {int(self._rows.stream[copy])}
        if computing_before:
            streams.add(int(self._rows.stream[self._computing[computing_before - 1]]))
        return max([returned, *(self._stream_ended_ns(stream, launch) for stream in streams)])

    def _stream_ended_ns(self, stream: int, launch: int) -> int:
        """Return the latest end of the work that a stream had been given before a launch; 0 without any."""
        if stream not in self._latest:
            of_stream = self._order[self._rows.stream[self._order] == stream]
            self._latest[stream] = self._launch[of_stream], np.maximum.accumulate(self._rows.end_ns[of_stream])
        launched, end_ns = self._latest[stream]
        count = int(np.searchsorted(launched, launch))
        return int(end_ns[count - 1]) if count else 0


# --- with the other ranks' hops -------------------------------------------------------------------------


def name_receivers(
    hops: Mapping[int, Sequence[CopiedHop]], hosts: HostOfRank, world_size: int
) -> dict[int, tuple[CopiedHop, ...]]:
    """Fill in the receivers that no recording states: the other of two ranks, or the rank on the copies' target device.

    The target device identifies a rank only where all ranks of a host number the devices alike. This holds where each
    rank of a host uses a device of its own.
    """
    device_of_rank = {rank: rank_hops[0].device for rank, rank_hops in hops.items() if rank_hops}
    ranks_of_device: dict[tuple[str | None, int], list[int]] = defaultdict(list)
    for rank, device in device_of_rank.items():
        ranks_of_device[hosts.get(rank), device].append(rank)

    def receiver(rank: int, hop: CopiedHop) -> int | None:
        """Return the receiver of a hop; None where the target device does not identify a rank."""
        if world_size == 2:
            return next((other for other in hops if other != rank), None)
        ranks = ranks_of_device.get((hosts.get(rank), hop.target_device), [])
        return ranks[0] if len(ranks) == 1 and ranks[0] != rank else None

    identifiable = world_size == 2 or all(len(ranks) == 1 for ranks in ranks_of_device.values())
    named = {
        rank: tuple(
            hop
            if hop.receiver is not None or not identifiable
            else msgspec.structs.replace(hop, receiver=receiver(rank, hop))
            for hop in rank_hops
        )
        for rank, rank_hops in hops.items()
    }
    return named


class CopyPeers(msgspec.Struct, frozen=True):
    """Copy hops of one rank and of the ranks it exchanges with; times by the clock of each hop's sender."""

    sent: tuple[CopiedHop, ...] = ()
    """Hops that the rank sends."""
    posted: dict[int, tuple[CopiedHop, ...]] = msgspec.field(default_factory=dict)
    """Receiver of the rank's hops -> all hops that the receiver posts."""
    arriving: dict[int, tuple[CopiedHop, ...]] = msgspec.field(default_factory=dict)
    """Sender of hops to the rank -> its hops that are received here and are matched."""


def peers_of_ranks(hops: Mapping[int, Sequence[CopiedHop]]) -> dict[int, CopyPeers]:
    """Collect for each rank that posts copy hops its own hops and those of the ranks it exchanges with."""
    arriving: dict[int, dict[int, list[CopiedHop]]] = defaultdict(lambda: defaultdict(list))
    count = Counter((rank, hop.channel) for rank, rank_hops in hops.items() for hop in rank_hops)
    for sender, rank_hops in hops.items():
        for hop in rank_hops:
            # The n-th hops of two ranks correspond only if both have the same number of hops in the channel.
            if hop.receiver is not None and count[hop.receiver, hop.channel] == count[sender, hop.channel]:
                arriving[hop.receiver][sender].append(hop)
    return {
        rank: CopyPeers(
            sent=tuple(rank_hops),
            posted={
                receiver: tuple(hops[receiver])
                for receiver in {hop.receiver for hop in rank_hops}
                if receiver is not None and receiver in hops
            },
            arriving={sender: tuple(sender_hops) for sender, sender_hops in arriving[rank].items()},
        )
        for rank, rank_hops in hops.items()
        if rank_hops
    }


def count_unequal_hops(peers: Mapping[int, CopyPeers]) -> int:
    """Count the unmatched hops: those of channels in which a rank and its receiver post different numbers of hops."""
    count = 0
    for rank_peers in peers.values():
        sent = Counter((hop.channel, hop.receiver) for hop in rank_peers.sent)
        for (channel, receiver), sent_count in sent.items():
            receiver_count = sum(
                hop.channel == channel for hop in rank_peers.posted.get(NONE if receiver is None else receiver, ())
            )
            count += sent_count if receiver_count and receiver_count != sent_count else 0
    return count


def blocked_on_peers(
    detail: Detail, peers: CopyPeers, offset_ns: Mapping[int, int], rank: int, *, recorded: bool
) -> tuple[PeerBlock, ...]:
    """Find the idle time of a rank that a peer caused, in order of start.

    ``offset_ns``: offset per rank to add to its times for one common clock. ``recorded``: whether ``run.json`` states
    that the copy engine carries hops. A hop whose receiver has no trace then counts as waiting for it.
    """
    if not peers.sent:
        return ()
    rows = detail.rows()
    stretches = idle_stretches(detail.classified, rows, detail.background(rows))
    already_launched = np.flatnonzero(stretches.launched_ns < stretches.end_ns)
    own_hops = {hop.activity: hop for hop in peers.sent}
    arrivals = _Arrivals(peers, offset_ns, rank)
    blocks: list[PeerBlock] = []
    for index in already_launched.tolist():
        activity = int(stretches.activity[index])
        start, end = int(stretches.launched_ns[index]), int(stretches.end_ns[index])
        if activity in own_hops:
            blocks += _departure_blocks(own_hops[activity], start, end, peers, offset_ns, rank, recorded=recorded)
        elif detail.classified.kind[activity] not in (CODE["copy_engine"], CODE["memset"]):
            blocks += arrivals.blocks_before(start, end, int(stretches.launch[index]))
    return tuple(block for block in blocks if block.end_ns > block.start_ns)


def _departure_blocks(
    hop: CopiedHop, start: int, end: int, peers: CopyPeers, offset_ns: Mapping[int, int], rank: int, *, recorded: bool
) -> list[PeerBlock]:
    """Split the idle time before a rank's own hop into waiting for the receiver and wire time.

    Returns one block ``unsplit`` (with ``recorded``) or nothing where the receiver's hops are not known.
    """
    posted = peers.posted.get(-1 if hop.receiver is None else hop.receiver, ())
    receiver_hops, own_hops = (
        [candidate for candidate in hops if candidate.channel == hop.channel] for hops in (posted, peers.sent)
    )
    if hop.receiver is None or len(receiver_hops) != len(own_hops):
        return [PeerBlock(start, end, "unsplit", hop.receiver, hop.activity)] if recorded else []
    receiver_ready = receiver_hops[hop.number].posted_ns + offset_ns.get(hop.receiver, 0) - offset_ns.get(rank, 0)
    receiver_ready = min(max(receiver_ready, start), end)
    return [
        PeerBlock(start, receiver_ready, "wait", hop.receiver, hop.activity),
        PeerBlock(receiver_ready, end, "wire", hop.receiver, hop.activity),
    ]


class _Arrivals:
    """Hops that arrive at a rank, sorted by their end on the rank's clock."""

    def __init__(self, peers: CopyPeers, offset_ns: Mapping[int, int], rank: int) -> None:
        self._own = {(hop.channel, hop.number): hop for hop in peers.sent}
        self._hops = sorted(
            (hop.end_ns + shift, hop.start_ns + shift, sender, hop.channel, hop.number)
            for sender, hops in peers.arriving.items()
            for shift in (offset_ns.get(sender, 0) - offset_ns.get(rank, 0),)
            for hop in hops
        )
        self._ends = [entry[0] for entry in self._hops]

    def blocks_before(self, start: int, end: int, launch: int) -> list[PeerBlock]:
        """Split the idle time before an activity that an arriving hop let start; empty where no hop fits.

        ``start`` and ``end`` bound the idle time, ``launch`` is the activity's own launch.
        """
        last = int(np.searchsorted(self._ends, end, side="right"))
        first = int(np.searchsorted(self._ends, max(end - SOON_NS, start)))
        for arrived, began, sender, channel, number in reversed(self._hops[first:last]):
            own_hop = self._own[channel, number]
            # The activity waits for a hop that the rank exchanged at the same time, so its launch follows that hop's.
            if own_hop.launch <= launch:
                began = min(max(began, start), end)
                return [
                    PeerBlock(start, began, "wait", sender, own_hop.activity),
                    PeerBlock(began, min(arrived, end), "wire", sender, own_hop.activity),
                ]
        return []
