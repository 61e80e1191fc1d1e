"""A large trace is read in two halves by two processes: the same columns and warnings as from one."""

from __future__ import annotations

import gzip
import os

import msgspec
import numpy as np
import pytest

from ringprof.errors import InputError
from ringprof.limits import Limits, MemoryBudget, MemoryLimitError
from ringprof.trace.columns import TABLES, Trace
from ringprof.trace.kineto import halves, read_trace
from tests.paths import TRACES
from tests.trace.kineto_text import REAL, document, kernel

RECORDED = [
    *REAL[:2],
    TRACES / "cpu4-burst-4096" / "rank1.json.gz",
    TRACES / "h200x4-burst-262144-copied" / "rank2.json.gz",
]


@pytest.fixture
def in_halves(monkeypatch):
    """Reads a file as if it were large; what was read by a copy is counted."""
    used: list[halves.Copy] = []

    class Counted(halves.Copy):
        def result(self):
            found = super().result()
            used.append(self)
            return found

    def read(path, **limits):
        with monkeypatch.context() as patch:
            patch.setattr(halves, "WORTH_HALVING", 0)
            patch.setattr(halves, "_can_copy", lambda: True)
            patch.setattr("ringprof.trace.kineto.reader.Copy", Counted)
            return read_trace(path, MemoryBudget(Limits(**limits)))

    return read, used


def assert_same(one: Trace, other: Trace) -> None:
    """Names and collectives by what they are: which comes first depends on where pieces of the file end."""
    assert texts(one) == texts(other)
    for field in set(Trace.__struct_fields__) - {"names", "collectives"}:
        mine, theirs = getattr(one, field), getattr(other, field)
        if isinstance(mine, msgspec.Struct):
            for column in set(mine.__struct_fields__) - {"name", "collective"}:
                assert np.array_equal(getattr(mine, column), getattr(theirs, column)), (field, column)
        else:
            assert mine == theirs, field


def texts(trace: Trace) -> list[object]:
    tables = [getattr(trace, table) for table in TABLES]
    names = [[trace.names[at] for at in table.name.tolist()] for table in tables if hasattr(table, "name")]
    places = [trace.activities.collective, trace.comm_records.collective]
    return names + [[trace.collectives[at] if at >= 0 else None for at in place.tolist()] for place in places]


def written(folder, data):
    path = folder / "rank0.json"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_halves_give_the_same_trace(tmp_path, in_halves, recorded):
    path = written(tmp_path, gzip.decompress(recorded.read_bytes()))
    read, used = in_halves
    assert_same(read(path), read_trace(path))
    assert used


def test_what_is_not_sound_is_read_in_turn(tmp_path, in_halves):
    data, (read, _) = gzip.decompress(REAL[0].read_bytes()), in_halves
    for damaged in (
        data[: len(data) * 3 // 4],
        data[:1000] + b'"' + data[1000:],
        data[:-5000] + b"\0\0" + data[-5000:],
        data.replace(b"},", b"} ,,", 1),
        data + data,
    ):
        path = written(tmp_path, damaged)
        assert_same(read(path), read_trace(path))


def test_a_boundary_inside_arguments_is_no_middle(tmp_path, in_halves):
    inner = [{"ts": number, "ph": "X"} for number in range(4000)]
    path = written(tmp_path, document([kernel(0), kernel(1, args={"device": 0, "list": inner}), kernel(2)]))
    read, used = in_halves
    assert_same(read(path), read_trace(path))
    assert not used


def test_both_halves_count_to_the_memory(tmp_path, in_halves):
    path = written(tmp_path, gzip.decompress(REAL[0].read_bytes()))
    with pytest.raises(MemoryLimitError) as alone:
        read_trace(path, MemoryBudget(Limits(memory_bytes=200 << 10)))
    with pytest.raises(MemoryLimitError) as halved:
        in_halves[0](path, memory_bytes=200 << 10)
    assert str(halved.value) == str(alone.value)


def test_no_copy_stays_behind(tmp_path, in_halves, monkeypatch):
    path = written(tmp_path, gzip.decompress(REAL[0].read_bytes()))
    started = []
    fork = os.fork

    def counted():
        started.append(fork())
        return started[-1]

    monkeypatch.setattr(os, "fork", counted)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("ringprof.trace.kineto.event_tables.Collector.append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        in_halves[0](path)
    assert len(started) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


def test_a_process_with_threads_is_not_copied():
    import threading

    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait)
    thread.start()
    try:
        assert not halves._can_copy()
    finally:
        go_on.set()
        thread.join()


def test_no_trace_at_all_is_refused_as_ever(tmp_path, in_halves):
    path = written(tmp_path, b'{"ph": 1}, {"ph": 2}, ' * 100)
    with pytest.raises(InputError) as alone:
        read_trace(path)
    with pytest.raises(InputError) as halved:
        in_halves[0](path)
    assert str(halved.value) == str(alone.value)
