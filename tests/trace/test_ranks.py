"""Reading of several ranks: order, checks, and parallel processes."""

import json
import subprocess
import sys

import numpy as np
import pytest

import ringprof
from ringprof.analysis.timeline.window import EVERYTHING
from ringprof.common.limits import Limits
from ringprof.errors import InputError, TraceFormatError
from ringprof.scale.pipeline import explain_stored
from ringprof.scale.workers import LocalProcesses, TraceSet
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


def test_traces_are_sorted_by_rank():
    traces = read_traces([FOLDER / f"rank{rank}.json.gz" for rank in (3, 0, 2, 1, 7, 6, 5, 4)])
    assert [trace.rank for trace in traces] == list(range(8))
    assert codes(traces) == [[]] * 8


@pytest.mark.parametrize(
    ("info", "others_us", "walls_us"),
    [
        ({}, 300, [200, 300]),
        ({"rank": 0, "world_size": 1}, 300, [300]),
        ({"rank": 5, "world_size": 8}, 300, [300]),
        ({}, 1, [200]),
    ],
)
def test_every_device_of_a_process_without_a_rank_is_reported(tmp_path, info, others_us, walls_us):
    """Report one GPU only where the trace is one rank's, or where the other GPU ran next to nothing: the busiest."""
    rows = [(0, 0, 100, "gemm"), (0, 100, 100, "Memcpy PtoP (Device -> Device)"), (1, 0, others_us, "gemm")]
    events = [
        kernel(start, name=name, ts=start, dur=length, args={"device": device, "stream": 7, "correlation": 5 + start})
        for device, start, length, name in rows
    ]
    path = tmp_path / "t.json"
    path.write_bytes(document(events, distributedInfo=info))
    ranks = ringprof.load(path).attribution.ranks
    assert [rank.breakdown.wall_ns for rank in ranks] == [1000 * wall for wall in walls_us]


def test_reading_in_other_processes_is_equal():
    serial, parallel = read_traces(REAL, jobs=1), read_traces(REAL, jobs=2)
    for trace, other in zip(serial, parallel, strict=True):
        assert (trace.names, trace.collectives, trace.warnings) == (other.names, other.collectives, other.warnings)
        for field in trace.activities.__struct_fields__:
            assert np.array_equal(getattr(trace.activities, field), getattr(other.activities, field))


def test_error_in_another_process_is_raised_unchanged(tmp_path):
    (tmp_path / "rank0.json").write_text("hello")
    good = write(tmp_path, "rank1.json", 1)
    with pytest.raises(TraceFormatError, match=r"rank0\.json: not a Kineto trace"):
        read_traces([tmp_path / "rank0.json", good], jobs=2)
    with pytest.raises(InputError, match="No such file"):
        read_traces([tmp_path / "none.json", good], jobs=2)


def test_script_without_a_main_guard_can_read_traces(tmp_path):
    """Check that reading processes do not run the caller's script again."""
    script = tmp_path / "script.py"
    paths = [str(path) for path in REAL]
    script.write_text(
        f"from ringprof.trace.ranks import read_traces\nprint(len(read_traces({paths!r}, jobs=2)), 'read')\n"
    )
    environment = {"PYTHONPATH": str(DATA.parents[1])}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert (done.stdout, done.stderr) == ("2 read\n", "")


def test_traces_without_ranks_are_numbered_with_a_warning(tmp_path):
    traces = read_traces([write(tmp_path, "b.json"), write(tmp_path, "a.json")])
    assert [trace.rank for trace in traces] == [0, 1]
    assert codes(traces) == [["assumed_ranks"], []]


def test_trace_without_a_rank_beside_others_is_unknown(tmp_path):
    traces = read_traces([write(tmp_path, "b.json"), write(tmp_path, "rank0.json", 0, size=1)])
    assert [trace.rank for trace in traces] == [0, None]
    assert codes(traces) == [[], ["unknown_rank"]]


def test_two_traces_of_one_rank_keep_their_rank(tmp_path):
    traces = read_traces([write(tmp_path, name, 0, size=1) for name in ("a.json", "b.json")])
    assert [trace.rank for trace in traces] == [0, 0]


