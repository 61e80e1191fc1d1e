"""What a transfer gets of the links: NCCL's channels, NVLink, NICs, and who shares what.

NCCL's rate is no property of the link alone. A hop moves over as many channels as the size of its communicator and of
its largest message allow, each channel with a rate of its own (NCCL 2.28, `addP2pToPlan`):

* one host: all channels to a peer, halved while channels x ranks exceed them, doubled while a channel would carry
  more than 16 MiB of a message;
* several hosts, up to 2.28: 2 channels, halved beyond 4 x channels ranks; from 2.29: ceil(NIC GB/s / 14), halved while
  channels x hosts (of 8 ranks) exceed them. Hops inside a host get no more in such a communicator.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ringprof.prediction.calibration import Calibration, Link, Nccl
from ringprof.prediction.simulator import Transfer
from ringprof.record.dryrun.schedule import CommStart
from ringprof.validation import refuse_below_one, whole

MESSAGE_A_CHANNEL = 16 << 20
NIC_GB_S_A_CHANNEL = 14
RANKS_A_NODE = 8
"""What NCCL 2.29 takes for a host when it counts hosts."""


@dataclass(frozen=True)
class Cluster:
    """The machine's network, as far as a calibration does not tell it."""

    hosts: int = 1
    gpus_per_host: int = 8
    nic_gbit: float | None = None
    """Line rate of a NIC, Gbit/s; None: what the calibration measured."""
    gpus_per_nic: int = 1
    oversubscription: float = 1.0
    """Rate of a host's NICs over that of its up-links."""
    net_channels: int | None = None
    """``NCCL_NCHANNELS_PER_NET_PEER``."""
    stretch: float = 1.0
    """How many times as large communicators across hosts are as those simulated, which stand for them."""

    def __post_init__(self) -> None:
        """Raises `UsageError` for a count below 1."""
        refuse_below_one({name: getattr(self, name) for name in ("hosts", "gpus_per_host", "gpus_per_nic")})

    @property
    def size(self) -> int:
        return self.hosts * self.gpus_per_host

    def host(self, rank: int) -> int:
        return rank // self.gpus_per_host

    def hosts_of(self, ranks: Sequence[int]) -> int:
        return _hosts_of(tuple(ranks), self.gpus_per_host)


