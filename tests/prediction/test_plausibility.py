"""Rows of benchmark logs that a machine cannot have reached are flagged, for a log of the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="a prediction runs strategies on shapes")

from tests.paths import DATA
from tests.prediction.test_commands import run


def settings(**values: object) -> list[str]:
    """Return the options that complete a log's settings."""
    return [word for name, value in values.items() for word in ("--setting", f"{name}={value}")]


LOG = next((DATA / "logs").glob("000_*"))


@pytest.mark.long
def test_rates_above_the_flash_kernel_are_flagged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Transformer Engine's rows of 343.59 and 1303.94 ms are 224 and 236 TFLOP/s per A800.

    By hand: 4 x 262144^2 x 40 x 128 / 2 x 3.5 / 32 / 0.34359 s. The flash kernel of the same source reaches at most
    200 at the lengths that were measured, by its curve 206 at longer ones. The first row is slower.
    """
    log = tmp_path / "te.txt"
    log.write_text("".join(LOG.read_text().splitlines(keepends=True)[:7]))
    options = settings(heads=40, head_dim=128, world=32, causal=True)
    assert "above_kernel" not in run(capsys, "report", str(log), *options)[1]
    code, out, _ = run(capsys, "report", str(log), *options, "--machine", "a800")
    output = " ".join(out.split())
    assert code == 0
    assert "224 TFLOP/s per GPU, the kernel alone reaches 206 at its best [above_kernel]" in output
    assert "236 TFLOP/s per GPU, the kernel alone reaches 206 at its best [above_kernel]" in output
    assert output.count("[above_kernel]") == 2


def test_time_of_another_sequence_length_is_detected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The label states four times the true length; the machine finds the true one."""
    log = tmp_path / "short.txt"
    log.write_text(
        "# Ulysses\n| B | Seq Len | FWD (ms) | FWD+BWD (ms) | Memory (MB) | TFLOPs/s |\n"
        "|---|---|---|---|---|---|\n| 1 | 524288 | 61.33 | 227.0 | 1000 | 100 |\n"
    )
    options = [*settings(heads=64, head_dim=128, world=16, causal=False), "--setting", "nic=400"]
    _, out, _ = run(capsys, "report", str(log), *options, "--machine", "h100")
    assert "is what 131072 tokens take, not 524288 [length]" in " ".join(out.split())
