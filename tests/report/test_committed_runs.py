"""Every run under traces/ that comes with the repository: against raw events, against its own counts, by the schema."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import jsonschema
import pytest

import ringprof
from ringprof.run import read_run
from tests.analysis.sweep import sweep
from tests.analysis.test_real_runs import nanoseconds

TRACES = Path(__file__).parents[2] / "traces"
SCHEMA = Path(ringprof.__file__).parent / "report" / "schema" / "report-1.schema.json"
RUNS = sorted(path.parent for path in TRACES.glob("h200*/run.json"))


def raw_events(path):
    """(start, end, class) of the device activities launched inside ``ringprof::iteration``, base time left out."""
    text = gzip.decompress(path.read_bytes())
    events = [event for event in json.loads(text, parse_float=str, parse_int=str)["traceEvents"] if "cat" in event]
    ranges = [
        (nanoseconds(event["ts"]), nanoseconds(event["ts"]) + nanoseconds(event["dur"]))
        for event in events
        if event["cat"] == "user_annotation" and event["name"] == "ringprof::iteration"
    ]
    inside = {
        event["args"]["correlation"]
        for event in events
        if event["cat"] in {"cuda_runtime", "cuda_driver"} and "correlation" in event.get("args", {})
        if any(start <= nanoseconds(event["ts"]) < end for start, end in ranges)
    }
    found = []
    for event in events:
        if event["cat"] in {"kernel", "gpu_memcpy", "gpu_memset"} and event["args"]["correlation"] in inside:
            start = nanoseconds(event["ts"])
            kind = "memory" if event["cat"] != "kernel" else "compute"
            # What goes from one GPU to another: NCCL's kernels, and peer-to-peer copies.
            if event["name"].startswith(("nccl", "Memcpy PtoP")):
                kind = "comm"
            found.append((start, start + nanoseconds(event["dur"]), kind))
    return found


def test_there_are_committed_runs():
    assert {"h200x4-zigzag-262144", "h200x4-burst-262144"} <= {run.name for run in RUNS}


@pytest.mark.parametrize("folder", RUNS, ids=lambda path: path.name)
def test_a_committed_run(folder):
    run = read_run(folder / "run.json")
    unverified = {"h200x4-double-ring-65536-two-hosts", "h200x4-usp-65536-two-hosts"}
    assert (folder.name in unverified) == (run.verification is None)
    assert run.verification is None or run.verification.passed
    report = ringprof.load(folder).report()
    jsonschema.validate(report, json.loads(SCHEMA.read_text()))
    assert run.work is not None and run.profiled is not None
    for rank, trace in zip(report["ranks"], run.traces, strict=True):
        expected = sweep(raw_events(folder / trace.path))
        assert {f"{name}_ns": value for name, value in expected.items()}.items() <= rank.items()
        # What the communicator counted while it sent must be what the trace's own records say was sent.
        iterations = len(run.profiled.iterations_ns[rank["rank"]])
        sent = [entry for entry in run.work[rank["rank"]].sent if entry.operation in {"send_recv", "copy"}]
        counted = sum(entry.sent_bytes for entry in sent) * iterations
        assert (rank["hops"]["bytes"] if rank["hops"] else 0) == counted
