"""Main function of one rank of a recording or of a check, which `ringprof.ranks.launch` starts.

Its arguments are ``record`` or ``check``, the path of the task's JSON, and the id of the process with which the rank
ends.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from ringprof.common.json_object import from_json
from ringprof.proof.launch import CheckTask
from ringprof.ranks.launcher import launcher_rank
from ringprof.ranks.progress import PositionReporter, ProgressLog, log_path, progress_log_path
from ringprof.ranks.rank_errors import RankOutcome, failed_outcome, stopped_outcome
from ringprof.ranks.watchdog import PARENT_GONE, Watchdog
from ringprof.recording.recording import RankTask

_TASKS: dict[str, type[RankTask | CheckTask]] = {task.job: task for task in (RankTask, CheckTask)}


def main(arguments: list[str]) -> NoReturn:
    """Run one rank and end the process: with 0, or with 3 and the reason in the rank's progress log."""
    what, path, parent = arguments[0], Path(arguments[1]), int(arguments[2])
    if os.getppid() != parent:
        os._exit(3)  # the parent was killed in the meantime, and its task with it
    task = from_json(path.read_bytes(), _TASKS[what])
    rank = launcher_rank()
    assert rank is not None, "started by ringprof, with the ranks' variables"
    scratch = path.parent
    _redirect_output(log_path(scratch, rank.rank))
    log = ProgressLog(progress_log_path(scratch, rank.rank))
    position = PositionReporter(log)

    def at_end(reason: str, code: int) -> None:
        log.end(stopped_outcome(position, reason))
        if reason == PARENT_GONE and rank.rank == 0:
            task.discard()
            shutil.rmtree(scratch, ignore_errors=True)
        # The log then shows where the rank hangs.
        faulthandler.dump_traceback()

    watchdog = Watchdog(at_end, parent=parent)
    watchdog.start()
    try:
        task.run(rank, position, scratch)
        log.end(RankOutcome(kind="done"))
    except BaseException as error:
        try:
            outcome = failed_outcome(position, error)
            sys.stderr.write(outcome.detail)
            sys.stderr.flush()
            log.end(outcome)
        finally:
            # Exit without destroying the process group, which could wait for the peers for ever.
            os._exit(3)
    sys.stdout.flush()
    sys.stderr.flush()
    # Exit without finalising Python: native threads left by torch sometimes abort an interpreter that shuts down.
    os._exit(0)


def _redirect_output(log: Path) -> None:
    """Redirect the output of this process, including that of native libraries, to its log."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if descriptor > 2:
        os.close(descriptor)
    # Python has no stream objects if the process was started with closed descriptors.
    sys.stdout = sys.stdout or open(1, "w", closefd=False)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)