@lru_cache(maxsize=256)
def _hosts_of(ranks: tuple[int, ...], per_host: int) -> int:
    return len({rank // per_host for rank in ranks})


def channels(message_bytes: int, ranks: int, hosts: int, nccl: Nccl, nic_gb_s: float, given: int | None = None) -> int:
    """Channels to one peer of a message in a communicator of ``ranks`` on ``hosts``."""
    most = nccl.peer_channels
    if hosts > 1:
        return given or _net_channels(ranks, nccl, nic_gb_s)
    count = most
    while count > 1 and count * ranks > most:
        count //= 2
    while count < most and message_bytes > count * MESSAGE_A_CHANNEL:
        count *= 2
    return count


def _net_channels(ranks: int, nccl: Nccl, nic_gb_s: float) -> int:
    newer = _version(nccl.version) >= (2, 29)
    count = math.ceil(nic_gb_s / NIC_GB_S_A_CHANNEL) if newer else 2
    # Of a NIC: half of what peers get inside a host.
    most = nccl.peer_channels // 2
    while count > 1 and (count * math.ceil(ranks / RANKS_A_NODE) > most if newer else ranks > 4 * most):
        count //= 2
        if not newer:
            break
    return count


def _version(text: str) -> tuple[int, ...]:
    parts = [whole(part) for part in text.split(".")[:2]]
    return (0,) if None in parts else tuple(part for part in parts if part is not None)


class Links:
    """The transfers of one cluster by a calibration."""

    def __init__(self, calibration: Calibration, cluster: Cluster) -> None:
        self._nccl, self.cluster = calibration.nccl, cluster
        self._same, self._other = calibration.same_host, calibration.other_host
        self._units, self._contention = calibration.multiprocessors, calibration.contention.value
        self._copy = calibration.same_host.copy_gb_s
        line = self._other.total_gb_s.value
        # What a NIC reaches of its line rate is taken from the machine that was calibrated.
        self.nic_gb_s = line if cluster.nic_gbit is None else cluster.nic_gbit / 8 * _reached(self._other)
        self._legs: dict[tuple[object, ...], Transfer] = {}
        self._held: dict[tuple[object, ...], float] = {}

    def leg(self, post: CommStart, sender: int, receiver: int) -> Transfer:
        """One hop from a member of a ring to the next."""
        # As many as there are hops, and only some of them unlike.
        key = post.operation, post.communicator, len(post.members), post.messages, sender, receiver
        if key not in self._legs:
            self._legs[key] = self._leg(post, sender, receiver)
        return self._legs[key]

    def _leg(self, post: CommStart, sender: int, receiver: int) -> Transfer:
        same = self.cluster.host(sender) == self.cluster.host(receiver)
        link = self._same if same else self._other
        size = sum(post.messages)
        if post.operation == "copy":
            assert self._copy is not None, "refused before"
            cap = self._copy.value
        else:
            cap = size / sum(message / self._message_gb_s(post, message, link) for message in post.messages)
        return Transfer(size, cap, link.latency_us.value * 1e3, self._path(sender, receiver))

    def collective(self, post: CommStart) -> float:
        """Nanoseconds of a collective that has the links to itself."""
        members, (piece,) = post.members, post.messages
        here = sum(self.cluster.host(member) == self.cluster.host(members[0]) for member in members)
        hosts = self.cluster.hosts_of(members)
        nvlink = self._same.collective_gb_s[post.operation].value
        nic = self.nic_gb_s / self.cluster.gpus_per_nic / self.cluster.oversubscription
        if post.operation == "all_to_all":
            busy = max((here - 1) * piece / nvlink, (len(members) - here) * piece / nic if hosts > 1 else 0.0)
        else:
            # A ring of every channel crosses from host to host over a NIC of its own.
            rate = nvlink if hosts == 1 else min(nvlink, nic * here)
            busy = (len(members) - 1) * piece / rate
        latency = self._same.latency_us if hosts == 1 else self._other.latency_us
        return busy + latency.value * 1e3

    def share(self, post: CommStart) -> float:
        """What of a block's rate a transfer's kernel takes."""
        return self._contention * self.held(post)

    def held(self, post: CommStart) -> float:
        """The part of the multiprocessors that a transfer's kernel holds; none where copy engines carry it."""
        if post.operation == "copy":
            return 0.0
        key = post.operation, post.communicator, len(post.members), post.messages
        if key not in self._held:
            self._held[key] = min(self.channels_of(post), self._nccl.peer_channels) / self._units
        return self._held[key]

    def channels_of(self, post: CommStart) -> int:
        """Channels that a transfer holds: each is a block of its kernel."""
        if post.operation in ("all_gather", "reduce_scatter"):
            return self._nccl.collective_channels
        each = max(self._channels(post, message) for message in post.messages)
        return each if post.operation == "send_recv" else min(each * (len(post.members) - 1), self._nccl.peer_channels)

    def capacity(self, link: Hashable) -> float:
        """GB/s, which is bytes a nanosecond, of what `leg` names."""
        assert isinstance(link, tuple)
        if link[0] in ("out", "in"):
            return self._same.total_gb_s.value
        nic = self.nic_gb_s
        if link[0] in ("nic-out", "nic-in"):
            return nic
        return nic * self.cluster.gpus_per_host / self.cluster.gpus_per_nic / self.cluster.oversubscription

    def hop_gb_s(self, post: CommStart) -> float:
        """What NCCL's channels let one hop between hosts have."""
        return min(self._message_gb_s(post, message, self._other) for message in post.messages)

    def _path(self, sender: int, receiver: int) -> tuple[Hashable, ...]:
        cluster = self.cluster
        if cluster.host(sender) == cluster.host(receiver):
            return (("out", sender), ("in", receiver))
        places = [divmod(rank, cluster.gpus_per_host) for rank in (sender, receiver)]
        nics = [(host, local // cluster.gpus_per_nic) for host, local in places]
        path: list[Hashable] = [("nic-out", nics[0]), ("nic-in", nics[1])]
        # NICs of one place in their hosts share a switch (a rail): only other transfers take the up-links.
        if cluster.oversubscription > 1 and nics[0][1] != nics[1][1]:
            path += [("up", nics[0][0]), ("down", nics[1][0])]
        return tuple(path)

    def _message_gb_s(self, post: CommStart, message: int, link: Link) -> float:
        return min(self._channels(post, message) * link.channel_gb_s.value, link.hop_gb_s.value)

    def _channels(self, post: CommStart, message: int) -> int:
        hosts = self.cluster.hosts_of(post.members)
        crosses = hosts > 1 or len(post.members) == self.cluster.size
        ranks = round(len(post.members) * self.cluster.stretch) if crosses else len(post.members)
        return channels(message, ranks, hosts, self._nccl, self.nic_gb_s, self.cluster.net_channels)


def _reached(link: Link) -> float:
    """The part of a NIC's line rate that transfers get."""
    return link.total_gb_s.value / (link.line_gbit / 8) if link.line_gbit else 1.0
