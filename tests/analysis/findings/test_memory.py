"""Memory over time: from the allocators' own events, as the profiler writes them with ``profile_memory=True``."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pytest

import ringprof
from ringprof.analysis.findings.memory import memory_timelines
from ringprof.report.page.document import PageContext
from ringprof.report.perfetto import events_of
from ringprof.report.sections import memory
from ringprof.report.sections.memory import thinned_indices
from ringprof.trace.kineto import parse_trace
from ringprof.trace.reduced import MAGIC, parse_reduced, reduce_trace
from tests.report.test_machine import NO_FIGURES

MIB = 2**20


def moment(ts: float, allocated: Any, reserved: int = 0, device: int = -1, kind: int = 0) -> dict[str, Any]:
    args = {"Total Reserved": reserved, "Total Allocated": allocated, "Bytes": 1, "Device Id": device,
            "Device Type": kind, "Addr": 139832115200000, "finished": False, "Ev Idx": 3}  # fmt: skip
    return {
        "ph": "i",
        "cat": "cpu_instant_event",
        "s": "t",
        "name": "[memory]",
        "pid": 5,
        "tid": 5,
        "ts": ts,
        "args": args,
    }


def gpu(ts: float, allocated: Any, reserved: int) -> dict[str, Any]:
    return moment(ts, allocated, reserved, device=0, kind=1)


KERNEL = {"ph": "X", "cat": "kernel", "name": "flash_fwd", "pid": 0, "tid": 7, "ts": 100.0, "dur": 50.0,
          "args": {"device": 0, "stream": 7, "correlation": 9}}  # fmt: skip


def trace_text(*events: dict[str, Any]) -> bytes:
    whole = {"deviceProperties": [{"id": 0, "name": "NVIDIA H200"}], "distributedInfo": {"rank": 0, "world_size": 1},
             "baseTimeNanoseconds": 1_700_000_000_000_000_000, "traceEvents": [KERNEL, *events]}  # fmt: skip
    return json.dumps(whole).encode()


EVENTS = [
    gpu(110.0, 30 * MIB, 64 * MIB), gpu(90.0, 10 * MIB, 64 * MIB), gpu(130.5, 20 * MIB, 64 * MIB), moment(95.0, 4096),
]  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> ringprof.Analysis:
    path = tmp_path / "rank0.json"
    path.write_bytes(trace_text(*EVENTS))
    return ringprof.load(path)


def test_memory_timeline_of_each_device_uses_its_own_clock(run: ringprof.Analysis) -> None:
    base = 1_700_000_000_000_000_000
    frame = run.memory()
    assert frame["memory"].tolist() == ["host", "cuda 0", "cuda 0", "cuda 0"]
    assert (frame["time_ns"] - base).tolist() == [95_000, 90_000, 110_000, 130_500]
    assert (frame["allocated_bytes"]).tolist() == [4096, 10 * MIB, 30 * MIB, 20 * MIB]
    assert frame["reserved_bytes"].tolist() == [pd.NA, 64 * MIB, 64 * MIB, 64 * MIB]
    # Nothing else changes: the kernel alone is the rank's time.
    assert run.breakdown()["wall_ns"].tolist() == [50_000]
    assert run.warnings == []


def test_page_shows_peak_memory_and_export_has_a_counter(run: ringprof.Analysis) -> None:
    pytest.importorskip("bokeh")
    from ringprof.report.page import figures

    content = memory.html(run.findings, PageContext(figures, []))
    assert content is not None
    # The kernel begins at 100 us, the peak is 10 us after it.
    assert [[cell.text for cell in row] for row in content.tables[0].rows] == [
        ["0", "host", f"{4096 / MIB:.4g}", "-0.005", "-", "1"], ["0", "cuda 0", "30.00", "0.01", "64.00", "3"],
    ]  # fmt: skip
    assert "Memory over time" in run.to_html()
    counters = [event for event in events_of(run.findings) if event["ph"] == "C"]
    assert [(event["name"], event["ts"], event["args"]["MiB"]) for event in counters if "cuda" in event["name"]] == [
        ("allocated, cuda 0", 0.0, 10.0), ("allocated, cuda 0", 10.0, 30.0), ("allocated, cuda 0", 30.5, 20.0),
    ]  # fmt: skip


def test_trace_without_memory_events_has_no_memory_timeline(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    path.write_bytes(trace_text())
    run = ringprof.load(path)
    assert len(run.memory()) == 0 and list(memory_timelines(run.attribution)) == []
    assert memory.html(run.findings, NO_FIGURES) is None


def test_reduced_trace_keeps_memory_and_stores_no_empty_table() -> None:
    whole = parse_trace(trace_text(*EVENTS), "rank0.json")
    again = parse_reduced(reduce_trace(whole))
    for name in ("start_ns", "device", "allocated_bytes", "reserved_bytes"):
        assert np.array_equal(getattr(again.memory, name), getattr(whole.memory, name))
    none = parse_trace(trace_text(), "rank0.json")
    stored = reduce_trace(none)
    assert "memory" not in msgspec.msgpack.decode(zlib.decompress(stored[len(MAGIC) :]))["columns"]
    assert len(parse_reduced(stored).memory.start_ns) == 0


@pytest.mark.parametrize("allocated", [None, "much", -5, 2**70])
def test_invalid_memory_amounts_are_left_out(allocated: Any, tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    path.write_bytes(trace_text(gpu(90.0, allocated, 1), gpu(91.0, 7, 8)))
    assert ringprof.load(path).memory()["allocated_bytes"].tolist() == [7]


def test_thinned_memory_timeline_keeps_its_peaks() -> None:
    values = np.zeros(100_000, np.int64)
    values[[0, 777, 50_001, 99_999]] = [3, 9, 8, 5]
    kept = thinned_indices(values, 2_000)
    assert len(kept) <= 2_000 and {0, 777, 50_001, 99_999} <= set(kept.tolist())
    assert thinned_indices(values[:10], 2_000).tolist() == list(range(10))
