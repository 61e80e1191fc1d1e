"""Breakdown: its parts sum to the wall and equal those of a sweep over all edges."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ringprof.analysis.kinds.classify import classify
from ringprof.analysis.timeline.breakdown import break_down
from ringprof.analysis.timeline.rows import timed_activities
from ringprof.trace.columns import MEMCPY
from tests.analysis.build import FLASH, NCCL, Builder
from tests.analysis.sweep import sweep

KERNELS = {
    "compute": (FLASH, 0),
    "comm": (NCCL, 0),
    "memory": ("Memcpy DtoD (Device -> Device)", MEMCPY),
}
EVENT = st.tuples(st.integers(0, 60), st.integers(0, 20), st.sampled_from(sorted(KERNELS)))


def breakdown_of(builder):
    classified = classify(builder.trace())
    return break_down(timed_activities(classified, np.arange(len(classified.kind)), device=None, between_ns=None))


@given(st.lists(EVENT, min_size=1, max_size=20))
def test_every_figure_equals_the_sweep(events):
    b = Builder()
    for start, length, name in events:
        b.run(KERNELS[name][0], start, start + length, category=KERNELS[name][1])
    result = breakdown_of(b)
    expected = sweep((start, start + length, name) for start, length, name in events)
    assert {name: getattr(result, f"{name}_ns") for name in expected} == expected
    parts = result.compute_ns + result.exposed_comm_ns + result.exposed_memory_ns + result.idle_ns
    assert parts == result.wall_ns


def test_kinds_sum_durations_and_count_calls():
    b = Builder().run(FLASH, 0, 10).run(FLASH, 5, 15, stream=8).run(NCCL, 10, 30, stream=20)
    result = breakdown_of(b)
    assert (result.kinds["flash_fwd"].time_ns, result.kinds["flash_fwd"].calls) == (20, 2)
    assert result.kinds["flash_fwd"].busy_ns == 15
    assert result.flash_ns == 15
    assert result.kinds["send_recv"].hidden_ns == 5
    assert result.kinds["flash_fwd"].hidden_ns is None


def test_without_communication_there_is_no_overlap_ratio():
    result = breakdown_of(Builder().run(FLASH, 0, 10))
    assert result.overlap_ratio is None
    assert result.exposed_comm_share == 0.0


def test_peer_copies_are_communication():
    b = Builder().run(FLASH, 0, 10).run("Memcpy PtoP (Device -> Device)", 5, 20, category=MEMCPY)
    result = breakdown_of(b)
    assert (result.comm_ns, result.exposed_comm_ns, result.exposed_memory_ns) == (15, 10, 0)
    assert result.overlap_ratio == 1 / 3
