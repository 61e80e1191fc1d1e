"""Comparison with dense attention over the whole sequence, for verification (`ringprof.proof.verify`) and `check`.

Every rank draws the same full tensors from one seed and computes its own tokens with the distributed attention. It
compares its share of out, dq, dk and dv with two other results:

* the reference, dense attention in float64, which gives the error of the result;
* one call of a kernel on one device over the whole sequence, which gives the kernel's own error on the same tokens:
  the error that rounding alone explains.

An error is the root mean square of the difference, relative to the root mean square of the reference, over one rank's
share of one tensor. With u the unit roundoff of the input type (2^-8 for bf16, 2^-11 for fp16, 2^-24 for fp32), a
result passes on a rank while

    error <= 3 · sqrt(kernel_error² + hops · u² / 3)        and at least 64 u for fp32

``hops`` is how often partial results are rounded to the input's type between ranks. Each of these hops rounds once, by
at most u, evenly spread (variance u² / 3). Independent roundings add as variances, so that the bound grows with the
square root of the hops. The kernel's own error counts up to 16 u: a kernel with a larger error is wrong itself. An
error that is not a number fails.

One wrong token among thousands would not exceed that bound. So each token is also compared on its own: its error may be
`TOKEN_FACTOR` times the bound, relative to the larger of that token's own reference and the mean one. (The gradient of
the first token's query is 0, but the kernel's error in it is not.) Where a kernel alone has an error at a token, three
times that error is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringprof.common.json_object import JsonObject
from ringprof.iteration.resolve import torch_dtype
from ringprof.iteration.shard import drawn_sinks
from ringprof.proof.result import TensorCheck
from ringprof.ranks.process_group import GroupRanks
from ringprof.run import TensorError
from ringprof.strategies.kernels.merge import row_product, with_sinks
from ringprof.strategies.kernels.reference import MaskedReference
from ringprof.strategies.masks.layouts import LAYOUTS
from ringprof.strategies.masks.sharded_mask import sharded_mask_of
from ringprof.workload.workload import Workload

SEED = 20260401
TOKENS_PER_RANK = {"cpu": 64, "cuda": 256}
MOST_TOKENS = 8192
"""Most tokens that are compared, because the reference is dense; many ranks get fewer tokens each."""
ERROR_FACTOR = 3.0
KERNEL_ERROR_LIMIT = 16
SINGLE_FLOOR = 64
TOKEN_FACTOR = 4.0
"""Factor by which the error of one token may exceed the bound over all tokens."""


@dataclass(frozen=True)
class Tensors:
    """Full inputs: q and dout (B, S, H, D), k and v (B, S, Hkv, D)."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def draw_inputs(workload: Workload, device: torch.device, seed: int = SEED) -> Tensors:
    """Draw full inputs on the CPU from one seed, so that they are the same on every rank and device."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, size: int) -> Tensor:
        shape = (workload.batch, workload.seq, heads, size)
        return torch.randn(shape, generator=generator).to(device=device, dtype=torch_dtype(workload))

    heads, kv_heads = workload.heads, workload.kv_heads
    size, v_head_dim = workload.head_dim, workload.v_head_dim or workload.head_dim
    return Tensors(draw(heads, size), draw(kv_heads, size), draw(kv_heads, v_head_dim), draw(heads, v_head_dim))


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
    smaller heads than q, they are padded as a strategy pads them, unless the kernel takes them.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    v_head_dim = v.shape[-1]
    padding = (0, 0 if kernel.takes_v_head_dim(q.shape[-1], v_head_dim) else q.shape[-1] - v_head_dim)
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


@dataclass(frozen=True)
class References:
    """This rank's share of two results over the whole sequence, by name."""

    exact: dict[str, Tensor]
    """Dense attention in float64."""
    kernel: dict[str, Tensor]
    """One call of a kernel."""

    @classmethod
    def of(
        cls, full: Tensors, workload: Workload, kernel: Any, shard: Callable[[Tensor], Tensor],
        scale: float | None = None,
    ) -> References:  # fmt: skip
        """Compute both on the full inputs; ``shard`` returns this rank's tokens of a full tensor."""

        def shares(whole: dict[str, Tensor]) -> dict[str, Tensor]:
            # Each whole tensor is freed before the next is sharded. ``dsinks`` is a sum over all tokens.
            parts = ((name, whole.pop(name)) for name in list(whole))
            return {name: x.sum((0, 1, 3)) if name == "dsinks" else shard(x) for name, x in parts}

        exact = shares(reference_results(full, workload, scale))
        dout, sinks = full.dout if workload.backward else None, drawn_sinks(workload, full.q.device)
        block = whole_block(workload)
        return cls(exact, shares(kernel_results(kernel, full.q, full.k, full.v, dout, block, scale, sinks)))


def allowed_rms(kernel_rms: float, dtype: torch.dtype, hops: int, explained_rms: float = 0.0) -> float:
    """Return the largest relative error that passes, by the formula in this module's docstring.

    ``hops`` is the number of roundings to the input's type between ranks; 0 if partial results are sent in float32.
    ``explained_rms`` is a relative error that something else explains.
    """
    unit = torch.finfo(dtype).eps / 2
    explained = min(kernel_rms, KERNEL_ERROR_LIMIT * unit) if math.isfinite(kernel_rms) else 0.0
    if dtype in (torch.float32, torch.float64):
        explained = max(explained, SINGLE_FLOOR * unit / ERROR_FACTOR)
    return ERROR_FACTOR * math.sqrt(explained**2 + hops * unit**2 / 3 + explained_rms**2)


