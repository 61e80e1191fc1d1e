"""The check of anybody's attention: what is right passes, and what is wrong is found, located and explained."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="checking needs torch")

import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # what a first backward pass imports: once, and not in every forked rank
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import ringprof
from ringprof.errors import RecordError, UsageError
from ringprof.proof.dense import compare_results
from ringprof.proof.on_ranks import hidden_profiler_lines
from ringprof.proof.result import Check, QueryAndKey, Seen, TensorCheck
from ringprof.ranks.process_group import GroupRanks
from ringprof.strategies import create
from ringprof.strategies.masks.layouts import LAYOUTS
from tests.strategies.ranks import run_ranks

SEQ, HEADS, KV_HEADS, HEAD_DIM = 64, 4, 2, 16
SHAPE: dict[str, Any] = {"seq": SEQ, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "dtype": "fp32",
                         "batch": 1, "extra_calls": False}  # fmt: skip
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def positions(layout: str, seq: int = SEQ) -> Tensor:
    return LAYOUTS[layout].positions(seq, dist.get_world_size(), dist.get_rank())


class _Gathered(torch.autograd.Function):
    """Every rank's piece, in one tensor; going back, the sum of what all ranks say of this rank's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        pieces = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, x.contiguous())
        return torch.cat(pieces, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].contiguous()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size(), 1)[dist.get_rank()]


def gathered(x: Tensor) -> Tensor:
    every: Tensor = _Gathered.apply(x)
    return every


def over_all(own: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """torch's dense attention on gathered keys, for queries at ``own`` positions; differentiable."""
    k, v = gathered(k), gathered(v)
    pieces = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, own)
    return on_one_device(q, k, v, own[:, None] >= torch.cat(pieces), **options)


def on_one_device(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True, **options)
    return out.transpose(1, 2)


# --- what is right ----------------------------------------------------------------------------


def right(rank: int, layout: str) -> list[Check]:
    own = torch.randperm(SEQ, generator=torch.Generator().manual_seed(1)).view(-1, SEQ // 2)[rank]
    own = own if layout == "positions" else positions(layout)
    layout_argument = own.tolist() if layout == "positions" else layout

    def turned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        return over_all(own, *(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2), None

    def like_a_model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return over_all(own, *(x.transpose(0, 1) for x in (q, k, v))).transpose(0, 1).flatten(2)

    return [
        ringprof.check(lambda q, k, v: over_all(own, q, k, v), layout_argument, **SHAPE),
        ringprof.check(turned, layout_argument, tensor_format="bhsd", **SHAPE),
        ringprof.check(like_a_model, layout_argument, tensor_format="sbhd", **SHAPE),
    ]


@pytest.mark.processes
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "stripe", "positions"])
def test_check_accepts_dense_attention_on_gathered_keys(layout: str) -> None:
    by_rank = run_ranks(2, right, layout)
    for check in by_rank[0]:
        assert check.equal and check.communicates and check.reasons == [] and check.layout == layout
        assert set(check.errors) == {"out", "dq", "dk", "dv"}
        assert all(error.rms < 2e-6 and error.first_token is None for error in check.errors.values())
        assert "\n  out " in str(check) and str(check).startswith("equal to dense attention over 64 tokens: 2 ranks")
    assert by_rank[0] == by_rank[1]


def bundled(rank: int, dtype: str) -> None:
    for name in ("zigzag", "stripe", "ulysses", "burst"):
        strategy = create(name)
        for causal in (True, False):
            check = ringprof.check(
                lambda q, k, v, strategy=strategy, causal=causal: strategy.attention(q, k, v, causal=causal),
                strategy.layout.name, causal=causal, **{**SHAPE, "batch": 2, "dtype": dtype, "extra_calls": True},
            )  # fmt: skip
            assert check.equal, str(check)


@pytest.mark.processes
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_check_accepts_bundled_strategies(dtype: str) -> None:
    run_ranks(4, bundled, dtype)


def in_a_group(rank: int) -> Check | str:
    group = dist.new_group([1, 3])
    if rank % 2 == 0:
        with pytest.raises(UsageError) as refused:
            ringprof.check(len, "zigzag", group=group)
        return str(refused.value)
    strategy = create("zigzag", group)
    return ringprof.check(strategy.attention, "zigzag", group=group, **SHAPE)


@pytest.mark.processes
def test_check_runs_on_the_ranks_of_a_group() -> None:
    outside, first, _, second = run_ranks(4, in_a_group)
    assert first == second and first.equal and first.ranks == 2
    assert outside == "rank 0 is not in the group: only its members may take part"


