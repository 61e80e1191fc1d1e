"""Progress log of a rank, and how the cause of a failure is distinguished from its effects."""

from __future__ import annotations

import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringprof.errors import Interrupted, RecordError, UnsupportedWorkloadError, VerificationError
from ringprof.ranks.launch import _outcomes
from ringprof.ranks.launcher import RankInfo
from ringprof.ranks.process_group import GroupRanks
from ringprof.ranks.progress import PositionReporter, ProgressLog, ProgressLogReader, SilentReporter, progress_log_path
from ringprof.ranks.rank_errors import FailedRun, RankOutcome, is_consequence, stopped_outcome
from ringprof.ranks.watchdog import INTERRUPT
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
    log, reader, reporter = ProgressLog(tmp_path / "d"), ProgressLogReader(tmp_path / "d"), RecordingReporter()
    reader.relay(reporter)
    log.start("warm-up", 2)
    log.advance()
    reader.relay(reporter)
    log.say("hello")
    with (tmp_path / "d").open("a") as file:
        file.write('{"advance": ')
    reader.relay(reporter)
    assert reporter.lines == ["warm-up of 2", "+", "hello"], "half a line waits"
    assert log.where() == "warm-up, step 2"


def test_an_outcome_is_read_without_losing_progress(tmp_path: Path) -> None:
    log, reader, reporter = ProgressLog(tmp_path / "d"), ProgressLogReader(tmp_path / "d"), RecordingReporter()
    log.start("export", 1)
    log.end(RankOutcome(kind="done"))
    log.end(RankOutcome(kind="stopped"))
    entry = reader.outcome()
    assert entry is not None and entry["outcome"]["kind"] == "done"
    reader.relay(reporter)
    reader.relay(reporter)
    assert reporter.lines == ["export of 1"]


def open_logs(tmp_path: Path, count: int) -> tuple[list[ProgressLog], list[ProgressLogReader]]:
    paths = [progress_log_path(tmp_path, rank) for rank in range(count)]
    return [ProgressLog(path) for path in paths], [ProgressLogReader(path) for path in paths]


def fail(log: ProgressLog, kind: str, message: str) -> None:
    log.end(RankOutcome(kind="failed", reason=kind, message=message, effect=is_consequence(kind, message)))


def cause(statuses: dict[int, int], readers: list[ProgressLogReader], folder: Path) -> BaseException:
    """Return the cause that the parent of local ranks finds, from exit codes and progress logs."""
    return FailedRun(["a"] * len(readers), _outcomes(readers, statuses), statuses=statuses, logs=folder).cause()


LOST_PEER = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:53655"


def test_a_killed_rank_is_the_cause_and_lost_connections_are_effects(tmp_path: Path) -> None:
    written, readers = open_logs(tmp_path, 3)
    fail(written[0], "RuntimeError", LOST_PEER)
    error = cause({0: 3, 2: -signal.SIGKILL}, readers, tmp_path)
    assert isinstance(error, RecordError) and str(error).startswith("rank 2 was killed by SIGKILL")


def test_own_error_of_a_rank_outranks_an_earlier_lost_connection(tmp_path: Path) -> None:
    written, readers = open_logs(tmp_path, 3)
    fail(written[0], "RuntimeError", LOST_PEER)
    fail(written[1], "OutOfMemory", "out of memory")
    error = cause({0: 3, 1: 3}, readers, tmp_path)
    assert "rank 1 failed: out of memory: use a shorter sequence" in str(error) and "rank1.log" in str(error)


def test_rank_that_exited_is_the_cause_of_quoted_lost_connections(tmp_path: Path) -> None:
    written, readers = open_logs(tmp_path, 2)
    fail(written[0], "RecordError", f"rank 0 failed in call 1 of the attention: {LOST_PEER}")
    assert str(cause({0: 3, 1: 0}, readers, tmp_path)).startswith("rank 1 exited with code 0 and printed no error")


def test_own_error_that_names_a_library_is_the_cause(tmp_path: Path) -> None:
    written, readers = open_logs(tmp_path, 2)
    own = "rank 0 failed in call 1 of the attention: ValueError: no gloo"
    fail(written[0], "RecordError", own)
    assert str(cause({0: 3, 1: 0}, readers, tmp_path)).startswith(own)