def compare_results(
    results: dict[str, Tensor], references: References, positions: Tensor, dtype: torch.dtype,
    hops: Callable[[str], int], ranks: GroupRanks, explained_rms: float = 0.0,
    not_by_token: Collection[str] = ("dsinks",),
) -> tuple[dict[str, TensorCheck], dict[str, bool]]:  # fmt: skip
    """Compare each result with the references; return its error over all ranks and whether it is wrong on this rank.

    ``positions`` are those of this rank's tokens, ``hops`` returns the roundings between ranks of a tensor, and
    ``explained_rms`` is that of `allowed_rms`. Tensors are (B, S/N, H, D), except those of ``not_by_token``, which have
    no dimension of tokens. Collective.
    """
    rows = {}
    for name, x in results.items():
        exact = references.exact[name]
        kernel_difference = references.kernel[name].double() - exact
        kernel_rms = relative_rms(kernel_difference, exact)
        if name in not_by_token:
            # A sum over all rows may have too few numbers to estimate the effect of rounding from.
            rows[name] = error_row(x, exact, max(kernel_rms, torch.finfo(dtype).eps / 2))
            continue
        own_rms, kernel_rms_by_token, error_by_token = (
            y.square().mean((0, 2, 3)).sqrt() for y in (exact, kernel_difference, x.double() - exact)
        )
        mean_rms = own_rms.square().mean().sqrt().item()
        bound = TOKEN_FACTOR * allowed_rms(kernel_rms, dtype, hops(name), explained_rms) * own_rms.clamp_min(mean_rms)
        # Negated, so that an error that is NaN counts as wrong.
        wrong = ~(error_by_token <= torch.maximum(bound, ERROR_FACTOR * kernel_rms_by_token))
        first = positions[wrong].min().item() if wrong.any() else math.inf
        rows[name] = [*error_row(x, exact, kernel_rms)[:3], wrong.sum().item(), first]
    errors = errors_over_ranks(rows, dtype, hops, ranks, explained_rms)
    return errors, {
        name: not _combine_ranks([row], dtype, hops(name), explained_rms).equal for name, row in rows.items()
    }


def error_row(x: Tensor, exact: Tensor, kernel_rms: float) -> list[float]:
    """Return a tensor's errors on this rank, for `errors_over_ranks`, with no token counted as wrong.

    They are the largest absolute error, the relative error, the kernel's own relative error, the number of wrong
    tokens, and the position of the first wrong token (infinity where there is none).
    """
    difference = x.double() - exact
    return [difference.abs().max().item(), relative_rms(difference, exact), kernel_rms, 0, math.inf]


def errors_over_ranks(
    rows: dict[str, list[float]], dtype: torch.dtype, hops: Callable[[str], int], ranks: GroupRanks,
    explained_rms: float = 0.0,
) -> dict[str, TensorCheck]:  # fmt: skip
    """Return each tensor's error on the rank with the largest error relative to its bound. Collective.

    ``rows`` has this rank's `error_row` of each tensor.
    """
    by_rank = gather_numbers(list(rows.values()), ranks)
    return {
        name: _combine_ranks([rank_rows[index] for rank_rows in by_rank], dtype, hops(name), explained_rms)
        for index, name in enumerate(rows)
    }


def gather_numbers(numbers: Sequence[Any], ranks: GroupRanks) -> list[list[Any]]:
    """Gather every rank's numbers, or rows of numbers, in rank order. Collective."""
    own = torch.tensor(numbers, dtype=torch.float64).to(ranks.device)
    return [part.tolist() for part in ranks.gather_tensor(own)]


def _combine_ranks(rows: list[list[float]], dtype: torch.dtype, hops: int, explained_rms: float) -> TensorCheck:
    """Combine the `error_row` of each rank into the check of one tensor."""
    first = min(row[4] for row in rows)
    wrong = math.isfinite(first)
    return max((
        TensorCheck(
            max_abs=max_abs, rms=rms, kernel_rms=kernel_rms,
            allowed_rms=allowed_rms(kernel_rms, dtype, hops, explained_rms), rank=rank,
            wrong_tokens=int(sum(row[3] for row in rows)), first_token=int(first) if wrong else None,
            first_rank=[row[4] for row in rows].index(first) if wrong else None,
        )
        for rank, (max_abs, rms, kernel_rms, *_) in enumerate(rows)
    ), key=severity)  # fmt: skip


def severity(error: TensorError) -> float:
    """Return the error as a multiple of its bound; above 1 the result is wrong."""
    if error.rms == 0:
        return 0.0  # exact: passes even if the bound is 0
    return error.rms / error.allowed_rms if error.allowed_rms and math.isfinite(error.rms) else math.inf


def relative_rms(difference: Tensor, reference: Tensor) -> float:
    """Return the root mean square of a difference, relative to the reference's unless that is 0."""
    error, size = (x.double().square().mean().sqrt().item() for x in (difference, reference))
    return error / size if size > 0 else error
