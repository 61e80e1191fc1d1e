"""Which blocks and messages a calibration measures: what layouts make of 512 to 131,072 tokens, MHA to MQA."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from ringprof.foresee.program import Block

HEADS = ((40, 40), (32, 8), (64, 8), (24, 4), (64, 1), (10, 10))
HEAD_DIM = 128
_MANY, _FEW = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072), (1024, 4096, 16384, 65536)
_BETWEEN = (3072, 6144, 12288, 24576, 49152)
_GATHERED = ((4096, 32768), (8192, 65536), (8192, 131072), (16384, 131072))
"""Queries and keys where a rank has gathered all keys."""
_LONGEST_FLOPS = 5e14
"""A call of more is left out: on an H200 it takes a second."""
_MIB = 1 << 20
MESSAGES = tuple(size * _MIB for size in (1, 4, 16, 32, 64, 128, 256, 512, 1024))
COLLECTIVE_BYTES = tuple(size * _MIB for size in (16, 128, 512))


def blocks(kernels: Sequence[str]) -> list[tuple[str, Block]]:
    """(kernel, block) to measure, in an order that leaves a use for every beginning of the list.

    The first kernel gets all shapes, others those of equal heads and of one grouped.
    """
    found = []
    for number, kernel in enumerate(kernels):
        for heads, kv_heads in HEADS if number == 0 else HEADS[:2]:
            equal = (heads, kv_heads) == HEADS[0]
            lengths = (*_MANY, *(_BETWEEN if number == 0 else ())) if equal else _FEW
            shapes = [*_of(lengths, heads, kv_heads), *(_gathered(heads, kv_heads) if equal else ())]
            found += [(kernel, block) for block in shapes if block.flops() < _LONGEST_FLOPS]
    random.Random(0).shuffle(found)
    # Kernels in turn, so that none is left out where time is short; the stable sort keeps each one's shuffled order.
    turn = dict.fromkeys(kernels, 0)
    keys = []
    for number, kernel in enumerate(name for name, _ in found):
        turn[kernel] += 1
        keys.append((turn[kernel], number))
    return [found[at] for _, at in sorted(keys)]


def _of(lengths: Sequence[int], heads: int, kv_heads: int) -> Iterator[Block]:
    for length in lengths:
        half = length // 2
        for phase in ("forward", "backward"):
            # A rank's own keys; all, none masked; zigzag's halves; stripe's triangle, a row and a column short.
            yield _block(phase, length, length, heads, kv_heads, True)
            yield _block(phase, length, length, heads, kv_heads, False)
            yield _block(phase, half, length, heads, kv_heads, False)
            yield _block(phase, length, half, heads, kv_heads, False)
            if length in _FEW and heads == kv_heads:
                yield _block(phase, length - 1, length - 1, heads, kv_heads, True)


def _gathered(heads: int, kv_heads: int) -> list[Block]:
    return [_block(phase, q, kv, heads, kv_heads, False) for q, kv in _GATHERED for phase in ("forward", "backward")]


def _block(phase: str, q: int, kv: int, heads: int, kv_heads: int, causal: bool) -> Block:
    return Block(
        label="", phase=phase, batch=1, q=q, kv=kv, heads=heads, kv_heads=kv_heads, head_dim=HEAD_DIM, causal=causal  # type: ignore[arg-type]
    )  # fmt: skip
