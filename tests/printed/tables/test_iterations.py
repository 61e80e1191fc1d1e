"""Round trip: torch's table of a recorded run's events gives the same times by kind as the trace."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ringprof.printed.tables.analyse import analyse_table
from ringprof.printed.tables.kernels import kind_of_row
from ringprof.printed.tables.read import read_tables
from tests.paths import COMMITTED

pytest.importorskip("torch", reason="needs torch's own table formatter")
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEventAvg

RUNS = [path for folder in COMMITTED for path in sorted(folder.glob("*.json.gz"))]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_printed_table_of_a_run_keeps_its_kinds(path: Path) -> None:
    events = [e for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if is_device(e)]
    if not events:
        pytest.skip("a run without device activities")
    from_trace: Counter[str] = Counter()
    for event in events:
        from_trace[merge_elementwise(kind_of_row(event["name"]))] += round(event["dur"] * 1000)
    table = read_tables(print_table(events).encode(), "log")[0]
    report = analyse_table(table)
    from_table: Counter[str] = Counter()
    for kind, time in report.kinds_ns.items():
        from_table[merge_elementwise(kind)] += time
    # Every row is known to half a unit of its last digit.
    slack = sum(row.step_ns for row in table.rows) / 2 + len(events)
    for kind, time in from_trace.items():
        assert from_table[kind] == pytest.approx(time, abs=slack)
    assert set(from_table) == set(from_trace)


def merge_elementwise(kind: str) -> str:
    """Return the kind, with all elementwise kinds as one, which a cut name of torch's template does not distinguish."""
    return "elementwise" if kind in ("permute", "cast", "optimizer") else kind


def is_device(event: dict[str, Any]) -> bool:
    return event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")


def print_table(events: list[dict[str, Any]]) -> str:
    """Return the table that ``key_averages().table()`` prints for these activities."""
    rows: dict[str, Any] = {}
    for event in events:
        row = rows.setdefault(event["name"], FunctionEventAvg())
        row.key, row.use_device, row.device_type = event["name"], "cuda", DeviceType.CUDA
        row.is_async = row.is_legacy = row.is_user_annotation = False
        row.node_id, row.stack, row.input_shapes, row.overload_name = -1, [], [], ""
        row.count += 1
        row.self_device_time_total += event["dur"]
        row.device_time_total = row.self_device_time_total
    listed: Any = EventList(rows.values(), use_device="cuda")
    return str(listed.table(sort_by="self_cuda_time_total", row_limit=-1, max_name_column_width=100))
