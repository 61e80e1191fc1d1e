"""Scores: predicted times beside measured ones, and measured values that a machine cannot have reached.

One score is of a saved prediction and a later measurement, or of a row of a table or of a benchmark log and its own
prediction.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from statistics import median
from typing import Any, Literal

import msgspec

from ringprof.common.decoding import UNREADABLE, decode_file
from ringprof.common.files import is_folder
from ringprof.common.formatting import percent
from ringprof.common.json_object import JsonObject, json_text
from ringprof.errors import InputError, RingprofError
from ringprof.prediction.calibration import Calibration
from ringprof.prediction.kernel_model import OutsideCalibration, block_of
from ringprof.prediction.machine import Curves, curves_of
from ringprof.prediction.measured import TUNING, Measured, measurements, query_of_dict, query_of_run, read_row
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import ScheduleOf, predict
from ringprof.prediction.query import Query, find_run
from ringprof.printed.benchmarks.rows import Flag, JudgedRow, flag
from ringprof.report.text import TextStyle, clean, duration
from ringprof.scale.workers import Notify, ignore_progress
from ringprof.strategies.catalog import canonical_name
from ringprof.workload.devices import device_named, peak_of

_CHECK_SCHEMA, _SETTLEMENT_SCHEMA = "ringprof.check/1", "ringprof.settlement/1"
_SAVED, _MOST_SEARCHED = re.compile(rb'"schema":\s*"ringprof\.(?:prediction|advice|tuning)/'), 1 << 20
"""Mark of a saved prediction, and the number of bytes from the start of a file in which it is searched."""
_UNSTATED = ("auto", "", None)
_SATURATED = 1e-9
SLACK = 1.05
"""Factor by which a rate may exceed a kernel's best at any length."""
_LENGTH_TOLERANCE = 0.25
"""Largest relative difference at which a time is attributed to another sequence length."""

Percentiles = tuple[float, float, float]
"""10th, 50th and 90th percentile of a predicted time in milliseconds."""


@dataclass(frozen=True)
class Forecast:
    """Saved prediction of the time per iteration."""

    label: str
    """Name of the choice in the advice that holds it; empty for a single prediction."""
    query: Query
    machine: str
    device: str
    predicted_ms: Percentiles


@dataclass(frozen=True)
class Scored:
    """Measured time beside the predicted one."""

    measured: Measured
    predicted_ms: Percentiles | None
    """None if there is no prediction of the measurement."""
    label: str = ""
    """Name of the saved prediction's choice or strategy."""
    machine: str = ""
    """Machine of the saved prediction."""
    reason: str = ""
    """Reason why there is no prediction."""
    flags: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of (code, message) about a time that cannot be right."""

    @property
    def error(self) -> float | None:
        """Relative error: the predicted median over the measured time, minus 1."""
        if self.predicted_ms is None or not self.measured.ms:
            return None
        return self.predicted_ms[1] / self.measured.ms - 1

    @property
    def inside(self) -> bool:
        """Whether the measured time lies between the 10th and the 90th percentile, as four of five should."""
        if self.predicted_ms is None or not self.measured.ms:
            return False
        return self.predicted_ms[0] <= self.measured.ms <= self.predicted_ms[2]

    @property
    def deviations(self) -> float | None:
        """Distance of the measured time from the predicted median, in standard deviations of a lognormal distribution.

        Positive where the run took longer than predicted; None where the interval has no width.
        """
        if self.predicted_ms is None or not self.measured.ms:
            return None
        low, middle, high = self.predicted_ms
        spread = math.log(high / low) / (2 * 1.2816)
        return math.log(self.measured.ms / middle) / spread if spread > _SATURATED else None


# --- saved predictions --------------------------------------------------------------------------------


def is_saved_prediction(path: str) -> bool:
    """Return whether a path is the file of a prediction, an advice or a tuning; it may still be damaged."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return _SAVED.search(file.read(_MOST_SEARCHED)) is not None


