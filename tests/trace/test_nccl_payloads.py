"""NVTX payloads of NCCL in exports built from the documented schema; no real export with payloads was available."""

from __future__ import annotations

import sqlite3
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from ringprof.analysis.transfers.hops import TimedHop
from ringprof.scale.pipeline import attribute
from ringprof.trace.columns import Trace
from ringprof.trace.nccl_payloads import NcclCall, communicator_members
from ringprof.trace.nsys import read_nsys
from ringprof.trace.ranks import read_traces
from tests.trace.test_nsys import TABLES, process

INIT, GATHER, REDUCE, MESSAGE = (1 << 24) + 0, (1 << 24) + 4, (1 << 24) + 7, (1 << 24) + 9
COMM, SIZE, INT, UINT64, SIZE_T = "NCCL communicator ID", "Message size [bytes]", 5, 18, 22
# Schema, index, type, name, offset; the first field of a schema has no offset.
ENTRIES = [
    (INIT, 0, UINT64, COMM, None), (INIT, 1, INT, "No. of ranks", 8), (INIT, 2, INT, "Rank", 12),
    (INIT, 3, INT, "CUDA device", 16),
    (GATHER, 0, UINT64, COMM, None), (GATHER, 1, SIZE_T, SIZE, 8),
    (REDUCE, 0, UINT64, COMM, None), (REDUCE, 1, SIZE_T, SIZE, 8), (REDUCE, 2, 16777227, "Reduction operation", 16),
    (MESSAGE, 0, UINT64, COMM, None), (MESSAGE, 1, SIZE_T, SIZE, 8), (MESSAGE, 2, INT, "Peer rank", 16),
]  # fmt: skip
PAYLOADS = """
DROP TABLE NVTX_EVENTS;
CREATE TABLE NVTX_EVENTS (start INT, end INT, eventType INT, text TEXT, textId INT, globalTid INT, domainId INT,
    binaryData TEXT);
CREATE TABLE NVTX_PAYLOAD_SCHEMAS (domainId INT, schemaId INT, name TEXT, type INT, flags INT, numEntries INT,
    payloadSize INT, alignTo INT);
CREATE TABLE NVTX_PAYLOAD_SCHEMA_ENTRIES (domainId INT, schemaId INT, idx INT, flags INT, type INT, name TEXT,
    description TEXT, arrayOrUnionDetail INT, offset INT);
"""
RING = 0xFEDC_BA98_7654_3210
"""Communicator id that needs all 64 bits."""
KERNELS = {
    1: "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    2: "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    3: "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
}
SENDRECV, REDUCESCATTER, ALLGATHER = KERNELS


def payload(schema: int, *fields: int) -> bytes:
    """Pack fields of 64 bits, then fields of 32 bits."""
    layout = {INIT: "<Qiiii", GATHER: "<QQ", REDUCE: "<QQii", MESSAGE: "<QQii"}[schema]
    data = struct.pack(layout, *fields, *[0] * (len(layout) - 1 - len(fields)))
    return struct.pack("<IIIIQQ", 1, 0, schema, 0, len(data), 32 + len(data)) + data


class Job:
    """Builder of an export, to which calls and kernels are added one by one."""

    def __init__(self, path: Path) -> None:
        self.path, self.correlation = path, 0
        self.connection = sqlite3.connect(path)
        self.connection.executescript(TABLES + PAYLOADS)
        self.connection.executemany("INSERT INTO StringIds VALUES (?, ?)", KERNELS.items())
        self.connection.executemany(
            "INSERT INTO NVTX_PAYLOAD_SCHEMA_ENTRIES VALUES (1, ?, ?, NULL, ?, ?, NULL, NULL, ?)", ENTRIES
        )

    def call(self, pid: int, start: int, name: str, data: bytes | None) -> None:
        number = 100 + sum(map(ord, name))
        self.connection.execute("INSERT OR IGNORE INTO StringIds VALUES (?, ?)", (number, name))
        row = (start, start + 4, 59, None, number, process(pid) + 5, 1, data)
        self.connection.execute("INSERT INTO NVTX_EVENTS VALUES (?,?,?,?,?,?,?,?)", row)

    def kernel(self, pid: int, device: int, launched: int, start: int, end: int, name: int) -> None:
        self.correlation += 1
        self.connection.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,?,1,7,?,?,?,?,NULL)",
            (start, end, device, self.correlation, process(pid), name, name),
        )
        self.connection.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,?,?,9)",
            (launched, launched + 2, process(pid) + 5, self.correlation),
        )

    def read(self) -> list[Trace]:
        self.connection.commit()
        self.connection.close()
        return read_traces([self.path])