def test_earlier_error_is_the_cause_if_the_clock_is_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, readers = open_logs(tmp_path, 2)
    for rank, says, wall_clock in ((1, "earlier", 2e9), (0, "later", 1e9)):
        monkeypatch.setattr(time, "time", lambda seconds=wall_clock: seconds)
        fail(written[rank], "RecordError", says)
    assert str(cause({0: 3, 1: 3}, readers, tmp_path)).startswith("earlier")


def test_ringprofs_own_errors_keep_their_class_and_exit_code(tmp_path: Path) -> None:
    written, readers = open_logs(tmp_path, 2)
    fail(written[0], "VerificationError", "wrong result on rank 1")
    assert isinstance(cause({0: 3, 1: 3}, readers, tmp_path), VerificationError)
    fail(written[1], "UnsupportedWorkloadError", "does not fit")
    error = cause({1: 3}, readers, tmp_path)
    assert isinstance(error, UnsupportedWorkloadError) and error.exit_code == 2


def test_rank_without_an_error_message_is_named_with_its_log(tmp_path: Path) -> None:
    _, readers = open_logs(tmp_path, 2)
    assert "rank 1 exited with code 1 and printed no error" in str(cause({0: 0, 1: 1}, readers, tmp_path))


@pytest.mark.parametrize(
    ("hops", "expected"),
    [
        ((7, 6, 7), "rank 1 hung in iterations, step 1, after 6 hops"),
        ((7, None, 7), "rank 1 hung in iterations"),
        ((7, 7, "silent"), "rank 2 hung and did not answer"),
    ],
)
def test_rank_that_others_wait_for_is_named(tmp_path: Path, hops: tuple[int | str | None, ...], expected: str) -> None:
    written, readers = open_logs(tmp_path, 3)
    for log, count in zip(written, hops, strict=True):
        log.start("iterations", 3)
        if not isinstance(count, str):
            log.hops = partial(lambda posted: posted, count)
            log.end(stopped_outcome(log, "SIGTERM"))
    error = FailedRun(["a"] * 3, _outcomes(readers, range(3)), limit_s=9, overdue=True, logs=tmp_path).cause()
    assert str(error).startswith(expected)
    assert str(error).endswith(f" when the time limit of 9 s was over; nothing was recorded; logs kept in {tmp_path}")


@pytest.mark.parametrize("kind", ["PeerLost", "RankRaised", "DistStoreError"])
def test_rank_that_exited_is_the_cause_of_a_lost_peer(tmp_path: Path, kind: str) -> None:
    written, readers = open_logs(tmp_path, 2)
    fail(written[0], kind, f"{kind}: rank 1 has ended before rank 0's hop 7")
    error = str(cause({0: 3, 1: 7}, readers, tmp_path))
    assert error.startswith("rank 1 exited with code 7 and printed no error; nothing was recorded; log: ")


def test_rank_that_a_signal_stopped_is_named_with_the_signal(tmp_path: Path) -> None:
    written, readers = open_logs(tmp_path, 2)
    written[1].start("iterations", 3)
    written[1].end(stopped_outcome(written[1], "SIGHUP"))
    fail(written[0], "RuntimeError", LOST_PEER)
    assert str(cause({0: 3, 1: 129}, readers, tmp_path)).startswith(
        "rank 1 was stopped by SIGHUP in iterations, step 1"
    )


@pytest.mark.parametrize(("started", "during"), [(True, " during iterations, step 1"), (False, "")])
def test_interrupt_names_the_position(tmp_path: Path, started: bool, during: str) -> None:
    """Interrupt the parent of the ranks while they run, and before; a check has nothing to record."""
    written, readers = open_logs(tmp_path, 2)
    for log in written if started else []:
        log.start("iterations", 3)
        log.end(stopped_outcome(log, "SIGTERM"))
    error = FailedRun(["a", "a"], _outcomes(readers, range(2)), interrupted=True, logs=tmp_path, records=False).cause()
    assert (type(error), str(error)) == (Interrupted, f"interrupted{during}; logs kept in {tmp_path}")


def test_rank_interrupted_alone_interrupts_the_run(tmp_path: Path) -> None:
    written, readers = open_logs(tmp_path, 2)
    written[0].end(stopped_outcome(written[0], INTERRUPT))
    assert isinstance(cause({0: 130}, readers, tmp_path), Interrupted)


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
