"""Progress log of a rank, the outcomes that its parent reads there, and the hops that a rank counts as begun."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringprof.ranks.launch import _outcomes
from ringprof.ranks.launcher import RankInfo
from ringprof.ranks.process_group import GroupRanks
from ringprof.ranks.progress import PositionReporter, ProgressLog, ProgressLogReader, SilentReporter
from ringprof.ranks.rank_errors import RankOutcome
from ringprof.recording.recording import RankRecording
from ringprof.strategies.transport.ring_channel import Meter


class RecordingReporter:
    """Reporter that stores what it receives."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def start(self, phase: str, total: int) -> None:
        self.lines.append(f"{phase} of {total}")

    def advance(self) -> None:
        self.lines.append("+")


def test_a_progress_log_is_relayed_as_it_grows(tmp_path: Path) -> None:
    log, reporter = ProgressLog(tmp_path / "d"), RecordingReporter()
    position, reader = PositionReporter(log), ProgressLogReader(tmp_path / "d", reporter)
    reader.read()
    assert reader.phase is None
    position.start("warm-up", 2)
    position.advance()
    reader.read()
    position.say("hello")
    log.end(RankOutcome(kind="done"))
    log.end(RankOutcome(kind="stopped"))
    with (tmp_path / "d").open("a") as file:
        file.write('[1.0, "advance"')
    reader.read()
    reader.read()
    assert reporter.lines == ["warm-up of 2", "+", "hello"], "half a line waits"
    phase: str | None = reader.phase
    assert (phase, position.where()) == ("warm-up", "warm-up, step 2")
    assert reader.outcome is not None and reader.outcome[1]["kind"] == "done", "the first outcome counts"


def test_outcomes_are_in_order_if_the_clock_is_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = [tmp_path / f"rank{rank}" for rank in range(3)]
    readers = [ProgressLogReader(path, SilentReporter()) for path in logs]
    for rank, wall_clock in ((1, 2e9), (0, 1e9)):
        monkeypatch.setattr(time, "time", lambda seconds=wall_clock: seconds)
        ProgressLog(logs[rank]).end(RankOutcome(kind="failed", message=f"of {rank}"))
    assert [(rank, outcome.message) for rank, outcome in _outcomes(readers, range(3)).items()] == [
        (1, "of 1"), (0, "of 0"),
    ]  # fmt: skip


def test_rank_that_waits_to_post_a_hop_is_ahead_of_the_one_that_hangs() -> None:
    meter = Meter()
    task: Any = None
    recording = RankRecording(task, RankInfo(0, 2, 0, 2), GroupRanks(None), PositionReporter(SilentReporter()))
    assert recording.hops() is None
    recording.strategy = SimpleNamespace(comm=SimpleNamespace(meter=meter))
    counts = [recording.hops()]
    for _ in range(2):
        meter.compares = True
        counts.append(recording.hops())
        meter.add("kv", "send_recv", "same_host", 8)
        counts.append(recording.hops())
    assert counts == [0, 1, 1, 2, 2]
