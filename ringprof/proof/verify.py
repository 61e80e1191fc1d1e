"""Verification before timing: a strategy's results against dense attention, on the ranks that are timed.

A short sequence is compared as `ringprof.proof.dense` describes, with the strategy's own kernel as the kernel
alone. Its ``hops`` are 0 if partial results are sent in float32, and the world size for gradients that are sent in the
input's type.

Prefill and decode have fewer queries than keys. Their output over a short cache is compared as a whole, and the
kernel's own error is that of one call over the keys that all new tokens attend.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import torch

from ringprof.common.json_object import Params
from ringprof.errors import UnsupportedWorkloadError, VerificationError
from ringprof.iteration.resolve import attention_options, kernel_of, layout_options, torch_dtype, why_unsupported
from ringprof.iteration.shard import WorkloadShard, drawn_sinks, row_sums
from ringprof.proof.dense import (
    MOST_TOKENS,
    TOKENS_PER_RANK,
    allowed_rms,
    compare_results,
    draw_inputs,
    error_on_rank,
    gather_numbers,
    reference_shares,
    relative_rms,
    severity,
    worst_errors,
)
from ringprof.proof.result import TensorCheck
from ringprof.ranks.process_group import GroupRanks, gather_tensor
from ringprof.run import TensorError, TimedVerification, Verification
from ringprof.strategies.algorithms.cached import Cached
from ringprof.strategies.base import AttentionCall, Strategy
from ringprof.strategies.kernels.merge import with_sinks
from ringprof.strategies.kernels.reference import KeyStretches, ReferenceKernel
from ringprof.strategies.masks.layouts import Block
from ringprof.workload.workload import Workload


def verify(strategy: Strategy, workload: Workload, device: torch.device) -> Verification:
    """Verify a strategy before it is timed. Collective: every rank must call this, and gets the same answer.

    Raises `VerificationError`, which names the worst rank and tensor, if a result is wrong.
    """
    if isinstance(strategy, Cached):
        workload = shortened(type(strategy), workload, strategy.comm.size, device.type, strategy.parameters)
        errors = _errors_over_cache(strategy, workload, device)
    else:
        seq = verification_seq(type(strategy), workload, strategy.comm.size, device.type, strategy.parameters)
        workload = workload.at(seq)
        errors = _errors_of_training(strategy, workload, device)
    recorded = raise_if_wrong(errors, f"{size_in_words(workload)}; nothing was timed")
    return Verification(passed=True, seq=workload.kv_length or workload.seq, errors=recorded)


def verification_seq(strategy: type[Strategy], workload: Workload, world: int, device_type: str, params: Params) -> int:
    """Return the sequence length of the verification, at most the workload's own.

    It is `TOKENS_PER_RANK` per rank, at most `MOST_TOKENS` in total, rounded as the layout needs it. Raises
    `UnsupportedWorkloadError` if the strategy can run no such sequence.
    """
    divisor = int(strategy.layout.divisor(world))
    tokens = min(TOKENS_PER_RANK[device_type] * world, max(MOST_TOKENS, divisor), workload.seq)
    for multiple in range(max(1, tokens // divisor), workload.seq // divisor + 1):
        if why_unsupported(strategy, workload, world, params, seq=multiple * divisor) is None:
            return multiple * divisor
    raise UnsupportedWorkloadError(f"no sequence up to {workload.seq} fits {strategy.__name__} on {world} ranks")


def shortened(strategy: type[Cached], workload: Workload, world: int, device_type: str, params: Params) -> Workload:
    """Return the workload of the verification over a cache: new and cached tokens are each limited as for training."""
    assert workload.kv_length is not None
    limit = min(TOKENS_PER_RANK[device_type] * world, MOST_TOKENS)
    new, cached = workload.seq, workload.kv_length - workload.seq
    divisor = int(strategy.layout.divisor(world)) if workload.phase == "prefill" else 1
    if new > limit:
        new = limit // divisor * divisor or divisor
    if cached > limit:
        # Keep the remainder over the ranks, so that the cache is divided as evenly as the workload's.
        cached = limit // world * world + cached % world
    short = workload.at(new, new + cached)
    assert why_unsupported(strategy, short, world, params) is None
    return short


def _errors_of_training(strategy: Strategy, workload: Workload, device: torch.device) -> dict[str, TensorCheck]:
    """Return the errors of output and gradients over the whole sequence, by name. Collective."""
    shared, sinks = layout_options(workload), drawn_sinks(workload, device)
    full = draw_inputs(workload, device)

    def shard(x: torch.Tensor) -> torch.Tensor:
        return strategy.shard(x, **shared)

    q, k, v = (shard(x).contiguous().requires_grad_(workload.backward) for x in (full.q, full.k, full.v))
    dout = shard(full.dout).contiguous() if workload.backward else None
    options = attention_options(workload, sinks)
    local = WorkloadShard(strategy, workload.causal, q, k, v, dout, attention_options=options, sinks=sinks)
    results = {name: x.detach() for name, x in vars(local.run_iteration()).items() if x is not None}
    if "dsinks" in results:
        results["dsinks"] = summed_over_ranks(results["dsinks"])
    del q, k, v, dout, local  # their memory is for the reference
    references = reference_shares(full, workload, kernel_of(strategy, full.q, workload).again(), shard)
    positions = strategy.positions(workload.seq, device, **shared)
    hops = partial(roundings, strategy=strategy)
    return compare_results(results, *references, positions, torch_dtype(workload), hops, GroupRanks(None))[0]


def _errors_over_cache(strategy: Cached, workload: Workload, device: torch.device) -> dict[str, TensorCheck]:
    """Return the error of the output over a cache, by name. Collective."""
    keys, new = workload.kv_length, workload.seq
    assert keys is not None
    full = draw_inputs(msgspec.structs.replace(workload, phase="training", kv_length=None, seq=keys), device)
    q = full.q[:, keys - new :]
    k, v = (strategy.shard_cache(x, new, workload.heads).contiguous() for x in (full.k, full.v))
    sinks = drawn_sinks(workload, device)
    own_sinks = None if sinks is None else sinks[strategy.heads(workload.heads, workload.kv_heads).returned]
    options = attention_options(workload, own_sinks)
    with torch.no_grad():
        out = strategy.attention(strategy.shard(q).contiguous(), k, v, causal=workload.causal, **options)
    wide_k, wide_v = (x.repeat_interleave(workload.heads // workload.kv_heads, 2) for x in (full.k, full.v))
    scale, reference = workload.head_dim**-0.5, ReferenceKernel(softcap=workload.softcap or 0.0)
    all_positions = torch.arange(keys, device=device)
    attended = KeyStretches.of(workload.mask(), all_positions[keys - new :], keys).shown(all_positions)
    exact, lse = reference.forward_masked(q.double(), wide_k, wide_v, scale, attended)
    if sinks is not None:
        exact, _ = with_sinks(exact, lse, sinks)
    common = slice(keys - new + 1 if workload.causal else keys)
    call = AttentionCall(kernel_of(strategy, q, workload).again(), scale, causal=False)
    kernel_out, _ = call.forward(q, full.k[:, common], full.v[:, common], Block())
    kernel_exact, _ = reference.forward_masked(q.double(), wide_k[:, common], wide_v[:, common], scale, None)
    kernel_rms = relative_rms(kernel_out.double() - kernel_exact, kernel_exact)
    allowed = allowed_rms(kernel_rms, torch_dtype(workload), roundings("out", strategy, sinks=sinks is not None))
    error = error_on_rank(out, strategy.shard_output(exact), kernel_rms, allowed, GroupRanks(None).rank)
    return worst_errors({"out": error}, GroupRanks(None))


def repeats_first(results: Mapping[str, torch.Tensor], first_rows: torch.Tensor, ending: str) -> bool:
    """Return whether the last timed output has the bits of the first, whose `row_sums` are ``first_rows``. Collective.

    Raises `VerificationError`, ended by ``ending``, if a result is not finite on some rank.
    """
    flags = [*(bool(x.isfinite().all()) for x in results.values()), torch.equal(first_rows, row_sums(results["out"]))]
    flags_by_rank = gather_numbers(flags, GroupRanks(None))
    for rank, flags in enumerate(flags_by_rank):
        for name in (name for name, finite in zip(results, flags, strict=False) if not finite):
            raise VerificationError(f"wrong result on rank {rank}: {name} is not finite, {ending}")
    if results["out"].is_cuda:
        # Device memory that the iterations have cached is needed for the reference.
        torch.cuda.empty_cache()
    return all(flags[-1] for flags in flags_by_rank)


def add_timed(
    before: Verification, measured: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor],
    kernel_rms: Mapping[str, float], hops: Callable[[str], int], workload: Workload, begin_ns: int, ending: str,
    **fields: Any,
) -> Verification:  # fmt: skip
    """Compare the last timed results with the reference, and add the outcome to ``before``. Collective.

    ``kernel_rms`` are errors of the kernel alone where they were measured at this length, and ``fields`` other fields
    of the outcome. Raises `VerificationError`, ended by ``ending``, if a result is wrong.
    """
    errors, dtype, ranks = dict[str, TensorCheck](), torch_dtype(workload), GroupRanks(None)
    for name, exact in expected.items():
        rms = max(kernel_rms.get(name, before.errors[name].kernel_rms), torch.finfo(dtype).eps / 2)
        errors[name] = error_on_rank(measured[name], exact, rms, allowed_rms(rms, dtype, hops(name)), ranks.rank)
    recorded = raise_if_wrong(worst_errors(errors, ranks), ending)
    timed = TimedVerification(
        seq=workload.kv_length or workload.seq, errors=recorded, took_ns=time.perf_counter_ns() - begin_ns, **fields
    )
    return msgspec.structs.replace(before, timed=timed)


def summed_over_ranks(x: torch.Tensor) -> torch.Tensor:
    """Return the sum over the ranks in float64, the same on every rank. Collective."""
    return torch.stack(gather_tensor(x.double().contiguous())).sum(0)


def roundings(name: str, strategy: Any, *, sinks: bool = False) -> int:
    """Return how often a tensor is rounded to the input's type between ranks. Over a cache, sinks add a rounding."""
    if isinstance(strategy, Cached):
        return strategy.out_roundings + int(sinks)
    # A strategy that mixes types, or does not state them, may round gradients at every hop.
    rounds_gradients = strategy.parameters.get("grad_wire", strategy.GRAD_WIRE) not in ("exact", "fp32")
    return strategy.comm.size if rounds_gradients and name not in ("out", "dsinks") and strategy.comm.size > 1 else 0


