"""Right before fast: the strategy's result against a dense float64 reference, on the ranks that will be timed.

Every rank makes the same full tensors from one seed and shards them, runs the strategy, and compares its share of
out, dq, dk and dv with two others:

* the reference: dense attention in float64, which gives the strategy's error;
* one call of the same kernel on one device over the whole sequence, which gives the kernel's own error on the same
  tokens: what rounding alone explains.

An error is the root mean square of the difference, relative to the root mean square of the reference, over one rank's
share of one tensor. With u the unit roundoff of the input type (2^-8 for bf16, 2^-11 for fp16, 2^-24 for fp32), a
result passes on a rank while

    error <= 3 · sqrt(kernel_error² + hops · u² / 3)        and at least 64 u for fp32

with hops = 0 where partial results travel in float32, and hops = the world size for gradients that travel in the
input's type: each of those hops rounds once, by at most u, evenly spread (variance u² / 3), and independent roundings
add as variances, so that the bound grows with the square root of the hops. The kernel's own error counts up to 16 u: a
kernel further off than that is wrong itself. An error that is not a number fails.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringprof.errors import UnsupportedWorkloadError, VerificationError
from ringprof.json_object import JsonObject, Params
from ringprof.record.measure import drawn_sinks
from ringprof.record.process_group import gather_tensor
from ringprof.record.resolve import fits, kernel_of, layout_options, mask_options, torch_dtype
from ringprof.run import TensorError, Verification, Workload
from ringprof.strategies.base import Strategy
from ringprof.strategies.kernels.builtin import MaskedReference
from ringprof.strategies.kernels.merge import row_product, with_sinks
from ringprof.strategies.masks.layouts import LAYOUTS
from ringprof.strategies.masks.sharded_mask import sharded_mask_of

SEED = 20260401
TOKENS_PER_RANK = {"cpu": 64, "cuda": 256}
MOST_TOKENS = 8192
"""The reference is dense: many ranks get fewer tokens each."""
FACTOR = 3.0
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
    """Check a strategy that stands on its ranks; all ranks must call this, and all get the same answer.

    Raises `VerificationError` naming the worst rank and tensor where a result is wrong.
    """
    comm = strategy.comm
    seq = verification_seq(type(strategy), workload, comm.size, device.type, strategy.parameters)
    workload = workload.at(seq)
    full = draw_inputs(workload, device)
    measured = _strategy_results(strategy, full, workload)
    kernel = kernel_of(strategy, full.q, workload).again()
    rows, names = [], list(measured)
    dout = full.dout if workload.backward else None
    exact = reference_results(full, workload)
    whole = whole_block(workload)
    sinks = drawn_sinks(workload, device)
    alone = kernel_results(kernel, full.q, full.k, full.v, dout, whole, sinks=sinks)
    for name in names:
        share = _share(strategy, name, exact[name], workload)
        difference = measured[name].double() - share
        kernel_error = relative_rms(_share(strategy, name, alone[name], workload).double() - share, share)
        if name == "dsinks":
            # A sum over all rows, of which few numbers are left to tell how far rounding goes.
            kernel_error = max(kernel_error, torch.finfo(torch_dtype(workload)).eps / 2)
        rows.append([difference.abs().max().item(), relative_rms(difference, share), kernel_error])
    by_rank = of_ranks(rows, device)
    errors = {
        name: worst([rank_rows[index] for rank_rows in by_rank], torch_dtype(workload), roundings(name, strategy))
        for index, name in enumerate(names)
    }
    refuse_wrong(errors, f"at sequence {seq}; nothing was timed")
    return Verification(passed=True, seq=seq, errors=errors)


def _share(strategy: Strategy, name: str, whole: Tensor, workload: Workload) -> Tensor:
    """This rank's rows of a result over the whole sequence; all of a gradient that the ranks add up."""
    return whole.sum((0, 1, 3)) if name == "dsinks" else strategy.shard(whole, **layout_options(workload))


