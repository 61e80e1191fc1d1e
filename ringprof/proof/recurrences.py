"""Recurrences token by token in float64, as their papers write them, and the results of known mistakes over ranks.

This module reads nothing of `ringprof.strategies.recurrent`. A wrong result is compared with the result that each
mistake gives; where one equals it, the mistake is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_SEGMENT, _KEPT_BYTES = 16, 2**31
"""Tokens whose states autograd keeps at a time where those of all tokens take more bytes than this; the others are
computed again in the backward pass."""
_CHUNK, _CHUNK_OF_CHANNELS = 64, 16
"""Tokens per chunk of `ChunkedRecurrence`, with one decay per head and with one per channel."""
_CHUNKS_AT_A_TIME = 1024
"""Chunks of all heads and batch entries that are computed at once, and again in the backward pass where there are more;
autograd keeps about 2 GiB of them with keys and values of 128."""
Documents = Sequence[int] | None


class _Rank(NamedTuple):
    """One of the ranks that pass a state on."""

    scan: Callable[..., tuple[Tensor, Tensor]]
    """Function that returns output and last state of the rank's tokens from a state; None stands for zeros."""
    is_first: bool
    before: Tensor | None
    """State that the rank gets."""
    initial: Tensor | None
    """Initial state of the sequence."""
    whole: bool
    """Whether no document ends inside the rank."""


class Mistake(NamedTuple):
    """Mistake in what a rank gets from the one before it; without arguments none."""

    says: str = ""
    """Clause that describes the mistake, for the message of a wrong result."""
    sent: Callable[[_Rank, Tensor], Tensor | None] | None = None
    """State that a rank passes on, from its last one."""
    start: Callable[[_Rank], Tensor | None] | None = None
    """State that a rank starts from."""
    state_bounds: Callable[[list[int], int], list[int]] = lambda bounds, local: bounds
    """Cumulative lengths between which the state is reset, from those of the documents and a rank's tokens."""
    conv_bounds: Callable[[list[int], int], list[int]] = lambda bounds, local: bounds
    """Cumulative lengths of the stretches that the convolution sees."""
    leaves_out_initial: bool = False
    loses_halo_gradient: bool = False


