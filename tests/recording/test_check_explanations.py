"""Mistakes that are easily explained wrongly, or missed: each is named from the weights or results that it gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="checking needs torch")

import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # what a first backward pass imports: once, and not in every forked rank
from torch import Tensor
from torch.nn.functional import pad

import ringprof
from ringprof.proof.result import Check
from ringprof.strategies.masks.layouts import LAYOUTS
from tests.strategies.ranks import run_ranks

SEQ, HEADS = 64, 4
SHAPE: dict[str, Any] = {"seq": SEQ, "heads": HEADS, "kv_heads": 2, "head_dim": 16}
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention(
    scores_of: Callable[[Tensor, Tensor], Tensor] = lambda scores, shown: scores.masked_fill(~shown, -torch.inf),
    weights_of: Callable[[Tensor], Tensor] = lambda scores: scores.softmax(-1),
    shown_of: Callable[[Tensor, Tensor], Tensor] = lambda query, key: query >= key,
    inputs_of: Callable[..., tuple[Tensor, Tensor, Tensor]] = lambda q, k, v: (q, k, v),
    after: Callable[[Tensor, Tensor], Tensor] = lambda weights, shown: weights,
) -> Attention:
    """Attention on one device; its scores, weights, mask and inputs are those that the functions return."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = inputs_of(q, k, v)
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        shown = shown_of(torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1]))
        scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * q.shape[-1] ** -0.5
        weights = after(weights_of(scores_of(scores, shown)), shown)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v.float()).to(q.dtype)

    return run


def changed(change: Callable[[Tensor], Tensor]) -> Attention:
    return attention(lambda scores, shown: change(scores).masked_fill(~shown, -torch.inf))


