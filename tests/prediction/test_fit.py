"""Blocks of recorded runs as samples of a machine."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

pytest.importorskip("torch", reason="a dry run runs strategies on shapes")

from ringprof.prediction.calibration import read_calibration
from ringprof.prediction.fit import Observed, calibrate_from, observed_run
from tests.paths import TRACES


def with_times(observed: Observed, median_ns: float) -> Observed:
    """Return the run with timed iterations that all take ``median_ns``."""
    assert observed.run.timings is not None
    times = [[round(median_ns)] * len(rank) for rank in observed.run.timings.iterations_ns]
    return replace(
        observed, run=msgspec.structs.replace(
            observed.run, timings=msgspec.structs.replace(observed.run.timings, iterations_ns=times)
        ),
    )  # fmt: skip


def test_blocks_of_a_profiled_iteration_that_was_faster_than_the_timed_ones_count_as_in_these() -> None:
    """A device at its power limit cools while the profiler starts. Differences below 3 % do not count."""
    machine = read_calibration("h200")
    observed = observed_run(str(TRACES / "h200x4-zigzag-262144"), machine)
    profiled_ns = max(rank.wall_ns for rank in observed.ranks)
    idle = replace(observed, ranks=[replace(rank, wall_ns=2 * rank.wall_ns) for rank in observed.ranks])

    def times(run: Observed, timed: float) -> list[float]:
        samples = calibrate_from([with_times(run, timed)], machine).kernel("cudnn").samples
        return [sample.ns for sample in samples if sample.source == run.run.name]

    as_profiled = times(observed, profiled_ns)
    assert times(observed, 1.02 * profiled_ns) == times(observed, 0.8 * profiled_ns) == as_profiled
    assert times(observed, 1.08 * profiled_ns) == pytest.approx([1.08 * ns for ns in as_profiled], rel=1e-3)
    # Where blocks are half of the time, something else may have been slower.
    assert times(idle, 1.08 * 2 * profiled_ns) == as_profiled
