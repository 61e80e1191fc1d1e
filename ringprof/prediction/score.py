"""Published or own measurements held against a machine: what it would take, and what it cannot have done.

A CSV with a column each for ``strategy, seq_global, heads, n_gpus`` and ``time_ms`` or ``tflops`` (per GPU); where they
are there also ``hardware, hosts, gpus_per_host, kv_heads, head_dim, batch, causal, dtype, pass, kernel, degrees``. A
row that says what is not understood is not foreseen.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import msgspec

from ringprof.devices import device_named, peak_of
from ringprof.errors import InputError, RingprofError
from ringprof.files import read_whole
from ringprof.json_object import JsonObject, Params, json_text
from ringprof.prediction.calibration import Calibration
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import TapeOf, predict
from ringprof.prediction.query import Query
from ringprof.report.text import TextStyle, clean
from ringprof.run import Workload
from ringprof.validation import whole

_SCHEMA = "ringprof.check/1"
_MOST_ROWS = 20_000
SLACK = 1.05
"""How far above the best that was measured of a kernel a rate may lie."""
_LIKE = 0.25
"""How near a time must be to that of another length to be taken for it."""
_NUMBER = re.compile(r"[0-9]{1,18}(\.[0-9]{0,18})?([eE][+-]?[0-9]{1,2})?")
_TIMES = ("time_ms", "tflops", "tflops_per_gpu_computed", "tflops_per_gpu_printed")
_COUNTS = {"seq_global": "", "heads": "", "n_gpus": "", "kv_heads": "", "head_dim": "128", "batch": "1"}
"""And what they are where a table does not say."""
_PLACES = ("hosts", "gpus_per_host")
_WORDS: Mapping[str, Mapping[str, str]] = {
    "pass": {"": "fwd+bwd", "fwd": "fwd", "forward": "fwd", "bwd": "bwd", "backward": "bwd", "fwd+bwd": "fwd+bwd",
             "forward+backward": "fwd+bwd"},
    "causal": dict.fromkeys(("", "true", "t", "yes", "y", "1", "causal"), "causal")
    | dict.fromkeys(("false", "f", "no", "n", "0", "full"), "full"),
    "dtype": {"": "bf16", "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "half": "fp16",
              "fp32": "fp32", "float32": "fp32"},
}  # fmt: skip
"""What people write, and what it means."""
_FLASH = re.compile(r"(?:fa|flash[-_ ]?att(?:entio)?n)[-_ v]*([234]?)(?![0-9])")
_KNOWN = {"id", "strategy", "degrees", "kernel", "hardware", *_TIMES, *_COUNTS, *_PLACES, *_WORDS}


@dataclass(frozen=True)
class _Row:
    """One measurement."""

    number: int
    """Line of the file."""
    name: str
    query: Query | None
    """None where it cannot be told, for the reason in ``unread``."""
    measured_ms: float | None
    tflops: float | None
    """Per GPU, as measured."""
    part: str
    """``fwd``, ``bwd`` or ``fwd+bwd``."""
    unread: str = ""


@dataclass(frozen=True)
class Checked:
    """A measurement and what the machine says to it."""

    row: _Row
    predicted_ms: tuple[float, float, float] | None
    """Tenth, middle and ninetieth percentile; None where it cannot be foreseen."""
    reason: str = ""
    """Why not."""
    flags: list[tuple[str, str]] = field(default_factory=list)
    """(code, message)."""

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1."""
        if self.predicted_ms is None or not self.row.measured_ms:
            return None
        return self.predicted_ms[1] / self.row.measured_ms - 1


def read_rows(path: str) -> list[dict[str, str]]:
    """The rows of a CSV file, by its columns' names in small letters. Raises `InputError`."""
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
    """Columns that are not looked at, whatever they mean."""
    return [name for name in rows[0] if name and name not in _KNOWN]


def check_rows(
    rows: Sequence[Mapping[str, str | None]], machine: Calibration, schedule_of: TapeOf, cluster: Cluster
) -> list[Checked]:
    """Rows against a machine; ``cluster`` says how hosts are joined, and how many GPUs one has where a row does not."""
    known: dict[Any, Any] = {}
    return [_checked(_row(n, row, machine, cluster), machine, schedule_of, known) for n, row in enumerate(rows, 2)]


class _Unread(Exception):
    """What of a row cannot be told."""


def _row(number: int, row: Mapping[str, str | None], machine: Calibration, cluster: Cluster) -> _Row:
    given = {key: value.strip() for key, value in row.items() if key and isinstance(value, str) and value.strip()}
    found = _Row(number, given.get("id") or given.get("strategy") or "", None, None, None, "")
    try:
        part, workload, cluster = _asked(given, cluster)
        figures = {name: _figure(name, given[name]) for name in _TIMES if name in given}
        ms, rate = figures.pop("time_ms", None), next(iter(figures.values()), None)
        flops = _flops(workload, part) / cluster.size / 1e9
        if ms is None and rate:
            ms = flops / rate
        found = replace(found, part=part, measured_ms=ms, tflops=flops / ms if ms else None)
        return replace(found, query=_question(given, workload, cluster, machine))
    except _Unread as error:
        return replace(found, unread=str(error))


