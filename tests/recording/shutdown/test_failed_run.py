"""The cause of a failed run is distinguished from its effects in other ranks' outcomes, and the log has all of them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ringprof.errors import Interrupted, RecordError, UnsupportedWorkloadError, VerificationError
from ringprof.ranks.rank_errors import FailedRun, RankOutcome, write_log
from ringprof.ranks.watchdog import TIME_LIMIT

HOSTS = ["a", "a", "b", "b"]


def stopped(reason: str = "", hops: int | None = 2) -> RankOutcome:
    return RankOutcome(kind="stopped", where="iterations, step 3", hops=hops, reason=reason)


def failed(reason: str, message: str, *, effect: bool = False) -> RankOutcome:
    return RankOutcome(kind="failed", where="iterations, step 3", reason=reason, message=message, effect=effect)


LOST = failed("RuntimeError", "RuntimeError: Connection closed by peer", effect=True)


def cause(outcomes: dict[int, RankOutcome], disconnected: list[int] | None = None, *, overdue: bool = False):
    return FailedRun(HOSTS, outcomes, disconnected or [], 60, overdue).cause()


@pytest.mark.parametrize(
    ("outcomes", "disconnected", "expected"),
    [
        ({0: LOST, 1: stopped(), 3: stopped()}, [2], "rank 2 on host b has gone without a word"),
        ({0: LOST, 1: LOST}, [3, 2], "host b with ranks 2, 3 has gone"),
        ({3: stopped()}, [0, 1, 2], "ranks 0, 1, 2 have gone without a word"),
        ({0: LOST, 2: failed("ValueError", "ValueError: mine")}, [], "rank 2 failed: ValueError: mine"),
        ({0: LOST, 2: failed("OutOfMemory", "out of memory")}, [], "rank 2 failed: out of memory: use a shorter"),
        ({0: stopped("SIGTERM"), 2: failed("ValueError", "ValueError: mine")}, [], "rank 2 failed"),
        ({1: LOST, 0: stopped("SIGTERM")}, [], "rank 1 failed: RuntimeError: Connection closed"),
        ({0: stopped("SIGTERM")}, [], "rank 0 was stopped by SIGTERM in iterations, step 3"),
    ],
)
def test_cause_is_distinguished_from_its_effects(
    outcomes: dict[int, RankOutcome], disconnected: list[int], expected: str
) -> None:
    error = cause(outcomes, disconnected)
    assert isinstance(error, RecordError) and error.exit_code == 3 and str(error).startswith(expected)


def test_interrupt_by_the_user_is_not_a_failure() -> None:
    error = cause({1: LOST, 0: stopped("SIGINT")}, [2])
    assert isinstance(error, Interrupted) and error.exit_code == 130


def test_refusal_or_verification_error_keeps_its_class() -> None:
    assert isinstance(cause({0: failed("UnsupportedWorkloadError", "odd")}), UnsupportedWorkloadError)
    assert isinstance(cause({0: failed("VerificationError", "wrong")}), VerificationError)


def test_slowest_rank_is_named_at_the_time_limit() -> None:
    others = {rank: stopped() for rank in (1, 3)}
    first = {0: stopped(TIME_LIMIT), **others}
    assert "rank 2 hung and did not answer" in str(cause(first))
    assert "rank 2 hung in iterations, step 3, after 1 hop: hop 2 was not posted" in str(
        cause({**first, 2: stopped(hops=1)})
    )
    assert "rank 0 hung and did not answer" in str(cause({}, overdue=True))
    lost = msgspec.structs.replace(LOST, hops=2)
    late = {**first, 1: lost, 2: stopped(hops=1)}
    assert "rank 2 hung in iterations, step 3, after 1 hop" in str(cause(late)), "the loss of a peer is a consequence"


@pytest.mark.parametrize(
    ("hops", "expected"),
    [((0, 0, 0, 0), "all 4 ranks hung"), ((1, 0, 2, 0), "rank 1, 3 hung"), ((1, 1, 0, 1), "rank 2 hung")],
)
def test_ranks_with_equally_few_hops_are_all_named(hops: tuple[int, ...], expected: str) -> None:
    error = cause({rank: stopped(hops=count) for rank, count in enumerate(hops)}, overdue=True)
    assert str(error).startswith(f"{expected} in iterations, step 3, after 0 hops: hop 1 was not posted")


def test_the_log_has_every_rank(tmp_path: Path) -> None:
    failed_run = FailedRun(HOSTS, {0: LOST, 1: RankOutcome(kind="failed", message="m", detail="line 1\nline 2")}, [2])
    text = failed_run.log(["ringprof", "record"])
    assert text.splitlines()[0] == "$ ringprof record"
    assert "rank 1 on a: failed: m\n    line 1\n    line 2\n" in text
    assert "rank 2 on b: connection lost" in text and "rank 3 on b: no message" in text
    written = write_log(text, tmp_path / "run.json", "mine")
    assert written == tmp_path / "mine.failed.log" and written.read_text() == text


def test_log_is_written_to_the_temporary_folder_without_an_output_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert write_log("x", tmp_path / "none/run.json", "mine") == tmp_path / "mine.failed.log"


def test_a_log_is_not_written_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user has put a symbolic link under the log's name, in a folder that both users can write to."""
    precious, runs, temporary = tmp_path / "precious", tmp_path / "runs", tmp_path / "temporary"
    runs.mkdir()
    temporary.mkdir()
    precious.write_text("mine")
    for target in (precious, tmp_path / "none"):
        (runs / "log.failed.log").unlink(missing_ok=True)
        (runs / "log.failed.log").symlink_to(target)
        monkeypatch.setattr("tempfile.tempdir", str(temporary))
        assert write_log("text", runs / "run.json", "log") == temporary / "log.failed.log"
        (temporary / "log.failed.log").unlink()
    assert precious.read_text() == "mine" and not (tmp_path / "none").exists()
