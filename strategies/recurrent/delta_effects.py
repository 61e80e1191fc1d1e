"""Triton kernels for what a piece of the gated delta rule does to a state, and to a gradient that passes back.

They run the recurrence over the chunks of a piece, and store its last state alone. With w and u of the WY form, the
decay total_t summed from the chunk's first token in units of log2, and T the chunk's last token, a chunk does

    written_t = u_t - w_t S
    S        <- exp2(total_T) S + sum over t of exp2(total_T - total_t) k_t written_t^T

From a state of zeros this gives C of `Carry`. Its transition M has the identity as first state, and no u. fla's kernel
for C and M (`chunk_cp_fwd_h`) multiplies the transitions of all chunks in float32 instead.

Source: Gated Delta Networks (arXiv 2412.06464).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from fla.utils import autotune_cache_kwargs
from torch import Tensor

from .pieces import CHUNK

_CONFIGS = [
    triton.Config({"COLUMNS": columns}, num_warps=warps, num_stages=stages)
    for columns, warps in ((32, 4), (64, 4), (64, 8))
    for stages in (1, 2, 3)
    if stages > 1 or columns == 32  # one stage is for the largest heads, whose tiles fill the shared memory
]


def effects_of(k: Tensor, w: Tensor, u: Tensor, total: Tensor, bounds: Tensor) -> Tensor:
    """Return [C | M] (P, H, K, V + K) of P pieces, in float32.

    k and w are (S, H, K), u (S, H, V) and total (S, H), all dense. ``bounds`` (P + 1, int64) are cumulative lengths.
    """
    _, heads, keys = k.shape
    values, pieces = u.shape[-1], len(bounds) - 1
    maps = k.new_empty(pieces, heads, keys, values + keys, dtype=torch.float32)
    _effects[lambda meta: (sum(triton.cdiv(size, meta["COLUMNS"]) for size in (values, keys)), heads, pieces)](
        k, w, u, total, bounds, maps, H=heads, K=keys, V=values, ROWS=max(16, triton.next_power_of_2(keys)), CHUNK=CHUNK
    )
    return maps


def effects_backward_of(
    q: Tensor, k: Tensor, w: Tensor, dout: Tensor, dwritten: Tensor, total: Tensor, bounds: Tensor, scale: float
) -> Tensor:
    """Return the gradients (P, H, K, V) of the states before P pieces, in float32; the states after them have none.

    dout and dwritten, the gradient of what each token writes through its own chunk's outputs, are (S, H, V). Other
    arguments are those of `effects_of`.
    """
    _, heads, keys = k.shape
    values, pieces = dout.shape[-1], len(bounds) - 1
    gradients = k.new_empty(pieces, heads, keys, values, dtype=torch.float32)
    _effects_backward[lambda meta: (triton.cdiv(values, meta["COLUMNS"]), heads, pieces)](
        q, k, w, dout, dwritten, total, bounds, gradients, scale, H=heads, K=keys, V=values,
        ROWS=max(16, triton.next_power_of_2(keys)), CHUNK=CHUNK,
    )  # fmt: skip
    return gradients


@triton.autotune(configs=_CONFIGS, key=["H", "K", "V"], **autotune_cache_kwargs)
@triton.jit
def _effects(
    k, w, u, total, bounds, maps,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    block, head, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end = tl.load(bounds + piece), tl.load(bounds + piece + 1)
    rows = tl.arange(0, ROWS)
    # The first blocks are columns of C, the others columns of M.
    of_state = block < tl.cdiv(V, COLUMNS)
    columns = tl.where(of_state, block, block - tl.cdiv(V, COLUMNS)) * COLUMNS + tl.arange(0, COLUMNS)
    state = tl.where((rows[:, None] == columns[None, :]) & (of_state == 0), 1.0, 0.0)
    for chunk in range(tl.cdiv((end - first).to(tl.int32), CHUNK)):
        start = first + chunk * CHUNK
        tokens = start + tl.arange(0, CHUNK)
        valid = tokens < end
        last = tl.load(total + (tl.minimum(start + CHUNK, end) - 1) * H + head)
        decay = tl.load(total + tokens * H + head, mask=valid, other=0.0)
        offsets = (tokens * H + head)[:, None]
        of_keys = valid[:, None] & (rows < K)[None, :]
        of_values = valid[:, None] & (columns < V)[None, :] & of_state
        block_w = tl.load(w + offsets * K + rows[None, :], mask=of_keys, other=0.0)
        block_u = tl.load(u + offsets * V + columns[None, :], mask=of_values, other=0.0)
        block_k = tl.load(k + offsets * K + rows[None, :], mask=of_keys, other=0.0)
        written = block_u - tl.dot(block_w, state.to(block_w.dtype))
        written *= tl.where(valid, tl.exp2(last - decay), 0.0)[:, None]
        state = state * tl.exp2(last) + tl.dot(tl.trans(block_k), written.to(block_k.dtype))
    place = tl.where(of_state, columns, columns + V)
    inside = (rows < K)[:, None] & (columns < tl.where(of_state, V, K))[None, :]
    target = maps + ((piece.to(tl.int64) * H + head) * K + rows[:, None]) * (V + K) + place[None, :]
    tl.store(target, state, mask=inside)


@triton.autotune(configs=_CONFIGS, key=["H", "K", "V"], **autotune_cache_kwargs)
@triton.jit
def _effects_backward(
    q, k, w, dout, dwritten, total, bounds, gradients, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    block, head, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end = tl.load(bounds + piece), tl.load(bounds + piece + 1)
    rows = tl.arange(0, ROWS)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    state = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    chunks = tl.cdiv((end - first).to(tl.int32), CHUNK)
    for passed in range(chunks):
        start = first + (chunks - 1 - passed) * CHUNK
        tokens = start + tl.arange(0, CHUNK)
        valid = tokens < end
        last = tl.load(total + (tl.minimum(start + CHUNK, end) - 1) * H + head)
        decay = tl.load(total + tokens * H + head, mask=valid, other=0.0)
        offsets = (tokens * H + head)[:, None]
        of_keys = valid[:, None] & (rows < K)[None, :]
        of_values = valid[:, None] & (columns < V)[None, :]
        block_k = tl.load(k + offsets * K + rows[None, :], mask=of_keys, other=0.0)
        block_w = tl.load(w + offsets * K + rows[None, :], mask=of_keys, other=0.0)
        block_q = tl.load(q + offsets * K + rows[None, :], mask=of_keys, other=0.0)
        block_dout = tl.load(dout + offsets * V + columns[None, :], mask=of_values, other=0.0)
        written = tl.load(dwritten + offsets * V + columns[None, :], mask=of_values, other=0.0)
        passed_on = tl.dot(block_k, state.to(block_k.dtype)) * tl.where(valid, tl.exp2(last - decay), 0.0)[:, None]
        decayed = (block_q * (tl.exp2(decay) * scale)[:, None]).to(block_q.dtype)
        state = state * tl.exp2(last) + tl.dot(tl.trans(decayed), block_dout)
        state -= tl.dot(tl.trans(block_w), (written + passed_on).to(block_w.dtype))
    target = gradients + ((piece.to(tl.int64) * H + head) * K + rows[:, None]) * V + columns[None, :]
    tl.store(target, state, mask=(rows < K)[:, None] & (columns < V)[None, :])