def test_ranks_of_different_runs_are_a_warning(tmp_path):
    sizes = read_traces([write(tmp_path, "a.json", 0, size=2), write(tmp_path, "b.json", 1, size=4)])
    assert codes(sizes)[0] == ["mixed_runs"]
    times = read_traces([write(tmp_path, "a.json", 0), write(tmp_path, "b.json", 1, start=50)])
    assert codes(times)[0] == ["mixed_runs"]


CYCLE_NS = 10**9


def cycle(folder, process, number, rank=None):
    """Write a trace of one profiler cycle with the name of `tensorboard_trace_handler`; cycles are a second apart."""
    name = f"node_{process}.{1_700_000_000_000_000_000 + number * CYCLE_NS}.pt.trace.json"
    return write(folder, name, rank, start=10_000 * number)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("processes", [[41], [41, 42]])
@pytest.mark.parametrize("cycles", [2, 3])
def test_cycles_of_one_process_are_one_rank(tmp_path, named, processes, cycles):
    ranks = [None if not named else rank for rank in range(len(processes))]
    paths = [
        cycle(tmp_path, process, number, rank)
        for number in range(cycles)
        for process, rank in zip(processes, ranks, strict=True)
    ]
    traces = read_traces(paths)
    expected = list(range(len(processes))) if named or len(processes) > 1 else [None]
    assert [trace.rank for trace in traces] == expected
    newest = kernel(10_000 * (cycles - 1))["ts"]
    assert [trace.activities.start_ns[0] for trace in traces] == [newest * 1000] * len(processes)
    (warning,) = [notice for trace in traces for notice in trace.warnings if notice.code == "profiler_cycles"]
    assert warning.count == len(processes) * (cycles - 1)
    assert str(paths[0]) in warning.message
    assert {notice.code for trace in traces for notice in trace.warnings} <= {"profiler_cycles", "assumed_ranks"}


def test_the_newest_cycle_is_one_that_every_process_wrote(tmp_path):
    paths = [cycle(tmp_path, process, number) for process, number in ((41, 0), (41, 1), (42, 0))]
    traces = read_traces(paths)
    assert [trace.activities.start_ns[0] for trace in traces] == [kernel(0)["ts"] * 1000] * 2
    later = [cycle(tmp_path, process, number) for process, number in ((51, 0), (51, 1), (52, 1))]
    assert [trace.activities.start_ns[0] for trace in read_traces(later)] == [kernel(10_000)["ts"] * 1000] * 2


def test_ranks_with_one_name_are_not_cycles_of_a_process(tmp_path):
    """Accept a worker name shared by all ranks, or a process id shared by two containers."""
    together = [tmp_path / f"run_1.{1_700_000_000_000_000_000 + number}.pt.trace.json" for number in (0, 1)]
    for path in together:
        write(tmp_path, path.name)
    assert [trace.rank for trace in read_traces(together)] == [0, 1]
    named = [cycle(tmp_path, 7, number, rank=number) for number in (0, 1)]
    assert [trace.rank for trace in read_traces(named)] == [0, 1]
    apart = [tmp_path / "a", tmp_path / "b"]
    for folder in apart:
        folder.mkdir()
    assert [trace.rank for trace in read_traces([cycle(folder, 7, 0) for folder in apart])] == [0, 1]


def test_cycles_with_mixed_runs_are_one_rank(tmp_path):
    """Report one rank per process, with mixed runs, and for many ranks whose traces are stored in files."""
    paths = [cycle(tmp_path, process, number) for process in (41, 42) for number in (0, 1)]
    for options in ({}, {"mixed_runs": True}, {"scheduler": None, "jobs": 2}):
        assert ringprof.load(paths, **options).ranks == [0, 1]
        assert ringprof.load(paths[:2], **options).ranks == [0]
        assert ringprof.load(tmp_path, **options).ranks == [0, 1]
    stored = explain_stored(
        TraceSet([str(path) for path in paths], [None] * 4, [str(path) for path in paths]), None, EVERYTHING,
        workers=LocalProcesses(1), readers=None, limits=Limits(), notify=None,
    )  # fmt: skip
    assert [rank.rank for rank in stored.attribution.ranks] == [0, 1]
    assert [rank.breakdown.start_ns for rank in stored.attribution.ranks] == [kernel(10_000)["ts"] * 1000] * 2
    assert "profiler_cycles" in {warning.code for warning in stored.attribution.warnings}
