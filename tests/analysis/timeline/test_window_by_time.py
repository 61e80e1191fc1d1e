"""Activities that name no launch, in windows by launch: random programs against brute force over their raw events."""

from __future__ import annotations

import json
import random
import sqlite3
from contextlib import closing

import pytest

import ringprof
from ringprof.errors import UsageError
from tests.analysis.raw_trace import read_trace, window_activities, window_parts
from tests.analysis.sweep import sweep
from tests.trace.test_nsys import TABLES, process

GEMM, RCCL = "Cijk_Ailk_Bjlk_BBS_BH_MT128x128x64", "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)"
SOUND, ZERO, ABSENT, UNRECORDED = "sound", "zero", "absent", "unrecorded"


def event(category, name, start_us, length_us, tid, **args):
    row = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": start_us, "dur": length_us}
    return {**row, "args": args}


def write_trace(path, events, rank=0):
    document = {"distributedInfo": {"rank": rank, "world_size": 2, "backend": "nccl"}, "traceEvents": events}
    path.write_text(json.dumps(document))
    return path


def random_program(rng):
    """Return the events of a program: ranges on the CPU, work on three streams, some without a launch id or record."""
    mark = rng.choice(["ProfilerStep#{}", "ringprof::iteration", "part"])
    events, clock, correlation = [], 0, 100
    free = {7: 1000, 8: 1000, 20: 1000}
    starts: set[int] = set()
    for number in range(rng.randint(1, 4)):
        begin = clock
        for _ in range(rng.randint(0, 6)):
            clock += rng.randint(1, 60)
            stream, correlation = rng.choice(list(free)), correlation + 1
            start = max(free[stream], clock + rng.choice([5, 5, 900])) + rng.choice([0, 3, 40])
            while start in starts:
                start += 1
            starts.add(start)
            length = rng.choice([4, 30, 200])
            free[stream] = start + length
            ids = rng.choice([SOUND, SOUND, ZERO, ABSENT, UNRECORDED])
            args = {"stream": stream, "device": 0}
            if ids != ABSENT:
                args["correlation"] = 0 if ids == ZERO else correlation
            name, outside = (RCCL if stream == 20 else GEMM), rng.random() < 0.2
            events.append(event("kernel", name, start, length, stream, **args))
            if ids != UNRECORDED:
                call = correlation if ids == SOUND else correlation + 5000
                called = begin - 1 if outside else clock
                events.append(event("cuda_runtime", "hipLaunchKernel", called, 1, 1, correlation=call))
        clock += 10
        events.append(event("user_annotation", mark.format(number), begin, clock - begin, 1))
        if rng.random() < 0.2:
            events.append(event("user_annotation", mark.format(number), begin + 2, (clock - begin) // 2, 1))
        clock += rng.randint(5, 300)
    return events, mark


def klass(name):
    return "comm" if name == RCCL else "compute"


def swept(activities):
    return sweep((activity.start, activity.end, klass(activity.name)) for activity in activities)


@pytest.mark.parametrize("seed", range(60))
def test_window_of_random_programs_equals_brute_force(tmp_path, seed):
    rng = random.Random(seed)
    events, mark = random_program(rng)
    path = write_trace(tmp_path / "rank0.json", events)
    window = mark if mark == "part" else None
    if not any(row["cat"] == "kernel" for row in events):
        return
    truth = read_trace(path)
    parts = window_parts(truth, window)
    if window and not parts:
        with pytest.raises(UsageError, match="nothing was launched"):
            ringprof.load(path, window=window)
        return
    run = ringprof.load(path, window=window)
    (rank,) = run.attribution.ranks
    chosen = window_activities(truth, window)
    activities = rank.classified.trace.activities
    assert [int(start) for start in activities.start_ns[rank.window.activities()]] == [a.start for a in chosen]
    if parts:
        own_parts = [[int(start) for start in activities.start_ns[part]] for part in rank.window.iterations]
        assert sorted(own_parts) == sorted([activity.start for activity in part] for part in parts)
    expected = swept(chosen)
    for name in ("wall", "compute", "comm"):
        assert getattr(rank.breakdown, f"{name}_ns") == expected[name]
    # Background hides communication: with it, exposed is what the sweep of all that ran meanwhile exposes of `chosen`.
    first, last = min(a.start for a in chosen), max(a.end for a in chosen)
    beside = [(max(a.start, first), min(a.end, last), "compute") for a in truth.activities
              if a not in chosen and klass(a.name) == "compute" and a.start < last and a.end > first]  # fmt: skip
    rows = [(a.start, a.end, klass(a.name)) for a in chosen]
    assert rank.breakdown.exposed_comm_ns == sweep([*rows, *beside])["exposed_comm"]


def write_nsys(path, events):
    """Write Kineto events as an export of Nsight Systems, in which an activity without an id has none or 0."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(TABLES)
        names = sorted({row["name"] for row in events})
        connection.executemany("INSERT INTO StringIds VALUES (?,?)", list(enumerate(names)))
        thread = process(41) + 5
        for row in events:
            start, end, args = 1000 * row["ts"], 1000 * (row["ts"] + row["dur"]), row["args"]
            number, name = args.get("correlation"), names.index(row["name"])
            if row["cat"] == "kernel":
                values = (start, end, 0, 1, args["stream"], number, process(41), name, name, None)
                connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,?,?,?,?,?,?,?,?)", values)
            elif row["cat"] == "user_annotation":
                connection.execute("INSERT INTO NVTX_EVENTS VALUES (?,?,59,NULL,?,?)", (start, end, name, thread))
            else:
                connection.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,?,?,?)", (start, end, thread, number, name)
                )
        connection.commit()
    return path


@pytest.mark.parametrize("seed", range(0, 60, 4))
def test_window_of_an_nsys_export_equals_brute_force(tmp_path, seed):
    events, mark = random_program(random.Random(seed))
    truth = read_trace(write_trace(tmp_path / "rank0.json", events))
    window = mark if mark == "part" else None
    if not truth.activities or (window and not window_parts(truth, window)):
        return
    (rank,) = ringprof.load(write_nsys(tmp_path / "x.sqlite", events), window=window).attribution.ranks
    expected = swept(window_activities(truth, window))
    for name in ("wall", "compute", "comm"):
        assert getattr(rank.breakdown, f"{name}_ns") == expected[name]


def three_steps(*, ids, rows_on_device=False, tail=()):
    """Return three steps of 400 us of computation, then 300 us of communication that names its launch as ``ids`` says.

    The device's own ranges end with the computation.
    """
    events = []
    for number in range(3):
        begin, call = 1000 * number, 100 + 10 * number
        events += [
            event("user_annotation", f"ProfilerStep#{number}", begin, 990, 1),
            event("cuda_runtime", "hipLaunchKernel", begin + 10, 3, 1, correlation=call),
            event("kernel", GEMM, begin + 20, 400, 7, stream=7, device=0, correlation=call),
            event("cuda_runtime", "hipExtLaunchKernel", begin + 30, 3, 1, correlation=call + 1),
            event("kernel", RCCL, begin + 420, 300, 20, stream=20, device=0,
                  **{SOUND: {"correlation": call + 1}, ZERO: {"correlation": 0}, ABSENT: {}}[ids]),
        ]  # fmt: skip
        if rows_on_device:
            events.append(event("gpu_user_annotation", f"ProfilerStep#{number}", begin + 20, 400, 7, stream=7))
    return [*events, *tail]


@pytest.mark.parametrize("ids", [SOUND, ZERO, ABSENT])
@pytest.mark.parametrize("rows_on_device", [False, True])
def test_communication_without_launch_ids_counts_in_every_step(tmp_path, ids, rows_on_device):
    for rank in (0, 1):
        write_trace(tmp_path / f"rank{rank}.json", three_steps(ids=ids, rows_on_device=rows_on_device), rank)
    run = ringprof.load(tmp_path)
    figures = run.figures()
    assert (figures["wall_ns"], figures["exposed_comm_ns"]) == (2_700_000, 900_000)
    assert figures["exposed_comm"] == pytest.approx(1 / 3)
    assert run.iterations()["exposed_comm_ns"].tolist() == [300_000] * 6
    assert ("missing_correlation" in {warning.code for warning in run.warnings}) == (ids != SOUND)
    assert run.verdict[0].startswith("33.3 % of the time is exposed communication")


def test_work_launched_before_profiling_is_background_and_said(tmp_path):
    early = [event("kernel", RCCL, 425, 100, 21, stream=21, device=0, correlation=9),
             event("kernel", GEMM, 900, 50, 7, stream=7, device=0, correlation=8)]  # fmt: skip
    run = ringprof.load(write_trace(tmp_path / "rank0.json", three_steps(ids=SOUND, tail=early)))
    assert run.figures()["exposed_comm_ns"] == 900_000
    (warning,) = [warning for warning in run.warnings if warning.code == "launched_before"]
    assert warning.count == 2
    assert "0.150 ms, 0.100 ms of it communication, count as background" in warning.message


def test_communication_outside_the_window_is_never_said_to_be_absent(tmp_path):
    events = [row for row in three_steps(ids=SOUND) if row["name"] not in (RCCL, "hipExtLaunchKernel")]
    outside = [event("kernel", RCCL, 3500, 200, 20, stream=20, device=0, correlation=7),
               event("cuda_runtime", "hipExtLaunchKernel", 3490, 3, 1, correlation=7)]  # fmt: skip
    run = ringprof.load(write_trace(tmp_path / "rank0.json", [*events, *outside]))
    assert run.verdict[0] == (
        "no communication in what is reported; the rest of these traces has 0.200 ms of it per GPU"
    )
