"""Intervals and rank tests against brute force, known distributions, and recordings of one command."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from statistics import median

import numpy as np
import pytest

from ringprof.analysis.findings import uncertainty
from ringprof.analysis.findings.metric import Recordings
from ringprof.analysis.findings.uncertainty import (
    DRAWS,
    mann_whitney_p,
    own_interval,
    ratio_interval,
    recordings_to_decide,
    resampled_medians,
    significantly_different,
    student_quantile,
    variance_inflation,
)
from tests.paths import ROOT
from tests.tiers import tiered

SAME_COMMAND = ROOT / "tests" / "data" / "same_command"
ON_CPU = [SAME_COMMAND / "burst-1024.json", SAME_COMMAND / "zigzag-512.json"]
ON_GPUS = [SAME_COMMAND / "zigzag-16384-h200x2.json", SAME_COMMAND / "zigzag-16384-h200x2-later.json"]


# --- a regression with one hiccup ---------------------------------------------------------------------


def interval(base: Recordings, other: Recordings, interleaved: bool = False) -> tuple[float, float]:
    bounds = ratio_interval(base, other, interleaved=interleaved)
    assert bounds is not None
    return bounds


def timed(middle: float, count: int, seed: int) -> list[float]:
    return [*(middle + np.random.default_rng(seed).uniform(-0.25, 0.25, count))]


def test_ten_percent_difference_is_significant_despite_an_outlier():
    base, slower = timed(80.9, 50, 1), timed(89.0, 50, 2)
    base[17] = 91.0
    assert min(slower) < max(base)
    low, high = interval([base], [slower])
    assert 1.095 < low < median(slower) / median(base) < high < 1.105
    assert significantly_different([base], [slower])
    assert significantly_different([slower], [base])


def test_more_iterations_make_the_interval_narrower():
    def width(count: int) -> float:
        low, high = interval([timed(80.9, count, 3)], [timed(89.0, count, 4)])
        return high - low

    widths = [width(count) for count in (10, 50, 500, 5000)]
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < widths[1] / 4


def test_the_interval_of_a_rate_is_the_reciprocal_of_its_times():
    base, other = timed(80.9, 9, 5), timed(82.0, 8, 6)
    low, high = interval([base], [other])
    rates = [[1 / value for value in times] for times in (base, other)]
    assert interval([rates[0]], [rates[1]]) == pytest.approx((1 / high, 1 / low), rel=2e-3)


def test_single_measurement_has_no_interval():
    assert ratio_interval([[5.0]], [[4.0, 5.0]]) is None
    assert own_interval([[5.0]]) is None
    assert own_interval([]) is None
    assert own_interval([[0.0, 5.0]]) is None


# --- the bootstrap ------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [[1.0, 2.0, 4.0], [1.0, 2.0, 4.0, 8.0], [1.0, 1.0, 3.0, 7.0, 9.0]])
def test_resampled_medians_equal_full_enumeration(values):
    expected = Counter(median(sample) for sample in itertools.product(values, repeat=len(values)))
    drawn = Counter(resampled_medians(np.array(values), np.random.default_rng(7)).tolist())
    assert set(drawn) <= set(expected)
    whole = len(values) ** len(values)
    for middle, count in expected.items():
        share = count / whole
        # Five standard errors of a count among that many draws.
        assert drawn[middle] / DRAWS == pytest.approx(share, abs=5 * math.sqrt(share * (1 - share) / DRAWS) + 1e-9)


DISTRIBUTIONS = {
    "normal": lambda random, count: random.normal(0, 0.004, count),
    "long tail": lambda random, count: random.exponential(0.004, count),
    "two levels": lambda random, count: random.choice([0.0, 0.006], count) + random.normal(0, 0.001, count),
}


@tiered(
    "name, count",
    [("normal", 4), ("normal", 10), ("normal", 40), ("long tail", 10), ("two levels", 10)],
    fast=[("normal", 10), ("two levels", 10)],
)
def test_intervals_cover_the_true_ratio_at_the_stated_rate(name, count):
    """Two sets drawn from one distribution, one set three percent slower: seeded, so the counts are always the same."""
    random, rounds = np.random.default_rng(count), 200
    held = 0
    for _ in range(rounds):
        base, other = (80 * np.exp(DISTRIBUTIONS[name](random, count)) for _ in range(2))
        low, high = interval([base], [1.03 * other])
        held += low <= 1.03 <= high
    # 95 % less two standard errors.
    assert held / rounds >= 0.92


# --- serial correlation -------------------------------------------------------------------------------


def autoregressive(correlation: float, count: int, random: np.random.Generator) -> np.ndarray:
    noise = random.normal(0, 0.004, count)
    for index in range(1, count):
        noise[index] = correlation * noise[index - 1] + math.sqrt(1 - correlation**2) * noise[index]
    return noise


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.6])
def test_the_variance_of_a_long_series_is_inflated_by_its_autocorrelation(correlation):
    """Ranks of normal values whose correlation is r have the correlation 6 / pi asin(r / 2)."""
    values = autoregressive(correlation, 20_000, np.random.default_rng(1))
    of_ranks = 6 / math.pi * math.asin(correlation / 2)
    assert variance_inflation(values) == pytest.approx((1 + of_ranks) / (1 - of_ranks), rel=0.05)


def test_the_inflation_of_few_values_by_hand():
    # Ranks less their mean: -2, -1, 0, 1, 2. Neighbours' products sum to 4, squares to 10: 0.4, corrected 3.
    assert variance_inflation(np.array([1.0, 2.0, 4.0, 8.0, 99.0])) == 5 / 2
    # 1, -1, 1, -1, ...: negative correlation makes the median no surer.
    assert variance_inflation(np.tile([1.0, 2.0], 10)) == 1
    assert variance_inflation(np.ones(9)) == variance_inflation(np.arange(4.0)) == 1


@tiered("count, correlation", [(10, 0.7), (20, 0.7), (50, 0.7)], fast=[(20, 0.7)])
def test_intervals_cover_the_true_ratio_with_autocorrelation(count, correlation):
    random, rounds = np.random.default_rng(count), 400
    held = 0
    for _ in range(rounds):
        base, other = (80 * np.exp(autoregressive(correlation, count, random)) for _ in range(2))
        low, high = interval([base], [1.03 * other])
        held += low <= 1.03 <= high
    # 95 % less three standard errors.
    assert held / rounds >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / rounds)


# --- Student's t --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "freedom", "table"),
    [(0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 4, 2.776), (0.975, 8, 2.306), (0.975, 120, 1.980),
     (0.8, 4, 0.941), (0.8, 1, 1.376), (0.5, 3, 0.0)],
)  # fmt: skip
def test_student_t_quantiles_equal_printed_tables(share, freedom, table):
    assert student_quantile(share, freedom) == pytest.approx(table, abs=6e-4)


@tiered("count", [2, 3, 5], fast=[3])
def test_groups_of_one_program_differ_in_5_percent_of_cases(count):
    """Student's t holds its level by definition; quantiles drawn at random were 2 to 7 % too small."""
    random, rounds = np.random.default_rng(count), 4000
    levels = np.exp(random.normal(0, 0.01, (rounds, 2, count, 1)))
    called = sum(significantly_different(base.tolist(), other.tolist()) for base, other in levels)
    assert abs(called / rounds - 0.05) <= 3 * math.sqrt(0.05 * 0.95 / rounds)


