"""Names in the trace for the phases of a strategy, free of cost while no profiler runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_NOTHING: AbstractContextManager[object] = nullcontext()


def annotate(name: str) -> AbstractContextManager[object]:
    """A range ``ringprof::<name>`` in the trace."""
    if not torch._C._autograd._profiler_enabled():
        return _NOTHING
    return torch.profiler.record_function(f"ringprof::{name}")


def ring_step(phase: str, step: int, part: str) -> AbstractContextManager[object]:
    """A part (``block``, ``send``, ``merge``) of one ring step; ``phase`` is ``fwd`` or ``bwd``."""
    return annotate(f"{phase}/step={step}/{part}")
