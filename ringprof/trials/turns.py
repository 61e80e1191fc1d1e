"""Trials: recordings of several choices on the devices of this node, in turns, until a rule ends them.

A sweep records every choice once; a tuning goes on until one is faster. Both record with `record_request` in
`take_turns`, and write their outcome with `save` as they go, so that an interruption loses one recording at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from ringprof.common.files import write_atomically
from ringprof.errors import Interrupted, OutOfMemory, RecordError, UnsupportedWorkloadError, UsageError
from ringprof.ranks.launcher import launcher_rank
from ringprof.ranks.progress import Reporter
from ringprof.recording import RecordRequest, record
from ringprof.run import Run

_Trial = TypeVar("_Trial")
Status = Literal["ok", "oom", "unfit", "failed"]


def refuse_launcher() -> None:
    """Raise `UsageError` under torchrun, srun or mpirun: trials start their own ranks."""
    if launcher_rank() is not None:
        raise UsageError("bench starts its own ranks: run it without torchrun or srun, on one node")


def take_turns(trials: Sequence[_Trial], ended: Callable[[int], bool]) -> Iterator[tuple[int, _Trial]]:
    """Yield every trial in turn with the number of its round, from 1, until ``ended`` returns true after a round."""
    for number in count(1):
        for trial in trials:
            yield number, trial
        if ended(number):
            return


def record_request(request: RecordRequest, reporter: Reporter) -> tuple[Run | None, Status, str | None]:
    """Record a request, and return its run, its status and the reason if it failed.

    Raises `Interrupted`, and errors of which every further recording would fail, too.
    """
    try:
        run = record(request, reporter)
    except Interrupted:
        raise
    except UnsupportedWorkloadError as error:
        return None, "unfit", str(error)
    except RecordError as error:
        # The message may hold a path that is not UTF-8, which JSON cannot hold.
        reason = str(error).encode(errors="backslashreplace").decode()
        return None, "oom" if isinstance(error, OutOfMemory) else "failed", reason
    assert run is not None, "no launcher started this process"
    return run, "ok", None


def save(path: Path, outcome: Any) -> None:
    """Write the outcome so far as JSON."""
    write_atomically(path, msgspec.json.format(msgspec.json.encode(outcome), indent=1) + b"\n")
