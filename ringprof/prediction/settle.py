"""Scores of saved predictions against later measurements: the error, and whether the interval holds the measurement."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import msgspec

from ringprof.common.decoding import UNREADABLE, decode_file
from ringprof.common.files import is_folder
from ringprof.common.formatting import percent
from ringprof.common.json_object import JsonObject
from ringprof.errors import InputError, RingprofError
from ringprof.prediction.network import Cluster
from ringprof.prediction.query import Query, find_run
from ringprof.prediction.score import Measurement, Score, read_row, read_rows
from ringprof.report.text import TextStyle, clean, duration
from ringprof.run import Run
from ringprof.strategies.catalog import canonical_name
from ringprof.workload.devices import device_named
from ringprof.workload.workload import Workload

_SCHEMA = "ringprof.settlement/1"
_TUNING = "ringprof.tuning/1"


@dataclass(frozen=True)
class Forecast:
    """Saved prediction of the time per iteration."""

    label: str
    """Name of the choice in the advice that holds it; empty for a single prediction."""
    query: Query
    machine: str
    device: str
    predicted_ms: tuple[float, float, float]
    """10th, 50th and 90th percentile in milliseconds."""


Settlement = tuple[list[tuple[Forecast, Score]], list[tuple[str, str]]]
"""Scores of all measurements that match a forecast, and (source, reason) of the other measurements."""


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
    low, middle, high = (ns / 1e6 for ns in (run.predicted.p10_ns, run.predicted.p50_ns, run.predicted.p90_ns))
    device = run.environment.devices[0] if run.environment.devices else ""
    return [Forecast("", _query_of_run(run, path), run.predicted.machine, device, (low, middle, high))]


def _forecast(label: str, data: JsonObject) -> Forecast:
    question, times = data["question"], data["iteration_ms"]
    low, middle, high = (float(times[name]) for name in ("p10", "p50", "p90"))
    if not 0 < low <= middle <= high < math.inf:
        raise ValueError("its times are not in order")
    return Forecast(label, _query_of(question), question["machine"], question["device"], (low, middle, high))


def _query_of(data: JsonObject) -> Query:
    """Return the query of a saved prediction, or of a trial of ``tune``."""
    return Query(
        data["strategy"], msgspec.convert(data["workload"], Workload), Cluster(data["hosts"], data["gpus_per_host"]),
        data["kernel"], data["hops"], data["params"],
    )  # fmt: skip


def _query_of_run(run: Run, path: str) -> Query:
    """Return what a run ran, on any device; the kernel is ``auto`` where it is not stated."""
    if run.strategy is None or run.workload is None:
        raise InputError(f"{path}: this run does not name its strategy and workload")
    used, per_host = run.strategy, min(run.topology.ranks_per_host, run.topology.world_size)
    cluster = Cluster(-(-run.topology.world_size // per_host), per_host)
    return Query(used.name, run.workload, cluster, run.kernel or "auto", used.hops, dict(used.params))


def settle(forecasts: Sequence[Forecast], measured: Sequence[str]) -> Settlement:
    """Score forecasts, at least one, against recorded runs and tables of measurements, given by their paths.

    A measurement is scored against the first forecast of the same workload, strategy and cluster. Raises `InputError`
    where no measurement has such a forecast.
    """
    scores: list[tuple[Forecast, Score]] = []
    others: list[tuple[str, str]] = []
    for path in measured:
        for row in _measurements(path, forecasts[0]):
            if row.reason or row.query is None:
                others.append((row.name, row.reason))
                continue
            by_differences = [(_differences(forecast, row.query, row.device), forecast) for forecast in forecasts]
            fewest, forecast = min(by_differences, key=lambda item: len(item[0]))
            if fewest:
                others.append((row.name, f"not what was predicted: {', '.join(fewest)}"))
            else:
                scores.append((forecast, Score(row, forecast.predicted_ms)))
    if not scores:
        reasons = "; ".join(f"{source}: {reason}" for source, reason in others[:3])
        raise InputError(f"nothing to score: {reasons}")
    return scores, others


def _measurements(path: str, forecast: Forecast) -> Iterator[Measurement]:
    """Yield each measurement of a run, a table or a tuning, named by its source; ``reason`` says why it is none."""
    if not is_folder(path) and path.endswith(".json"):
        tuning = decode_file(path, dict[str, Any], "a measurement")
        if tuning.get("schema") == _TUNING:
            yield from _trials(tuning, path)
            return
    try:
        run = find_run(path)
    except RingprofError:
        if is_folder(path):
            raise
        cluster = Cluster(gpus_per_host=forecast.query.cluster.gpus_per_host)
        for number, cells in enumerate(read_rows(path), 2):
            row = replace(read_row(number, cells, forecast.device, cluster), name=f"{path}:{number}")
            if row.query is None or row.measured_ms is None:
                yield replace(row, reason=row.reason or "no time")
            elif row.part == "bwd":
                yield replace(row, reason="a backward pass alone")
            else:
                yield replace(row, query=replace(row.query, hops="auto"))  # a table does not state the transport
        return
    median_ns = run.timings.median_ns() if run.timings else None
    if run.predicted is not None:
        yield Measurement(0, path, reason="a prediction, not a recording")
    elif median_ns is None:
        yield Measurement(0, path, reason="no iteration was timed without the profiler")
    else:
        device = next(iter(run.environment.devices), None)
        yield Measurement(0, path, _query_of_run(run, path), median_ns / 1e6, device=device)


def _trials(tuning: JsonObject, path: str) -> Iterator[Measurement]:
    """Yield each trial's median over its recordings."""
    try:
        device = None if tuning["device"] == "cpu" else tuning["device"]
        for trial in tuning["trials"]:
            source = f"{path}: {trial['label']}"
            if trial["median_ms"] is None:
                yield Measurement(0, source, reason=trial["failure"] or "no time")
            else:
                yield Measurement(0, source, _query_of(trial), float(trial["median_ms"]), device=device)
    except (LookupError, *UNREADABLE, TypeError) as error:
        raise InputError(f"{path}: not a tuning of ringprof tune: {error}") from None


