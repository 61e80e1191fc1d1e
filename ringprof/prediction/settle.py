"""Scores of saved predictions against later measurements: the error, and whether the interval holds the measurement."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import msgspec

from ringprof.common.decoding import UNREADABLE, decode_file
from ringprof.common.files import is_folder
from ringprof.common.formatting import percent
from ringprof.common.json_object import JsonObject
from ringprof.errors import InputError, RingprofError
from ringprof.prediction.network import Cluster
from ringprof.prediction.query import find_run
from ringprof.prediction.score import read_row, read_rows
from ringprof.report.text import TextStyle, clean, duration
from ringprof.run import Run
from ringprof.strategies.catalog import canonical_name
from ringprof.workload.devices import device_named
from ringprof.workload.workload import Workload

_SCHEMA = "ringprof.settlement/1"
_TUNING = "ringprof.tuning/1"
_SATURATED = 1e-9


@dataclass(frozen=True)
class Subject:
    """Workload, strategy and cluster of a prediction or a measurement; None for what it does not state."""

    strategy: str
    workload: Workload
    hosts: int
    gpus_per_host: int
    kernel: str | None
    hops: str | None
    params: JsonObject
    device: str | None = None
    """Name of the GPU."""


@dataclass(frozen=True)
class Forecast:
    """Saved prediction of the time per iteration: its percentiles in milliseconds."""

    label: str
    """Name of the choice in the advice that holds it; empty for a single prediction."""
    subject: Subject
    machine: str
    device: str
    p10_ms: float
    p50_ms: float
    p90_ms: float


@dataclass(frozen=True)
class Observation:
    """Measured time per iteration, in milliseconds."""

    source: str
    """Path of the run, or path and line of the table."""
    subject: Subject
    measured_ms: float


@dataclass(frozen=True)
class Score:
    """Forecast, and the measurement that it is compared with."""

    forecast: Forecast
    observation: Observation

    @property
    def error(self) -> float:
        """Relative error: the predicted median over the measured time, minus 1."""
        return self.forecast.p50_ms / self.observation.measured_ms - 1

    @property
    def inside(self) -> bool:
        """Whether the measured time lies between the 10th and the 90th percentile, as four of five should."""
        return self.forecast.p10_ms <= self.observation.measured_ms <= self.forecast.p90_ms

    @property
    def deviations(self) -> float | None:
        """Distance of the measured time from the predicted median, in standard deviations of a lognormal distribution.

        Positive where the run took longer than predicted; None where the interval has no width.
        """
        spread = math.log(self.forecast.p90_ms / self.forecast.p10_ms) / (2 * 1.2816)
        ratio = math.log(self.observation.measured_ms / self.forecast.p50_ms)
        return ratio / spread if spread > _SATURATED else None


@dataclass(frozen=True)
class Settlement:
    """Scores of all measurements that match a forecast, and the other measurements."""

    scores: Sequence[Score]
    others: Sequence[tuple[str, str]]
    """Source of each measurement that is not scored, and the reason."""


def read_forecasts(path: str) -> list[Forecast]:
    """Read predictions: what ``predict`` or ``advise`` printed with ``--format json``, the folder of ``predict -o``, or
    the file of ``tune``.

    Raises `InputError` for anything else.
    """
    if not is_folder(path):
        data = decode_file(path, dict[str, Any], "a saved prediction")
        try:
            schema = data.get("schema")
            if schema == "ringprof.prediction/1":
                return [_forecast("", data)]
            if schema == "ringprof.advice/1":
                return [_forecast(choice["label"], choice) for choice in data["choices"]]
            if schema == _TUNING:
                known = [_forecast(trial["label"], trial["forecast"]) for trial in data["trials"] if trial["forecast"]]
                if not known:
                    raise InputError(f"{path}: a tuning without predictions: no calibration covers its device")
                return known
        except LookupError as error:
            raise InputError(f"{path}: not a saved prediction: it has no field {error}") from None
        except (*UNREADABLE, TypeError) as error:
            raise InputError(f"{path}: not a saved prediction: {error}") from None
    run = find_run(path)
    if run.predicted is None:
        raise InputError(f"{path}: a recorded run, not a prediction: give the prediction first, then what was measured")
    ms = (ns / 1e6 for ns in (run.predicted.p10_ns, run.predicted.p50_ns, run.predicted.p90_ns))
    device = run.environment.devices[0] if run.environment.devices else ""
    return [Forecast("", _subject_of(run, path), run.predicted.machine, device, *ms)]


def _forecast(label: str, data: JsonObject) -> Forecast:
    question, times = data["question"], data["iteration_ms"]
    subject = Subject(
        question["strategy"], msgspec.convert(question["workload"], Workload), question["hosts"],
        question["gpus_per_host"], question["kernel"], question["hops"], question["params"],
        question["device"] or None,
    )  # fmt: skip
    percentiles = (float(times[name]) for name in ("p10", "p50", "p90"))
    low, middle, high = percentiles
    if not 0 < low <= middle <= high < math.inf:
        raise ValueError("its times are not in order")
    return Forecast(label, subject, question["machine"], question["device"], low, middle, high)


def _subject_of(run: Run, path: str) -> Subject:
    if run.strategy is None or run.workload is None:
        raise InputError(f"{path}: this run does not name its strategy and workload")
    used, per_host = run.strategy, min(run.topology.ranks_per_host, run.topology.world_size)
    return Subject(
        used.name, run.workload, -(-run.topology.world_size // per_host), per_host, run.kernel, used.hops,
        dict(used.params), next(iter(run.environment.devices), None),
    )  # fmt: skip


def settle(forecasts: Sequence[Forecast], measured: Sequence[str]) -> Settlement:
    """Score forecasts, at least one, against recorded runs and tables of measurements, given by their paths.

    A measurement is scored against the first forecast of the same workload, strategy and cluster. Raises `InputError`
    where no measurement has such a forecast.
    """
    scores: list[Score] = []
    others: list[tuple[str, str]] = []
    for path in measured:
        for source, observation in _observations(path, forecasts[0]):
            if isinstance(observation, str):
                others.append((source, observation))
                continue
            by_differences = [(differences(forecast.subject, observation.subject), forecast) for forecast in forecasts]
            fewest, forecast = min(by_differences, key=lambda item: len(item[0]))
            if fewest:
                others.append((source, f"not what was predicted: {', '.join(fewest)}"))
            else:
                scores.append(Score(forecast, observation))
    if not scores:
        reasons = "; ".join(f"{source}: {reason}" for source, reason in others[:3])
        raise InputError(f"nothing to score: {reasons}")
    return Settlement(scores, others)


def _observations(path: str, forecast: Forecast) -> Iterator[tuple[str, Observation | str]]:
    """Yield each measurement of a run or a table with its source, or the reason why it is none."""
    tuning = _read_tuning(path)
    if tuning is not None:
        yield from _observations_of(tuning, path)
        return
    try:
        run = find_run(path)
    except RingprofError:
        if is_folder(path):
            raise
        cluster = Cluster(gpus_per_host=forecast.subject.gpus_per_host)
        for number, row in enumerate(read_rows(path), 2):
            measurement = read_row(number, row, forecast.device, cluster)
            source = f"{path}:{number}"
            if measurement.query is None or measurement.measured_ms is None:
                yield source, measurement.unreadable_reason or "no time"
            elif measurement.part == "bwd":
                yield source, "a backward pass alone"
            else:
                query = measurement.query
                kernel = None if query.kernel == "auto" else query.kernel
                subject = Subject(
                    query.strategy, query.workload, query.cluster.hosts, query.cluster.gpus_per_host, kernel, None,
                    dict(query.params),
                )  # fmt: skip
                yield source, Observation(source, subject, measurement.measured_ms)
        return
    if run.predicted is not None:
        yield path, "a prediction, not a recording"
        return
    median_ns = run.timings.median_ns() if run.timings else None
    if median_ns is None:
        yield path, "no iteration was timed without the profiler"
    else:
        yield path, Observation(path, _subject_of(run, path), median_ns / 1e6)


def _read_tuning(path: str) -> JsonObject | None:
    """Read the file of ``tune``; None for anything else."""
    if is_folder(path) or not path.endswith(".json"):
        return None
    data = decode_file(path, dict[str, Any], "a measurement")
    return data if data.get("schema") == _TUNING else None


def _observations_of(tuning: JsonObject, path: str) -> Iterator[tuple[str, Observation | str]]:
    """Yield each trial's median over its recordings."""
    try:
        device = None if tuning["device"] == "cpu" else tuning["device"]
        for trial in tuning["trials"]:
            source = f"{path}: {trial['label']}"
            if trial["median_ms"] is None:
                yield source, trial["failure"] or "no time"
                continue
            subject = Subject(
                trial["strategy"], msgspec.convert(trial["workload"], Workload), trial["hosts"], trial["gpus_per_host"],
                trial["kernel"], trial["hops"], trial["params"], device,
            )  # fmt: skip
            yield source, Observation(source, subject, float(trial["median_ms"]))
    except (LookupError, *UNREADABLE, TypeError) as error:
        raise InputError(f"{path}: not a tuning of ringprof tune: {error}") from None


