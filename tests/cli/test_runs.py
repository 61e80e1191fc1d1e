"""The command ``ringprof runs``: the runs that it lists, and those that it omits."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import pytest

from ringprof import cli
from ringprof.run import read_run
from tests.loaded import analysis
from tests.paths import TRACES


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.run(["runs", *arguments])
    return code, *capsys.readouterr()


def test_every_committed_run_is_listed_newest_first(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, str(TRACES), "--format", "json")
    rows = json.loads(out)["rows"]
    assert (code, err) == (0, "")
    assert {row["path"] for row in rows} == {str(path.parent) for path in TRACES.glob("*/run.json")}
    times = [row["created"] for row in rows]
    assert times == sorted(times, reverse=True)
    for row in rows:
        rates = analysis(row["path"]).summary.rates
        assert row["tflops"] == pytest.approx(rates.tflops)
        assert row["iteration_ms"] == pytest.approx((rates.slowest_median_ns or 0) / 1e6)
        assert row["strategy"] == getattr(read_run(Path(row["path"]) / "run.json").strategy, "name", None)
    assert len(list(csv.DictReader(io.StringIO(run(capsys, str(TRACES), "--format", "csv")[1])))) == len(rows)


def test_list_of_runs_fits_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(capsys, str(TRACES))
    assert max(map(len, out.splitlines())) <= 80 and "…" not in out
    assert "521.7 TFLOP/s" in out and "262,144" in out


def test_list_says_which_results_were_verified(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(run(capsys, str(TRACES), "--format", "json")[1])["rows"]
    heading, *lines = run(capsys, str(TRACES))[1].splitlines()
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


@pytest.mark.parametrize(("name", "message"), [("nowhere", "no such folder"), ("", "no runs here")])
def test_folder_without_runs_is_an_error(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, str(tmp_path / name))
    assert code == 2 and message in err and err.count("\n") == 1
