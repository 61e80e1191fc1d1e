"""Time of the analysis of one rank grows with the size of its trace, whichever of its dimensions grows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ringprof.scale.pipeline import attribute
from ringprof.trace.columns import MEMCPY, Trace
from tests.analysis.build import FLASH, NCCL, Builder, collective
from tests.growth import PART, assert_linear

SMALL = 1000


def iterations(count: int) -> Builder:
    """Build marked iterations, each with a kernel, one that names no launch, and a step of the optimizer."""
    b = Builder(world_size=2)
    for i in range(count):
        begin = 1000 * i
        b.mark("ringprof::iteration", begin, begin + 900).mark(f"ProfilerStep#{i}", begin + 1, begin + 890)
        b.mark("Optimizer.step#SGD.step", begin + 600, begin + 650).operate("aten::mm", begin + 300, begin + 310)
        b.run(FLASH, begin + 100, begin + 200, launched=begin + 50)
        b.run(NCCL, begin + 220, begin + 300, correlation=0, stream=20)
    return b


def optimizer_steps(count: int) -> Builder:
    b = Builder(world_size=1).mark("ringprof::iteration", 0, 1000 * count)
    for i in range(count):
        b.run(FLASH, 1000 * i + 20, 1000 * i + 90, launched=1000 * i + 10)
        b.mark("Optimizer.step#SGD.step", 1000 * i + 100, 1000 * i + 150)
    return b


def device_ranges(count: int) -> Builder:
    """Build iterations whose kernels have no launch record, and are inside by the ranges of the device."""
    b = Builder(world_size=1)
    for i in range(count):
        b.mark(f"ProfilerStep#{i}", 1000 * i, 1000 * i + 900).mark_device(f"ProfilerStep#{i}", 1000 * i, 1000 * i + 950)
        b.run(FLASH, 1000 * i + 20, 1000 * i + 90)
    return b


def bare_hops(count: int) -> Builder:
    """Build hops without launch records on 500 streams."""
    b = Builder(world_size=2)
    for i in range(4 * count):
        b.run(NCCL, 100 * i, 100 * i + 80, stream=20 + i % 500).run(FLASH, 100 * i, 100 * i + 90)
    return b


def streams(count: int) -> Builder:
    b = Builder(world_size=1)
    for i in range(count):
        b.run(FLASH, 100 * i, 100 * i + 150, launched=100 * i - 10, stream=i)
    return b


def groups(count: int) -> Builder:
    b = Builder(world_size=2)
    for i in range(count):
        what = collective("allreduce", group=f"g{i}", group_ranks=(0, 1), group_size=2)
        b.record(100 * i, 100 * i + 20, what).run("ncclDevKernel_AllReduce_Sum", 100 * i + 50, 100 * i + 90,
                                                   launched=100 * i + 10, own=what, stream=20)  # fmt: skip
    return b


def nested_ranges(count: int) -> Builder:
    b = Builder(world_size=1).run(FLASH, 10, 90, launched=5)
    for i in range(count):
        b.mark(f"range {i}", i, 10 * count - i)
    return b


def overlapping_ranges(count: int) -> Builder:
    b = Builder(world_size=1)
    for i in range(count):
        b.mark("range", 10 * i, 10 * (i + count)).run(FLASH, 10 * i, 10 * i + 9, launched=10 * i)
    return b


def names(count: int) -> Builder:
    b = Builder(world_size=1)
    for i in range(count):
        b.run(f"kernel_{i}", 100 * i, 100 * i + 90, launched=100 * i - 10)
    return b


def copies(count: int) -> Builder:
    b = Builder(world_size=2).mark("ringprof::iteration", 0, 400 * count)
    for i in range(4 * count):
        b.mark("ringprof::send/kv/to=1", 100 * i, 100 * i + 20)
        b.run("Memcpy PtoP (Device -> Device)", 100 * i + 30, 100 * i + 80, launched=100 * i + 5, category=MEMCPY,
              size=1000, stream=20, target=1)  # fmt: skip
        b.run(FLASH, 100 * i + 20, 100 * i + 99, launched=100 * i + 6)
    return b


def gaps(count: int) -> Builder:
    """Build gaps of the device, in each of which the host runs something."""
    b = Builder(world_size=1)
    for i in range(count):
        b.run(FLASH, 20_000 * i, 20_000 * i + 900, launched=20_000 * i - 10)
        b.on_host("aten::item", 20_000 * i + 950, 20_000 * i + 18_000)
    return b


DIMENSIONS = (
    iterations, optimizer_steps, device_ranges, bare_hops, streams, groups, nested_ranges, overlapping_ranges, names,
    copies, gaps,
)  # fmt: skip


@pytest.mark.parametrize("dimension", DIMENSIONS, ids=lambda function: function.__name__)
def test_time_grows_with_the_size(dimension: Callable[[int], Builder]) -> None:
    def work(trace: Trace) -> object:
        return attribute([trace], None)

    assert_linear(work, dimension(PART * SMALL).trace(), dimension(SMALL).trace())
