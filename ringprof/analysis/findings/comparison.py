"""Comparison of several measurements: their differing settings, and which differences exceed noise.

A metric that was measured repeatedly has an interval, and so has its ratio to another
(`ringprof.analysis.findings.uncertainty`). A difference that the interval does not prove is called noise. Where a side
is a single recording, the interval assumes how far recordings of one program differ
(`ringprof.analysis.findings.recording_spread`). Times and memory are compared only where the work is the same
(`ringprof.analysis.findings.same_work`); rates and shares are always compared. Waterfalls are compared by the
parts that every measurement separates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import hypot
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from ringprof.analysis.findings.metric import MIN_INTERLEAVED, WATERFALL_PREFIX, Measurement, Metric, merged_parts
from ringprof.analysis.findings.recording_spread import OTHER_SESSION, SAME_SESSION, Spread, session_spread
from ringprof.analysis.findings.same_work import WorkMatch, match_work, same_evidence

if TYPE_CHECKING:
    from ringprof.analysis.findings.changes import RunChanges
    from ringprof.analysis.findings.findings import Findings


class AssumedSpread(msgspec.Struct, frozen=True):
    """Assumed spread between recordings of one program, where a side is a single recording."""

    share: float
    """Standard deviation of one recording, as a share of its value."""
    source: str
    """Measurements that the spread comes from, in words."""


class Difference(msgspec.Struct, frozen=True):
    """Difference in one metric between one measurement and the base."""

    figure: str
    """Name of the metric."""
    entry: int
    """Index of the measurement in `Comparison.entries`."""
    difference: float | None
    """Value less the base's value."""
    ratio: float | None
    """Value over the base's value."""
    verdict: str
    """``better``, ``worse``, ``noise``, ``same``, ``not comparable``, ``missing`` or ``differs``.

    A difference is ``differs`` where a metric was measured once, so that its noise is not known, or where neither
    direction is better.
    """
    low: float | None = None
    """Lower end of the 95 % interval of the ratio; None where a metric was measured once."""
    high: float | None = None
    """Upper end of the 95 % interval of the ratio; None where a metric was measured once."""
    assumed_spread: AssumedSpread | None = None
    """Spread that the interval assumes; None where both sides are several recordings, or were measured once."""
    recordings_to_decide: int | None = None
    """Interleaved recordings per side that would show a difference of this size in four of five cases.

    None where the difference is shown already, a side is several recordings, or more than `MOST_RECORDINGS` would be
    needed.
    """


@dataclass(frozen=True)
class Comparison:
    """Comparison of several measurements with the first, which is the base."""

    entries: tuple[Measurement, ...]
    """Measurements that are compared; the first is the base."""
    differing: Mapping[str, tuple[str | None, ...]]
    """Settings that are not equal everywhere, with the value of every measurement."""
    figures: tuple[str, ...]
    """Names of all metrics that any measurement has, in the order of their first appearance."""
    differences: tuple[Difference, ...]
    """Difference of every metric and every measurement after the base."""
    work: tuple[WorkMatch, ...] = ()
    """Whether each measurement after the base did the same work as the base, with the evidence."""
    merged: Mapping[str, str] = field(default_factory=dict)
    """Waterfall parts that not every measurement separates, each with the part that contains it in all of them."""
    runs: tuple[Findings, ...] = field(default=(), repr=False, compare=False)
    """Findings of two single runs or traces of the same work, for `changes`; else empty."""

    @cached_property
    def changes(self) -> RunChanges | None:
        """Changes in time between two runs; None unless the comparison is of two runs of the same work."""
        from ringprof.analysis.findings.changes import changes_between  # here: logs are read without numpy

        return changes_between(*self.runs) if len(self.runs) == 2 else None

    @cached_property
    def withheld(self) -> tuple[str, ...]:
        """Names of metrics that depend on the work and are compared for no measurement."""
        if any(match.same for match in self.work):
            return ()
        return tuple(
            name
            for name in self.figures
            if any(
                name in measurement.figures and measurement.figures[name].depends_on_work
                for measurement in self.entries
            )
        )

    def against_base(self, figure: str, entry: int) -> Difference | None:
        """Return how a metric of ``entries[entry]`` differs from the base's; None for the base itself."""
        return next(
            (difference for difference in self.differences if (difference.figure, difference.entry) == (figure, entry)),
            None,
        )


