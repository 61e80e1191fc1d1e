"""Names in the trace for the phases of a strategy, at no cost while no profiler runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_NOTHING: AbstractContextManager[object] = nullcontext()
_Listener = Callable[[str], AbstractContextManager[object]]
_listener: _Listener | None = None
_profiler_enabled = torch._C._autograd._profiler_enabled


def annotate(name: str, channel: str = "") -> AbstractContextManager[object]:
    """Return a context manager: a range ``ringprof::<name>`` or ``ringprof::<name>/<channel>`` in the trace."""
    if _listener is not None:
        return _listener(name)
    if not _profiler_enabled():
        return _NOTHING
    return torch.profiler.record_function(f"ringprof::{name}/{channel}" if channel else f"ringprof::{name}")


def ring_step(phase: str, step: int, part: str) -> AbstractContextManager[object]:
    """Return a range for one part (``block``, ``send``, ``merge``) of a ring step; ``phase`` is ``fwd`` or ``bwd``."""
    if _listener is None and not _profiler_enabled():
        return _NOTHING
    return annotate(f"{phase}/step={step}/{part}")


@contextmanager
def redirect_annotations(listener: _Listener) -> Iterator[None]:
    """Send range names to ``listener`` instead of the profiler, for dry runs, which run a strategy on shapes."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before
