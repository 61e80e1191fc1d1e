"""Score published or own measurements against a machine: the predicted time, and values that it cannot have reached.

The CSV has the columns ``strategy, seq_global, heads, n_gpus`` and ``time_ms`` or ``tflops`` (per GPU). Optional
columns are ``hardware, hosts, gpus_per_host, kv_heads, head_dim, batch, causal, dtype, pass, kernel, degrees, system``.
A row with an unknown value is not predicted. A ``system`` that names Transformer Engine or Megatron sends its hops as
`Query.pairwise` says. The baselines of MagiAttention's ``cp_benchmark`` run their blocks on one stream and, with
flash-attn 3, gather and scatter around each of them (``exps/dist_attn/baselines`` at 2c64135: ``ring_attn.py`` and
``_fa3_varlen_forward`` of ``utils_cp.py``).
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice, product
from typing import Any, Literal

import msgspec

from ringprof.common.files import read_whole
from ringprof.common.json_object import Params, json_text
from ringprof.common.validation import whole
from ringprof.errors import InputError, RingprofError
from ringprof.prediction.calibration import Calibration
from ringprof.prediction.kernel_model import OutsideCalibration, block_of
from ringprof.prediction.machine import Curves, curves_of
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import ScheduleOf, predict
from ringprof.prediction.query import Query
from ringprof.printed.benchmarks.rows import Flag, JudgedRow, flag
from ringprof.report.text import TextStyle, clean
from ringprof.scale.workers import Notify, ignore_progress
from ringprof.strategies.catalog import SPECS
from ringprof.workload.devices import device_named, peak_of
from ringprof.workload.workload import Workload

_SCHEMA = "ringprof.check/1"
_MOST_ROWS = 20_000
_SATURATED = 1e-9
"""Width of an interval, in log standard deviations, up to which it counts as none."""
SLACK = 1.05
"""Factor by which a rate may exceed a kernel's best at any length."""
_LENGTH_TOLERANCE = 0.25
"""Largest relative difference at which a time is attributed to another sequence length."""
_NUMBER = re.compile(r"[0-9]{1,18}(\.[0-9]{0,18})?([eE][+-]?[0-9]{1,2})?")
_TIMES = ("time_ms", "tflops", "tflops_per_gpu_computed", "tflops_per_gpu_printed")
_COUNTS = {"seq_global": "", "heads": "", "n_gpus": "", "kv_heads": "", "head_dim": "128", "batch": "1"}
"""Columns with counts, and their defaults."""
_CLUSTER_COLUMNS = ("hosts", "gpus_per_host")
_SPELLINGS: Mapping[str, Mapping[str, str]] = {
    "pass": {"": "fwd+bwd", "fwd": "fwd", "forward": "fwd", "bwd": "bwd", "backward": "bwd", "fwd+bwd": "fwd+bwd",
             "forward+backward": "fwd+bwd"},
    "causal": dict.fromkeys(("", "true", "t", "yes", "y", "1", "causal"), "causal")
    | dict.fromkeys(("false", "f", "no", "n", "0", "full"), "full"),
    "dtype": {"": "bf16", "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "half": "fp16",
              "fp32": "fp32", "float32": "fp32"},
}  # fmt: skip
"""Accepted spellings of a column, with their meaning."""
_FLASH = re.compile(r"(?:fa|flash[-_ ]?att(?:entio)?n)[-_ v]*([234]?)(?![0-9])")
_PAIRWISE = re.compile(r"transformer ?engine|\bte\b|megatron|magiattention cp_benchmark: (ring_p2p|usp|loongtrain)")
"""Programs that send by Transformer Engine's ``flash_attn_p2p_communicate`` or a copy of it, in lower case."""
_NAMES = ("id", "system", "strategy", "degrees", "kernel", "hardware")
_KNOWN = {*_NAMES, *_TIMES, *_COUNTS, *_CLUSTER_COLUMNS, *_SPELLINGS}