def is_prediction(path: str) -> bool:
    """Return whether a path is a run that ``predict -o`` wrote."""
    try:
        return find_run(path).predicted is not None
    except RingprofError:
        return False


def read_forecasts(path: str) -> list[Forecast]:
    """Read predictions: what ``predict`` or ``advise`` printed with ``--format json``, the folder of ``predict -o``, or
    the file of ``bench --until-decided``.

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
            if schema == TUNING:
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
    ms = (run.predicted.p10_ns / 1e6, run.predicted.p50_ns / 1e6, run.predicted.p90_ns / 1e6)
    device = run.environment.devices[0] if run.environment.devices else ""
    return [Forecast("", query_of_run(run, path), run.predicted.machine, device, ms)]


def _forecast(label: str, data: JsonObject) -> Forecast:
    question, times = data["question"], data["iteration_ms"]
    low, middle, high = (float(times[name]) for name in ("p10", "p50", "p90"))
    if not 0 < low <= middle <= high < math.inf:
        raise ValueError("its times are not in order")
    query = query_of_dict(question, Cluster())
    return Forecast(label, query, question["machine"], question["device"], (low, middle, high))


def score(forecasts: Sequence[Forecast], measured: Sequence[str]) -> list[Scored]:
    """Score forecasts, at least one, against recorded runs and tables of measurements, given by their paths.

    A measurement is scored against the first forecast of the same workload, strategy and cluster; other ones have a
    reason in place of a prediction. Raises `InputError` where no measurement has such a forecast.
    """
    scores: list[Scored] = []
    first = forecasts[0]
    for path in measured:
        for item in measurements(path, first.device, Cluster(gpus_per_host=first.query.cluster.gpus_per_host)):
            if item.query is None:
                scores.append(Scored(item, None, reason=item.reason))
                continue
            by_differences = [(differences(forecast, item), forecast) for forecast in forecasts]
            fewest, forecast = min(by_differences, key=lambda pair: len(pair[0]))
            if fewest:
                scores.append(Scored(item, None, reason=f"not what was predicted: {', '.join(fewest)}"))
            else:
                label = forecast.label or forecast.query.strategy
                scores.append(Scored(item, forecast.predicted_ms, label, forecast.machine))
    if all(scored.predicted_ms is None for scored in scores):
        reasons = "; ".join(f"{scored.measured.source}: {scored.reason}" for scored in scores[:3])
        raise InputError(f"nothing to score: {reasons}")
    return scores


def differences(forecast: Forecast, measured: Measured) -> list[str]:
    """Return the differences in workload, strategy and cluster in words, as ``GPUs 4 instead of 8``.

    A kernel, transport or parameter that one side does not state is no difference.
    """
    assert measured.query is not None
    predicted, other = forecast.query, measured.query
    pairs: list[tuple[str, Any, Any]] = [
        ("strategy", canonical_name(predicted.strategy), canonical_name(other.strategy)),
        ("GPUs", predicted.cluster.size, other.cluster.size),
        ("GPUs per node", predicted.cluster.gpus_per_host, other.cluster.gpus_per_host),
    ]
    first, second = (msgspec.to_builtins(query.workload) for query in (predicted, other))
    # Layers and steps of a capture do not change the time of one iteration of a recording.
    pairs += [(name, first[name], second[name]) for name in first if name not in ("layers", "steps")]
    device, other_device = (device_named(side.device) or side.device for side in (forecast, measured))
    stated: list[tuple[str, Any, Any]] = [
        ("kernel", predicted.kernel, other.kernel), ("hops", predicted.hops, other.hops),
        ("device", device, other_device),
    ]  # fmt: skip
    pairs += [(name, a, b) for name, a, b in stated if a not in _UNSTATED and b not in _UNSTATED]
    pairs += [
        (name, predicted.params[name], other.params[name]) for name in sorted(predicted.params.keys() & other.params)
    ]
    return [f"{name} {b} instead of {a}" for name, a, b in pairs if a != b]


# --- rows of tables and benchmark logs ----------------------------------------------------------------


def check_rows(
    rows: Sequence[Mapping[str, str | None]], machine: Calibration, schedule_of: ScheduleOf, cluster: Cluster,
    notify: Notify = ignore_progress,
) -> list[Scored]:  # fmt: skip
    """Check rows against a machine; ``cluster`` gives the network, and the GPUs per host where a row does not."""
    cache: dict[Any, Any] = {}
    checked = []
    for number, row in enumerate(rows):
        notify("rows", number, len(rows))
        checked.append(_check(read_row(number + 2, row, machine.device, cluster), machine, schedule_of, cache))
    return checked


def check_log_rows(
    rows: Iterable[JudgedRow], machine: Calibration, schedule_of: ScheduleOf, cluster: Cluster
) -> Iterator[Flag]:
    """Yield flags of the rows that state enough to be predicted; ``cluster`` gives the GPUs per host.

    Rates above the device's peak are left out, because the audit reports them without a machine.
    """
    measurements = [(row, measurement) for row in rows if (measurement := _as_measurement(row))]
    checked_rows = check_rows([measurement for _, measurement in measurements], machine, schedule_of, cluster)
    for (row, _), checked in zip(measurements, checked_rows, strict=True):
        for code, message in checked.flags:
            if code != "above_peak":
                yield flag(row.row, code, "error", f"{row.row.system}: {message}", checked.measured.ms)


def _as_measurement(judged: JudgedRow) -> dict[str, str | None] | None:
    """Return the row in the form that `check_rows` reads; None if a required value is missing."""
    row = judged.row
    ms = row.forward_ms if row.forward_only or row.forward_backward_ms is None else row.forward_backward_ms
    if (ms is None and judged.tflops_per_gpu is None) or not all((row.seq, row.heads, row.head_dim, row.world_size)):
        return None
    flat = "flat ring" if row.double_ring is False else ""
    return {
        "strategy": "megatron" if row.system == "megatron_cp" else row.system,
        "seq_global": str(row.seq), "heads": str(row.heads),
        "kv_heads": str(row.kv_heads or row.heads), "head_dim": str(row.head_dim), "batch": str(row.batch or 1),
        "n_gpus": str(row.world_size), "causal": str(row.causal is not False),
        "pass": "fwd" if row.forward_only or (ms and ms is row.forward_ms) else "fwd+bwd",
        "degrees": f"ulysses={row.ulysses_degree}" if row.ulysses_degree else flat,
        "time_ms": str(ms) if ms else None, "tflops": None if ms else str(judged.tflops_per_gpu),
    }  # fmt: skip


def _check(row: Measured, machine: Calibration, schedule_of: ScheduleOf, cache: dict[Any, Any]) -> Scored:
    """Predict a measurement and flag it if the times cannot belong together."""
    flags = list(_flag_impossible_rates(row, machine))
    if row.query is None:
        return Scored(row, None, reason=row.reason, flags=flags)
    try:
        predicted = _predicted_ms(row, row.query, machine, schedule_of, cache)
    except RingprofError as error:
        return Scored(row, None, reason=str(error), flags=flags)
    if row.ms and not 0.4 < predicted[1] / row.ms < 2.5:
        flags += _flag_other_length(row, machine, schedule_of, cache)
    if row.ms and row.ms < predicted[0] / 1.5 and not flags:
        message = f"{row.ms:.2f} ms, where this machine needs {predicted[0]:.2f} at the least"
        flags.append(("too_fast", message))
    return Scored(row, predicted, flags=flags)


def _flag_impossible_rates(row: Measured, machine: Calibration) -> list[tuple[str, str]]:
    """Flag rates that no such device has reached with any strategy."""
    if row.tflops is None:
        return []
    peak = peak_of(machine.device, "bf16")
    if peak and row.tflops > peak.tflops:
        return [("above_peak", f"{row.tflops:.0f} TFLOP/s per GPU, the device's peak is {peak.tflops:.0f}")]
    kernel_name = row.query.kernel if row.query else "auto"
    kernels = [kernel for kernel in machine.kernels if kernel.name == kernel_name] or machine.kernels
    phases = _PHASES.get(row.part, ("forward", "backward"))
    curves = [curves_of(machine, kernel.name) for kernel in kernels]
    best = max((_best_tflops(curve, phase) for curve in curves for phase in phases), default=0.0)
    if best and row.tflops > SLACK * best:
        return [("above_kernel", f"{row.tflops:.0f} TFLOP/s per GPU, the kernel alone reaches {best:.0f} at its best")]
    return []


Phase = Literal["forward", "backward"]
_PHASES: Mapping[str, tuple[Phase, ...]] = {"fwd": ("forward",), "bwd": ("backward",)}
_LENGTHS = tuple(2**octave for octave in range(12, 21))
"""Lengths of square blocks at which a kernel's curve is evaluated: beyond the longest, rates no longer grow."""


