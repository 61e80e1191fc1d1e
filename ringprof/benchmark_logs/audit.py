"""The audit of benchmark logs: each row's TFLOP/s computed again, and what cannot be right, with the arithmetic.

Nothing is assumed: settings that neither the log nor the caller states are asked for, or solved for and said to be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import PurePath

from ringprof.benchmark_logs.rates import (
    SolvedSettings,
    flop_in_words,
    follows,
    judge_row,
    rates_of,
    solve,
    tflop_per_gpu,
)
from ringprof.benchmark_logs.rows import STATED, BenchmarkLog, Flag, JudgedRow, LogRow, LogSettings, Severity, flag
from ringprof.benchmark_logs.sections import grouped, section_flags
from ringprof.devices import peak_of

SPREAD = 0.10
"""Same configuration, different logs: differences above this are noted."""

_FINE = 0.02
"""Times that are rounded more coarsely than this share of them say nothing about the spread."""
_MOST_COMPARED, _MOST_LISTED = 100, 8
_ORDER: dict[Severity, int] = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True)
class LogAudit:
    """Rows with their verdicts, and flags in order of file and line."""

    rows: tuple[JudgedRow, ...]
    flags: tuple[Flag, ...]


def audit(logs: Sequence[BenchmarkLog], given: LogSettings | None = None, spread: float = SPREAD) -> LogAudit:
    """Judge all rows of the logs; ``given`` fills in settings that a log does not state.

    ``spread`` is the relative difference between logs above which rows of one configuration are noted.
    """
    flags: list[Flag] = []
    rows: list[JudgedRow] = []
    for log in logs:
        completed = [_with_given(row, given) for row in log.rows] if given else list(log.rows)
        judged, found = _judge_rows(completed)
        rows += judged
        flags += [*section_flags(completed, log.settings), *found, *log.flags]
    flags += [found for one in rows for found in _above_peak(one)]
    flags += [*_masks(rows), *_far_apart(rows, spread)]
    return LogAudit(tuple(rows), _in_order(rows, flags))


def with_flags(found: LogAudit, more: Iterable[Flag]) -> LogAudit:
    """The audit with flags that others have found."""
    return replace(found, flags=_in_order(found.rows, [*found.flags, *more]))


def _in_order(rows: Sequence[JudgedRow], flags: Iterable[Flag]) -> tuple[Flag, ...]:
    files = {file: index for index, file in enumerate(dict.fromkeys(one.row.file for one in rows))}
    return tuple(sorted(flags, key=lambda one: (files.get(one.file, 0), one.line, _ORDER[one.severity], one.code)))


def _with_given(row: LogRow, given: LogSettings) -> LogRow:
    """The row with what the caller states and the log does not."""
    added = {name: getattr(given, name) for name in STATED if getattr(row, name) is None}
    added = {name: value for name, value in added.items() if value is not None}
    return replace(row, **added, sources={**row.sources, **dict.fromkeys(added, "option")}) if added else row


# --- verdicts, alone and together ------------------------------------------------------------------------


def _judge_rows(rows: list[LogRow]) -> tuple[list[JudgedRow], list[Flag]]:
    """Verdicts row by row; where all rows under one stated set of settings fail, that set is solved for."""
    judged = {id(row): judge_row(row) for row in rows}
    flags: list[Flag] = []
    for some in _same_settings(rows):
        checked = [row for row in some if judged[id(row)][0].verdict != "unchecked"]
        verdicts = {judged[id(row)][0].verdict for row in checked}
        if verdicts & {"agrees", "rounding"} or verdicts <= {"constant"}:
            continue
        if solutions := solve(checked):
            flags.append(_solved(checked, solutions))
            judged |= {id(row): (_corrected(row, solutions[0]), []) for row in checked}
    return [judged[id(row)][0] for row in rows], flags + [one for row in rows for one in judged[id(row)][1]]


def _same_settings(rows: list[LogRow]) -> list[list[LogRow]]:
    """Rows that take their head dimension from the same statement."""
    found: dict[str | None, list[LogRow]] = {}
    for row in rows:
        found.setdefault(row.sources.get("head_dim"), []).append(row)
    return [some for rows in found.values() for some in grouped(rows, "heads", "head_dim", "batch", "world_size")]


def _corrected(row: LogRow, solved: SolvedSettings) -> JudgedRow:
    rate, world = rates_of(row)[0], row.world_size or 1
    computed = tflop_per_gpu(row, rate, solved.head_dim, causal=solved.causal) / rate.time_ms * 1e3
    return JudgedRow(row, "settings", computed, rate.tflops / world if solved.total else rate.tflops)


def _solved(rows: list[LogRow], solutions: list[SolvedSettings]) -> Flag:
    best = solutions[0]
    # The row with the longest time is printed with the most digits.
    first = max(rows, key=lambda row: rates_of(row)[0].time_ms)
    rate, world = rates_of(first)[0], first.world_size or 1
    source = first.sources.get("head_dim", "")
    line = int(source.removeprefix("line ")) if source.startswith("line ") else first.line
    meaning = f"totals over {world} GPUs (divide by {world})" if best.total else "figures per GPU"
    flop = flop_in_words(first, rate, best.head_dim, " / 2" if best.causal else "")
    value = best.tflop(first, rate) / rate.time_ms * 1e3
    others = "".join(
        f"; head_dim {other.head_dim} {'if causal' if other.causal else 'without a causal mask'} fits as well"
        for other in solutions[1:]
    )
    message = (
        f"head_dim {first.head_dim} cannot be right: the TFLOP/s of all {len(rows)} rows fit head_dim {best.head_dim} "
        f"{'with a causal mask' if best.causal else 'without a mask'}, as {meaning}: line {first.line}: "
        f"{flop} / {rate.time_ms:g} ms = {value:.2f}, printed {rate.tflops:g}{others}"
    )
    return Flag("settings_solved", "error", first.file, line, message, first.head_dim, best.head_dim)


def _masks(rows: list[JudgedRow]) -> list[Flag]:
    """Says which mask was used where a log states none: the one by which its figures agree."""
    found: dict[tuple[str, int | None, bool], list[LogRow]] = {}
    for one in rows:
        row = one.row
        if row.causal is None and one.verdict in ("agrees", "rounding"):
            rate = rates_of(row)[0]
            causal = follows(tflop_per_gpu(row, rate, causal=True), rate)
            found.setdefault((row.file, row.label_line, causal), []).append(row)
    flags = []
    for (file, line, causal), some in found.items():
        mask = "a causal mask" if causal else "no mask"
        message = f"no mask is stated; the TFLOP/s of {len(some)} rows follow from their times with {mask}"
        flags.append(Flag("mask_inferred", "note", file, line or some[0].line, message, None, causal))
    return flags


# --- peaks -----------------------------------------------------------------------------------------------


def _above_peak(one: JudgedRow) -> list[Flag]:
    """Printed rates above what the device can do; where the figure is a total, that is why."""
    row = one.row
    other_size = any(bits in (row.dtype or "") for bits in ("4", "8", "32"))
    peak = None if other_size else peak_of(row.device, "bf16")
    found = []
    for printed in {row.tflops, row.tflops_forward, row.tflops_backward} - {None}:
        if peak is None or printed is None or printed <= peak.tflops:
            continue
        message = f"{printed:g} TFLOP/s printed, the peak of one {row.device} is {peak.tflops:g}"
        severity: Severity = "error"
        per_gpu = one.tflops_per_gpu if printed == row.tflops else None
        if per_gpu is not None and per_gpu <= peak.tflops:
            severity = "warning"
            message += f"; {per_gpu:.2f} once divided by {printed / per_gpu:g}"
        found.append(flag(row, "above_peak", severity, message, printed, peak.tflops))
    return found


# --- between logs ----------------------------------------------------------------------------------------


def _far_apart(rows: list[JudgedRow], spread: float) -> list[Flag]:
    """One configuration measured more than once, with figures further apart than ``spread``."""
    told = {id(one.row): one for one in rows if one.verdict != "inconsistent" and one.row.system != "unknown"}
    names = ("system", "seq", "batch", "layout", "ulysses_degree", "ring_degree", "forward_only")
    found = []
    for some in grouped((one.row for one in told.values()), *names):
        rates = [(row, rate) for row in some if (rate := told[id(row)].tflops_per_gpu)]
        fine = [row for row in some if row.steps.get("forward_ms", 0.0) <= _FINE * (row.forward_ms or 0.0)]
        times = [(row, time) for row in fine if (time := row.forward_ms)]
        found += _farthest(rates, "TFLOP/s", spread) + _farthest(times, "ms forward", spread)
    return found


def _farthest(valued: list[tuple[LogRow, float]], unit: str, spread: float) -> list[Flag]:
    valued.sort(key=lambda pair: pair[1])
    # The farthest two are among the lowest and the highest; pairs of all rows of a long log would be too many.
    if len(valued) > 2 * _MOST_COMPARED:
        valued = valued[:_MOST_COMPARED] + valued[-_MOST_COMPARED:]
    pairs = [(max(a[1], b[1]) / min(a[1], b[1]), a, b) for a, b in combinations(valued, 2) if _comparable(a[0], b[0])]
    ratio, first, second = max(pairs, key=lambda pair: pair[0], default=(1.0, None, None))
    if ratio - 1 <= spread or first is None or second is None:
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
