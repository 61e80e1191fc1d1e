"""Wrong usage of ``ringprof record`` and ``ringprof strategies``: exit code 2, one line with advice, no traceback."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from ringprof import cli

pytest.importorskip("torch", reason="recording needs torch")
SMALL = ["--seq", "64", "--heads", "2", "--head-dim", "8", "--device", "cpu"]


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.run(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


WRONG = [
    (["--strategy", "zigzagg", *SMALL], "did you mean 'zigzag'"),
    (["--strategy", "json:Found", *SMALL], "cannot be imported"),
    (["--strategy", "zigzag", *SMALL, "--seq", "63"], "divisible by 8"),
    (["--strategy", "zigzag", *SMALL, "--heads", "6", "--kv-heads", "4"], "not a multiple of 4 kv heads"),
    (["--strategy", "zigzag", *SMALL, "--kernel", "cudnn"], "needs a CUDA device"),
    (["--strategy", "zigzag", *SMALL, "-p", "windows=2"], "it has: grad_wire, documents_layout, deterministic"),
    (["--strategy", "zigzag", *SMALL, "-p", "grad_wire=bf16"], "is not exact|fp32|input"),
    (["--strategy", "zigzag", *SMALL, "-p", "grad_wire"], "KEY=VALUE"),
    (["--strategy", "burst", *SMALL, "-p", "ring_window=3"], "does not divide"),
    (["--strategy", "zigzag", *SMALL, "--ranks-per-node", "3"], "3"),
    (["--strategy", "zigzag"], "--seq"),
]


@pytest.mark.parametrize(("arguments", "part"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_impossible_recording_is_a_one_line_error(capsys, tmp_path, monkeypatch, arguments, part) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, "record", *arguments)
    lines = [line for line in err.splitlines() if line.startswith("ringprof: ")]
    assert code == 2
    assert len(lines) == 1 and part in lines[0]
    assert "Traceback" not in err
    assert not list(tmp_path.rglob("run.json"))


def test_output_that_is_not_a_run_is_not_overwritten(capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.json").write_text("{}")
    code, _, err = run(capsys, "record", "--strategy", "zigzag", *SMALL, "-o", "mine.json")
    assert code == 2
    assert "mine.json" in err
    assert (tmp_path / "mine.json").read_text() == "{}"


def test_excessive_memory_error_states_the_largest_sequence(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, "record", "--strategy", "zigzag", "--seq", str(2**22), "--device", "cpu")
    assert code == 2
    assert "largest sequence that fits" in err and "--force" in err


def test_the_strategies_are_listed_with_their_parameters(capsys) -> None:
    code, out, _ = run(capsys, "strategies")
    assert code == 0
    for name in ("ring", "zigzag", "stripe", "ulysses", "usp", "double-ring", "burst", "megatron", "allgather"):
        assert name in out
    assert "torch-cp                       the ring of torch's context_parallel (installed)" in out
    code, out, _ = run(capsys, "strategies", "burst")
    assert code == 0
    for part in ("ring_window", "optimized_backward", "fp32|input", "deterministic"):
        assert part in out
    assert run(capsys, "strategies", "burts")[0] == 2


@pytest.mark.skipif(find_spec("yunchang") is not None, reason="the package is installed")
def test_strategy_with_missing_package_error_shows_how_to_install(capsys) -> None:
    code, out, _ = run(capsys, "strategies")
    assert code == 0 and "yunchang/usp" in out and "to get yunchang: pip install yunchang flash-attn" in out
    code, _, err = run(capsys, "record", "--strategy", "yunchang/usp", "--seq", "64", "--device", "cpu")
    assert code == 2
    assert err.splitlines()[-1].startswith("ringprof: strategy 'yunchang/usp' needs yunchang")
