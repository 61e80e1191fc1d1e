"""``ringprof check module:function``: ranks of our own, or one rank of torchrun's or srun's."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from ringprof.errors import UsageError
from ringprof.record.check.result import Check, CheckRequest
from ringprof.record.launcher import RankInfo, launcher_rank
from ringprof.record.progress import Reporter, SilentReporter
from ringprof.record.request import from_json, require_packages, to_json
from ringprof.scratch import scratch_folder

START_S = 120.0
"""For what comes before the first call: imports, the process group."""
JUDGE_S = 1800.0
"""For the dense reference of a call."""
_GRACE_S = 5.0
"""What a rank gets to say itself that another does not come back."""


class CheckTask(msgspec.Struct, frozen=True, kw_only=True):
    """A check with every choice made, for ranks that ringprof starts."""

    request: CheckRequest
    scratch: str

    def limit_of(self, phase: str | None) -> float | None:
        """Each phase has its own."""
        if phase is None:
            return START_S
        return (0 if phase.startswith("call ") else JUDGE_S) + self.request.time_limit + _GRACE_S


def check_here(request: CheckRequest) -> Check:
    """Check ``request.target`` on ranks started here, or as one rank where torchrun or srun started this process.

    The module is imported by the ranks alone. Raises `UsageError`, and `RecordError` where a rank fails or hangs.
    """
    require_packages("torch", "psutil")
    from ringprof.record.local_launcher import launch
    from ringprof.record.resolve import resolve_device, resolve_world_size

    place = launcher_rank()
    device = resolve_device(request.device)
    request = msgspec.structs.replace(request, device=device, world=resolve_world_size(request.world, device, place))
    _split(request.target)
    if place is not None:
        return check_as_rank(request, place, SilentReporter())
    scratch = scratch_folder("ranks")
    task = CheckTask(request=request, scratch=str(scratch))
    return launch(task, SilentReporter(), "check", lambda: from_json(_result(scratch).read_bytes(), Check))


def check_as_rank(request: CheckRequest, place: RankInfo, reporter: Reporter) -> Check:
    """This rank's part, in a process group of its own making."""
    from ringprof.record.check.on_ranks import check_on_ranks
    from ringprof.record.process_group import world_group

    attention = load_function(request.target)
    with world_group(place, request.device, request.time_limit + JUDGE_S):
        return check_on_ranks(attention, request, reporter=reporter)


def check_for_parent(task: CheckTask, place: RankInfo, reporter: Reporter) -> None:
    """The same, with rank 0's answer left for the parent."""
    found = check_as_rank(task.request, place, reporter)
    if place.rank == 0:
        _result(Path(task.scratch)).write_bytes(to_json(found))


def load_function(target: str) -> Any:
    """``module:function`` by name, also of a module in the current folder; its code runs. Raises `UsageError`."""
    module, name = _split(target)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise UsageError(f"{target!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise UsageError(f"{target!r} is not a function of q, k and v")
    return found


def _split(target: str) -> tuple[str, str]:
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise UsageError(f"{target!r} is not module:function, such as mypackage.attention:ring_attention")
    return module, name


def _result(scratch: Path) -> Path:
    return scratch / "check.json"
