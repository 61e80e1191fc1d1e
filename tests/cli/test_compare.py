"""``ringprof compare`` on committed runs, traces, tables and logs."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil

import pytest

import ringprof
from ringprof import cli
from tests.loaded import analysis
from tests.paths import ROOT

ZIGZAG, RING, BURST = (str(ROOT / "traces" / f"h200x4-{name}-262144") for name in ("zigzag", "ring", "burst"))
TRACES = str(ROOT / "tests" / "data" / "h200x8-zigzag-131072")
TABLE, LOG = (str(next((ROOT / "tests" / "data" / "logs").glob(f"{number}_*.txt"))) for number in ("002", "001"))


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.run(["compare", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_two_runs_side_by_side(capsys):
    code, out, _ = run(capsys, ZIGZAG, RING, "--format", "json")
    found = json.loads(out)
    assert code == 0 and found["schema"] == "ringprof.compare/1"
    assert found["differing"]["strategy"] == ["zigzag", "ring"]
    assert "seq" not in found["differing"]
    reports = [ringprof.load(path).report() for path in (ZIGZAG, RING)]
    for entry, report in zip(found["entries"], reports, strict=True):
        assert entry["figures"]["tflops"]["value"] == pytest.approx(report["summary"]["tflops"])
        mean = sum(rank["exposed_comm_ns"] for rank in report["ranks"]) / len(report["ranks"])
        assert entry["figures"]["exposed_comm"]["value"] == pytest.approx(mean / 1e6)
    verdicts = {d["figure"]: d["verdict"] for d in found["differences"]}
    assert verdicts["tflops"] == verdicts["iteration"] == "worse"


def test_the_parts_of_the_waterfall_are_side_by_side(capsys):
    _, out, _ = run(capsys, ZIGZAG, RING, "--format", "json")
    entries = json.loads(out)["entries"]
    for entry, path in zip(entries, (ZIGZAG, RING), strict=True):
        parts = {name: f["value"] for name, f in entry["figures"].items() if name.startswith("waterfall.")}
        wall = analysis(path).summary.slowest_wall_ns / 1e6
        assert sum(parts.values()) == pytest.approx(wall)
    _, out, _ = run(capsys, ZIGZAG, RING)
    heading, below = out.split("waterfall: parts of the slowest rank's wall")
    assert "imbalance ms" in below
    assert "imbalance ms" not in heading


def test_a_difference_between_alike_runs_is_called_noise(capsys):
    _, out, _ = run(capsys, ZIGZAG, BURST)
    line = next(line for line in out.splitlines() if line.startswith("tflops"))
    assert line.endswith("1.00x~")
    assert "~ noise" in out


def test_what_stands_against_an_entry_is_said(capsys, tmp_path):
    """A trace that is cut off counts in no figure, and the comparison says that there is one."""
    pytest.importorskip("bokeh")
    whole, cut = ROOT / "traces" / "h200x4-zigzag-65536", tmp_path / "cut"
    shutil.copytree(whole, cut)
    (cut / "rank2.json.gz").write_bytes((whole / "rank2.json.gz").read_bytes()[:16_000])
    code, out, _ = run(capsys, str(whole), str(cut), "--html", str(tmp_path / "page.html"))
    assert code == 0 and "[left_out]" in out and "1: 1 of 4 ranks have no trace: 2 [missing_ranks]" in out
    assert "left_out" in (tmp_path / "page.html").read_text()
    entries = json.loads(run(capsys, str(whole), str(cut), "--format", "json")[1])["entries"]
    assert entries[0]["warnings"] == [] and any("[left_out]" in text for text in entries[1]["warnings"])
    rates = [entry["figures"]["block_tflops"]["value"] for entry in entries]
    assert rates[1] == pytest.approx(rates[0], rel=0.02)
    assert "warnings" not in run(capsys, str(whole), str(whole))[1]


def test_any_mix(capsys):
    code, out, err = run(capsys, ZIGZAG, TRACES, TABLE, LOG)
    assert code == 0, err
    for part in ("(run)", "(trace)", "(table)", "(log)", "(work)"):
        assert part in out
    _, text, _ = run(capsys, ZIGZAG, TRACES, TABLE, LOG, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert {row["source"] for row in rows} == {"run", "trace", "table", "log"}
    assert all(row["ratio"] == "" for row in rows if row["verdict"] == "not comparable")


def test_a_condition_sets_the_exit_code(capsys):
    code, _, err = run(capsys, ZIGZAG, RING, "--fail-if", "tflops < 0.95 * base")
    assert code == 1
    assert "h200x4-ring-262144: tflops is 305" in err
    assert run(capsys, ZIGZAG, BURST, "--fail-if", "tflops < 0.95 * base")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([ZIGZAG], "two measurements"),
        ([ZIGZAG, "nowhere"], "nowhere"),
        ([ZIGZAG, RING, "--fail-if", "tflop < 1"], "there are:"),
        ([ZIGZAG, RING, "--fail-if", "import os"], "FIGURE OP NUMBER"),
        ([ZIGZAG, RING, "--fail-if", "exposed_comm_share > 5"], "did you mean 'exposed_comm_share > 5%'?"),
        ([ZIGZAG, RING, "--fail-if", "exposed_comm > 5%"], "exposed_comm is no share"),
    ],
)
def test_wrong_usage_is_one_line(capsys, arguments, part):
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert part in err and len(err.strip().splitlines()) == 1


def test_objects_can_be_compared_from_python():
    runs = [ringprof.load(ZIGZAG), ringprof.load(RING)]
    found = ringprof.compare(*runs)
    assert [(entry.label, entry.source) for entry in found.entries] == [(run.name, "run") for run in runs]


def test_nine_runs_fit_80_columns_one_run_a_row(capsys, monkeypatch):
    paths = [str(path) for path in sorted((ROOT / "traces").glob("h200x4-*-262144"))]
    assert len(paths) == 9
    _, wide, _ = run(capsys, *paths)
    monkeypatch.setenv("COLUMNS", "80")
    _, narrow, _ = run(capsys, *paths)
    assert max(map(len, narrow.splitlines())) <= 80 and "…" not in narrow
    assert re.search(r"^h200x4-usp-262144 +1,173.4 +0.59x\+ +524.7 +1.71x\+ ", narrow, re.MULTILINE)
    figure = re.compile(r"\d[\d,]*\.\d+")
    assert sorted(figure.findall(narrow)) == sorted(figure.findall(wide))


def test_traces_from_elsewhere_are_of_the_same_work_where_the_user_says_so(capsys):
    traces = [f"{TRACES}/rank{rank}.json.gz" for rank in (0, 1)]
    _, out, _ = run(capsys, *traces)
    assert "(work)" in out and "(--same-work)" in out
    code, out, _ = run(capsys, *traces, "--same-work")
    assert code == 0 and "(work)" not in out
