"""Which blocks and messages a calibration measures: what layouts make of 512 to 131,072 tokens, MHA to MQA.

And, of kernels that compute them, packed documents and sliding windows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec

from ringprof.mask import NO_LIMIT
from ringprof.record.dryrun.schedule import AttentionOp
from ringprof.strategies.kernels.builtin import KERNELS
from ringprof.strategies.masks.mask_blocks import AttnRectangle, MaskBlocks

HEADS = ((40, 40), (32, 8), (64, 8), (24, 4), (64, 1), (10, 10))
HEAD_DIM = 128
_MANY, _FEW = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072), (1024, 4096, 16384, 65536)
_BETWEEN = (3072, 6144, 12288, 24576, 49152)
_GATHERED = ((4096, 32768), (8192, 65536), (8192, 131072), (16384, 131072))
"""Queries and keys where a rank has gathered all keys."""
_WINDOWS = ((4096, 1024), (16384, 1024), (16384, 4096), (65536, 1024), (65536, 4096), (65536, 16384))
"""Tokens, and the keys that each sees."""
_DOCUMENTS = ((4096, 4), (16384, 4), (16384, 32), (65536, 8), (65536, 64))
"""Tokens, and the documents that they are of."""
_LONGEST_FLOPS = 5e14
"""A call of more is left out: on an H200 it takes a second."""
_MIB = 1 << 20
MESSAGES = tuple(size * _MIB for size in (1, 4, 16, 32, 64, 128, 256, 512, 1024))
COLLECTIVE_BYTES = tuple(size * _MIB for size in (16, 128, 512))


class Wanted(NamedTuple):
    """A block to measure with a kernel."""

    kernel: str
    block: AttentionOp
    parts: MaskBlocks | None = None


def blocks(kernels: Sequence[str]) -> list[Wanted]:
    """What to measure, in an order that leaves a use for every beginning of the list.

    The first kernel gets all shapes, others those of equal heads and of one grouped.
    """
    found: list[Wanted] = []
    for number, kernel in enumerate(kernels):
        for heads, kv_heads in HEADS if number == 0 else HEADS[:2]:
            equal = (heads, kv_heads) == HEADS[0]
            lengths = (*_MANY, *(_BETWEEN if number == 0 else ())) if equal else _FEW
            shapes = [*_of(lengths, heads, kv_heads), *(_gathered(heads, kv_heads) if equal else ())]
            found += [Wanted(kernel, block) for block in shapes if block.flops() < _LONGEST_FLOPS]
        if KERNELS[kernel].takes_windows and KERNELS[kernel].varlen:
            found += _masked(kernel)
    random.Random(0).shuffle(found)
    # Kernels in turn, so that none is left out where time is short; the stable sort keeps each one's shuffled order.
    turn = dict.fromkeys(kernels, 0)
    keys = []
    for number, kernel in enumerate(one.kernel for one in found):
        turn[kernel] += 1
        keys.append((turn[kernel], number))
    return [found[at] for _, at in sorted(keys)]


def _of(lengths: Sequence[int], heads: int, kv_heads: int) -> Iterator[AttentionOp]:
    for length in lengths:
        half = length // 2
        for phase in ("forward", "backward"):
            # A rank's own keys; all, none masked; zigzag's halves; stripe's triangle, a row and a column short.
            yield _block(phase, length, length, heads, kv_heads, causal=True)
            yield _block(phase, length, length, heads, kv_heads, causal=False)
            yield _block(phase, half, length, heads, kv_heads, causal=False)
            yield _block(phase, length, half, heads, kv_heads, causal=False)
            if length in _FEW and heads == kv_heads:
                yield _block(phase, length - 1, length - 1, heads, kv_heads, causal=True)


def _masked(kernel: str) -> Iterator[Wanted]:
    """Windows over one document; documents of uneven lengths, each with a causal mask."""
    for heads, kv_heads in HEADS[:2]:
        for tokens, window in _WINDOWS:
            yield from _of_parts(kernel, [AttnRectangle(0, tokens, 0, tokens, window - 1, 0)], heads, kv_heads)
        for tokens, count in _DOCUMENTS:
            # The longest is some times the mean, as in packed text.
            draw = random.Random(count)
            weights = [draw.lognormvariate(0.0, 1.0) for _ in range(count)]
            ends = [round(tokens * part / sum(weights)) for part in accumulate(weights)]
            spans = [(a, b) for a, b in pairwise([0, *ends]) if b > a]
            yield from _of_parts(kernel, [AttnRectangle(a, b, a, b, NO_LIMIT, 0) for a, b in spans], heads, kv_heads)


def _of_parts(kernel: str, parts: Sequence[AttnRectangle], heads: int, kv_heads: int) -> Iterator[Wanted]:
    together = MaskBlocks(tuple(parts), parts[-1].q_end, parts[-1].kv_end)
    for phase in ("forward", "backward"):
        block = _block(phase, together.queries, together.keys, heads, kv_heads, causal=parts[0].left == NO_LIMIT)
        yield Wanted(
            kernel, msgspec.structs.replace(block, pairs=together.area, sequences=len(parts)), together
        )  # fmt: skip


def _gathered(heads: int, kv_heads: int) -> list[AttentionOp]:
    return [
        _block(phase, q, kv, heads, kv_heads, causal=False) for q, kv in _GATHERED for phase in ("forward", "backward")
    ]


def _block(phase: str, q: int, kv: int, heads: int, kv_heads: int, *, causal: bool) -> AttentionOp:
    return AttentionOp(
        label="", phase=phase, batch=1, q=q, kv=kv, heads=heads, kv_heads=kv_heads, head_dim=HEAD_DIM, causal=causal  # type: ignore[arg-type]
    )  # fmt: skip
