"""How sure a ratio of repeated measurements is: its 95 % interval, and whether two sets of them differ at all.

A *recording* is the repeated measurements of one run, in the order in which they were made. Three things make its
median uncertain:

* Scatter of single measurements: the bootstrap distribution of the median.
* Serial correlation: neighbouring measurements that are alike count as fewer. The scatter is widened by the variance
  inflation (1 + r) / (1 - r) of a first-order autoregression (effective sample size: Zwiers and von Storch, J. Climate
  8, 1995), with r the lag-1 autocorrelation of the ranks, corrected for its bias in short series (Marriott and Pope,
  Biometrika 41, 1954).
* Spread between recordings of one program, as devices heat up and machines are shared. Several recordings of each side
  measure it. For a single recording the caller assumes it (`ringprof.analysis.findings.recording_spread`); what the
  recording itself shows (`drift`) counts where that is more.

All is done on logarithms, so a rate's interval is the reciprocal of its time's. Random draws are seeded: the same
measurements give the same interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import erfc, hypot, log
from typing import Any

import numpy as np

from ringprof.analysis.findings.comparison import FEWEST_TURNS, Recordings
from ringprof.analysis.findings.recording_spread import MOST_RECORDINGS

Draws = np.ndarray[Any, np.dtype[np.float64]]

DRAWS = 4_000
SURE = (0.025, 0.975)
"""Quantiles between which an interval lies."""
_NORMAL = 1.96
"""Standard deviations from the middle of a normal distribution to the ends of its 95 % interval."""
POWER = 0.8
"""Share of cases in which `recordings_to_decide` recordings show a difference."""
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


def ratio_interval(
    base: Recordings, other: Recordings, *, interleaved: bool = False, spread: float = 0.0
) -> tuple[float, float] | None:
    """Return the 95 % interval of median(other) / median(base); None where nothing says how sure either is.

    ``interleaved``: the n-th recordings of both were made one after the other, so that what moved both cancels.
    ``spread``: the assumed standard deviation of the ratio of two single recordings of one program, as a share. The
    interval is at least as wide as it makes it, where a side is a single recording.
    """
    if not _positive(base) or not _positive(other):
        return None
    if len(base) + len(other) > 2:
        return _several(base, other, interleaved=interleaved, spread=spread)
    return _single(base[0], other[0], spread)


def own_interval(recordings: Recordings) -> tuple[float, float] | None:
    """Return the 95 % interval of the median itself; None as in `ratio_interval`.

    A single recording's is that of its own iterations: another recording of the program may lie outside.
    """
    if not _positive(recordings):
        return None
    if len(recordings) > 1:
        levels = _levels(recordings)
        freedom = len(levels) - 1
        half = student_quantile(SURE[1], freedom) * float(np.std(levels, ddof=1)) / len(levels) ** 0.5
        return _around(float(np.mean(levels)), (-half, half))
    values = np.log(recordings[0])
    if len(values) < 2:
        return None
    freedom = len(values) - 1
    drifted = student_quantile(SURE[1], freedom) * drift(values)
    return _around(float(np.median(values)), _scatter([values], freedom), drifted)


def differ(base: Recordings, other: Recordings, *, interleaved: bool = False, spread: float = 0.0) -> bool:
    """Return whether two figures differ: their ratio's interval leaves 1 out.

    Of single recordings the rank test must agree: it guards against few measurements, of which a bootstrap is too sure.
    """
    interval = ratio_interval(base, other, interleaved=interleaved, spread=spread)
    if interval is None or interval[0] <= 1 <= interval[1]:
        return False
    return len(base) + len(other) > 2 or rank_test(base[0], other[0]) <= LEVEL


def recordings_to_decide(
    base: Sequence[float], other: Sequence[float], spread: float, limit: float = 1.0
) -> int | None:
    """Return how many recordings per side, made in turns, would tell the ratio of two recordings from ``limit``.

    They do so in `POWER` of all cases, if the true ratio is the measured one; None where it takes more than
    `MOST_RECORDINGS`. ``spread`` as in `ratio_interval`. By the usual formula for the size of a sample: the difference
    is as many standard errors as the two quantiles of Student's t for level and power together.
    """
    one, two = np.log(base), np.log(other)
    distance = abs(float(np.median(two) - np.median(one)) - log(limit))
    low, high = _scatter([one, two], None)
    each = hypot(max(spread, hypot(drift(one), drift(two))), (high - low) / (2 * _NORMAL))
    for count in range(2, MOST_RECORDINGS + 1):
        freedom = count - 1 if count >= FEWEST_TURNS else 2 * count - 2
        errors = student_quantile(SURE[1], freedom) + student_quantile(POWER, freedom)
        if errors * each / count**0.5 <= distance:
            return count
    return None


def _single(base: Sequence[float], other: Sequence[float], spread: float) -> tuple[float, float] | None:
    if min(len(base), len(other)) < 2:
        return None
    one, two = np.log(base), np.log(other)
    freedom = len(one) + len(two) - 2
    seen = student_quantile(SURE[1], freedom) * hypot(drift(one), drift(two))
    middle = float(np.median(two) - np.median(one))
    return _around(middle, _scatter([one, two], freedom), max(seen, _NORMAL * spread))


def _scatter(sides: Sequence[Draws], freedom: int | None) -> tuple[float, float]:
    """Return how far scatter moves a median, or the second side's less the first's: the ends of the 95 % interval.

    Widened for serial correlation and, with ``freedom``, as Student's t is: few measurements do not tell well how much
    they scatter.
    """
    random = np.random.default_rng(0)
    off = np.zeros(DRAWS)
    for values in sides:
        off = (resampled_medians(values, random) - np.median(values)) * variance_inflation(values) ** 0.5 - off
    if freedom is not None:
        off = off * (freedom / random.chisquare(freedom, DRAWS)) ** 0.5
    low, high = np.quantile(off, SURE)
    return min(0.0, float(low)), max(0.0, float(high))


def _around(middle: float, scatter: tuple[float, float], between: float = 0.0) -> tuple[float, float]:
    """Return the interval of a ratio around exp(``middle``) whose independent parts add up in squares."""
    low, high = np.exp([middle - hypot(scatter[0], between), middle + hypot(scatter[1], between)])
    return float(low), float(high)


def _several(base: Recordings, other: Recordings, *, interleaved: bool, spread: float) -> tuple[float, float]:
    """Return the interval by how far recordings of the same side are apart: Student's t over their medians."""
    one, two = _levels(base), _levels(other)
    each = 1 / len(one) + 1 / len(two)
    if interleaved and len(one) == len(two):
        pairs = two - one
        freedom, error = len(pairs) - 1, float(np.std(pairs, ddof=1)) / len(pairs) ** 0.5
    else:
        freedom = len(one) + len(two) - 2
        squares = sum(float(np.sum((levels - levels.mean()) ** 2)) for levels in (one, two))
        error = (squares / freedom * each) ** 0.5
    half = student_quantile(SURE[1], freedom) * error
    if min(len(one), len(two)) == 1:
        half = max(half, _NORMAL * spread * (each / 2) ** 0.5)
    return _around(float(two.mean() - one.mean()), (-half, half))


