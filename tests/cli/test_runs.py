"""A folder of several runs in ``ringprof report``: the runs that it lists, those that it omits, and the newest."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import pytest

from ringprof import cli
from ringprof.cli.runs import RUN_COLUMNS
from ringprof.run import read_run
from tests.loaded import analysis
from tests.paths import TRACES

RUNS = [*TRACES.glob("*/run.json")]
"""The committed runs, and what was recorded in this checkout."""


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.run(["report", *arguments])
    return code, *capsys.readouterr()


def test_every_committed_run_is_listed_newest_first(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, str(TRACES), "--format", "json")
    report = json.loads(out)
    rows = report["runs"]
    assert report["schema"] == "ringprof.report/1" and set(rows[0]) == set(RUN_COLUMNS)
    newest = json.loads(run(capsys, rows[0]["path"], "--format", "json")[1])
    assert {name: value for name, value in report.items() if name != "runs"} == newest
    assert (code, err) == (0, "")
    assert {row["path"] for row in rows} == {str(path.parent) for path in TRACES.glob("*/run.json")}
    times = [row["created"] for row in rows]
    assert times == sorted(times, reverse=True)
    for row in rows:
        rates = analysis(row["path"]).summary.rates
        assert row["tflops"] == pytest.approx(rates.tflops)
        assert row["iteration_ms"] == pytest.approx((rates.slowest_median_ns or 0) / 1e6)
        assert row["strategy"] == getattr(read_run(Path(row["path"]) / "run.json").strategy, "name", None)
    assert len(list(csv.DictReader(io.StringIO(run(capsys, str(TRACES), "--csv", "runs")[1])))) == len(rows)


def test_list_of_runs_fits_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(capsys, str(TRACES))
    created = {json.loads(path.read_text())["created"]: path.parent for path in RUNS}
    out, newest, report = out.partition(f"the newest of these {len(RUNS)} runs: ")
    assert max(map(len, out.splitlines())) <= 80 and "…" not in out
    assert newest and report.startswith(f"{created[max(created)]}\n\n")
    assert "521.7 TFLOP/s" in out and "262,144" in out


def test_list_says_which_results_were_verified(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(run(capsys, str(TRACES), "--format", "json")[1])["runs"]
    heading, *lines = run(capsys, str(TRACES))[1].partition("\n\nthe newest")[0].splitlines()
    assert heading.endswith("verified")
    shown = {line.split()[0]: line.split()[-1] for line in lines}
    assert shown == {row["path"]: {True: "yes", None: "no"}[row["verified"]] for row in rows}


def test_invalid_run_is_left_out_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(TRACES / "cpu4-burst-4096", tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").write_text("{}")
    code, out, err = run(capsys, str(tmp_path))
    assert code == 0 and "good" in out and "bad" not in out
    assert err.startswith("ringprof: left out: ") and "bad/run.json" in err and err.count("\n") == 1
    assert run(capsys, str(tmp_path / "good"))[0] == 0


def test_folders_that_are_no_list_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Groups of one job are one run; a run is no list; several folders are one list."""
    for name in ("rank0", "ranks1-2"):
        shutil.copytree(TRACES / "cpu4-burst-4096", tmp_path / "job" / name)
    for path in (tmp_path / "job", TRACES / "cpu4-burst-4096"):
        code, _, err = run(capsys, str(path), "--csv", "runs")
        assert code == 2 and "no table runs: give a folder of several runs" in err
    code, _, err = run(capsys, str(tmp_path / "nowhere"))
    assert code == 2 and "no such file or folder" in err and err.count("\n") == 1
    shutil.copytree(TRACES / "cpu4-zigzag-4096-two-hosts", tmp_path / "others" / "newer")
    shutil.copytree(TRACES / "cpu4-burst-4096", tmp_path / "some" / "older")
    _, out, _ = run(capsys, str(tmp_path / "some"), str(tmp_path / "others"))
    assert f"the newest of these 2 runs: {tmp_path}/others/newer\n" in out


def test_runs_are_written_as_parquet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyarrow")
    pandas = pytest.importorskip("pandas")
    assert run(capsys, str(TRACES), "--parquet", "runs", "-o", str(tmp_path / "runs.parquet"))[0] == 0
    frame = pandas.read_parquet(tmp_path / "runs.parquet")
    assert list(frame.columns) == list(RUN_COLUMNS) and len(frame) == len(RUNS)