def test_recordings_to_decide_by_hand():
    still, other = [100.0, 100.0], [102.0, 102.0]
    distance = math.log(1.02)
    # Two: (4.303 + 1.061) * spread / sqrt(2); three: (2.776 + 0.941) / sqrt(3); four, in turns: (3.182 + 0.978) / 2.
    for needed, errors in ((2, 3.793), (3, 2.146), (4, 2.080)):
        assert recordings_to_decide(still, other, 0.999 * distance / errors) == needed
        assert recordings_to_decide(still, other, 1.001 * distance / errors) != needed
    assert recordings_to_decide(still, other, 0.2) is None
    assert recordings_to_decide(still, still, 0.01) is None
    # Against a limit: as far from 1.04 as 1.02 is from 1.
    assert recordings_to_decide(still, other, 0.999 * distance / 3.793, 1.02**2) == 2


# --- the rank test ------------------------------------------------------------------------------------


def by_every_arrangement(base: list[float], other: list[float]) -> float:
    """The share of all arrangements whose rank sum is at least as far from its mean as this one's."""
    both = base + other
    ranks = [sum(b < a for b in both) + (sum(b == a for b in both) + 1) / 2 for a in both]
    middle = len(base) * (len(both) + 1) / 2
    sums = [abs(sum(chosen) - middle) for chosen in itertools.combinations(ranks, len(base))]
    distance = abs(sum(ranks[: len(base)]) - middle)
    return sum(value >= distance - 1e-9 for value in sums) / len(sums)