def ring(path: Path, ranks: dict[int, int]) -> Job:
    """Add two processes that send to each other; rank 1 starts 300 ns later, and both end together.

    ``ranks``: rank in the communicator by process id.
    """
    job = Job(path)
    for device, (pid, rank) in enumerate(ranks.items()):
        job.call(pid, 10, "ncclCommInitRankConfig", payload(INIT, RING, 2, rank, device))
        job.call(pid, 100, "ncclSend", payload(MESSAGE, RING, 4096, 1 - rank))
        job.call(pid, 110, "ncclRecv", payload(MESSAGE, RING, 4096, 1 - rank))
        job.kernel(pid, device, 120, 1000 + 300 * rank, 2000, SENDRECV)
    return job


def hops_of(traces: list[Trace]) -> list[list[TimedHop]]:
    return [list(rank.hops) for rank in attribute(traces).ranks]


def test_a_hop_has_its_bytes_peers_and_group_and_its_wait(tmp_path: Path) -> None:
    first, second = ring(tmp_path / "all.sqlite", {41: 0, 77: 1}).read()
    assert [(record.name, record.group_ranks) for record in first.collectives] == [("send", (0, 1)), ("recv", (0, 1))]
    ((early,), (late,)) = hops_of([first, second])
    assert (early.sent_to, early.received_from, early.sent_bytes) == ((1,), (1,), 4096)
    assert (late.sent_to, late.received_from, late.sent_bytes) == ((0,), (0,), 4096)
    assert early.parts[0].transfer.group == ("0xfedcba9876543210", (0, 1))
    assert (early.wait_ns, early.wire_ns) == (300, 700)
    assert (late.wait_ns, late.wire_ns) == (0, 700)
    assert early.wire_gbps == pytest.approx(4096 / 700)


def test_ranks_are_ordered_by_communicator_rank(tmp_path: Path) -> None:
    """Order processes by communicator rank: where each process sees only one device, the device gives no order."""
    first, second = ring(tmp_path / "all.sqlite", {41: 1, 77: 0}).read()
    assert [int(trace.activities.start_ns[0]) for trace in (first, second)] == [1000, 1300]
    ((early,), (late,)) = hops_of([first, second])
    assert (early.sent_to, late.sent_to) == ((1,), (0,))


def test_peer_is_a_rank_of_the_communicator_not_of_the_job(tmp_path: Path) -> None:
    """Translate communicator ranks 0 and 1 to the job ranks 1 and 3."""
    job = Job(tmp_path / "all.sqlite")
    for rank in range(4):
        job.call(10 + rank, 10, "ncclCommInitRank", payload(INIT, 7, 4, rank, rank))
    for communicator_rank, rank in enumerate((1, 3)):
        job.call(10 + rank, 20, "ncclCommSplit", payload(INIT, 8, 2, communicator_rank, rank))
        job.call(10 + rank, 100, "ncclSend", payload(MESSAGE, 8, 64, 1 - communicator_rank))
        job.call(10 + rank, 104, "ncclRecv", payload(MESSAGE, 8, 64, 1 - communicator_rank))
    for rank in range(4):
        job.kernel(10 + rank, rank, 120, 1000, 2000, SENDRECV if rank % 2 else ALLGATHER)
    hops = hops_of(job.read())
    assert [[hop.sent_to for hop in mine] for mine in hops] == [[], [(3,)], [], [(1,)]]
    assert [hop.parts[0].transfer.group for mine in hops for hop in mine] == [("0x0000000000000008", (1, 3))] * 2


def test_ranks_of_a_second_export_follow_the_first(tmp_path: Path) -> None:
    """Read two hosts with a communicator each: communicator rank 0 of the second file is rank 2."""
    for name in ("a.sqlite", "b.sqlite"):
        job = ring(tmp_path / name, {41: 0, 77: 1})
        job.connection.commit()
        job.connection.close()
    hops = hops_of(read_traces([tmp_path / "a.sqlite", tmp_path / "b.sqlite"]))
    assert [mine[0].sent_to for mine in hops] == [(1,), (0,), (3,), (2,)]
    assert [mine[0].received_from for mine in hops] == [(1,), (0,), (3,), (2,)]