def differences(predicted: Subject, measured: Subject) -> list[str]:
    """Return the differences in workload, strategy and cluster in words, as ``GPUs 4 instead of 8``.

    A kernel, transport or parameter that one side does not state is no difference.
    """
    pairs: list[tuple[str, Any, Any]] = [
        ("strategy", canonical_name(predicted.strategy), canonical_name(measured.strategy)),
        ("GPUs", predicted.hosts * predicted.gpus_per_host, measured.hosts * measured.gpus_per_host),
        ("GPUs per node", predicted.gpus_per_host, measured.gpus_per_host),
    ]
    first, second = (msgspec.to_builtins(subject.workload) for subject in (predicted, measured))
    # Layers and steps of a capture do not change the time of one iteration of a recording.
    pairs += [(name, first[name], second[name]) for name in first if name not in ("layers", "steps")]
    first_device, second_device = (device_named(subject.device) or subject.device for subject in (predicted, measured))
    stated: list[tuple[str, Any, Any]] = [
        ("kernel", predicted.kernel, measured.kernel), ("hops", predicted.hops, measured.hops), 
        ("device", first_device, second_device),
    ]  # fmt: skip
    pairs += [(name, a, b) for name, a, b in stated if a is not None and b is not None]
    shared = predicted.params.keys() & measured.params.keys()
    pairs += [(name, predicted.params[name], measured.params[name]) for name in sorted(shared)]
    return [f"{name} {b} instead of {a}" for name, a, b in pairs if a != b]


