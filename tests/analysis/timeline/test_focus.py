"""Choice of the analysed part of a trace: ranges by name, profiler steps, and times."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from ringprof.analysis.timeline.window import Focus, parse_between
from ringprof.errors import UsageError
from ringprof.scale.pipeline import attribute
from tests.analysis.build import FLASH, NCCL, Builder, collective
from tests.analysis.sweep import sweep


def steps():
    """Build three profiler steps of 300, 100 and 200 ns, two of them with a marked layer inside."""
    b = Builder(world_size=1)
    for number, length in enumerate((300, 100, 200)):
        start = 1000 * number
        b.mark(f"ProfilerStep#{number + 4}", start, start + 900)
        b.run(FLASH, start + 50, start + 50 + length, launched=start + 10)
        if number < 2:
            b.mark(f"layer {number}", start + 500, start + 600).run(
                FLASH, start + 700, start + 720, launched=start + 550
            )
    return b


def walls(builder, **focus):
    (rank,) = attribute([builder.trace()], focus=Focus(**focus)).ranks
    return rank.window.source, [part.wall_ns for part in rank.iterations]


def test_a_range_is_chosen_by_its_name():
    assert walls(steps(), window="layer 1") == ("range", [20])


def test_window_selects_a_single_profiler_step():
    assert walls(steps(), window="ProfilerStep#6") == ("profiler", [200])


def test_window_wildcard_selects_ranges_as_iterations():
    assert walls(steps(), window="layer ?") == ("range", [20, 20])
    assert walls(steps(), window="ProfilerStep#*") == ("profiler", [670, 670, 200])


def test_window_can_be_the_whole_trace():
    assert walls(steps(), window="trace") == ("trace", [2200])


def test_unknown_window_error_lists_the_ranges():
    with pytest.raises(UsageError, match=r"rank0.json has no such range; it has 'ProfilerStep#4', 'layer 0'"):
        walls(steps(), window="layer 7")


@pytest.mark.parametrize(
    ("producer", "words"),
    [
        ("torch", r"step\(\) of torch.profiler"),
        ("nsys", "an NVTX range around each"),
        ("unknown", r"step\(\) of torch.profiler"),
    ],
)
def test_a_trace_without_ranges_is_told_how_to_mark_steps(producer, words):
    trace = replace(Builder(world_size=1).run(FLASH, 50, 60, launched=10).trace(), producer=producer)
    with pytest.raises(UsageError, match=rf"no such range; it has none \(to mark steps: {words}"):
        attribute([trace], focus=Focus(window="step"))


def test_a_range_around_nothing_is_refused():
    with pytest.raises(UsageError, match="nothing was launched in that range"):
        walls(steps().mark("evaluation", 5000, 6000), window="evaluation")


def test_the_median_iteration_is_that_of_the_slowest_rank():
    builders = []
    for rank, lengths in enumerate([(100, 500, 300), (200, 100, 350)]):
        b = Builder(rank=rank, world_size=2)
        for number, length in enumerate(lengths):
            start = 1000 * number
            b.mark("ringprof::iteration", start, start + 900).run(
                FLASH, start + 20, start + 20 + length, launched=start + 10
            )
        builders.append(b.trace())
    # The slowest ranks take 200, 500 and 350.
    assert attribute(builders).median_iteration == 2
    assert attribute(builders, focus=Focus(window="trace")).median_iteration is None


@pytest.mark.parametrize(
    ("text", "times"),
    [
        ("10ms,20ms", (10_000_000, 20_000_000)),
        ("0ns, 1.5us", (0, 1500)),
        ("0.1s,2s", (100_000_000, 2_000_000_000)),
        ("1µs,0.000007s", (1000, 7000)),
    ],
)
def test_times_have_units(text, times):
    assert parse_between(text) == times


@pytest.mark.parametrize("text", ["10,20", "10ms", "10ms,20ms,30ms", "ms,1ms", "-1ms,2ms", "1e3ms,2s", ""])
def test_times_without_units_are_refused(text):
    with pytest.raises(UsageError, match="write two times with units"):
        parse_between(text)


def test_times_must_be_in_order():
    with pytest.raises(UsageError, match="the second time must be after the first"):
        parse_between("20ms,10ms")


def test_activities_are_clipped_to_the_chosen_times():
    b = Builder(world_size=1).run(FLASH, 1000, 2000, launched=1).run(NCCL, 1500, 3000, launched=2)
    (rank,) = attribute([b.trace()], focus=Focus(between_ns=(200, 1300))).ranks
    figures = rank.breakdown
    assert (figures.start_ns, figures.end_ns) == (1200, 2300)
    assert (figures.compute_ns, figures.overlapped_ns, figures.exposed_comm_ns) == (800, 500, 300)
    assert figures.kinds["flash_fwd"].time_ns == 800


def test_parts_between_times_equal_a_sweep_and_sum_to_the_whole():
    random = np.random.default_rng(0)
    b, events = Builder(world_size=1), []
    for number in range(200):
        start = int(random.integers(0, 10_000))
        end, is_comm = start + int(random.integers(1, 300)), bool(random.integers(0, 2))
        events.append((start, end, "comm" if is_comm else "compute"))
        own = collective("allreduce") if is_comm else None
        b.run(NCCL if is_comm else FLASH, start, end, launched=number, own=own)
    trace, first = b.trace(), min(event[0] for event in events)
    halves = []
    for low, high in ((0, 4000), (4000, 20_000)):
        figures = attribute([trace], focus=Focus(between_ns=(low, high))).ranks[0].breakdown
        inside = [(max(s, first + low), min(e, first + high), kind) for s, e, kind in events]
        expected = sweep([event for event in inside if event[1] > event[0]])
        assert {name: getattr(figures, f"{name}_ns") for name in expected} == expected
        halves.append(figures)
    whole = attribute([trace]).ranks[0].breakdown
    assert sum(half.compute_ns for half in halves) == whole.compute_ns
    assert sum(half.exposed_comm_ns for half in halves) == whole.exposed_comm_ns


def test_hops_that_begin_between_the_times_are_matched_and_whole():
    builders = [Builder(rank=rank, world_size=2) for rank in range(2)]
    for rank, b in enumerate(builders):
        pair: dict[str, Any] = {"to": 1 - rank, "source": 1 - rank, "group_ranks": (0, 1), "group_size": 2}
        # Rank 1 ends its first hop before the time at which both are cut, rank 0 after it.
        b.batch(100, 1000, 2000 - 100 * rank, **pair).batch(200, 5000, 6000, **pair)
    attribution = attribute([b.trace() for b in builders], focus=Focus(between_ns=(950, 4500)))
    assert [[(hop.number, hop.wire_ns) for hop in rank.hops] for rank in attribution.ranks] == [[(0, 1000)]] * 2
    assert attribution.warnings == ()


def test_times_without_activity_are_refused():
    b = Builder(world_size=1).run(FLASH, 1000, 2000, launched=1)
    with pytest.raises(UsageError, match="--between: nothing ran"):
        attribute([b.trace()], focus=Focus(between_ns=(5000, 6000)))
