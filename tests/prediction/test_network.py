"""NCCL's channel rule against public measurements, and which transfers share a link."""

from __future__ import annotations

import csv

import msgspec
import pytest

from ringprof.dryrun.schedule import CommStart
from ringprof.prediction.calibration import Nccl, read_calibration
from ringprof.prediction.network import Cluster, Links, channels
from tests.paths import ROOT

MIB = 1 << 20
HOPPER = Nccl(version="2.28.9", peer_channels=32)


def hop(*members: int, messages: tuple[int, ...] = (64 * MIB,), operation: str = "send_recv") -> CommStart:
    return CommStart(
        id=1, channel="kv", phase="forward", operation=operation, members=members, communicator="kv", messages=messages
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "by_size"), [(8, [4, 8, 16, 32]), (4, [8, 8, 16, 32]), (2, [16, 16, 16, 32])], ids=str
)
def test_intra_node_channel_counts(ranks: int, by_size: list[int]) -> None:
    """Sweeps of mghpcc/aicr-benchmarks on 1 to 8 B200 show these counts at 64, 128, 256 and 512 MiB."""
    assert [channels(size * MIB, ranks, 1, HOPPER, 0.0) for size in (64, 128, 256, 512)] == by_size


def test_inter_node_channel_counts() -> None:
    """Together AI's 8 x 400 Gbit/s B200, NCCL 2.29.7: 42, 44, 26, 14.5, 14.5 GB/s at 16 to 256 ranks."""
    nccl_2_29 = msgspec.structs.replace(HOPPER, version="2.29.7")
    counts = [channels(64 * MIB, ranks, ranks // 8, nccl_2_29, 50.0) for ranks in (16, 32, 64, 128, 256)]
    assert counts == [4, 4, 2, 1, 1]
    assert [channels(64 * MIB, ranks, ranks // 8, HOPPER, 50.0) for ranks in (16, 64, 128)] == [2, 2, 1]
    assert channels(64 * MIB, 128, 16, HOPPER, 50.0, net_channels=4) == 4


def test_hops_with_communicators_of_two_ranks_are_as_fast_on_any_number_of_ranks() -> None:
    """torch's isend outside a batch: 16 channels inside a host, 2 between hosts, in rings of 16 and of 1,024 ranks.

    In the ring's own communicator both have 2 channels, and 1 beyond 64 ranks.
    """
    machine = read_calibration("h100")
    inside, outside = machine.same_host.channel_gb_s.value, machine.other_host.channel_gb_s.value
    for hosts, shared in ((2, 2), (128, 1)):
        comm_op = hop(*range(8 * hosts))
        pairs, ring = (
            Links(machine, Cluster(hosts=hosts, nic_gbit=400.0, pairwise=pairwise)) for pairwise in (True, False)
        )
        assert [pairs.transfer(comm_op, 0, 1).cap, pairs.transfer(comm_op, 7, 8).cap] == pytest.approx(
            [16 * inside, 2 * outside]
        )
        assert [ring.transfer(comm_op, 0, 1).cap, ring.transfer(comm_op, 7, 8).cap] == pytest.approx(
            [shared * inside, shared * outside]
        )
        # A send and a receive kernel of 16 channels each, on 132 multiprocessors.
        assert pairs.held_share(comm_op) == pytest.approx(32 / 132)


def test_collectives_have_the_communicator_of_all_ranks_either_way() -> None:
    machine, comm_op = read_calibration("h100"), hop(*range(16), operation="all_to_all")
    links = [Links(machine, Cluster(hosts=2, nic_gbit=400.0, pairwise=pairwise)) for pairwise in (True, False)]
    assert links[0].collective_ns(comm_op) == links[1].collective_ns(comm_op)
    assert links[0].held_share(comm_op) == links[1].held_share(comm_op)


def test_h200_hop_times_equal_measurements() -> None:
    """Messages from 64 MiB, in communicators of 2 and 4, of one and two tensors: within 16 %, 7 % on average."""
    links = Links(read_calibration("h200"), Cluster(gpus_per_host=8))
    errors = []
    with open(ROOT / "dev" / "benchmarks" / "data" / "h200_links.csv", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            size, count = int(row["mib_each_way"]) * MIB, int(row["tensors"])
            if size >= 64 * MIB:
                comm_op = hop(*range(int(row["communicator_ranks"])), messages=(size // count,) * count)
                transfer = links.transfer(comm_op, 0, 1)
                errors.append((transfer.latency_ns + transfer.size_bytes / transfer.cap) / (float(row["us"]) * 1e3) - 1)
    assert len(errors) >= 10
    assert max(map(abs, errors)) < 0.16 and sum(map(abs, errors)) / len(errors) < 0.07


def test_transfers_share_nics_and_up_links() -> None:
    """4 GPUs per host, two per NIC; a rail keeps transfers between equal positions off the up-links."""
    machine = read_calibration("h100")
    cluster = Cluster(hosts=2, gpus_per_host=4, nic_gbit=400.0, gpus_per_nic=2, oversubscription=2.0)
    links = Links(machine, cluster)
    paths = {receiver: links.transfer(hop(*range(8)), 0, receiver).links for receiver in (1, 4, 6)}
    assert paths == {
        1: (("out", 0), ("in", 1)),
        4: (("nic-out", (0, 0)), ("nic-in", (1, 0))),
        6: (("nic-out", (0, 0)), ("nic-in", (1, 1)), ("up", 0), ("down", 1)),
    }
    assert links.capacity(("nic-out", (0, 0))) == pytest.approx(43.0)
    assert links.capacity(("up", 0)) == pytest.approx(2 * 43.0 / 2)


def test_collectives_by_their_formulas() -> None:
    """h200: an all-to-all of 4 sends three pieces, an all-gather takes in three; over hosts the NIC is the bound."""
    machine = read_calibration("h100")
    rates = {name: value.value for name, value in machine.same_host.collective_gb_s.items()}
    latency = machine.same_host.latency_us.value * 1e3
    inside = Links(machine, Cluster(gpus_per_host=4))
    for name in ("all_to_all", "all_gather", "reduce_scatter"):
        comm_op = hop(0, 1, 2, 3, operation=name, messages=(64 * MIB,))
        assert inside.collective_ns(comm_op) == pytest.approx(3 * 64 * MIB / rates[name] + latency)
    across = Links(machine, Cluster(hosts=2, gpus_per_host=2, nic_gbit=400.0))
    comm_op = hop(0, 1, 2, 3, operation="all_to_all", messages=(64 * MIB,))
    wire = 2 * 64 * MIB / 43.0
    assert across.collective_ns(comm_op) == pytest.approx(wire + machine.other_host.latency_us.value * 1e3)


def test_collectives_between_hosts_have_the_latency_between_hosts() -> None:
    machine = read_calibration("h100")
    same, other = (msgspec.structs.replace(machine.same_host.latency_us, value=value) for value in (10.0, 70.0))
    machine = msgspec.structs.replace(
        machine,
        same_host=msgspec.structs.replace(machine.same_host, latency_us=same),
        other_host=msgspec.structs.replace(machine.other_host, latency_us=other),
    )
    comm_op = hop(0, 1, operation="all_gather", messages=(1000,))
    inside, across = (
        Links(machine, Cluster(hosts=hosts, gpus_per_host=2 // hosts, nic_gbit=400.0)).collective_ns(comm_op)
        for hosts in (1, 2)
    )
    # Transferring 1000 bytes takes less than a microsecond.
    assert 10_000 < inside < 11_000 and 70_000 < across < 71_000


def test_gpus_sharing_a_nic_share_its_rate_in_a_collective() -> None:
    """Two GPUs share a NIC of 43 GB/s, halved by oversubscription: two pieces of 64 MiB move at 10.75 GB/s."""
    machine = read_calibration("h100")
    cluster = Cluster(hosts=2, gpus_per_host=2, nic_gbit=400.0, gpus_per_nic=2, oversubscription=2.0)
    comm_op = hop(0, 1, 2, 3, operation="all_to_all", messages=(64 * MIB,))
    latency_ns = machine.other_host.latency_us.value * 1e3
    assert Links(machine, cluster).collective_ns(comm_op) == pytest.approx(2 * 64 * MIB / 10.75 + latency_ns)


def test_copies_occupy_no_multiprocessors() -> None:
    links = Links(read_calibration("h200"), Cluster(gpus_per_host=4))
    assert links.device_share(hop(0, 1, operation="copy")) == 0
    assert links.held_share(hop(0, 1, 2, 3, messages=(512 * MIB,))) == pytest.approx(32 / 132)