class DenseRecurrence:
    """Operators of a `RecurrentStrategy` over a whole sequence on one device, in float64.

    Inputs, options and results are those of the strategy's methods. With a ``mistake`` they are wrong as over ``world``
    ranks that make it.
    """

    def __init__(self, world: int = 1, mistake: Mistake | None = None) -> None:
        self._world, self._mistake = world, mistake or Mistake()

    def gated_delta_rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
        """Compute S = exp(g) (S - beta k kᵀ S) + beta k vᵀ and out = Sᵀ q / √K for every token."""
        return self._run(q, k, v, g.unsqueeze(-1), beta, q.shape[-1] ** -0.5, **options)

    def simple_gla(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: Any) -> Any:
        """Compute S = exp(g) S + k vᵀ and out = Sᵀ q / √K for every token, with one decay per head."""
        return self._run(q, k, v, g.unsqueeze(-1), None, q.shape[-1] ** -0.5, **options)

    def gla(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: Any) -> Any:
        """Compute S = exp(g) S + k vᵀ and out = Sᵀ q / √K for every token, with a decay per head and key channel."""
        return self._run(q, k, v, g, None, q.shape[-1] ** -0.5, **options)

    def mamba2(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None = None, **options: Any
    ) -> Any:
        """Compute S = exp(dt a) S + dt b xᵀ and out = Sᵀ c + d x for every token."""
        result = self._run(c, b, x * dt.unsqueeze(-1), (dt * a).unsqueeze(-1), None, 1.0, **options)
        if d is None:
            return result
        skipped = x * d.unsqueeze(-1)
        return (result[0] + skipped, result[1]) if isinstance(result, tuple) else result + skipped

    def causal_conv1d(self, x: Tensor, weight: Tensor, *, cu_seqlens: Documents = None) -> Tensor:
        """Compute the causal depthwise convolution of x (B, S, C) with weight (C, W) in every document."""
        local = x.shape[1] // self._world
        bounds = self._mistake.conv_bounds(_bounds(x, cu_seqlens), local)
        parts = []
        for first, end in pairwise(bounds):
            out = torch.zeros_like(x[:, first:end])
            for back in range(min(weight.shape[1], end - first)):
                shifted = torch.zeros_like(out)
                shifted[:, back:] = x[:, first : end - back]
                if self._mistake.loses_halo_gradient:
                    shifted = _without_halo_gradient(shifted, first, end, back, local)
                out = out + shifted * weight[:, weight.shape[1] - 1 - back]
            parts.append(out)
        return torch.cat(parts, 1)

    def _over_ranks(
        self, scan: Callable[..., tuple[Tensor, Tensor]], bounds: list[int], initial: Tensor | None, tokens: int
    ) -> tuple[Tensor, Tensor]:
        """Return the output of all tokens and the last state, rank by rank where the mistake is in what ranks pass on.

        ``scan(first, end, state)`` returns output and last state of tokens from a state; None stands for zeros.
        """
        mistake = self._mistake
        initial = None if mistake.leaves_out_initial else initial
        if mistake.sent is None and mistake.start is None:
            return scan(0, tokens, initial)
        local = tokens // self._world
        outputs, state, last = [], initial, initial
        for number in range(self._world):
            first, end = number * local, (number + 1) * local
            whole = not any(first < bound < end for bound in bounds)
            # A document's border at the rank's first token resets the state, as inside the rank.
            before = state if number == 0 or first not in bounds else None
            rank = _Rank(partial(scan, first, end), number == 0, before, initial, whole)
            out, last = rank.scan(before if mistake.start is None else mistake.start(rank))
            outputs.append(out)
            state = last if mistake.sent is None else mistake.sent(rank, last)
        assert last is not None
        return torch.cat(outputs, 1), last

    # --- token by token -----------------------------------------------------------------------

    def _run(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, scale: float, *,
        initial_state: Tensor | None = None, return_final_state: bool = False, cu_seqlens: Documents = None,
    ) -> Any:  # fmt: skip
        heads = v.shape[2]
        q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
        bounds = self._mistake.state_bounds(_bounds(v, cu_seqlens), v.shape[1] // self._world)
        starts = set(bounds[1:-1])

        def scan(first: int, end: int, state: Tensor | None, *, values: bool = True) -> tuple[Tensor, Tensor]:
            state = v.new_zeros(v.shape[0], heads, k.shape[3], v.shape[3]) if state is None else state
            own = v if values else torch.zeros_like(v)
            outputs = []
            # Five tensors of the size of a state are kept for each token.
            recomputes = torch.is_grad_enabled() and 5 * (end - first) * state.nbytes > _KEPT_BYTES
            step = _SEGMENT if recomputes else max(end - first, 1)
            for start in range(first, end, step):
                part = slice(start, min(start + step, end))
                tensors = [q[:, part], k[:, part], own[:, part], g[:, part], None if beta is None else beta[:, part]]
                resets = frozenset(
                    bound - start for bound in starts if part.start <= bound < part.stop and bound > first
                )
                out, state = _call(_scan, state, scale, resets, *tensors, recomputes=recomputes)
                outputs.append(out)
            return torch.cat(outputs, 1), state

        out, last = self._over_ranks(scan, bounds, initial_state, v.shape[1])
        return (out, last) if return_final_state else out


class ChunkedRecurrence(DenseRecurrence):
    """`DenseRecurrence` in chunks, for long sequences.

    Up to `_CHUNKS_AT_A_TIME` chunks are computed together; only the states pass from chunk to chunk in order.

    Within a chunk, row j of u is what token j writes into the state S before the chunk. With the sums G of g up to each
    token, (I + A) u = beta (v - exp(G) K S), where A_ij = beta_i exp(G_i - G_j) k_i . k_j for j < i. Without beta, u is
    v.
    """

    def _run(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, scale: float, *,
        initial_state: Tensor | None = None, return_final_state: bool = False, cu_seqlens: Documents = None,
    ) -> Any:  # fmt: skip
        batch, tokens, heads, _ = v.shape
        bounds = _bounds(v, cu_seqlens)
        size = _CHUNK if g.shape[-1] == 1 else _CHUNK_OF_CHANNELS
        step = max(_CHUNKS_AT_A_TIME // (batch * heads), 1) * size
        recomputes = torch.is_grad_enabled() and step < tokens
        outputs, state = [], initial_state
        # The gradients of a split are joined at once; those of slices would be added up, each as long as the sequence.
        parts = [[None] * -(-tokens // step) if x is None else torch.split(x, step, 1) for x in (q, k, v, g, beta)]
        for first, *tensors in zip(range(0, tokens, step), *parts, strict=True):
            end = min(first + step, tokens)
            inner = [0, *(bound - first for bound in bounds if first < bound < end), end - first]
            before = None if first and first in bounds else state
            out, state = _call(_scan_chunks, before, scale, inner, size, *tensors, recomputes=recomputes)
            outputs.append(out)
        out = torch.cat(outputs, 1)
        return (out, state) if return_final_state else out


def _scan_chunks(
    initial: Tensor | None, scale: float, bounds: list[int], size: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor,
    beta: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output and the last state of `ChunkedRecurrence`, for documents with these cumulative lengths."""
    batch, tokens, heads, _ = v.shape
    rows, starts = _padded_rows(bounds, size)
    index = torch.tensor(rows, device=v.device)

    def chunks(x: Tensor) -> Tensor:
        """Reshape (B, S, H, ...) to (chunks, B, H, C, ...), with zeros where a document fills no chunk."""
        x = torch.cat([x, x.new_zeros(batch, 1, *x.shape[2:])], 1)
        return x.index_select(1, index).view(batch, -1, size, *x.shape[2:]).movedim(1, 0).transpose(2, 3)

    q, k = (chunks(x.repeat_interleave(heads // x.shape[2], 2)) for x in (q, k))
    v, total = chunks(v), chunks(g).cumsum(-2)
    earlier = torch.ones(size, size, dtype=torch.bool, device=v.device).tril()
    # (chunks, B, H, C, C, 1 or K): the decay from token j to token i.
    decay = (total.unsqueeze(-2) - total.unsqueeze(-3)).masked_fill(~earlier[..., None], -torch.inf).exp()
    read, end = q * total.exp(), total[..., -1:, :]
    attended = _pairs(q, k, decay)
    into_state, kept = (k * (end - total).exp()).mT, end.exp().mT
    from_state = None
    if beta is not None:
        weight = chunks(beta.unsqueeze(-1))
        solved = torch.linalg.solve_triangular(
            (weight * _pairs(k, k, decay)).tril(-1), weight * torch.cat([v, k * total.exp()], -1),
            upper=False, unitriangular=True,
        )  # fmt: skip
        v, from_state = solved.split([v.shape[-1], k.shape[-1]], -1)
    state = v.new_zeros(*v.shape[1:3], k.shape[-1], v.shape[-1]) if initial is None else initial
    states, written = [], []
    pieces = zip(v.unbind(), from_state.unbind() if from_state is not None else [None] * len(v), strict=True)
    for number, ((values, corrects), keys, keeps) in enumerate(
        zip(pieces, into_state.unbind(), kept.unbind(), strict=True)
    ):
        if number in starts:
            state = torch.zeros_like(state)
        states.append(state)
        written.append(values if corrects is None else values - corrects @ state)
        state = keeps * state + keys @ written[-1]
    out = scale * (read @ torch.stack(states) + attended @ torch.stack(written))
    out = out.transpose(2, 3).movedim(0, 1).flatten(1, 2)
    positions = torch.tensor([position for position, row in enumerate(rows) if row < tokens], device=v.device)
    return out.index_select(1, positions), state


def _padded_rows(bounds: list[int], size: int) -> tuple[list[int], set[int]]:
    """Return the token in each row of all chunks, and the chunks that begin a document other than the first.

    A document fills whole chunks of ``size`` rows; rows without a token have the number of all tokens.
    """
    rows: list[int] = []
    starts = set()
    for first, end in pairwise(bounds):
        if first:
            starts.add(len(rows) // size)
        rows += range(first, end)
        rows += [bounds[-1]] * (-len(rows) % size)
    return rows, starts


def _pairs(rows: Tensor, columns: Tensor, decay: Tensor) -> Tensor:
    """Return the products of rows and columns (..., C, K), each with its decay (..., C, C, 1 or K): (..., C, C)."""
    if decay.shape[-1] == 1:
        return rows @ columns.mT * decay[..., 0]
    return torch.einsum("...ik,...jk,...ijk->...ij", rows, columns, decay)


def _call(function: Any, *arguments: Any, recomputes: bool) -> Any:
    """Call a function; with ``recomputes``, autograd keeps its arguments alone and calls it again going back."""
    return checkpoint(function, *arguments, use_reentrant=False) if recomputes else function(*arguments)


def _scan(
    state: Tensor, scale: float, resets: frozenset[int], q: Tensor, k: Tensor, v: Tensor, g: Tensor,
    beta: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output of each token and the last state; the state is set to zeros before the tokens ``resets``."""
    outputs = []
    for t in range(v.shape[1]):
        if t in resets:
            state = torch.zeros_like(state)
        state = g[:, t].exp().unsqueeze(-1) * state
        written = v[:, t]
        if beta is not None:
            written = beta[:, t].unsqueeze(-1) * (written - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + k[:, t].unsqueeze(-1) * written.unsqueeze(-2)
        outputs.append(scale * torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, 1), state


def _bounds(x: Tensor, documents: Documents) -> list[int]:
    return [0, x.shape[1]] if documents is None else sorted(set(documents))


# --- mistakes ---------------------------------------------------------------------------------------


def _without_halo_gradient(shifted: Tensor, first: int, end: int, back: int, local: int) -> Tensor:
    """Detach those of a convolution's inputs, ``back`` tokens before each, that lie on the rank before."""
    # Document borders shift where ranks begin: positions are global.
    positions = torch.arange(first, end, device=shifted.device)
    crosses = (positions % local < back) & (positions - back >= first)
    return torch.where(crosses[:, None], shifted.detach(), shifted)


def _last_of_own(rank: _Rank) -> Tensor:
    """Return the last state of a rank's tokens alone."""
    return rank.scan(None)[1]


def _undecayed(rank: _Rank, last: Tensor) -> Tensor:
    own = _last_of_own(rank)
    return own if rank.before is None or not rank.whole else own + rank.before


def _decayed_twice(rank: _Rank, last: Tensor) -> Tensor:
    if rank.before is None or not rank.whole:
        return last
    once = rank.scan(rank.before, values=False)[1]
    return last - once + rank.scan(once, values=False)[1]


def _decayed_on_arrival(rank: _Rank) -> Tensor | None:
    return rank.before if rank.before is None or rank.is_first else rank.scan(rank.before, values=False)[1]


def _gradient_undecayed(rank: _Rank, last: Tensor) -> Tensor:
    if rank.before is None or not rank.whole:
        return last
    return rank.scan(rank.before.detach())[1] + rank.before - rank.before.detach()


FORWARD_MISTAKES = (
    Mistake("the state does not pass from rank to rank: every rank starts from zeros", sent=lambda rank, last: None),
    Mistake("every rank starts from zeros, the first one, too: neither a state of other ranks nor the initial one"
            " enters", sent=lambda rank, last: None, start=lambda rank: None),
    Mistake("a rank gets the state of the previous rank's own tokens alone: the states of ranks before it are lost",
            sent=lambda rank, last: _last_of_own(rank)),
    Mistake("states of earlier ranks are added without the decay of the ranks between: their transitions are missing",
            sent=_undecayed),
    Mistake("a rank applies its transition twice to the state that it passes on", sent=_decayed_twice),
    Mistake("a rank applies its transition to the state that it gets before it starts from it, and so applies it twice",
            start=_decayed_on_arrival),
    Mistake("every rank starts from the initial state of the sequence", start=lambda rank: rank.initial),
    Mistake("the initial state is left out", leaves_out_initial=True),
    Mistake("the state is not reset where a document ends", state_bounds=lambda bounds, local: [0, bounds[-1]]),
    Mistake("the state is reset one token late where a document ends",
            state_bounds=lambda bounds, local: [
                0, *(bound + 1 for bound in bounds[1:-1] if bound + 1 < bounds[-1]), bounds[-1]]),
    Mistake("the state is reset where a document ends inside a rank, and not where it ends on a rank's border",
            start=lambda rank: rank.before,
            state_bounds=lambda bounds, local: [
                bound for bound in bounds if bound % local or bound in (0, bounds[-1])]),
    Mistake("the convolution does not see the last tokens of the rank before: its halo is missing",
            conv_bounds=lambda bounds, local: sorted({*bounds, *range(0, bounds[-1], local)})),
    Mistake("the convolution sees tokens of the document before", conv_bounds=lambda bounds, local: [0, bounds[-1]]),
)  # fmt: skip
BACKWARD_MISTAKES = (
    Mistake("the gradient of the state does not pass back from rank to rank", sent=lambda rank, last: last.detach()),
    Mistake("the gradient of the state passes back over one rank alone",
            sent=lambda rank, last: rank.scan(None if rank.before is None else rank.before.detach())[1]),
    Mistake("the gradient of the state passes back over a rank without that rank's transition",
            sent=_gradient_undecayed),
    Mistake("the convolution's gradient does not go back to the rank before: the halo's gradient is lost",
            loses_halo_gradient=True),
)  # fmt: skip
"""Mistakes in the backward pass, whose output is right."""


def mistakes(world: int, *, backward: bool) -> Iterator[tuple[str, DenseRecurrence]]:
    """Yield what each known mistake over ``world`` ranks is, and the recurrence that makes it.

    With ``backward`` they are those whose output is right and whose gradients are wrong.
    """
    for mistake in BACKWARD_MISTAKES if backward else FORWARD_MISTAKES:
        yield mistake.says, DenseRecurrence(world, mistake)
