"""Number of iterations in a window, and the unit that its times stand for after division by that number."""

from __future__ import annotations

from collections.abc import Sequence

from ringprof.analysis.rank import Rank
from ringprof.run import Run
from ringprof.trace.columns import Notice
from ringprof.workload_checks import counted_over_needed, workload_fits


def window_iterations(ranks: Sequence[Rank], run: Run | None) -> int | None:
    """Count the iterations in the window; None where they are not known, and for a part of an iteration.

    In a block that `capture` recorded, iterations are the training steps that all traces show. Where the traces show
    none, they are the steps that the workload states.
    """
    sources = {rank.window_source for rank in ranks}
    if any(rank.partial_window for rank in ranks) or len(sources) > 1:
        return None
    counted = _counted_steps(ranks)
    if run is None or "ringprof" not in sources:
        return counted
    if not run.captured:
        marked = {len(rank.iteration_ns) for rank in ranks}
        return marked.pop() if len(marked) == 1 else None
    stated = run.workload.steps if run.workload is not None and workload_fits(run) else None
    if counted is None or stated is None:
        return counted or stated
    # Several optimizers may step in one iteration: the counted FLOPs then confirm the stated number.
    return min(counted, stated) if counted_over_needed(run) is not None else counted


def steps_warning(ranks: Sequence[Rank], run: Run | None) -> list[Notice]:
    """Warn where a captured block has more steps than its workload states, and no counted FLOPs check that."""
    if run is None or run.workload is None or not run.captured or counted_over_needed(run) is not None:
        return []
    counted, stated = _counted_steps(ranks), run.workload.steps
    if counted is None or counted <= stated:
        return []
    message = (
        f"the workload states {stated} step{'s' if stated > 1 else ''}, the captured block has {counted} optimizer "
        f"steps: unless several of them share an iteration, state Workload(steps={counted}), or TFLOP/s are too low"
    )
    return [Notice("workload_steps_differ", message)]


def times_are_of(ranks: Sequence[Rank], run: Run | None) -> str:
    """Name the unit that the window's times stand for after division: ``one iteration``, ``the captured block`` ..."""
    sources, count = {rank.window_source for rank in ranks}, window_iterations(ranks, run)
    recorded_here = "ringprof" in sources
    if count is not None:
        captured = recorded_here and (run is None or run.captured) and count > 1
        return f"one iteration ({count} captured)" if captured else "one iteration"
    if any(rank.partial_window for rank in ranks):
        return "one chosen range" if max(len(rank.iteration_ns) for rank in ranks) > 1 else "the chosen window"
    if sources == {"trace"}:
        return "the whole trace"
    if not recorded_here or len(sources) > 1:
        return "each rank's window"
    return "the captured block" if run is not None else "one ringprof::iteration range"


def _counted_steps(ranks: Sequence[Rank]) -> int | None:
    """Return the training steps that all traces show; None where they differ or none is shown."""
    counts = {rank.steps for rank in ranks}
    return counts.pop() if len(counts) == 1 else None