def _figure(name: str, text: str) -> float:
    found = float(text) if _NUMBER.fullmatch(text) else 0.0
    if not found:
        raise _Unread(f"{name} {text[:40]!r} is no such number")
    return found


def _count(name: str, text: str) -> int:
    # Whoever writes a table with pandas writes 65536.0 where another row lacks the figure.
    found = whole(text.removesuffix(".0"))
    if not found or found > 1 << 40:
        raise _Unread(f"{name} {text[:40]!r} is no such number" if text else f"no {name}")
    return found


def _asked(given: Mapping[str, str], cluster: Cluster) -> tuple[str, Workload, Cluster]:
    """The pass, the problem and the cluster of a row."""
    said = {}
    for column, words in _WORDS.items():
        word = given.get(column, "").lower().removeprefix("torch.")
        if word not in words:
            raise _Unread(f"{column} {word[:40]!r} is none of {', '.join(filter(None, words))}")
        said[column] = words[word]
    usual = _COUNTS | {"kv_heads": given.get("heads", "")}
    seq, heads, size, kv_heads, head_dim, batch = (_count(name, given.get(name, usual[name])) for name in _COUNTS)
    workload = Workload(
        seq=seq, heads=heads, kv_heads=kv_heads, head_dim=head_dim, batch=batch, causal=said["causal"] == "causal",
        backward=said["pass"] != "fwd", dtype=said["dtype"],
    )  # fmt: skip
    places = {name: _count(name, given[name]) for name in _PLACES if name in given}
    usual_per_host = size // places["hosts"] if "hosts" in places else cluster.gpus_per_host
    per_host = min(size, places.get("gpus_per_host", usual_per_host))
    hosts = places.get("hosts") or size // per_host
    if hosts * per_host != size:
        raise _Unread(f"n_gpus {size} is not {hosts} hosts of {per_host}")
    return said["pass"], workload, replace(cluster, hosts=hosts, gpus_per_host=per_host)


def _flops(workload: Workload, part: str) -> float:
    """Model FLOPs of the pass."""
    flops = workload.model_flops()
    return flops * 5 / 7 if part == "bwd" else flops


def _question(given: Mapping[str, str], workload: Workload, cluster: Cluster, machine: Calibration) -> Query:
    """Raises `_Unread` for what ringprof has not, or the machine is not."""
    from ringprof.strategies.registry import SPECS

    name = given.get("strategy", "").lower().replace("_", "-")
    if name not in SPECS:
        raise _Unread("a strategy that ringprof has not")
    of, here = (device_named(device) for device in (given.get("hardware"), machine.device))
    if of and here and of != here:
        raise _Unread(f"measured on {of}, and the machine is {here}")
    params: Params = {}
    degrees = given.get("degrees", "").lower()
    ulysses, window = re.search(r"ulysses=([0-9]{1,9})", degrees), re.search(r"window=([0-9]{1,9})", degrees)
    if ulysses and name in ("usp", "double-ring"):
        params["ulysses_degree"] = int(ulysses[1])
    if window and name in ("burst", "double-ring"):
        params["ring_window"] = int(window[1])
    if "flat ring" in degrees and name == "burst":
        params["double_ring"] = False
    if name == "allgather" and workload.causal:
        params["layout"] = "zigzag"
    return Query(name, workload, cluster, _kernel(given.get("kernel", "").lower()), params=params)


def _kernel(text: str) -> str:
    from ringprof.strategies.kernels.builtin import KERNELS

    flash = _FLASH.match(text)
    if flash:
        return "flash-attn" + (f"-{flash[1]}" if flash[1] in ("3", "4") else "")
    found = next((name for name in KERNELS if name in text), None)
    if text and found is None:
        raise _Unread(f"a kernel that ringprof has not, {text[:40]!r}")
    return found or "auto"


def _checked(row: _Row, machine: Calibration, schedule_of: TapeOf, known: dict[Any, Any]) -> Checked:
    flags = list(_impossible(row, machine))
    if row.query is None:
        return Checked(row, None, row.unread, flags)
    try:
        predicted = _times(row, row.query, machine, schedule_of, known)
    except RingprofError as error:
        return Checked(row, None, str(error), flags)
    found = Checked(row, predicted, "", flags)
    if row.measured_ms and not 0.4 < predicted[1] / row.measured_ms < 2.5:
        flags += _other_length(row, machine, schedule_of, known)
    if row.measured_ms and row.measured_ms < predicted[0] / 1.5 and not flags:
        flags.append(
            ("too_fast", f"{row.measured_ms:.2f} ms, where this machine needs {predicted[0]:.2f} at the least")
        )
    return found


