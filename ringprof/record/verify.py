"""Verification before timing: the strategy's results against a dense float64 reference, on the ranks that are timed.

Every rank draws the same full tensors from one seed, shards them, and runs the strategy. It compares its share of out,
dq, dk and dv with two other results:

* the reference, dense attention in float64, which gives the strategy's error;
* one call of the same kernel on one device over the whole sequence, which gives the kernel's own error on the same
  tokens: the error that rounding alone explains.

An error is the root mean square of the difference, relative to the root mean square of the reference, over one rank's
share of one tensor. With u the unit roundoff of the input type (2^-8 for bf16, 2^-11 for fp16, 2^-24 for fp32), a
result passes on a rank while

    error <= 3 · sqrt(kernel_error² + hops · u² / 3)        and at least 64 u for fp32

with hops = 0 if partial results are sent in float32, and hops = the world size for gradients that are sent in the
input's type. Each of those hops rounds once, by at most u, evenly spread (variance u² / 3). Independent roundings add
as variances, so that the bound grows with the square root of the hops. The kernel's own error counts up to 16 u: a
kernel with a larger error is wrong itself. An error that is not a number fails.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringprof.common.json_object import JsonObject, Params
from ringprof.errors import UnsupportedWorkloadError, VerificationError
from ringprof.record.measure import drawn_sinks
from ringprof.record.process_group import gather_tensor
from ringprof.record.resolve import attention_options, kernel_of, layout_options, torch_dtype, why_unsupported
from ringprof.run import TensorError, Verification, Workload
from ringprof.strategies.base import Strategy
from ringprof.strategies.kernels.merge import row_product, with_sinks
from ringprof.strategies.kernels.reference import MaskedReference
from ringprof.strategies.masks.layouts import LAYOUTS
from ringprof.strategies.masks.sharded_mask import sharded_mask_of

SEED = 20260401
TOKENS_PER_RANK = {"cpu": 64, "cuda": 256}
MOST_TOKENS = 8192
"""Most tokens of the verification, because the reference is dense; many ranks get fewer tokens each."""
ERROR_FACTOR = 3.0
KERNEL_ERROR_LIMIT = 16
SINGLE_FLOOR = 64


@dataclass(frozen=True)
class Tensors:
    """Full inputs: q and dout (B, S, H, D), k and v (B, S, Hkv, D)."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def verify(strategy: Strategy, workload: Workload, device: torch.device) -> Verification:
    """Verify a strategy before it is timed. Collective: every rank must call this, and gets the same answer.

    Raises `VerificationError`, which names the worst rank and tensor, if a result is wrong.
    """
    comm = strategy.comm
    seq = verification_seq(type(strategy), workload, comm.size, device.type, strategy.parameters)
    workload = workload.at(seq)
    full = draw_inputs(workload, device)
    measured = _strategy_results(strategy, full, workload)
    kernel = kernel_of(strategy, full.q, workload).again()
    rows, names = [], list(measured)
    dout = full.dout if workload.backward else None
    reference = reference_results(full, workload)
    block = whole_block(workload)
    sinks = drawn_sinks(workload, device)
    kernel_alone = kernel_results(kernel, full.q, full.k, full.v, dout, block, sinks=sinks)
    for name in names:
        share = _share(strategy, name, reference[name], workload)
        difference = measured[name].double() - share
        kernel_error = relative_rms(_share(strategy, name, kernel_alone[name], workload).double() - share, share)
        if name == "dsinks":
            # This sum over all rows has too few numbers to estimate the effect of rounding from.
            kernel_error = max(kernel_error, torch.finfo(torch_dtype(workload)).eps / 2)
        rows.append([difference.abs().max().item(), relative_rms(difference, share), kernel_error])
    by_rank = gather_rows(rows, device)
    errors = {
        name: worst_error([rank_rows[index] for rank_rows in by_rank], torch_dtype(workload), roundings(name, strategy))
        for index, name in enumerate(names)
    }
    raise_if_wrong(errors, f"at sequence {seq}; nothing was timed")
    return Verification(passed=True, seq=seq, errors=errors)


