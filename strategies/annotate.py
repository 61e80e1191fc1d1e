"""Names in the trace for the phases of a strategy, free of cost while no profiler runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_NOTHING: AbstractContextManager[object] = nullcontext()
_profiler_enabled = torch._C._autograd._profiler_enabled


def annotate(name: str, channel: str = "") -> AbstractContextManager[object]:
    """A range ``ringprof::<name>`` or ``ringprof::<name>/<channel>`` in the trace."""
    if not _profiler_enabled():
        return _NOTHING
    return torch.profiler.record_function(f"ringprof::{name}/{channel}" if channel else f"ringprof::{name}")


def ring_step(phase: str, step: int, part: str) -> AbstractContextManager[object]:
    """A part (``block``, ``send``, ``merge``) of one ring step; ``phase`` is ``fwd`` or ``bwd``."""
    if not _profiler_enabled():
        return _NOTHING
    return annotate(f"{phase}/step={step}/{part}")
