"""How sure a ratio of repeated measurements is: its 95 % interval, and whether two sets of them differ at all.

A *recording* is the repeated measurements of one run, in the order in which they were made. Two things make its median
uncertain. Single measurements scatter: the bootstrap of the median says how much that moves it, and more of them make
it surer. And recordings of one command differ, as devices heat up and machines are shared. Where several recordings are
given, how much they differ is measured. Where there is one, it is taken from what can be seen inside it: how far its
parts are apart, and how far single measurements scatter beyond what a quiet machine shows.

All is done on logarithms, so a rate's interval is the reciprocal of its time's. Random draws are seeded: the same
measurements give the same interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import erfc
from typing import Any

import numpy as np

from ringprof.analysis.findings.comparison import Recordings

Draws = np.ndarray[Any, np.dtype[np.float64]]

DRAWS = 4_000
SURE = (0.025, 0.975)
"""Quantiles of the draws between which the interval lies."""
LEVEL = 0.05
"""The largest p value of the rank test with which two recordings are said to differ."""
_PARTS = 4
"""Parts of a recording whose medians are set against each other."""
QUIET = 0.02
"""Scatter of single measurements, as a share, that a quiet machine shows: it says nothing of other recordings."""
DRIFT_OF_SCATTER = 1.5
"""Drift between recordings, as a share of what single measurements scatter beyond `QUIET`. Set so that of
pairs of recordings of one command, on a machine that others use too, at most one in twenty is called different."""
EXACT = 80
"""Measurements up to which the rank test counts every arrangement."""


def ratio_interval(base: Recordings, other: Recordings, *, in_turns: bool = False) -> tuple[float, float] | None:
    """The 95 % interval of median(other) / median(base); None where nothing says how sure either is.

    ``in_turns``: the n-th recordings of both were made one after the other, so that what moved both cancels.
    """
    if not _positive(base) or not _positive(other):
        return None
    draws = _several(base, other, in_turns=in_turns) if len(base) + len(other) > 2 else _single(base[0], other[0])
    return None if draws is None else _quantiles(draws)


def own_interval(recordings: Recordings) -> tuple[float, float] | None:
    """The 95 % interval of the median itself; None as in `ratio_interval`."""
    if not _positive(recordings):
        return None
    random = np.random.default_rng(0)
    if len(recordings) > 1:
        levels = _levels(recordings)
        spread = float(np.std(levels, ddof=1)) / len(levels) ** 0.5
        return _quantiles(np.mean(levels) + spread * random.standard_t(len(levels) - 1, DRAWS))
    values = np.log(recordings[0])
    if len(values) < 2:
        return None
    scatter = resampled_medians(values, random) - np.median(values)
    return _quantiles(np.median(values) + _with_drift(scatter, drift(values), len(values) - 1, random))


def differ(base: Recordings, other: Recordings, *, in_turns: bool = False) -> bool:
    """Whether two figures differ: their ratio's interval leaves 1 out, and of single recordings the rank test agrees.

    The rank test guards against few measurements, of which a bootstrap is too sure.
    """
    interval = ratio_interval(base, other, in_turns=in_turns)
    if interval is None or interval[0] <= 1 <= interval[1]:
        return False
    return len(base) + len(other) > 2 or rank_test(base[0], other[0]) <= LEVEL


def _single(base: Sequence[float], other: Sequence[float]) -> Draws | None:
    if min(len(base), len(other)) < 2:
        return None
    one, two = np.log(base), np.log(other)
    random = np.random.default_rng(0)
    apart = float(np.median(two) - np.median(one))
    scatter = resampled_medians(two, random) - resampled_medians(one, random) - apart
    between = float(np.hypot(drift(one), drift(two)))
    return np.asarray(apart + _with_drift(scatter, between, len(one) + len(two) - 2, random))


def _with_drift(scatter: Draws, between: float, freedom: int, random: np.random.Generator) -> Draws:
    """Both together, widened as Student's t is: few measurements do not tell well how much they scatter."""
    both = scatter + between * random.standard_normal(DRAWS)
    return np.asarray(both * (freedom / random.chisquare(freedom, DRAWS)) ** 0.5)


