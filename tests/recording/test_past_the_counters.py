"""Strategies that compute or send past ringprof's counters, as user code may: figures that are not counted are null."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringprof.run import read_run
from tests.recording.command import SMALL, report_of, run

pytestmark = pytest.mark.processes

RECORD = ["record", "--strategy", "mine:Past", *SMALL, "--world", "2", "--iters", "2"]


def test_uncounted_kernel_work_is_null_and_model_rate_stays(strategy_folder: Path) -> None:
    done = run(RECORD, strategy_folder)
    assert done.returncode == 0, done.stderr
    assert "per device (a kernel of its own)" in done.stdout
    recorded = read_run(strategy_folder / "traces/run.json")
    assert recorded.verification is not None and recorded.verification.timed is not None and recorded.kernel is None
    assert recorded.work is not None and recorded.block_flops() is None
    assert [(work.block_flops, work.sent) for work in recorded.work] == [(None, None)] * 2
    summary = json.loads(report_of(strategy_folder, "--format", "json"))["summary"]
    assert summary["block_tflops"] is None and summary["solo_tflops"] is None and summary["tflops"] > 0
    assert "attention kernels run at" not in report_of(strategy_folder)


def test_controls_of_uncounted_work_are_refused_with_the_reason(strategy_folder: Path) -> None:
    done = run([*RECORD, "--controls"], strategy_folder, TMPDIR=str(strategy_folder))
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ringprof: ")]
    assert "strategy 'mine:Past' computes with kernels of its own" in line and "record it without --controls" in line
    assert "warm-up" not in done.stderr and list((strategy_folder / "traces").iterdir()) == []
