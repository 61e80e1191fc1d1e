"""Readers as functions of bytes, with assertions on their results."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path

from ringprof.analysis.findings.findings import findings_in_memory
from ringprof.common.json_object import json_text
from ringprof.common.limits import Limits, MemoryBudget
from ringprof.errors import RingprofError
from ringprof.printed.benchmarks.audit import audit
from ringprof.printed.benchmarks.read import parse_log
from ringprof.printed.communication.analyse import analyse
from ringprof.printed.communication.comm_log_report import CommLogAnalysis
from ringprof.printed.communication.flight_recorder import parse_dump
from ringprof.printed.communication.nccl_inspector import parse_inspector
from ringprof.printed.communication.read import is_inspector
from ringprof.printed.tables.analyse import analyse_table
from ringprof.printed.tables.read import read_tables
from ringprof.report import as_json
from ringprof.run import Run, parse_run
from ringprof.scale.pipeline import attribute
from ringprof.trace.columns import Trace
from ringprof.trace.kineto import parse_trace
from ringprof.trace.reduced import MAGIC, parse_reduced, reduce_trace

SMALL = Limits(expanded_bytes=1 << 24)
_SEED = Path(__file__).parent / "corpus" / "trace" / "h200x4-zigzag-65536.json"
SOUND = parse_trace(_SEED.read_bytes(), "rank0.json")


def read_trace(data: bytes) -> None:
    """Read a Kineto trace, reduce it, and report it."""
    trace = parse_trace(data, "rank0.json", MemoryBudget(SMALL))
    assert len(parse_reduced(reduce_trace(trace)).activities.start_ns) == len(trace.activities.start_ns)
    report_of(trace)


def read_reduced(data: bytes) -> None:
    """Read a reduced trace with the given bytes in its compressed part, and report it."""
    report_of(parse_reduced(MAGIC + zlib.compress(data, 0), "rank0.ringprof", MemoryBudget(SMALL)))


def report_of(trace: Trace, run: Run | None = None) -> None:
    """Make the JSON report of one trace, and assert that its parts sum to the wall time and that it is valid JSON."""
    attribution = attribute([trace], run)
    (rank,) = attribution.ranks
    times = rank.breakdown
    parts = times.compute_ns + times.exposed_comm_ns + times.exposed_memory_ns
    parts += times.exposed_other_groups_ns + times.idle_ns + times.background_ns
    assert parts == times.wall_ns, (parts, times.wall_ns)
    assert not rank.layers or sum(row.exposed_ns for row in rank.layers) == times.exposed_comm_ns
    report = as_json.as_dict(findings_in_memory(attribution), source="trace", paths=["rank0.json"])
    json.loads(json_text(report))


def read_table(data: bytes) -> None:
    """Read and analyse printed kernel tables."""
    for table in read_tables(data, "some.log"):
        analyse_table(table, None, None)


def read_log(data: bytes) -> None:
    """Read and audit a benchmark log."""
    audit([parse_log(data, "some.log")])


def read_run(data: bytes) -> None:
    """Read a run.json, and report a valid trace with it."""
    report_of(SOUND, parse_run(data, "/nowhere/run.json"))


def read_comm_log(data: bytes) -> None:
    """Read a Flight Recorder dump or a file of NCCL Inspector, analyse it alone, and format its report."""
    budget = MemoryBudget(Limits(1 << 28))
    parsed = parse_inspector(data, "x.log", budget) if is_inspector(data) else parse_dump(data, "dump_0", 0, budget)
    result = CommLogAnalysis("dump_0", ["dump_0"], analyse([parsed]))
    assert result.to_terminal()
    json.loads(json_text(result.report()))


TARGETS: dict[str, Callable[[bytes], None]] = {
    "trace": read_trace,
    "reduced": read_reduced,
    "table": read_table,
    "log": read_log,
    "run": read_run,
    "comm_log": read_comm_log,
}


def one_input(target: str, data: bytes) -> None:
    """Run a target on one input; a `RingprofError` of one line is no finding."""
    try:
        TARGETS[target](data)
    except RingprofError as error:
        assert str(error).count("\n") == 0, str(error)
