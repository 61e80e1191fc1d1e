"""What every strategy sends, counted while it sends, against its closed formula; and what it leaves behind."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ringprof.strategies import communicator, create
from tests.strategies.cases import CASES, Case, Problem, over_the_ranks
from tests.strategies.ranks import run_ranks

PROBLEM = Problem(seq=64, batch=2, heads=8, kv_heads=4, head_dim=4, dtype=torch.bfloat16, kernel="cpu-flash")
WORLD = 4
# Sizes of one rank's share in bytes, bf16: a query tensor, a key tensor, and one float32 number a row and head.
Q = 2 * PROBLEM.batch * (PROBLEM.seq // WORLD) * PROBLEM.heads * PROBLEM.head_dim
KV = Q * PROBLEM.kv_heads // PROBLEM.heads
ROW = 4 * PROBLEM.batch * (PROBLEM.seq // WORLD) * PROBLEM.heads
N = WORLD
# Bytes sent by each rank, forward and backward, from the schedules: N-1 hops of K and V; N hops of dK and dV home
# (float32, twice a bf16 tensor); Burst's backward reads (Q, dO, LSE, delta or O) N-1 times and sends dQ N times;
# megatron's last block is its own, so its dK and dV make N-1 hops; an all-to-all of a tensor sends (N-1)/N of it.
FORMULAS: dict[str, tuple[int, int]] = {
    "ring": (2 * (N - 1) * KV, 2 * (N - 1) * KV + N * 4 * KV),
    "ring-grad_wire=input": (2 * (N - 1) * KV, 2 * (N - 1) * KV + N * 2 * KV),
    "zigzag": (2 * (N - 1) * KV, 2 * (N - 1) * KV + N * 4 * KV),
    "stripe": (2 * (N - 1) * KV, 2 * (N - 1) * KV + N * 4 * KV),
    "burst": (2 * (N - 1) * KV, (N - 1) * (2 * Q + 2 * ROW) + N * Q),
    "burst-optimized_backward=False": (2 * (N - 1) * KV, (N - 1) * (3 * Q + ROW) + N * Q),
    # Two windows of two: dQ makes n(w-1)+1 inner and n outer hops.
    "burst-ring_window=2": (2 * (N - 1) * KV, (N - 1) * (2 * Q + 2 * ROW) + (2 * 1 + 1 + 2) * Q),
    "megatron": (2 * (N - 1) * KV, 2 * (N - 1) * KV + 2 * (N - 1) * KV),
    "ulysses": ((N - 1) * (2 * Q + 2 * KV) // N, (N - 1) * (2 * Q + 2 * KV) // N),
    # Ulysses degree U = 2 and ring degree R = 2: an all-to-all over 2, and a ring of 2 with as many bytes a hop.
    "usp-ulysses_degree=2-placement=head-first-layout=zigzag": (
        (2 * Q + 2 * KV) // 2 + 2 * KV,
        (2 * Q + 2 * KV) // 2 + 2 * KV + 2 * 4 * KV,
    ),
    # Two windows of two: dK and dV make w+1 hops in float32 in the first window, the same in bf16 in the second.
    "double-ring-ring_window=2": (2 * (N - 1) * KV, 2 * (N - 1) * KV + 3 * 4 * KV + 3 * 2 * KV),
    "allgather": (2 * (N - 1) * KV, 2 * (N - 1) * KV + 2 * (N - 1) * KV),
    "allgather-layout=zigzag": (2 * (N - 1) * KV, 2 * (N - 1) * KV + 2 * (N - 1) * KV),
}


def sent_by(rank: int, cases: list[Case]) -> dict[str, tuple[int, int]]:
    found = {}
    for case in cases:
        strategy = create(case.name, kernel=PROBLEM.kernel, **case.params)
        q, k, v = (
            torch.randn(
                PROBLEM.batch, PROBLEM.seq // WORLD, heads, PROBLEM.head_dim, dtype=PROBLEM.dtype
            ).requires_grad_()
            for heads in (PROBLEM.heads, PROBLEM.kv_heads, PROBLEM.kv_heads)
        )
        strategy.attention(q, k, v).sum().backward()
        totals = {"forward": 0, "backward": 0}
        for (_, phase, _, _), (_, size_bytes) in strategy.comm.meter.sent.items():
            totals[phase] += size_bytes
        found[str(case)] = (totals["forward"], totals["backward"])
    return found


def test_every_rank_sends_what_the_formula_says():
    cases = [case for case in CASES if str(case) in FORMULAS]
    assert {str(case) for case in cases} == set(FORMULAS)
    for counted in run_ranks(WORLD, sent_by, cases):
        assert counted == FORMULAS


def links_of(rank: int) -> dict[str, dict[str, int]]:
    found = {}
    for name in ("zigzag", "burst", "double-ring"):
        strategy = create(name, kernel="reference", ranks_per_host=2)
        q, k, v = (torch.randn(1, 8, 2, 4, dtype=torch.float64).requires_grad_() for _ in range(3))
        strategy.attention(q, k, v).sum().backward()
        hops = {"same_host": 0, "other_host": 0}
        for (_, phase, _, link), (count, _) in strategy.comm.meter.sent.items():
            hops[link] += count if phase == "forward" else 0
        found[name] = hops
    return found


def test_a_double_ring_follows_the_hosts_and_crosses_them_once_a_window():
    by_rank = run_ranks(4, links_of)
    for rank, found in enumerate(by_rank):
        # Flat: ranks 1 and 3 send every hop to the other host. Double: 2 inner hops and 1 outer hop each.
        crossing = 3 if rank in (1, 3) else 0
        assert found["zigzag"] == {"same_host": 3 - crossing, "other_host": crossing}
        assert found["burst"] == found["double-ring"] == {"same_host": 2, "other_host": 1}


def many_calls(rank: int) -> tuple[int, int]:
    case, problem = Case("burst", {"ring_window": 2}), Problem(seq=16, batch=1)
    over_the_ranks(case, problem)
    groups, members = len(communicator._groups), len(dist.distributed_c10d._world.pg_map)
    for _ in range(100):
        over_the_ranks(case, problem)
    assert len(communicator._groups) == groups
    return members, len(dist.distributed_c10d._world.pg_map)


def test_100_calls_leave_no_process_group_behind():
    for before, after in run_ranks(4, many_calls):
        assert before == after


def interleaved(rank: int) -> bool:
    """Two strategies whose forward and backward passes cross each other."""
    problems = [Problem(seq=32, seed=1), Problem(seq=32, seed=2)]
    alone = [over_the_ranks(Case(name), problem) for name, problem in zip(("zigzag", "burst"), problems, strict=True)]
    made = []
    for name, problem in zip(("zigzag", "burst"), problems, strict=True):
        from tests.strategies.cases import inputs

        strategy = create(name, kernel="reference")
        *qkv, dout = (strategy.shard(tensor) for tensor in inputs(problem))
        leaves = [tensor.requires_grad_() for tensor in qkv]
        made.append((strategy, leaves, strategy.attention(*leaves), dout))
    for *_, out, dout in made:
        out.backward(dout)
    together = [[s.unshard(t) for t in (out, *(leaf.grad for leaf in leaves))] for s, leaves, out, _ in made]
    return all(
        torch.equal(a, b) for one, two in zip(alone, together, strict=True) for a, b in zip(one, two, strict=True)
    )


def test_two_strategies_in_one_process_do_not_disturb_each_other():
    assert run_ranks(2, interleaved) == [True, True]
