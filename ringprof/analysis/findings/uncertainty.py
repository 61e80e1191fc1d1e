"""Uncertainty of a ratio of repeated measurements: its 95 % interval, and whether two sets differ significantly.

A *recording* is the repeated measurements of one run, in the order in which they were made. Its median is uncertain for
three reasons:

* Scatter of single measurements: the bootstrap distribution of the median.
* Serial correlation: similar neighbouring measurements carry less information. The scatter is widened by the variance
  inflation (1 + r) / (1 - r) of a first-order autoregression (effective sample size: Zwiers and von Storch, J. Climate
  8, 1995). Here r is the lag-1 autocorrelation of the ranks, corrected for its bias in short series (Marriott and Pope,
  Biometrika 41, 1954).
* Spread between recordings of one program, since devices heat up and machines are shared. Several recordings per side
  measure it. For a single recording the caller assumes it (`ringprof.analysis.findings.recording_spread`); the spread
  that the recording itself suggests (`between_run_sd`) counts where it is larger.

All computations use logarithms, so the interval of a rate is the reciprocal of that of its time. Random draws are
seeded: the same measurements give the same interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import erfc, hypot, log
from typing import Any

import numpy as np

from ringprof.analysis.findings.metric import MIN_INTERLEAVED, Recordings
from ringprof.analysis.findings.recording_spread import MOST_RECORDINGS

FloatArray = np.ndarray[Any, np.dtype[np.float64]]

DRAWS = 4_000
"""Number of bootstrap draws."""
QUANTILES = (0.025, 0.975)
"""Quantiles at the ends of a 95 % interval."""
_NORMAL_95 = 1.96
"""Standard deviations from the middle of a normal distribution to the ends of its 95 % interval."""
POWER = 0.8
"""Share of cases in which as many recordings as `recordings_to_decide` returns show a difference."""
MAX_P_VALUE = 0.05
"""Largest p value of the rank test at which two recordings are called different."""
_PART_COUNT = 4
"""Number of parts of a recording whose medians are compared with each other."""
QUIET_SCATTER = 0.02
"""Scatter of single measurements on a quiet machine, as a share; it does not predict the spread between recordings."""
SD_PER_SCATTER = 1.5
"""Standard deviation between recordings per scatter of single measurements beyond `QUIET_SCATTER`.

