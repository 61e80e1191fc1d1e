"""Ranks analysed a few at a time give the same report as all ranks together."""

from __future__ import annotations

import gc
import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import ringprof
from ringprof.errors import InputError
from ringprof.results import analysis as api
from ringprof.scale import pipeline
from ringprof.trace.inputs import Input
from ringprof.trace.reduced import reduce_trace
from tests.analysis.build import NCCL, Builder, collective
from tests.paths import COMMITTED, TRACES, VARIED
from tests.scale.runs import real_ring, write_ring
from tests.tiers import tiered

RECORDED = [folder.name for folder in COMMITTED]


@pytest.fixture
def load_tiled(monkeypatch):
    """Return a loader that behaves as if memory had no room, with two ranks at a time."""

    def load(*paths: Any, tile: int = 2, **options: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr("ringprof.results.load.MOST_IN_MEMORY", 0)
            patch.setattr(pipeline, "_TILE", tile)
            return load_together(paths, **{"jobs": 1, **options})

    return load


def load_together(paths: Any, **options: Any) -> Any:
    return ringprof.load(paths, **options)


def comparable_report(analysis: Any) -> Any:
    """Return the report without the lists of steps and annotations."""
    report = analysis.report()
    warnings = sorted(json.dumps(warning) for warning in report["warnings"])
    summary = {key: value for key, value in report["summary"].items() if key not in ("steps_listed", "annotations")}
    return report | {"steps": None, "summary": summary, "warnings": warnings}


@tiered("name", RECORDED, VARIED)
def test_tiled_report_of_every_recorded_run_is_equal(load_tiled, name):
    together, apart = load_together(TRACES / name), load_tiled(TRACES / name)
    assert comparable_report(apart) == comparable_report(together)
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
def test_tiled_report_with_options_is_equal(load_tiled, name, how):
    traces = sorted((TRACES / name).glob("rank*.json.gz"))
    assert comparable_report(load_tiled(*traces, **how)) == comparable_report(load_together(traces, **how))


@pytest.mark.parametrize("lost", [0, 3])
def test_tiled_report_with_a_missing_rank_is_equal(load_tiled, lost):
    traces = [path for rank, path in enumerate(sorted((TRACES / RECORDED[-1]).glob("rank*.json.gz"))) if rank != lost]
    assert comparable_report(load_tiled(*traces)) == comparable_report(load_together(traces))


def spoil(folder: Path, how: str) -> None:
    """Make rank 2's trace missing, empty, cut off, or a trace without activities."""
    path = folder / "rank2.json.gz"
    data = path.read_bytes()
    path.unlink()
    if how != "gone":
        path.write_bytes({"empty": b"", "cut": data[:16_000], "nothing": gzip.compress(b'{"traceEvents": []}')}[how])


@pytest.mark.parametrize("how", ["gone", "empty", "cut", "nothing"])
def test_tiled_report_with_an_unreadable_rank_is_equal(load_tiled, tmp_path, how):
    """Check that the figures are those of the other ranks, however the rank is missing, and that a warning says so."""
    folders = [tmp_path / "mine", tmp_path / "without"]
    for folder in folders:
        shutil.copytree(TRACES / "h200x4-zigzag-65536", folder)
    spoil(folders[0], how)
    spoil(folders[1], "gone")
    together, without = (load_together(folder) for folder in folders)
    assert comparable_report(load_tiled(folders[0])) == comparable_report(together)
    assert together.ranks == [0, 1, 3]
    assert together.figures() | {"warnings": 0} == without.figures() | {"warnings": 0}
    codes = {warning.code for warning in together.warnings}
    assert {"left_out", "missing_ranks"} <= codes
    assert together.to_terminal().startswith("3 of 4 ranks")


def test_run_json_supplies_ranks_that_traces_lack(load_tiled, tmp_path):
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
    together = load_together(folder)
    assert together.ranks == [0, 1, 2, 3] and not together.warnings
    assert comparable_report(load_tiled(folder)) == comparable_report(together)


@pytest.mark.parametrize("late_ns", [0, 3_000_000, -50_000])
def test_tiled_report_aligns_host_clocks(load_tiled, tmp_path, late_ns):
    paths = write_ring(tmp_path, 24, per_host=4, late_ns=late_ns)
    together = load_together(paths)
    assert comparable_report(load_tiled(*paths, tile=4)) == comparable_report(together)
    offsets = together.clocks().offset_ns
    assert all(abs(offsets[rank] + late_ns * (rank // 4)) < 100_000 for rank in range(24))


@pytest.mark.parametrize("late_ns", [0, 1_000_000, 200_000_000])
def test_chosen_times_are_converted_to_every_clock(load_tiled, tmp_path, late_ns):
    """Check ranks 0 and 4, made from one rank of the small ring: both do the same at the same time."""
    paths = write_ring(tmp_path, 8, per_host=4, late_ns=late_ns)
    together = load_together(paths, between="10ms,30ms")
    ranks = together.report()["ranks"]
    for rank in range(4):
        here, there = ranks[rank]["kinds_ns"], ranks[rank + 4]["kinds_ns"]
        # Equal within the error of the fitted clocks.
        assert here.keys() == there.keys() and all(abs(here[kind] - there[kind]) < 100_000 for kind in here)
    assert not {"mixed_runs", "clocks_disagree"} & {warning.code for warning in together.warnings}
    assert comparable_report(load_tiled(*paths, between="10ms,30ms", tile=4)) == comparable_report(together)


def test_tiled_report_of_a_repeated_ring_equals_the_small_ring(load_tiled, tmp_path):
    """Check that each rank of the large ring has the figures of the small ring's rank that it was made from."""
    small: Any = api.Analysis(pipeline.explain_traces(real_ring()), Input("trace", ("small",)))
    large = load_tiled(*write_ring(tmp_path, 48), tile=16)
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


def test_tiled_report_infers_steps_from_order(load_tiled, monkeypatch):
    """Check that all ranks get the same plan where the order of hops defines the steps."""
    monkeypatch.setattr("ringprof.analysis.steps.plan.named_blocks", lambda *_: None)
    together, apart = load_together(TRACES / RECORDED[-1]), load_tiled(TRACES / RECORDED[-1])
    assert {step.source for step in together.findings.steps} == {"order"}
    assert apart.findings.steps == together.findings.steps


def test_page_of_many_ranks_states_omissions(load_tiled, tmp_path):
    together, apart = load_together(TRACES / RECORDED[-1]), load_tiled(TRACES / RECORDED[-1])
    assert together.report()["summary"]["steps_listed"] and together.report()["steps"]
    assert not apart.report()["summary"]["steps_listed"] and apart.report()["steps"] == []
    assert "leaves out timeline" in apart.to_html() and "leaves out timeline" not in together.to_html()
    for kind in ("timeline", "breakdown", "waterfall", "steps", "waiting"):
        assert getattr(apart.plot, kind)().has_data()


def test_tiled_report_in_other_processes_is_equal(load_tiled):
    name = "h200x4-burst-262144"
    assert comparable_report(load_tiled(TRACES / name, jobs=2)) == comparable_report(load_together(TRACES / name))


def test_scratch_folder_is_removed_with_the_analysis(load_tiled, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    analysis = load_tiled(TRACES / RECORDED[-1])
    assert list(tmp_path.iterdir())
    del analysis
    assert not list(tmp_path.iterdir())


def test_scratch_files_are_removed_where_reading_fails(load_tiled, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    bad: Path = tmp_path / "rank9.json"
    bad.write_text('{"traceEvents": []}')
    with pytest.raises(InputError, match="rank9"):
        load_tiled(*sorted((TRACES / RECORDED[-1]).glob("rank*.json.gz")), bad)
    assert list(tmp_path.iterdir()) == [bad]


def test_scratch_files_live_as_long_as_a_rank(load_tiled):
    """Check that keeping one rank of a run keeps the files that its hops are read from."""
    together = load_together(TRACES / RECORDED[-1]).attribution.ranks[1]
    rank = load_tiled(TRACES / RECORDED[-1]).attribution.ranks[1]
    gc.collect()
    assert rank.hops == together.hops


def test_first_end_on_a_host_bounds_its_clock_offset(load_tiled, tmp_path):
    """Check an all-reduce of ranks that end at different times.

    Rank 3, until 700, ended after rank 1 began, at 1000: the clocks are 300 to 9000 us apart.
    """
    spans_us = [(0, 9000), (1000, 9000), (0, 9000), (0, 700)]
    for rank, (start, end) in enumerate(spans_us):
        builder = Builder(rank=rank, host=f"node{rank // 2}")
        for number in range(10):
            begin, own = 10_000 * number, collective("allreduce", elements=1 << 20)
            builder.run(
                NCCL, 1000 * (begin + start), 1000 * (begin + end), launched=100 * number + 1, own=own, stream=20
            )
        (tmp_path / f"rank{rank}.ringprof").write_bytes(reduce_trace(builder.trace()))
    for run in (load_together(tmp_path), load_tiled(tmp_path)):
        (pair,) = run.attribution.clocks.pairs
        assert (pair.hosts, pair.residual_ns) == (("node0", "node1"), 4_350_000)


def test_tiled_report_matches_collectives_by_ends(load_tiled, tmp_path):
    """Check four all-reduces to which rank r comes r ms after rank 0."""
    ms = 1_000_000
    for rank in range(6):
        b = Builder(rank=rank, world_size=6)
        for start in range(0, 40 * ms, 10 * ms):
            b.run("ncclKernel_AllReduce_RING_LL_Sum_float", start + rank * ms, start + 8 * ms + rank, stream=20)
        (tmp_path / f"rank{rank}.ringprof").write_bytes(reduce_trace(b.trace()))
    together, apart = load_together(tmp_path), load_tiled(tmp_path)
    assert comparable_report(apart) == comparable_report(together)
    for analysis in (together, apart):
        waits = [sum(part.wait_ns for part in rank.splits) for rank in analysis.attribution.ranks]
        assert waits == [4 * (5 - rank) * ms for rank in range(6)]
