"""Tests of the library's public entry points."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pandas as pd
import pytest

import ringprof
from ringprof import cli
from ringprof.analysis.findings.findings import findings_in_memory
from ringprof.errors import InputError, KernelTableError, UsageError
from ringprof.report.notebook import findings_html
from ringprof.results.analysis import Analysis
from ringprof.results.frames import FRAMES, frame_of, write_parquet
from ringprof.results.load import parse_any
from ringprof.results.options import LoadOptions
from ringprof.run import write_run
from ringprof.scale.pipeline import attribute
from tests.analysis.build import NCCL, Builder, collective
from tests.analysis.recorded import recorded_run
from tests.analysis.test_real_runs import NVLINK
from tests.paths import DATA


@pytest.fixture(scope="module")
def analysis():
    return ringprof.load(DATA / NVLINK)


def test_breakdown_has_the_documented_columns(analysis):
    frame = analysis.breakdown()
    assert tuple(frame.columns) == tuple(FRAMES["breakdown"].meanings)
    assert frame["rank"].tolist() == list(range(8))
    assert str(frame["wall_ns"].dtype) == "Int64"
    parts = frame[["compute_ns", "exposed_comm_ns", "exposed_memory_ns", "idle_ns"]].sum(axis=1)
    assert (parts == frame["wall_ns"]).all()


@pytest.mark.parametrize("frame", FRAMES)
def test_every_frame_describes_its_columns(analysis, frame):
    table = getattr(analysis, frame)()
    meanings = table.attrs["columns"]
    assert list(meanings) == list(table.columns)
    assert all(meanings.values())
    # No removed column is described.
    assert list(FRAMES[frame].meanings) == list(table.columns)
    documentation = getattr(Analysis, frame).__doc__
    assert all(f"- ``{column}``: {meaning}" in documentation for column, meaning in meanings.items())


@pytest.mark.parametrize("frame", FRAMES)
def test_parquet_file_keeps_every_frame(analysis, frame, tmp_path):
    pytest.importorskip("pyarrow", reason="the parquet extra is not installed")
    table, path = getattr(analysis, frame)(), tmp_path / "frame.parquet"
    write_parquet(table, path)
    read_back = pd.read_parquet(path)
    assert read_back.attrs["columns"] == table.attrs["columns"]
    for column in table.columns:
        # Ranks come back as arrays, and unknown values as one of several null types.
        written, read_values = (
            [(None if x is pd.NA or x != x else x) if pd.api.types.is_scalar(x) else tuple(x) for x in source[column]]
            for source in (table, read_back)
        )
        assert written == read_values


def test_missing_pyarrow_error_says_what_to_install(analysis, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = tmp_path / "hops.parquet"
    assert cli.run(["report", str(DATA / NVLINK), "--parquet", "hops", "-o", str(path)]) == 2
    advice = "pip install '.[parquet]' in a clone of ringprof"
    assert capsys.readouterr().err == f"ringprof: Parquet files need pyarrow: {advice}\n"
    assert not path.exists()
    assert cli.run(["report", str(DATA / NVLINK), "--parquet", "hops"]) == 2
    assert "--output FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"group": ["cp", "dp"]}, "group is one text, such as 'cp,dp', not ['cp', 'dp']"),
        ({"between": ("10ms", "20ms")}, "between is one text, such as '10ms,20ms', not ('10ms', '20ms')"),
        ({"ranks_per_host": 0}, "ranks_per_host must be at least 1, not 0"),
        ({"jobs": 0}, "jobs must be at least 1, not 0"),
        ({"limit_bytes": -1}, "limit_bytes must be at least 1, not -1"),
    ],
)
def test_arguments_of_the_wrong_type_are_refused(options, said):
    with pytest.raises(UsageError) as refused:
        ringprof.load(DATA / NVLINK, **options)
    assert str(refused.value) == said


def test_hops_have_the_documented_columns(analysis):
    frame = analysis.hops()
    assert tuple(frame.columns) == tuple(FRAMES["hops"].meanings)
    assert len(frame) == 8 * 22
    assert (frame["wait_ns"] + frame["wire_ns"] == frame["end_ns"] - frame["start_ns"]).all()
    assert frame["send_to"].iloc[0] == (1,)
    assert int(frame["start_ns"].iloc[0]) > 1_790_857_026_000_000_000


def test_hop_of_two_kernels_is_ready_with_the_later_one():
    """A lone send and a lone receive launched after it are each ready when the other rank's kernel begins."""
    starts = {0: (100, 110), 1: (300, 700)}
    builders = []
    for rank, (send, receive) in starts.items():
        b = Builder(rank=rank, world_size=2)
        group = {"group_ranks": (0, 1), "group_size": 2}
        b.record(20, 24, collective("send", destination_rank=1 - rank, **group)).run(NCCL, send, 900, launched=30)
        b.record(40, 44, collective("recv", source_rank=1 - rank, **group)).run(NCCL, receive, 900, launched=50)
        builders.append(b)
    frame = frame_of(findings_in_memory(attribute([b.trace() for b in builders])), "hops")
    assert frame["send_to"].tolist() == [(1,), (0,)] and frame["bytes"].tolist() == [2000, 2000]
    # Rank 0's send waits for rank 1's receive, at 700; its receive for rank 1's send, at 300.
    assert frame["ready_ns"].tolist() == [700, 700]
    assert frame["wire_gbps"].tolist() == pytest.approx([2000 / 600, 2000 / 600])


