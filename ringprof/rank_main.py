"""One rank of a recording or of a check, started by ringprof through `ringprof.spawn`, with TASK and PARENT.

TASK is the path of the task's JSON, PARENT the process to live no longer than.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from ringprof.record.check.launch import CheckTask, check_for_parent
from ringprof.record.launcher import RankInfo, launcher_rank
from ringprof.record.local_launcher import log_path, progress_log_path
from ringprof.record.progress import ProgressLog
from ringprof.record.recording import RankRecording
from ringprof.record.request import RankTask as RecordTask
from ringprof.record.request import from_json
from ringprof.record.run_folder import discard
from ringprof.record.shutdown.rank_errors import error_kind, error_line, traceback_text
from ringprof.record.shutdown.watchdog import PARENT_GONE, Watchdog
from ringprof.trace.reduced import reduce_file

_Task = RecordTask | CheckTask
_TASKS: dict[str, type[_Task]] = {"record": RecordTask, "check": CheckTask}


def main(what: str, arguments: list[str]) -> NoReturn:
    """Be one rank and end the process: with 0, or with 3 and the reason in the rank's diary."""
    parent = int(arguments[1])
    if os.getppid() != parent:
        os._exit(3)  # killed meanwhile, and what it had to say is gone with it
    task = from_json(Path(arguments[0]).read_bytes(), _TASKS[what])
    place = launcher_rank()
    assert place is not None and task.scratch is not None, "started by ringprof, with the ranks' variables"
    scratch = Path(task.scratch)
    _print_to(log_path(scratch, place.rank))
    diary = ProgressLog(progress_log_path(scratch, place.rank))
    hops: list[Callable[[], int | None]] = []

    def at_end(reason: str, code: int) -> None:
        diary.log_stop(hops[0]() if hops else None)
        if reason == PARENT_GONE and place.rank == 0:
            if isinstance(task, RecordTask):
                discard(Path(task.staging))
            shutil.rmtree(scratch, ignore_errors=True)
        # Where it hangs, for the log.
        faulthandler.dump_traceback()

    watchdog = Watchdog(at_end, parent=parent)
    watchdog.start()
    try:
        _carry_out(task, place, diary, hops)
        diary.done()
    except BaseException as error:
        _tell(error, diary)
    sys.stdout.flush()
    sys.stderr.flush()
    # All is done. Native threads that torch leaves behind now and then abort an interpreter that shuts down.
    os._exit(0)


def _carry_out(task: _Task, place: RankInfo, diary: ProgressLog, hops: list[Callable[[], int | None]]) -> None:
    if isinstance(task, CheckTask):
        check_for_parent(task, place, diary)
        return
    rank = RankRecording(task, place, diary, reduce=reduce_file)
    hops.append(rank.hops)
    rank.run()


def _tell(error: BaseException, diary: ProgressLog) -> NoReturn:
    """Write down why this rank fails, and end."""
    try:
        sys.stderr.write(traceback_text(error))
        sys.stderr.flush()
        diary.error(error_kind(error), error_line(error))
    finally:
        # At once, without leaving the process group in good order: the peers may wait for ever.
        os._exit(3)


def _print_to(log: Path) -> None:
    """Send what this process prints, libraries included, to its log."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if descriptor > 2:
        os.close(descriptor)
    # Without streams of Python's own where this process was given none.
    sys.stdout = sys.stdout or open(1, "w", closefd=False)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)
