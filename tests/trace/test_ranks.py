"""Several ranks: order, checks, and reading in other processes."""

import json
import subprocess
import sys

import numpy as np
import pytest

from ringprof.errors import InputError, TraceFormatError
from ringprof.trace.ranks import read_traces
from tests.paths import DATA
from tests.trace.kineto_text import REAL, document, kernel

FOLDER = DATA / "h200x8-zigzag-131072"


def write(folder, name, rank=None, size=2, start=0):
    info = {} if rank is None else {"distributedInfo": {"rank": rank, "world_size": size}}
    events = [kernel(start), kernel(start + 1)]
    (folder / name).write_bytes(document(events, **info) if info else json.dumps({"traceEvents": events}).encode())
    return folder / name


def codes(traces):
    return [[warning.code for warning in trace.warnings] for trace in traces]


def test_sorted_by_rank():
    traces = read_traces([FOLDER / f"rank{rank}.json.gz" for rank in (3, 0, 2, 1, 7, 6, 5, 4)])
    assert [trace.rank for trace in traces] == list(range(8))
    assert codes(traces) == [[]] * 8


def test_other_processes_give_the_same():
    here, there = read_traces(REAL, jobs=1), read_traces(REAL, jobs=2)
    for one, other in zip(here, there, strict=True):
        assert (one.names, one.collectives, one.warnings) == (other.names, other.collectives, other.warnings)
        for field in one.activities.__struct_fields__:
            assert np.array_equal(getattr(one.activities, field), getattr(other.activities, field))


def test_an_error_in_another_process_is_the_same_error(tmp_path):
    (tmp_path / "rank0.json").write_text("hello")
    good = write(tmp_path, "rank1.json", 1)
    with pytest.raises(TraceFormatError, match=r"rank0\.json: not a Kineto trace"):
        read_traces([tmp_path / "rank0.json", good], jobs=2)
    with pytest.raises(InputError, match="No such file"):
        read_traces([tmp_path / "none.json", good], jobs=2)


def test_a_script_without_a_main_guard(tmp_path):
    """Other processes must not run the caller's script again."""
    script = tmp_path / "script.py"
    paths = [str(path) for path in REAL]
    script.write_text(
        f"from ringprof.trace.ranks import read_traces\nprint(len(read_traces({paths!r}, jobs=2)), 'read')\n"
    )
    environment = {"PYTHONPATH": str(DATA.parents[1])}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert (done.stdout, done.stderr) == ("2 read\n", "")


def test_no_ranks_anywhere(tmp_path):
    traces = read_traces([write(tmp_path, "b.json"), write(tmp_path, "a.json")])
    assert [trace.rank for trace in traces] == [0, 1]
    assert codes(traces) == [["assumed_ranks"], []]


def test_one_rank_is_unknown(tmp_path):
    traces = read_traces([write(tmp_path, "b.json"), write(tmp_path, "rank0.json", 0, size=1)])
    assert [trace.rank for trace in traces] == [0, None]
    assert codes(traces) == [[], ["unknown_rank"]]


def test_a_rank_twice(tmp_path):
    traces = read_traces([write(tmp_path, name, 0, size=1) for name in ("a.json", "b.json")])
    assert [trace.rank for trace in traces] == [0, 0]


def test_ranks_of_different_runs(tmp_path):
    sizes = read_traces([write(tmp_path, "a.json", 0, size=2), write(tmp_path, "b.json", 1, size=4)])
    assert codes(sizes)[0] == ["mixed_runs"]
    times = read_traces([write(tmp_path, "a.json", 0), write(tmp_path, "b.json", 1, start=50)])
    assert codes(times)[0] == ["mixed_runs"]