def test_frames_and_report_agree(analysis):
    report, frame = analysis.report(), analysis.breakdown()
    assert report["source"]["type"] == "trace"
    assert [rank["compute_ns"] for rank in report["ranks"]] == frame["compute_ns"].tolist()
    assert analysis.ranks == [rank["rank"] for rank in report["ranks"]]


def test_a_notebook_gets_the_report_as_safe_html(analysis):
    page = analysis._repr_html_()
    assert "exposed communication" in page
    wall = analysis.breakdown()["wall_ns"][0]
    assert f'<td style="text-align: right">{wall / 1e6:.1f}</td>' in page


def test_names_are_escaped_in_notebook_html():
    b = Builder(world_size=1).run("<script>alert(1)</script>", 0, 10, launched=1)
    b.host = "<img src=x onerror=alert(1)>"
    attribution = attribute([b.trace()])
    page = findings_html(findings_in_memory(attribution))
    assert "<script" not in page and "<img" not in page
    comparison = ringprof.compare(DATA / NVLINK, DATA / NVLINK)
    assert "<table>" in comparison._repr_html_()
    assert list(comparison.frame().index) == [entry.label for entry in comparison.entries]


def test_one_file_several_files_and_a_folder(tmp_path):
    paths = [DATA / NVLINK / f"rank{rank}.json.gz" for rank in (0, 1)]
    assert ringprof.load(paths[0]).ranks == [0]
    assert ringprof.load(paths).ranks == [0, 1]
    assert [warning.code for warning in ringprof.load(str(paths[0])).warnings] == ["missing_ranks", "peer_missing"]


def test_a_run_is_loaded_with_its_traces(tmp_path):
    for rank in range(8):
        shutil.copy(DATA / NVLINK / f"rank{rank}.json.gz", tmp_path)
    write_run(recorded_run(world_size=8), tmp_path / "run.json")
    for path in (tmp_path, tmp_path / "run.json"):
        analysis = ringprof.load(path)
        assert analysis.run is not None
        assert analysis.run.name == "burst-1024"
        assert analysis.report()["source"] == {"type": "run", "paths": [str(tmp_path / "run.json")]}
        assert {rank["host"] for rank in analysis.report()["ranks"]} == {"node"}
        assert analysis.warnings == []
        assert analysis.summary.communication[0].link == "same_host"


def test_bytes_from_a_pipe():
    data = (DATA / NVLINK / "rank3.json.gz").read_bytes()
    loaded = parse_any(data, "-", LoadOptions())
    assert isinstance(loaded, Analysis) and loaded.ranks == [3]


def test_text_file_error_names_the_file(tmp_path):
    file = tmp_path / "run.log"
    file.write_text("hello\n", encoding="utf-8")
    with pytest.raises(KernelTableError, match=r"run\.log"):
        ringprof.load(file)


def test_a_missing_file_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        ringprof.load(tmp_path / "nothing.json")


def test_a_report_loads_neither_torch_nor_pandas_nor_matplotlib():
    code = (
        "import sys, ringprof, ringprof.cli\n"
        f"ringprof.cli.run(['report', {str(DATA / NVLINK)!r}])\n"
        "loaded = {'torch', 'pandas', 'matplotlib', 'jinja2'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
