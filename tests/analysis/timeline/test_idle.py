"""Idle time by cause: literal cases, and random and recorded runs against an independent oracle."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

import ringprof
from ringprof.errors import InputError, UsageError
from ringprof.trace.host_events import rows_in_idle
from tests.analysis.idle_oracle import assert_same_idle, run_traces_of
from tests.analysis.random_copy_runs import write_random_run
from tests.analysis.trace_text import TraceText
from tests.loaded import analysis
from tests.paths import DATA, TRACES

US = 1000
PAGEABLE, PINNED = "Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pinned -> Device)"


def idle_of(trace: TraceText, folder):
    """Return the idle time of a one-rank trace by (class, name), in ns."""
    trace.write(folder)
    (rank,) = ringprof.load(folder).attribution.ranks
    assert rank.idle is not None
    idle = {(event.event_class, event.name): event.time_ns for event in rank.idle.events}
    assert sum(idle.values()) == rank.breakdown.idle_ns
    return idle


@pytest.fixture
def trace():
    """Build a trace whose device is busy until 10 us and has nothing after that yet."""
    trace = TraceText()
    trace.run(0, 10 * US, launched=(-5 * US, -2 * US))
    return trace


def test_host_time_belongs_to_the_innermost_event_and_the_rest_is_blocked(trace, tmp_path):
    trace.range("step", 20 * US, 95 * US)
    trace.operator("aten::mm", 30 * US, 60 * US)
    trace.run(110 * US, 120 * US, launched=(90 * US, 100 * US))
    assert idle_of(trace, tmp_path) == {
        ("nothing recorded", ""): 10 * US,
        ("user range", "step"): 10 * US + 30 * US,
        ("user range", "aten::mm"): 30 * US,
        ("launch call", "cudaLaunchKernel"): 10 * US,
        ("blocked", "unknown"): 10 * US,
    }


@pytest.mark.parametrize(
    ("name", "category", "label"),
    [
        ("cudaMemcpyAsync", "cuda_runtime", "launch call"),
        ("hipLaunchKernel", "cuda_runtime", "launch call"),
        ("cudaOccupancyMaxActiveBlocksPerMultiprocessor", "cuda_runtime", "launch call"),
        ("cuLaunchKernelEx", "cuda_driver", "launch call"),
        ("cudaMalloc", "cuda_runtime", "allocation or free"),
        ("hipFree", "cuda_runtime", "allocation or free"),
        ("cudaHostAlloc", "cuda_runtime", "allocation or free"),
        ("cuMemAlloc_v2", "cuda_driver", "allocation or free"),
        ("cudaStreamSynchronize", "cuda_runtime", "synchronisation"),
        ("cudaEventSynchronize", "cuda_runtime", "synchronisation"),
        ("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "user_annotation", "data loader"),
        ("TorchDynamo Cache Lookup", "cpu_op", "compile or graph capture"),
        ("cudaGraphInstantiate", "cuda_runtime", "compile or graph capture"),
        ("forward", "user_annotation", "user range"),
        ("aten::mm", "cpu_op", "operator"),
        ("aten::mm", "Operator", "operator"),
        ("cudaStreamIsCapturing", "cuda_runtime", "operator"),
    ],
)
def test_idle_class_of_an_event_and_of_events_inside_it(trace, tmp_path, name, category, label):
    trace.event(category, name, 10 * US, 50 * US)
    trace.operator("aten::view", 20 * US, 30 * US)
    trace.run(60 * US, 70 * US, launched=(60 * US, 60 * US))
    expected = {(label, name): 30 * US, (label, "aten::view"): 10 * US, ("nothing recorded", ""): 10 * US}
    assert idle_of(trace, tmp_path) == expected


@pytest.mark.parametrize(
    ("category", "name"),
    [
        ("user_annotation", "ProfilerStep#3"),
        ("user_annotation", "ringprof::iteration"),
        ("Trace", "PyTorch Profiler (0)"),
        ("cpu_op", "record_param_comms"),
        ("python_function", "train.py(1): step"),
    ],
)
def test_iteration_ranges_do_not_classify_idle_time(trace, tmp_path, category, name):
    trace.event(category, name, -20 * US, 100 * US)
    trace.run(60 * US, 70 * US, launched=(60 * US, 60 * US))
    assert idle_of(trace, tmp_path) == {("nothing recorded", ""): 50 * US}


def test_only_nonempty_events_of_the_launching_thread_count(trace, tmp_path):
    trace.operator("aten::mm", 10 * US, 60 * US, thread=2)
    trace.operator("aten::add", 20 * US, 20 * US, thread=1)
    trace.run(60 * US, 70 * US, launched=(50 * US, 60 * US), thread=1)
    assert idle_of(trace, tmp_path) == {
        ("nothing recorded", ""): 40 * US,
        ("launch call", "cudaLaunchKernel"): 10 * US,
    }


def test_ended_event_does_not_classify_later_events(trace, tmp_path):
    # The operator begins inside the range and outlives it; a child of the operator begins after the range's end.
    trace.range("forward", 10 * US, 20 * US)
    trace.operator("aten::mm", 15 * US, 50 * US)
    trace.operator("aten::view", 30 * US, 40 * US)
    trace.run(50 * US, 70 * US, launched=(50 * US, 50 * US))
    assert idle_of(trace, tmp_path) == {
        ("user range", "forward"): 5 * US,
        ("user range", "aten::mm"): 5 * US,
        ("operator", "aten::mm"): 10 * US + 10 * US,
        ("operator", "aten::view"): 10 * US,
    }


def test_shortest_event_of_equal_starts_is_innermost(trace, tmp_path):
    trace.operator("aten::linear", 10 * US, 50 * US)
    trace.range("forward", 10 * US, 30 * US)
    trace.run(50 * US, 70 * US, launched=(50 * US, 50 * US))
    assert idle_of(trace, tmp_path) == {("user range", "forward"): 20 * US, ("operator", "aten::linear"): 20 * US}


def test_a_launch_call_that_outlasts_the_start_of_its_kernel_is_host_time_until_then(trace, tmp_path):
    trace.run(30 * US, 70 * US, launched=(15 * US, 60 * US))
    assert idle_of(trace, tmp_path) == {
        ("nothing recorded", ""): 5 * US,
        ("launch call", "cudaLaunchKernel"): 15 * US,
    }


@pytest.mark.parametrize(
    ("length", "options", "expected"),
    [
        (5 * US - 1, {}, ("gap", "")),
        (5 * US, {}, ("blocked", "unknown")),
        (20 * US, {"stream": 8}, ("blocked", "another stream")),
        (20 * US + 1, {"stream": 8}, ("blocked", "unknown")),
        (5 * US - 1, {"stream": 8}, ("gap", "")),
        (90 * US, {"category": "gpu_memset"}, ("blocked", "unknown")),
        (90 * US, {"category": "gpu_memcpy", "name": PAGEABLE}, ("blocked", "host-side copy")),
        (90 * US, {"category": "gpu_memcpy", "name": PINNED}, ("blocked", "unknown")),
        (90 * US, {"launched": None}, ("blocked", "no launch record")),
    ],
)  # fmt: skip
def test_idle_time_after_the_launch_is_a_gap_or_blocked(trace, tmp_path, length, options, expected):
    trace.run(10 * US + length, 200 * US, **{"launched": (2 * US, 5 * US), **options})
    assert idle_of(trace, tmp_path) == {expected: length}


def test_the_kernels_of_a_graph_share_its_launch(trace, tmp_path):
    correlation = trace.call("cudaGraphLaunch", 12 * US, 20 * US)
    for start in (22 * US, 40 * US):
        trace.activity("kernel", "gemm", start, start + 10 * US, correlation=correlation)
    assert idle_of(trace, tmp_path) == {
        ("nothing recorded", ""): 2 * US,
        ("launch call", "cudaGraphLaunch"): 8 * US,
        ("gap", ""): 2 * US,
        ("blocked", "unknown"): 8 * US,
    }


@pytest.mark.parametrize("seed", range(40))
def test_idle_time_of_random_runs_equals_the_oracle(seed, tmp_path):
    choices, rng = write_random_run(seed, tmp_path), Random(-seed)
    first = rng.randint(0, 900)
    window = rng.choice((None, "trace", *(["part"] if choices.iterations else [])))
    between = rng.choice((None, f"{first}us,{first + rng.randint(100, 900)}us"))
    try:
        run = ringprof.load(tmp_path, window=window, between=between)
    except (InputError, UsageError) as error:
        # This draw left a rank without activities, or two ranks without a common time.
        assert any(text in str(error) for text in ("nothing was launched", "nothing ran", "do not overlap in time"))
        return
    assert_same_idle(run, run_traces_of(run, tmp_path, window))


WITH_COPIES = ("copied", "-prefix", "-layer", "-sizes", "ring-prefill", "waits-")


@pytest.mark.parametrize(
    "folder",
    [
        path
        for path in sorted([*TRACES.glob("h200*"), *DATA.glob("waits-*")])
        if any(part in path.name for part in WITH_COPIES)
    ],
    ids=lambda path: path.name,
)
@pytest.mark.parametrize("window", [None, "ringprof::bwd*"])
def test_idle_time_of_a_recorded_run_equals_the_oracle(folder, window):
    try:
        run = analysis(folder, window=window)
    except UsageError:
        assert window == "ringprof::bwd*" and "prefill" in folder.name  # forward only
        return
    assert_same_idle(run, run_traces_of(run, folder, window))


@pytest.mark.parametrize("seed", range(200))
def test_kept_host_events_overlap_host_time(seed):
    rng = Random(seed)
    correlations = [rng.choice((-1, *range(7))) for _ in range(12)]
    activities = sorted(
        (start := rng.randrange(40), start + rng.randrange(6), rng.randrange(2), correlation)
        for correlation in correlations
    )
    launches = sorted(
        (start := rng.randrange(40), start + rng.randrange(8), rng.randrange(2), correlation)
        for correlation in range(1, 6)
    )
    events = sorted((start := rng.randrange(45), start + rng.randint(1, 9), rng.randrange(3)) for _ in range(12))
    expected = [False] * len(events)
    for device in (0, 1):
        on_device = [activity for activity in activities if activity[2] == device]
        for time in range(on_device[0][0] if on_device else 0, max((end for _, end, *_ in on_device), default=0)):
            if any(start <= time < end for start, end, *_ in on_device):
                continue
            next_activity = next(activity for activity in on_device if activity[0] > time)
            for _, returned, thread, correlation in launches:
                if correlation == next_activity[3] and time < returned:
                    for index, (start, end, event_thread) in enumerate(events):
                        expected[index] |= event_thread == thread and start <= time < end
    kept = rows_in_idle(
        _columns(events, "start_ns", "end_ns", "thread"),
        _columns(activities, "start_ns", "end_ns", "device", "correlation"),
        _columns(launches, "start_ns", "end_ns", "thread", "correlation"),
    )
    assert kept.tolist() == expected


def _columns(rows, *names):
    return {name: np.array([row[index] for row in rows], np.int64) for index, name in enumerate(names)}