def collectives(path: Path) -> Job:
    job = Job(path)
    for rank in range(4):
        pid = 10 + rank
        job.call(pid, 10, "ncclCommInitRank", payload(INIT, 7, 4, rank, rank))
        job.call(pid, 100, "ncclReduceScatter", payload(REDUCE, 7, 1000))
        job.kernel(pid, rank, 101, 1000 + 100 * rank, 2000, REDUCESCATTER)
        job.call(pid, 200, "ncclAllGather", payload(GATHER, 7, 1000))
        job.kernel(pid, rank, 201, 3000, 4000, ALLGATHER)
        for peer in range(4):
            job.call(pid, 300 + 10 * peer, "ncclSend", payload(MESSAGE, 7, 10, peer))
            job.call(pid, 305 + 10 * peer, "ncclRecv", payload(MESSAGE, 7, 10, peer))
        job.kernel(pid, rank, 400, 5000 + 50 * rank, 6000, SENDRECV)
    return job


def test_bytes_and_waits_of_collectives(tmp_path: Path) -> None:
    """Convert the bytes that NCCL reports to the bytes that each rank sends.

    For a reduce-scatter, NCCL reports the bytes that a rank receives; each of four ranks sends three times as much.
    Sends to all ranks, including the sender, are an all-to-all and not a hop.
    """
    attribution = attribute(collectives(tmp_path / "all.sqlite").read())
    for number, rank in enumerate(attribution.ranks):
        transfers = [(split.transfer.kind, split.transfer.sent_bytes, split.wait_ns) for split in rank.splits]
        assert transfers == [
            ("reduce_scatter", 3000, 300 - 100 * number),
            ("all_gather", 3000, 0),
            ("all_to_all", 30, 150 - 50 * number),
        ]
        assert not rank.hops


def test_bytes_of_ncclAlltoAll(tmp_path: Path) -> None:
    """Count 1000 bytes to three other ranks: for an all-to-all, NCCL reports the bytes per peer."""
    job = Job(tmp_path / "all.sqlite")
    for rank in range(4):
        job.call(10 + rank, 10, "ncclCommInitRank", payload(INIT, 7, 4, rank, rank))
        job.call(10 + rank, 100, "ncclAlltoAll", payload(GATHER, 7, 1000))
        job.kernel(10 + rank, rank, 101, 1000 + 100 * rank, 2000, SENDRECV)
    for number, rank_result in enumerate(attribute(job.read()).ranks):
        (split,) = rank_result.splits
        assert (split.transfer.kind, split.transfer.sent_bytes) == ("all_to_all", 3000)
        assert (split.wait_ns, split.wire_ns) == (300 - 100 * number, 700)


def changed(path: Path, script: str, *values: Any) -> list[Trace]:
    job = ring(path, {41: 0, 77: 1})
    job.connection.execute(script, values)
    return job.read()


@pytest.mark.parametrize(
    ("script", "values"),
    [
        ("DROP TABLE NVTX_PAYLOAD_SCHEMA_ENTRIES", ()),
        ("DELETE FROM NVTX_PAYLOAD_SCHEMA_ENTRIES", ()),
        ("UPDATE NVTX_PAYLOAD_SCHEMA_ENTRIES SET offset = 1 << 40", ()),
        ("UPDATE NVTX_PAYLOAD_SCHEMA_ENTRIES SET offset = -8", ()),
        ("UPDATE NVTX_PAYLOAD_SCHEMA_ENTRIES SET type = 'x', name = x'00'", ()),
        ("UPDATE NVTX_PAYLOAD_SCHEMA_ENTRIES SET schemaId = schemaId + 1000", ()),
        ("UPDATE NVTX_EVENTS SET binaryData = NULL", ()),
        ("UPDATE NVTX_EVENTS SET binaryData = 'text'", ()),
        ("UPDATE NVTX_EVENTS SET binaryData = x'00'", ()),
        ("UPDATE NVTX_EVENTS SET binaryData = zeroblob(32)", ()),
        ("UPDATE NVTX_EVENTS SET binaryData = zeroblob(900000)", ()),
        ("UPDATE NVTX_EVENTS SET binaryData = ?", (payload(MESSAGE, RING, 4096, 1)[:-1],)),
        ("UPDATE NVTX_EVENTS SET binaryData = ?", (payload(MESSAGE, 0, 4096, 1),)),
        ("UPDATE NVTX_EVENTS SET binaryData = ?", (struct.pack("<QQQQ", 1, MESSAGE, 2**64 - 1, 0) + bytes(24),)),
        ("UPDATE NVTX_EVENTS SET start = NULL, end = 'x'", ()),
        ("DELETE FROM NVTX_EVENTS WHERE end = 14", ()),
        ("DELETE FROM NVTX_EVENTS WHERE end = 14 AND globalTid < 77 << 24", ()),
        ("UPDATE StringIds SET value = 'mine' WHERE value LIKE 'nccl%' AND id > 99", ()),
        (
            "INSERT INTO NVTX_PAYLOAD_SCHEMA_ENTRIES SELECT 2, schemaId, 9, NULL, 18, name, NULL, NULL, 8"
            " FROM NVTX_PAYLOAD_SCHEMA_ENTRIES",
            (),
        ),
    ],
)
def test_invalid_payload_leaves_the_hop_without_bytes(tmp_path: Path, script: str, values: tuple[Any, ...]) -> None:
    traces = changed(tmp_path / "all.sqlite", script, *values)
    assert [trace.collectives for trace in traces] == [[], []]
    for (hop,) in hops_of(traces):
        assert (hop.sent_to, hop.sent_bytes, hop.wait_ns) == ((), None, None)


