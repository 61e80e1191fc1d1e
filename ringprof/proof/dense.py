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
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import pad

from ringprof.common.json_object import JsonObject, from_json, to_json
from ringprof.iteration.resolve import torch_dtype
from ringprof.iteration.shard import drawn_sinks
from ringprof.proof.result import TensorCheck
from ringprof.ranks.process_group import GroupRanks
from ringprof.run import TensorError
from ringprof.strategies.kernels.merge import row_product, with_sinks
from ringprof.strategies.kernels.reference import MaskedReference, ReferenceKernel
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
_Value = TypeVar("_Value")
REFERENCE = ReferenceKernel()
"""Dense attention in float64 of any queries over any keys, as many kv heads as heads."""


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


def each_kv_head(full: Tensors, workload: Workload) -> Iterator[tuple[int, slice, int, list[Tensor]]]:
    """Yield each batch entry and kv head: the entry, the query heads, the kv head, and q, k, v and dout of these.

    The tensors are (1, S, query heads, D) in float64, with k and v expanded. The scores of all heads would not fit on
    a device.
    """
    group = workload.heads // workload.kv_heads
    for entry, kv_head in product(range(workload.batch), range(workload.kv_heads)):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        q, dout = (x[entry : entry + 1, :, heads].double() for x in (full.q, full.dout))
        k, v = (x[entry, None, :, kv_head, None].double().expand(-1, -1, group, -1) for x in (full.k, full.v))
        yield entry, heads, kv_head, [q, k, v, dout]


def reference_results(full: Tensors, workload: Workload, scale: float | None = None) -> dict[str, Tensor]:
    """Compute the float64 reference of output and gradients, by name, over the whole sequence."""
    kernel = MaskedReference(workload.mask(), softcap=workload.softcap or 0.0)
    sinks, results = drawn_sinks(workload, full.q.device), dict[str, Tensor]()
    for entry, heads, kv_head, (q, k, v, dout) in each_kv_head(full, workload):
        own_sinks = None if sinks is None else sinks[heads]
        block, own_dout = {"causal": workload.causal}, dout if workload.backward else None
        for name, x in kernel_results(kernel, q, k[:, :, :1], v[:, :, :1], own_dout, block, scale, own_sinks).items():
            of_keys = name in ("dk", "dv")
            if name not in results:
                size = workload.kv_heads if of_keys else workload.heads
                results[name] = x.new_empty(workload.batch, x.shape[1], size, x.shape[3])
            results[name][entry, :, slice(kv_head, kv_head + 1) if of_keys else heads] = x[0]
    return results


