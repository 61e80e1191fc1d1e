"""The check of whole models: clean set-ups pass, and each mistake of context parallelism is found and named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

pytest.importorskip("torch", reason="checking needs torch")

import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # what a first backward pass imports: once, and not in every forked rank
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ringprof
from ringprof.errors import RingprofError
from ringprof.proof.result import ModelCheck
from ringprof.strategies import create
from tests.recording.test_check import gathered, on_one_device
from tests.recording.tiny_model import (
    VOCAB,
    Model,
    check_verdicts,
    dense,
    in_ddp,
    mistakes_in_ddp,
    shifted,
    total_loss,
    visible,
)
from tests.strategies.ranks import run_ranks

SEQ, ROWS = 32, 2


def ids(rows: int = ROWS) -> Tensor:
    return torch.randint(VOCAB, (rows, SEQ), generator=torch.Generator().manual_seed(0))


def pair(attention: Any, truth: Any = None, **options: Any) -> tuple[Model, Model]:
    """Return a model with ``attention``, and one of the same weights with dense attention."""
    torch.manual_seed(0)
    mine = Model(attention, **options)
    reference = Model(truth or (lambda q, k, v, **mask: dense(q, k, v, None)), **options)
    reference.load_state_dict(mine.state_dict())
    return mine, reference


def reduced(model: nn.Module, factor: float = 1.0) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad *= factor


def checked(
    name: str,
    *,
    attention: Any = None,
    truth: Any = None,
    labels: Any = None,
    positions: Any = None,
    mask: dict[str, Tensor] | None = None,
    wrap: Callable[[Model], nn.Module] | None = None,
    factor: float = 1.0,
    group: Any = None,
    dtype: torch.dtype = torch.float32,
    recompute: bool = False,
) -> ModelCheck:
    """Check a step of a bundled strategy, with parts of it replaced; ``mask`` goes to both models' attention."""
    strategy, mask = create(name, group), mask or {}
    mine, reference = pair(
        attention or (lambda q, k, v, **mask: strategy.attention(q, k, v)), truth, recompute=recompute
    )
    mine, reference = mine.to(dtype), reference.to(dtype)
    model = mine if wrap is None else wrap(mine)

    def step(batch: Tensor) -> Tensor:
        local = strategy.shard(batch)
        logits = model(local, strategy.positions(SEQ) if positions is None else positions(local), **mask)
        loss = total_loss(logits, strategy.shard(shifted(batch)) if labels is None else labels(local))
        if wrap is None:
            loss.backward()
            reduced(mine, factor)
            return loss
        return loss * dist.get_world_size()  # DDP and FSDP average; the check runs the backward pass

    return ringprof.check_model(
        step, lambda batch: total_loss(reference(batch, torch.arange(SEQ), **mask), shifted(batch)), ids()
    )


def right(rank: int) -> list[ModelCheck]:
    documents = torch.tensor([0, 5, 20, SEQ])
    numbers = torch.searchsorted(documents, torch.arange(SEQ), right=True)
    zigzag = create("zigzag", documents_layout="packed")
    packed = checked(
        "zigzag", attention=lambda q, k, v: zigzag.attention(q, k, v, documents=documents, window_size=(3, 0)),
        truth=lambda q, k, v: dense(q, k, v, visible(torch.arange(SEQ), numbers, 4)),
    )  # fmt: skip
    return [
        *(checked(name) for name in ("ring", "zigzag", "ulysses")),
        packed,
        checked("zigzag", wrap=DistributedDataParallel),
        checked("ring", wrap=sharded),
        checked("zigzag", dtype=torch.bfloat16),
        checked("zigzag", recompute=True, wrap=DistributedDataParallel),
        checked("zigzag", recompute=True),
    ]


def sharded(model: Model) -> nn.Module:
    """Shard every layer and the model by FSDP2."""
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


@pytest.mark.processes
def test_clean_setups_are_equal() -> None:
    by_rank = run_ranks(2, right)
    for check in by_rank[0]:
        assert check.equal, str(check)
        assert check.reasons == [] and check.first_difference is None and check.loss_is is not None
        assert len(check.parameters) == 23 and check.modules > 20
        assert check.logits is not None and check.sent is not None
        assert str(check).startswith("equal to one process: 2 ranks, 2 x 32 tokens")
    assert by_rank[0] == by_rank[1]


