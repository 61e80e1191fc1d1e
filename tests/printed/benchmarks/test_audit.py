"""Audit of the published logs: every mistake is found and no correct row is flagged, by arithmetic done by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringprof.printed.benchmarks.audit import LogAudit, audit
from ringprof.printed.benchmarks.read import parse_log, read_log
from ringprof.printed.benchmarks.rows import BenchmarkLog, Flag, LogSettings
from tests.paths import LOGS

SETTINGS = LogSettings(heads=40, head_dim=128, world_size=32)


def log(number: int) -> BenchmarkLog:
    return read_log(next(LOGS.glob(f"{number:03d}_*")))


@pytest.fixture(scope="module")
def all_logs() -> LogAudit:
    return audit([log(number) for number in range(5)], SETTINGS)


def flags_of(result: LogAudit, number: int, *severities: str) -> list[tuple[str, int]]:
    return [
        (flag.code, flag.line)
        for flag in result.flags
        if f"/{number:03d}_" in flag.file and (not severities or flag.severity in severities)
    ]


def test_log_000_flags(all_logs: LogAudit) -> None:
    assert flags_of(all_logs, 0, "error") == [
        ("tflops_no_settings", 1),
        ("tflops_inconsistent", 5),
        ("tflops_inconsistent", 6),
        ("oom_with_times", 7),
    ]
    assert flags_of(all_logs, 0, "warning") == [("foreign_columns", 1), ("pass_ratio", 5), ("no_growth", 6)]
    flag = next(flag for flag in all_logs.flags if flag.code == "tflops_inconsistent")
    # 4 · 131072² · 40 · 128 / 2 · 3.5 FLOP / 32 GPUs / 329.61 ms
    assert (flag.printed, flag.computed) == (43.28, pytest.approx(58.3768, abs=1e-3))
    assert "29.66 heads" in flag.message


def test_correct_rows_agree_and_have_no_error(all_logs: LogAudit) -> None:
    verdicts = [audited.verdict for audited in all_logs.rows[:22]]
    assert verdicts == (
        ["inconsistent"] * 2 + ["unchecked"] + ["agrees"] * 3 + ["rounding"] * 3 + ["agrees"] * 6
        + ["rounding"] * 3 + ["agrees"] * 4
    )  # fmt: skip
    wrong = {(flag.file, flag.line) for flag in all_logs.flags if flag.severity == "error"}
    right = {
        (audited.row.file, audited.row.line)
        for audited in all_logs.rows
        if audited.verdict in ("agrees", "rounding", "settings")
    }
    assert not wrong & right


def test_rounded_times_are_recovered(all_logs: LogAudit) -> None:
    times = [flag.computed for flag in all_logs.flags if flag.code == "rounded_time" and "/000_" in flag.file]
    assert times == pytest.approx([158.25, 58.03, 463.98, 127.13, 1707.60, 461.30], abs=0.01)


def test_log_001_and_002_have_no_error(all_logs: LogAudit) -> None:
    assert flags_of(all_logs, 1, "error", "warning") == []
    assert flags_of(all_logs, 2) == [("far_apart", 69)]


def test_log_003_flags(all_logs: LogAudit) -> None:
    assert flags_of(all_logs, 3, "error") == []
    assert flags_of(all_logs, 3, "warning") == [
        ("length_missing", 43),
        ("length_not_stated", 49),
        ("length_not_stated", 50),
    ]
    assert ("repeated_source", 25) in flags_of(all_logs, 3, "note")
    flag = next(flag for flag in all_logs.flags if flag.code == "length_missing")
    assert flag.computed == [262144, 524288] and "times 4" in flag.message


def test_log_004_settings_are_recovered(all_logs: LogAudit) -> None:
    assert flags_of(all_logs, 4, "error") == [("settings_solved", 2)]
    flag = next(flag for flag in all_logs.flags if flag.code == "settings_solved")
    assert (flag.printed, flag.computed) == (16, 128)
    assert "totals over 8 GPUs" in flag.message and "head_dim 64 without a causal mask" in flag.message
    rows = [audited for audited in all_logs.rows if "/004_" in audited.row.file]
    assert {audited.verdict for audited in rows} == {"settings"}
    fastest = next(audited for audited in rows if audited.row.line == 25)
    # 4 · 2 · 128000² · 16 · 128 / 2 FLOP / 8 GPUs / 320.243 ms
    assert fastest.tflops_per_gpu == pytest.approx(52.39, abs=0.01)
    assert fastest.computed_tflops == pytest.approx(52.39, abs=0.01)
    warnings = dict(flags_of(all_logs, 4, "warning"))
    assert set(warnings) == {"no_growth", "above_peak"}
    assert ("no_growth", 9) in flags_of(all_logs, 4)
    assert ("above_peak", 25) in flags_of(all_logs, 4)


def test_repeated_rows_are_noted(all_logs: LogAudit) -> None:
    # Lines 20 to 25 of the log stand under two further headings.
    notes = [flag for flag in all_logs.flags if flag.code == "repeated_rows"]
    assert [(flag.line, flag.severity) for flag in notes] == [(32, "note"), (50, "note")]
    assert "lines 32 to 37 repeat lines 20 to 25" in notes[0].message


def test_differences_between_logs_are_noted(all_logs: LogAudit) -> None:
    notes = [flag for flag in all_logs.flags if flag.code == "far_apart"]
    assert [(Path(flag.file).name[:3], flag.line) for flag in notes] == [("002", 69), ("003", 51)]
    text = " ".join(flag.message for flag in notes)
    assert "106.66" in text and "129.59" in text and "160.25" in text
    assert all(flag.severity == "note" for flag in notes)
    assert not [f for f in audit([log(n) for n in range(5)], SETTINGS, spread=2.0).flags if f.code == "far_apart"]


def test_missing_settings_are_not_assumed() -> None:
    result = audit([log(0)])
    assert {audited.verdict for audited in result.rows} == {"unchecked"}
    missing = [flag for flag in result.flags if flag.code == "settings_missing"]
    assert [flag.line for flag in missing] == [9, 18, 34, 43]
    assert "--setting heads=N --setting head-dim=N --setting world=N: " in missing[0].message
    assert "160.00" in missing[0].message
    assert "without --setting world=N:" in missing[1].message
    # Even so, the first section cannot be right.
    assert ("tflops_no_settings", 1) in [(flag.code, flag.line) for flag in result.flags]


def test_stated_settings_are_not_overridden() -> None:
    result = audit([log(2)], LogSettings(heads=7, world_size=3))
    assert (result.rows[0].row.heads, result.rows[0].verdict) == (40, "agrees")


# --- slips, one by one ------------------------------------------------------------------------------


def one_row(time_ms: float, tflops: float, seq: int = 131072) -> tuple[str, list[Flag], float | None]:
    text = (
        "| B | Seq Len | FWD (ms) | FWD+BWD (ms) | TFLOPs/s |\n|---|---|---|---|---|\n"
        f"| 1 | {seq} | {time_ms / 3.5:.3f} | {time_ms:.3f} | {tflops:.3f} |\n"
    )
    settings = LogSettings(heads=40, head_dim=128, world_size=8, causal=True, device="A100")
    result = audit([parse_log(text.encode(), "log")], settings)
    return result.rows[0].verdict, list(result.flags), result.rows[0].tflops_per_gpu


# 4 · 131072² · 40 · 128 / 2 · 3.5 FLOP / 8 GPUs = 615.73 TFLOP/8 = 76.966 TFLOP; in 400 ms 192.41 TFLOP/s.
RIGHT = 192.414


def test_row_with_the_correct_rate_agrees() -> None:
    assert one_row(400, RIGHT) == ("agrees", [], RIGHT)


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (8, "total over 8 GPUs"),
        (2, "without the causal halving"),
        (1 / 3.5, "forward pass only"),
        (3 / 3.5, "2 forward passes instead of 2.5"),
        (16, "without the causal halving"),
        (1000, "in ms though labelled s"),
    ],
)
def test_rate_off_by_a_known_constant_is_explained(factor: float, words: str) -> None:
    verdict, flags, per_gpu = one_row(400, RIGHT * factor)
    assert verdict == "constant"
    assert words in next(flag.message for flag in flags if flag.code == "tflops_constant")
    assert per_gpu == pytest.approx(RIGHT, rel=2e-3)


def test_unexplained_rate_is_inconsistent() -> None:
    verdict, flags, per_gpu = one_row(400, 150)
    assert (verdict, [flag.code for flag in flags], per_gpu) == ("inconsistent", ["tflops_inconsistent"], None)


def test_rate_above_the_peak_is_an_error() -> None:
    verdict, flags, _ = one_row(200, 2 * RIGHT)
    assert (verdict, [(flag.code, flag.severity) for flag in flags]) == ("agrees", [("above_peak", "error")])


def test_throughput_that_contradicts_latency_is_flagged() -> None:
    text = (LOGS / "004_095922512483cfba.txt").read_text().replace("| 84.019 |", "| 94.019 |")
    codes = [(flag.code, flag.line) for flag in audit([parse_log(text.encode(), "log")]).flags]
    assert ("throughput_mismatch", 8) in codes
    assert codes.count(("throughput_mismatch", 8)) == len([code for code, _ in codes if code == "throughput_mismatch"])
