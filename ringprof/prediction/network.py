"""Rates of transfers on a cluster: NCCL's channels, NVLink, NICs, and which transfers share them.

NCCL's rate is not a property of the link alone. A hop uses as many channels as the size of its communicator and of its
largest message allow, and each channel has its own rate (NCCL 2.28, `addP2pToPlan`):

* one host: all channels to a peer, halved while channels x ranks exceed them, doubled while a channel would carry
  more than 16 MiB of a message;
* several hosts, up to 2.28: 2 channels, halved beyond 4 x channels ranks; from 2.29: ceil(NIC GB/s / 14), halved while
  channels x hosts (of 8 ranks) exceed them. Hops inside a host get no more in such a communicator.

torch's ``isend`` and ``irecv`` outside a batch use a communicator of the two ranks (`ProcessGroupNCCL::pointToPoint`).
The number of ranks in the ring then does not matter, and hops inside a host keep all their channels. Transformer
Engine's ring sends this way; ringprof's own strategies and ring-flash-attn send in batches, in the ring's communicator.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ringprof.common.validation import refuse_below_one, whole
from ringprof.dryrun.schedule import CommStart
from ringprof.prediction.calibration import Calibration, Link, Nccl
from ringprof.prediction.simulator import LinkTransfer

MESSAGE_BYTES_PER_CHANNEL = 16 << 20
NIC_GB_S_PER_CHANNEL = 14
GPUS_PER_SWITCH = 8
"""Largest number of GPUs per node that calibrations are measured on: rates in larger nodes are assumed to be equal."""
RANKS_PER_NODE = 8
"""Number of ranks that NCCL 2.29 assumes per host when it counts hosts."""


@dataclass(frozen=True)
class Cluster:
    """Nodes, GPUs per node and the network between nodes, as far as a calibration does not define them."""

    hosts: int = 1
    gpus_per_host: int = 8
    nic_gbit: float | None = None
    """Line rate of a NIC in Gbit/s; None means the rate that the calibration measured."""
    gpus_per_nic: int = 1
    oversubscription: float = 1.0
    """Rate of a host's NICs divided by the rate of its up-links."""
    net_channels: int | None = None
    """Value of ``NCCL_NCHANNELS_PER_NET_PEER``."""
    pairwise: bool = False
    """Whether each hop has a communicator of its two ranks instead of the ring's."""
    stretch: float = 1.0
    """Size of the real communicators across hosts, relative to the simulated ones that stand for them."""
    host_stretch: float = 1.0
    """Size of the real communicators of all ranks of a host, relative to the simulated ones that stand for them."""

    def __post_init__(self) -> None:
        """Check the counts. Raises `UsageError` for a count below 1."""
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


def channels(
    message_bytes: int, ranks: int, hosts: int, nccl: Nccl, nic_gb_s: float, net_channels: int | None = None
) -> int:
    """Return the number of NCCL channels to one peer, for a message in a communicator of ``ranks`` on ``hosts``."""
    max_channels = nccl.peer_channels
    if hosts > 1:
        return net_channels or _net_channels(ranks, nccl, nic_gb_s)
    count = max_channels
    while count > 1 and count * ranks > max_channels:
        count //= 2
    while count < max_channels and message_bytes > count * MESSAGE_BYTES_PER_CHANNEL:
        count *= 2
    return count


def _net_channels(ranks: int, nccl: Nccl, nic_gb_s: float) -> int:
    """Return the number of channels to a peer on another host."""
    since_2_29 = [whole(part) or 0 for part in nccl.version.split(".")[:2]] >= [2, 29]
    count = math.ceil(nic_gb_s / NIC_GB_S_PER_CHANNEL) if since_2_29 else 2
    # A NIC gets half of the channels that peers get inside a host.
    max_channels = nccl.peer_channels // 2
    while count > 1 and (
        count * math.ceil(ranks / RANKS_PER_NODE) > max_channels if since_2_29 else ranks > 4 * max_channels
    ):
        count //= 2
        if not since_2_29:
            break
    return count


