"""The audit of benchmark logs: each row's TFLOP/s computed again, and what cannot be right, with the arithmetic.

Nothing is assumed: settings that neither the log nor the caller states are asked for, or solved for and said to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from pathlib import PurePath
from typing import Any

import pandas as pd

from ringprof.benchmark_logs.flags import Audited, Flag, Severity, flag
from ringprof.benchmark_logs.rates import (
    Solution,
    forward_tflop,
    holds,
    judge,
    rates_of,
    solve,
    solved_tflops,
)
from ringprof.benchmark_logs.rows import BenchmarkLog, LogRow, Settings
from ringprof.benchmark_logs.sections import repeated_rows, section_flags, sections

SPREAD = 0.10
"""Same configuration, different logs: differences above this are noted."""

# Dense bf16 or fp16 with fp32 accumulation, TFLOP/s, from the makers' data sheets.
PEAKS = {
    "V100": 125.0,
    "A10": 125.0,
    "A100": 312.0,
    "A800": 312.0,
    "L20": 119.5,
    "L40": 181.0,
    "L40S": 362.0,
    "H20": 148.0,
    "H100": 989.0,
    "H800": 989.0,
    "H200": 989.0,
    "B200": 2250.0,
    "4090": 165.2,
    "4090D": 147.0,
    "3090": 71.0,
    "MI300X": 1307.0,
}

COLUMNS = (
    "file", "line", "format", "system", "label", "seq", "batch", "heads", "kv_heads", "head_dim", "causal", "dtype",
    "world_size", "placement", "layout", "ulysses_degree", "ring_degree", "double_ring", "forward_only", "device",
    "forward_ms", "forward_backward_ms", "throughput_per_s", "tflops", "tflops_forward", "tflops_backward",
    "memory_mb", "oom", "missing", "computed_tflops", "tflops_per_gpu", "verdict",
)  # fmt: skip
"""Of the tidy frame and of the rows in JSON. Times in ms, memory in MB; ``tflops`` as printed, ``computed_tflops``
per GPU from the row's own time, ``tflops_per_gpu`` as printed or corrected by a known constant."""

_MOST_COMPARED, _MOST_LISTED = 100, 8
_ORDER: dict[Severity, int] = {"error": 0, "warning": 1, "note": 2}
_FILLED = ("batch", "heads", "kv_heads", "head_dim", "causal", "world_size", "device")


@dataclass(frozen=True)
class Audit:
    """Rows with their verdicts, and flags in order of file and line."""

    rows: tuple[Audited, ...]
    flags: tuple[Flag, ...]

    def frame(self) -> pd.DataFrame:
        """The rows as a tidy frame with the columns `COLUMNS`; what is not printed is missing."""
        return pd.DataFrame([record(row) for row in self.rows], columns=list(COLUMNS)).convert_dtypes()


def record(audited: Audited) -> dict[str, Any]:
    """One row as plain values in the order of `COLUMNS`, None for what is not printed."""
    own = {field.name for field in fields(LogRow)}
    source = {name: getattr(audited.row if name in own else audited, name) for name in COLUMNS}
    return {name: value if value != "" else None for name, value in source.items()}


def audit(logs: Sequence[BenchmarkLog], given: Settings | None = None, spread: float = SPREAD) -> Audit:
    """Judge all rows of the logs; ``given`` fills in settings that a log does not state.

    ``spread`` is the relative difference between logs above which rows of one configuration are noted.
    """
    flags: list[Flag] = []
    audited: list[Audited] = []
    for log in logs:
        rows = [fill(row, given) for row in log.rows]
        for some in sections(rows):
            flags += section_flags(some, log.settings)
        flags += repeated_rows(rows)
        judged, found = _judge_rows(rows)
        audited += judged
        flags += found + [_repeated(log.path, *one) for one in log.repeated_sources]
    for one in audited:
        flags += _above_peak(one)
    flags += _masks(audited)
    flags += _far_apart(audited, spread)
    files = {log.path: index for index, log in enumerate(logs)}
    flags.sort(key=lambda one: (files.get(one.file, 0), one.line, _ORDER[one.severity], one.code))
    return Audit(tuple(audited), tuple(flags))