def _differences(forecast: Forecast, measured: Query, device: str | None) -> list[str]:
    """Return the differences in workload, strategy and cluster in words, as ``GPUs 4 instead of 8``.

    A kernel, transport, device or parameter that one side does not state is no difference.
    """
    predicted = forecast.query
    pairs: list[tuple[str, Any, Any]] = [
        ("strategy", canonical_name(predicted.strategy), canonical_name(measured.strategy)),
        ("GPUs", predicted.cluster.size, measured.cluster.size),
        ("GPUs per node", predicted.cluster.gpus_per_host, measured.cluster.gpus_per_host),
    ]
    first, second = (msgspec.to_builtins(query.workload) for query in (predicted, measured))
    # Layers and steps of a capture do not change the time of one iteration of a recording.
    pairs += [(name, first[name], second[name]) for name in first if name not in ("layers", "steps")]
    first_device, second_device = (device_named(name) or name for name in (forecast.device, device))
    stated: list[tuple[str, Any, Any]] = [
        ("kernel", predicted.kernel, measured.kernel), ("hops", predicted.hops, measured.hops),
        ("device", first_device, second_device),
    ]  # fmt: skip
    pairs += [(name, a, b) for name, a, b in stated if not {a, b} & {None, "", "auto"}]
    shared = predicted.params.keys() & measured.params.keys()
    pairs += [(name, predicted.params[name], measured.params[name]) for name in sorted(shared)]
    return [f"{name} {b} instead of {a}" for name, a, b in pairs if a != b]


# --- shown --------------------------------------------------------------------------------------------


def settlement_dict(settlement: Settlement) -> JsonObject:
    """Return the scores as a dict of schema ``ringprof.settlement/1``."""
    scores, others = settlement
    return {
        "schema": _SCHEMA,
        "scores": [
            {
                "source": score.row.name, "forecast": forecast.label or forecast.query.strategy,
                "machine": forecast.machine, "measured_ms": round(score.row.measured_ms or 0.0, 4),
                "predicted_ms": dict(zip(("p10", "p50", "p90"), forecast.predicted_ms, strict=True)),
                "error": round(score.error or 0.0, 5), "inside": score.inside,
                "deviations": None if score.deviations is None else round(score.deviations, 3),
            }
            for forecast, score in scores
        ],
        "inside": sum(score.inside for _, score in scores), "count": len(scores),
        "median_error": round(median(score.error or 0.0 for _, score in scores), 5),
        "others": [{"source": source, "reason": reason} for source, reason in others],
    }  # fmt: skip


def settlement_text(settlement: Settlement, style: TextStyle) -> str:
    """Return the scores as text that ends with a newline."""
    scores, others = settlement
    lines = []
    for forecast, score in scores:
        measured, low, middle, high = (
            duration((ms or 0.0) * 1e6) for ms in (score.row.measured_ms, *forecast.predicted_ms)
        )
        error = score.error or 0.0
        verdict = f"{percent(abs(error))} too {'long' if error > 0 else 'short'}" if round(error, 3) else "exact"
        side = "inside" if score.inside else "outside"
        lines += [
            f"{clean(score.row.name)}: {clean(forecast.label or forecast.query.strategy)}",
            f"  measured {measured}, predicted {middle} ({low} to {high}): {verdict}, {side} the interval",
        ]
    if len(scores) > 1:
        inside = sum(score.inside for _, score in scores)
        lines.append(f"{inside} of {len(scores)} inside their intervals, of which four of five should be")
    lines += [f"not scored: {clean(source)}: {clean(reason, 300)}" for source, reason in others]
    return style.finish(style.fit("\n".join(lines)))