def combine_recordings(recordings: Sequence[Measurement]) -> Measurement:
    """Combine several recordings of one run into one measurement: every metric is the median over the recordings.

    A setting that differs between recordings lists all of its values. Metrics that a recording lacks are left out.
    """
    ordered = sorted(recordings, key=lambda recording: recording.created)
    first = ordered[0]
    if len(ordered) == 1:
        return first
    settings = {
        name: _joined_values([recording.settings.get(name) for recording in ordered]) for name in first.settings
    }
    metrics = {}
    for name, metric in first.figures.items():
        values_of_metric = [recording.figures[name] for recording in ordered if name in recording.figures]
        if len(values_of_metric) == len(ordered):
            values = [metric_of_recording.value for metric_of_recording in values_of_metric]
            metrics[name] = msgspec.structs.replace(
                metric, value=median(values), recordings=tuple((value,) for value in values)
            )
    return Measurement(
        label=f"{first.label} and {len(ordered) - 1} more",
        source=first.source,
        settings=settings,
        figures=metrics,
        warnings=tuple(f"{recording.label}: {text}" for recording in ordered for text in recording.warnings),
        others={name: median([recording.others[name] for recording in ordered]) for name in first.others
                if all(name in recording.others for recording in ordered)},
        created=tuple(time for recording in ordered for time in recording.created),
        evidence=first.evidence if all(same_evidence(first.evidence, each.evidence) for each in ordered) else None,
        times_are_of=_joined_values([recording.times_are_of for recording in ordered]) or "",
    )  # fmt: skip


def _joined_values(values: Sequence[str | None]) -> str | None:
    """Return the value that all share, or else all different values as a list in words."""
    known = dict.fromkeys(value or "unknown" for value in values)
    return values[0] if len(known) == 1 else ", ".join(known)


def compare_measurements(
    measurements: Sequence[Measurement], runs: Sequence[Findings] = (), *, did_same_work: bool = False
) -> Comparison:
    """Compare every measurement with the first. Raises ValueError for fewer than two.

    ``runs``: findings of the measurements that are a single run or trace. ``did_same_work``: whether the user states
    that all measurements did the same work.
    """
    if len(measurements) < 2:
        raise ValueError("a comparison needs two measurements or more")
    merged = merged_parts(
        [_waterfall_parts(measurement) for measurement in measurements if _waterfall_parts(measurement)]
    )
    measurements = [_with_merged_parts(measurement, merged) for measurement in measurements]
    work = tuple(
        match_work(measurements[0], measurement, did_same_work=did_same_work) for measurement in measurements[1:]
    )
    setting_names = dict.fromkeys(name for measurement in measurements for name in measurement.settings)
    settings = {name: tuple(measurement.settings.get(name) for measurement in measurements) for name in setting_names}
    metric_names = tuple(dict.fromkeys(name for measurement in measurements for name in measurement.figures))
    differences = [
        _difference(name, index, measurements[0], measurement, same_work=work[index - 1].same)
        for name in metric_names
        for index, measurement in enumerate(measurements)
        if index
    ]
    return Comparison(
        entries=tuple(measurements),
        differing={name: values for name, values in settings.items() if len(set(values)) > 1},
        figures=metric_names,
        differences=tuple(differences),
        work=work,
        merged=merged,
        runs=tuple(runs) if len(runs) == len(measurements) == 2 and work[0].same else (),
    )


def _waterfall_parts(measurement: Measurement) -> set[str]:
    """Return the names of the parts in the measurement's waterfall."""
    return {
        name.removeprefix(WATERFALL_PREFIX).removesuffix("_ms")
        for name in measurement.figures
        if name.startswith(WATERFALL_PREFIX)
    }


def _with_merged_parts(measurement: Measurement, merged: Mapping[str, str]) -> Measurement:
    """Return the measurement with each of the ``merged`` parts added to the part that contains it."""
    target_names = {WATERFALL_PREFIX + part: WATERFALL_PREFIX + whole for part, whole in merged.items()}
    metrics: dict[str, Metric] = {}
    for name, metric in measurement.figures.items():
        bare_name = name.removesuffix("_ms")
        merged_name = f"{target_names[bare_name]}_ms" if bare_name in target_names else name
        metrics[merged_name] = _add_metrics(metrics[merged_name], metric) if merged_name in metrics else metric
    others: dict[str, float] = {}
    for name, value in measurement.others.items():
        others[target_names.get(name, name)] = others.get(target_names.get(name, name), 0.0) + value
    return msgspec.structs.replace(measurement, figures=metrics, others=others)


