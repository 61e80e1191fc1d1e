"""Tests of every committed run under traces/: against raw events, against its own counts, and against the schema."""

from __future__ import annotations

import json

import jsonschema
import pytest

from ringprof.analysis.findings.claim import Claim
from ringprof.analysis.findings.parts import cpu_blocked_clause
from ringprof.common.json_object import json_text
from ringprof.run import read_run
from tests.analysis.idle_oracle import run_traces_of
from tests.loaded import analysis
from tests.paths import TRACES
from tests.report.raw_facts import of_file
from tests.report.schema_walk import SCHEMA, undescribed
from tests.tiers import tiered

RUNS = sorted(path.parent for path in TRACES.glob("h200*/run.json"))
CHECKED = (
    "h200x2-decode-1048576", "h200x2-ring-prefill-262144", "h200x2-zigzag-65536-layer", "h200x2-zigzag-65536-packed",
    "h200x4-allgather-262144", "h200x4-burst-262144-copied", "h200x4-double-ring-65536-two-hosts",
    "h200x4-megatron-262144", "h200x4-usp-262144",
)  # fmt: skip
"""Runs of different strategies, masks, transports and numbers of nodes."""
OTHERS = [
    *sorted(path.parent for path in TRACES.glob("[!h]*/run.json")),
    *sorted(path.parent for path in TRACES.glob("h100*/run.json")),
]


def test_committed_runs_exist():
    assert {"h200x4-zigzag-262144", "h200x4-burst-262144"} <= {run.name for run in RUNS}


@tiered("folder", RUNS, [TRACES / name for name in CHECKED], ids=lambda path: path.name)
def test_committed_run_is_verified_and_consistent(folder):
    run = read_run(folder / "run.json")
    unverified = {"h200x4-double-ring-65536-two-hosts", "h200x4-usp-65536-two-hosts"}
    assert (folder.name in unverified) == (run.verification is None)
    assert run.verification is None or run.verification.passed
    loaded = analysis(folder)
    report, copies = json.loads(json_text(loaded.report())), run_traces_of(loaded, folder)
    jsonschema.validate(report, SCHEMA)
    assert list(undescribed(report, SCHEMA)) == []
    assert run.work is not None and run.profiled is not None
    for rank, trace in zip(report["ranks"], run.traces, strict=True):
        expected = {**of_file(folder / trace.path).swept}
        blocked = sum(block.end - block.start for block in copies.blocks(rank["rank"]))
        expected["exposed_comm"] += blocked
        expected["idle"] -= blocked
        assert {f"{name}_ns": value for name, value in expected.items()}.items() <= rank.items()
        # The bytes that the communicator counted must equal those in the trace's own records.
        iterations = len(run.profiled.iterations_ns[rank["rank"]])
        sent = [entry for entry in run.work[rank["rank"]].sent or [] if entry.operation in {"send_recv", "copy"}]
        counted = sum(entry.sent_bytes for entry in sent) * iterations
        assert (rank["hops"]["bytes"] if rank["hops"] else 0) == counted


@pytest.mark.parametrize("folder", OTHERS, ids=lambda path: path.name)
def test_every_other_committed_run_matches_the_schema_which_describes_each_of_its_fields(folder):
    report = json.loads(json_text(analysis(folder).report()))
    jsonschema.validate(report, SCHEMA)
    assert list(undescribed(report, SCHEMA)) == []


ELEMENTS = 4096 // 4 * 4 * 64
"""Elements of one rank's Q, K or V in the CPU runs on two hosts: local sequence, heads, head_dim."""
WIRE_MB_S = 25
"""Rate in MB/s that the wire between the two hosts was limited to."""


@pytest.mark.parametrize(
    ("name", "leaving"),
    [
        # One of the two ranks of a host sends over the wire: K and V (2 bytes) 3 hops in either pass, dK and dV
        # (4 bytes) 4 hops.
        ("zigzag", 2 * 3 * 2 * 2 + 4 * 2 * 4),
        # Both ranks of a host send: K and V once in either pass, dK and dV once in 4 bytes and once in 2.
        ("double-ring", 2 * (2 * 2 * 2 + 2 * 4 + 2 * 2)),
        # Both ranks of a host send: K and V; Q, dO and two numbers of 4 bytes a row of 64; dQ twice.
        ("burst", 2 * (2 * 2 + 2 * 2 + 2 * 4 / 64 + 2 * 2)),
    ],
)
def test_a_committed_run_on_two_hosts_names_the_wire_between_them(name, leaving):
    folder = TRACES / f"cpu4-{name}-4096-two-hosts"
    run = read_run(folder / "run.json")
    report = analysis(folder).report()
    assert run.topology.hosts == ["host0", "host0", "host1", "host1"] and run.work is not None
    clause = cpu_blocked_clause(analysis(folder).attribution)
    assert isinstance(clause, Claim)
    between, within, leaving_mb, _ = (figure.value for figure in clause.figures)
    exposed, wall_ns = (sum(rank[key] for rank in report["ranks"]) for key in ("exposed_comm_ns", "wall_ns"))
    assert leaving_mb == leaving * ELEMENTS / 1e6
    assert between + within == pytest.approx(exposed / wall_ns, rel=1e-9) and between > within
    assert leaving_mb / (wall_ns / 4 / 1e9) < WIRE_MB_S
