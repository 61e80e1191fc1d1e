"""Check of ``ringprof check module:function``, on ranks that ringprof starts and on those of torchrun and srun."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from ringprof.common.json_object import from_json, to_json
from ringprof.errors import UsageError
from ringprof.proof.result import Check, CheckRequest, ModelCheck
from ringprof.ranks.launcher import RankInfo, this_rank
from ringprof.ranks.progress import PositionReporter, Reporter, SilentReporter

START_S = 120.0
"""Time limit of everything before the first call: imports and the process group."""
JUDGE_S = 1800.0
"""Time limit for computing the dense reference of one call and comparing with it."""
_GRACE_S = 5.0
"""Extra time in which a rank can report by itself that another rank has not returned."""


class CheckTask(msgspec.Struct, frozen=True, kw_only=True):
    """A check with every default resolved, for ranks that ringprof starts."""

    job: ClassVar[str] = "check"
    request: CheckRequest

    def limit_of(self, phase: str | None) -> float | None:
        """Return the time limit of a phase in seconds; None stands for the start, before the first phase."""
        if phase is None:
            return START_S
        return (0 if phase.startswith("call ") else JUDGE_S) + self.request.time_limit + _GRACE_S

    def run(self, rank_info: RankInfo, position: PositionReporter, scratch: Path) -> None:
        """Run the check as one rank; rank 0 writes the result to the scratch folder, where the parent reads it."""
        check = _check_as_rank(self.request, rank_info, position)
        if rank_info.rank == 0:
            (scratch / "check.json").write_bytes(to_json(check))

    def result(self, scratch: Path) -> Check | ModelCheck:
        """Read the result that rank 0 has written."""
        kind: type[Check | ModelCheck] = ModelCheck if self.request.of_model else Check
        return from_json((scratch / "check.json").read_bytes(), kind)

    def discard(self) -> None:
        """Remove nothing: a check writes only to the scratch folder."""


def run_check(request: CheckRequest) -> Check | ModelCheck:
    """Check on ranks that this process starts, or as one rank if torchrun or srun started this process.

    Only the ranks import the module of the function. Raises `UsageError`, and `RecordError` if a rank fails.
    """
    rank_info = this_rank()

    def prepare() -> CheckTask:
        from ringprof.iteration.resolve import resolve_device, resolve_world_size

        device = resolve_device(request.device)
        world = resolve_world_size(request.world, device, rank_info)
        _split(request.target)
        return CheckTask(request=msgspec.structs.replace(request, device=device, world=world))

    if rank_info is not None:
        return _check_as_rank(prepare().request, rank_info, SilentReporter())
    from ringprof.ranks.launch import run_local_ranks

    return run_local_ranks(prepare, SilentReporter())


def _check_as_rank(request: CheckRequest, rank_info: RankInfo, reporter: Reporter) -> Check | ModelCheck:
    """Create the process group and run the check as one of its ranks.

    Raises `UsageError` where the function for a check of a model returns something else than its arguments.
    """
    from ringprof.proof.model import check_model_on_ranks
    from ringprof.proof.on_ranks import check_on_ranks
    from ringprof.ranks.process_group import world_group

    function = load_function(request.target)
    with world_group(rank_info, request.device, request.time_limit + JUDGE_S):
        if not request.of_model:
            return check_on_ranks(function, request, reporter=reporter)
        returned = function()
        if not isinstance(returned, tuple) or len(returned) not in (3, 4):
            raise UsageError(
                f"{request.target} must return the parallel step, the reference and the batch, and if needed a dict of"
                f" other arguments of ringprof.check_model, not {type(returned).__name__}"
            )
        options = dict(returned[3]) if len(returned) == 4 else {}
        return check_model_on_ranks(*returned[:3], time_limit=request.time_limit, reporter=reporter, **options)


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
