"""Main function of one rank of a recording or of a check, which ringprof starts through `ringprof.entry_points.spawn`.

Its arguments are TASK, the path of the task's JSON, and PARENT, the id of the process with which the rank ends.
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
    """Run one rank and end the process: with 0, or with 3 and the reason in the rank's progress log."""
    parent = int(arguments[1])
    if os.getppid() != parent:
        os._exit(3)  # the parent was killed in the meantime, and its task with it
    task = from_json(Path(arguments[0]).read_bytes(), _TASKS[what])
    rank = launcher_rank()
    assert rank is not None and task.scratch is not None, "started by ringprof, with the ranks' variables"
    scratch = Path(task.scratch)
    _redirect_output(log_path(scratch, rank.rank))
    progress = ProgressLog(progress_log_path(scratch, rank.rank))
    hops: list[Callable[[], int | None]] = []

    def at_end(reason: str, code: int) -> None:
        progress.log_stop(hops[0]() if hops else None)
        if reason == PARENT_GONE and rank.rank == 0:
            if isinstance(task, RecordTask):
                discard(Path(task.staging))
            shutil.rmtree(scratch, ignore_errors=True)
        # The log then shows where the rank hangs.
        faulthandler.dump_traceback()

    watchdog = Watchdog(at_end, parent=parent)
    watchdog.start()
    try:
        _run_task(task, rank, progress, hops)
        progress.done()
    except BaseException as error:
        _exit_with_error(error, progress)
    sys.stdout.flush()
    sys.stderr.flush()
    # Exit without finalising Python: native threads left by torch sometimes abort an interpreter that shuts down.
    os._exit(0)


def _run_task(task: _Task, rank: RankInfo, progress: ProgressLog, hops: list[Callable[[], int | None]]) -> None:
    """Run a check or a recording; a recording appends its hop counter to ``hops``."""
    if isinstance(task, CheckTask):
        check_for_parent(task, rank, progress)
        return
    recording = RankRecording(task, rank, progress, reduce=reduce_file)
    hops.append(recording.hops)
    recording.run()


def _exit_with_error(error: BaseException, progress: ProgressLog) -> NoReturn:
    """Write the error of this rank to its log and its progress log, and end the process."""
    try:
        sys.stderr.write(traceback_text(error))
        sys.stderr.flush()
        progress.error(error_kind(error), error_line(error))
    finally:
        # Exit without destroying the process group, which could wait for the peers for ever.
        os._exit(3)


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
