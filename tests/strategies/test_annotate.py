"""The names that a trace shows for what a strategy does: reports tell ring steps, sends and waits by them."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext

from torch.autograd.profiler import profile

from ringprof.strategies.annotate import annotate, heard_by, ring_step
from tests.strategies.cases import Case, Problem, over_the_ranks
from tests.strategies.ranks import run_ranks

WORLD = 4
NAME = re.compile(r"ringprof::(?:(?:fwd|bwd)/step=\d/(?:block|merge)|(?:send|wait)/[a-z_]+|wait)")
"""A ring of one waits for nobody, and has no name."""


def names(rank: int, cases: list[Case]) -> list[set[str]]:
    found = []
    for case in cases:
        with profile() as events:
            over_the_ranks(case, Problem(seq=32))
        found.append({event.name for event in events.function_events if event.name.startswith("ringprof::")})
    return found


def test_blocks_merges_sends_and_waits_are_named() -> None:
    cases = [Case(name) for name in ("ring", "zigzag", "stripe", "ulysses", "usp", "double-ring", "burst", "megatron")]
    cases += [Case("allgather"), Case("double-ring", {"ring_window": 2})]
    found = run_ranks(WORLD, names, cases)[WORLD - 1]
    for case, one in zip(cases, found, strict=True):
        assert all(map(NAME.fullmatch, one)), (case, sorted(one))
        assert {name.partition("/")[0] for name in one} >= {
            f"ringprof::{what}" for what in ("fwd", "bwd", "send", "wait")
        }
    # The last rank sees all keys of a causal mask: a block and a merge each step.
    steps = {f"ringprof::fwd/step={step}/{part}" for step in range(WORLD) for part in ("block", "merge")}
    assert {name for name in found[0] if "fwd/" in name} == steps


def test_a_listener_hears_the_names_without_a_profiler() -> None:
    heard: list[str] = []

    def listen(name: str) -> AbstractContextManager[None]:
        heard.append(name)
        return nullcontext()

    with heard_by(listen), ring_step("fwd", 2, "block"), annotate("send", "kv"):
        pass
    with ring_step("fwd", 3, "block"), annotate("wait", "kv"):
        pass
    assert heard == ["fwd/step=2/block", "send"]