def _add_metrics(first: Metric, second: Metric) -> Metric:
    """Add two waterfall parts of one measurement, iteration by iteration where they were repeated."""
    recordings = tuple(
        tuple(a + b for a, b in zip(first_times, second_times, strict=True))
        for first_times, second_times in zip(first.recordings, second.recordings, strict=True)
    )
    value = median(sum(recordings, ())) if recordings else first.value + second.value
    return msgspec.structs.replace(first, value=value, recordings=recordings)


def interleaved(base: Measurement, other: Measurement) -> bool:
    """Return whether recordings of both were made in turns: in order of time, each pair has one of either side."""
    count = len(base.created)
    times = sorted([(time, 0) for time in base.created] + [(time, 1) for time in other.created])
    pairs = [{times[index][1], times[index + 1][1]} for index in range(0, len(times) - 1, 2)]
    return count == len(other.created) >= MIN_INTERLEAVED and all(len(pair) == 2 for pair in pairs)


def _difference(name: str, index: int, base: Measurement, other: Measurement, *, same_work: bool) -> Difference:
    """Compare one metric of a measurement with the base's."""
    base_metric, metric = base.figures.get(name), other.figures.get(name)
    if base_metric is None or metric is None:
        return Difference(name, index, None, None, "missing")
    # FLOPs of attention and of a recurrence are counts of their own, so rates of two operators have no ratio.
    operators = {side.settings.get("operator") or "attention" for side in (base, other)}
    if (base_metric.depends_on_work and not same_work) or (base_metric.unit == "TFLOP/s" and len(operators) > 1):
        return Difference(name, index, None, None, "not comparable")
    # Imported here, so that logs are read without numpy.
    from ringprof.analysis.findings.uncertainty import ratio_interval, significantly_different

    # Equal values have the ratio 1, even if both are 0.
    ratio = (
        1.0 if metric.value == base_metric.value else metric.value / base_metric.value if base_metric.value else None
    )
    recordings, are_interleaved = (base_metric.recordings, metric.recordings), interleaved(base, other)
    assumed = _assumed_spread(base, other) if min(map(len, recordings)) == 1 else None
    ratio_sd = 2**0.5 * assumed.share if assumed else 0.0
    low, high = ratio_interval(*recordings, interleaved=are_interleaved, spread=ratio_sd) or (None, None)
    proved = None if low is None else significantly_different(*recordings, interleaved=are_interleaved, spread=ratio_sd)
    verdict = _verdict(base_metric, metric, proved=proved)
    needed = recordings_to_decide(base, other, name) if verdict == "noise" else None
    assumed = None if low is None else assumed
    return Difference(name, index, metric.value - base_metric.value, ratio, verdict, low, high, assumed, needed)


def recordings_to_decide(base: Measurement, other: Measurement, metric: str, limit: float = 1.0) -> int | None:
    """Return how many recordings per side would distinguish the ratio of a metric from ``limit``.

    Both sides are single recordings now; the new ones are interleaved and made in one session. None as in
    `uncertainty.recordings_to_decide`, and where a side is several recordings.
    """
    from ringprof.analysis.findings import uncertainty  # here: logs are read without numpy

    recordings = base.figures[metric].recordings, other.figures[metric].recordings
    if [len(side) for side in recordings] != [1, 1] or limit <= 0:
        return None
    ratio_sd = 2**0.5 * _assumed_spread(base, other, SAME_SESSION).share
    return uncertainty.recordings_to_decide(recordings[0][0], recordings[1][0], ratio_sd, limit)


def _assumed_spread(base: Measurement, other: Measurement, spread: Spread | None = None) -> AssumedSpread:
    """Return the assumed spread for recordings of this length: that of one session, unless they are of two."""
    if spread is None:
        spread = session_spread((*base.created, *other.created)) if base.created and other.created else OTHER_SESSION
    # The time of one iteration is that without the profiler if it is known.
    names = ("iteration_ms", "profiled_iteration_ms", "wall_ms")
    shares = [
        spread.share_of(next((side.figures[name].value for name in names if name in side.figures), None))
        for side in (base, other)
    ]
    return AssumedSpread(hypot(*shares) / 2**0.5, spread.source)


def _verdict(base: Metric, other: Metric, *, proved: bool | None) -> str:
    """Judge a difference; ``proved``: whether its interval proves it, None where there is no interval."""
    if base.value == other.value:
        return "same"
    if proved is False:
        return "noise"
    if proved is None or base.higher_is_better is None:
        return "differs"
    return "better" if (other.value > base.value) == base.higher_is_better else "worse"
