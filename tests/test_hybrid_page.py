"""Every command and the program of docs/hybrid-models.md run, and its table is what today's curves say."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the page records and predicts")

from dev.benchmarks import recurrent_crossing
from ringprof import cli
from ringprof.prediction.calibration import read_calibration
from tests.paths import ROOT
from tests.test_docs import code_lines

PAGE = ROOT / "docs" / "hybrid-models.md"
COMMANDS = [line for line in code_lines(PAGE) if line.startswith("ringprof ")]
ROW = re.compile(r"^\| (\d+) \| ([\d,]+) \| ([\d.]+) \((\w+)\) \| ([\d.]+) \| [\d.]+ \|$", re.MULTILINE)


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.split()[1] == "predict"])
def test_predictions_of_the_page(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(shlex.split(command)[1:]) == 0
    assert "PREDICTED: state-" in capsys.readouterr().out


@pytest.mark.processes
def test_recordings_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for command in COMMANDS:
        if command.split()[1] in ("record", "report"):
            assert cli.run(shlex.split(command)[1:]) == 0, capsys.readouterr().err
    report = capsys.readouterr().out
    for number, operator in enumerate(("gdn", "gdn", "gdn", "attention")):
        assert f"layers.{number} {operator}" in report


def test_the_program_of_the_page_runs_on_one_rank() -> None:
    block = PAGE.read_text(encoding="utf-8").partition("\n\n    from torch")[2].partition("\n\n|")[0]
    program = "\n".join(line[4:] for line in f"    from torch{block}".splitlines())
    names: dict[str, object] = {}
    exec(compile(program, str(PAGE), "exec"), names)
    out, hidden = names["out"], names["hidden"]
    assert (tuple(out.shape), tuple(hidden.shape)) == ((1, 512, 8, 32), (1, 512, 64))  # type: ignore[attr-defined]


def test_the_table_is_that_of_todays_curves() -> None:
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    assert len(rows) == 9
    for gpus, tokens, attention_ms, strategy, recurrence_ms in (rows[1], rows[4], rows[7]):
        row = recurrent_crossing.row(read_calibration("h200"), int(gpus), int(tokens.replace(",", "")), 16)
        assert row.strategy == strategy
        assert row.attention_ms == pytest.approx(float(attention_ms), rel=0.03)
        assert row.recurrence_ms == pytest.approx(float(recurrence_ms), rel=0.03)


def test_crossing_points_are_interpolated_in_logarithms() -> None:
    def row(tokens: int, ratio: float) -> recurrent_crossing.Row:
        return recurrent_crossing.Row(2, tokens, "zigzag", ratio, 1.0)

    rows = [row(8192, 0.25), row(16384, 0.5), row(32768, 2.0), row(65536, 8.0)]
    assert recurrent_crossing.crossing(rows) == pytest.approx(16384 * 2**0.5)
    assert recurrent_crossing.crossing(rows[:2]) is None
