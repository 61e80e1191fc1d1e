"""Kernels by name: traces that can be checked by hand, and recorded ones against their kinds."""

from __future__ import annotations

from collections import defaultdict

import pytest

from ringprof.analysis.timeline.window import Focus
from ringprof.scale.pipeline import attribute
from ringprof.trace.columns import MEMCPY
from tests.analysis.build import FLASH, NCCL, Builder
from tests.analysis.test_real_runs import NVLINK, TWO_HOSTS
from tests.loaded import analysis
from tests.paths import DATA, TRACES


def builders() -> list[Builder]:
    """Build two ranks: computation overlaps 40 of a send's 80 ns, and the send 10 of a copy's 30 ns."""
    result = []
    for rank in range(2):
        b = Builder(rank=rank, world_size=2).run(FLASH, 0, 100, launched=1).run(FLASH, 200, 210 + rank, launched=2)
        b.run(NCCL, 60, 140, launched=3, stream=20).run("Memcpy DtoD", 130, 160, launched=4, category=MEMCPY)
        result.append(b)
    return result


def kernels_of(between_ns: tuple[int, int] | None = None) -> dict[str, tuple[int, int, int | None, int, int]]:
    kernels = attribute([b.trace() for b in builders()], focus=Focus(between_ns=between_ns)).kernels
    return {
        kernel.kind: (kernel.calls, kernel.time_ns, kernel.exposed_ns, kernel.worst_rank, kernel.worst_ns)
        for kernel in kernels
    }


def test_kernel_table_has_times_calls_and_exposed_time() -> None:
    assert kernels_of() == {
        "flash_fwd": (4, 221, None, 1, 111),
        "send_recv": (2, 160, 80, 0, 80),
        "memcpy": (2, 60, 40, 0, 30),
    }


def test_kernel_table_is_clipped_to_the_window() -> None:
    """Check the window 80 to 135 ns, with 20 ns of computation, 55 of the send and 5 of the copy."""
    assert kernels_of((80, 135)) == {
        "flash_fwd": (2, 40, None, 0, 20),
        "send_recv": (2, 110, 70, 0, 55),
        "memcpy": (2, 10, 0, 0, 5),
    }


@pytest.mark.parametrize(
    ("folder", "between"),
    [
        (DATA / NVLINK, None),
        (DATA / NVLINK, "10ms,20ms"),
        (DATA / TWO_HOSTS, None),
        (TRACES / "h200x4-zigzag-65536-copied", "10ms,20ms"),
    ],
)
def test_kernels_sum_to_their_kinds(folder, between) -> None:
    run = analysis(folder, between=between)
    kinds: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for rank in run.attribution.ranks:
        for kind, kind_time in rank.breakdown.kinds.items():
            kinds[kind][0] += kind_time.calls
            kinds[kind][1] += kind_time.time_ns
            kinds[kind][2] += kind_time.time_ns - kind_time.hidden_ns if kind_time.hidden_ns is not None else 0
    frame = run.kernels()
    assert frame["share"].sum() == pytest.approx(1.0) and (frame["time_ns"].diff()[1:] <= 0).all()
    for kind, (calls, time, exposed) in kinds.items():
        of_kind = frame[frame["kind"] == kind]
        assert (of_kind["calls"].sum(), of_kind["time_ns"].sum()) == (calls, time)
        if kind in ("send_recv", "copy_engine"):
            assert of_kind["exposed_ns"].sum() == exposed


def test_unclassified_kernels_are_named_longest_first() -> None:
    b = Builder(world_size=1)
    for number in range(7):
        b.run(f"unheard_of_{number}", 100 * number, 100 * number + 10 + number, launched=number)
    attribution = attribute([b.trace()])
    assert [kernel.name for kernel in attribution.largest_of_other] == [
        f"unheard_of_{number}" for number in (6, 5, 4, 3, 2)
    ]