def test_check_without_torch_distributed_has_one_rank() -> None:
    check = ringprof.check(lambda q, k, v: on_one_device(q, k, v, None), "zigzag", causal=False, **SHAPE)
    assert check.equal and check.ranks == 1 and "one rank has nobody to send to" in str(check)
    assert f"{SHAPE['seq']} tokens: 1 rank, {SHAPE['seq']} tokens each" in str(check)


def test_sampled_keys_include_document_boundaries() -> None:
    """16 calls test 64 of 512 keys: every ninth, and those at the document boundary 101, which is not a ninth key."""
    own, other = torch.arange(512), (torch.arange(512) >= 101).int()
    mask = (own[:, None] >= own) & (other[:, None] == other)
    mask[300, 100] = True
    shape = {**SHAPE, "seq": 512, "head_dim": 4, "documents": (101, 411)}
    check = ringprof.check(lambda q, k, v: on_one_device(q, k, v, mask), "zigzag", **shape)
    leak = QueryAndKey(query=300, key=100, rank=0)
    assert check.seen and (check.seen.leaks, check.seen.first_leak) == (1, leak)


def check_of_output(error: Tensor, kernel_error: Tensor, exact: Tensor) -> TensorCheck:
    """The errors of an output on one rank in bf16; errors and exact values of each token."""
    wide = [x.double().view(1, -1, 1, 1).expand(1, -1, 2, 4) for x in (exact, exact + kernel_error, exact + error)]
    truth, kernel, results = ({"out": x} for x in wide)
    positions = torch.arange(len(exact))
    errors, _ = compare_results(results, truth, kernel, positions, torch.bfloat16, lambda name: 0, GroupRanks(None))
    return errors["out"]


def test_token_error_may_be_three_times_the_kernel_error() -> None:
    """One of 1024 tokens is off by a fifth: 0.2 / 32 over all, of which four times three would be allowed: 0.075."""
    kernel = torch.zeros(1024)
    kernel[700] = 0.2
    right, wrong = (check_of_output(times * kernel, kernel, torch.ones(1024)) for times in (2.9, 3.1))
    assert (right.wrong_tokens, right.first_token) == (0, None)
    assert (wrong.wrong_tokens, wrong.first_token) == (1, 700)
    assert right.equal and not wrong.equal


def test_small_token_may_have_the_error_of_a_mean_token() -> None:
    """The kernel is off by 0.002 everywhere, so 0.006 is allowed over all and 0.024 at a token of the mean size 1."""
    exact, error = torch.ones(1024), torch.zeros(1024)
    exact[0] = 1e-6
    error[0] = 0.02
    assert check_of_output(error, torch.full((1024,), 0.002), exact).equal
    error[0] = 0.03
    assert check_of_output(error, torch.full((1024,), 0.002), exact).first_token == 0


def test_nan_tokens_are_wrong() -> None:
    error = torch.zeros(64)
    error[20] = torch.nan
    check = check_of_output(error, torch.full((64,), 0.002), torch.ones(64))
    assert (check.wrong_tokens, check.first_token, check.equal) == (1, 20, False)


# --- the calls beside the equal ones ------------------------------------------------------------

EXTRA: dict[str, Any] = {**SHAPE, "dtype": "bf16", "extra_calls": True}