@dataclass(frozen=True)
class Measurement:
    """A measured time with the query that predicts it: a row of a table, or a recorded run."""

    number: int
    """Line of the file; 0 for a run."""
    name: str
    query: Query | None = None
    """Query for the prediction; None if the row is unreadable, for the reason in ``reason``."""
    measured_ms: float | None = None
    tflops: float | None = None
    """Measured TFLOP/s per GPU, where it is judged."""
    part: str = ""
    """``fwd``, ``bwd`` or ``fwd+bwd``."""
    reason: str = ""
    """Reason why there is no query or no time."""
    device: str | None = None
    """Name of the GPU, if it is stated."""


@dataclass(frozen=True)
class Score:
    """A measurement with its prediction and its flags."""

    row: Measurement
    predicted_ms: tuple[float, float, float] | None
    """10th, 50th and 90th percentile in milliseconds; None if the row cannot be predicted."""
    reason: str = ""
    """Reason why the row cannot be predicted."""
    flags: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of (code, message)."""

    @property
    def error(self) -> float | None:
        """Relative error: the predicted median over the measured time, minus 1."""
        if self.predicted_ms is None or not self.row.measured_ms:
            return None
        return self.predicted_ms[1] / self.row.measured_ms - 1

    @property
    def inside(self) -> bool:
        """Whether the measured time lies between the 10th and the 90th percentile, as four of five should."""
        low, _, high = self.predicted_ms or (math.nan,) * 3
        return low <= (self.row.measured_ms or 0.0) <= high

    @property
    def deviations(self) -> float | None:
        """Distance of the measured time from the predicted median, in standard deviations of a lognormal distribution.

        Positive where the run took longer than predicted; None where the interval has no width.
        """
        if self.predicted_ms is None or not self.row.measured_ms:
            return None
        low, middle, high = self.predicted_ms
        spread = math.log(high / low) / (2 * 1.2816)
        return math.log(self.row.measured_ms / middle) / spread if spread > _SATURATED else None


def read_rows(path: str) -> list[dict[str, str]]:
    """Read the rows of a CSV file, keyed by its lower-case column names. Raises `InputError`."""
    text = read_whole(path).decode("utf-8-sig", errors="replace")
    header, _, body = text.partition("\n")
    between = max(",;\t", key=header.count)
    try:
        names = [name.strip().lower() for name in next(csv.reader([header], delimiter=between), [])]
        rows = list(islice(csv.DictReader(io.StringIO(body), names, delimiter=between), _MOST_ROWS + 1))
    except csv.Error as error:
        raise InputError(f"{path}: not a table of measurements: {error}") from None
    if not rows or not {"strategy", "seq_global", "heads", "n_gpus"} <= set(names) or not set(_TIMES) & set(names):
        raise InputError(f"{path}: not a table of measurements: it needs strategy, seq_global, heads, n_gpus, time_ms")
    if len(rows) > _MOST_ROWS:
        raise InputError(f"{path}: at most {_MOST_ROWS} rows are checked at once")
    return rows


def unknown_columns(rows: Sequence[Mapping[str, str | None]]) -> list[str]:
    """Return the columns that are ignored."""
    return [name for name in rows[0] if name and name not in _KNOWN]


def check_rows(
    rows: Sequence[Mapping[str, str | None]], machine: Calibration, schedule_of: ScheduleOf, cluster: Cluster,
    notify: Notify = ignore_progress,
) -> list[Score]:  # fmt: skip
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
                yield flag(row.row, code, "error", f"{row.row.system}: {message}", checked.row.measured_ms)


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


def read_row(number: int, row: Mapping[str, str | None], device: str, cluster: Cluster) -> Measurement:
    """Read one row of the table; a row that was measured on another ``device`` has no query."""
    cells = {key: value.strip() for key, value in row.items() if key and isinstance(value, str) and value.strip()}
    measurement = Measurement(number, cells.get("id") or cells.get("strategy") or "")
    try:
        part, workload, cluster = _read_workload(cells, cluster)
        speeds = {name: cells[name] for name in _TIMES if name in cells}
        for name, text in speeds.items():
            if not _NUMBER.fullmatch(text) or not float(text):
                raise InputError(f"{name} {text[:40]!r} is no such number")
        measured_ms = float(speeds.pop("time_ms")) if "time_ms" in speeds else None
        tflops = next(map(float, speeds.values()), None)
        flops = workload.model_flops() * 5 / 7 if part == "bwd" else workload.model_flops()
        flops = flops / cluster.size / 1e9
        if measured_ms is None and tflops:
            measured_ms = flops / tflops
        measurement = replace(
            measurement, part=part, measured_ms=measured_ms, tflops=flops / measured_ms if measured_ms else None
        )
        return replace(measurement, query=_query_of(cells, workload, cluster, device))
    except InputError as error:
        return replace(measurement, reason=str(error))


def _count(name: str, text: str) -> int:
    """Read a positive integer. Raises `InputError`."""
    count = whole(text.removesuffix(".0"))  # pandas writes 65536.0 if another row lacks the value
    if not count or count > 1 << 40:
        raise InputError(f"{name} {text[:40]!r} is no such number" if text else f"no {name}")
    return count


def _read_workload(cells: Mapping[str, str], cluster: Cluster) -> tuple[str, Workload, Cluster]:
    """Return pass, workload and cluster of a row. Raises `InputError`."""
    meanings = {}
    for column, meaning_of in _SPELLINGS.items():
        spelling = cells.get(column, "").lower().removeprefix("torch.")
        if spelling not in meaning_of:
            raise InputError(f"{column} {spelling[:40]!r} is none of {', '.join(filter(None, meaning_of))}")
        meanings[column] = meaning_of[spelling]
    defaults = _COUNTS | {"kv_heads": cells.get("heads", "")}
    seq, heads, world_size, kv_heads, head_dim, batch = (
        _count(name, cells.get(name, defaults[name])) for name in _COUNTS
    )
    workload = Workload(
        seq=seq, heads=heads, kv_heads=kv_heads, head_dim=head_dim, batch=batch, causal=meanings["causal"] == "causal",
        backward=meanings["pass"] != "fwd", dtype=meanings["dtype"],
    )  # fmt: skip
    cluster_sizes = {name: _count(name, cells[name]) for name in _CLUSTER_COLUMNS if name in cells}
    usual_per_host = world_size // cluster_sizes["hosts"] if "hosts" in cluster_sizes else cluster.gpus_per_host
    per_host = min(world_size, cluster_sizes.get("gpus_per_host", usual_per_host))
    hosts = cluster_sizes.get("hosts") or world_size // per_host
    if hosts * per_host != world_size:
        raise InputError(f"n_gpus {world_size} is not {hosts} hosts of {per_host}")
    return meanings["pass"], workload, replace(cluster, hosts=hosts, gpus_per_host=per_host)


def _query_of(cells: Mapping[str, str], workload: Workload, cluster: Cluster, device: str) -> Query:
    """Return the query of a row. Raises `InputError` for an unknown strategy or another device."""
    name = cells.get("strategy", "").lower().replace("_", "-")
    if name not in SPECS:
        raise InputError("a strategy that ringprof has not")
    measured_device, machine_device = map(device_named, (cells.get("hardware"), device))
    if measured_device and machine_device and measured_device != machine_device:
        raise InputError(f"measured on {measured_device}, and the machine is {machine_device}")
    params: Params = {}
    degrees = cells.get("degrees", "").lower()
    ulysses, window = re.search(r"ulysses=([0-9]{1,9})", degrees), re.search(r"window=([0-9]{1,9})", degrees)
    if ulysses and name in ("usp", "double-ring"):
        params["ulysses_degree"] = int(ulysses[1])
    if name == "usp" and "ring-first" in degrees:
        params["placement"] = "ring-first"
    if window and name in ("burst", "double-ring"):
        params["ring_window"] = int(window[1])
    if "flat ring" in degrees and name == "burst":
        params["double_ring"] = False
    if name == "allgather" and workload.causal:
        params["layout"] = "zigzag"
    system = cells.get("system", "").lower()
    pairwise = _PAIRWISE.search(system) is not None
    kernel = _kernel_name(cells.get("kernel", "").lower())
    one_stream = "magiattention cp_benchmark" in system
    return Query(
        name, workload, cluster, kernel, params=params, pairwise=pairwise, one_stream=one_stream,
        repacks=one_stream and kernel == "flash-attn-3",
    )  # fmt: skip


def _kernel_name(text: str) -> str:
    """Return ringprof's name of a kernel. Raises `InputError` for an unknown one."""
    from ringprof.strategies.kernels.registry import KERNELS

    flash = _FLASH.match(text)
    if flash:
        return "flash-attn" + (f"-{flash[1]}" if flash[1] in ("3", "4") else "")
    name = next((name for name in KERNELS if name in text), None)
    if text and name is None:
        raise InputError(f"a kernel that ringprof has not, {text[:40]!r}")
    return name or "auto"


