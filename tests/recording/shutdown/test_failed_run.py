"""The cause of a failed run is distinguished from its effects in other ranks' outcomes, and the log has all of them."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from ringprof.errors import Interrupted, OutOfMemory, RecordError, UnsupportedWorkloadError, VerificationError
from ringprof.ranks.rank_errors import FailedRun, RankOutcome, is_consequence, write_log
from ringprof.ranks.watchdog import INTERRUPT, TIME_LIMIT

HOSTS = ["a", "a", "b", "b"]
NOTHING = "; nothing was recorded"


def stopped(reason: str = "", hops: int | None = 2) -> RankOutcome:
    return RankOutcome(kind="stopped", where="iterations, step 3", hops=hops, reason=reason)


def failed(reason: str, message: str, hops: int | None = None) -> RankOutcome:
    return RankOutcome(
        kind="failed", where="iterations, step 3", hops=hops, reason=reason, message=message,
        effect=is_consequence(reason, message),
    )  # fmt: skip


LOST_PEER = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:53655"
LOST = failed("RuntimeError", LOST_PEER)
MINE = failed("ValueError", "ValueError: mine")
QUOTED = failed("RecordError", f"rank 0 failed in call 1 of the attention: {LOST_PEER}")
OWN = failed("RecordError", "rank 0 failed in call 1 of the attention: ValueError: no gloo")
HUNG = "hung in iterations, step 3"


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        # Ranks of an external launcher.
        ({"outcomes": {0: LOST, 1: stopped(), 3: stopped()}, "disconnected": [2]},
         "rank 2 on host b has gone without a word"),
        ({"outcomes": {0: LOST, 1: LOST}, "disconnected": [3, 2]}, "host b with ranks 2, 3 has gone"),
        ({"outcomes": {3: stopped()}, "disconnected": [0, 1, 2]}, "ranks 0, 1, 2 have gone without a word"),
        ({"outcomes": {0: LOST, 2: MINE}}, "rank 2 failed: ValueError: mine"),
        ({"outcomes": {0: LOST, 2: failed("OutOfMemory", "out of memory")}},
         "rank 2 failed: out of memory: use a shorter sequence"),
        ({"outcomes": {0: stopped("SIGTERM"), 2: MINE}}, "rank 2 failed"),
        ({"outcomes": {1: LOST, 0: stopped("SIGTERM")}}, f"rank 1 failed: {LOST_PEER}"),
        ({"outcomes": {0: stopped("SIGTERM")}}, "rank 0 was stopped by SIGTERM in iterations, step 3"),
        # Ranks whose parent knows their exit codes.
        ({"outcomes": {0: LOST}, "statuses": {0: 3, 2: -signal.SIGKILL}}, "rank 2 was killed by SIGKILL"),
        ({"outcomes": {0: LOST, 1: failed("OutOfMemory", "out of memory")}, "statuses": {0: 3, 1: 3}},
         "rank 1 failed: out of memory: use a shorter sequence"),
        ({"outcomes": {0: QUOTED}, "statuses": {0: 3, 1: 0}}, "rank 1 exited with code 0 and printed no error"),
        ({"outcomes": {0: OWN}, "statuses": {0: 3, 1: 0}}, OWN.message),
        ({"statuses": {0: 0, 1: 1}}, "rank 1 exited with code 1 and printed no error"),
        *(({"outcomes": {0: failed(kind, f"{kind}: rank 1 has ended before rank 0's hop 7")}, "statuses": {0: 3, 1: 7}},
           "rank 1 exited with code 7 and printed no error; nothing was recorded; log: ")
          for kind in ("PeerLost", "RankRaised", "DistStoreError")),
        ({"outcomes": {1: stopped("SIGHUP"), 0: LOST}, "statuses": {0: 3, 1: 129}},
         "rank 1 was stopped by SIGHUP in iterations, step 3"),
        # Ranks at the time limit: the slowest one is named, and the loss of a peer is a consequence.
        ({"outcomes": {0: stopped(TIME_LIMIT), 1: stopped(), 3: stopped()}}, "rank 2 hung and did not answer"),
        ({"outcomes": {0: stopped(TIME_LIMIT), 1: stopped(), 2: stopped(hops=1), 3: stopped()}},
         f"rank 2 {HUNG}, after 1 hop: hop 2 was not posted"),
        ({"outcomes": {0: stopped(TIME_LIMIT), 1: failed("RuntimeError", LOST_PEER, 2), 2: stopped(hops=1),
                       3: stopped()}}, f"rank 2 {HUNG}, after 1 hop"),
        ({"overdue": True}, "rank 0 hung and did not answer"),
        ({"outcomes": {rank: stopped(hops=None if rank == 1 else 7) for rank in range(4)}, "overdue": True},
         f"rank 1 {HUNG}"),
        *(({"outcomes": {rank: stopped(hops=count) for rank, count in enumerate(hops)}, "overdue": True},
           f"{ranks} {HUNG}, after 0 hops: hop 1 was not posted")
          for hops, ranks in (((0, 0, 0, 0), "all 4 ranks"), ((1, 0, 2, 0), "rank 1, 3"), ((1, 1, 0, 1), "rank 2"))),
    ],
)  # fmt: skip
def test_cause_is_distinguished_from_its_effects(facts: dict[str, Any], expected: str, tmp_path: Path) -> None:
    logs = tmp_path if "statuses" in facts or "overdue" in facts else None
    error = FailedRun(HOSTS, limit_s=60, logs=logs, **facts).cause()
    assert type(error) in (RecordError, OutOfMemory) and error.exit_code == 3 and str(error).startswith(expected)
    if " hung " in expected:
        kept = "" if logs is None else f"; logs kept in {logs}"
        assert str(error).endswith(f" when the time limit of 60 s was over{NOTHING}{kept}")
    elif logs is not None:
        assert f"; log: {logs / 'rank'}" in str(error)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"outcomes": {1: LOST, 0: stopped(INTERRUPT)}, "disconnected": [2]}, " during iterations, step 3" + NOTHING),
        ({"outcomes": {0: stopped(INTERRUPT)}, "statuses": {0: 130}}, " during iterations, step 3" + NOTHING),
        ({"outcomes": {0: stopped("SIGTERM"), 1: stopped("SIGTERM")}, "interrupted": True, "records": False},
         " during iterations, step 3"),
        ({"interrupted": True}, NOTHING),
    ],
)  # fmt: skip
def test_interrupt_by_the_user_names_the_position(facts: dict[str, Any], expected: str) -> None:
    """Interrupt while ranks run, one of them alone, and before they do; a check has nothing to record."""
    error = FailedRun(HOSTS, **facts).cause()
    assert (type(error), str(error), error.exit_code) == (Interrupted, f"interrupted{expected}", 130)


@pytest.mark.parametrize(("kind", "code"), [(UnsupportedWorkloadError, 2), (VerificationError, 3)])
def test_ringprofs_own_errors_keep_their_class_and_exit_code(kind: type[RecordError], code: int) -> None:
    error = FailedRun(HOSTS, {0: failed(kind.__name__, "odd")}, statuses={0: 3}).cause()
    assert (type(error), str(error), error.exit_code) == (kind, "odd", code)


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