def _impossible(row: _Row, machine: Calibration) -> list[tuple[str, str]]:
    """Rates that no such device has reached, whatever the strategy."""
    if row.tflops is None:
        return []
    peak = peak_of(machine.device, "bf16")
    if peak and row.tflops > peak.tflops:
        return [("above_peak", f"{row.tflops:.0f} TFLOP/s per GPU, the device's peak is {peak.tflops:.0f}")]
    wanted = row.query.kernel if row.query else "auto"
    kernels = [kernel for kernel in machine.kernels if kernel.name == wanted] or machine.kernels
    phases = {"fwd": ("forward",), "bwd": ("backward",)}.get(row.part, ("forward", "backward"))
    best = max((s.tflops for kernel in kernels for s in kernel.samples if s.phase in phases), default=float("inf"))
    if row.tflops > SLACK * best:
        return [("above_kernel", f"{row.tflops:.0f} TFLOP/s per GPU, the kernel alone reaches {best:.0f} at its best")]
    return []


def _other_length(row: _Row, machine: Calibration, schedule_of: TapeOf, known: dict[Any, Any]) -> list[tuple[str, str]]:
    """Whether the time is that of a sequence two or four times as long or as short."""
    assert row.query is not None and row.measured_ms
    for factor in (4.0, 2.0, 0.5, 0.25):
        seq = int(row.query.workload.seq * factor)
        other = replace(row.query, workload=msgspec.structs.replace(row.query.workload, seq=seq))
        try:
            middle = _times(row, other, machine, schedule_of, known)[1]
        except RingprofError:
            continue
        if abs(middle / row.measured_ms - 1) < _LIKE:
            return [("length", f"{row.measured_ms:.2f} ms is what {seq} tokens take, not {row.query.workload.seq}")]
    return []


def _times(
    row: _Row, query: Query, machine: Calibration, schedule_of: TapeOf, known: dict[Any, Any]
) -> tuple[float, float, float]:
    """Milliseconds of the row's pass; a backward pass is what it adds to the forward pass."""

    def foreseen(*, backward: bool) -> Any:
        asked = replace(query, workload=msgspec.structs.replace(query.workload, backward=backward))
        key = (asked.strategy, asked.workload, asked.cluster, asked.kernel, tuple(sorted(asked.params.items())))
        if key not in known:
            known[key] = predict(asked, machine, schedule_of)
        return known[key]

    whole = foreseen(backward=row.part != "fwd")
    first = foreseen(backward=False).median_ns if row.part == "bwd" else 0.0
    low, middle, high = ((ns - first) / 1e6 for ns in whole.interval_ns)
    return low, middle, high


def _as_dict(found: Sequence[Checked], unknown: Sequence[str]) -> JsonObject:
    """Schema ``ringprof.check/1``."""
    return {
        "schema": _SCHEMA,
        "columns_not_looked_at": list(unknown),
        "rows": [
            {
                "line": one.row.number, "name": one.row.name, "measured_ms": one.row.measured_ms,
                "predicted_ms": one.predicted_ms and dict(zip(("p10", "p50", "p90"), one.predicted_ms, strict=True)),
                "error": one.error, "reason": one.reason or None,
                "flags": [{"code": code, "message": message} for code, message in one.flags],
            }
            for one in found
        ],
    }  # fmt: skip


def check_text(found: Sequence[Checked], unknown: Sequence[str], form: str, style: TextStyle) -> str:
    """The checked table and the columns that nobody looked at, for people or as JSON."""
    if form == "json":
        return json_text(_as_dict(found, unknown))
    lines = ["line  measured ms  PREDICTED ms         error"]
    for one in found:
        measured = f"{one.row.measured_ms:,.2f}" if one.row.measured_ms else "-"
        foreseen = f"{one.predicted_ms[1]:,.2f}" if one.predicted_ms else "-"
        error = f"{100 * one.error:+.1f} %" if one.error is not None else ""
        lines.append(f"{one.row.number:>4}  {measured:>11}  {foreseen:>12}  {error:>12}  {clean(one.row.name)}")
        lines += [f"      {code}: {clean(message)}" for code, message in one.flags]
        if one.reason:
            lines.append(f"      not foreseen: {clean(one.reason)}")
    errors = [abs(one.error) for one in found if one.error is not None]
    flagged = sum(bool(one.flags) for one in found)
    if errors:
        mean = 100 * sum(errors) / len(errors)
        lines.append(f"{len(errors)} rows foreseen: mean error {mean:.1f} %, most {100 * max(errors):.1f} %")
    lines.append(f"{flagged} of {len(found)} rows flagged")
    if unknown:
        lines.append(f"columns not looked at: {clean(', '.join(unknown))}")
    return style.finish(style.fit("\n".join(lines)))
