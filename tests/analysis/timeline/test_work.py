"""Nesting of operators and lookup of launches, checked against comparisons of all pairs."""

from __future__ import annotations

import random

import numpy as np

from ringprof.analysis.timeline.work import find_nesting
from ringprof.trace.columns import NONE, FlopRecords, enclosing_rows


def nested(rng, start, end, depth, thread):
    """Draw operators in [start, end) that are disjoint or nested."""
    rows, position = [], start
    while position < end:
        first = position + rng.randint(0, 3)
        last = min(end, first + rng.randint(1, 30))
        if first >= last:
            break
        rows.append((first, last, thread))
        if depth and rng.random() < 0.6:
            rows += nested(rng, first + rng.randint(0, 1), last, depth - 1, thread)
        position = last
    return rows


def records_of(rows):
    columns = np.array(sorted(rows), np.int64).reshape(-1, 3)
    zeros = np.zeros(len(columns), np.int64)
    return FlopRecords(
        columns[:, 0], columns[:, 1], zeros.astype(np.int32), columns[:, 2], zeros, zeros,
        zeros.astype(np.int8), zeros.astype(np.int8), zeros, zeros, zeros, zeros,
    )  # fmt: skip


def inside(inner, outer):
    return inner != outer and inner[2] == outer[2] and outer[0] <= inner[0] and inner[1] <= outer[1]


def test_operators_nest_on_their_own_thread():
    for seed in range(60):
        rng = random.Random(seed)
        rows = sorted({row for thread in (5, 1, 9)[: rng.randint(1, 3)] for row in nested(rng, 0, 120, 3, thread)})
        roots, innermost, root_row = find_nesting(records_of(rows))
        for number, row in enumerate(rows):
            assert innermost[number] == (not any(inside(other, row) for other in rows))
            root = rows[root_row[roots[number]]]
            assert root == row or inside(row, root)
            assert not any(inside(root, other) for other in rows)


def test_point_is_enclosed_by_the_interval_of_its_thread():
    for seed in range(60):
        rng = random.Random(seed)
        rows = [row for thread in (5, 1) for row in nested(rng, 0, 100, 0, thread)]
        rng.shuffle(rows)
        points = [(rng.randint(-5, 130), rng.choice((1, 5, 7))) for _ in range(50)]
        start, end, thread = np.array(rows, np.int64).reshape(-1, 3).T
        enclosing_row = enclosing_rows((start, end, thread), *np.array(points, np.int64).T)
        for (point, point_thread), row in zip(points, enclosing_row.tolist(), strict=True):
            containing = [
                index
                for index, (first, last, other) in enumerate(rows)
                if other == point_thread and first <= point < last
            ]
            assert [row] == (containing or [NONE])


def test_enclosing_rows_of_empty_input():
    none = np.empty(0, np.int64)
    assert enclosing_rows((none, none, none), np.array([3]), np.array([1])).tolist() == [NONE]
    assert enclosing_rows((none, none, none), none, none).tolist() == []
