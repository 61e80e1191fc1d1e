"""Nsight Systems exports, built here with the tables of a real export."""

from __future__ import annotations

import gzip
import sqlite3
from contextlib import closing

import pytest
import zstandard

import ringprof
from ringprof.analysis.timeline.window import Focus
from ringprof.common.limits import Limits, MemoryBudget
from ringprof.errors import InputError, TraceFormatError
from ringprof.scale.pipeline import attribute
from ringprof.trace.columns import KERNEL, MEMCPY, MEMSET
from ringprof.trace.inputs import detect
from ringprof.trace.nsys import read_nsys
from ringprof.trace.ranks import read_traces

FLASH, NCCL = "flash_fwd_kernel<Traits<128>>", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
EPOCH = 1_700_000_000_000_000_000
TABLES = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT, contextId INT, streamId INT,
    correlationId INT, globalPid INT, demangledName INT, shortName INT, graphNodeId INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INT, end INT, deviceId INT, streamId INT, correlationId INT,
    globalPid INT, bytes INT, copyKind INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INT, end INT, deviceId INT, streamId INT, correlationId INT,
    globalPid INT, bytes INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, globalTid INT, correlationId INT, nameId INT);
CREATE TABLE NVTX_EVENTS (start INT, end INT, eventType INT, text TEXT, textId INT, globalTid INT);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INT);
CREATE TABLE TARGET_INFO_GPU (id INT, name TEXT, totalMemory INT, smCount INT);
CREATE TABLE TARGET_INFO_SYSTEM_ENV (name TEXT, value TEXT);
"""


def process(number):
    return number << 24


def export(path, *pids, damaged=False, thread_number=5):
    """Write an export: per process, a flash kernel, a send/recv, a peer copy and a memory set within an NVTX range."""
    connection = sqlite3.connect(path)
    connection.executescript(TABLES)
    connection.executemany("INSERT INTO StringIds VALUES (?,?)", [(1, FLASH), (2, NCCL), (3, "train step")])
    for device, pid in enumerate(pids):
        thread = process(pid) + thread_number
        kernels = [(1000, 2000, 1, 1), (1500, 2500, 2, 2), (9000, 9100, 3, 1)]
        for start, end, correlation, name in kernels:
            connection.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,?,1,7,?,?,?,?,NULL)",
                (start, end, device, correlation, process(pid), name, name),
            )
        connection.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (2600,2700,?,8,4,?,4096,10)", (device, process(pid))
        )
        connection.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_MEMSET VALUES (2700,2800,?,8,5,?,64)", (device, process(pid))
        )
        for correlation, launch in enumerate((100, 110, 800, 120, 130), start=1):
            connection.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,?,?,3)", (launch, launch + 5, thread, correlation)
            )
        connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (1,2,?,99,3)", (thread,))
        connection.execute("INSERT INTO NVTX_EVENTS VALUES (50,500,59,NULL,3,?)", (thread,))
        connection.execute("INSERT INTO NVTX_EVENTS VALUES (60,70,59,'aten::mm, seq = 1, op_id = 2',NULL,?)", (thread,))
        connection.execute("INSERT INTO NVTX_EVENTS VALUES (65,NULL,34,'a moment',NULL,?)", (thread,))
    if damaged:
        connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ('x',1,0,1,7,6,?,1,1,NULL)", (process(1),))
    connection.execute("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (?)", (EPOCH,))
    connection.execute("INSERT INTO TARGET_INFO_GPU VALUES (0,'NVIDIA H200',150000000000,132)")
    connection.execute("INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES ('Hostname','alpha')")
    connection.commit()
    connection.close()
    return path


def test_the_columns_of_one_process(tmp_path):
    (trace,) = read_nsys(export(tmp_path / "rank3.sqlite", 41))
    rows = trace.activities
    assert (rows.start_ns - EPOCH).tolist() == [1000, 1500, 2600, 2700, 9000]
    assert [trace.names[name] for name in rows.name] == [FLASH, NCCL, "Memcpy PtoP", "Memset", FLASH]
    assert rows.category.tolist() == [KERNEL, KERNEL, MEMCPY, MEMSET, KERNEL]
    assert rows.size_bytes.tolist() == [-1, -1, 4096, 64, -1]
    assert rows.graph_node.tolist() == [-1] * 5
    # The call that launches nothing is left out.
    assert trace.launches.correlation.tolist() == [1, 2, 4, 5, 3]
    assert [trace.names[name] for name in trace.annotations.name] == ["train step"]
    assert [trace.names[name] for name in trace.operators.name] == ["aten::mm"]
    assert (trace.rank, trace.host, trace.base_ns) == (3, "alpha", EPOCH)
    assert trace.devices[0].name == "NVIDIA H200"
    assert trace.warnings == []


def test_thread_ids_have_24_bits(tmp_path):
    """Take the process from the upper bits of a global thread id; thread numbers above 65,535 must not change it."""
    (trace,) = read_nsys(export(tmp_path / "one.sqlite", 41, thread_number=70_000))
    assert trace.launches.correlation.tolist() == [1, 2, 4, 5, 3]
    assert trace.launches.thread.tolist() == [(41 << 24) + 70_000] * 5
    assert [trace.names[name] for name in trace.annotations.name] == ["train step"]


def test_breakdown_of_an_export_and_of_a_range(tmp_path):
    (trace,) = read_nsys(export(tmp_path / "one.sqlite", 41))
    (rank,) = attribute([trace]).ranks
    figures = rank.breakdown
    assert (figures.wall_ns, figures.compute_ns, figures.exposed_comm_ns) == (8100, 1100, 600)
    assert (figures.exposed_memory_ns, figures.idle_ns) == (100, 6300)
    assert [hop.sent_bytes for hop in rank.hops] == [None, 4096]
    (rank,) = attribute([trace], focus=Focus(window="train *")).ranks
    assert rank.breakdown.wall_ns == 1800


def test_processes_of_one_export_are_ranks_by_device(tmp_path):
    traces = read_traces([export(tmp_path / "all.sqlite", 77, 41)])
    assert [(trace.rank, trace.world_size) for trace in traces] == [(0, 2), (1, 2)]
    assert [int(trace.activities.device[0]) for trace in traces] == [0, 1]
    assert [warning.code for warning in traces[0].warnings] == ["assumed_ranks"]


def test_export_of_one_process_leaves_world_size_unknown(tmp_path):
    traces = read_traces([export(tmp_path / f"rank{rank}.sqlite", 41) for rank in (0, 2)])
    assert [(trace.rank, trace.world_size) for trace in traces] == [(0, None), (2, None)]
    attribution = attribute(traces)
    assert attribution.world_size == 3
    assert "1 of 3 ranks have no trace: 1" in [warning.message for warning in attribution.warnings]


def test_ringprof_ranges_are_not_operators(tmp_path):
    path = export(tmp_path / "one.sqlite", 41)
    with closing(sqlite3.connect(path)) as connection:
        row = (90, 115, 59, "ringprof::iteration", None, process(41) + 5)
        connection.execute("INSERT INTO NVTX_EVENTS VALUES (?,?,?,?,?,?)", row)
        connection.commit()
    (trace,) = read_nsys(path)
    assert [trace.names[name] for name in trace.operators.name] == ["aten::mm"]
    (rank,) = attribute([trace]).ranks
    # The kernels launched at 100 and 110 are in the range; they run from 1000 to 2500.
    assert (rank.window.source, rank.breakdown.wall_ns) == ("ringprof", 1500)


def test_export_file_is_not_modified(tmp_path):
    path = export(tmp_path / "one.sqlite", 41)
    before = path.read_bytes()
    read_nsys(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["one.sqlite"]


def test_export_is_detected_by_its_first_bytes(tmp_path):
    path = export(tmp_path / "report.db", 41)
    assert detect([path]).type == "trace"


def test_rows_without_times_are_counted(tmp_path):
    (trace,) = read_nsys(export(tmp_path / "one.sqlite", 41, damaged=True))
    assert [(warning.code, warning.count) for warning in trace.warnings] == [("damaged_events", 1)]


def test_other_sqlite_files_are_refused_with_what_to_do(tmp_path):
    path = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE a (b INT)")
    with pytest.raises(TraceFormatError, match="no export of Nsight Systems: make one with nsys export"):
        read_nsys(path)
    path.write_bytes(b"SQLite format 3\0" + b"x" * 2000)
    with pytest.raises(TraceFormatError, match="damaged SQLite file"):
        read_nsys(path)
    with pytest.raises(InputError, match="no such file"):
        read_nsys(tmp_path / "none.sqlite")


def test_rows_that_share_one_text_are_refused():
    """Check a file of 1.1 MB in which 20 rows refer to the same overflow pages, of 1 MB each time."""
    with pytest.raises(TraceFormatError, match="rows share their text"):
        read_nsys("tests/data/nsys_shared_text.sqlite.gz")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_export_is_read_like_others(tmp_path, suffix, monkeypatch):
    plain, packed = export(tmp_path / "two.sqlite", 100), tmp_path / "packed" / f"two.sqlite{suffix}"
    packed.parent.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    data = plain.read_bytes()
    packed.write_bytes(gzip.compress(data) if suffix == ".gz" else zstandard.compress(data))
    for path in (packed, packed.parent):
        assert ringprof.load(path).figures() == ringprof.load(plain).figures()
    with pytest.raises(InputError, match=r"expands to more than 1 KiB; if you trust the file.*--max-bytes"):
        read_nsys(packed, MemoryBudget(Limits(expanded_bytes=1024)))
    packed.write_bytes(packed.read_bytes()[:-40])
    with pytest.raises(TraceFormatError, match=r"two\.sqlite.*(cut off|damaged)"):
        read_nsys(packed)
    assert not list((tmp_path / "scratch").rglob("*.sqlite"))


def test_page_migrations_of_managed_memory_are_named(tmp_path):
    path = export(tmp_path / "one.sqlite", 100)
    with closing(sqlite3.connect(path)) as connection:
        for start, kind in ((30_000, 12), (60_000, 11)):
            values = (start, start + 1000, process(100), kind)
            connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?,?,0,9,0,?,65536,?)", values)
        connection.commit()
    (trace,) = read_nsys(path)
    assert trace.producer == "nsys"
    (rank,) = attribute([trace]).ranks
    assert rank.idle is not None
    blocked = {event.name: event.time_ns for event in rank.idle.events if event.event_class == "blocked"}
    assert blocked["managed memory"] == (30_000 - 9100) + (60_000 - 31_000)


def test_an_export_without_gpu_work_is_refused(tmp_path):
    with pytest.raises(TraceFormatError, match="no GPU activity"):
        read_nsys(export(tmp_path / "empty.sqlite"))