def verification_seq(strategy: type[Strategy], workload: Workload, world: int, device_type: str, params: Params) -> int:
    """The sequence length of the check: at least 64 tokens a rank on CPU and 256 on GPU, as the layout needs it.

    Never longer than the workload's own. Raises `UnsupportedWorkloadError` where no short sequence fits.
    """
    divisor = int(strategy.layout.divisor(world))
    tokens = min(TOKENS_PER_RANK[device_type] * world, max(MOST_TOKENS, divisor), workload.seq)
    for multiple in range(max(1, tokens // divisor), workload.seq // divisor + 1):
        if fits(strategy, workload, world, params, seq=multiple * divisor) is None:
            return multiple * divisor
    raise UnsupportedWorkloadError(f"no sequence up to {workload.seq} fits {strategy.__name__} on {world} ranks")


def allowed_rms(kernel_rms: float, dtype: torch.dtype, hops: int) -> float:
    """The largest relative error that passes; the formula stands at the top of the module.

    ``hops`` is the number of roundings to the input's type on the way, 0 where partial results travel in float32.
    """
    unit = torch.finfo(dtype).eps / 2
    explained = min(kernel_rms, KERNEL_ERROR_LIMIT * unit) if math.isfinite(kernel_rms) else 0.0
    if dtype in (torch.float32, torch.float64):
        explained = max(explained, SINGLE_FLOOR * unit / FACTOR)
    return FACTOR * math.sqrt(explained**2 + hops * unit**2 / 3)


def draw_inputs(workload: Workload, device: torch.device, seed: int = SEED) -> Tensors:
    """The same on every rank and device: drawn on the CPU, from one seed."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, size: int) -> Tensor:
        shape = (workload.batch, workload.seq, heads, size)
        return torch.randn(shape, generator=generator).to(device=device, dtype=torch_dtype(workload))

    heads, kv_heads = workload.heads, workload.kv_heads
    size, of_v = workload.head_dim, workload.v_head_dim or workload.head_dim
    return Tensors(draw(heads, size), draw(kv_heads, size), draw(kv_heads, of_v), draw(heads, of_v))


def _strategy_results(strategy: Strategy, full: Tensors, workload: Workload) -> dict[str, Tensor]:
    """This rank's share of the strategy's output and gradients."""
    shared = layout_options(workload)
    q, k, v = (
        strategy.shard(x, **shared).contiguous().requires_grad_(workload.backward) for x in (full.q, full.k, full.v)
    )
    sinks = drawn_sinks(workload, q.device)
    leaves = (q, k, v) if sinks is None else (q, k, v, sinks)
    out = strategy.attention(q, k, v, causal=workload.causal, **mask_options(workload, sinks))
    results = {"out": out.detach()}
    if workload.backward:
        gradients = torch.autograd.grad(out, leaves, strategy.shard(full.dout, **shared).contiguous())
        results |= dict(zip(("dq", "dk", "dv", "dsinks"), gradients, strict=False))
    if "dsinks" in results:
        results["dsinks"] = summed_over_ranks(results["dsinks"])
    return results


def summed_over_ranks(x: Tensor) -> Tensor:
    """In float64, the same on every rank."""
    return torch.stack(gather_tensor(x.double().contiguous())).sum(0)


def whole_block(workload: Workload) -> JsonObject:
    """What a kernel is told that computes the whole sequence in one call: ``causal`` and ``parts``."""
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
    """Output and, with ``dout``, gradients of one call of a kernel over the whole sequence, a `whole_block`.

    ``dsinks`` of ``sinks`` (H) is (B, 1, H, 1), to be added up. Smaller heads of v are filled up for a kernel that is
    no reference, as a strategy does.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    of_v = v.shape[-1]
    filling = (0, q.shape[-1] - of_v if kernel.production else 0)
    v = pad(v, filling)
    out, lse = kernel.forward(q, k, v, scale=scale, **block)
    # Wider where a row is in several parts.
    out = out.to(q.dtype)
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks.detach())
    if dout is None:
        return {"out": out[..., :of_v]}
    dout = pad(dout, filling)
    gradients = kernel.backward(dout, q, k, v, lse, out=out, scale=scale, **block)
    found = {"out": out[..., :of_v], "dq": gradients[0], "dk": gradients[1], "dv": gradients[2][..., :of_v]}
    if sinks is not None:
        taken = (sinks.detach().to(lse.dtype).view(1, -1, 1) - lse).exp()
        found["dsinks"] = -(taken * row_product(dout, out)).sum(2)[:, None, :, None]
    return found


def reference_results(full: Tensors, workload: Workload, scale: float | None = None) -> dict[str, Tensor]:
    """The same in float64, one batch entry and kv head at a time: the scores of all heads would not fit a device."""
    kernel = MaskedReference(workload.mask(), softcap=workload.softcap or 0.0)
    group, sinks = workload.heads // workload.kv_heads, drawn_sinks(workload, full.q.device)
    collected: dict[str, list[list[Tensor]]] = {}
    for batch in range(workload.batch):
        parts: dict[str, list[Tensor]] = {}
        for head in range(workload.kv_heads):
            mine, theirs = slice(head * group, (head + 1) * group), slice(head, head + 1)
            q, k, v, dout = (
                x[batch : batch + 1, :, heads].double()
                for x, heads in ((full.q, mine), (full.k, theirs), (full.v, theirs), (full.dout, mine))
            )
            given = dout if workload.backward else None
            own = None if sinks is None else sinks[mine]
            for name, tensor in kernel_results(kernel, q, k, v, given, {"causal": workload.causal}, scale, own).items():
                parts.setdefault(name, []).append(tensor)
        for name, tensors in parts.items():
            collected.setdefault(name, []).append(tensors)
    return {name: torch.cat([torch.cat(row, dim=2) for row in rows]) for name, rows in collected.items()}


def of_ranks(numbers: Sequence[Any], device: torch.device) -> list[list[Any]]:
    """The numbers of every rank, or rows of them, in rank order. Collective."""
    return [part.tolist() for part in gather_tensor(torch.tensor(numbers, dtype=torch.float64, device=device))]


def roundings(name: str, strategy: Strategy) -> int:
    """How often a tensor is rounded to the input's type on its way over the ranks."""
    # A mixture of types, or a strategy that does not say, may round gradients at every hop.
    narrow = strategy.parameters.get("grad_wire", "input") not in ("exact", "fp32")
    return strategy.comm.size if narrow and name not in ("out", "dsinks") and strategy.comm.size > 1 else 0


def worst(rows: list[list[float]], dtype: torch.dtype, hops: int) -> TensorError:
    """One tensor's errors on the rank that comes closest to what is allowed, or passes it furthest.

    ``rows`` holds each rank's largest absolute error, relative error, and relative error of the kernel alone.
    """
    errors = [
        TensorError(
            max_abs=max_abs, rms=rms, kernel_rms=kernel_rms, allowed_rms=allowed_rms(kernel_rms, dtype, hops), rank=rank
        )
        for rank, (max_abs, rms, kernel_rms) in enumerate(rows)
    ]
    return max(errors, key=severity)


def severity(error: TensorError) -> float:
    """The error as a multiple of what is allowed: above 1 it is wrong."""
    if error.rms == 0:
        return 0.0  # exact, where nothing else may be allowed
    return error.rms / error.allowed_rms if error.allowed_rms and math.isfinite(error.rms) else math.inf


def refuse_wrong(errors: dict[str, TensorError], where: str) -> None:
    """Raises `VerificationError` for the tensor furthest off, if that is too far; ``where`` ends its message."""
    name, error = max(errors.items(), key=lambda item: severity(item[1]))
    if severity(error) <= 1.0:
        return
    raise VerificationError(
        f"wrong result on rank {error.rank}: {name} is off by {error.rms:.3g} (relative rms), {error.allowed_rms:.3g}"
        f" allowed, {error.kernel_rms:.3g} for the kernel alone, {where}"
    )


def relative_rms(difference: Tensor, reference: Tensor) -> float:
    """The root mean square of a difference, relative to the reference's where that is not 0."""
    error, size = (x.double().square().mean().sqrt().item() for x in (difference, reference))
    return error / size if size > 0 else error