@cache
def student_quantile(share: float, freedom: int) -> float:
    """Return the quantile of Student's t for a share of at least one half.

    With x = sqrt(freedom) tan(angle) the density becomes cos(angle) ** (freedom - 1), which is summed over a grid.
    """
    angles = np.linspace(0.0, np.pi / 2, 100_001)
    heights = np.cos(angles) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum(heights[1:] + heights[:-1])])
    angle = np.interp((2 * share - 1) * below[-1], below, angles)
    return float(freedom**0.5 * np.tan(angle))


def variance_inflation(values: Draws) -> float:
    """Return by how much serial correlation raises the variance of the median: 1 to half the number of values."""
    count = len(values)
    ranks = _doubled_ranks(values) - (count + 1.0)
    squares = float(np.sum(ranks**2))
    if count < 5 or not squares:
        return 1.0
    biased = float(np.sum(ranks[1:] * ranks[:-1])) / squares
    correlation = min(max(0.0, (count * biased + 1) / (count - 4)), 0.99)
    return float(np.clip((1 + correlation) / (1 - correlation), 1.0, count / 2))


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
    """Return how far another recording may be off by what this one shows: one standard deviation of the logarithm.

    The larger of two: how far the parts of this one are apart, less what scatter alone makes of so few measurements,
    and what single measurements scatter beyond `QUIET`.
    """
    scatter = 1.4826 * float(np.median(np.abs(values - np.median(values))))
    count = min(_PARTS, len(values) // 2)
    inside = 0.0
    if count > 1:
        medians = [np.median(part) for part in np.array_split(values, count)]
        by_chance = np.pi / 2 * scatter**2 * count / len(values) * variance_inflation(values)
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