def with_one_more(score: float) -> Attention:
    return attention(weights_of=lambda scores: pad(scores, (0, 1), value=score).softmax(-1)[..., :-1])


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
DISTANCE = (torch.arange(SEQ)[:, None] - torch.arange(SEQ)).float()
HIDDEN = "keys that the mask hides have a score of "
ON_ONE_RANK: list[tuple[str, Attention, dict[str, Any], list[str]]] = [
    ("softcap, large scores", changed(lambda x: 50 * (x / 50).tanh()), {},
     ["out equals attention whose scores are capped, 50 * tanh(score / 50)"]),
    ("softcap", changed(lambda x: 5 * (x / 5).tanh()), {},
     ["out equals attention whose scores are capped, 5 * tanh(score / 5)"]),
    ("clamp, large scores", changed(lambda x: x.clamp(-20, 20)), {},
     ["out equals attention whose scores are clamped to ±20, or are clamped to at most 20"]),
    ("clamp", changed(lambda x: x.clamp(-1, 1)), {}, ["out equals attention whose scores are clamped to ±1"]),
    ("hidden -30", attention(lambda x, shown: x.masked_fill(~shown, -30.0)), {},
     [f"{HIDDEN}-30, not of minus infinity"]),
    ("hidden -10", attention(lambda x, shown: x.masked_fill(~shown, -10.0)), {},
     [f"{HIDDEN}-10, not of minus infinity"]),
    ("hidden 0", attention(lambda x, shown: x * shown), {}, [f"{HIDDEN}0, not of minus infinity"]),
    ("hidden lowered", attention(lambda x, shown: x - 8.0 * ~shown), {},
     ["the mask adds -8 to the scores of the keys that it hides, not minus infinity"]),
    ("hidden after the softmax", attention(lambda x, shown: x, after=torch.mul), {},
     ["weights sum to less than 1: the softmax is over all keys, and the mask hides keys after it"]),
    ("one added in the divisor", with_one_more(0.0), {},
     ["weights sum to less than 1, as with 1 more key of score 0 for every query"]),
    ("sink", with_one_more(1.7), {},
     ["weights sum to less than 1, as with one more key for every query, an attention sink of score 1.7"]),
    ("bias", changed(lambda x: x - SLOPES[:, None, None] * DISTANCE), {},
     ["scores have the distance from the key to the query added, times -0.5 to -0.0625, as with ALiBi"]),
    ("largest scores alone", changed(lambda x: x.masked_fill((x < x.median()) & (DISTANCE > 0), -torch.inf)), {}, []),
    ("last keys", attention(shown_of=lambda q, k: (q >= k) & (k < 50)), {}, ["no query sees keys 50 to 63"]),
    ("last keys of all", attention(shown_of=lambda q, k: (q >= -1) & (k < 50)), {"causal": False},
     ["no query sees keys 50 to 63"]),
    ("blocks", attention(shown_of=lambda q, k: q // 8 >= k // 8), {},
     ["all queries of each block of 8 tokens see the keys that its last query should see"]),
    ("normalized", attention(inputs_of=lambda q, k, v: (
        *(x / x.square().mean(3, keepdim=True).sqrt() for x in (q, k)), v)), {},
     ["out equals attention with q and k normalized per head"]),
    ("v is k", attention(inputs_of=lambda q, k, v: (q, k, k)), {}, ["out uses k in the place of v"]),
    ("other entry", attention(inputs_of=lambda q, k, v: (q, k.flip(0), v.flip(0))), {"batch": 2},
     ["out uses k and v of the batch entries in reverse order"]),
    ("tokens reversed", attention(inputs_of=lambda q, k, v: (q, k, v), after=lambda w, shown: w.flip(2)), {},
     ["out has its tokens in another order: at token 0 is that of token 63"]),
    ("tokens one behind", attention(inputs_of=lambda q, k, v: (q.roll(1, 1), k, v),
                                    shown_of=lambda q, k: (q - 1) % SEQ >= k), {},
     ["out has its tokens in another order: at token 0 is that of token 63"]),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("function", "options", "reasons"), [x[1:] for x in ON_ONE_RANK], ids=[x[0] for x in ON_ONE_RANK]
)
def test_a_mistake_in_scores_weights_or_inputs_is_named(
    function: Attention, options: dict[str, Any], reasons: list[str], dtype: str
) -> None:
    check = ringprof.check(function, "contiguous", **{**SHAPE, "dtype": dtype, "batch": 1, **options})
    assert not check.equal and check.reasons == reasons, str(check)


def test_a_softmax_with_one_key_more_is_no_padding() -> None:
    """The added key has a score for every head; a count of keys of score 0 would be false."""
    check = ringprof.check(with_one_more(math.log(2.5)), "contiguous", **SHAPE, extra_calls=False)
    assert check.reasons == [
        "weights sum to less than 1, as with one more key for every query, an attention sink of score 0.92"
    ]


# --- backward passes that other calls disturb -------------------------------------------------


class _Saved(torch.autograd.Function):
    """Dense causal attention; what ``kept`` returns of the tensors to save is what the backward pass uses."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, kept: dict[str, Any] | None, read: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.kept, ctx.read = {} if kept is None else kept, read
        ctx.kept["tensors"] = q.detach(), k.detach(), v.detach()
        return attention()(q, k, v)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [x.detach().requires_grad_() for x in ctx.kept["tensors"]]
        with torch.enable_grad():
            out = attention()(*inputs)
        return *torch.autograd.grad(out, inputs, ctx.read(gradients[0])), None, None


def read_as_contiguous(dout: Tensor) -> Tensor:
    return dout.as_strided(dout.shape, torch.empty(dout.shape).stride())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("tensor_format", ["bshd", "bhsd"])
def test_an_output_gradient_taken_for_contiguous_is_named(dtype: str, tensor_format: str) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if tensor_format == "bhsd":
            # dout reaches the function as the check made it only if nothing is transposed.
            return Bhsd.apply(q, k, v)  # type: ignore[no-any-return]
        return _Saved.apply(q, k, v, None, read_as_contiguous)  # type: ignore[no-any-return]

    class Bhsd(_Saved):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:  # type: ignore[override]
            ctx.save_for_backward(*inputs)
            return attention()(*(x.transpose(1, 2) for x in inputs)).transpose(1, 2)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            with torch.enable_grad():
                out = attention()(*(x.transpose(1, 2) for x in inputs)).transpose(1, 2)
            return torch.autograd.grad(out, inputs, read_as_contiguous(gradients[0]))

    check = ringprof.check(run, "contiguous", **SHAPE, dtype=dtype, tensor_format=tensor_format)
    reason = "reads dout as if it were contiguous in memory: its strides are not heeded"
    assert (check.call, check.variant) == (3, "strided dout")
    assert check.reasons == [f"{name} {reason}" for name in ("dq", "dk", "dv")]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_tensors_that_are_not_kept_for_each_call_are_named(dtype: str) -> None:
    kept: dict[str, Any] = {}
    check = ringprof.check(
        lambda q, k, v: _Saved.apply(q, k, v, kept, Tensor.contiguous), "contiguous", **SHAPE, dtype=dtype
    )
    assert (check.call, check.variant) == (2, "another call between its passes")
    assert check.reasons == [
        f"{name} is computed from the tensors of another forward pass, made before this backward pass: they are not"
        " kept for each call"
        for name in ("dq", "dk", "dv")
    ]
    right = ringprof.check(
        lambda q, k, v: _Saved.apply(q, k, v, None, Tensor.contiguous), "contiguous", **SHAPE, dtype=dtype
    )
    assert right.equal and right.reasons == []


# --- what ranks send --------------------------------------------------------------------------


def every(x: Tensor) -> list[Tensor]:
    """Each rank's part of a tensor, without its gradient."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    return parts


def over_parts(q: Tensor, keys: list[Tensor], values: list[Tensor], shown: Callable[[Tensor], Tensor]) -> Tensor:
    """Causal zigzag attention over the parts of k and v that a rank has, in the order of ranks."""
    positions = [LAYOUTS["zigzag"].positions(SEQ, len(keys), rank) for rank in range(len(keys))]
    key = torch.cat(positions)
    run = attention(shown_of=lambda *_: (positions[dist.get_rank()][:, None] >= key) & shown(key))
    return run(q, torch.cat(keys, 1), torch.cat(values, 1))


def one_rank_only(parts: list[Tensor]) -> list[Tensor]:
    return [part if rank == dist.get_rank() else torch.zeros_like(part) for rank, part in enumerate(parts)]


def all_shown(key: Tensor) -> Tensor:
    return torch.ones_like(key, dtype=torch.bool)


def last_keys_of_each_rank(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    held = torch.arange(SEQ) % (SEQ // dist.get_world_size()) < SEQ // dist.get_world_size() - 6
    return over_parts(q, every(k), every(v), lambda key: held)


def in_eight_bits(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def sent(x: Tensor) -> list[Tensor]:
        rounded = [part.to(torch.float8_e4m3fn).to(x.dtype) for part in every(x)]
        rounded[dist.get_rank()] = x.detach()
        return rounded

    return over_parts(q, sent(k), sent(v), all_shown)


def received_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention whose second hop brings the k and v of the first again."""
    first, second = (dist.get_rank() - 1) % dist.get_world_size(), (dist.get_rank() - 2) % dist.get_world_size()
    keys, values = every(k), every(v)
    keys[second], values[second] = keys[first], values[first]
    return over_parts(q, keys, values, all_shown)


ON_RANKS: list[tuple[Attention, str]] = [
    (lambda q, k, v: over_parts(q, one_rank_only(every(k)), one_rank_only(every(v)), all_shown),
     "keys that are not seen count with a score of 0, as k and v of 0 in a buffer read before it is received"),
    (lambda q, k, v: over_parts(q, every(k), one_rank_only(every(v)), all_shown),
     "keys that are not seen count in the sum of weights: their v is 0 (not received in time), or their output is"
     " lost"),
    (lambda q, k, v: over_parts(q, every(k), [v.detach()] * dist.get_world_size(), all_shown),
     "out uses the rank's own v with the k of every rank: v is not sent on"),
    (lambda q, k, v: over_parts(q, every(k), [*every(v)[1:], every(v)[0]], all_shown),
     "out uses with the k of each rank the v of the next rank"),
    (last_keys_of_each_rank, "no query sees keys 10 to 15 of the 16 of each rank, counted from 0"),
    (lambda q, k, v: over_parts(q, every(k), every(v), lambda key: torch.arange(SEQ) < SEQ * 3 // 4),
     "no query sees any key of rank 3"),
    (in_eight_bits, "out uses other ranks' k and v rounded to float8_e4m3fn"),
    (received_twice, ""),  # its weights are also those of partial outputs that count twice, but nothing says which
]  # fmt: skip


def checked(rank: int, dtype: str) -> list[Check]:
    options: dict[str, Any] = {**SHAPE, "batch": 1, "dtype": dtype, "backward": False, "extra_calls": False, "calls": 1}
    return [ringprof.check(function, "zigzag", **options) for function, _ in ON_RANKS]


@pytest.mark.processes
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_mistakes_in_what_ranks_send_are_named(dtype: str) -> None:
    checks = run_ranks(4, checked, dtype)[0]
    assert [check.reasons for check in checks] == [[reason] if reason else [] for _, reason in ON_RANKS]
    assert not any(check.equal for check in checks)