def gathering(q: Tensor, k: Tensor, v: Tensor, *, padding: Tensor | None = None) -> Tensor:
    """Compute attention of contiguous shards on gathered keys, under a padding mask of the whole batch."""
    seq, rank = q.shape[1] * dist.get_world_size(), dist.get_rank()
    mask = visible(torch.arange(seq), padding=padding).expand(q.shape[0], 1, -1, -1)
    return on_one_device(q, gathered(k), gathered(v), mask[:, :, rank * q.shape[1] : (rank + 1) * q.shape[1]])


def in_pairs() -> Any:
    """Return an attention in which pairs of ranks keep to themselves."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    strategy = create("ring", pairs[dist.get_rank() // 2])
    return lambda q, k, v: strategy.attention(q, k, v)


NUMBERS = (torch.arange(SEQ) >= 10).long()
PADDING = torch.ones(ROWS, SEQ, dtype=torch.bool)
PADDING[1, :4] = False
MISTAKES: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "labels": (lambda: {"labels": shifted}, "the labels are shifted across shard borders: 2 tokens differ only"),
    "positions": (
        lambda: {"positions": lambda local: torch.arange(local.shape[1])},
        "local positions, which restart on every rank",
    ),
    "scale": (lambda: {"factor": 0.5}, "0.5, 1 / ranks"),
    "twice": (lambda: {"factor": 2.0}, "2, the number of ranks"),
    "off": (lambda: {"attention": lambda q, k, v: dense(q, k, v, None)}, "context parallelism is silently off"),
    "documents": (
        lambda: {"truth": lambda q, k, v: dense(q, k, v, visible(torch.arange(SEQ), NUMBERS))},
        "token 10 of row 0 on rank 0 sees 10 tokens that the reference hides (the first: token 0 of row 0): the mask of"
        " packed documents is dropped",
    ),
    "window": (
        lambda: {"truth": lambda q, k, v: dense(q, k, v, visible(torch.arange(SEQ), window=20))},
        "token 20 of row 0 on rank 1 sees 1 token that the reference hides (the first: token 0 of row 0): the window"
        " of 20 tokens is dropped",
    ),
    "padding": (
        lambda: {
            "attention": lambda q, k, v, padding: gathering(q, k, v), "mask": {"padding": PADDING},
            "truth": lambda q, k, v, padding=None: dense(q, k, v, visible(torch.arange(SEQ), padding=padding)),
        },
        "the output equals the reference without its argument padding: it is dropped",
    ),
}  # fmt: skip


def wrong(rank: int) -> dict[str, ModelCheck]:
    return {name: checked("ring", **options()) for name, (options, _) in MISTAKES.items()}


@pytest.mark.processes
def test_each_mistake_is_found_and_named() -> None:
    by_rank = run_ranks(2, wrong)
    assert by_rank[0] == by_rank[1]
    for name, check in by_rank[0].items():
        assert not check.equal
        assert check.reasons and MISTAKES[name][1] in check.reasons[0], f"{name}: {check}"


def other_mistakes(rank: int) -> dict[str, Any]:
    """Mistakes in shards, weights and losses, each in a step written for it."""
    mine, reference = pair(gathering)
    full = ids()
    labels = shifted(full)
    labels[:, :12] = -100
    own = slice(rank * SEQ // 2, (rank + 1) * SEQ // 2)

    def check(step: Callable[[Tensor], Any], truth: Any = None) -> ModelCheck:
        return ringprof.check_model(step, truth or (lambda batch: total_loss(reference(batch), labels)), full)

    def mean_over_own_tokens(batch: Tensor) -> Tensor:
        logits = mine(batch[:, own], torch.arange(SEQ)[own])
        loss = cross_entropy(logits.flatten(0, 1), labels[:, own].flatten()) / 2
        loss.backward()
        reduced(mine)
        return loss

    def unreduced(batch: Tensor) -> Tensor:
        return total_loss(mine(batch[:, own], torch.arange(SEQ)[own]), labels[:, own])

    def same_shard(batch: Tensor) -> Tensor:
        return total_loss(mine(batch[:, : SEQ // 2], torch.arange(SEQ // 2)), labels[:, : SEQ // 2])

    def mean(batch: Tensor) -> Tensor:
        return cross_entropy(reference(batch).flatten(0, 1), labels.flatten())

    def fails(batch: Tensor) -> Tensor:
        unreduced(batch).backward()
        if rank == 1:
            raise ValueError("boom")
        return batch.float().mean()

    results: dict[str, Any] = {
        "unequal": check(mean_over_own_tokens, mean), "unreduced": check(unreduced), "same shard": check(same_shard)
    }  # fmt: skip
    with torch.no_grad():
        mine.norm.weight[rank] += 1
    refused: dict[str, tuple[Any, Any]] = {
        "weights": (unreduced, None), "twice": (lambda batch: unreduced(batch) + unreduced(batch), None),
        "no model": (lambda batch: batch.sum(), None), "fails": (fails, None),
    }  # fmt: skip
    for name, (step, truth) in refused.items():
        with pytest.raises(RingprofError) as error:
            check(step, truth)
        results[name] = str(error.value)
    return results


@pytest.mark.processes
def test_shards_weights_and_losses() -> None:
    results, of_other = run_ranks(2, other_mistakes)
    # Of the 38 labels, 8 are on rank 0 and 30 on rank 1: 38 / (2 * 8) = 2.375 and 38 / (2 * 30) = 0.633.
    (reason,) = results["unequal"].reasons
    assert reason.startswith("the ranks' losses are weighted unequally: the output's gradient is 2.37, 0.633 times")
    (reason,) = results["unreduced"].reasons
    assert reason == (
        "the gradients of 23 parameters are not reduced over all ranks: their sum over the ranks is right"
    )
    assert results["same shard"].reasons == [
        "the shards do not partition the batch: 32 tokens are on no rank (the first: token 16 of row 0), 32 are on"
        " several (the first: token 0 of row 0 on ranks 0, 1)"
    ]
    assert results["weights"].startswith("the reference has other weights than the parallel model (the first: norm.")
    assert results["twice"] == "the step calls its model 2 times: compare a step that calls it once"
    assert results["no model"] == "the step calls no torch module with parameters: nothing to compare"
    assert results["fails"] == of_other["fails"] == "rank 1 failed in call 1 of the parallel step: ValueError: boom"


def of_four(rank: int) -> list[ModelCheck]:
    return [checked("ring"), checked("ring", attention=in_pairs())]


@pytest.mark.processes
def test_groups_that_keep_to_themselves_are_named() -> None:
    """A configuration of all-to-all and ring in which the ring is silently left out."""
    right, wrong = run_ranks(4, of_four)[0]
    assert right.equal, str(right)
    assert wrong.reasons == [
        "token 16 of row 0 on rank 2 does not see 16 tokens that it should (the first: token 0 of row 0): nothing of"
        " rank 0, 1 reaches it"
    ], str(wrong)


IN_DDP: dict[str, tuple[dict[str, Any], str]] = mistakes_in_ddp(SEQ, 20) | {
    "averaged over context-parallel ranks": ({"scale": 0.5}, "0.5, 1 / ranks that share a row"),
    "window dropped": (mistakes_in_ddp(SEQ, 20)["window dropped"][0], "the window of 20 tokens is dropped"),
    "reduced over data-parallel ranks alone": (
        {"reduced_over": "dp"},
        "of 23 parameters are not reduced over all ranks: their sum over the ranks is the reference's times",
    ),
}  # fmt: skip


def ddp_loops(rank: int) -> dict[str, ModelCheck]:
    def setup(mesh: Any) -> tuple[Any, Any]:
        strategy = create("zigzag", mesh)
        return strategy.attention, lambda ids, labels, positions: nullcontext(
            (strategy.shard(ids), strategy.shard(labels), strategy.positions(SEQ))
        )

    targets = shifted(ids(4))
    targets[:3, :20] = -100
    options = {"right": {}, **{name: options for name, (options, _) in IN_DDP.items()}}
    return {name: in_ddp(setup, ids(4), targets, torch.float32, **x) for name, x in options.items()}


@pytest.mark.processes
def test_a_ddp_loop_over_two_mesh_dimensions() -> None:
    check_verdicts(run_ranks(4, ddp_loops)[0], IN_DDP)
