"""Strategies in users' autograd graphs: losses of some ranks only, second-order gradients, autocast, checkpoints."""

from __future__ import annotations

import warnings
from contextlib import suppress
from threading import Thread
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from ringprof.strategies import RankRaised, Unsupported, create, names
from ringprof.strategies.kernels.reference import ReferenceKernel
from ringprof.strategies.kernels.registry import KERNELS, choose_kernel
from tests.strategies import cases
from tests.strategies.cases import CASES, WorkloadShard, call, dense, error_of, inputs, relative_error, worst
from tests.strategies.ranks import refusal, run_ranks

PROBLEM = WorkloadShard(seq=16, heads=4, kv_heads=2)


def shares(strategy: Any, problem: WorkloadShard = PROBLEM) -> tuple[list[torch.Tensor], torch.Tensor]:
    return cases.shares(strategy, inputs(problem))


# --- gradients of gradients -------------------------------------------------------------------------


def penalised(rank: int) -> dict[str, list[str]]:
    """Return the error messages of second-order gradients by strategy, without and with a gradient of dO itself."""
    messages: dict[str, list[str]] = {}
    for name in names():
        for needed in (False, True):
            strategy = create(name, kernel="reference")
            mine, dout = shares(strategy)
            weighted = (strategy.attention(*mine) * dout.requires_grad_(needed)).sum()
            (gradient,) = torch.autograd.grad(weighted, mine[0], create_graph=True)
            try:
                (weighted + gradient.square().sum()).backward()
                messages.setdefault(name, []).append("")
            except RuntimeError as refusal:
                messages.setdefault(name, []).append(str(refusal))
    return messages


@pytest.mark.processes
def test_second_order_gradients_are_refused_not_dropped():
    for said in run_ranks(2, penalised):
        for name, refusals in said.items():
            assert all("second-order gradients: no bundled strategy" in refusal for refusal in refusals), name


def transformed(rank: int) -> list[str]:
    """Return the error messages of torch.func transforms, which would drop the collectives or the gradient."""
    messages = []
    for name in names():
        strategy = create(name, kernel="reference")
        mine = [x.detach() for x in shares(strategy)[0]]
        loss: Any = lambda *qkv, of=strategy: of.attention(*qkv).sum()  # noqa: E731
        messages += [refusal(transform, *mine) for transform in (torch.func.grad(loss), torch.vmap(loss))]
    return messages


@pytest.mark.processes
def test_functorch_transforms_are_a_one_line_error():
    for said in run_ranks(2, transformed):
        assert len(said) == 18
        assert set(said) == {
            "torch.func transforms (grad, vmap, jvp) are not supported: take gradients by torch.autograd"
        }


# --- exceptions -------------------------------------------------------------------------------------


def interrupted(rank: int) -> dict[str, float]:
    """Return the error of a second attempt, after an exception in the first block of a pass with hops in flight."""
    errors: dict[str, float] = {}
    for case in [case for case in CASES if 2 in case.worlds]:
        strategy = create(case.name, kernel="reference", **case.params)
        mine, dout = shares(strategy)
        for method in ("_forward", "_backward"):
            failing = patch.object(ReferenceKernel, method, side_effect=ZeroDivisionError)
            with suppress(ZeroDivisionError, RankRaised), failing:
                strategy.attention(*mine).backward(dout)
            strategy.recover()
        errors[str(case)] = error_of(strategy, PROBLEM)
    return errors


@pytest.mark.processes
def test_attention_after_an_exception_is_exact():
    """No later hop brings a message of the first attempt."""
    for errors in run_ranks(2, interrupted):
        assert {case: error for case, error in errors.items() if not error < 1e-12} == {}


# --- autocast ---------------------------------------------------------------------------------------