def reference_shares(
    full: Tensors, workload: Workload, kernel: Any, shard: Callable[[Tensor], Tensor], scale: float | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return this rank's share of dense attention in float64 and of one call of ``kernel``, each by name.

    Both are computed on the full inputs; ``shard`` returns this rank's tokens of a full tensor.
    """

    def shares(whole: dict[str, Tensor]) -> dict[str, Tensor]:
        # Each whole tensor is freed before the next is sharded. ``dsinks`` is a sum over all tokens.
        parts = ((name, whole.pop(name)) for name in list(whole))
        return {name: x.sum((0, 1, 3)) if name == "dsinks" else shard(x) for name, x in parts}

    exact = shares(reference_results(full, workload, scale))
    dout, sinks = full.dout if workload.backward else None, drawn_sinks(workload, full.q.device)
    return exact, shares(kernel_results(kernel, full.q, full.k, full.v, dout, whole_block(workload), scale, sinks))


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
    results: dict[str, Tensor], exact_results: dict[str, Tensor], of_kernel: dict[str, Tensor], positions: Tensor,
    dtype: torch.dtype, hops: Callable[[str], int], ranks: GroupRanks, explained_rms: float = 0.0,
    not_by_token: Collection[str] = ("dsinks",),
) -> tuple[dict[str, TensorCheck], dict[str, bool]]:  # fmt: skip
    """Compare each result with the exact one; return its error over all ranks and whether it is wrong on this rank.

    ``of_kernel`` are results of one call of a kernel. ``positions`` are those of this rank's tokens, ``hops`` returns
    the roundings between ranks of a tensor, and ``explained_rms`` is that of `allowed_rms`. Tensors are (B, S/N, H, D),
    except those of ``not_by_token``, which have no dimension of tokens. Collective.
    """
    errors = {}
    for name, x in results.items():
        exact, wrong = exact_results[name], None
        kernel_difference = of_kernel[name].double() - exact
        kernel_rms = relative_rms(kernel_difference, exact)
        if name in not_by_token:
            # A sum over all rows may have too few numbers to estimate the effect of rounding from.
            kernel_rms = max(kernel_rms, torch.finfo(dtype).eps / 2)
        allowed = allowed_rms(kernel_rms, dtype, hops(name), explained_rms)
        if name not in not_by_token:
            own_rms, kernel_rms_by_token, error_by_token = (
                y.square().mean((0, 2, 3)).sqrt() for y in (exact, kernel_difference, x.double() - exact)
            )
            mean_rms = own_rms.square().mean().sqrt().item()
            bound = TOKEN_FACTOR * allowed * own_rms.clamp_min(mean_rms)
            # Negated, so that an error that is NaN counts as wrong.
            wrong = positions[~(error_by_token <= torch.maximum(bound, ERROR_FACTOR * kernel_rms_by_token))]
        errors[name] = error_on_rank(x, exact, kernel_rms, allowed, ranks.rank, wrong)
    return worst_errors(errors, ranks), {name: not error.equal for name, error in errors.items()}


def error_on_rank(
    x: Tensor, exact: Tensor, kernel_rms: float, allowed: float, rank: int, wrong: Tensor | None = None
) -> TensorCheck:
    """Return a tensor's error on this rank; ``wrong`` are the positions of wrong tokens, None where none is known."""
    difference, count = x.double() - exact, 0 if wrong is None else len(wrong)
    return TensorCheck(
        max_abs=difference.abs().max().item(), rms=relative_rms(difference, exact), kernel_rms=kernel_rms,
        allowed_rms=allowed, rank=rank, wrong_tokens=count,
        first_token=int(wrong.min()) if wrong is not None and count else None, first_rank=rank if count else None,
    )  # fmt: skip


def worst_errors(errors: dict[str, TensorCheck], ranks: GroupRanks) -> dict[str, TensorCheck]:
    """Return each tensor's error on the rank where it is largest relative to its bound, with all wrong tokens.

    ``errors`` are those on this rank. Collective.
    """
    worst = {}
    for name, by_rank in gather_by_name(errors, ranks).items():
        first = min((error for error in by_rank if error.wrong_tokens), key=lambda error: error.first_token or 0,
                    default=by_rank[0])  # fmt: skip
        worst[name] = msgspec.structs.replace(
            max(by_rank, key=severity), wrong_tokens=sum(error.wrong_tokens for error in by_rank),
            first_token=first.first_token, first_rank=first.first_rank,
        )  # fmt: skip
    return worst


def gather_by_name(values: dict[str, _Value], ranks: GroupRanks) -> dict[str, list[_Value]]:
    """Gather every rank's value of each name, in rank order. Collective."""
    kind: Any = dict[str, type(next(iter(values.values()), None))]  # type: ignore[misc]
    by_rank = [from_json(part, kind) for part in ranks.gather_bytes(to_json(values))]
    return {name: [of_rank[name] for of_rank in by_rank] for name in values}


def gather_numbers(numbers: Sequence[Any], ranks: GroupRanks) -> list[list[Any]]:
    """Gather every rank's numbers, or rows of numbers, in rank order. Collective."""
    own = torch.tensor(numbers, dtype=torch.float64).to(ranks.device)
    return [part.tolist() for part in ranks.gather_tensor(own)]


def severity(error: TensorError) -> float:
    """Return the error as a multiple of its bound; above 1 the result is wrong."""
    if error.rms == 0:
        return 0.0  # exact: passes even if the bound is 0
    return error.rms / error.allowed_rms if error.allowed_rms and math.isfinite(error.rms) else math.inf


def relative_rms(difference: Tensor, reference: Tensor) -> float:
    """Return the root mean square of a difference, relative to the reference's unless that is 0."""
    error, size = (x.double().square().mean().sqrt().item() for x in (difference, reference))
    return error / size if size > 0 else error