def fill(row: LogRow, given: Settings | None) -> LogRow:
    """The row with what the caller states and the log does not."""
    if given is None:
        return row
    added = {
        name: value for name in _FILLED if getattr(row, name) is None and (value := getattr(given, name)) is not None
    }
    return replace(row, **added, sources={**row.sources, **dict.fromkeys(added, "option")}) if added else row


def _repeated(path: str, first: int, second: int, name: str) -> Flag:
    message = f"{name} is listed a second time (first on line {first}): another file was probably meant"
    return Flag("repeated_source", "note", path, second, message, name)


# --- verdicts, alone and together ------------------------------------------------------------------------


def _judge_rows(rows: list[LogRow]) -> tuple[list[Audited], list[Flag]]:
    """Verdicts row by row; where all rows under one stated set of settings fail, that set is solved for."""
    judged = {id(row): judge(row) for row in rows}
    flags: list[Flag] = []
    for some in _same_settings(rows):
        checked = [row for row in some if judged[id(row)][0].verdict != "unchecked"]
        if not checked or any(judged[id(row)][0].verdict in ("agrees", "rounding") for row in checked):
            continue
        if all(judged[id(row)][0].verdict == "constant" for row in checked):
            continue
        solutions = solve(checked)
        if not solutions:
            continue
        flags += _solved(checked, solutions)
        for row in checked:
            judged[id(row)] = (_corrected(row, solutions[0]), [])
    return [judged[id(row)][0] for row in rows], flags + [one for row in rows for one in judged[id(row)][1]]


def _same_settings(rows: list[LogRow]) -> list[list[LogRow]]:
    """Rows that take their head dimension from the same statement."""
    found: dict[tuple[object, ...], list[LogRow]] = {}
    for row in rows:
        key = (row.heads, row.head_dim, row.batch, row.world_size, row.sources.get("head_dim"))
        found.setdefault(key, []).append(row)
    return list(found.values())


def _corrected(row: LogRow, solution: Solution) -> Audited:
    rate = rates_of(row)[0]
    per_gpu = rate.tflops / (row.world_size or 1) if solution.total else rate.tflops
    return Audited(row, "settings", solved_tflops(row, rate, solution), per_gpu, {"head_dim": solution.head_dim})


def _solved(rows: list[LogRow], solutions: list[Solution]) -> list[Flag]:
    best = solutions[0]
    # The row with the longest time is printed with the most digits.
    first = max(rows, key=lambda row: rates_of(row)[0].time_ms)
    rate = rates_of(first)[0]
    world = first.world_size or 1
    source = first.sources.get("head_dim", "")
    line = int(source.removeprefix("line ")) if source.startswith("line ") else first.line
    meaning = f"totals over {world} GPUs (divide by {world})" if best.total else "figures per GPU"
    halved = " / 2" if best.causal else ""
    times = f" x {rate.passes:g}" if rate.passes != 1 else ""
    value = solved_tflops(first, rate, best) * (world if best.total else 1)
    others = "".join(
        f"; head_dim {other.head_dim} {'if causal' if other.causal else 'without a causal mask'} fits as well"
        for other in solutions[1:]
    )
    message = (
        f"head_dim {first.head_dim} cannot be right: the TFLOP/s of all {len(rows)} rows fit head_dim {best.head_dim} "
        f"{'with a causal mask' if best.causal else 'without a mask'}, as {meaning}: line {first.line}: "
        f"4 x {first.batch} x {first.seq}^2 x {first.heads} x {best.head_dim}{halved}{times} FLOP "
        f"/ {rate.time_ms:g} ms = {value:.2f}, printed {rate.tflops:g}{others}"
    )
    return [Flag("settings_solved", "error", first.file, line, message, first.head_dim, best.head_dim)]


def _masks(rows: list[Audited]) -> list[Flag]:
    """Says which mask was used where a log states none: the one by which its figures agree."""
    found: dict[tuple[str, int | None, bool], list[Audited]] = {}
    for one in rows:
        if one.row.causal is None and one.verdict in ("agrees", "rounding"):
            rate = rates_of(one.row)[0]
            causal_work = (forward_tflop(one.row, True) or 0.0) * rate.passes / (one.row.world_size or 1)
            key = (one.row.file, one.row.label_line, holds(rate.work, causal_work))
            found.setdefault(key, []).append(one)
    flags = []
    for (file, line, causal), some in found.items():
        mask = "a causal mask" if causal else "no mask"
        message = f"no mask is stated; the TFLOP/s of {len(some)} rows follow from their times with {mask}"
        flags.append(Flag("mask_inferred", "note", file, line or some[0].row.line, message, None, causal))
    return flags