class Links:
    """Rates and paths of the transfers on one cluster, by a calibration."""

    def __init__(self, calibration: Calibration, cluster: Cluster) -> None:
        self._nccl, self.cluster = calibration.nccl, cluster
        self._same_host, self._other_host = calibration.same_host, calibration.other_host
        self._multiprocessors, self._contention = calibration.multiprocessors, calibration.contention.value
        self._copy = calibration.same_host.copy_gb_s
        line = self._other_host.total_gb_s.value
        # The fraction of the line rate that a NIC reaches is the one measured on the calibrated machine.
        line_gbit = self._other_host.line_gbit
        efficiency = line / (line_gbit / 8) if line_gbit else 1.0
        self.nic_gb_s = line if cluster.nic_gbit is None else cluster.nic_gbit / 8 * efficiency
        self._transfers: dict[tuple[object, ...], LinkTransfer] = {}
        self._held_shares: dict[tuple[object, ...], float] = {}

    def transfer(self, comm_op: CommStart, sender: int, receiver: int) -> LinkTransfer:
        """Return the transfer of one hop from a member of a ring to the next."""
        # Cached: there are many hops, and few of them differ.
        key = comm_op.operation, comm_op.communicator, len(comm_op.members), comm_op.messages, sender, receiver
        if key not in self._transfers:
            self._transfers[key] = self._transfer(comm_op, sender, receiver)
        return self._transfers[key]

    def _transfer(self, comm_op: CommStart, sender: int, receiver: int) -> LinkTransfer:
        """Compute the transfer of one hop: its size, its highest rate, its latency and its links."""
        same_host = self.cluster.host(sender) == self.cluster.host(receiver)
        link = self._same_host if same_host else self._other_host
        total_bytes = sum(comm_op.messages)
        if comm_op.operation == "copy":
            assert self._copy is not None, "refused before"
            max_rate = self._copy.value
        else:
            ends = sender, receiver
            max_rate = total_bytes / sum(
                size / self._message_gb_s(comm_op, size, link, ends) for size in comm_op.messages
            )
        return LinkTransfer(total_bytes, max_rate, link.latency_us.value * 1e3, self._path(sender, receiver))

    def collective_ns(self, comm_op: CommStart) -> float:
        """Return the nanoseconds of a collective that has the links to itself."""
        members, (piece,) = comm_op.members, comm_op.messages
        on_first_host = sum(self.cluster.host(member) == self.cluster.host(members[0]) for member in members)
        hosts = self.cluster.hosts_of(members)
        nvlink = self._same_host.collective_gb_s[comm_op.operation].value
        nic = self.nic_gb_s / self.cluster.gpus_per_nic / self.cluster.oversubscription
        if comm_op.operation == "all_to_all":
            nic_ns = (len(members) - on_first_host) * piece / nic if hosts > 1 else 0.0
            wire_ns = max((on_first_host - 1) * piece / nvlink, nic_ns)
        else:
            # Every channel's ring crosses between hosts over its own NIC.
            rate = nvlink if hosts == 1 else min(nvlink, nic * on_first_host)
            wire_ns = (len(members) - 1) * piece / rate
        latency = self._same_host.latency_us if hosts == 1 else self._other_host.latency_us
        return wire_ns + latency.value * 1e3

    def device_share(self, comm_op: CommStart) -> float:
        """Return the fraction of a concurrent block's rate that the transfer's kernel takes."""
        return self._contention * self.held_share(comm_op)

    def held_share(self, comm_op: CommStart) -> float:
        """Return the fraction of the multiprocessors that a transfer's kernel holds; 0 for copy engines."""
        if comm_op.operation == "copy":
            return 0.0
        key = comm_op.operation, comm_op.communicator, len(comm_op.members), comm_op.messages
        if key not in self._held_shares:
            self._held_shares[key] = min(self.channels_of(comm_op), self._nccl.peer_channels) / self._multiprocessors
        return self._held_shares[key]

    def channels_of(self, comm_op: CommStart) -> int:
        """Return the number of channels of a transfer; each is a thread block of its kernel."""
        if comm_op.operation in ("all_gather", "reduce_scatter"):
            return self._nccl.collective_channels
        per_peer = max(self._channels(comm_op, message, comm_op.members[:2]) for message in comm_op.messages)
        if comm_op.operation == "chain":
            return per_peer
        if comm_op.operation == "send_recv":
            # Send and receive are two kernels where each has its own communicator.
            return 2 * per_peer if self.cluster.pairwise else per_peer
        return min(per_peer * (len(comm_op.members) - 1), self._nccl.peer_channels)

    def capacity(self, link: Hashable) -> float:
        """Return the capacity in GB/s (bytes per nanosecond) of a link named by `transfer`."""
        assert isinstance(link, tuple)
        if link[0] in ("out", "in"):
            return self._same_host.total_gb_s.value
        nic = self.nic_gb_s
        if link[0] in ("nic-out", "nic-in"):
            return nic
        return nic * self.cluster.gpus_per_host / self.cluster.gpus_per_nic / self.cluster.oversubscription

    def hop_gb_s(self, comm_op: CommStart) -> float:
        """Return the GB/s that NCCL's channels allow one hop between hosts."""
        ends = 0, self.cluster.gpus_per_host
        return min(self._message_gb_s(comm_op, message, self._other_host, ends) for message in comm_op.messages)

    def _path(self, sender: int, receiver: int) -> tuple[Hashable, ...]:
        """Return the links that a transfer crosses."""
        cluster = self.cluster
        if cluster.host(sender) == cluster.host(receiver):
            return (("out", sender), ("in", receiver))
        positions = [divmod(rank, cluster.gpus_per_host) for rank in (sender, receiver)]
        nics = [(host, local // cluster.gpus_per_nic) for host, local in positions]
        path: list[Hashable] = [("nic-out", nics[0]), ("nic-in", nics[1])]
        # NICs with the same index in their hosts share a switch (a rail). Only other transfers use the up-links.
        if cluster.oversubscription > 1 and nics[0][1] != nics[1][1]:
            path += [("up", nics[0][0]), ("down", nics[1][0])]
        return tuple(path)

    def _message_gb_s(self, comm_op: CommStart, message: int, link: Link, ends: Sequence[int]) -> float:
        return min(self._channels(comm_op, message, ends) * link.channel_gb_s.value, link.hop_gb_s.value)

    def _channels(self, comm_op: CommStart, message: int, ends: Sequence[int]) -> int:
        """Return the number of channels of a message; ``ends`` are sender and receiver of a hop."""
        members = ends if self.cluster.pairwise and comm_op.operation == "send_recv" else comm_op.members
        hosts = self.cluster.hosts_of(members)
        stretch = 1.0
        if members is comm_op.members:
            if hosts > 1 or len(members) == self.cluster.size:
                stretch = self.cluster.stretch
            elif len(members) == self.cluster.gpus_per_host:
                stretch = self.cluster.host_stretch
        ranks = round(len(members) * stretch)
        return channels(message, ranks, hosts, self._nccl, self.nic_gb_s, self.cluster.net_channels)
