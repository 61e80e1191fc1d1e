"""Ranks taken a few at a time give the report that all of them together give."""

from __future__ import annotations

import gc
import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import ringprof
from ringprof import api
from ringprof.errors import InputError
from ringprof.scale import pipeline
from ringprof.trace.inputs import Input
from ringprof.trace.reduced import reduce_trace
from tests.analysis.build import NCCL, Builder, collective
from tests.paths import COMMITTED, TRACES
from tests.scale.runs import real_ring, write_ring

RECORDED = [folder.name for folder in COMMITTED]


@pytest.fixture
def few_at_a_time(monkeypatch):
    """Loads as if memory had no room, two ranks at a time."""

    def load(*paths: Any, tile: int = 2, **how: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(api, "MOST_IN_MEMORY", 0)
            patch.setattr(pipeline, "_TILE", tile)
            return loaded(paths, **{"jobs": 1, **how})

    return load


def loaded(paths: Any, **how: Any) -> Any:
    return ringprof.load(paths, **how)


def told(analysis: Any) -> Any:
    """The report but for the lists of steps and annotations."""
    report = analysis.report()
    warnings = sorted(json.dumps(one) for one in report["warnings"])
    summary = {key: value for key, value in report["summary"].items() if key not in ("steps_listed", "annotations")}
    return report | {"steps": None, "summary": summary, "warnings": warnings}


@pytest.mark.parametrize("name", RECORDED)
def test_every_recorded_run(few_at_a_time, name):
    together, apart = loaded(TRACES / name), few_at_a_time(TRACES / name)
    assert told(apart) == told(together)
    assert apart.findings.steps == together.findings.steps
    assert apart.findings.exposed_by_step == together.findings.exposed_by_step
    assert apart.findings.annotations == together.findings.annotations
    assert apart.hops().equals(together.hops()) and apart.iterations().equals(together.iterations())


OPTIONS: list[dict[str, Any]] = [
    {"ranks_per_host": 2},
    {"between": "20ms,60ms"},
    {"window": "ringprof::iteration*"},
    {"group": "0-3"},
]


@pytest.mark.parametrize("how", OPTIONS, ids=lambda how: next(iter(how)))
@pytest.mark.parametrize("name", ["h200x4-zigzag-65536", "h200x4-allgather-262144", "h200x4-usp-262144"])
def test_with_options(few_at_a_time, name, how):
    traces = sorted((TRACES / name).glob("rank*.json.gz"))
    assert told(few_at_a_time(*traces, **how)) == told(loaded(traces, **how))


@pytest.mark.parametrize("lost", [0, 3])
def test_with_a_rank_missing(few_at_a_time, lost):
    traces = [path for rank, path in enumerate(sorted((TRACES / RECORDED[-1]).glob("rank*.json.gz"))) if rank != lost]
    assert told(few_at_a_time(*traces)) == told(loaded(traces))


def spoil(folder: Path, how: str) -> None:
    """Rank 2's trace is gone, empty, cut off, or that of nothing."""
    path = folder / "rank2.json.gz"
    data = path.read_bytes()
    path.unlink()
    if how != "gone":
        path.write_bytes({"empty": b"", "cut": data[:16_000], "nothing": gzip.compress(b'{"traceEvents": []}')}[how])


@pytest.mark.parametrize("how", ["gone", "empty", "cut", "nothing"])
def test_a_run_with_a_rank_that_cannot_be_read(few_at_a_time, tmp_path, how):
    """Its figures are those of the other ranks, whichever way the rank is missing, and the report says so."""
    folders = [tmp_path / "mine", tmp_path / "without"]
    for folder in folders:
        shutil.copytree(TRACES / "h200x4-zigzag-65536", folder)
    spoil(folders[0], how)
    spoil(folders[1], "gone")
    together, without = (loaded(folder) for folder in folders)
    assert told(few_at_a_time(folders[0])) == told(together)
    assert together.ranks == [0, 1, 3]
    assert together.figures() | {"warnings": 0} == without.figures() | {"warnings": 0}
    codes = {warning.code for warning in together.warnings}
    assert {"left_out", "missing_ranks"} <= codes
    assert together.to_terminal().startswith("3 of 4 ranks")


def test_a_run_that_names_its_ranks_needs_no_trace_to(few_at_a_time, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(TRACES / "h200x4-zigzag-65536", folder)
    run = json.loads((folder / "run.json").read_text())
    for entry in run["traces"]:
        trace = json.loads(gzip.decompress((folder / entry["path"]).read_bytes()))
        del trace["distributedInfo"]
        (folder / entry["path"]).unlink()
        entry["path"] = f"{'abcd'[entry['rank']]}.json.gz"
        (folder / entry["path"]).write_bytes(gzip.compress(json.dumps(trace).encode()))
    (folder / "run.json").write_text(json.dumps(run))
    together = loaded(folder)
    assert together.ranks == [0, 1, 2, 3] and not together.warnings
    assert told(few_at_a_time(folder)) == told(together)


@pytest.mark.parametrize("late_ns", [0, 3_000_000, -50_000])
def test_hosts_with_clocks_of_their_own(few_at_a_time, tmp_path, late_ns):
    paths = write_ring(tmp_path, 24, per_host=4, late_ns=late_ns)
    together = loaded(paths)
    assert told(few_at_a_time(*paths, tile=4)) == told(together)
    offsets = together.clocks().offset_ns
    assert all(abs(offsets[rank] + late_ns * (rank // 4)) < 100_000 for rank in range(24))


@pytest.mark.parametrize("late_ns", [0, 1_000_000, 200_000_000])
def test_chosen_times_are_the_same_moments_on_every_clock(few_at_a_time, tmp_path, late_ns):
    """Ranks 0 and 4 are the same rank of the small ring on two hosts: they do the same at the same moments."""
    paths = write_ring(tmp_path, 8, per_host=4, late_ns=late_ns)
    together = loaded(paths, between="10ms,30ms")
    ranks = together.report()["ranks"]
    for rank in range(4):
        here, there = ranks[rank]["kinds_ns"], ranks[rank + 4]["kinds_ns"]
        # To the microseconds that the clocks can be told to.
        assert here.keys() == there.keys() and all(abs(here[kind] - there[kind]) < 100_000 for kind in here)
    assert not {"mixed_runs", "clocks_disagree"} & {warning.code for warning in together.warnings}
    assert told(few_at_a_time(*paths, between="10ms,30ms", tile=4)) == told(together)


def test_a_ring_of_many_is_the_small_ring_again(few_at_a_time, tmp_path):
    """Each rank of the large ring has the figures of the small ring's rank that it was made of."""
    small: Any = api.Analysis(pipeline.explain_traces(real_ring()), Input("trace", ("small",)))
    large = few_at_a_time(*write_ring(tmp_path, 48), tile=16)
    ranks = small.report()["ranks"]
    for number, rank in enumerate(large.report()["ranks"]):
        assert rank == ranks[number % 4] | {"rank": number}
    keys = ("exposed_comm_share", "overlap_ratio", "bounds_ns", "parts_ns")
    assert {key: large.report()["summary"][key] for key in keys} == {
        key: small.report()["summary"][key] for key in keys
    }
    assert large.findings.exposed_by_step == {
        key: (12 * time, 12 * count) for key, (time, count) in small.findings.exposed_by_step.items()
    }


def test_steps_that_no_name_tells(few_at_a_time, monkeypatch):
    """Where the order of hops tells the steps, too, all ranks are planned alike."""
    monkeypatch.setattr("ringprof.analysis.steps.plan.named_blocks", lambda *_: None)
    together, apart = loaded(TRACES / RECORDED[-1]), few_at_a_time(TRACES / RECORDED[-1])
    assert {step.source for step in together.findings.steps} == {"order"}
    assert apart.findings.steps == together.findings.steps


def test_what_is_left_out_is_said(few_at_a_time, tmp_path):
    pytest.importorskip("bokeh")
    together, apart = loaded(TRACES / RECORDED[-1]), few_at_a_time(TRACES / RECORDED[-1])
    assert together.report()["summary"]["steps_listed"] and together.report()["steps"]
    assert not apart.report()["summary"]["steps_listed"] and apart.report()["steps"] == []
    assert "leaves out timeline" in apart.to_html() and "leaves out timeline" not in together.to_html()
    for kind in ("timeline", "breakdown", "waterfall", "steps", "waiting"):
        assert getattr(apart.plot, kind)().has_data()


def test_other_processes(few_at_a_time):
    name = "h200x4-burst-262144"
    assert told(few_at_a_time(TRACES / name, jobs=2)) == told(loaded(TRACES / name))


def test_the_scratch_folder_goes_with_the_analysis(few_at_a_time, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    analysis = few_at_a_time(TRACES / RECORDED[-1])
    assert list(tmp_path.iterdir())
    del analysis
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_where_reading_fails(few_at_a_time, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    bad: Path = tmp_path / "rank9.json"
    bad.write_text('{"traceEvents": []}')
    with pytest.raises(InputError, match="rank9"):
        few_at_a_time(*sorted((TRACES / RECORDED[-1]).glob("rank*.json.gz")), bad)
    assert list(tmp_path.iterdir()) == [bad]


def test_details_live_as_long_as_a_rank_does(few_at_a_time):
    """Whoever keeps one rank of a run keeps the files that its hops are read from."""
    together = loaded(TRACES / RECORDED[-1]).attribution.ranks[1]
    rank = few_at_a_time(TRACES / RECORDED[-1]).attribution.ranks[1]
    gc.collect()
    assert rank.hops == together.hops


def test_a_host_of_unequal_ranks_tells_its_clock_by_the_one_that_ends_first(few_at_a_time, tmp_path):
    """All need all: rank 3, until 700, ended after rank 1 began, at 1000: the clocks are 300 to 9000 us apart."""
    spans_us = [(0, 9000), (1000, 9000), (0, 9000), (0, 700)]
    for rank, (start, end) in enumerate(spans_us):
        builder = Builder(rank=rank, host=f"node{rank // 2}")
        for number in range(10):
            begin, own = 10_000 * number, collective("allreduce", elements=1 << 20)
            builder.run(
                NCCL, 1000 * (begin + start), 1000 * (begin + end), launched=100 * number + 1, own=own, stream=20
            )
        (tmp_path / f"rank{rank}.ringprof").write_bytes(reduce_trace(builder.trace()))
    for run in (loaded(tmp_path), few_at_a_time(tmp_path)):
        (pair,) = run.attribution.clocks.pairs
        assert (pair.hosts, pair.residual_ns) == (("node0", "node1"), 4_350_000)


def test_collectives_without_records_that_end_together(few_at_a_time, tmp_path):
    """Rank r comes r ms after rank 0 to each of four all-reduces."""
    ms = 1_000_000
    for rank in range(6):
        b = Builder(rank=rank, world_size=6)
        for at in range(0, 40 * ms, 10 * ms):
            b.run("ncclKernel_AllReduce_RING_LL_Sum_float", at + rank * ms, at + 8 * ms + rank, stream=20)
        (tmp_path / f"rank{rank}.ringprof").write_bytes(reduce_trace(b.trace()))
    together, apart = loaded(tmp_path), few_at_a_time(tmp_path)
    assert told(apart) == told(together)
    for analysis in (together, apart):
        waits = [sum(part.wait_ns for part in rank.splits) for rank in analysis.attribution.ranks]
        assert waits == [4 * (5 - rank) * ms for rank in range(6)]
