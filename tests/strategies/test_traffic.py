"""Bytes that every strategy sends, counted while it sends, against its closed formula; and what it leaves behind."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ringprof.dryrun.schedule import AttentionOp, CommStart, MemoryOp
from ringprof.prediction.schedules import schedule
from ringprof.strategies import create, names
from ringprof.strategies.transport import groups
from ringprof.workload.workload import Workload
from tests.strategies.cases import CASES, Case, WorkloadShard, inputs, over_the_ranks, shares
from tests.strategies.ranks import run_ranks

PROBLEM = WorkloadShard(seq=64, batch=2, heads=8, kv_heads=4, head_dim=4, dtype=torch.bfloat16, kernel="cpu-flash")
WORLD = 4
# Sizes of one rank's share in bytes, bf16: a query tensor, a key tensor, and one float32 number a row and head.
Q = 2 * PROBLEM.batch * (PROBLEM.seq // WORLD) * PROBLEM.heads * PROBLEM.head_dim
KV = Q * PROBLEM.kv_heads // PROBLEM.heads
ROW = 4 * PROBLEM.batch * (PROBLEM.seq // WORLD) * PROBLEM.heads
N = WORLD
# Bytes sent by each rank, forward and backward, from the schedules: N-1 hops of K and V; N-1 hops of dK and dV home
# (float32, twice a bf16 tensor), for the first contribution stays; Burst's backward reads (Q, dO, LSE, delta or O) N-1
# times and sends dQ N times; megatron's last block is its own, so its dK and dV make N-1 hops; an all-to-all of a
# tensor sends (N-1)/N of it.
FORMULAS: dict[str, tuple[int, int]] = {
    "ring": (2 * (N - 1) * KV, 2 * (N - 1) * KV + (N - 1) * 4 * KV),
    "ring-grad_wire=input": (2 * (N - 1) * KV, 2 * (N - 1) * KV + (N - 1) * 2 * KV),
    "zigzag": (2 * (N - 1) * KV, 2 * (N - 1) * KV + (N - 1) * 4 * KV),
    "stripe": (2 * (N - 1) * KV, 2 * (N - 1) * KV + (N - 1) * 4 * KV),
    "burst": (2 * (N - 1) * KV, (N - 1) * (2 * Q + 2 * ROW) + N * Q),
    "burst-optimized_backward=False": (2 * (N - 1) * KV, (N - 1) * (3 * Q + ROW) + N * Q),
    # Two windows of two: dQ makes n(w-1)+1 inner and n outer hops.
    "burst-ring_window=2": (2 * (N - 1) * KV, (N - 1) * (2 * Q + 2 * ROW) + (2 * 1 + 1 + 2) * Q),
    "megatron": (2 * (N - 1) * KV, 2 * (N - 1) * KV + 2 * (N - 1) * KV),
    "megatron-grad_wire=fp32": (2 * (N - 1) * KV, 2 * (N - 1) * KV + 4 * (N - 1) * KV),
    "ulysses": ((N - 1) * (2 * Q + 2 * KV) // N, (N - 1) * (2 * Q + 2 * KV) // N),
    # dO goes out in bf16, dQ, dK and dV come back in float32.
    "ulysses-grad_wire=fp32": ((N - 1) * (2 * Q + 2 * KV) // N, (N - 1) * (Q + 2 * (Q + 2 * KV)) // N),
    # Ulysses degree U = 2 and ring degree R = 2: an all-to-all over 2, and a ring of 2 with as many bytes a hop:
    # dK and dV make a single one, in bf16.
    "usp-ulysses_degree=2-placement=head-first-layout=zigzag": (
        (2 * Q + 2 * KV) // 2 + 2 * KV,
        (2 * Q + 2 * KV) // 2 + 2 * KV + 2 * KV,
    ),
    "usp-ulysses_degree=2-placement=ring-first-layout=stripe": (
        (2 * Q + 2 * KV) // 2 + 2 * KV,
        (2 * Q + 2 * KV) // 2 + 2 * KV + 2 * KV,
    ),
    # Two windows of two: dK and dV make w+1 hops in float32 in the first window, the same in bf16 in the second.
    "double-ring-ring_window=2": (2 * (N - 1) * KV, 2 * (N - 1) * KV + 3 * 4 * KV + 3 * 2 * KV),
    "double-ring-ring_window=2-grad_wire=fp32": (2 * (N - 1) * KV, 2 * (N - 1) * KV + 6 * 4 * KV),
    "double-ring-ring_window=2-grad_wire=input": (2 * (N - 1) * KV, 2 * (N - 1) * KV + 6 * 2 * KV),
    # Two Ulysses groups of two on a ring of two windows of one: outer hops only, the first of dK and dV in float32.
    "double-ring-ulysses_degree=2-ring_window=1": (
        (2 * Q + 2 * KV) // 2 + 2 * KV,
        (2 * Q + 2 * KV) // 2 + 2 * KV + 4 * KV + 2 * KV,
    ),
    "allgather": (2 * (N - 1) * KV, 2 * (N - 1) * KV + 2 * (N - 1) * KV),
    "allgather-layout=zigzag": (2 * (N - 1) * KV, 2 * (N - 1) * KV + 2 * (N - 1) * KV),
    "allgather-layout=zigzag-grad_wire=fp32": (2 * (N - 1) * KV, 2 * (N - 1) * KV + 4 * (N - 1) * KV),
    # Some heads at a time: the same bytes, in as many times the messages.
    "allgather-layout=zigzag-heads_at_a_time=1": (2 * (N - 1) * KV, 2 * (N - 1) * KV + 2 * (N - 1) * KV),
}


@pytest.mark.parametrize("kind", ["packed", "per_document", "dealt"])
def test_packed_documents_take_two_calls_more_and_the_bytes_of_one_document(kind):
    lengths = (700, 30, 1536, 75, 3000, 150, 350, 1536, 9007)
    workload = Workload(
        seq=sum(lengths), heads=8, kv_heads=2, head_dim=64, causal=True, backward=True, dtype="bf16", documents=lengths
    )
    params = {"layout": "zigzag", "documents_layout": kind}
    programs = schedule("allgather", workload, 8, params=params, kernel="flash-attn-3").programs
    for program in programs:
        calls = Counter(op.phase for op in program.ops if isinstance(op, AttentionOp))
        # A call for a rank's own keys, one for the head chunks and one for the tail chunks, also where chunks are cut.
        assert calls["forward"] == calls["backward"] <= 3
        assert sum(isinstance(op, MemoryOp) for op in program.ops) < 60
        # Two gathers in each pass, and two reduce-scatters, of a shard of K in bf16 to each peer.
        sent = [op.messages for op in program.ops if isinstance(op, CommStart)]
        assert sent == [(workload.seq // 8 * 2 * 64 * 2,)] * 6
    assert max(sum(isinstance(op, AttentionOp) for op in program.ops) for program in programs) == 2 * (
        3 if kind == "per_document" else 2
    )


# Heads of v that are half as large as those of q and k: K and V together, and O beside Q.
MLA = KV + KV // 2
O_HALF = Q // 2
SMALLER_V: dict[str, tuple[int, int]] = {
    "zigzag": ((N - 1) * MLA, (N - 1) * MLA + (N - 1) * 2 * MLA),
    "burst": ((N - 1) * MLA, (N - 1) * (Q + O_HALF + 2 * ROW) + N * Q),
    # One message of K and V of one size: the larger.
    "megatron": (2 * (N - 1) * KV, 2 * (N - 1) * KV + 2 * (N - 1) * KV),
    "ulysses": ((N - 1) * (Q + O_HALF + MLA) // N, (N - 1) * (Q + O_HALF + MLA) // N),
    "allgather": ((N - 1) * MLA, 2 * (N - 1) * MLA),
    "double-ring-ring_window=2": ((N - 1) * MLA, (N - 1) * MLA + 3 * 2 * MLA + 3 * MLA),
    "usp-ulysses_degree=2-placement=head-first-layout=zigzag": (
        (Q + O_HALF + MLA) // 2 + MLA, (Q + O_HALF + MLA) // 2 + MLA + MLA,
    ),
}  # fmt: skip


def totals(case: Case, problem: WorkloadShard, v_head_dim: int | None = None) -> dict[str, list[int]]:
    """Return [hops and collectives, bytes] that this rank sends in each phase of one call."""
    strategy = create(case.name, kernel=problem.kernel, **case.params)
    full = list(inputs(problem))
    full[2:] = [x[..., :v_head_dim] for x in full[2:]]
    q, k, v, dout = (strategy.shard(tensor).contiguous().requires_grad_() for tensor in full)
    strategy.attention(q, k, v, causal=problem.causal).backward(dout)
    counts = {"forward": [0, 0], "backward": [0, 0]}
    for (_, phase, _, _), (count, size_bytes) in strategy.comm.meter.sent.items():
        counts[phase][0] += count
        counts[phase][1] += size_bytes
    return counts


def sent_by(rank: int, cases: list[Case], v_head_dim: int | None = None) -> dict[str, tuple[int, int]]:
    sent = {str(case): totals(case, PROBLEM, v_head_dim) for case in cases}
    return {label: (counts["forward"][1], counts["backward"][1]) for label, counts in sent.items()}


@pytest.mark.processes
@pytest.mark.parametrize(("formulas", "v_head_dim"), [(FORMULAS, None), (SMALLER_V, 2)], ids=["", "smaller heads of v"])
def test_every_rank_sends_what_the_formula_says(formulas, v_head_dim):
    cases = [case for case in CASES if str(case) in formulas]
    assert {str(case) for case in cases} == set(formulas)
    if formulas is FORMULAS:
        assert {case.name for case in cases} == {case.name for case in CASES}, "a strategy without a formula"
    for counted in run_ranks(WORLD, sent_by, cases, v_head_dim):
        assert counted == formulas


@pytest.mark.processes
def test_repeated_kv_heads_are_counted():
    # 12 heads, 3 kv heads, degree 4: lcm(3, 4) = 12 kv heads travel, as many bytes as Q; 3/4 of each of 4 tensors.
    problem = replace(PROBLEM, heads=12, kv_heads=3)
    q_bytes = 2 * problem.batch * (problem.seq // WORLD) * problem.heads * problem.head_dim
    for counted in run_ranks(WORLD, sent_by_one, Case("ulysses"), problem):
        assert counted == {"forward": [4, 3 * q_bytes], "backward": [4, 3 * q_bytes]}


def sent_by_one(rank: int, case: Case, problem: WorkloadShard) -> dict[str, list[int]]:
    return totals(case, problem)


# Of 8 ranks, bf16, head_dim 128, for each rank: hops or collectives forward and backward, and megabytes of the whole
# pass, for 131072 tokens of 40 heads and 65536 tokens of 32 heads on 8 kv heads.
ON_8_RANKS = [
    # The literature's zigzag makes one hop of dK and dV more: 7717.5 and 771.8.
    (Case("zigzag"), (7, 7 + 7), (2348.8, 7046.4), (234.9, 704.6)),
    (Case("megatron"), (7, 8), (2348.8, 4697.6), (234.9, 469.8)),
    (Case("burst"), (7, 7 + 8), (2348.8, 3727.7), (234.9, 1491.1)),
    (Case("ulysses"), (4, 4), (587.2, 587.2), (146.8, 146.8)),
    (Case("usp", {"ulysses_degree": 2, "ring_degree": 4}), (4 + 3, 4 + 3 + 3), None, None),
    (Case("double-ring", {"ring_window": 4}), (7, 7 + 8 + 2), None, None),
    (Case("allgather"), (2, 2 + 2), (2348.8, 4697.6), (234.9, 469.8)),
]


def sent_on_8_ranks(rank: int, problem: WorkloadShard) -> list[dict[str, list[int]]]:
    return [totals(case, problem) for case, *_ in ON_8_RANKS]


@pytest.mark.long
@pytest.mark.parametrize(("heads", "kv_heads", "seq", "column"), [(40, 40, 131072, 2), (32, 8, 65536, 3)])
def test_volumes_on_8_ranks_equal_published_values(heads, kv_heads, seq, column):
    """Bytes are proportional to the sequence length: those of 64 tokens are counted and scaled."""
    problem = WorkloadShard(
        seq=64, heads=heads, kv_heads=kv_heads, head_dim=128, dtype=torch.bfloat16, kernel="cpu-flash"
    )
    for counted in run_ranks(8, sent_on_8_ranks, problem):
        for row, counts in zip(ON_8_RANKS, counted, strict=True):
            assert (counts["forward"][0], counts["backward"][0]) == row[1], str(row[0])
            megabytes = row[column]
            if megabytes is not None:
                scaled = [round(counts[phase][1] * seq / 64 / 1e6, 1) for phase in ("forward", "backward")]
                assert tuple(scaled) == megabytes, str(row[0])


def links_of(rank: int, cases: list[Case]) -> list[dict[str, list[int]]]:
    """Return [count, bytes] of the forward pass by channel and link, on two hosts of two ranks."""
    sent_by_case = []
    for case in cases:
        strategy = create(case.name, kernel="reference", ranks_per_host=2, **case.params)
        q, k, v = (torch.randn(1, 8, 2, 4, dtype=torch.float64) for _ in range(3))
        strategy.attention(q, k, v)
        sent_by_case.append({f"{channel} {link}": x for (channel, _, _, link), x in strategy.comm.meter.sent.items()})
    return sent_by_case


@pytest.mark.processes
def test_double_ring_crosses_hosts_once_per_window():
    for rank, (zigzag, *doubles) in enumerate(
        run_ranks(4, links_of, [Case("zigzag"), Case("burst"), Case("double-ring")])
    ):
        # Flat: ranks 1 and 3 send every hop to the other host. Double: 2 inner hops and 1 outer hop each.
        assert [(link, count) for link, (count, _) in zigzag.items()] == [
            ("kv other_host" if rank in (1, 3) else "kv same_host", 3)
        ]
        for sent in doubles:
            hops = {link.partition(" ")[2]: count for link, (count, _) in sent.items()}
            assert hops == {"same_host": 2, "other_host": 1} and len(sent) == 2


@pytest.mark.processes
def test_usp_placement_decides_what_crosses_hosts():
    # A tensor is 8 tokens x 2 heads x 4 x 8 bytes = 512: half of four of them go out, and one hop of two.
    cases = [Case("usp", {"ulysses_degree": 2, "placement": placement}) for placement in ("head-first", "ring-first")]
    for sent in run_ranks(4, links_of, cases):
        head_first, ring_first = ({link: size for link, (_, size) in links.items()} for links in sent)
        assert head_first == {"heads same_host": 1024, "kv other_host": 1024}
        assert ring_first == {"heads other_host": 1024, "kv same_host": 1024}


def many_calls(rank: int) -> tuple[int, int]:
    """Return the number of process groups after one call of every case, and after 100 more by new strategies."""
    cases, problem = [case for case in CASES if 4 in case.worlds], WorkloadShard(seq=16)
    for case in cases:
        over_the_ranks(case, problem)
    group_count, members = len(groups._groups), len(dist.distributed_c10d._world.pg_map)
    for call in range(100):
        over_the_ranks(cases[call % len(cases)], problem)
    assert len(groups._groups) == group_count
    return members, len(dist.distributed_c10d._world.pg_map)


@pytest.mark.processes
def test_100_calls_leave_no_process_group_behind():
    for before, after in run_ranks(4, many_calls):
        assert before == after


def tensors_left(rank: int) -> list[str]:
    """Return the cases after whose calls more tensors are alive than before; the first two calls fill caches."""
    leaking = []
    gc.freeze()  # What the test process had before is not looked at again.
    for case in {case.name: case for case in CASES if 2 in case.worlds}.values():
        strategy = create(case.name, kernel="cpu-flash", **case.params)
        alive = []
        for call in range(12):
            q, k, v, dout = (strategy.shard(tensor).requires_grad_() for tensor in inputs(PROBLEM))
            strategy.attention(q, k, v).backward(dout)
            del q, k, v, dout
            if call in (1, 11):
                gc.collect()
                alive.append(sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects()))
        # Ten calls later; what gloo's threads have just finished with may live on for a moment.
        if alive[1] >= alive[0] + 10:
            leaking.append(f"{case}: {alive}")
    return leaking


@pytest.mark.processes
def test_calls_leave_no_tensor_behind():
    assert run_ranks(2, tensors_left) == [[]] * 2


def interleaved(rank: int, pairs: list[tuple[str, str]]) -> list[str]:
    """Interleave the passes of pairs of strategies, and return the pairs with wrong results.

    A pair of equal names is one strategy, called twice.
    """
    disturbed = []
    problems = [WorkloadShard(seq=32, seed=1), WorkloadShard(seq=32, seed=2)]
    for pair in pairs:
        strategies = {name: create(name, kernel="reference") for name in pair}
        alone = [over_the_ranks(Case(name), problem) for name, problem in zip(pair, problems, strict=True)]
        calls = []
        for name, problem in zip(pair, problems, strict=True):
            leaves, dout = shares(strategies[name], inputs(problem))
            calls.append((strategies[name], leaves, strategies[name].attention(*leaves), dout))
        for *_, out, dout in calls:
            out.backward(dout)
        together = [[s.unshard(t) for t in (out, *(leaf.grad for leaf in leaves))] for s, leaves, out, _ in calls]
        if not all(
            torch.equal(*two) for results in zip(alone, together, strict=True) for two in zip(*results, strict=True)
        ):
            disturbed.append(" and ".join(pair))
    return disturbed


@pytest.mark.processes
def test_concurrent_calls_do_not_interfere():
    pairs = [("zigzag", "burst"), ("usp", "double-ring"), ("megatron", "allgather"), ("ulysses", "stripe")]
    pairs += [(name, name) for name in names()]
    assert run_ranks(2, interleaved, pairs) == [[]] * 2