# --- peaks -----------------------------------------------------------------------------------------------


def _above_peak(one: Audited) -> list[Flag]:
    """Printed rates above what the device can do; where the figure is a total, that is why."""
    row = one.row
    peak = PEAKS.get((row.device or "").upper().replace("RTX", "").strip())
    found = []
    for printed in {row.tflops, row.tflops_forward, row.tflops_backward} - {None}:
        if peak is None or printed is None or printed <= peak:
            continue
        per_gpu = one.tflops_per_gpu if printed == row.tflops else None
        message = f"{printed:g} TFLOP/s printed, the peak of one {row.device} is {peak:g}"
        if per_gpu is not None and per_gpu <= peak:
            message += f"; {per_gpu:.2f} once divided by {printed / per_gpu:g}"
        severity: Severity = "warning" if per_gpu is not None and per_gpu <= peak else "error"
        found.append(flag(row, "above_peak", severity, message, printed, peak))
    return found


# --- between logs ----------------------------------------------------------------------------------------


def _far_apart(rows: list[Audited], spread: float) -> list[Flag]:
    """One configuration measured more than once, with figures further apart than ``spread``."""
    groups: dict[tuple[object, ...], list[Audited]] = {}
    for one in rows:
        row = one.row
        if one.verdict != "inconsistent" and row.system != "unknown":
            key = (row.system, row.seq, row.batch, row.layout, row.ulysses_degree, row.ring_degree, row.forward_only)
            groups.setdefault(key, []).append(one)
    found = []
    for some in groups.values():
        for name, unit in (("tflops_per_gpu", "TFLOP/s"), ("forward_ms", "ms forward")):
            found += _farthest(some, name, unit, spread)
    return found


def _value(one: Audited, name: str) -> float | None:
    value: float | None = one.tflops_per_gpu if name == "tflops_per_gpu" else getattr(one.row, name)
    # Times that are rounded more coarsely than the spread say nothing about it.
    coarse = value and one.row.steps.get(name, 0.0) / value > 0.02
    return None if coarse else value


def _farthest(some: list[Audited], name: str, unit: str, spread: float) -> list[Flag]:
    valued = sorted(((one.row, value) for one in some if (value := _value(one, name))), key=lambda pair: pair[1])
    # The farthest two are among the lowest and the highest; pairs of all rows of a long log would be too many.
    if len(valued) > 2 * _MOST_COMPARED:
        valued = valued[:_MOST_COMPARED] + valued[-_MOST_COMPARED:]
    pairs = [(max(a[1], b[1]) / min(a[1], b[1]), a, b) for a, b in combinations(valued, 2) if _comparable(a[0], b[0])]
    if not pairs:
        return []
    ratio, first, second = max(pairs, key=lambda pair: pair[0])
    if ratio - 1 <= spread:
        return []
    partners = [pair for pair in valued if pair is first or _comparable(pair[0], first[0])]
    listed = ", ".join(f"{value:g} ({PurePath(row.file).name}:{row.line})" for row, value in partners[:_MOST_LISTED])
    row = second[0]
    message = (
        f"{row.system} at seq {row.seq}: {listed} {unit}: {100 * (ratio - 1):.0f} % apart, "
        f"above the {100 * spread:.0f} % that repeated runs are allowed"
    )
    return [flag(row, "far_apart", "note", message, second[1], first[1])]


def _comparable(a: LogRow, b: LogRow) -> bool:
    """Whether nothing that either row states contradicts their being the same configuration."""
    if (a.file, a.line) == (b.file, b.line):
        return False
    # A placement that is not stated may be either, and the two are far apart by nature.
    if a.placement != b.placement:
        return False
    names = ("heads", "kv_heads", "head_dim", "causal", "world_size", "dtype", "device", "double_ring")
    return all(
        getattr(a, name) is None or getattr(b, name) is None or getattr(a, name) == getattr(b, name) for name in names
    )