@pytest.mark.parametrize("field", [2**63, 2**64 - 1, (1 << 48) + 1])
def test_impossible_message_sizes_are_ignored(tmp_path: Path, field: int) -> None:
    data = payload(MESSAGE, RING, field, 1)
    traces = changed(tmp_path / "all.sqlite", "UPDATE NVTX_EVENTS SET binaryData = ? WHERE end > 50", data)
    assert [trace.collectives for trace in traces] == [[], []]


@pytest.mark.parametrize("peer", [-1, 2, 2**31 - 1])
def test_send_to_a_rank_outside_the_communicator_has_no_bytes(tmp_path: Path, peer: int) -> None:
    data = payload(MESSAGE, RING, 4096, peer)
    traces = changed(tmp_path / "all.sqlite", "UPDATE NVTX_EVENTS SET binaryData = ? WHERE start = 100", data)
    assert [(hop.sent_to, hop.sent_bytes) for (hop,) in hops_of(traces)] == [((), None)] * 2


@pytest.mark.parametrize("offset", [21, 24, 200])
def test_a_field_outside_the_payload_is_not_read(tmp_path: Path, offset: int) -> None:
    script = "UPDATE NVTX_PAYLOAD_SCHEMA_ENTRIES SET offset = ? WHERE name = 'Peer rank'"
    traces = changed(tmp_path / "all.sqlite", script, offset)
    assert [(hop.sent_to, hop.sent_bytes) for (hop,) in hops_of(traces)] == [((), None)] * 2


def test_long_payloads_are_not_kept_in_memory(tmp_path: Path) -> None:
    """Keep memory low for an export whose rows are fetched in one chunk, with 45 MB of payloads."""
    job = ring(tmp_path / "all.sqlite", {41: 0, 77: 1})
    row = "1, 2, 59, NULL, 100, 5, 1, zeroblob(900000)"
    job.connection.executescript(f"WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 50)"
                                 f" INSERT INTO NVTX_EVENTS SELECT {row} FROM c")  # fmt: skip
    job.connection.commit()
    job.connection.close()
    tracemalloc.start()
    traces = read_nsys(tmp_path / "all.sqlite")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [len(trace.collectives) for trace in traces] == [2, 2]
    assert most < 10_000_000


@pytest.mark.parametrize(
    ("ranks", "rank"), [(None, 1), (2, None), (2, 2), (2, -1), (1 << 21, 1), (3, 1)], ids=str
)  # fmt: skip
def test_an_invalid_rank_in_a_communicator_is_ignored(ranks: int | None, rank: int | None) -> None:
    """The first call has rank 0 of 2; alone it does not give the members."""
    first, second = NcclCall("comminitrank", 7, ranks=2, rank=0), NcclCall("comminitrank", 7, ranks=2, rank=1)
    calls = [(first, 100), (NcclCall("comminitrank", 7, ranks=ranks, rank=rank), 200)]
    assert communicator_members(calls) == {}
    if ranks != 3:  # which contradicts the first
        assert communicator_members([*calls, (second, 300)]) == {7: (100, 300)}