@pytest.mark.parametrize("seed", range(12))
def test_mann_whitney_p_equals_full_enumeration(seed):
    random = np.random.default_rng(seed)
    # Few distinct values: ties within and between.
    base, other = ([float(v) for v in random.integers(0, 6, size)] for size in random.integers(2, 7, 2))
    assert mann_whitney_p(base, other) == pytest.approx(by_every_arrangement(base, other))


def test_mann_whitney_p_by_hand():
    # 3 against 3, all below all: 2 of the 20 arrangements. 4 against 4: 2 of 70.
    assert mann_whitney_p([1, 2, 3], [4, 5, 6]) == pytest.approx(0.1)
    assert mann_whitney_p([1, 2, 3, 4], [5, 6, 7, 8]) == pytest.approx(2 / 70)
    assert mann_whitney_p([1, 1], [1, 1]) == 1.0


def test_many_measurements_by_the_normal_approximation(monkeypatch):
    random = np.random.default_rng(3)
    base, other = random.integers(0, 60, 35).tolist(), random.integers(6, 66, 40).tolist()
    exact = mann_whitney_p(base, other)
    monkeypatch.setattr(uncertainty, "MAX_EXACT", 0)
    assert 0.01 < exact < 0.2
    assert mann_whitney_p(base, other) == pytest.approx(exact, rel=0.03)
    assert mann_whitney_p([1.0] * 60, [1.0] * 60) == 1.0


def test_three_against_three_are_never_significant():
    """However far apart: a rank test of so few finds one arrangement in ten as extreme."""
    assert not significantly_different([[80.0, 80.1, 80.2]], [[90.0, 90.1, 90.2]])
    assert significantly_different([[80.0, 80.1, 80.2, 80.3]], [[90.0, 90.1, 90.2, 90.3]])


# --- recordings of one command ------------------------------------------------------------------------


def recordings(path) -> list[list[float]]:
    recorded = json.loads(path.read_text())["recordings"]
    assert [recording["created"] for recording in recorded] == sorted(recording["created"] for recording in recorded)
    return [[max(times) / 1e6 for times in zip(*recording["iterations_ns"], strict=True)] for recording in recorded]


@tiered("path", ON_CPU, ON_CPU[:1], ids=lambda path: path.stem)
def test_pairs_of_one_command_differ_in_at_most_5_percent(path):
    """80 recordings of one command, one after another, on a machine whose two cores others used more and less."""
    levels = recordings(path)
    assert len(levels) == 80
    pairs = [(levels[index], levels[index + 1]) for index in range(0, 80, 2)]
    assert sum(significantly_different([base], [other]) for base, other in pairs) <= 2
    # Scatter within each recording is not all of it: the medians of the whole set are far apart.
    middles = [median(times) for times in levels]
    assert max(middles) > 1.5 * min(middles)


def test_47_gpu_pairs_of_one_command_are_not_different():
    """24 and, hours later, 70 recordings on two GPUs (`dev/benchmarks/same_command.py`): neighbours in time."""
    sets = [recordings(path) for path in ON_GPUS]
    assert [len(levels) for levels in sets] == [24, 70]
    pairs = [pair for levels in sets for pair in zip(levels[::2], levels[1::2], strict=True)]
    assert len(pairs) == 47 and not any(significantly_different([base], [other]) for base, other in pairs)
    # By the scatter within each alone some would be.
    assert sum(mann_whitney_p(base, other) < 0.05 for base, other in pairs) > 47 / 10


@pytest.mark.long
@pytest.mark.parametrize("path", ON_GPUS, ids=lambda path: path.stem)
def test_all_gpu_recording_pairs_differ_in_at_most_5_percent(path):
    pairs = list(itertools.combinations(recordings(path), 2))
    assert sum(significantly_different([base], [other]) for base, other in pairs) <= len(pairs) / 20
    assert sum(mann_whitney_p(base, other) < 0.05 for base, other in pairs) > len(pairs) / 10