def _share(strategy: Strategy, name: str, whole: Tensor, workload: Workload) -> Tensor:
    """Return this rank's rows of a result over the whole sequence, or the sum of all summands of ``dsinks``."""
    return whole.sum((0, 1, 3)) if name == "dsinks" else strategy.shard(whole, **layout_options(workload))


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


def allowed_rms(kernel_rms: float, dtype: torch.dtype, hops: int) -> float:
    """Return the largest relative error that passes, by the formula in this module's docstring.

    ``hops`` is the number of roundings to the input's type between ranks; 0 if partial results are sent in float32.
    """
    unit = torch.finfo(dtype).eps / 2
    explained = min(kernel_rms, KERNEL_ERROR_LIMIT * unit) if math.isfinite(kernel_rms) else 0.0
    if dtype in (torch.float32, torch.float64):
        explained = max(explained, SINGLE_FLOOR * unit / ERROR_FACTOR)
    return ERROR_FACTOR * math.sqrt(explained**2 + hops * unit**2 / 3)


def draw_inputs(workload: Workload, device: torch.device, seed: int = SEED) -> Tensors:
    """Draw full inputs on the CPU from one seed, so that they are the same on every rank and device."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, size: int) -> Tensor:
        shape = (workload.batch, workload.seq, heads, size)
        return torch.randn(shape, generator=generator).to(device=device, dtype=torch_dtype(workload))

    heads, kv_heads = workload.heads, workload.kv_heads
    size, v_head_dim = workload.head_dim, workload.v_head_dim or workload.head_dim
    return Tensors(draw(heads, size), draw(kv_heads, size), draw(kv_heads, v_head_dim), draw(heads, v_head_dim))


def _strategy_results(strategy: Strategy, full: Tensors, workload: Workload) -> dict[str, Tensor]:
    """Run the strategy and return this rank's share of its output and gradients, by name."""
    shared = layout_options(workload)
    q, k, v = (
        strategy.shard(x, **shared).contiguous().requires_grad_(workload.backward) for x in (full.q, full.k, full.v)
    )
    sinks = drawn_sinks(workload, q.device)
    leaves = (q, k, v) if sinks is None else (q, k, v, sinks)
    out = strategy.attention(q, k, v, causal=workload.causal, **attention_options(workload, sinks))
    results = {"out": out.detach()}
    if workload.backward:
        gradients = torch.autograd.grad(out, leaves, strategy.shard(full.dout, **shared).contiguous())
        results |= dict(zip(("dq", "dk", "dv", "dsinks"), gradients, strict=False))
    if "dsinks" in results:
        results["dsinks"] = summed_over_ranks(results["dsinks"])
    return results


def summed_over_ranks(x: Tensor) -> Tensor:
    """Return the sum over the ranks in float64, the same on every rank. Collective."""
    return torch.stack(gather_tensor(x.double().contiguous())).sum(0)


def whole_block(workload: Workload) -> JsonObject:
    """Return a kernel's arguments ``causal`` and ``parts`` for one call over the whole sequence."""
    mask = workload.mask()
    block = None if mask.plain else sharded_mask_of(mask, LAYOUTS["contiguous"], 1, workload.seq).block(0, 0)
    if block is None:
        return {"causal": workload.causal}
    return {"causal": block.causal, "parts": block.parts}