# --- shown --------------------------------------------------------------------------------------------


def settlement_dict(settlement: Settlement) -> JsonObject:
    """Return the scores as a dict of schema ``ringprof.settlement/1``."""
    scores = settlement.scores
    return {
        "schema": _SCHEMA,
        "scores": [
            {
                "source": score.observation.source, "forecast": score.forecast.label or score.forecast.subject.strategy,
                "machine": score.forecast.machine, "measured_ms": round(score.observation.measured_ms, 4),
                "predicted_ms": {"p10": score.forecast.p10_ms, "p50": score.forecast.p50_ms,
                                 "p90": score.forecast.p90_ms},
                "error": round(score.error, 5), "inside": score.inside,
                "deviations": None if score.deviations is None else round(score.deviations, 3),
            }
            for score in scores
        ],
        "inside": sum(score.inside for score in scores), "count": len(scores),
        "median_error": round(median(score.error for score in scores), 5),
        "others": [{"source": source, "reason": reason} for source, reason in settlement.others],
    }  # fmt: skip


def settlement_text(settlement: Settlement, style: TextStyle) -> str:
    """Return the scores as text that ends with a newline."""
    lines = []
    for score in settlement.scores:
        forecast, measured_ns = score.forecast, score.observation.measured_ms * 1e6
        low, middle, high = (duration(ms * 1e6) for ms in (forecast.p10_ms, forecast.p50_ms, forecast.p90_ms))
        amount = percent(abs(score.error))
        verdict = f"{amount} too {'long' if score.error > 0 else 'short'}" if round(score.error, 3) else "exact"
        side = "inside" if score.inside else "outside"
        lines += [
            f"{clean(score.observation.source)}: {clean(forecast.label or forecast.subject.strategy)}",
            f"  measured {duration(measured_ns)}, predicted {middle} ({low} to {high}): {verdict}, {side} the interval",
        ]
    count = len(settlement.scores)
    if count > 1:
        inside = sum(score.inside for score in settlement.scores)
        lines.append(f"{inside} of {count} inside their intervals, of which four of five should be")
    lines += [f"not scored: {clean(source)}: {clean(reason, 300)}" for source, reason in settlement.others]
    return style.finish(style.fit("\n".join(lines)))