def _several(base: Recordings, other: Recordings, *, in_turns: bool) -> Draws:
    """By how far recordings of the same are apart: Student's t over their medians."""
    one, two = _levels(base), _levels(other)
    if in_turns and len(one) == len(two):
        pairs = two - one
        freedom, spread = len(pairs) - 1, float(np.std(pairs, ddof=1)) / len(pairs) ** 0.5
    else:
        freedom = len(one) + len(two) - 2
        squares = sum(float(np.sum((levels - levels.mean()) ** 2)) for levels in (one, two))
        spread = (squares / freedom * (1 / len(one) + 1 / len(two))) ** 0.5
    return np.asarray(two.mean() - one.mean() + spread * np.random.default_rng(0).standard_t(freedom, DRAWS))


def resampled_medians(values: Draws, random: np.random.Generator) -> Draws:
    """Medians of bootstrap samples, drawn from their exact distribution: cost does not grow with the measurements.

    The k-th smallest of n resampled values is the one at place floor(n U), with U the k-th smallest of n uniform
    numbers. An even n has two in the middle; given the lower one, the upper is the least of the n/2 above it.
    """
    ordered: Draws = np.sort(values)
    count = len(values)
    half = count // 2
    if count % 2:
        return np.asarray(ordered[_places(random.beta(half + 1, half + 1, DRAWS), count)])
    lower = random.beta(half, half + 1, DRAWS)
    upper = lower + (1 - lower) * (1 - random.random(DRAWS) ** (1 / half))
    return np.asarray((ordered[_places(lower, count)] + ordered[_places(upper, count)]) / 2)


def _places(uniform: Draws, count: int) -> Any:
    return np.minimum((uniform * count).astype(np.int64), count - 1)


def drift(values: Draws) -> float:
    """How far another recording of the same may be off: one standard deviation of the logarithm.

    By how far the parts of this one are apart, less what scatter alone makes of so few measurements, or by the scatter.
    """
    scatter = 1.4826 * float(np.median(np.abs(values - np.median(values))))
    count = min(_PARTS, len(values) // 2)
    inside = 0.0
    if count > 1:
        medians = [np.median(part) for part in np.array_split(values, count)]
        by_chance = np.pi / 2 * scatter**2 * count / len(values)
        inside = max(0.0, float(np.var(medians, ddof=1)) - by_chance) ** 0.5
    return max(inside, DRIFT_OF_SCATTER * max(0.0, scatter - QUIET))


def rank_test(one: Sequence[float], other: Sequence[float]) -> float:
    """Two-sided p value of the Wilcoxon-Mann-Whitney test, ties included: over all arrangements, or beyond `EXACT`
    measurements by the normal approximation."""
    ranks = _doubled_ranks(np.concatenate([one, other]))
    count, whole = len(one), len(ranks)
    middle = count * (whole + 1)
    off = abs(int(ranks[:count].sum()) - middle)
    if whole <= EXACT:
        sums = _arrangements(ranks, count)
        return float(sums[np.abs(np.arange(len(sums)) - middle) >= off].sum() / sums.sum())
    variance = count * (whole - count) / (whole * (whole - 1)) * float(np.sum((ranks - (whole + 1.0)) ** 2))
    # Doubled ranks go in steps of two without ties: one is the correction for continuity.
    distance = max(0.0, off - 1.0) / variance**0.5 if variance else 0.0
    return float(erfc(distance / 2**0.5))


def _doubled_ranks(values: Draws) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Twice the mean rank of each value, from 1 on: whole numbers with ties, too."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((2 * last - counts + 1)[inverse], dtype=np.int64)


def _arrangements(ranks: np.ndarray[Any, np.dtype[np.int64]], count: int) -> Draws:
    """How many ways to choose ``count`` of the ranks sum to each number."""
    sums = np.zeros((count + 1, int(ranks.sum()) + 1))
    sums[0, 0] = 1
    for rank in ranks:
        sums[1:, rank:] += sums[:-1, : sums.shape[1] - rank].copy()
    return np.asarray(sums[count])


def _levels(recordings: Recordings) -> Draws:
    return np.array([np.median(np.log(values)) for values in recordings])


def _positive(recordings: Recordings) -> bool:
    return bool(recordings) and all(len(values) and min(values) > 0 for values in recordings)


def _quantiles(draws: Draws) -> tuple[float, float]:
    low, high = np.exp(np.quantile(draws, SURE))
    return float(low), float(high)
