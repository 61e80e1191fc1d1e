"""Dynamic context parallelism: results are those of each sequence, and nothing is made twice."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ringprof.strategies import Dynamic, names
from tests.strategies.cases import WorkloadShard, error_of
from tests.strategies.ranks import refusal, run_ranks


def changing(rank: int, name: str) -> float:
    """Use the sizes 4, 1, 2 and back; every group of ranks has its own sequence."""
    parts = Dynamic(name, kernel="reference")
    worst = 0.0
    for size in (4, 1, 2, 4, 2, 1):
        first = rank // size * size
        assert parts.of(size) is parts.over(range(first, first + size)) and parts.of(size).comm.size == size
        worst = max(worst, error_of(parts.of(size), WorkloadShard(seq=8 * size, seed=first)))
    return worst


@pytest.mark.processes
@pytest.mark.parametrize("name", names())
def test_every_strategy_is_exact_at_changing_sizes(name: str) -> None:
    assert max(run_ranks(4, changing, name)) < 1e-12


def at_once(rank: int) -> float:
    """Let ranks 0 and 3 share a sequence while ranks 1 and 2 have one each; return the largest error."""
    parts = Dynamic("zigzag", kernel="reference")
    mine = [0, 3] if rank in (0, 3) else [rank]
    pair, whole = parts.over(mine), parts.over([0, 1, 2, 3])
    assert (pair.comm.size, whole.comm.size) == (len(mine), 4)
    return max(error_of(pair, WorkloadShard(seq=16, seed=min(mine))), error_of(whole, WorkloadShard(seq=32)))


@pytest.mark.processes
def test_groups_of_several_sizes_at_once_are_exact() -> None:
    assert max(run_ranks(4, at_once)) < 1e-12


def counts(rank: int) -> list[tuple[int, int, int]]:
    """Return the numbers of process groups, strategies and live tensors after each round."""
    parts, counts_by_round = Dynamic("zigzag", kernel="cpu-flash"), []
    for _ in range(6):
        for size in (2, 4, 1):
            strategy = parts.of(size)
            q = torch.randn(1, 8, 4, 8, requires_grad=True)
            strategy.attention(q, q, q).sum().backward()
        del q, strategy
        gc.collect()
        tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
        counts_by_round.append((len(c10d._world.pg_map), len(parts.made), tensors))
    dist.barrier()
    return counts_by_round


@pytest.mark.processes
def test_cycling_sizes_creates_no_groups_and_leaks_no_tensors() -> None:
    for rank in run_ranks(4, counts):
        # The world; parts of 1 and 2; rings of K and V over 2 and 4. dK and dV share these.
        assert [groups for groups, _, _ in rank] == [5] * 6
        assert [strategies for _, strategies, _ in rank] == [3] * 6
        assert len({tensors for _, _, tensors in rank[1:]}) == 1


def refused(rank: int) -> list[str]:
    parts = Dynamic("ring")
    of = [refusal(parts.of, size) for size in (3, 0)]
    return of + [refusal(parts.over, ranks) for ranks in ([1 - rank], [0, 0, 1])]


@pytest.mark.processes
def test_invalid_group_sizes_are_refused() -> None:
    said = run_ranks(2, refused)[0]
    assert said[:2] == ["parts of 3 ranks do not divide 2", "parts of 0 ranks do not divide 2"]
    assert said[2] == "ranks [1]: each once, and rank 0 among them"
    assert said[3] == "ranks [0, 0, 1]: each once, and rank 0 among them"