@pytest.mark.long
def test_recordings_hours_apart_differ_in_at_most_5_percent():
    before, after = (recordings(path) for path in ON_GPUS)
    pairs = list(itertools.product(before, after))
    assert sum(significantly_different([base], [other]) for base, other in pairs) <= len(pairs) / 20


@tiered("path", ON_CPU, ON_CPU[:1], ids=lambda path: path.stem)
def test_groups_of_one_command_differ_in_at_most_5_percent(path):
    """Four against four made in turns: 10 pairs of groups."""
    levels = recordings(path)
    groups = [levels[index : index + 8] for index in range(0, 80, 8)]
    assert sum(significantly_different(group[0::2], group[1::2], interleaved=True) for group in groups) <= 1
    assert sum(significantly_different(group[0::2], group[1::2]) for group in groups) <= 1


def test_interval_of_two_groups_is_student_t():
    base, other = [[100.0], [102.0], [101.0]], [[110.0], [111.0], [113.0]]
    base_logs, other_logs = np.log([100, 102, 101]), np.log([110, 111, 113])
    spread = math.sqrt((base_logs.var(ddof=1) + other_logs.var(ddof=1)) / 2 * (2 / 3))
    apart, t_of_4 = other_logs.mean() - base_logs.mean(), 2.776
    expected = math.exp(apart - t_of_4 * spread), math.exp(apart + t_of_4 * spread)
    assert interval(base, other) == pytest.approx(expected, abs=0.002)
    assert significantly_different(base, other)


def test_interleaved_recordings_cancel_common_drift():
    between_run_sd = [1.0, 1.2, 0.9, 1.4]
    base, other = (
        [[100 * factor] for factor in between_run_sd],
        [[110 * factor + 0.1 * index] for index, factor in enumerate(between_run_sd)],
    )
    assert not significantly_different(base, other)
    assert significantly_different(base, other, interleaved=True)


def test_single_run_against_a_group_of_recordings():
    group = [[100.0], [101.0], [100.5], [99.5]]
    assert significantly_different(group, [[90.0, 90.1]])
    assert not significantly_different(group, [[100.4, 100.2]])


def test_ratio_interval_needs_two_measurements_per_side():
    assert ratio_interval([[1.0, 1.1]], [[2.0, 2.2]]) is not None
    assert ratio_interval([[1.0]], [[2.0, 2.2]]) is None


@pytest.mark.parametrize(("counts", "student"), [((2, 2), 4.303), ((2, 3), 3.182), ((4, 5), 2.365)])
def test_few_measurements_widen_the_interval_by_student_t(counts, student, monkeypatch):
    """Without scatter, each side off by a standard deviation of 0.1; one degree of freedom less would be 12.7, 4.3."""
    monkeypatch.setattr(uncertainty, "between_run_sd", lambda values: 0.1)
    low, high = interval([[1.0] * counts[0]], [[1.0] * counts[1]])
    assert math.log(high) == pytest.approx(student * 0.1 * math.sqrt(2), rel=0.1)
    assert math.log(low) == pytest.approx(-student * 0.1 * math.sqrt(2), rel=0.1)


def test_between_run_sd_is_variance_beyond_scatter():
    # Medians 0.005 three times and 1.005: a variance of 1/4. The median distance from the median is 0.01.
    # Ranks less their mean: -2.5 and 0.5 in turns, then 2.5 and 3.5. Neighbours' products sum to 3.75, squares to 38.
    correlation = (8 * 3.75 / 38 + 1) / 4
    by_chance = math.pi / 2 * (1.4826 * 0.01) ** 2 * 4 / 8 * (1 + correlation) / (1 - correlation)
    sd = uncertainty.between_run_sd(np.array([0, 0.01, 0, 0.01, 0, 0.01, 1, 1.01]))
    assert sd == pytest.approx(math.sqrt(0.25 - by_chance), rel=1e-9)


def test_interval_of_three_recordings_is_student_t():
    """Logarithms -0.02, 0 and 0.02: standard deviation 0.02, over the root of 3, times 4.3027 of two degrees."""
    low, high = own_interval([[math.exp(level)] * 5 for level in (-0.02, 0.0, 0.02)]) or (0, 0)
    assert (low, high) == pytest.approx((math.exp(-0.049683), math.exp(0.049683)), rel=1e-5)
