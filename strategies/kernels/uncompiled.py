"""Decorator for functions that torch.compile does not trace: the graph breaks before and after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])
_REASON = "strategies of ringprof talk to other ranks, which no graph of one rank can hold"


def uncompiled(function: _F) -> _F:
    """Exclude a function from torch.compile, like `torch.compiler.disable`, but without importing the compiler.

    `torch.compiler.disable` imports torch's compiler, which takes seconds, even in programs that never compile. It also
    adds a cost to every call. If torch has the internal hooks, this decorator sets the same marks directly.
    """
    frames: Any = torch._C._dynamo.eval_frame
    if not hasattr(frames, "set_code_exec_strategy"):
        disabled: _F = torch.compiler.disable(function, reason=_REASON)  # type: ignore[no-untyped-call]
        return disabled
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable, function._torchdynamo_disable_msg = True, _REASON  # type: ignore[attr-defined]
    return function