@lru_cache(maxsize=16)
def _best_tflops(curves: Curves, phase: Phase) -> float:
    """Return a kernel's best rate in TFLOP/s at any length: of its samples, or of its curve; 0 without samples."""
    samples = [sample for sample in curves.kernel.samples if sample.phase == phase]
    rates = [sample.tflops for sample in samples]
    heads = {(sample.head_dim, sample.heads, sample.kv_heads) for sample in samples if sample.pairs is None}
    for (head_dim, heads_q, kv_heads), causal, tokens in product(heads, (True, False), _LENGTHS):
        block = block_of(phase, tokens, tokens, heads_q, kv_heads, head_dim, causal=causal)
        # A length that no sample is near to has no estimate.
        with suppress(OutsideCalibration):
            rates.append(block.flops() / curves.estimate(block).ns / 1e3)
    return max(rates, default=0.0)


def _flag_other_length(
    row: Measured, machine: Calibration, schedule_of: ScheduleOf, cache: dict[Any, Any]
) -> list[tuple[str, str]]:
    """Flag a time that fits a sequence two or four times as long or as short."""
    assert row.query is not None and row.ms
    for factor in (4.0, 2.0, 0.5, 0.25):
        seq = int(row.query.workload.seq * factor)
        other = replace(row.query, workload=msgspec.structs.replace(row.query.workload, seq=seq))
        try:
            median_ms = _predicted_ms(row, other, machine, schedule_of, cache)[1]
        except RingprofError:
            continue
        if abs(median_ms / row.ms - 1) < _LENGTH_TOLERANCE:
            return [("length", f"{row.ms:.2f} ms is what {seq} tokens take, not {row.query.workload.seq}")]
    return []


