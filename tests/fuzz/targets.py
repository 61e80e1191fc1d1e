"""The readers as functions of bytes, and what must be true of whatever they make of them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path

from ringprof.analysis.findings.findings import findings_in_memory
from ringprof.benchmark_logs.audit import audit
from ringprof.benchmark_logs.read import parse_log
from ringprof.errors import RingprofError
from ringprof.json_object import json_text
from ringprof.kernel_tables.analyse import analyse_table
from ringprof.kernel_tables.read import read_tables
from ringprof.limits import Limits, MemoryBudget
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
    """A Kineto trace, its report, and its reduced form."""
    trace = parse_trace(data, "rank0.json", MemoryBudget(SMALL))
    assert len(parse_reduced(reduce_trace(trace)).activities.start_ns) == len(trace.activities.start_ns)
    report_of(trace)


def read_reduced(data: bytes) -> None:
    """A reduced trace from what its compressed part expands to, and its report."""
    report_of(parse_reduced(MAGIC + zlib.compress(data, 0), "rank0.ringprof", MemoryBudget(SMALL)))


def report_of(trace: Trace, run: Run | None = None) -> None:
    """The whole JSON report of one trace: it adds up, and holds nothing that JSON does not."""
    attribution = attribute([trace], run)
    (rank,) = attribution.ranks
    b = rank.breakdown
    parts = b.compute_ns + b.exposed_comm_ns + b.exposed_memory_ns + b.exposed_other_groups_ns + b.idle_ns
    parts += b.background_ns
    assert parts == b.wall_ns, (parts, b.wall_ns)
    report = as_json.as_dict(findings_in_memory(attribution), source="trace", paths=["rank0.json"])
    json.loads(json_text(report))


def read_table(data: bytes) -> None:
    """Printed kernel tables and what they prove."""
    for table in read_tables(data, "some.log"):
        analyse_table(table, None, None)


def read_log(data: bytes) -> None:
    """Benchmark logs and their audit."""
    audit([parse_log(data, "some.log")])


def read_run(data: bytes) -> None:
    """A run.json, and the report of traces that it is said to be of."""
    report_of(SOUND, parse_run(data, "/nowhere/run.json"))


TARGETS: dict[str, Callable[[bytes], None]] = {
    "trace": read_trace,
    "reduced": read_reduced,
    "table": read_table,
    "log": read_log,
    "run": read_run,
}


def one_input(target: str, data: bytes) -> None:
    """Carry out a target; what a user would be told is no finding, as long as it is one line."""
    try:
        TARGETS[target](data)
    except RingprofError as error:
        assert str(error).count("\n") == 0, str(error)