def _check(row: Measurement, machine: Calibration, schedule_of: ScheduleOf, cache: dict[Any, Any]) -> Score:
    """Predict a measurement and flag it if the times cannot belong together."""
    flags = list(_flag_impossible_rates(row, machine))
    if row.query is None:
        return Score(row, None, row.reason, flags)
    try:
        predicted = _predicted_ms(row, row.query, machine, schedule_of, cache)
    except RingprofError as error:
        return Score(row, None, str(error), flags)
    checked = Score(row, predicted, "", flags)
    if row.measured_ms and not 0.4 < predicted[1] / row.measured_ms < 2.5:
        flags += _flag_other_length(row, machine, schedule_of, cache)
    if row.measured_ms and row.measured_ms < predicted[0] / 1.5 and not flags:
        message = f"{row.measured_ms:.2f} ms, where this machine needs {predicted[0]:.2f} at the least"
        flags.append(("too_fast", message))
    return checked


def _flag_impossible_rates(row: Measurement, machine: Calibration) -> list[tuple[str, str]]:
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
    row: Measurement, machine: Calibration, schedule_of: ScheduleOf, cache: dict[Any, Any]
) -> list[tuple[str, str]]:
    """Flag a time that fits a sequence two or four times as long or as short."""
    assert row.query is not None and row.measured_ms
    for factor in (4.0, 2.0, 0.5, 0.25):
        seq = int(row.query.workload.seq * factor)
        other = replace(row.query, workload=msgspec.structs.replace(row.query.workload, seq=seq))
        try:
            median_ms = _predicted_ms(row, other, machine, schedule_of, cache)[1]
        except RingprofError:
            continue
        if abs(median_ms / row.measured_ms - 1) < _LENGTH_TOLERANCE:
            return [("length", f"{row.measured_ms:.2f} ms is what {seq} tokens take, not {row.query.workload.seq}")]
    return []