def cast(rank: int) -> list[str]:
    """Return the types of the output and of q's gradient, next to those of torch's attention, under autocast."""
    wrong = []
    strategy = create("zigzag")
    kinds = [torch.float32, torch.bfloat16, torch.float64]
    for types in [(kinds[0],) * 3, (kinds[0], kinds[0], kinds[1]), (kinds[1],) * 3, (kinds[2],) * 3]:
        q, k, v = (torch.randn(1, 8, 4, 8).to(dtype).requires_grad_() for dtype in types)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = strategy.attention(q, k, v)
            own = scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
            out.sum().backward()
        if out.dtype != own.dtype or q.grad is None or q.grad.dtype != q.dtype:
            wrong.append(f"{types}: {out.dtype}, not {own.dtype}")
    return wrong


@pytest.mark.processes
def test_autocast_casts_as_torchs_own_attention_does():
    assert run_ranks(2, cast) == [[], []]


# --- graphs -----------------------------------------------------------------------------------------


def checkpointed(rank: int) -> float:
    errors = []
    for name in names():
        strategy = create(name, kernel="reference")
        for reentrant in (False, True):
            mine, dout = shares(strategy)
            out = checkpoint(strategy.attention, *mine, use_reentrant=reentrant)
            out.backward(dout)
            errors.append(worst([out.detach(), *(x.grad for x in mine)], map(strategy.shard, dense(PROBLEM))))
    return max(errors)


@pytest.mark.processes
def test_checkpoints_of_both_kinds_are_exact():
    assert max(run_ranks(2, checkpointed)) < 1e-13


def with_other_defaults(rank: int) -> float:
    """A strategy works in a model made on ``meta`` or in another type, also with k and v in one tensor."""
    errors, truth = [], dense(PROBLEM)
    for name in names():
        full = inputs(PROBLEM)
        with torch.device("meta"):
            strategy = create(name, kernel="reference")
            q, k, v, dout = (strategy.shard(tensor) for tensor in full)
            assert strategy.positions(PROBLEM.seq).device.type == "cpu"
            with torch.inference_mode():
                errors.append(relative_error(strategy.attention(q, k, v).clone(), strategy.shard(truth[0])))
            torch.set_default_dtype(torch.float16)
            q, kv = q.requires_grad_(), torch.stack([k, v]).requires_grad_()
            out = strategy.attention(q, *kv.unbind(0))
            out.backward(dout)
            torch.set_default_dtype(torch.float32)
        assert q.grad is not None and kv.grad is not None
        errors.append(worst([out.detach(), q.grad, *kv.grad], map(strategy.shard, truth)))
    return max(errors)


@pytest.mark.processes
def test_default_device_dtype_and_inference_mode_are_ignored():
    assert max(run_ranks(2, with_other_defaults)) < 1e-13


