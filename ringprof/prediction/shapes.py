"""Attention blocks and message sizes that a calibration measures.

The blocks are those that layouts produce from 512 to 131,072 tokens, from MHA to MQA. Kernels that support them are
also measured on packed documents and sliding windows.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import msgspec

from ringprof.dryrun.schedule import AttentionOp
from ringprof.strategies.kernels.registry import KERNELS
from ringprof.strategies.masks.mask_blocks import AttnRectangle, MaskBlocks
from ringprof.workload.mask import NO_LIMIT

HEADS = ((40, 40), (32, 8), (64, 8), (24, 4), (64, 1), (10, 10))
HEAD_DIM = 128
_PHASES = ("forward", "backward")
_LENGTHS, _SHORT_LIST_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072), (1024, 4096, 16384, 65536)
_INTERMEDIATE_LENGTHS = (3072, 6144, 12288, 24576, 49152)
_GATHERED = ((4096, 32768), (8192, 65536), (8192, 131072), (16384, 131072))
"""Numbers of queries and keys of a rank that has gathered all keys."""
_WINDOWS = ((4096, 1024), (16384, 1024), (16384, 4096), (65536, 1024), (65536, 4096), (65536, 16384))
"""Numbers of tokens, and of keys that each token sees."""
_DOCUMENTS = ((4096, 4), (16384, 4), (16384, 32), (65536, 8), (65536, 64))
"""Numbers of tokens, and of documents that they are packed from."""
_MAX_FLOPS = 5e14
"""Calls with more FLOPs are left out; such a call takes a second on an H200."""
_MIB = 1 << 20
MESSAGES = tuple(size * _MIB for size in (1, 4, 16, 32, 64, 128, 256, 512, 1024))
COLLECTIVE_BYTES = tuple(size * _MIB for size in (16, 128, 512))


KernelCase = tuple[str, AttentionOp, MaskBlocks | None]
"""A block to measure with a kernel: the kernel's name, the block, and the parts of its mask."""


def kernel_cases(kernels: Sequence[str]) -> list[KernelCase]:
    """Return the blocks to measure, ordered so that every prefix of the list is useful.

    The first kernel gets all shapes; other kernels get equal heads and one grouped-query shape.
    """
    cases: list[KernelCase] = []
    for number, kernel in enumerate(kernels):
        for heads, kv_heads in HEADS if number == 0 else HEADS[:2]:
            is_first_shape = (heads, kv_heads) == HEADS[0]
            lengths = (
                (*_LENGTHS, *(_INTERMEDIATE_LENGTHS if number == 0 else ())) if is_first_shape else _SHORT_LIST_LENGTHS
            )
            shapes = [*_square_blocks(lengths, heads, kv_heads)]
            for q, kv in _GATHERED if is_first_shape else ():
                shapes += [_attention_op(phase, q, kv, heads, kv_heads, causal=False) for phase in _PHASES]
            cases += [(kernel, block, None) for block in shapes if block.flops() < _MAX_FLOPS]
        if KERNELS[kernel].takes_windows and KERNELS[kernel].varlen:
            cases += _masked_cases(kernel)
    random.Random(0).shuffle(cases)
    # Take the same fraction of every kernel's cases, so that none is left out if time is short.
    totals, counts = Counter(kernel for kernel, _, _ in cases), dict.fromkeys(kernels, 0)
    order = []
    for number, kernel in enumerate(kernel for kernel, _, _ in cases):
        counts[kernel] += 1
        order.append((counts[kernel] / totals[kernel], number))
    return [cases[index] for _, index in sorted(order)]


def _square_blocks(lengths: Sequence[int], heads: int, kv_heads: int) -> Iterator[AttentionOp]:
    """Yield the blocks that layouts make of a rank's share of a sequence."""
    for length in lengths:
        half = length // 2
        for phase in _PHASES:
            # The local block; a full block; zigzag's halves; stripe's triangle, one row and one column short.
            yield _attention_op(phase, length, length, heads, kv_heads, causal=True)
            yield _attention_op(phase, length, length, heads, kv_heads, causal=False)
            yield _attention_op(phase, half, length, heads, kv_heads, causal=False)
            yield _attention_op(phase, length, half, heads, kv_heads, causal=False)
            if length in _SHORT_LIST_LENGTHS and heads == kv_heads:
                yield _attention_op(phase, length - 1, length - 1, heads, kv_heads, causal=True)


def _masked_cases(kernel: str) -> Iterator[KernelCase]:
    """Yield sliding windows over one document, and packed documents of uneven lengths with causal masks."""
    for heads, kv_heads in HEADS[:2]:
        for tokens, window in _WINDOWS:
            yield from _mask_cases(kernel, [AttnRectangle(0, tokens, 0, tokens, window - 1, 0)], heads, kv_heads)
        for tokens, count in _DOCUMENTS:
            # The longest document is several times the mean, as in packed text.
            generator = random.Random(count)
            weights = [generator.lognormvariate(0.0, 1.0) for _ in range(count)]
            ends = [round(tokens * end / sum(weights)) for end in accumulate(weights)]
            spans = [(a, b) for a, b in pairwise([0, *ends]) if b > a]
            yield from _mask_cases(kernel, [AttnRectangle(a, b, a, b, NO_LIMIT, 0) for a, b in spans], heads, kv_heads)


def _mask_cases(kernel: str, rectangles: Sequence[AttnRectangle], heads: int, kv_heads: int) -> Iterator[KernelCase]:
    """Yield the forward and the backward pass over a mask's rectangles."""
    mask_blocks = MaskBlocks(tuple(rectangles), rectangles[-1].q_end, rectangles[-1].kv_end)
    for phase in _PHASES:
        block = _attention_op(
            phase, mask_blocks.queries, mask_blocks.keys, heads, kv_heads, causal=rectangles[0].left == NO_LIMIT
        )
        yield (
            kernel, msgspec.structs.replace(block, pairs=mask_blocks.area, sequences=len(rectangles)), mask_blocks
        )  # fmt: skip


def _attention_op(phase: str, q: int, kv: int, heads: int, kv_heads: int, *, causal: bool) -> AttentionOp:
    return AttentionOp(
        label="", phase=phase, batch=1, q=q, kv=kv, heads=heads, kv_heads=kv_heads, head_dim=HEAD_DIM, causal=causal  # type: ignore[arg-type]
    )  # fmt: skip
