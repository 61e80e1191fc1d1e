"""Entry points of ``ringprof check module:function``: start local ranks, or run as one rank of torchrun or srun."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from ringprof.common.scratch import scratch_folder
from ringprof.errors import UsageError
from ringprof.record.check.model_result import ModelCheck, ModelRequest
from ringprof.record.check.result import Check, CheckRequest
from ringprof.record.launcher import RankInfo, launcher_rank
from ringprof.record.progress import Reporter, SilentReporter
from ringprof.record.request import from_json, require_packages, to_json

START_S = 120.0
"""Time limit of everything before the first call: imports and the process group."""
JUDGE_S = 1800.0
"""Time limit for computing the dense reference of one call and comparing with it."""
_GRACE_S = 5.0
"""Extra time in which a rank can report by itself that another rank has not returned."""


class CheckTask(msgspec.Struct, frozen=True, kw_only=True):
    """A check with every default resolved, for ranks that ringprof starts."""

    request: CheckRequest | ModelRequest
    scratch: str
    """Folder in which rank 0 leaves the result."""

    def limit_of(self, phase: str | None) -> float | None:
        """Return the time limit of a phase in seconds; None stands for the start, before the first phase."""
        if phase is None:
            return START_S
        return (0 if phase.startswith("call ") else JUDGE_S) + self.request.time_limit + _GRACE_S


def check_here(request: CheckRequest | ModelRequest) -> Check | ModelCheck:
    """Check ``request.target`` on ranks started here, or as one rank where torchrun or srun started this process.

    Only the ranks import the module. Raises `UsageError`, and `RecordError` where a rank fails or hangs.
    """
    require_packages("torch", "psutil")
    from ringprof.record.local_launcher import launch
    from ringprof.record.resolve import resolve_device, resolve_world_size

    rank_place = launcher_rank()
    device = resolve_device(request.device)
    request = msgspec.structs.replace(
        request, device=device, world=resolve_world_size(request.world, device, rank_place)
    )
    _split(request.target)
    if rank_place is not None:
        return check_as_rank(request, rank_place, SilentReporter())
    scratch = scratch_folder("ranks")
    task = CheckTask(request=request, scratch=str(scratch))
    kind: type[Check | ModelCheck] = Check if isinstance(request, CheckRequest) else ModelCheck
    return launch(task, SilentReporter(), "check", lambda: from_json(_result(scratch).read_bytes(), kind))


def check_as_rank(request: CheckRequest | ModelRequest, rank_place: RankInfo, reporter: Reporter) -> Check | ModelCheck:
    """Create the process group and run the check as one of its ranks.

    Raises `UsageError` where the function for a check of a model returns something else than its arguments.
    """
    from ringprof.record.check.model import check_model_on_ranks
    from ringprof.record.check.on_ranks import check_on_ranks
    from ringprof.record.process_group import world_group

    function = load_function(request.target)
    with world_group(rank_place, request.device, request.time_limit + JUDGE_S):
        if isinstance(request, CheckRequest):
            return check_on_ranks(function, request, reporter=reporter)
        returned = function()
        if not isinstance(returned, tuple) or len(returned) not in (3, 4):
            raise UsageError(
                f"{request.target} must return the parallel step, the reference and the batch, and if needed a dict of"
                f" other arguments of ringprof.check_model, not {type(returned).__name__}"
            )
        options = dict(returned[3]) if len(returned) == 4 else {}
        return check_model_on_ranks(*returned[:3], time_limit=request.time_limit, reporter=reporter, **options)


def check_for_parent(task: CheckTask, rank_place: RankInfo, reporter: Reporter) -> None:
    """Run the check as one rank; rank 0 writes the result to the scratch folder, where the parent reads it."""
    check = check_as_rank(task.request, rank_place, reporter)
    if rank_place.rank == 0:
        _result(Path(task.scratch)).write_bytes(to_json(check))


def load_function(target: str) -> Any:
    """Import ``module:function``, also from the current folder, and return the function. Runs the module's code.

    Raises `UsageError` where the import fails or the object is not callable.
    """
    module_name, name = _split(target)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = import_module(module_name)
        for part in name.split("."):
            function = getattr(function, part)
    except Exception as error:
        raise UsageError(f"{target!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise UsageError(f"{target!r} is not a function")
    return function


def _split(target: str) -> tuple[str, str]:
    """Split ``module:function`` at the colon. Raises `UsageError`."""
    module_name, colon, function_name = target.partition(":")
    if not (module_name and colon and function_name):
        raise UsageError(f"{target!r} is not module:function, such as mypackage.attention:ring_attention")
    return module_name, function_name


def _result(folder: Path) -> Path:
    return folder / "check.json"
