"""Benchmark logs in ``ringprof report``: formats, options, pipes and errors."""

from __future__ import annotations

import csv
import io
import json
from importlib.resources import files
from pathlib import Path

import pytest

from ringprof.cli import run
from ringprof.printed.benchmarks.logs import LOG_COLUMNS
from tests.paths import LOGS

FILES = sorted(LOGS.glob("*.txt"))
NAMES = [str(path) for path in FILES]
OPTIONS = ["--setting", "heads=40", "--setting", "head-dim=128", "--setting", "world=32"]


def test_logs_terminal_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", *NAMES, *OPTIONS]) == 0
    out = capsys.readouterr().out
    assert "42 rows" in out and "settings_solved" in out and "1 row\n" in out
    assert not [char for char in out if char != "\n" and not char.isprintable()]


def test_nothing_is_wider_than_the_terminal_and_no_figure_is_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["report", *NAMES, *OPTIONS]) == 0
    narrow = capsys.readouterr().out.splitlines()
    assert max(map(len, narrow)) <= 80
    assert any(line.startswith("no room for fwd ms, memory MB: --width ") for line in narrow)
    assert run(["report", *NAMES, *OPTIONS, "--width", "120"]) == 0
    wide = capsys.readouterr().out
    assert "no room for" not in wide and max(map(len, wide.splitlines())) <= 120
    # A log without times has no columns for them.
    lines = wide.splitlines()
    heading = next(number for number, line in enumerate(lines) if "003_096af187c4e73423.txt ·" in line)
    assert lines[heading + 1].split() == ["system", "line", "B", "seq", "TFLOP/s", "verdict"]
    assert lines[heading + 2].split() == ["megatron_cp", "28", "1", "131072", "53.10", "unchecked"]


def test_json_follows_its_schema(capsys: pytest.CaptureFixture[str]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((files("ringprof.report") / "schema/logs-1.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    for options in ([], OPTIONS):
        assert run(["report", *NAMES, *options, "--format", "json"]) == 0
        data = json.loads(capsys.readouterr().out)
        jsonschema.validate(data, schema)
        assert data["schema"] == "ringprof.logs/1"
        assert len(data["rows"]) == 80
        assert set(data["rows"][0]) == set(LOG_COLUMNS)
    assert {"code", "severity", "file", "line", "message", "printed", "computed"} == set(data["flags"][0])


def test_logs_csv_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", NAMES[0], "--csv", "rows"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 15
    assert (rows[0]["seq"], rows[0]["heads"], rows[0]["tflops"]) == ("131072", "", "43.28")


def test_logs_csv_contains_no_formula(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "# =cmd|' /C calc'!A0\n| B | Seq Len | FWD (ms) | TFLOPs/s |\n| 1 | 1024 | 2.0 | 3.0 |\n"
    (tmp_path / "log.txt").write_text(text)
    assert run(["report", str(tmp_path / "log.txt"), "--csv", "rows"]) == 0
    assert next(csv.DictReader(io.StringIO(capsys.readouterr().out)))["label"].startswith("'=")


def test_logs_writes_an_output_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.json"
    assert run(["report", NAMES[1], "--format", "json", "-o", str(target)]) == 0
    assert len(json.loads(target.read_text())["rows"]) == 6
    assert run(["report", NAMES[1], "-o", str(tmp_path / "no" / "where")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_logs_reads_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.TextIOWrapper(io.BytesIO(FILES[1].read_bytes()))
    monkeypatch.setattr("sys.stdin", stream)
    assert run(["report", "-", "--format", "json"]) == 0
    assert {row["file"] for row in json.loads(capsys.readouterr().out)["rows"]} == {"-"}


def test_logs_strict_exit_code() -> None:
    assert run(["report", NAMES[0], "--strict", "-o", "/dev/null"]) == 2
    assert run(["report", NAMES[1], "--strict", "-o", "/dev/null"]) == 0


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"\x80\x81 | Seq Len | B | FWD (ms)", b"hello"])
def test_unreadable_log_is_a_one_line_error(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.txt"
    file.write_bytes(content)
    assert run(["report", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "bad.txt" in error


def test_a_missing_file_is_a_one_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(tmp_path / "none")]) == 2
    assert run(["report", str(tmp_path / "none"), NAMES[0]]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_equal_flags_are_summarised_in_one_paragraph(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["report", *NAMES, *OPTIONS])
    out = " ".join(capsys.readouterr().out.split())
    assert code == 0
    # Twenty rows of the last log are above the peak: one is shown with its arithmetic, the others by their lines.
    assert out.count("[above_peak]") == 1
    assert "and 19 more like it, lines 13, 17, 18" in out
    assert out.count("[far_apart]") > 1