def _predicted_ms(
    row: Measured, query: Query, machine: Calibration, schedule_of: ScheduleOf, cache: dict[Any, Any]
) -> tuple[float, float, float]:
    """Return percentiles in milliseconds of the row's pass; a backward pass is what it adds to the forward pass."""

    def prediction(*, backward: bool) -> Any:
        phase_query = replace(query, workload=msgspec.structs.replace(query.workload, backward=backward))
        key = (
            query.strategy, phase_query.workload, query.cluster, query.kernel, tuple(sorted(query.params.items())),
            query.pairwise, query.one_stream, query.repacks,
        )  # fmt: skip
        if key not in cache:
            cache[key] = predict(phase_query, machine, schedule_of)
        return cache[key]

    full = prediction(backward=row.part != "fwd")
    forward_ns = prediction(backward=False).median_ns if row.part == "bwd" else 0.0
    # A backward pass alone is known as well, relative to its time, as both passes are.
    share = (full.median_ns - forward_ns) / full.median_ns
    low, middle, high = (ns * share / 1e6 for ns in full.interval_ns)
    return low, middle, high


# --- shown --------------------------------------------------------------------------------------------


def _split(scored: Sequence[Scored]) -> tuple[list[Scored], list[Scored]]:
    """Return the scores, and the measurements without a prediction."""
    return [item for item in scored if item.predicted_ms], [item for item in scored if not item.predicted_ms]


def _percentiles(scored: Scored) -> JsonObject | None:
    return scored.predicted_ms and dict(zip(("p10", "p50", "p90"), scored.predicted_ms, strict=True))