def in_two_threads(rank: int) -> float:
    """Call strategies of two groups by a thread each: the threads of different ranks may run in different orders."""
    truth, errors = dense(PROBLEM), list[float]()
    strategies = [create("zigzag", kernel="reference", group=dist.new_group([0, 1])) for _ in range(2)]

    def work(strategy: Any) -> None:
        for _ in range(8):
            errors.append(worst(call(strategy, PROBLEM), map(strategy.shard, truth)))

    threads = [Thread(target=work, args=(strategy,)) for strategy in strategies[:: 1 - 2 * rank]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(errors) if len(errors) == 2 * 8 else float("inf")


@pytest.mark.processes
def test_two_threads_may_call_strategies_of_two_groups():
    assert max(run_ranks(2, in_two_threads)) < 1e-13


def bits_by_wire(rank: int) -> bool:
    """Return whether bf16 on the only hop of dK and dV gives the bits of float32. Parts of a block travel as a sum."""
    problem = WorkloadShard(seq=32, batch=2, dtype=torch.bfloat16)
    gradients = []
    for wire in ("exact", "fp32"):
        strategies = (
            create("zigzag", kernel="reference", grad_wire=wire),
            create("ring", kernel="reference", grad_wire=wire),
        )
        mine, dout = shares(strategies[0], problem)
        outs = strategies[0].attention(*mine), strategies[1].attention(*mine, documents=(0, 5, 20, 32))
        gradients.append([x for out in outs for x in torch.autograd.grad(out, mine, dout)])
    return all(torch.equal(exact, other) for exact, other in zip(*gradients, strict=True))


@pytest.mark.processes
def test_rounded_gradients_travel_in_their_dtype_without_loss():
    assert run_ranks(2, bits_by_wire) == [True, True]


def kept_positions(rank: int) -> tuple[int, bool]:
    strategy = create("zigzag")
    for seq in range(4, 84, 4):
        strategy.shard(torch.zeros(1, seq))
    mine = strategy.positions(8)
    mine.zero_()
    return len(strategy._positions), strategy.positions(8).tolist() == ([0, 1, 6, 7] if rank == 0 else [2, 3, 4, 5])


@pytest.mark.processes
def test_positions_cache_is_bounded_and_returns_copies():
    assert run_ranks(2, kept_positions) == [(8, True), (8, True)]


# --- the choice of a kernel -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_auto_never_takes_the_dense_reference_on_a_gpu(dtype, monkeypatch):
    monkeypatch.setattr(KERNELS["cudnn"], "why_unsupported", classmethod(lambda *_: "is not here"))
    device = torch.device("cuda")
    if dtype == torch.float32:
        assert choose_kernel("auto", device, dtype, 128).name == "torch-efficient"
        assert choose_kernel("auto", device, dtype, 100).name == "flex"
        with pytest.raises(
            Unsupported, match=r"no kernel takes torch.float32 with head_dim 12 on cuda: .*cudnn is not here;"
        ):
            choose_kernel("auto", device, dtype, 12)
    else:
        with pytest.raises(Unsupported, match=r"no kernel takes torch.float64"):
            choose_kernel("auto", device, dtype, 128)
    assert choose_kernel("reference", device, dtype, 128).name == "reference"


# --- torch.compile ----------------------------------------------------------------------------------


def compiled(rank: int) -> float:
    """Return the error of a compiled model around a strategy that sends."""
    strategy = create("zigzag", kernel="reference")
    mine, dout = shares(strategy)

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return strategy.attention(q * 2, k / 2, v + 0) * 1

    with warnings.catch_warnings():
        # The compiler's own, of tensors between two graphs.
        warnings.simplefilter("ignore")
        out = torch.compile(model, backend="eager")(*mine)
    out.backward(dout)
    return worst([out.detach(), *(x.grad for x in mine)], map(strategy.shard, dense(PROBLEM)))


@pytest.mark.processes
def test_a_compiled_model_breaks_its_graph_around_a_strategy():
    assert max(run_ranks(2, compiled)) < 1e-12


def test_descriptions_of_kernel_dtypes_and_head_sizes():
    words = {name: (kernel.types(), kernel.head_dims()) for name, kernel in KERNELS.items()}
    of_16_bits = "bf16 and fp16"
    assert words == {
        "cudnn": (of_16_bits, "up to 128 in steps of 8"),
        "flash-attn-3": (of_16_bits, "up to 256 in steps of 8"),
        "flash-attn": (of_16_bits, "up to 256 in steps of 8"),
        "flash-attn-4": (of_16_bits, "up to 256 in steps of 8, fewer by GPU"),
        "torch-flash": (of_16_bits, "up to 256 in steps of 8"),
        "torch-efficient": ("fp32, bf16 and fp16", "in steps of 8"),
        "cpu-flash": ("any", "any"),
        "flex": ("bf16, fp16 and fp32", "any"),
        "reference": ("any", "any"),
    }


def test_feature_flags_of_kernels():
    """The flags match the libraries: torch's operators have no softcap and, except for flash, no windows."""
    own_and_flash = {
        "flash-attn-3", "flash-attn-4", "flash-attn", "torch-flash", "cpu-flash", "flex", "reference",
    }  # fmt: skip
    able = {
        "takes_windows": own_and_flash,
        "varlen": {"flash-attn-3", "flash-attn-4", "flash-attn", "torch-flash", "flex"},
        "takes_softcap": {"flash-attn-3", "flash-attn-4", "flash-attn", "flex", "reference"},
        "has_deterministic_mode": own_and_flash,
        "takes_delta": {"reference"},
        "tested": set(KERNELS),
        "production": set(KERNELS) - {"reference"},
    }
    for flag, those in able.items():
        assert {name for name, kernel in KERNELS.items() if getattr(kernel, flag)} == those, flag