def kernel_results(
    kernel: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None,
    block: JsonObject,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> dict[str, Tensor]:
    """Call a kernel over a whole sequence; return its output and, with ``dout``, its gradients, by name.

    ``block`` is a `whole_block`. With ``sinks`` (H) there is ``dsinks`` (B, 1, H, 1), to be summed over B. If v has
    smaller heads than q, they are padded as a strategy pads them, except for the reference kernel.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    v_head_dim = v.shape[-1]
    padding = (0, q.shape[-1] - v_head_dim if kernel.production else 0)
    v = pad(v, padding)
    out, lse = kernel.forward(q, k, v, scale=scale, **block)
    # The kernel's output has a wider type if a row is in several parts of the mask.
    out = out.to(q.dtype)
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks.detach())
    if dout is None:
        return {"out": out[..., :v_head_dim]}
    dout = pad(dout, padding)
    gradients = kernel.backward(dout, q, k, v, lse, out=out, scale=scale, **block)
    results = {
        "out": out[..., :v_head_dim],
        "dq": gradients[0],
        "dk": gradients[1],
        "dv": gradients[2][..., :v_head_dim],
    }
    if sinks is not None:
        sink_weights = (sinks.detach().to(lse.dtype).view(1, -1, 1) - lse).exp()
        results["dsinks"] = -(sink_weights * row_product(dout, out)).sum(2)[:, None, :, None]
    return results


def reference_results(full: Tensors, workload: Workload, scale: float | None = None) -> dict[str, Tensor]:
    """Compute the float64 reference of output and gradients, by name, over the whole sequence.

    Computes one batch entry and kv head at a time, because the scores of all heads would not fit on a device.
    """
    kernel = MaskedReference(workload.mask(), softcap=workload.softcap or 0.0)
    group, sinks = workload.heads // workload.kv_heads, drawn_sinks(workload, full.q.device)
    collected: dict[str, list[list[Tensor]]] = {}
    for batch in range(workload.batch):
        parts: dict[str, list[Tensor]] = {}
        for head in range(workload.kv_heads):
            q_heads, kv_heads = slice(head * group, (head + 1) * group), slice(head, head + 1)
            q, k, v, dout = (
                x[batch : batch + 1, :, heads].double()
                for x, heads in ((full.q, q_heads), (full.k, kv_heads), (full.v, kv_heads), (full.dout, q_heads))
            )
            head_dout = dout if workload.backward else None
            head_sinks = None if sinks is None else sinks[q_heads]
            for name, tensor in kernel_results(
                kernel, q, k, v, head_dout, {"causal": workload.causal}, scale, head_sinks
            ).items():
                parts.setdefault(name, []).append(tensor)
        for name, tensors in parts.items():
            collected.setdefault(name, []).append(tensors)
    return {name: torch.cat([torch.cat(row, dim=2) for row in rows]) for name, rows in collected.items()}


def gather_rows(numbers: Sequence[Any], device: torch.device) -> list[list[Any]]:
    """Gather every rank's numbers, or rows of numbers, in rank order. Collective."""
    return [part.tolist() for part in gather_tensor(torch.tensor(numbers, dtype=torch.float64, device=device))]


def roundings(name: str, strategy: Strategy) -> int:
    """Return how often a tensor is rounded to the input's type between ranks."""
    # A strategy that mixes types, or does not state them, may round gradients at every hop.
    rounds_gradients = strategy.parameters.get("grad_wire", "input") not in ("exact", "fp32")
    return strategy.comm.size if rounds_gradients and name not in ("out", "dsinks") and strategy.comm.size > 1 else 0


def worst_error(rows: list[list[float]], dtype: torch.dtype, hops: int) -> TensorError:
    """Return one tensor's error on the rank with the largest error relative to its bound.

    ``rows`` holds, for each rank, the largest absolute error, the relative error, and the kernel's own relative error.
    """
    errors = [
        TensorError(
            max_abs=max_abs, rms=rms, kernel_rms=kernel_rms, allowed_rms=allowed_rms(kernel_rms, dtype, hops), rank=rank
        )
        for rank, (max_abs, rms, kernel_rms) in enumerate(rows)
    ]
    return max(errors, key=severity)


def severity(error: TensorError) -> float:
    """Return the error as a multiple of its bound; above 1 the result is wrong."""
    if error.rms == 0:
        return 0.0  # exact: passes even if the bound is 0
    return error.rms / error.allowed_rms if error.allowed_rms and math.isfinite(error.rms) else math.inf


def raise_if_wrong(errors: dict[str, TensorError], ending: str) -> None:
    """Raise `VerificationError` for the worst tensor, if it exceeds its bound; ``ending`` ends the message."""
    name, error = max(errors.items(), key=lambda item: severity(item[1]))
    if severity(error) <= 1.0:
        return
    raise VerificationError(
        f"wrong result on rank {error.rank}: {name} is off by {error.rms:.3g} (relative rms), {error.allowed_rms:.3g}"
        f" allowed, {error.kernel_rms:.3g} for the kernel alone, {ending}"
    )


def relative_rms(difference: Tensor, reference: Tensor) -> float:
    """Return the root mean square of a difference, relative to the reference's unless that is 0."""
    error, size = (x.double().square().mean().sqrt().item() for x in (difference, reference))
    return error / size if size > 0 else error
