"""Few combinations of many options, in place of all: every two values of two options still occur together."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations
from typing import Any


def pairs(*options: Sequence[Any], candidates: int = 20) -> list[tuple[Any, ...]]:
    """Choose combinations of one value per option, so that any two values of different options meet in one of them.

    Greedy: each combination begins with a pair that has not met and is the best of some drawn completions. The result
    is sorted by the options' order and depends on the numbers of values alone.
    """
    draw, sizes = random.Random(0), [len(values) for values in options]

    def met(row: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(combinations(enumerate(row), 2))

    missing = {
        ((i, a), (j, b))
        for i, j in combinations(range(len(sizes)), 2)
        for a in range(sizes[i])
        for b in range(sizes[j])
    }
    chosen = []
    for pair in sorted(missing):
        if pair in missing:
            fixed = dict(pair)
            drawn = [
                tuple(fixed[i] if i in fixed else draw.randrange(size) for i, size in enumerate(sizes))
                for _ in range(candidates)
            ]
            chosen.append(max(drawn, key=lambda row: len(met(row) & missing)))
            missing -= met(chosen[-1])
    return [tuple(values[i] for values, i in zip(options, row, strict=True)) for row in sorted(chosen)]