def size_in_words(workload: Workload) -> str:
    """Describe the tokens of a verification, for the end of a message."""
    if workload.kv_length is None:
        return f"at sequence {workload.seq}"
    return f"with {workload.seq} new tokens over {workload.kv_length} keys"


def raise_if_wrong(errors: Mapping[str, TensorCheck], ending: str) -> dict[str, TensorError]:
    """Return the errors as a run keeps them; raise `VerificationError` if a tensor exceeds its bound.

    The message names the tensor with the largest error relative to its bound; ``ending`` ends it.
    """
    name, error = max(errors.items(), key=lambda item: severity(item[1]))
    if severity(error) > 1.0:
        raise VerificationError(
            f"wrong result on rank {error.rank}: {name} is off by {error.rms:.3g} (relative rms),"
            f" {error.allowed_rms:.3g} allowed, {error.kernel_rms:.3g} for the kernel alone, {ending}"
        )
    for name, error in errors.items():
        if error.wrong_tokens:
            tokens = f"{error.wrong_tokens} token{'s' * (error.wrong_tokens > 1)}"
            raise VerificationError(
                f"wrong result on rank {error.first_rank}: {name} is off by more than rounding explains at {tokens},"
                f" the first is token {error.first_token}, {ending}"
            )
    return {name: msgspec.convert(msgspec.structs.asdict(error), TensorError) for name, error in errors.items()}
