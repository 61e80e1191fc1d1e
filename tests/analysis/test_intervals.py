"""Interval sets compared with a simple reference: sets of single nanoseconds."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ringprof.analysis import intervals
from ringprof.analysis.intervals import Spans

POINTS = st.integers(min_value=-40, max_value=40)
INTERVALS = st.lists(st.tuples(POINTS, POINTS), max_size=12)
OFFSET = 1_790_857_026_000_000_000  # a unix time: sums must not pass through floats


def arrays(pairs):
    table = np.array(pairs, np.int64).reshape(-1, 2) + OFFSET
    return table[:, 0], table[:, 1]


def spans(pairs):
    return intervals.union(*arrays(pairs))


def covered(pairs):
    return {t + OFFSET for start, end in pairs for t in range(start, end)}


def as_set(result: Spans):
    return {t for s, e in zip(result.start_ns.tolist(), result.end_ns.tolist(), strict=True) for t in range(s, e)}


def assert_tidy(result: Spans):
    assert (result.end_ns > result.start_ns).all()
    assert (result.start_ns[1:] > result.end_ns[:-1]).all()


@given(INTERVALS)
def test_union_covers_what_any_interval_covers(pairs):
    result = spans(pairs)
    assert_tidy(result)
    assert as_set(result) == covered(pairs)
    assert intervals.length_ns(result) == len(covered(pairs))


@given(INTERVALS, INTERVALS)
def test_intersection_and_subtraction_equal_set_operations(a, b):
    both = intervals.intersection(spans(a), spans(b))
    rest = intervals.subtraction(spans(a), spans(b))
    assert_tidy(both)
    assert_tidy(rest)
    assert as_set(both) == covered(a) & covered(b)
    assert as_set(rest) == covered(a) - covered(b)
    assert intervals.length_ns(both) + intervals.length_ns(rest) == intervals.length_ns(spans(a))


@given(INTERVALS, INTERVALS)
def test_merged_is_the_union_of_sets(a, b):
    assert as_set(intervals.merged(spans(a), spans(b))) == covered(a) | covered(b)


@given(INTERVALS, INTERVALS)
def test_covered_counts_each_interval_alone(cover, pairs):
    start, end = arrays(pairs)
    expected = [len(covered(cover) & covered([pair])) for pair in pairs]
    assert intervals.covered_ns(spans(cover), start, end).tolist() == expected


@given(INTERVALS, st.lists(POINTS, max_size=8))
def test_contains_tests_single_points(pairs, points):
    points_ns = np.array(points, np.int64) + OFFSET
    assert intervals.contains(spans(pairs), points_ns).tolist() == [
        point + OFFSET in covered(pairs) for point in points
    ]


def test_touching_spans_merge():
    result = spans([(0, 5), (5, 9), (11, 12)])
    assert (result.start_ns - OFFSET).tolist() == [0, 11]
    assert (result.end_ns - OFFSET).tolist() == [9, 12]
