"""Recurrences in pieces by the kernels of flash-linear-attention (Triton), in bfloat16, on a GPU.

Source: flash-linear-attention 0.6, whose functions do the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu, chunk_gated_delta_rule_fwd_h
from fla.ops.common.chunk_h import chunk_bwd_kernel_dh, chunk_fwd_kernel_h
from fla.ops.common.chunk_o import chunk_bwd_dqkwg, chunk_bwd_dv, chunk_bwd_dv_local, chunk_fwd_o
from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd, recompute_w_u_fwd
from fla.ops.gla.chunk import (
    chunk_gla_bwd_dA,
    chunk_gla_bwd_dqk_intra,
    chunk_gla_bwd_dqkg,
    chunk_gla_bwd_dv,
    chunk_gla_fwd_intra_gk,
    chunk_gla_fwd_o_gk,
)
from fla.ops.utils import chunk_local_cumsum
from fla.ops.utils.constant import RCP_LN2
from torch import Tensor

from .kernel import Inputs, Saved
from .launches import cached_kernel, with_cached_kernels
from .pieces import CHUNK, PieceKernel, Pieces

chunk_gated_delta_rule_bwd_dhu = with_cached_kernels(chunk_gated_delta_rule_bwd_dhu)
chunk_gated_delta_rule_fwd_h = with_cached_kernels(chunk_gated_delta_rule_fwd_h)
chunk_gated_delta_rule_fwd_intra = with_cached_kernels(chunk_gated_delta_rule_fwd_intra)
prepare_wy_repr_bwd = with_cached_kernels(prepare_wy_repr_bwd)
recompute_w_u_fwd = with_cached_kernels(recompute_w_u_fwd)
chunk_bwd_dqkwg = with_cached_kernels(chunk_bwd_dqkwg)
chunk_bwd_dv = with_cached_kernels(chunk_bwd_dv)
chunk_bwd_dv_local = with_cached_kernels(chunk_bwd_dv_local)
chunk_fwd_o = with_cached_kernels(chunk_fwd_o)
chunk_gla_bwd_dA = with_cached_kernels(chunk_gla_bwd_dA)
chunk_gla_bwd_dqk_intra = with_cached_kernels(chunk_gla_bwd_dqk_intra)
chunk_gla_bwd_dqkg = with_cached_kernels(chunk_gla_bwd_dqkg)
chunk_gla_bwd_dv = with_cached_kernels(chunk_gla_bwd_dv)
chunk_gla_fwd_intra_gk = with_cached_kernels(chunk_gla_fwd_intra_gk)
chunk_gla_fwd_o_gk = with_cached_kernels(chunk_gla_fwd_o_gk)
chunk_local_cumsum = with_cached_kernels(chunk_local_cumsum)

_WHOLE = 2**30
"""Split size, in tokens, at which the kernels of linear attention store one state per piece."""


class FlaDeltaRule(PieceKernel):
    """Kernel for the gated delta rule."""

    name = "fla"
    BLOCKS_PER_PROCESSOR = 2

    def blocks(self, x: Inputs) -> int:
        batch, heads, _, values = x.state_shape
        return batch * heads * -(-values // 64)

    def prepare(self, x: Inputs, pieces: Pieces) -> Any:
        assert x.beta is not None
        k, v, g, beta = (pieces.whole(tensor) for tensor in (x.k, x.v, x.g.squeeze(-1), x.beta))
        total = chunk_local_cumsum(g, CHUNK, scale=RCP_LN2, **pieces.options)
        w, u, solved = chunk_gated_delta_rule_fwd_intra(k=k, v=v, g=total, beta=beta, **pieces.options)
        return k, w, u, total, solved

    def effects(self, x: Inputs, pieces: Pieces, local: Any) -> tuple[Tensor, Tensor]:
        k, w, u, total = map(pieces.split, local[:4])
        batch, heads, keys, values = x.state_shape
        options = {"k": k, "w": w, "g": total, "output_final_state": True, "save_new_value": False}
        options |= pieces.scan_options
        states = chunk_gated_delta_rule_fwd_h(u=u, **options)[2]
        # The transition is what becomes of the identity where nothing is written.
        transitions = chunk_gated_delta_rule_fwd_h(
            u=u.new_zeros(*u.shape[:3], keys),
            initial_state=_identities(batch * pieces.count * heads, keys, x.q.device).view(-1, heads, keys, keys),
            **options,
        )[2]
        return states.view(batch, -1, heads, keys, values), transitions.view(batch, -1, heads, keys, keys)

    def forward(self, x: Inputs, pieces: Pieces, local: Any, initial: Tensor | None) -> tuple[Tensor, Saved]:
        k, w, u, total, solved = local
        h, written = _delta_states(pieces, k, w, u, total, initial)
        out = chunk_fwd_o(q=pieces.whole(x.q), k=k, v=written, h=h, g=total, scale=x.scale, **pieces.options)
        return out, (total, solved)

    def prepare_backward(self, x: Inputs, pieces: Pieces, kept: Any, initial: Tensor | None, dout: Tensor) -> Any:
        assert x.beta is not None
        total, solved = kept
        q, k, v, beta = (pieces.whole(tensor) for tensor in (x.q, x.k, x.v, x.beta))
        w, u = recompute_w_u_fwd(k=k, v=v, beta=beta, A=solved, g=total, **pieces.options)
        h, written = _delta_states(pieces, k, w, u, total, initial)
        dwritten = chunk_bwd_dv_local(q=q, k=k, g=total, do=dout, scale=x.scale, **pieces.options)
        return q, k, v, total, beta, solved, w, h, written, dout, dwritten

    def effects_backward(self, x: Inputs, pieces: Pieces, local: Any) -> Tensor:
        batch, *shape = x.state_shape
        like = x.q.new_empty(batch * pieces.count, *shape, dtype=torch.float32)
        gradients: Tensor = self._pass_back(x, pieces, local, h0=like)[1]
        return gradients

    def backward(self, x: Inputs, pieces: Pieces, local: Any, terminal: Tensor | None) -> Sequence[Tensor]:
        q, k, v, total, beta, solved, w, h, written, dout, dwritten = local
        dh, _, passed = self._pass_back(x, pieces, local, dht=terminal)
        dwritten = passed.view_as(dwritten)
        dq, dk, dw, dg = chunk_bwd_dqkwg(
            q=q, k=k, v=written, w=w, g=total, h=h, dv=dwritten, do=dout, dh=dh, scale=x.scale, **pieces.options
        )
        dk_too, dv, dbeta, dg_too = prepare_wy_repr_bwd(
            k=k, v=v, beta=beta, g=total, A=solved, dw=dw, du=dwritten, **pieces.options
        )
        dg = chunk_local_cumsum(dg.add_(dg_too), CHUNK, reverse=True, **pieces.options)
        return dq, dk.add_(dk_too), dv, dg, dbeta

    @staticmethod
    def _pass_back(x: Inputs, pieces: Pieces, local: Any, **states: Tensor | None) -> Any:
        """Return gradients: of the states after all chunks, of those before the pieces if ``h0`` is given, and of u."""
        q, k, _, total, _, _, w, _, _, dout, dwritten = local
        q, k, w, total, dout, dwritten = map(pieces.split, (q, k, w, total, dout, dwritten))
        return chunk_gated_delta_rule_bwd_dhu(
            q=q, k=k, w=w, g=total, do=dout, dv=dwritten, scale=x.scale, **states, **pieces.scan_options
        )


class FlaLinearAttention(PieceKernel):
    """Kernel for linear attention with a decay per head, or per head and key channel."""

    name = "fla"
    BLOCKS_PER_PROCESSOR = 4

    def blocks(self, x: Inputs) -> int:
        batch, heads, keys, values = x.state_shape
        return batch * heads * -(-keys // 64) * -(-values // 64)

    def prepare(self, x: Inputs, pieces: Pieces) -> Any:
        k, v, g = (pieces.whole(tensor) for tensor in (x.k, x.v, x.g))
        return k, v, chunk_local_cumsum(g if _by_channel(x) else g.squeeze(-1), CHUNK, scale=RCP_LN2, **pieces.options)

    def effects(self, x: Inputs, pieces: Pieces, local: Any) -> tuple[Tensor, Tensor]:
        _, _, total = local
        states = self._states(x, pieces, local, None, ends=True)
        batch, *shape = x.state_shape
        if pieces.even and total.shape[1] % CHUNK == 0:
            ends = total.view(batch * pieces.count, -1, CHUNK, *x.g.shape[2:])[:, :, -1]
        else:
            ends = total.view(-1, *x.g.shape[2:])[pieces.ends] * pieces.counted[..., None, None]
        decay = ends.sum(1).exp2()
        return states.view(batch, -1, *shape), decay.view(batch, -1, *x.transition_shape[1:])

    def forward(self, x: Inputs, pieces: Pieces, local: Any, initial: Tensor | None) -> tuple[Tensor, Saved]:
        k, v, total = local
        q = pieces.whole(x.q)
        h = self._states(x, pieces, local, initial)
        options = {"h": h, "g": total, "scale": x.scale, **pieces.options}
        if not _by_channel(x):
            return chunk_fwd_o(q=q, k=k, v=v, **options), (total,)
        scores = chunk_gla_fwd_intra_gk(q=q, k=k, g=total, scale=x.scale, **pieces.options)
        return chunk_gla_fwd_o_gk(q=q, v=v, A=scores, **options), (total, scores)

    def prepare_backward(self, x: Inputs, pieces: Pieces, kept: Any, initial: Tensor | None, dout: Tensor) -> Any:
        q, k, v = (pieces.whole(tensor) for tensor in (x.q, x.k, x.v))
        h = self._states(x, pieces, (k, v, kept[0]), initial, dtype=torch.float32)
        return q, k, v, kept, h, dout

    def effects_backward(self, x: Inputs, pieces: Pieces, local: Any) -> Tensor:
        return self._pass_back(x, pieces, local, None, starts=True)

    def backward(self, x: Inputs, pieces: Pieces, local: Any, terminal: Tensor | None) -> Sequence[Tensor]:
        q, k, v, (total, *scores), h, dout = local
        dh = self._pass_back(x, pieces, local, terminal)
        common = {"do": dout, "g": total, **pieces.options}
        if scores:
            dv = chunk_gla_bwd_dv(k=k, A=scores[0], dh=dh, **common)
            dscores = chunk_gla_bwd_dA(v=v, do=dout, scale=x.scale, **pieces.options)
            dq, dk = chunk_gla_bwd_dqk_intra(q=q, k=k, g=total, dA=dscores, **pieces.options)
            dq, dk, dg = chunk_gla_bwd_dqkg(q=q, k=k, v=v, h=h, dh=dh, dq=dq, dk=dk, scale=x.scale, **common)
            return dq, dk, dv, dg
        dq, dk, _, dg = chunk_bwd_dqkwg(q=q, k=k, v=v, h=h, dh=dh, scale=x.scale, **common)
        dv = chunk_bwd_dv(q=q, k=k, dh=dh, scale=x.scale, **common)
        return dq, dk, dv, chunk_local_cumsum(dg, CHUNK, reverse=True, **pieces.options)

    @staticmethod
    def _states(
        x: Inputs, pieces: Pieces, local: Any, initial: Tensor | None, *, ends: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the states before all chunks, in ``dtype`` (None: k's), or with ``ends`` those after all pieces."""
        k, v, total = map(pieces.split, local)
        grid, arguments, h, last = _prepare_scan(x, pieces, k, dtype or k.dtype, ends=ends)
        _FORWARD_SCAN[grid](
            k=k, v=v, h=h, **_gates(x, total), h0=initial, ht=last, **arguments,
        )  # fmt: skip
        return h if last is None else last

    @staticmethod
    def _pass_back(x: Inputs, pieces: Pieces, local: Any, terminal: Tensor | None, *, starts: bool = False) -> Tensor:
        """Return the gradients of the states after all chunks, or with ``starts`` of those before all pieces."""
        q, k, _, (total, *_), _, dout = local
        q, k, total, dout = map(pieces.split, (q, k, total, dout))
        grid, arguments, dh, first = _prepare_scan(x, pieces, k, torch.float32, ends=starts)
        _BACKWARD_SCAN[grid](
            q=q, **_gates(x, total), do=dout, dh=dh, dht=terminal, dh0=first, **arguments, scale=x.scale,
            HQ=k.shape[2], NG=1,
        )  # fmt: skip
        return dh if first is None else first


