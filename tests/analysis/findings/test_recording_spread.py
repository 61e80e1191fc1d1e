"""The assumed spread between recordings against the committed pairs of recordings, and `compare` on simulated ones."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dev.benchmarks import compare_errors, recording_spread
from dev.benchmarks.compare_errors import MODELS, SIZES, Model
from ringprof.analysis.findings.comparison import compare_measurements, recordings_to_decide
from ringprof.analysis.findings.metric import Measurement, Metric
from ringprof.analysis.findings.recording_spread import OTHER_SESSION, SAME_SESSION, Spread, session_spread
from ringprof.report.comparison import spread_notices, verdict_lines
from tests.tiers import tiered

CHI_SQUARED = {19: 8.907, 25: 13.120}
"""The 2.5 % quantile by degrees of freedom, from a printed table."""
CASES = 150


def most(share: float, cases: int) -> float:
    """Return the largest share that chance allows where ``share`` is the truth: three binomial standard errors."""
    return share + 3 * math.sqrt(share * (1 - share) / cases)


# --- what is assumed ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "count", "long", "assumed"),
    [
        (recording_spread.pairs_in_one_session(), 70, 19, SAME_SESSION),
        (recording_spread.pairs_in_two_sessions(), 54, 25, OTHER_SESSION),
    ],
    ids=["one session", "two sessions"],
)
def test_the_assumed_spread_is_the_upper_end_of_the_committed_pairs(pairs, count, long, assumed):
    assert len(pairs) == count and str(count) in assumed.source
    squares = [math.log(b / a) ** 2 / 2 for a, b in pairs if math.sqrt(a * b) >= 10]
    assert len(squares) == long
    # As many degrees of freedom as pairs: their mean difference is known to be none.
    assert assumed.share == pytest.approx(math.sqrt(sum(squares) / CHI_SQUARED[long]), abs=0.0005)
    estimate, low, high = recording_spread.fixed_ms(pairs)
    assert low < estimate < high and assumed.fixed_ms == pytest.approx(high, abs=0.01)


@pytest.mark.parametrize(
    ("pairs", "assumed"),
    [
        (recording_spread.pairs_in_one_session(), SAME_SESSION),
        (recording_spread.pairs_in_two_sessions(), OTHER_SESSION),
    ],
    ids=["one session", "two sessions"],
)
def test_at_most_5_percent_of_committed_pairs_exceed_the_spread(pairs, assumed):
    far = [
        (a, b)
        for a, b in pairs
        if abs(math.log(b / a)) > 1.96 * math.sqrt(2) * math.hypot(assumed.share, assumed.fixed_ms / math.sqrt(a * b))
    ]
    assert len(far) <= len(pairs) / 20


def test_short_iterations_differ_by_a_larger_share():
    spread = Spread(0.03, 0.4, "")
    assert spread.share_of(10) == pytest.approx(0.05)
    assert spread.share_of(1) == pytest.approx(math.hypot(0.03, 0.4))
    assert spread.share_of(None) == 0.03


@pytest.mark.parametrize(
    ("created", "expected"),
    [
        (["2026-01-01T00:00:00Z", "2026-01-01T01:00:00Z"], SAME_SESSION),
        (["2026-01-01T00:00:00Z", "2026-01-01T02:00:00+02:00"], SAME_SESSION),
        (["2026-01-01T00:00:00Z", "2026-01-01T01:00:01Z"], OTHER_SESSION),
        (["2026-01-01T00:00:00Z", "2026-01-01T00:30:00Z", "2026-01-01T01:30:00Z"], OTHER_SESSION),
        (["2026-01-01T00:00:00Z", "2026-01-01T00:00:00"], OTHER_SESSION),
        (["2026-01-01T00:00:00Z", "yesterday"], OTHER_SESSION),
        ([], OTHER_SESSION),
    ],
)
def test_recordings_within_an_hour_are_of_one_session(created, expected):
    assert session_spread(created) is expected


# --- what a comparison makes of it --------------------------------------------------------------------


def measurement(values: list[float], created: str | None, recordings: int = 1) -> Measurement:
    times = (tuple(values),) if recordings == 1 else tuple((value,) for value in values)
    figure = Metric(float(np.median(values)), "ms", times, False)
    return Measurement(
        "x", "run", {}, {"iteration_ms": figure}, created=(created,) * recordings if created is not None else ()
    )


BASE = [100.0, 100.01, 99.99, 100.0, 100.02, 99.98, 100.01, 99.99, 100.0, 100.0]


@pytest.mark.parametrize(
    ("created", "assumed"),
    [("2026-01-01T00:30:00Z", SAME_SESSION), ("2026-01-02T00:00:00Z", OTHER_SESSION), (None, OTHER_SESSION)],
)
def test_single_recordings_have_an_interval_of_the_assumed_spread(created, assumed):
    sides = measurement(BASE, "2026-01-01T00:00:00Z"), measurement([1.01 * value for value in BASE], created)
    difference = compare_measurements(sides).differences[0]
    each = [math.hypot(assumed.share, assumed.fixed_ms / length) for length in (100, 101)]
    assert difference.low is not None and difference.high is not None and difference.assumed_spread is not None
    # Iterations that are nearly the same add next to nothing.
    assert math.log(difference.high / 1.01) == pytest.approx(1.96 * math.hypot(*each), rel=0.01)
    assert math.log(difference.low / 1.01) == pytest.approx(-1.96 * math.hypot(*each), rel=0.01)
    assert difference.assumed_spread.share == pytest.approx(math.hypot(*each) / math.sqrt(2))
    assert (difference.assumed_spread.source, difference.verdict) == (assumed.source, "noise")


def test_verdict_states_assumed_spread_and_recordings_needed():
    created = "2026-01-01T00:00:00Z"
    near, far = (measurement([factor * value for value in BASE], created) for factor in (1.001, 1.02))
    comparison = compare_measurements([measurement(BASE, created), near, far])
    lines = verdict_lines(comparison)
    assert lines[0].startswith("1: no difference proved: slower by 0.1 % (-2.")
    assert lines[0].endswith("; showing 0.1 % takes more than 30 recordings per side")
    # In turns, paired: (2.447 + 0.906) * sqrt(2 / 7) * 1.03 % is 1.84 %, and for six (2.571 + 0.920) 2.07 %.
    assert lines[1].endswith("; showing 2.0 % takes about 7 recordings per side")
    assert spread_notices(comparison) == [
        "one recording on a side: the intervals assume that recordings of one program differ by 1.0 % "
        "(standard deviation; from 70 programs timed twice in one session on H200)"
    ]


def test_several_recordings_per_side_need_no_assumed_spread():
    sides = [measurement([100.0, 100.1, 100.2], "2026-01-01T00:00:00Z", 3), measurement([101.0, 101.1, 101.2], None, 3)]
    comparison = compare_measurements(sides)
    assert (comparison.differences[0].assumed_spread, comparison.differences[0].verdict) == (None, "worse")
    assert spread_notices(comparison) == [] and "takes" not in verdict_lines(comparison)[0]
    assert recordings_to_decide(sides[0], sides[1], "iteration_ms") is None


def test_one_recording_against_several_uses_at_least_the_assumed_spread():
    group = measurement([100.0, 100.1, 99.9, 100.0], "2026-01-01T00:00:00Z", 4)
    difference = compare_measurements(
        [group, measurement([value * 1.02 for value in BASE], "2026-01-01T00:00:00Z")]
    ).differences[0]
    assert difference.verdict == "noise" and difference.high is not None
    # The spread of the group, 0.1 %, makes less: 3.18 * 0.08 % * sqrt(5 / 4).
    assert math.log(difference.high / 1.02) == pytest.approx(1.96 * 0.01028 * math.sqrt(1 + 1 / 4), rel=0.01)
    assert difference.recordings_to_decide is None


# --- how often it is wrong ----------------------------------------------------------------------------


STEADY = [model for model in MODELS if not model.spread]


@tiered("size", [(1, 10), (3, 10)], [(1, 10)], ids=str)
@tiered("model", MODELS, MODELS[:1], ids=lambda model: model.name)
def test_single_pairs_of_one_program_differ_in_5_percent_of_cases(model: Model, size: tuple[int, int]):
    assert size in SIZES
    random = np.random.default_rng(1)
    assert compare_errors.false_alarms(model, size, CASES, random) <= most(0.05, CASES)


@tiered("model", STEADY, STEADY[:1], ids=lambda model: model.name)
def test_three_recordings_per_side_detect_2_percent(model: Model):
    found_share = compare_errors.power(model, (3, 10), 1.02, CASES, np.random.default_rng(2))
    assert 1 - found_share <= most(0.2, CASES)


def test_advised_number_of_recordings_has_power_of_80_percent():
    """2 % at a spread of 1 %: seven per side (0.8 by the formula), where three find it in two of five."""
    model = next(each for each in MODELS if each.spread)
    random = np.random.default_rng(3)
    assert 1 - compare_errors.power(model, (7, 10), 1.02, CASES, random) <= most(0.2, CASES)
    assert compare_errors.power(model, (3, 10), 1.02, CASES, random) < 0.6