def dense(q: Tensor, k: Tensor, v: Tensor, change: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """Causal attention on one device whose scores ``change`` sees."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = change(torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * q.shape[-1] ** -0.5)
    scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.float()).to(q.dtype)


def test_default_sizes_have_several_batch_entries_and_grouped_heads() -> None:
    check = ringprof.check(dense, "zigzag", seq=16, head_dim=8)
    work = check.workload
    assert (work.batch, work.heads, work.kv_heads) == (2, 8, 2)
    assert check.equal and check.calls == 5 and check.skipped == [], str(check)
    assert ringprof.check(dense, "zigzag", seq=16, head_dim=8, heads=4, extra_calls=False).workload.kv_heads == 4


def test_a_softmax_without_its_maximum_is_found_by_large_scores() -> None:
    def without_maximum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
        weights = (torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * q.shape[-1] ** -0.5).exp().tril()
        return torch.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdim=True), v.float()).to(q.dtype)

    check = ringprof.check(without_maximum, "zigzag", **EXTRA)
    assert not check.equal and (check.call, check.variant) == (4, "queries times 32")
    assert "call 4 of 5 (queries times 32), relative root-mean-square errors" in str(check)
    assert "above 88.7, from which exp() overflows fp32: the row's maximum is not subtracted" in check.reasons[-1]
    assert ringprof.check(without_maximum, "zigzag", **{**EXTRA, "extra_calls": False}).equal


def test_scores_rounded_to_bf16_are_found_in_fp32_alone() -> None:
    check = ringprof.check(lambda q, k, v: dense(q, k, v, lambda x: x.bfloat16().float()), "zigzag", **EXTRA)
    assert not check.equal and (check.call, check.variant) == (5, "fp32")
    assert 1e-4 < check.errors["out"].rms < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_attention_that_rounds_its_inputs_is_not_compared_in_fp32(dtype: torch.dtype) -> None:
    check = ringprof.check(lambda q, k, v: dense(*(x.to(dtype) for x in (q, k, v))).to(q.dtype), "zigzag", **EXTRA)
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    assert check.equal and check.calls == 4
    assert check.skipped == [f"call 5 of the attention, in fp32: it rounds q, k and v to {name}"]


def test_an_attention_that_refuses_fp32_is_told_so() -> None:
    def half_only(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.dtype == torch.float32:
            raise ValueError("half types only")
        return dense(q, k, v)

    check = ringprof.check(half_only, "zigzag", **EXTRA)
    assert check.equal and check.calls == 4
    assert "skipped: call 5 of the attention, in fp32: ValueError: half types only" in str(check)


def test_an_attention_that_fails_with_default_sizes_is_told_how_to_ask_for_less() -> None:
    with pytest.raises(
        RecordError, match=r"batch 2, 8 heads \(2 kv\) of 64, bf16; try batch=1, kv_heads=8, dtype='fp32'\): "
    ):
        ringprof.check(lambda q, k, v: torch.cat([q, k], 3), "zigzag")


def test_lines_of_the_profiler_are_hidden_and_others_are_not(capfd: pytest.CaptureFixture[str]) -> None:
    with hidden_profiler_lines():
        os.write(2, b"USDT:2026-01-01 profiler_start\nkept\n")
    ringprof.check(dense, "zigzag", **SHAPE)
    assert capfd.readouterr().err == "kept\n"


# --- what is sent -----------------------------------------------------------------------------


def forward_only(rank: int) -> Check:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pieces = [[torch.empty_like(x) for _ in range(2)] for x in (k, v)]
        for into, x in zip(pieces, (k, v), strict=True):
            dist.all_gather(into, x)
        return on_one_device(q, torch.cat(pieces[0], 1), torch.cat(pieces[1], 1), None)

    return ringprof.check(attention, "contiguous", causal=False, backward=False, **SHAPE)


@pytest.mark.processes
def test_check_counts_bytes_passed_to_collectives() -> None:
    """K and V of 32 tokens, 2 heads of 16 numbers of 4 bytes."""
    check = run_ranks(2, forward_only)[0]
    assert check.equal and set(check.errors) == {"out"} and check.sent is not None
    assert [rank.size_bytes for rank in check.sent] == [2 * 32 * 2 * 16 * 4] * 2
    assert check.sent[0].operations == {"allgather": 2}


def hops(rank: int) -> tuple[Check, int]:
    strategy = create("zigzag")
    check = ringprof.check(strategy.attention, "zigzag", **SHAPE)
    strategy.comm.meter.clear()
    q, k, v = (torch.randn(1, SEQ // 4, heads, HEAD_DIM).requires_grad_() for heads in (HEADS, KV_HEADS, KV_HEADS))
    strategy.attention(q, k, v).sum().backward()
    return check, sum(size for _, size in strategy.comm.meter.sent.values())


@pytest.mark.processes
def test_check_counts_the_bytes_that_the_strategy_counts() -> None:
    check, counted = run_ranks(4, hops)[0]
    assert check.sent is not None and check.sent[0].size_bytes == counted > 0


# --- what is wrong ----------------------------------------------------------------------------


def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return on_one_device(q, k, v, torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril())


def zigzag(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return over_all(positions("zigzag"), q, k, v, **options)


def by_rank(q: Tensor, k: Tensor, v: Tensor) -> tuple[list[Tensor], Tensor]:
    """The outputs over each rank's keys alone, and of which rows these keys are seen at all (N, B, S, 1, 1)."""
    every = (gathered(x).chunk(2, 1) for x in (k, v))
    outs, own = [], positions("zigzag")
    seen = [own[:, None] >= _positions_of(rank) for rank in range(2)]
    for k_part, v_part, mask in zip(*every, seen, strict=True):
        outs.append(on_one_device(q, k_part, v_part, mask | ~mask.any(1, keepdim=True)))
    return outs, torch.stack([mask.any(1) for mask in seen])[:, None, :, None, None]


def averaged_over_ranks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    outs, seen = by_rank(q, k, v)
    return (outs[0] * seen[0] + outs[1] * seen[1]) / seen.sum(0)


def one_further(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    every = torch.cat([_positions_of(rank) for rank in range(2)])
    return on_one_device(q, gathered(k), gathered(v), positions("zigzag")[:, None] + 1 >= every)


def own_gradients(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Gather as ``dist.all_gather`` outside autograd does, with this rank's own piece put back."""

    def every(x: Tensor) -> Tensor:
        pieces = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, x.detach())
        pieces[dist.get_rank()] = x
        return torch.cat(pieces, 1)

    own = positions("zigzag")
    keys = torch.cat([LAYOUTS["zigzag"].positions(SEQ, 2, rank) for rank in range(2)])
    return on_one_device(q, every(k), every(v), own[:, None] >= keys)


def averaged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    for x in (k, v):
        x.register_hook(lambda gradient: gradient / 2)
    return zigzag(q, k, v)


def merged_by_maximum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (gathered(x).repeat_interleave(HEADS // KV_HEADS, 2) for x in (k, v))
    every = torch.cat([_positions_of(rank) for rank in range(2)])
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * HEAD_DIM**-0.5
    scores = scores.masked_fill(positions("zigzag")[:, None] < every, -torch.inf)
    lses = torch.stack([part.logsumexp(-1) for part in scores.chunk(2, -1)])
    return torch.einsum("bhqk,bkhd->bqhd", (scores - lses.amax(0)[..., None]).exp(), v.float()).to(q.dtype)


def not_rescaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Merge hops under a running maximum that rescales the sum of weights, but not the sum of outputs."""
    k, v = (gathered(x).repeat_interleave(HEADS // KV_HEADS, 2) for x in (k, v))
    every = torch.cat([_positions_of(rank) for rank in range(2)])
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * HEAD_DIM**-0.5
    parts = scores.masked_fill(positions("zigzag")[:, None] < every, -torch.inf).chunk(2, -1)
    maximum = parts[dist.get_rank()].amax(-1, keepdim=True)
    out, total = torch.zeros(()), torch.zeros(())
    for rank in (dist.get_rank(), 1 - dist.get_rank()):
        before, maximum = maximum, torch.maximum(maximum, parts[rank].amax(-1, keepdim=True))
        weights = (parts[rank] - maximum).exp()
        total = total * (before - maximum).exp() + weights.sum(-1, keepdim=True)
        out = out + torch.einsum("bhqk,bkhd->bhqd", weights, v.float().chunk(2, 1)[rank])
    return (out / total).transpose(1, 2).to(q.dtype)


def gradients_one_hop_too_far(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def exchanged(gradient: Tensor) -> Tensor:
        pieces = [torch.empty_like(gradient) for _ in range(2)]
        dist.all_gather(pieces, gradient.contiguous())
        return pieces[1 - dist.get_rank()]

    k.register_hook(exchanged)
    return zigzag(q, k, v)


def off_on_rank_1(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = zigzag(q, k, v)
    # Rank 0 waits for this rank in its backward pass all the same.
    return alone(q, k, v) + 0 * out if dist.get_rank() == 1 else out


ALONE = "out equals attention over the rank's own tokens alone: context parallelism is off, or sends in vain"
OUTPUT = {"out", "dq", "dk", "dv"}
WRONG: list[tuple[Attention, set[str], str]] = [
    (alone, OUTPUT, ALONE),
    (lambda q, k, v: zigzag(q, k, v, scale=1.0), OUTPUT, "out equals attention with softmax_scale 1"),
    (lambda q, k, v: over_all(positions("contiguous"), q, k, v), OUTPUT,
     "out equals attention under the causal mask of the contiguous layout: the positions are not the tokens'"),
    (lambda q, k, v: on_one_device(q, gathered(k), gathered(v), None), OUTPUT,
     "out equals attention without the causal mask"),
    (lambda q, k, v: zigzag(q, *(x.repeat(1, 1, HEADS // KV_HEADS, 1) for x in (k, v))), OUTPUT,
     "out equals attention in which query head h uses kv head h mod kv_heads"),
    (one_further, OUTPUT, "queries see as if at other positions: +1 on rank 0, +1 on rank 1"),
    (lambda q, k, v: zigzag(q, k, v, scale=1.1 * HEAD_DIM**-0.5), OUTPUT,
     "scores are multiplied with 0.275, not 0.25 (softmax_scale)"),
    (lambda q, k, v: zigzag(q, *(x[:, :, :1].expand_as(x) for x in (k, v))), OUTPUT,
     "query heads use kv heads 0, 0, 0, 0, not 0, 0, 1, 1"),
    (lambda q, k, v: zigzag(q, k, v).flip(2), OUTPUT, "the output's heads are those of query heads 3, 2, 1, 0"),
    (lambda q, k, v: sum(out * seen for out, seen in zip(*by_rank(q, k, v), strict=True)), OUTPUT,
     "the ranks' partial outputs are added as they are, not weighted by their LSE"),
    (averaged_over_ranks, OUTPUT, "the ranks' partial outputs are averaged, not weighted by their LSE"),
    (lambda q, k, v: zigzag(q, k.detach(), v), {"dk"}, "dk is 0: no gradient reaches k"),
    (own_gradients, {"dk", "dv"}, "dk is what a rank's own queries give: other ranks' part is missing"),
    (averaged, {"dk", "dv"}, "dk is the right one times 0.5 (1 / ranks or 1 / query heads per kv head)"),
    (merged_by_maximum, OUTPUT,
     "partial outputs are merged with the maximum of the ranks' LSEs, not with the LSE of all"),
    (not_rescaled, OUTPUT,
     "the ranks' partial outputs are not rescaled when a later one has a larger score: each keeps the running maximum"
     " of its own hop"),
    (gradients_one_hop_too_far, {"dk"}, "dk is that of the tokens of the next rank"),
    (off_on_rank_1, OUTPUT, f"{ALONE} (on rank 1)"),
]  # fmt: skip


def with_gradients(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Attention:
    """Right attention on one device whose dk and dv are those that ``change`` returns of the right ones."""

    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return k.clone(), v.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
            return change(*gradients)

    return lambda q, k, v: dense(q, *Changed.apply(k, v))


def without_delta(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The gradient of a divisor that is a constant for autograd lacks delta."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * HEAD_DIM**-0.5
    scores = scores.masked_fill(~torch.ones(SEQ, SEQ, dtype=torch.bool).tril(), -torch.inf)
    weights = (scores - scores.detach().logsumexp(-1, keepdim=True)).exp()
    return torch.einsum("bhqk,bkhd->bqhd", weights, v.float()).to(q.dtype)


class Unzeroed:
    """Keep the sums of all gradients so far, as a buffer that nothing sets to 0."""

    def __init__(self) -> None:
        self.sums: list[Tensor] = []

    def __call__(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        self.sums = [x + y for x, y in zip(self.sums, (dk, dv), strict=True)] if self.sums else [dk, dv]
        return self.sums[0].clone(), self.sums[1].clone()


def second_entry_unmasked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(2, 1, SEQ, SEQ, dtype=torch.bool)
    mask[0] = mask[0].tril()
    return on_one_device(q, k, v, mask)


def keys_of_the_first_entry(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return dense(q, k[:1].expand_as(k), v[:1].expand_as(v))


def only_first_query_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    wide_k, wide_v = (x.repeat_interleave(2, 2).clone() for x in (k, v))
    for head in (1, 3):
        wide_k[:, :, head] = wide_k[:, :, head].detach()
    return on_one_device(q, wide_k, wide_v, torch.ones(SEQ, SEQ, dtype=torch.bool).tril())


DELTA = "leaves out delta, the row sums of dout times out"
WRONG_ON_ONE_RANK: list[tuple[Callable[[], Attention], list[str]]] = [
    (lambda: with_gradients(lambda dk, dv: (dk.clamp(-0.5, 0.5), dv)), ["dk is clipped at 0.5"]),
    (lambda: with_gradients(lambda dk, dv: (dk + dv, dv)), ["dk is the sum of dk and dv"]),
    (lambda: with_gradients(lambda dk, dv: (dv, dk)),
     ["dk is dv: they are swapped", "dv is dk: they are swapped"]),
    (lambda: with_gradients(lambda dk, dv: (dk.sum(0, keepdim=True).expand_as(dk), dv)),
     ["dk is the sum over all batch entries"]),
    (lambda: with_gradients(Unzeroed()),
     [f"{name} has those of all earlier calls added: a buffer is not set to 0" for name in ("dk", "dv")]),
    (lambda: with_gradients(lambda dk, dv: (4 * dk, dv)), ["dk is the right one times 4 (1 / softmax_scale)"]),
    (lambda: without_delta, [f"dq {DELTA}", f"dk {DELTA}"]),
    (lambda: second_entry_unmasked,
     ["batch entry 1 is wrong and entry 0 is right: out equals attention without the causal mask"]),
    (lambda: keys_of_the_first_entry, ["out uses k and v of batch entry 0 for all entries"]),
    (lambda: only_first_query_head, ["dk of kv head 0 sums query heads 0, not 0, 1"]),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("attention", "reasons"), WRONG_ON_ONE_RANK, ids=[str(x[1][0]) for x in WRONG_ON_ONE_RANK])
def test_a_mistake_that_needs_no_other_rank_is_named(
    attention: Callable[[], Attention], reasons: list[str], dtype: str
) -> None:
    check = ringprof.check(attention(), "zigzag", **{**SHAPE, "batch": 2, "dtype": dtype})
    assert not check.equal and check.reasons == reasons, str(check)


def test_one_missing_pair_is_named_by_its_place_alone() -> None:
    """The rest of the output is right times about 1, which explains nothing."""
    mask = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
    mask[50, 3] = False
    check = ringprof.check(lambda q, k, v: on_one_device(q, k, v, mask), "zigzag", **SHAPE)
    assert not check.equal and check.reasons == []
    assert check.seen and check.seen.first_missing == QueryAndKey(query=50, key=3, rank=0)


def rounded_lse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * HEAD_DIM**-0.5
    scores = scores.masked_fill(~torch.ones(SEQ, SEQ, dtype=torch.bool).tril(), -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True).bfloat16().float()
    return torch.einsum("bhqk,bkhd->bqhd", (scores - lse).exp(), v)


LOST_DIGITS: list[tuple[Attention, str]] = [
    (
        lambda q, k, v: dense(q, k, v).bfloat16().to(q.dtype),
        "out has the digits of bf16 alone: it is summed up, sent or",
    ),
    (lambda q, k, v: dense(q, k, v, lambda x: x.half().float()), "out equals attention with scores rounded to fp16"),
    (rounded_lse, "each query's out is right times a factor from 0.98"),
]


@pytest.mark.parametrize(("attention", "reason"), LOST_DIGITS, ids=lambda value: value if type(value) is str else "")
def test_digits_that_are_lost_in_fp32_are_named(attention: Attention, reason: str) -> None:
    check = ringprof.check(attention, "zigzag", **SHAPE)
    assert not check.equal and check.reasons[0].startswith(reason), str(check)


def checked(rank: int, attention: Attention, options: dict[str, Any]) -> Check:
    return ringprof.check(attention, "zigzag", **{**SHAPE, **options})


@pytest.mark.processes
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("attention", "wrong", "reason"), WRONG, ids=lambda value: value if type(value) is str else "")
def test_check_finds_and_explains_known_mistakes(
    attention: Attention, wrong: set[str], reason: str, dtype: str
) -> None:
    check = run_ranks(2, checked, attention, {"dtype": dtype})[0]
    assert not check.equal and check.call == 1
    assert {name for name, error in check.errors.items() if not error.equal} == wrong
    assert check.reasons[0] == reason and f"why: {reason}" in str(check)


def test_an_output_in_a_buffer_of_the_next_call_is_not_equal() -> None:
    """Each call is right when it returns, and wrong as soon as the next one begins."""
    buffers: dict[Any, Tensor] = {}

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = on_one_device(q, k, v, None)
        buffer = buffers.setdefault((out.shape, out.dtype), torch.empty_like(out))
        return buffer.copy_(out.detach())

    check = ringprof.check(attention, "contiguous", seq=192, causal=False, backward=False)
    assert not check.equal and check.reasons[0].startswith("out differs between two calls with the same tensors")


@pytest.mark.processes
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_dropout_is_detected_by_differing_calls(dtype: str) -> None:
    check = run_ranks(2, checked, lambda *qkv: zigzag(*qkv, dropout_p=0.1), {"dtype": dtype})[0]
    assert not check.equal and check.seen is None
    assert check.reasons[0].startswith("out differs between two calls with the same tensors, by 0.")


def one_pair(rank: int, layout: str, query: int, key: int) -> Check:
    """A query that sees one key which it must not, or does not see one that it must."""
    own = positions(layout, 512)
    every = torch.cat([LAYOUTS[layout].positions(512, 2, other) for other in range(2)])
    mask = own[:, None] >= every
    mask ^= (own == query)[:, None] & (every == key)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return on_one_device(q, gathered(k), gathered(v), mask)

    return ringprof.check(attention, layout, **{**SHAPE, "seq": 512, "head_dim": 64, "dtype": "bf16"})


@pytest.mark.processes
@pytest.mark.parametrize(("query", "key", "rank"), [(500, 3, 0), (300, 301, 1), (511, 0, 0)])
def test_single_wrong_pair_is_found_below_rounding(query: int, key: int, rank: int) -> None:
    check = run_ranks(2, one_pair, "zigzag", query, key)[0]
    wrong = QueryAndKey(query=query, key=key, rank=rank)
    leaks = key > query
    assert check.seen == Seen(
        pairs=512 * 512, of=512 * 512, leaks=int(leaks), first_leak=wrong if leaks else None,
        missing=int(not leaks), first_missing=None if leaks else wrong,
    )  # fmt: skip
    assert not check.equal and str(check).startswith("NOT EQUAL")
    assert f"(the first: token {query} on rank {rank}, key {key})" in str(check)


@pytest.mark.processes
def test_long_sequence_samples_keys_and_reports_the_share() -> None:
    """16 calls test one key per number of a 16-wide head, so 256 keys: every fourth, and the last."""
    check = run_ranks(2, checked, alone, {"seq": 1000, "backward": False})[0]
    assert check.seen and (check.seen.pairs, check.seen.of) == (251 * 1000, 10**6)
    assert "of 251000 pairs of a query and a key (25.1 % of all) " in str(check)


@pytest.mark.processes
def test_first_wrong_token_is_the_first_that_needs_remote_keys() -> None:
    """Zigzag on 2 ranks: 0 holds 0-15 and 48-63, 1 the rest; 16 is the first token that needs the other rank's keys."""
    check = run_ranks(2, checked, alone, {})[0]
    assert (check.errors["out"].first_token, check.errors["out"].first_rank) == (16, 1)
    assert check.errors["out"].wrong_tokens == 48 and check.communicates is False
    assert "sent: nothing, by torch.distributed, in a call" in str(check)


class Later:
    """Right until a call: then something is done to the output."""

    def __init__(self, call: int, change: Callable[[Tensor], Tensor]) -> None:
        self.call, self.change, self.calls = call, change, 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.calls += 1
        out = over_all(positions("zigzag", 2 * q.shape[1]), q, k, v)
        return self.change(out) if self.calls >= self.call else out


def stale(rank: int) -> Check:
    kept: list[Tensor] = []

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept.append(k)
        return over_all(positions("zigzag"), q, kept[0], v)

    return ringprof.check(attention, "zigzag", **SHAPE)


@pytest.mark.processes
def test_stale_state_of_an_earlier_call_is_detected() -> None:
    """Keys of the first call in all: right as long as the numbers are the same."""
    check = run_ranks(2, stale)[0]
    assert not check.equal and check.call == 2 and "call 2 of 3 (another call between its passes)" in str(check)
    assert check.reasons == ["out uses k of call 1, left in a buffer"]


def one_token(rank: int) -> Check:
    def change(out: Tensor) -> Tensor:
        last = (positions("zigzag", 1024) == 1023).float()[:, None, None]
        return out * (1 - 0.3 * last.to(out.dtype))

    shape = {**SHAPE, "seq": 1024, "dtype": "bf16"}
    return ringprof.check(Later(1, change), "zigzag", backward=False, calls=1, **shape)


@pytest.mark.processes
def test_single_wrong_token_is_found_below_the_mean_error() -> None:
    error = run_ranks(2, one_token)[0].errors["out"]
    assert error.rms <= error.allowed_rms and not error.equal
    assert (error.wrong_tokens, error.first_token, error.first_rank) == (1, 1023, 0)


def not_finite(rank: int) -> Check:
    def change(out: Tensor) -> Tensor:
        token_20 = (positions("zigzag") == 20)[:, None, None].expand_as(out)
        return out.masked_fill(token_20, float("nan"))

    return ringprof.check(Later(3, change), "zigzag", backward=False, **SHAPE)


@pytest.mark.processes
def test_non_finite_output_is_wrong() -> None:
    check = run_ranks(2, not_finite)[0]
    error = check.errors["out"]
    assert not check.equal and check.call == 3
    assert (error.rank, error.wrong_tokens, error.first_token) == (1, 1, 20)
    assert check.reasons == ["out is not finite at 1 of 64 tokens, the first is token 20 on rank 1"]
    assert str(check).splitlines()[3].split()[:3] == ["out", "not", "finite"]


def whole(rank: int) -> Check:
    return ringprof.check(lambda q, k, v: gathered(q), "zigzag", **SHAPE)


@pytest.mark.processes
def test_output_of_the_whole_sequence_is_explained() -> None:
    check = run_ranks(2, whole)[0]
    assert not check.equal and check.errors == {}
    assert check.reasons == [
        "on rank 0 the output is (1, 64, 4, 16), and q (1, 32, 4, 16): the whole sequence on every rank, not the rank's"
        " own tokens"
    ]


@pytest.mark.processes
def test_output_without_gradient_is_wrong_in_all_gradients() -> None:
    check = run_ranks(2, checked, lambda *qkv: zigzag(*qkv).detach(), {})[0]
    assert check.reasons == [f"d{x} is 0: no gradient reaches {x}" for x in "qkv"]


# --- what fails -------------------------------------------------------------------------------


def failing(rank: int, dtype: torch.dtype, options: dict[str, Any]) -> str:
    """Return the error of an attention that fails on rank 1 with inputs of a type."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if rank == 1 and q.dtype == dtype:
            raise ValueError("boom")
        return zigzag(q, k, v) if q.dtype != dtype else alone(q, k, v)

    with pytest.raises(RecordError) as failed:
        ringprof.check(attention, "zigzag", **options)
    return str(failed.value)


@pytest.mark.processes
@pytest.mark.parametrize(("dtype", "options", "where"), [
    (torch.float32, SHAPE, "call 1 of the attention"), (torch.float32, EXTRA, "call 5 of the attention, in fp32")
])  # fmt: skip
def test_error_on_one_rank_is_raised_on_all(dtype: torch.dtype, options: dict[str, Any], where: str) -> None:
    """A call in fp32 may be refused by all ranks alone."""
    assert run_ranks(2, failing, dtype, options) == [f"rank 1 failed in {where}: ValueError: boom"] * 2


def hanging(rank: int) -> str:
    store: Any = dist.distributed_c10d._get_default_store()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if rank == 1:
            store.wait(["enough"])
            raise ValueError("too late")
        return alone(q, k, v)

    with pytest.raises(RecordError) as failed:
        ringprof.check(attention, "zigzag", time_limit=0.3, **SHAPE)
    store.set("enough", "")
    return str(failed.value)


@pytest.mark.processes
def test_hanging_rank_is_named() -> None:
    said = run_ranks(2, hanging)[0]
    assert said.startswith("rank 1 did not come back from call 1 of the attention within 0.3 s of rank 0: it hangs, or")


# --- what is refused --------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"layout": "zagzig"}, "layout 'zagzig' is not one of contiguous, zigzag, stripe"),
    ({"seq": 66}, "the zigzag layout on 2 ranks needs a sequence divisible by 4: not 66"),
    ({"seq": 16384}, "a check of 16384 tokens: at most 8192"),
    ({"heads": 3}, "3 heads are not a multiple of 2 kv heads"),
    ({"dtype": torch.float64}, "dtype 'torch.float64' is not one of bf16, fp16, fp32"),
    ({"tensor_format": "thd"}, "tensor_format 'thd' is not one of bshd, bhsd, sbhd"),
    ({"calls": 0}, "calls must be at least 1, not 0"),
    ({"layout": [0, 1, 2]}, "each once: 0 is not"),
    ({"documents": (5, 4)}, "the documents are 9 tokens together, the sequence has 64"),
]  # fmt: skip


def refused(rank: int) -> None:
    for options, line in REFUSED:
        arguments = {"layout": "zigzag", **SHAPE, **options}
        with pytest.raises(UsageError, match=line):
            ringprof.check(alone, **arguments)
    with pytest.raises(UsageError, match="as many tokens as the others: not 1, 2"):
        ringprof.check(alone, list(range(rank + 1)))
    with pytest.raises(UsageError, match="the ranks do not ask for the same check"):
        ringprof.check(alone, "zigzag", heads=4 + rank)
    with pytest.raises(UsageError, match="the attention returned NoneType, not a tensor"):
        ringprof.check(lambda q, k, v: None, "zigzag")


@pytest.mark.processes
def test_invalid_check_arguments_are_refused_on_all_ranks() -> None:
    run_ranks(2, refused)


# --- packed documents -------------------------------------------------------------------------

LENGTHS = (5, 40, 19)


def packed(rank: int) -> list[Check]:
    own = positions("zigzag")
    document = torch.bucketize(torch.arange(SEQ), torch.tensor(LENGTHS).cumsum(0), right=True)
    strategy = create("zigzag", documents_layout="packed")
    arguments: dict[str, Any] = {"documents": LENGTHS, **SHAPE}

    def heeding(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        assert cu_seqlens.tolist() == [0, 5, 45, 64] and cu_seqlens.dtype == torch.int32
        out: Tensor = strategy.attention(q, k, v, documents=cu_seqlens)
        return out

    def one_key_too_many(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The last document sees the last key of the one before."""
        every = torch.cat([_positions_of(rank) for rank in range(2)])
        mask = (own[:, None] >= every) & (document[own][:, None] == document[every])
        mask |= (document[own][:, None] == 2) & (every == 44)
        return on_one_device(q, gathered(k), gathered(v), mask)

    def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = strategy.attention(q, k, v, window_size=(8, 0))
        return out

    return [
        ringprof.check(heeding, "zigzag", **arguments),
        ringprof.check(zigzag, "zigzag", **arguments),
        ringprof.check(one_key_too_many, "zigzag", **arguments),
        ringprof.check(windowed, "zigzag", window_size=9, **SHAPE),
        ringprof.check(zigzag, "zigzag", window_size=9, **SHAPE),
    ]


def _positions_of(rank: int) -> Tensor:
    return LAYOUTS["zigzag"].positions(SEQ, 2, rank)


@pytest.mark.processes
def test_leaks_across_documents_are_found_and_named() -> None:
    heeding, leaking, one_key, windowed, unwindowed = run_ranks(2, packed)[0]
    assert heeding.equal, str(heeding)
    assert "causal, 3 documents of 5 to 40 tokens" in str(heeding)
    assert not leaking.equal and leaking.errors["out"].first_token == 5
    assert leaking.reasons == ["out equals attention across documents: where they end is not told, or not heeded"]
    assert not one_key.equal and one_key.errors["out"].first_token == 45
    assert windowed.equal, str(windowed)
    assert unwindowed.reasons == ["out equals attention without the window"]
