"""Published or own measurements held against a machine: what it would take, and what it cannot have done.

A CSV with a column each for ``strategy, seq_global, heads, n_gpus`` and ``time_ms`` or ``tflops`` (per GPU); where they
are there also ``hardware, hosts, gpus_per_host, kv_heads, head_dim, batch, causal, dtype, pass, kernel, degrees``.
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

from ringprof.devices import peak_of
from ringprof.errors import InputError, RingprofError
from ringprof.files import read_whole
from ringprof.foresee.calibration import Calibration
from ringprof.foresee.links import Cluster
from ringprof.foresee.predict import TapeOf, predict
from ringprof.foresee.question import Question
from ringprof.json_object import JsonObject, Params, json_text
from ringprof.report.text import TextStyle, clean
from ringprof.run import Workload
from ringprof.whole_numbers import whole

_SCHEMA = "ringprof.check/1"
_MOST_ROWS = 20_000
SLACK = 1.05
"""How far above the best that was measured of a kernel a rate may lie."""
_LIKE = 0.25
"""How near a time must be to that of another length to be taken for it."""
_KERNELS = (("3", "flash-attn-3"), ("4", "flash-attn-4"), ("cudnn", "cudnn"), ("flash", "flash-attn"))
_NUMBER = re.compile(r"[0-9]{1,18}(\.[0-9]{0,18})?([eE][+-]?[0-9]{1,2})?")
_TRUE = ("true", "1", "yes")


@dataclass(frozen=True)
class _Row:
    """One measurement."""

    number: int
    """Line of the file."""
    name: str
    question: Question | None
    """None where it is of a strategy that ringprof has not."""
    measured_ms: float | None
    tflops: float | None
    """Per GPU, as measured."""
    part: str
    """``fwd``, ``bwd`` or ``fwd+bwd``."""
    unread: str = ""
    """What of it is no number."""


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
    """The rows of a CSV file. Raises `InputError`."""
    text = read_whole(path).decode("utf-8-sig", errors="replace")
    try:
        rows = list(islice(csv.DictReader(io.StringIO(text)), _MOST_ROWS + 1))
    except csv.Error as error:
        raise InputError(f"{path}: not a table of measurements: {error}") from None
    if not rows or not {"strategy", "seq_global", "heads", "n_gpus"} <= set(rows[0]):
        raise InputError(f"{path}: not a table of measurements: it needs strategy, seq_global, heads, n_gpus, time_ms")
    if len(rows) > _MOST_ROWS:
        raise InputError(f"{path}: at most {_MOST_ROWS} rows are checked at once")
    return rows


def check_rows(
    rows: Sequence[Mapping[str, str | None]], machine: Calibration, tape_of: TapeOf, cluster: Cluster
) -> list[Checked]:
    """Rows against a machine; ``cluster`` says how hosts are joined."""
    known: dict[Any, Any] = {}
    return [_checked(_row(n, row, cluster), machine, tape_of, known) for n, row in enumerate(rows, 2)]


def _row(number: int, row: Mapping[str, str | None], cluster: Cluster) -> _Row:
    given = {key: value for key, value in row.items() if key and value not in (None, "")}

    unread: list[str] = []

    def count(name: str, default: int) -> int:
        # Whoever writes a table with pandas writes 65536.0 where another row lacks the figure.
        text = given.get(name)
        found = default if text is None else whole(text.removesuffix(".0"))
        if not found or found > 1 << 40:
            unread.append(f"{name} {clean(str(text)[:40])!r} is no such number")
        return min(found or default, 1 << 40)

    def figure(*names: str) -> float | None:
        texts = (str(given.get(name, "")) for name in names)
        return next((float(text) for text in texts if _NUMBER.fullmatch(text)), None)

    heads, size, part = count("heads", 1), count("n_gpus", 1), str(given.get("pass") or "fwd+bwd")
    hosts = min(count("hosts", 1), size)
    workload = Workload(
        seq=count("seq_global", 1), heads=heads, kv_heads=count("kv_heads", heads), head_dim=count("head_dim", 128),
        batch=count("batch", 1), causal=str(given.get("causal", "true")).lower() in _TRUE, backward=part != "fwd",
        dtype="fp16" if "16" in str(given.get("dtype", "")) and "bf" not in str(given.get("dtype", "")) else "bf16",
    )  # fmt: skip
    question = _question(given, workload, replace(cluster, hosts=hosts, gpus_per_host=max(1, size // hosts)))
    if unread:
        return _Row(number, str(given.get("id") or given.get("strategy") or ""), None, None, None, part, unread[0])
    flops = _flops(workload, part) / size
    ms, tflops = figure("time_ms"), figure("tflops", "tflops_per_gpu_computed", "tflops_per_gpu_printed")
    ms = flops / tflops / 1e9 if ms is None and tflops else ms
    return _Row(
        number,
        str(given.get("id") or given.get("strategy") or ""),
        question,
        ms,
        flops / ms / 1e9 if ms else tflops,
        part,
    )


def _flops(workload: Workload, part: str) -> float:
    """Model FLOPs of the pass."""
    flops = workload.model_flops()
    return flops * 5 / 7 if part == "bwd" else flops


def _question(given: Mapping[str, Any], workload: Workload, cluster: Cluster) -> Question | None:
    from ringprof.strategies.registry import SPECS

    words = re.findall(r"[a-z-]+", str(given.get("strategy", "")).lower())
    name = words[0] if words else ""
    if name not in SPECS or len(words) > 2:
        return None
    params: Params = {}
    degrees = str(given.get("degrees", "")).lower()
    ulysses, window = re.search(r"ulysses=([0-9]{1,9})", degrees), re.search(r"window=([0-9]{1,9})", degrees)
    if ulysses and name in ("usp", "double-ring"):
        params["ulysses_degree"] = int(ulysses[1])
    if window and name in ("burst", "double-ring"):
        params["ring_window"] = int(window[1])
    if "flat ring" in degrees and name == "burst":
        params["double_ring"] = False
    if name == "allgather" and workload.causal:
        params["layout"] = "zigzag"
    kernel = next((ours for word, ours in _KERNELS if word in str(given.get("kernel", "")).lower()), "auto")
    return Question(name, workload, cluster, kernel, params=params)


def _checked(row: _Row, machine: Calibration, tape_of: TapeOf, known: dict[Any, Any]) -> Checked:
    flags = list(_impossible(row, machine))
    if row.question is None:
        return Checked(row, None, row.unread or "a strategy that ringprof has not", flags)
    try:
        predicted = _times(row, row.question, machine, tape_of, known)
    except RingprofError as error:
        return Checked(row, None, str(error), flags)
    found = Checked(row, predicted, "", flags)
    if row.measured_ms and not 0.4 < predicted[1] / row.measured_ms < 2.5:
        flags += _other_length(row, machine, tape_of, known)
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
    wanted = row.question.kernel if row.question else "auto"
    kernels = [kernel for kernel in machine.kernels if kernel.name == wanted] or machine.kernels
    phases = {"fwd": ("forward",), "bwd": ("backward",)}.get(row.part, ("forward", "backward"))
    best = max((s.tflops for kernel in kernels for s in kernel.samples if s.phase in phases), default=float("inf"))
    if row.tflops > SLACK * best:
        return [("above_kernel", f"{row.tflops:.0f} TFLOP/s per GPU, the kernel alone reaches {best:.0f} at its best")]
    return []


def _other_length(row: _Row, machine: Calibration, tape_of: TapeOf, known: dict[Any, Any]) -> list[tuple[str, str]]:
    """Whether the time is that of a sequence two or four times as long or as short."""
    assert row.question is not None and row.measured_ms
    for factor in (4.0, 2.0, 0.5, 0.25):
        seq = int(row.question.workload.seq * factor)
        other = replace(row.question, workload=msgspec.structs.replace(row.question.workload, seq=seq))
        try:
            middle = _times(row, other, machine, tape_of, known)[1]
        except RingprofError:
            continue
        if abs(middle / row.measured_ms - 1) < _LIKE:
            return [("length", f"{row.measured_ms:.2f} ms is what {seq} tokens take, not {row.question.workload.seq}")]
    return []


def _times(
    row: _Row, question: Question, machine: Calibration, tape_of: TapeOf, known: dict[Any, Any]
) -> tuple[float, float, float]:
    """Milliseconds of the row's pass; a backward pass is what it adds to the forward pass."""

    def foreseen(*, backward: bool) -> Any:
        asked = replace(question, workload=msgspec.structs.replace(question.workload, backward=backward))
        key = (asked.strategy, asked.workload, asked.cluster, asked.kernel, tuple(sorted(asked.params.items())))
        if key not in known:
            known[key] = predict(asked, machine, tape_of)
        return known[key]

    whole = foreseen(backward=row.part != "fwd")
    first = foreseen(backward=False).median_ns if row.part == "bwd" else 0.0
    low, middle, high = ((ns - first) / 1e6 for ns in whole.interval_ns)
    return low, middle, high


def _as_dict(found: list[Checked]) -> JsonObject:
    """Schema ``ringprof.check/1``."""
    return {
        "schema": _SCHEMA,
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


def check_text(found: list[Checked], form: str, style: TextStyle) -> str:
    """The checked table, for people or as JSON."""
    if form == "json":
        return json_text(_as_dict(found))
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
    return style.finish(style.fit("\n".join(lines)))