# fla's functions around these kernels make the host wait for the GPU where pieces are not even.
_FORWARD_SCAN, _BACKWARD_SCAN = cached_kernel(chunk_fwd_kernel_h), cached_kernel(chunk_bwd_kernel_dh)


def _prepare_scan(
    x: Inputs, pieces: Pieces, k: Tensor, dtype: torch.dtype, *, ends: bool
) -> tuple[Callable[[dict[str, Any]], tuple[int]], dict[str, Any], Tensor, Tensor | None]:
    """Prepare `_FORWARD_SCAN` or `_BACKWARD_SCAN` over all pieces.

    Return the grid, the arguments other than the tensors of tokens and states, and memory for the states of all chunks
    in ``dtype`` and for one state per piece.

    With ``ends`` the first memory has room for one state per piece only; without, the second is None.
    """
    (rows, tokens, heads, keys), values = k.shape, x.v.shape[-1]
    every = x.v.shape[0] * pieces.count
    count = every if ends else len(pieces.chunks)
    h = k.new_empty(rows, count // rows, heads, keys, values, dtype=dtype)
    end = k.new_empty(every, heads, keys, values, dtype=torch.float32) if ends else None
    by_channel = _by_channel(x)
    arguments = {
        "cu_seqlens": None if pieces.even else pieces.bounds,
        "split_offsets": None if pieces.even else pieces.offsets[int(ends)],
        "T": tokens, "H": heads, "K": keys, "V": values, "BT": CHUNK, "BS": _WHOLE if ends else CHUNK,
        "USE_G": not by_channel, "USE_G_GAMMA": False, "USE_GK": by_channel, "USE_GV": False, "STATE_V_FIRST": False,
    }  # fmt: skip

    def grid(tuned: dict[str, Any]) -> tuple[int]:
        return (-(-keys // tuned["BK"]) * -(-values // tuned["BV"]) * every * heads,)

    return grid, arguments, h, end


@lru_cache(maxsize=4)
def _identities(count: int, size: int, device: torch.device) -> Tensor:
    """Return ``count`` identity matrices (count, size, size), in float32."""
    return torch.eye(size, device=device).repeat(count, 1, 1)


def _delta_states(
    pieces: Pieces, k: Tensor, w: Tensor, u: Tensor, total: Tensor, initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the states before all chunks, and what the tokens write, of u's shape."""
    k, w, values, total = map(pieces.split, (k, w, u, total))
    h, written, _ = chunk_gated_delta_rule_fwd_h(
        k=k, w=w, u=values, g=total, initial_state=initial, **pieces.scan_options
    )
    return h, written.view_as(u)


def _by_channel(x: Inputs) -> bool:
    return x.g.shape[-1] > 1


def _gates(x: Inputs, total: Tensor) -> dict[str, Tensor | None]:
    by_channel = _by_channel(x)
    return {"g": None if by_channel else total, "g_gamma": None, "gk": total if by_channel else None, "gv": None}