def _predicted_ms(
    row: Measurement, query: Query, machine: Calibration, schedule_of: ScheduleOf, cache: dict[Any, Any]
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


def check_text(checked_rows: Sequence[Score], unknown: Sequence[str], form: str, style: TextStyle) -> str:
    """Return the checked table and the ignored columns, as text or as JSON."""
    if form == "json":
        rows = [
            {
                "line": checked.row.number, "name": checked.row.name, "measured_ms": checked.row.measured_ms,
                "predicted_ms": checked.predicted_ms
                and dict(zip(("p10", "p50", "p90"), checked.predicted_ms, strict=True)),
                "error": checked.error, "reason": checked.reason or None,
                "flags": [{"code": code, "message": message} for code, message in checked.flags],
            }
            for checked in checked_rows
        ]  # fmt: skip
        return json_text({"schema": _SCHEMA, "columns_not_looked_at": list(unknown), "rows": rows})
    lines = ["line  measured ms  PREDICTED ms         error"]
    for checked in checked_rows:
        measured = f"{checked.row.measured_ms:,.2f}" if checked.row.measured_ms else "-"
        predicted = f"{checked.predicted_ms[1]:,.2f}" if checked.predicted_ms else "-"
        error = f"{100 * checked.error:+.1f} %" if checked.error is not None else ""
        name = clean(checked.row.name)
        lines.append(f"{checked.row.number:>4}  {measured:>11}  {predicted:>12}  {error:>12}  {name}")
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
