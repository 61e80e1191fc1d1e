"""Prefill and decode over a cache that is sharded over ranks, against the plain formula in float64."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ringprof.strategies import Unsupported, create, find, for_inference, names
from ringprof.strategies.annotate import redirect_annotations
from ringprof.strategies.base import Shape
from ringprof.workload.mask import Mask
from tests.strategies.cases import Case, attend, examples
from tests.strategies.ranks import refusal, run_ranks
from tests.strategies.test_hops_on_cpu import on_transport
from tests.test_mask import sees


class WorkloadShard(NamedTuple):
    """New tokens over a number of keys, the last of which are those of the new tokens."""

    new: int
    keys: int
    batch: int = 2
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 4
    causal: bool = True
    kernel: str = "reference"
    seed: int = 0
    window: tuple[int, int] = (-1, -1)
    prefix: int = 0
    sinks: bool = False
    softcap: float = 0.0
    v_head_dim: int | None = None

    def mask(self) -> Mask:
        return Mask.of(window=self.window, causal=self.causal, prefix=self.prefix)

    def flops_per_pair(self) -> int:
        """Count the FLOPs of one pair over all heads, by a kernel that takes both sizes of heads."""
        return 2 * self.batch * self.heads * (self.head_dim + (self.v_head_dim or self.head_dim))


DECODE = [
    Case("dcp", {"merge": merge, "queries": queries})
    for merge in ("reduce-scatter", "all-to-all", "all-gather")
    for queries in ("gathered", "replicated")
]
GROUPS = [
    Case("dcp", {"dcp_degree": degree, "merge": merge}, (4,))
    for degree in (1, 2)
    for merge in ("reduce-scatter", "all-gather")
]
PREFILL = [Case("ring-prefill", {"passes": passes}) for passes in ("kv", "q", "auto")]


def inputs(problem: WorkloadShard) -> list[Tensor]:
    generator = torch.Generator().manual_seed(problem.seed)
    of_k, of_v = problem.head_dim, problem.v_head_dim or problem.head_dim
    kv = problem.keys, problem.kv_heads
    sizes = ((problem.new, problem.heads, of_k), (*kv, of_k), (*kv, of_v), (1, problem.heads, 1))
    entries = max(1, problem.batch)
    *qkv, sinks = (torch.randn((entries, *size), generator=generator, dtype=torch.float64) for size in sizes)
    return [*(x[: problem.batch] for x in qkv), sinks[0].flatten()]


def dense(problem: WorkloadShard) -> tuple[Tensor, Tensor]:
    """Compute the output and LSE of all new tokens."""
    q, k, v, sinks = inputs(problem)
    return attend(q, k, v, problem.mask(), softcap=problem.softcap, sinks=sinks if problem.sinks else None)


def attended(
    strategy: Any, problem: WorkloadShard, chunks: Sequence[int] | None = None, tensors: list[Tensor] | None = None,
    **options: Any,
) -> Any:  # fmt: skip
    """Attend to a cache that lies where `shard_cache` puts it, or where prefill has computed these chunks."""
    q, k, v, sinks = tensors or inputs(problem)
    if chunks is None:
        mine = [strategy.shard_cache(x, problem.new, problem.heads) for x in (k, v)]
        where: dict[str, Any] = {"kv_chunks": "contiguous"} if strategy.phase == "prefill" else {}
    else:
        starts = [sum(chunks[:index]) for index in range(len(chunks))]
        held = torch.cat([start + strategy.query_positions(n) for start, n in zip(starts, chunks, strict=True)])
        mine, where = [k[:, held], v[:, held]], {"kv_chunks": chunks}
    heads = strategy.heads(problem.heads, problem.kv_heads).returned
    where |= {"causal": problem.causal, "window_size": problem.window, "prefix": problem.prefix}
    where |= {"softcap": problem.softcap, "sinks": sinks[heads] if problem.sinks else None}
    return strategy.attention(strategy.shard(q), *mine, **{**where, **options})


Problem = tuple[WorkloadShard, Sequence[int] | None]
"""A problem, and the chunks whose keys lie where prefill has computed them; None: they lie as `shard_cache` says."""


def errors(
    rank: int, cases: list[Case], problems: list[tuple[Problem, tuple[Tensor, Tensor]]]
) -> list[tuple[str, float]]:
    results = []
    for case, ((problem, chunks), (exact, exact_lse)) in product(cases, problems):
        strategy = create(case.name, kernel=problem.kernel, **case.params)
        length = problem.keys if chunks is None else None
        out, lse = attended(strategy, problem, chunks, return_lse=True, kv_length=length)
        rows = strategy.shard_output(exact_lse.transpose(1, 2).unsqueeze(-1)).squeeze(-1).transpose(1, 2)
        wrong = torch.cat([(out - strategy.shard_output(exact)).flatten(), (lse - rows).flatten(), torch.zeros(1)])
        counted = torch.tensor(sum(kernel.flops for kernel in strategy.kernels()))
        torch.distributed.all_reduce(counted)
        queries = range(problem.keys - problem.new, problem.keys)
        area = sum(sees(problem.mask(), row, key) for row in queries for key in range(problem.keys))
        assert problem.mask().area(problem.keys, problem.new) == area
        is_counted = int(counted) == problem.flops_per_pair() * area
        results.append((f"{case} {problem} {chunks}", float(wrong.abs().max()) if is_counted else math.inf))
    return results


def check(world: int, cases: list[Case], problems: list[Problem]) -> None:
    for results in run_ranks(world, errors, cases, [(problem, dense(problem[0])) for problem in problems]):
        assert [(label, error) for label, error in results if not error < 1e-12] == []


@pytest.mark.processes
@pytest.mark.parametrize("world", [1, 2, 4])
def test_decode_is_exact_in_float64_and_counted_by_the_exact_area(world: int) -> None:
    # One token and several; a cache that the ranks cannot share evenly, and one with fewer tokens than ranks.
    problems = [
        WorkloadShard(1, 29),
        WorkloadShard(3, 29),
        WorkloadShard(5, 64, causal=False),
        WorkloadShard(2, 3),
        WorkloadShard(1, 1),
        WorkloadShard(1, 29, window=(7, 0)),
        WorkloadShard(5, 29, window=(2, 0), prefix=3, sinks=True),
        WorkloadShard(4, 6, window=(3, 0), prefix=5, softcap=1.5, v_head_dim=3),
        WorkloadShard(5, 40, causal=False, window=(9, 1), prefix=2, v_head_dim=1, sinks=True),
        WorkloadShard(2, 29, window=(7, 0), batch=0),
        WorkloadShard(4, 40, kernel="cpu-flash"),
    ]
    check(world, DECODE + [case for case in GROUPS if world in case.worlds], [(x, None) for x in problems])


def errors_in_late_hops(rank: int, transport: str, folder: str, problems: Any) -> list[tuple[str, float]]:
    """Return the errors over hops that come as late as their contract allows, in memory that is poisoned before."""
    with on_transport(transport, "late", folder):
        return errors(rank, [*PREFILL, *DECODE], problems)


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["copy", "nccl"])
@pytest.mark.parametrize("world", [2, 4])
def test_late_hops_of_prefill_and_decode_are_exact(world: int, transport: str, tmp_path: Path) -> None:
    problems = [
        WorkloadShard(16, 48), WorkloadShard(16, 48, window=(6, 0), sinks=True),
        WorkloadShard(16, 24, causal=False, window=(9, 1), prefix=2, v_head_dim=1), WorkloadShard(8, 8, batch=2),
    ]  # fmt: skip
    with_truths = [((problem, None), dense(problem)) for problem in problems]
    for label, error in run_ranks(world, errors_in_late_hops, transport, str(tmp_path), with_truths)[0]:
        assert error < 1e-12, label


PROBLEMS = [
    WorkloadShard(16, 48),
    WorkloadShard(8, 8),
    WorkloadShard(16, 24, causal=False),
    WorkloadShard(8, 136, kernel="cpu-flash"),
    WorkloadShard(16, 48, window=(6, 0), sinks=True),
    WorkloadShard(16, 48, window=(20, 0), prefix=11, softcap=1.5, v_head_dim=3),
    WorkloadShard(8, 8, window=(2, 0), prefix=1),
    WorkloadShard(16, 24, causal=False, window=(9, 1), prefix=2, sinks=True, v_head_dim=1),
    WorkloadShard(8, 136, window=(50, 0), prefix=40, kernel="cpu-flash"),
    # Of one rank's early and late tokens some see keys of the other's, and those between them see none.
    WorkloadShard(8, 24, window=(1, 0)),
    WorkloadShard(16, 48, window=(1, 0), kernel="cpu-flash"),
    WorkloadShard(8, 24, batch=0),
    # 5, 1 and 17 cached keys in contiguous shares that differ by one key.
    WorkloadShard(24, 29),
    WorkloadShard(24, 25),
    WorkloadShard(24, 25, window=(3, 0)),
    WorkloadShard(24, 41, window=(9, 0), prefix=4),
]
CHUNKED: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((24,), {}),
    ((24, 24, 24), {"window": (5, 0)}),
    ((24, 24, 24), {"window": (30, 0), "prefix": 7, "softcap": 1.5, "v_head_dim": 3}),
    # Lengths that no number of ranks divides; fewer tokens than ranks; chunks of one token.
    ((13,), {}),
    ((13,), {"causal": False}),
    ((13,), {"window": (3, 0), "sinks": True}),
    ((7, 5, 11), {}),
    ((7, 5, 11), {"window": (6, 0), "prefix": 2}),
    ((7, 5, 11), {"causal": False, "window": (4, 3), "sinks": True}),
    ((1, 1, 2), {"window": (1, 0)}),
    ((2, 1), {}),
    ((1, 9, 1), {"kernel": "cpu-flash"}),
]


@pytest.mark.processes
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_prefill_is_exact_in_float64_and_counted_by_the_exact_area(world: int) -> None:
    """Keys of earlier chunks stay where they were computed, and a cache lies in contiguous shares."""
    chunked: list[Problem] = [(WorkloadShard(x[-1], sum(x), **options), x) for x, options in CHUNKED]
    check(world, PREFILL, [(problem, None) for problem in PROBLEMS if problem.new % (2 * world) == 0] + chunked)


def errors_beside_meta(rank: int, problem: WorkloadShard, truth: Tensor) -> list[float]:
    """Return the errors in a program whose default device is ``meta``."""
    errors, tensors = [], inputs(problem)
    for name in ("dcp", "ring-prefill"):
        with torch.device("meta"):
            strategy = create(name, kernel="reference")
            out = attended(strategy, problem, None, tensors, kv_length=problem.keys)
        errors.append(float((out - strategy.shard_output(truth)).abs().max()))
    return errors


@pytest.mark.processes
def test_default_device_is_ignored_with_a_cache() -> None:
    problem = WorkloadShard(16, 48, window=(20, 0), prefix=11)
    for errors in run_ranks(2, errors_beside_meta, problem, dense(problem)[0]):
        assert max(errors) < 1e-12


@st.composite
def drawn(draw) -> tuple[list[Case], WorkloadShard]:
    kv_heads = 4
    heads = kv_heads * draw(st.sampled_from([1, 2, 3]))
    sizes = {
        "batch": draw(st.integers(1, 2)),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": draw(st.integers(1, 9)),
    }
    sizes |= {"causal": draw(st.booleans()), "seed": draw(st.integers(0, 999))}
    if draw(st.booleans()):
        sizes |= {"window": draw(st.tuples(st.integers(0, 30), st.integers(0, 4))), "prefix": draw(st.integers(0, 20))}
    sizes |= {"sinks": draw(st.booleans()), "softcap": draw(st.sampled_from([0.0, 2.0]))}
    sizes |= {"v_head_dim": draw(st.integers(1, sizes["head_dim"]))}
    if draw(st.booleans()):
        new = draw(st.integers(1, 6))
        return [draw(st.sampled_from(DECODE + GROUPS))], WorkloadShard(new, new + draw(st.integers(0, 50)), **sizes)
    new = 8 * draw(st.integers(1, 3))
    return [draw(st.sampled_from(PREFILL))], WorkloadShard(new, new + 4 * draw(st.integers(0, 20)), **sizes)


def drawn_are_exact(given_: tuple[list[Case], WorkloadShard]) -> None:
    cases, problem = given_
    check(4, cases, [(problem, None)])


@pytest.mark.processes
@examples(5)
@given(drawn())
def test_random_caches_are_exact(drawn_one) -> None:
    drawn_are_exact(drawn_one)


@pytest.mark.long
@examples(80)
@given(drawn())
def test_many_random_caches_are_exact(drawn_one) -> None:
    drawn_are_exact(drawn_one)


def sent(rank: int, cases: list[Case], problem: WorkloadShard) -> list[dict[tuple[str, str], int]]:
    bytes_by_case = []
    for case in cases:
        strategy = create(case.name, kernel="reference", **case.params)
        attended(strategy, problem, kv_length=problem.keys)
        meter = strategy.comm.meter.sent
        bytes_by_case.append({(channel, operation): size for (channel, _, operation, _), (_, size) in meter.items()})
    return bytes_by_case


@pytest.mark.processes
def test_bytes_of_decode_do_not_grow_with_the_cache() -> None:
    # Of 2 ranks, in float64: 2 sequences of one token; 4 of 8 heads of 4 numbers are 256 bytes, their LSEs 64.
    q = {("q", "all_gather"): 256}
    expected = [
        q | {("out", "all_gather"): 128, ("out", "reduce_scatter"): 256},
        {("out", "all_gather"): 128, ("out", "reduce_scatter"): 256},
        q | {("out", "all_to_all"): 256 + 64},
        {("out", "all_to_all"): 256 + 64},
        q | {("out", "all_gather"): 512 + 128},
        {("out", "all_gather"): 512 + 128},
    ]
    for keys in (10, 1000):
        assert run_ranks(2, sent, DECODE, WorkloadShard(1, keys))[0] == expected


@pytest.mark.processes
def test_prefill_sends_the_smaller_of_queries_and_keys() -> None:
    # 12 of 24 keys of 4 heads, K and V of 2 sequences: 6144 bytes. 4 of 8 queries of 8 heads: 2048, there and back,
    # and 512 of LSEs.
    kv, q = {("kv", "send_recv"): 6144}, {("q", "send_recv"): 2048, ("out", "all_to_all"): 2048 + 512}
    assert run_ranks(2, sent, PREFILL, WorkloadShard(8, 24))[0] == [kv, q, q]
    # Without a cache keys and values are less: 4 of 8 tokens are 2048 bytes.
    assert run_ranks(2, sent, PREFILL[2:], WorkloadShard(8, 8))[0] == [{("kv", "send_recv"): 2048}]


def windows_over_a_cache(rank: int) -> list[str]:
    x, refusals = torch.randn(1, 8, 4, 8), []
    for name, options in (
        ("ring-prefill", {"window_size": (4, 0), "kv_length": 16}),
        ("ring-prefill", {"window_size": (4, 0), "prefix": 2}),
        ("dcp", {"kv_chunks": "contiguous", "kv_length": 16}),
    ):  # fmt: skip
        refusals.append(refusal(create(name, kernel="reference").attention, x[:, :2], x, x, **options))
    # Without a cache, or a window, nothing is to be declared.
    strategy = create("ring-prefill", kernel="reference")
    strategy.attention(x, x, x, window_size=(4, 0))
    strategy.attention(x[:, :2], x, x)
    return refusals


@pytest.mark.processes
def test_a_window_over_cached_keys_of_unknown_positions_is_refused() -> None:
    first, second, third = run_ranks(2, windows_over_a_cache)[0]
    assert first == second and first.startswith("a window over a cache needs kv_chunks: the lengths of the chunks")
    assert third.startswith("kv_chunks: dcp has token t on rank t mod N")


@pytest.mark.processes
def test_prefill_sends_only_cached_keys_in_the_window() -> None:
    """A window sends two keys per rank around the ring: one travels one hop, the other three.

    On 4 ranks with chunks of 2 new tokens, each chunk and the cache is followed by one on another rank or its own. K
    and V are 2 · 4 heads · 4 numbers of 8 bytes, of 2 sequences.
    """
    kv = {("kv", "send_recv"): 4 * (2 * 4 * 4 * 8 * 2)}
    # 4 queries of 8 heads make three hops whole, and their outputs and LSEs come home from as many.
    q = {("q", "send_recv"): 3 * 2048, ("out", "all_to_all"): 3 * (2048 + 512)}
    assert run_ranks(4, sent, PREFILL, WorkloadShard(16, 48, window=(1, 0))) == [[kv, q, kv]] * 4


def test_chunks_that_cannot_be_meant_are_refused() -> None:
    prefill, x = create("ring-prefill", kernel="reference"), torch.randn(1, 8, 2, 4)
    for chunks, said in (
        ((5, 2), "kv_length=7 with 2 new tokens makes 7 keys per sequence on rank 0, which holds 8"),
        ((0, 8), re.escape("kv_chunks [0, 8] are no lengths")),
        ((4, 4), "kv_length=8 with 4 new tokens makes 4 queries per sequence on rank 0, which has 8"),
    ):
        with pytest.raises(Unsupported, match=said):
            prefill.attention(x, x, x, kv_chunks=chunks)
    with pytest.raises(Unsupported, match="are no lengths of chunks of kv_length=9 tokens"):
        prefill.attention(x, x, x, kv_chunks=(8,), kv_length=9)
    with pytest.raises(Unsupported, match="kv_chunks: dcp has token t on rank t mod N"):
        create("dcp", kernel="reference").attention(x, x, x, kv_chunks=(8,))


def shares(rank: int) -> list[list[int]]:
    dcp, prefill = create("dcp", dcp_degree=2), create("ring-prefill")
    # A cache of one key leaves the second rank of a group without any.
    for strategy, lengths in ((dcp, [(9, 1), (8, 1), (1, 1)]), (prefill, [(16, 8), (8, 8)])):
        for kv_length, new in lengths:
            assert strategy.key_count(kv_length, new) == len(strategy.key_positions(kv_length, new))
    return [
        dcp.key_positions(9, 1).tolist(),
        prefill.key_positions(16, 8).tolist(),
        prefill.query_positions(8).tolist(),
    ]


@pytest.mark.processes
def test_cached_key_positions_of_each_rank() -> None:
    positions = run_ranks(4, shares)
    # Groups of 2 neighbours; a cache that grows by one token grows by one key on one rank.
    assert [rank[0] for rank in positions] == [[0, 2, 4, 6, 8], [1, 3, 5, 7]] * 2
    # Two cached tokens a rank, then the new ones in zigzag.
    assert positions[1][1:] == [[2, 3, 9, 14], [1, 6]]


@pytest.mark.parametrize("name", ["dcp", "ring-prefill"])
def test_cache_shapes_need_no_list_of_positions(name: str) -> None:
    """A list of 2**50 positions fits in no memory: a dry run of a cache that is too large must still end."""
    assert create(name).local_shapes(Shape(1, 4, 8, 2, 8, 2**50))[1] == (1, 2**50, 2, 8)


@pytest.mark.parametrize(
    ("name", "shape", "size", "params", "reason"),
    [
        ("dcp", Shape(1, 1, 8, 2, 8, 100), 4, {"dcp_degree": 3}, "dcp_degree 3 does not divide the world size 4"),
        ("dcp", Shape(1, 1, 8, 1, 8, 100), 4, {"dcp_degree": 2}, "2 groups of 2 ranks cannot share out 1 kv heads"),
        ("dcp", Shape(1, 1, 6, 2, 8, 100), 4, {}, "4 ranks cannot share out 6 heads"),
        ("ring-prefill", Shape(1, 12, 8, 2, 8, 100), 4, {}, "needs a sequence divisible by 8: not 12"),
    ],
)
def test_unsupported_cache_is_refused_with_the_reason(name, shape, size, params, reason) -> None:
    assert reason in find(name).load().why_unsupported(shape, size, **params)


def error_with_inferred_length(rank: int, case: Case, problem: WorkloadShard, exact: Tensor) -> float:
    strategy = create(case.name, kernel="reference", **case.params)
    return float((attended(strategy, problem) - strategy.shard_output(exact)).abs().max())


@pytest.mark.processes
@pytest.mark.parametrize(
    ("case", "problem"),
    [
        (Case("dcp"), WorkloadShard(1, 32)),
        # 8 keys on one rank and 7 on the others: one query sees all of them, whatever their number.
        (Case("dcp"), WorkloadShard(1, 29)),
        (Case("dcp", {"dcp_degree": 2}), WorkloadShard(1, 29, causal=False)),
        # One rank has no key.
        (Case("dcp"), WorkloadShard(1, 3)),
        (Case("ring-prefill", {"passes": "kv"}), WorkloadShard(16, 48)),
        (Case("ring-prefill", {"passes": "q"}), WorkloadShard(16, 48, window=(6, 0))),
    ],
    ids=str,
)
def test_kv_length_is_optional_where_a_rank_can_infer_it(case: Case, problem: WorkloadShard) -> None:
    assert max(run_ranks(4, error_with_inferred_length, case, problem, dense(problem)[0])) < 1e-12


def refusals(rank: int, problem: WorkloadShard, case: Case, calls: list[tuple[Any, Any]]) -> list[str]:
    """Return the message of each call, whose options are those of rank 0 and those of rank 1; empty if it is right."""
    strategy = create(case.name, kernel="reference", **case.params)
    default = {"kv_length": problem.keys, "kv_chunks": None}
    return [refusal(attended, strategy, problem, **default | options[rank]) for options in calls]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("case", "problem", "calls", "expected"),
    [
        (
            Case("dcp"),
            WorkloadShard(2, 9),
            [
                ({}, {}),
                ({"kv_length": 8}, {"kv_length": 8}),
                ({}, {"kv_length": 10}),
                # With as many keys on rank 1 as with 9, where only its queries' positions change.
                ({}, {"kv_length": 8}),
                ({"softmax_scale": 0.3}, {"softmax_scale": 1.3}),
                ({"window_size": (4, 0)}, {}),
                ({"window_size": (4, 0), "prefix": 2}, {"window_size": (4, 0), "prefix": 1}),
                ({"softcap": 2.0}, {}),
                ({"sinks": torch.zeros(4, dtype=torch.float64)}, {}),
                ({"causal": False}, {}),
                ({}, {}),
            ],
            [
                "",
                "kv_length=8 with 2 new tokens makes 4 keys per sequence on rank 0, which holds 5",
                "kv_length=10 with 2 new tokens makes 5 keys per sequence on rank 1, which holds 4",
                "rank 0 for kv_length=9 (9 stripe), rank 1 for kv_length=8 (8 stripe)",
                "rank 0 for softmax_scale=0.3, rank 1 for softmax_scale=1.3",
                "rank 0 for window_size=(4, 0), rank 1 for window_size=(-1, -1)",
                "rank 0 for prefix=2, rank 1 for prefix=1",
                "rank 0 for softcap=2.0, rank 1 for softcap=0.0",
                "rank 0 for sinks=True, rank 1 for sinks=False",
                "rank 0 for causal=False, rank 1 for causal=True",
                "",
            ],
        ),
        (
            Case("ring-prefill"),
            WorkloadShard(8, 16),
            [({}, {}), ({"kv_length": 10}, {"kv_length": 10}), ({}, {"softmax_scale": 1.3}), ({}, {})],
            [
                "",
                "kv_length=10 with 8 new tokens makes 5 keys per sequence on rank 0, which holds 8",
                "rank 0 for softmax_scale=0.5, rank 1 for softmax_scale=1.3",
                "",
            ],
        ),
    ],
)
def test_ranks_whose_calls_differ_are_all_told_which_rank_does(case, problem, calls, expected) -> None:
    for messages in run_ranks(2, refusals, problem, case, calls):
        for message, part in zip(messages, expected, strict=True):
            assert (part in message) if part else not message, message


def phases(rank: int, cases: list[Case], problem: WorkloadShard) -> list[set[str]]:
    names_by_case = []
    for case in cases:
        strategy = create(case.name, kernel="reference", **case.params)
        names: set[str] = set()

        def listen(name: str, names: set[str] = names) -> AbstractContextManager[None]:
            names.add(name)
            return nullcontext()

        with redirect_annotations(listen):
            attended(strategy, problem, kv_length=problem.keys)
        names_by_case.append(names)
    return names_by_case


@pytest.mark.processes
def test_decode_and_prefill_use_the_ranges_of_training() -> None:
    """Reports find ring steps, sends and waits by these names."""
    merges = [f"fwd/step={step}/merge" for step in range(2)]
    blocks = [f"fwd/step={step}/block" for step in range(2)]
    (decode,) = run_ranks(2, phases, [Case("dcp")], WorkloadShard(1, 32))[0]
    waits = {"send", "wait", "wait-for-all"}
    assert decode - waits == {blocks[0], merges[1]}
    hops, queries = run_ranks(2, phases, PREFILL[:2], WorkloadShard(16, 48))[1]
    assert hops - waits == {*blocks, *merges}
    assert queries - waits == {*blocks, *merges, "fwd/step=2/merge"}
    assert all({"send", "wait"} <= names for names in (decode, hops, queries))


def test_invalid_decode_calls_are_refused() -> None:
    strategy = create("dcp", kernel="reference")
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 9, 2, 8)
    with pytest.raises(Unsupported, match="needs kv_length"):
        strategy.attention(q, k, k)
    # Of 29 keys on 4 ranks one has 8 and three have 7: each would take the query to be at another position.
    with pytest.raises(Unsupported, match="a window, attention needs kv_length"):
        strategy.attention(q[:, 1:], k, k, window_size=(4, 0))
    with pytest.raises(Unsupported, match="no backward pass"):
        strategy.attention(q.requires_grad_(), k, k, kv_length=9)
    with pytest.raises(Unsupported, match="expected q"):
        strategy.attention(q.detach(), k, k[:, 1:], kv_length=9)
    with pytest.raises(Unsupported, match="4 heads over 3 kv heads"):
        strategy.attention(q.detach(), torch.randn(1, 9, 3, 8), torch.randn(1, 9, 3, 8), kv_length=9)
    # Of 9 keys on one rank all are its own, in every call.
    strategy.attention(q.detach()[:, :1], k, k, kv_length=9)
    for length in (8, 10):
        with pytest.raises(Unsupported, match=f"kv_length={length} with 1 new tokens makes {length} keys"):
            strategy.attention(q.detach()[:, :1], k, k, kv_length=length)
    for lengths in ({"kv_length": torch.tensor([9, 7])}, {"kv_length": [9, 7]}):
        with pytest.raises(Unsupported, match="sequences of different lengths in a batch are not supported"):
            strategy.attention(q.detach(), k, k, **lengths)
    for name in ("cache_seqlens", "block_table"):
        with pytest.raises(Unsupported, match=f"{name}: all sequences of a batch have one kv_length"):
            strategy.attention(q.detach(), k, k, kv_length=9, **{name: torch.tensor([9, 7])})
    for options, said in (
        ({"prefix": 3}, "a prefix of 3"),
        ({"sinks": torch.ones(3)}, "one logit a head: (4,), not (3,)"),
    ):
        with pytest.raises(Unsupported, match=re.escape(said)):
            strategy.attention(q.detach(), k, k, kv_length=9, **options)
    assert not set(for_inference()) & set(names()), "those do not train"
