"""Names of ranges in a trace, by which reports find ring steps, sends and waits."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext

import pytest
from torch.autograd.profiler import profile

from ringprof.strategies.annotate import annotate, redirect_annotations, ring_step
from ringprof.workload.mask import Mask
from tests.strategies.cases import Case, WorkloadShard, over_the_ranks
from tests.strategies.ranks import run_ranks

WORLD = 4
NAME = re.compile(r"ringprof::(?:(?:fwd|bwd)/step=\d/(?:block|merge)|(?:send|wait|wait-for-all)/[a-z_]+|wait)")
"""Names of ranges. A ring of one rank waits for nobody, and has no channel name."""


def names(rank: int, cases: list[Case]) -> list[set[str]]:
    names_by_case = []
    for case in cases:
        with profile() as events:
            over_the_ranks(case, WorkloadShard(seq=32))
        names_by_case.append({event.name for event in events.function_events if event.name.startswith("ringprof::")})
    return names_by_case


@pytest.mark.processes
def test_profiler_ranges_of_blocks_merges_sends_and_waits() -> None:
    cases = [Case(name) for name in ("ring", "zigzag", "stripe", "ulysses", "usp", "double-ring", "burst", "megatron")]
    cases += [Case("allgather"), Case("double-ring", {"ring_window": 2})]
    names_by_case = run_ranks(WORLD, names, cases)[WORLD - 1]
    for case, ranges in zip(cases, names_by_case, strict=True):
        assert all(map(NAME.fullmatch, ranges)), (case, sorted(ranges))
        assert {name.partition("/")[0] for name in ranges} >= {
            f"ringprof::{what}" for what in ("fwd", "bwd", "send", "wait")
        }
    # The last rank sees all keys of a causal mask: a block and a merge each step.
    steps = {f"ringprof::fwd/step={step}/{part}" for step in range(WORLD) for part in ("block", "merge")}
    assert {name for name in names_by_case[0] if "fwd/" in name} == steps


def masked_names(rank: int, cases: list[Case], mask: Mask) -> list[set[str]]:
    """Return the names by `redirect_annotations`, which sees all of them without a profiler."""
    names_by_case = []
    for case in cases:
        steps: set[str] = set()

        def listen(name: str, steps: set[str] = steps) -> AbstractContextManager[None]:
            steps.add(name)
            return nullcontext()

        with redirect_annotations(listen):
            over_the_ranks(case, WorkloadShard(seq=64), mask)
        names_by_case.append(steps)
    return names_by_case


HEARD = re.compile(r"(?:fwd|bwd)/step=\d/(?:block|merge)|send|wait|wait-for-all")


@pytest.mark.processes
def test_profiler_ranges_are_equal_with_row_routing() -> None:
    """With a window of 6 over chunks of 8, only some rows travel, also in two inner rings."""
    cases = [
        Case(name) for name in ("ring", "zigzag", "stripe", "usp", "double-ring", "burst", "megatron", "allgather")
    ]
    cases += [Case(name, {"ring_window": 2}) for name in ("double-ring", "burst")]
    for by_rank in run_ranks(WORLD, masked_names, cases, Mask.of(window=(5, 0))):
        for case, heard in zip(cases, by_rank, strict=True):
            assert all(map(HEARD.fullmatch, heard)), (case, sorted(heard))
            parts = {name.partition("/")[0] for name in heard}
            assert parts - {"wait-for-all"} == {"fwd", "bwd", "send", "wait"}, case


def test_redirected_annotations_work_without_a_profiler() -> None:
    heard: list[str] = []

    def listen(name: str) -> AbstractContextManager[None]:
        heard.append(name)
        return nullcontext()

    with redirect_annotations(listen), ring_step("fwd", 2, "block"), annotate("send", "kv"):
        pass
    with ring_step("fwd", 3, "block"), annotate("wait", "kv"):
        pass
    assert heard == ["fwd/step=2/block", "send"]