The value is set so that at most one in twenty pairs of recordings of one command, on a shared machine, is called
different.
"""
MAX_EXACT = 80
"""Largest number of measurements for which the rank test counts every arrangement."""


def ratio_interval(
    base: Recordings, other: Recordings, *, interleaved: bool = False, spread: float = 0.0
) -> tuple[float, float] | None:
    """Return the 95 % interval of median(other) / median(base); None where a side was measured once or has zeros.

    ``interleaved``: whether the n-th recordings of both were made one after the other, so that common drift cancels.
    ``spread``: assumed standard deviation of the ratio of two single recordings of one program, as a share. Where a
    side is a single recording, the interval is at least as wide as the spread makes it.
    """
    if not _positive(base) or not _positive(other):
        return None
    if len(base) + len(other) > 2:
        return _interval_of_several(base, other, interleaved=interleaved, spread=spread)
    return _interval_of_single(base[0], other[0], spread)


def own_interval(recordings: Recordings) -> tuple[float, float] | None:
    """Return the 95 % interval of the median of one side; None where it was measured once or has zeros.

    The interval of a single recording covers its own iterations: another recording of the program may lie outside.
    """
    if not _positive(recordings):
        return None
    if len(recordings) > 1:
        log_medians = _log_medians(recordings)
        dof = len(log_medians) - 1
        half_width = student_quantile(QUANTILES[1], dof) * float(np.std(log_medians, ddof=1)) / len(log_medians) ** 0.5
        return _interval_around(float(np.mean(log_medians)), (-half_width, half_width))
    logs = np.log(recordings[0])
    if len(logs) < 2:
        return None
    dof = len(logs) - 1
    between_runs = student_quantile(QUANTILES[1], dof) * between_run_sd(logs)
    return _interval_around(float(np.median(logs)), _scatter_bounds([logs], dof), between_runs)


def significantly_different(
    base: Recordings, other: Recordings, *, interleaved: bool = False, spread: float = 0.0
) -> bool:
    """Return whether two metrics differ significantly: the interval of their ratio excludes 1.

    For single recordings the rank test must agree. It guards against few measurements, where a bootstrap gives too
    narrow intervals. Parameters as in `ratio_interval`.
    """
    interval = ratio_interval(base, other, interleaved=interleaved, spread=spread)
    if interval is None or interval[0] <= 1 <= interval[1]:
        return False
    return len(base) + len(other) > 2 or mann_whitney_p(base[0], other[0]) <= MAX_P_VALUE


def recordings_to_decide(
    base: Sequence[float], other: Sequence[float], spread: float, limit: float = 1.0
) -> int | None:
    """Return how many interleaved recordings per side would distinguish the ratio of two recordings from ``limit``.

    They succeed in `POWER` of all cases, if the true ratio is the measured one. None where more than `MOST_RECORDINGS`
    would be needed. ``spread`` as in `ratio_interval`. The usual formula for a sample size applies: the difference
    equals the standard error times the sum of the two quantiles of Student's t for level and power.
    """
    base_logs, other_logs = np.log(base), np.log(other)
    distance = abs(float(np.median(other_logs) - np.median(base_logs)) - log(limit))
    low, high = _scatter_bounds([base_logs, other_logs], None)
    sd = hypot(
        max(spread, hypot(between_run_sd(base_logs), between_run_sd(other_logs))), (high - low) / (2 * _NORMAL_95)
    )
    for count in range(2, MOST_RECORDINGS + 1):
        dof = count - 1 if count >= MIN_INTERLEAVED else 2 * count - 2
        standard_errors = student_quantile(QUANTILES[1], dof) + student_quantile(POWER, dof)
        if standard_errors * sd / count**0.5 <= distance:
            return count
    return None


def _interval_of_single(base: Sequence[float], other: Sequence[float], spread: float) -> tuple[float, float] | None:
    """Return the interval of the ratio of two single recordings; None for fewer than two measurements."""
    if min(len(base), len(other)) < 2:
        return None
    base_logs, other_logs = np.log(base), np.log(other)
    dof = len(base_logs) + len(other_logs) - 2
    seen_spread = student_quantile(QUANTILES[1], dof) * hypot(between_run_sd(base_logs), between_run_sd(other_logs))
    log_ratio = float(np.median(other_logs) - np.median(base_logs))
    return _interval_around(
        log_ratio, _scatter_bounds([base_logs, other_logs], dof), max(seen_spread, _NORMAL_95 * spread)
    )


def _scatter_bounds(sides: Sequence[FloatArray], dof: int | None) -> tuple[float, float]:
    """Return the 95 % interval of the error that scatter causes in a median, or in the difference of two medians.

    ``sides``: logarithms of one or two recordings. The interval is widened for serial correlation. With ``dof``
    (degrees of freedom) it is widened as Student's t is, since few measurements show their scatter only roughly.
    """
    random = np.random.default_rng(0)
    deviation = np.zeros(DRAWS)
    for logs in sides:
        deviation = (resampled_medians(logs, random) - np.median(logs)) * variance_inflation(logs) ** 0.5 - deviation
    if dof is not None:
        deviation = deviation * (dof / random.chisquare(dof, DRAWS)) ** 0.5
    low, high = np.quantile(deviation, QUANTILES)
    return min(0.0, float(low)), max(0.0, float(high))


def _interval_around(middle: float, scatter: tuple[float, float], between_runs: float = 0.0) -> tuple[float, float]:
    """Return the interval of a ratio around exp(``middle``); scatter and spread between runs add up in squares."""
    low, high = np.exp([middle - hypot(scatter[0], between_runs), middle + hypot(scatter[1], between_runs)])
    return float(low), float(high)


def _interval_of_several(
    base: Recordings, other: Recordings, *, interleaved: bool, spread: float
) -> tuple[float, float]:
    """Return the interval of the ratio from the spread of each side's recordings: Student's t over their medians."""
    base_medians, other_medians = _log_medians(base), _log_medians(other)
    inverse_counts = 1 / len(base_medians) + 1 / len(other_medians)
    if interleaved and len(base_medians) == len(other_medians):
        differences = other_medians - base_medians
        dof, standard_error = len(differences) - 1, float(np.std(differences, ddof=1)) / len(differences) ** 0.5
    else:
        dof = len(base_medians) + len(other_medians) - 2
        squared_sum = sum(float(np.sum((medians - medians.mean()) ** 2)) for medians in (base_medians, other_medians))
        standard_error = (squared_sum / dof * inverse_counts) ** 0.5
    half_width = student_quantile(QUANTILES[1], dof) * standard_error
    if min(len(base_medians), len(other_medians)) == 1:
        half_width = max(half_width, _NORMAL_95 * spread * (inverse_counts / 2) ** 0.5)
    return _interval_around(float(other_medians.mean() - base_medians.mean()), (-half_width, half_width))


@cache
def student_quantile(share: float, dof: int) -> float:
    """Return the quantile of Student's t with ``dof`` degrees of freedom, for a ``share`` of at least one half.

    With x = sqrt(dof) tan(angle) the density becomes cos(angle) ** (dof - 1), which is summed over a grid.
    """
    angles = np.linspace(0.0, np.pi / 2, 100_001)
    heights = np.cos(angles) ** (dof - 1)
    cumulated = np.concatenate([[0.0], np.cumsum(heights[1:] + heights[:-1])])
    angle = np.interp((2 * share - 1) * cumulated[-1], cumulated, angles)
    return float(dof**0.5 * np.tan(angle))


def variance_inflation(values: FloatArray) -> float:
    """Return the factor by which serial correlation raises the variance of the median: 1 to half the value count."""
    count = len(values)
    ranks = _doubled_ranks(values) - (count + 1.0)
    squares = float(np.sum(ranks**2))
    if count < 5 or not squares:
        return 1.0
    biased = float(np.sum(ranks[1:] * ranks[:-1])) / squares
    correlation = min(max(0.0, (count * biased + 1) / (count - 4)), 0.99)
    return float(np.clip((1 + correlation) / (1 - correlation), 1.0, count / 2))


def resampled_medians(values: FloatArray, random: np.random.Generator) -> FloatArray:
    """Draw medians of bootstrap samples from their exact distribution, at a cost independent of the number of values.

    The k-th smallest of n resampled values has the index floor(n U) among the sorted values, with U the k-th smallest
    of n uniform numbers. For even n the median is the mean of two; given the lower one, the upper is the smallest of
    the n/2 above it.
    """
    ordered: FloatArray = np.sort(values)
    count = len(values)
    half = count // 2
    if count % 2:
        return np.asarray(ordered[_indices(random.beta(half + 1, half + 1, DRAWS), count)])
    lower = random.beta(half, half + 1, DRAWS)
    upper = lower + (1 - lower) * (1 - random.random(DRAWS) ** (1 / half))
    return np.asarray((ordered[_indices(lower, count)] + ordered[_indices(upper, count)]) / 2)


def _indices(uniform: FloatArray, count: int) -> Any:
    """Map uniform numbers in 0..1 to indices below ``count``."""
    return np.minimum((uniform * count).astype(np.int64), count - 1)


def between_run_sd(logs: FloatArray) -> float:
    """Estimate from one recording the standard deviation between recordings, of the logarithm of the median.

    ``logs``: logarithms of the measurements. The result is the larger of two estimates. The first is the spread of the
    medians of the recording's parts, less the spread that scatter alone causes. The second is `SD_PER_SCATTER` times
    the scatter of single measurements beyond `QUIET_SCATTER`.
    """
    scatter = 1.4826 * float(np.median(np.abs(logs - np.median(logs))))
    count = min(_PART_COUNT, len(logs) // 2)
    between_parts = 0.0
    if count > 1:
        medians = [np.median(part) for part in np.array_split(logs, count)]
        by_chance = np.pi / 2 * scatter**2 * count / len(logs) * variance_inflation(logs)
        between_parts = max(0.0, float(np.var(medians, ddof=1)) - by_chance) ** 0.5
    return max(between_parts, SD_PER_SCATTER * max(0.0, scatter - QUIET_SCATTER))


def mann_whitney_p(base: Sequence[float], other: Sequence[float]) -> float:
    """Return the two-sided p value of the Wilcoxon-Mann-Whitney test, with ties.

    Exact over all arrangements up to `MAX_EXACT` measurements, else by the normal approximation.
    """
    ranks = _doubled_ranks(np.concatenate([base, other]))
    count, total = len(base), len(ranks)
    middle = count * (total + 1)
    distance_of_sum = abs(int(ranks[:count].sum()) - middle)
    if total <= MAX_EXACT:
        sums = _arrangements(ranks, count)
        return float(sums[np.abs(np.arange(len(sums)) - middle) >= distance_of_sum].sum() / sums.sum())
    variance = count * (total - count) / (total * (total - 1)) * float(np.sum((ranks - (total + 1.0)) ** 2))
    # Without ties, doubled ranks go in steps of two, so the correction for continuity is 1.
    z = max(0.0, distance_of_sum - 1.0) / variance**0.5 if variance else 0.0
    return float(erfc(z / 2**0.5))


def _doubled_ranks(values: FloatArray) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return twice the rank of each value, ranks counted from 1; ties have their mean rank, so all are integers."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((2 * last - counts + 1)[inverse], dtype=np.int64)


def _arrangements(ranks: np.ndarray[Any, np.dtype[np.int64]], count: int) -> FloatArray:
    """Return for each sum the number of ways to choose ``count`` of the ranks with that sum."""
    ways = np.zeros((count + 1, int(ranks.sum()) + 1))
    ways[0, 0] = 1
    for rank in ranks:
        ways[1:, rank:] += ways[:-1, : ways.shape[1] - rank].copy()
    return np.asarray(ways[count])


def _log_medians(recordings: Recordings) -> FloatArray:
    """Return the median of the logarithms of each recording."""
    return np.array([np.median(np.log(values)) for values in recordings])


def _positive(recordings: Recordings) -> bool:
    """Return whether there are recordings, and every one has measurements above 0."""
    return bool(recordings) and all(len(values) and min(values) > 0 for values in recordings)
