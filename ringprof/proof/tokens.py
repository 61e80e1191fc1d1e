"""Which tokens of the whole batch a rank's model was called with."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ringprof.strategies import Unsupported
from ringprof.strategies.masks.layouts import LAYOUTS


def find_tokens(own: Tensor, whole: Tensor, positions: Tensor | None) -> tuple[Tensor, str]:
    """Return the index of each local token among all rows' tokens (on the CPU), and a problem, empty if none.

    ``own`` is a rank's first tensor argument (b, s, ...), ``whole`` the reference's (B, S, ...). ``positions`` are
    those of the local tokens; None: they are searched by the values, in the known layouts first.
    """
    rows, seq = own.shape[:2]
    own, whole = (x.detach().cpu().reshape(*x.shape[:2], -1) for x in (own, whole))
    if own.shape[2] != whole.shape[2] or whole.shape[0] % rows:
        return torch.empty(0, dtype=torch.int64), (
            f"the model is called with {tuple(own.shape)}, the reference with {tuple(whole.shape)}: (rows, tokens) of a"
            " shard and of the whole batch are expected"
        )
    full_seq = whole.shape[1]
    blocks = [slice(first, first + rows) for first in range(0, whole.shape[0], rows)]
    if positions is None:
        candidates = list(_layout_positions(seq, full_seq))
    else:
        candidates = [positions.detach().cpu().flatten().long()]
        if len(candidates[0]) != seq or not 0 <= int(positions.min()) <= int(positions.max()) < full_seq:
            return torch.empty(0, dtype=torch.int64), f"positions must be {seq} numbers from 0 to {full_seq - 1}"
    fitting: list[Tensor] = []
    for block in blocks:
        fitting += [_flat(block, x, full_seq) for x in candidates if torch.equal(whole[block][:, x], own)]
    if positions is None and not fitting:
        matches = ((block, _longest_runs(own, whole[block])) for block in blocks)
        fitting = [_flat(block, match, full_seq) for block, match in matches if match is not None]
    if fitting and all(torch.equal(x, fitting[0]) for x in fitting):
        return fitting[0], ""
    return torch.empty(0, dtype=torch.int64), (
        "which tokens the model is called with cannot be told from their values: pass positions="
        if positions is None
        else "the model is called with other tokens than the batch has at these positions"
    )


def _layout_positions(seq: int, full_seq: int) -> Iterator[Tensor]:
    """Yield the positions that each rank holds in each layout."""
    if full_seq % seq:
        return
    size = full_seq // seq
    for layout in LAYOUTS.values():
        for rank in range(size):
            try:
                yield layout.positions(full_seq, size, rank)
            except (Unsupported, ValueError):
                break


def _longest_runs(own: Tensor, whole: Tensor) -> Tensor | None:
    """Match each local token with the longest run of equal tokens; None where there is none or several."""
    equal = (own[:, :, None] == whole[:, None, :]).all(-1).all(0).long()
    run = equal.clone()
    for index in range(equal.shape[0] - 2, -1, -1):
        run[index, :-1] = equal[index, :-1] * (1 + run[index + 1, 1:])
    positions = torch.empty(equal.shape[0], dtype=torch.int64)
    start = 0
    while start < equal.shape[0]:
        length = int(run[start].max())
        starts = (run[start] == length).nonzero()[:, 0]
        if not length or len(starts) > 1:
            return None
        positions[start : start + length] = torch.arange(length) + starts[0]
        start += length
    return positions


def _flat(block: slice, positions: Tensor, seq: int) -> Tensor:
    return (torch.arange(block.start, block.stop)[:, None] * seq + positions).flatten()