def check_text(checked_rows: Sequence[Scored], unknown: Sequence[str], form: str, style: TextStyle) -> str:
    """Return the checked table and the ignored columns, as text or as JSON."""
    if form == "json":
        rows = [
            {
                "line": checked.measured.line, "name": checked.measured.source, "measured_ms": checked.measured.ms,
                "predicted_ms": _percentiles(checked),
                "error": checked.error, "reason": checked.reason or None,
                "flags": [{"code": code, "message": message} for code, message in checked.flags],
            }
            for checked in checked_rows
        ]  # fmt: skip
        return json_text({"schema": _CHECK_SCHEMA, "columns_not_looked_at": list(unknown), "rows": rows})
    lines = ["line  measured ms  PREDICTED ms         error"]
    for checked in checked_rows:
        measured = f"{checked.measured.ms:,.2f}" if checked.measured.ms else "-"
        predicted = f"{checked.predicted_ms[1]:,.2f}" if checked.predicted_ms else "-"
        error = f"{100 * checked.error:+.1f} %" if checked.error is not None else ""
        name = clean(checked.measured.source)
        lines.append(f"{checked.measured.line:>4}  {measured:>11}  {predicted:>12}  {error:>12}  {name}")
        lines += [f"      {code}: {clean(message)}" for code, message in checked.flags]
        if checked.reason:
            lines.append(f"      not predicted: {clean(checked.reason)}")
    errors = [abs(checked.error) for checked in checked_rows if checked.error is not None]
    flagged = sum(bool(checked.flags) for checked in checked_rows)
    if errors:
        mean = 100 * sum(errors) / len(errors)
        lines.append(f"{len(errors)} rows predicted: mean error {mean:.1f} %, most {100 * max(errors):.1f} %")
    lines.append(f"{flagged} of {len(checked_rows)} rows flagged")
    if unknown:
        lines.append(f"columns not looked at: {clean(', '.join(unknown))}")
    return style.finish(style.fit("\n".join(lines)))


def scores_dict(scored: Sequence[Scored]) -> JsonObject:
    """Return the scores of saved predictions as a dict of schema ``ringprof.settlement/1``."""
    scores, others = _split(scored)
    return {
        "schema": _SETTLEMENT_SCHEMA,
        "scores": [
            {
                "source": score.measured.source, "forecast": score.label, "machine": score.machine,
                "measured_ms": round(score.measured.ms or 0.0, 4), "predicted_ms": _percentiles(score),
                "error": round(score.error or 0.0, 5), "inside": score.inside,
                "deviations": None if score.deviations is None else round(score.deviations, 3),
            }
            for score in scores
        ],
        "inside": sum(score.inside for score in scores), "count": len(scores),
        "median_error": round(median(score.error or 0.0 for score in scores), 5),
        "others": [{"source": other.measured.source, "reason": other.reason} for other in others],
    }  # fmt: skip


def scores_text(scored: Sequence[Scored], style: TextStyle) -> str:
    """Return the scores of saved predictions as text that ends with a newline."""
    scores, others = _split(scored)
    lines = []
    for score in scores:
        error, measured_ns = score.error or 0.0, (score.measured.ms or 0.0) * 1e6
        low, middle, high = (duration(ms * 1e6) for ms in score.predicted_ms or ())
        amount = percent(abs(error))
        verdict = f"{amount} too {'long' if error > 0 else 'short'}" if round(error, 3) else "exact"
        side = "inside" if score.inside else "outside"
        lines += [
            f"{clean(score.measured.source)}: {clean(score.label)}",
            f"  measured {duration(measured_ns)}, predicted {middle} ({low} to {high}): {verdict}, {side} the interval",
        ]
    count = len(scores)
    if count > 1:
        inside = sum(score.inside for score in scores)
        lines.append(f"{inside} of {count} inside their intervals, of which four of five should be")
    lines += [f"not scored: {clean(other.measured.source)}: {clean(other.reason, 300)}" for other in others]
    return style.finish(style.fit("\n".join(lines)))
