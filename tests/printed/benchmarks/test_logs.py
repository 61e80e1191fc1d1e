"""Results of `ringprof.logs`: the command's audit as rows, flags, a frame and JSON, for notebooks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import ringprof
from ringprof.cli import run
from ringprof.errors import InputError, UsageError
from ringprof.printed.benchmarks.logs import LOG_COLUMNS, BenchmarkLogs
from ringprof.printed.benchmarks.rows import Verdict
from tests.paths import LOGS, ROOT
from tests.recording.command import HANGS_S

FILES = sorted(LOGS.glob("*.txt"))
NAMES = [str(path) for path in FILES]


@pytest.fixture(scope="module")
def published() -> BenchmarkLogs:
    return ringprof.logs(FILES, heads=40, head_dim=128, world=32)


def test_the_frame_has_the_documented_columns(published: BenchmarkLogs) -> None:
    frame = published.frame()
    assert tuple(frame.columns) == LOG_COLUMNS
    assert len(frame) == 80
    assert set(frame["verdict"]) <= set(get_args(Verdict))
    assert (int(frame["oom"].sum()), int(frame["missing"].sum())) == (1, 2)
    first = frame.iloc[0]
    assert (first["seq"], first["forward_ms"], first["memory_mb"], first["tflops"]) == (131072, 34.46, 577.0, 43.28)
    # 4 · 131072² · 40 · 128 / 2 · 3.5 FLOP / 32 GPUs / 329.61 ms
    assert first["computed_tflops"] == pytest.approx(58.3768, abs=1e-3)
    assert frame["kv_heads"].isna().sum() == 79


def test_every_column_is_in_the_docs() -> None:
    page = (ROOT / "docs" / "logs.md").read_text(encoding="utf-8")
    assert [name for name in LOG_COLUMNS if f"`{name}`" not in page] == []


def test_rows_and_flags_are_python_objects(published: BenchmarkLogs) -> None:
    assert len(published.rows) == 80
    row = published.rows[0]
    assert (row.row.line, row.row.system, row.verdict) == (5, "megatron_cp", "inconsistent")
    flag = next(flag for flag in published.flags if flag.code == "oom_with_times")
    assert (flag.line, flag.severity, flag.printed, flag.computed) == (7, "error", "OOM", 1303.94)


def test_results_equal_those_of_the_command(
    published: BenchmarkLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    settings = ["--setting", "heads=40", "--setting", "head-dim=128", "--setting", "world=32"]
    options = [*settings, "-o", str(tmp_path / "out")]
    for form, text in (([], published.to_terminal()), (["--csv", "rows"], published.to_csv())):
        assert run(["report", *NAMES, *options, *form]) == 0
        assert (tmp_path / "out").read_text(encoding="utf-8") == text
    assert run(["report", *NAMES, *options, "--format", "json"]) == 0
    assert json.loads((tmp_path / "out").read_text()) == published.report()


def test_single_path_with_options() -> None:
    single = ringprof.logs(LOGS / "003_096af187c4e73423.txt")
    assert {row.row.file for row in single.rows} == {str(LOGS / "003_096af187c4e73423.txt")}
    # What the log states is not overruled; what it does not state is filled in and said to be an option.
    with_options = ringprof.logs(str(FILES[0]), heads=7, causal=False, device="A800", batch=3)
    assert {row.row.heads for row in with_options.rows} == {7, 40}
    assert with_options.rows[0].row.sources["heads"] == "option"
    assert {row.row.device for row in with_options.rows} == {"A800"}
    assert "kv_heads" not in with_options.rows[0].row.sources
    # Double ring at 524288 takes 471.33, 471.94 and 530.17 ms forward: 12 % apart.
    for spread, noted in ((0.10, True), (0.13, False)):
        codes = [flag.code for flag in ringprof.logs(FILES[:3], spread=spread).flags if flag.line == 69]
        assert ("far_apart" in codes) is noted


def test_a_count_below_one_is_refused() -> None:
    with pytest.raises(UsageError, match="heads must be at least 1, not -40"):
        ringprof.logs(FILES, heads=-40)


def test_a_path_given_twice_is_read_once() -> None:
    assert len(ringprof.logs([NAMES[1], FILES[1]]).rows) == 6


def test_unreadable_log_raises_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("nothing here\n")
    with pytest.raises(InputError, match=r"empty\.txt: no benchmark rows"):
        ringprof.logs(tmp_path / "empty.txt")
    with pytest.raises(InputError, match="larger than 5"):
        ringprof.logs(FILES[0], memory_bytes=15)


def test_logs_are_one_side_of_a_comparison(published: BenchmarkLogs) -> None:
    comparison = ringprof.compare(ringprof.logs(FILES[1]), NAMES[2])
    assert [entry.label.rpartition("/")[2].partition(":")[0] for entry in comparison.entries][-2:] == [
        "001_70a12dcf62574dfd.txt",
        "002_24cf2d6a9b1ed1f8.txt",
    ]
    # Log 003 prints x for two measurements.
    assert len(ringprof.compare(ringprof.logs(FILES[3])).entries) == 14


def test_log_text_is_escaped_in_notebooks(tmp_path: Path) -> None:
    text = "# <script>alert(1)</script>\n| B | Seq Len | FWD (ms) | TFLOPs/s |\n| 1 | 1024 | 2.0 | 3.0 |\n"
    (tmp_path / "log.txt").write_text(text)
    logs = ringprof.logs(tmp_path / "log.txt")
    assert "<script" not in logs._repr_html_()
    assert repr(logs) == "<ringprof.BenchmarkLogs of 1 files: 1 rows, 0 flags>"


def test_reading_logs_loads_neither_torch_nor_pandas() -> None:
    code = (
        "import sys, ringprof; found = ringprof.logs(sys.argv[1]); found.to_terminal(); found.report();"
        "print([name for name in ('torch', 'pandas', 'matplotlib', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, NAMES[0]], capture_output=True, text=True, check=True, cwd=ROOT, timeout=HANGS_S
    )
    assert done.stdout.strip() == "[]"
