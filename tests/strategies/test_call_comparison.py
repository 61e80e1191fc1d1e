"""Ranks that call with different documents are told so, on every rank, whichever way their calls are compared."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from datetime import timedelta
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ringprof.strategies import Unsupported, create, names
from ringprof.strategies.errors import PeerLost
from ringprof.strategies.transport import call_comparison
from ringprof.strategies.transport.call_comparison import compare_call, difference
from ringprof.workload.mask import Mask
from tests.paths import ROOT
from tests.strategies.cases import attend
from tests.strategies.ranks import refusal, run_ranks

SEQ = 32
MEANS = ["memory", "store"]
BY_STORE = patch.object(call_comparison, "_map_words", lambda *_: None)
ADVICE = (
    "the ranks of a context-parallel group share one batch: give them the same cu_seqlens (one data loader per group,"
    " or the same seed and position)"
)


def by(means: str) -> Any:
    """Return a context in which calls are compared in shared memory, or in the store."""
    return BY_STORE if means == "store" else patch.object(call_comparison, "WARNED_AFTER_S", 60.0)


def WORLD() -> Any:
    return dist.group.WORLD


@cache
def processes() -> Any:
    """Return the process IDs of the ranks, which they exchange in the first call."""
    return create("ring").comm.processes


def compare(documents: tuple[int, ...], *, may_pass: bool = False, **call: Any) -> None:
    """Compare a call of this rank with those of the others."""
    compare_call(WORLD(), {"documents": documents, **call}, processes(), may_pass=may_pass)


# Message sizes of a ring depend on the first pair, but not on the second.
BATCHES: list[tuple[Any, Any]] = [
    ([0, 8, 32], [0, 16, 32]), ([0, 20, 32], [0, 24, 32]), ([0, 8, 32], [0, 8, 32]), ([0, 3, 32], None), (None, None),
    ([0, 3, 30], [0, 3, 32]), ([0, 4, 32], [0, 4, 32]),
]  # fmt: skip


def batches_of_two_loaders(rank: int, means: str) -> list[tuple[str, int, str]]:
    """Call every strategy with rank 0's documents and with those of the others; return (strategy, batch, refusal)."""
    x = torch.randn(1, SEQ, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    refusals = []
    with by(means):
        for name in names():
            strategy = create(name)
            for index, pair in enumerate(BATCHES):
                documents = pair[min(rank, 1)]
                # Documents that end early make no layout; every rank refuses them below.
                held = documents if documents and documents[-1] == SEQ else None
                q = strategy.shard(x, documents=held)
                try:
                    out = strategy.attention(q, q, q, documents=documents and torch.tensor(documents))
                except Unsupported as error:
                    refusals.append((name, index, str(error)))
                else:
                    right = attend(x, x, x, Mask.of(documents=documents))[0]
                    assert torch.allclose(out, strategy.shard(right, documents=held), rtol=0, atol=1e-13)
    return refusals


@pytest.mark.processes
@pytest.mark.parametrize("means", MEANS)
def test_every_rank_refuses_documents_that_differ(means):
    results = run_ranks(2, batches_of_two_loaders, means)
    assert results[0] == results[1]
    refused = {(name, index): text for name, index, text in results[0]}
    assert set(refused) == {(name, index) for name in names() for index in (0, 1, 3, 5)}
    prefix = "the ranks call with different documents: rank 0: "
    for name in names():
        assert refused[name, 0] == f"{prefix}[0, 8, 32]; rank 1: [0, 16, 32]; {ADVICE}"
        assert refused[name, 3] == f"{prefix}[0, 3, 32]; rank 1: none; {ADVICE}"


def other_windows(rank: int) -> str:
    strategy = create("zigzag")
    q = strategy.shard(torch.randn(1, 30, 4, 8), documents=[0, 5, 30])
    for window in ((3, 0), (4, 0)):
        strategy.attention(q, q, q, documents=[0, 5, 30], window_size=window)
    return refusal(strategy.attention, q, q, q, documents=[0, 5, 30], window_size=(3 + rank // 2, 0))


@pytest.mark.processes
def test_known_calls_that_differ_in_their_window_are_refused():
    assert run_ranks(3, other_windows) == [
        "the ranks call with different window_size: ranks 0, 1: [3, 0]; rank 2: [4, 0]; all must make the same call"
    ] * 3  # fmt: skip


def many_calls(rank: int, means: str, count: int) -> list[int]:
    """Make calls at random times; return the numbers of those that were refused."""
    own = random.Random(rank)
    refused = []
    with by(means):
        for number, differs in enumerate(random.Random(0).choices([False, False, False, True], k=count)):
            if own.random() < 0.1:
                time.sleep(own.random() / 100)
            try:
                compare((0, number + (differs and rank == 2), SEQ))
            except Unsupported:
                refused.append(number)
    return refused


@pytest.mark.processes
@pytest.mark.parametrize("means", MEANS)
def test_exactly_the_calls_that_differ_are_refused(means):
    expected = [i for i, differs in enumerate(random.Random(0).choices([False, False, False, True], k=200)) if differs]
    assert run_ranks(4, many_calls, means, 200) == [expected] * 4


def calls_beyond_32_bits(rank: int) -> bool:
    compare(())
    comparison = call_comparison._comparisons[WORLD()]
    assert comparison._words is not None
    # From the first row of the memory on, so that none is empty when the numbers begin again.
    comparison._calls = 2**32 - call_comparison._HISTORY - 1
    for count in range(call_comparison._HISTORY + 3):
        compare((0, count))
    return True


@pytest.mark.processes
def test_the_number_of_a_call_may_exceed_its_bits():
    assert run_ranks(2, calls_beyond_32_bits) == [True, True]


def without_rank_1(rank: int) -> str:
    compare(())
    if rank == 0:
        with patch.object(call_comparison, "timeout", lambda: timedelta(seconds=1)), pytest.raises(PeerLost) as lost:
            compare(())
        return str(lost.value)
    return ""


@pytest.mark.processes
def test_a_rank_that_does_not_come_is_named():
    assert run_ranks(2, without_rank_1)[0].startswith(
        "rank 1 does not come: the ranks of its group compare their calls, "
    )


def beside_one_that_has_ended(rank: int) -> str:
    with patch.object(call_comparison, "INTERVAL_S", 0.02):
        compare((), may_pass=True)
        if rank == 0:
            call_comparison._comparisons[WORLD()]._processes[1] = 2**30  # above every process ID
            with pytest.raises(PeerLost) as lost:
                for _ in range(500):
                    time.sleep(0.01)
                    compare((), may_pass=True)
            return str(lost.value)
    return ""


@pytest.mark.processes
def test_a_rank_whose_calls_pass_is_told_that_another_has_ended():
    assert run_ranks(2, beside_one_that_has_ended)[0].startswith("rank 1 has ended: the ranks of its group compare")


@pytest.mark.processes
def test_processes_that_share_no_memory_hash_calls_alike():
    """Tests fork ranks, in which even addresses are equal. A call that passes and one that waits are hashed."""
    code = (
        "from unittest.mock import patch\n"
        "from ringprof.strategies.transport.call_comparison import CallComparison\n"
        "ranks = CallComparison.__new__(CallComparison)\n"
        "words = [0] * 1026\n"
        "vars(ranks).update(_lets_pass=True, _kinds={}, _documents=(), _waited=(0, 0), _calls=0, _recent=[], _hash=0,"
        " _lost='', _words=words, _size=1, _rank=0, _numbers_from=1024)\n"
        "module = 'ringprof.strategies.transport.call_comparison.'\n"
        "with patch(module + 'raise_if_refused'), patch.object(CallComparison, '_compare_in_memory', lambda _: True):\n"
        "    for documents in ((0, 3, 8), (0, 3, 8), (0, 8)):\n"
        "        ranks.check(None, {'documents': documents, 'window': None, 'type': 'bf16'}, may_pass=True)\n"
        "print([word for word in words if word])\n"
    )
    printed = {
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for _ in range(3)
    }
    (words,) = printed
    assert len(json.loads(words)) == 4


def test_the_message_names_ranks_and_the_first_bound_that_differs():
    long = tuple(range(0, 100, 10))
    text = difference({4: {"documents": long}, 5: {"documents": (*long[:3], 25, *long[4:])}, 6: {"documents": long}})
    assert text == (
        "the ranks call with different documents: ranks 4, 6: 9 documents, of which number 3 ends at 30; rank 5: 9"
        f" documents, of which number 3 ends at 25; {ADVICE}"
    )
    text = difference({0: {"documents": long}, 1: {"documents": (*long, 90, 90)}})
    assert "rank 0: 9 documents, of which number 9 ends at 90; rank 1: 11 documents" in text
    text = difference({rank: {"documents": (), "prefix": rank == 9} for rank in range(10)})
    assert text.startswith("the ranks call with different prefix: ranks 0, 1, 2, 3, 4, 5, 6, 7, ...: False; rank 9: T")


PASSING: list[tuple[tuple[int, ...], bool]] = [
    ((0, 8, 32), True), ((0, 8, 32), True), ((0, 16, 32), True), ((0, 16, 32), False), ((0, 16, 32), True)
]  # fmt: skip


def passing_ranks(rank: int, means: str, changes: dict[int, int]) -> list[str]:
    """Make calls that may pass, with other documents from call ``changes[rank]`` on; return what each raised."""
    raised = []
    with by(means), patch.object(call_comparison, "INTERVAL_S", 0.02):
        for number, (documents, may_pass) in enumerate(PASSING):
            documents = (0, 4, 32) if changes.get(rank) == number else documents
            raised.append(refusal(compare, documents, may_pass=may_pass, window_size=(3, 0)))
        return [*raised, later_refusal()]


def later_refusal() -> str:
    """Return what a rank is told some time after it has passed a call; empty where nothing is refused."""
    for _ in range(500):
        if text := refusal(call_comparison.raise_if_refused, WORLD()):
            return text
        time.sleep(0.01)
    return ""


@pytest.mark.processes
@pytest.mark.parametrize("means", MEANS)
@pytest.mark.parametrize("changed", [1, 2, 3, 4])
def test_a_rank_that_passed_a_call_is_refused_later(changed, means):
    """Rank 1 comes with documents of its own in one call; the other two may have passed that call."""
    results = run_ranks(3, passing_ranks, means, {1: changed})
    before = "0, 8, 32" if changed < 2 else "0, 16, 32"
    expected = f"the ranks call with different documents: ranks 0, 2: [{before}]; rank 1: [0, 4, 32]; {ADVICE}"
    if changed in (2, 3):  # calls in which every rank waits: all go on
        assert results == [[*(expected * (number == changed) for number in range(len(PASSING))), ""]] * 3
    else:
        assert results[1][changed] == expected and not any(results[1][:changed])
        for result in results:
            assert result[-1] == expected and set(result) <= {"", expected}


@pytest.mark.processes
@pytest.mark.parametrize("means", MEANS)
def test_ranks_that_change_documents_at_different_calls_do_not_wait_for_each_other(means):
    """Each of two ranks waits in a call that the other has passed, or will pass."""
    results = run_ranks(2, passing_ranks, means, {0: 4, 1: 1})
    assert results[0][-1] == results[1][-1]
    assert all(any(result) and set(result) <= {"", result[-1]} for result in results)


def passed_options(rank: int, means: str) -> tuple[list[str], str]:
    """Pass calls that all ranks know, with another window on one rank; then come with new documents."""
    windows = [(3, 0), (4, 0), (3, 0), (3 + rank // 2, 0), (3, 0), (4, 0)]
    with by(means), patch.object(call_comparison, "INTERVAL_S", 0.02):
        for window in windows:
            compare((0, 8, 32), may_pass=True, window_size=window)
        later = later_refusal() if means == "memory" else ""
        raised = [refusal(compare, (0, number, 32), may_pass=True, window_size=(3, 0)) for number in range(2)]
    return raised, later


@pytest.mark.processes
@pytest.mark.parametrize("means", MEANS)
def test_options_that_differ_in_a_call_that_all_pass_are_refused(means):
    """In shared memory soon, with what differed; in the store when the ranks wait for each other the next time."""
    results = run_ranks(3, passed_options, means)
    assert results[0] == results[1] == results[2]
    raised, refusal = results[0]
    if means == "memory":
        assert refusal == raised[0] == raised[1] == (
            "the ranks call with different window_size: ranks 0, 1: [3, 0]; rank 2: [4, 0]; all must make the same call"
        )  # fmt: skip
    else:
        assert raised[0].startswith("the ranks change from one call to another") and raised[1] == ""


def far_ahead(rank: int) -> tuple[int, str]:
    """Pass many calls while rank 1 stops after one and comes with other documents; return the number of calls."""
    with patch.object(call_comparison, "INTERVAL_S", 0.02), pytest.raises(Unsupported) as refusal:
        for number in range(3000):
            if number and rank:
                time.sleep(0.3)
            documents = (0, 4 if number and rank else 8, 32)
            compare(documents, may_pass=True)
    return number, str(refusal.value)


@pytest.mark.processes
def test_a_rank_passes_many_calls_but_not_more_than_the_memory_keeps():
    (calls, refusal), (_, of_other) = run_ranks(2, far_ahead)
    assert call_comparison._HISTORY // 2 <= calls < call_comparison._HISTORY
    assert (
        refusal
        == of_other
        == (f"the ranks call with different documents: rank 0: [0, 8, 32]; rank 1: [0, 4, 32]; {ADVICE}")
    )


def at_random_speeds(rank: int, count: int) -> int:
    """Make the same calls as the other rank, most of which pass, at speeds of its own."""
    common, own = random.Random(0), random.Random(rank + 1)
    documents = 0
    with patch.object(call_comparison, "INTERVAL_S", 1e-3):
        for number in range(count):
            documents += common.random() < 0.002
            if own.random() < 0.001:
                time.sleep(own.random() / 50)
            compare((0, documents, 9999), may_pass=True, window_size=(number % 3, 0))
    return documents


@pytest.mark.processes
def test_equal_calls_are_never_refused():
    results = run_ranks(4, at_random_speeds, 20_000)
    assert len(set(results)) == 1 and results[0] > 10
