"""Audit of benchmark logs: each row's TFLOP/s computed again, and contradictions reported with the arithmetic.

Nothing is assumed. Settings that neither the log nor the caller states are requested by a flag, or solved for, which a
flag reports.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import PurePath

from ringprof.benchmark_logs.rates import (
    SolvedSettings,
    audit_row,
    flop_in_words,
    follows,
    rates_of,
    solve,
    tflop_per_gpu,
)
from ringprof.benchmark_logs.rows import STATED, BenchmarkLog, Flag, JudgedRow, LogRow, LogSettings, Severity, flag
from ringprof.benchmark_logs.sections import grouped, section_flags
from ringprof.workload.devices import peak_of

SPREAD = 0.10
"""Relative difference between logs above which rows of one configuration are noted."""

_FINE = 0.02
"""Largest rounding of a time, relative to the time, with which it is compared between logs."""
_MAX_COMPARED, _MAX_LISTED = 100, 8
_ORDER: dict[Severity, int] = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True)
class LogAudit:
    """Result of an audit: the rows with their verdicts, and the flags in order of file and line."""

    rows: tuple[JudgedRow, ...]
    flags: tuple[Flag, ...]


def audit(logs: Sequence[BenchmarkLog], user_settings: LogSettings | None = None, spread: float = SPREAD) -> LogAudit:
    """Audit all rows of the logs; ``user_settings`` fill in settings that a log does not state.

    ``spread`` is the relative difference between logs above which rows of one configuration are noted.
    """
    flags: list[Flag] = []
    rows: list[JudgedRow] = []
    for log in logs:
        completed = [_with_user_settings(row, user_settings) for row in log.rows] if user_settings else list(log.rows)
        audited, row_flags = _audit_rows(completed)
        rows += audited
        flags += [*section_flags(completed, log.settings), *row_flags, *log.flags]
    flags += [peak_flag for row in rows for peak_flag in _above_peak(row)]
    flags += [*_inferred_masks(rows), *_differing_rows(rows, spread)]
    return LogAudit(tuple(rows), _sort_flags(rows, flags))


def with_flags(result: LogAudit, further_flags: Iterable[Flag]) -> LogAudit:
    """Return an audit with additional flags, such as those of the plausibility check."""
    return replace(result, flags=_sort_flags(result.rows, [*result.flags, *further_flags]))


def _sort_flags(rows: Sequence[JudgedRow], flags: Iterable[Flag]) -> tuple[Flag, ...]:
    files = {file: index for index, file in enumerate(dict.fromkeys(item.row.file for item in rows))}
    return tuple(sorted(flags, key=lambda item: (files.get(item.file, 0), item.line, _ORDER[item.severity], item.code)))


def _with_user_settings(row: LogRow, user_settings: LogSettings) -> LogRow:
    """Return a row completed with the settings that the caller states and the log does not."""
    added = {name: getattr(user_settings, name) for name in STATED if getattr(row, name) is None}
    added = {name: value for name, value in added.items() if value is not None}
    return replace(row, **added, sources={**row.sources, **dict.fromkeys(added, "option")}) if added else row


# --- verdicts, alone and together ------------------------------------------------------------------------


def _audit_rows(rows: list[LogRow]) -> tuple[list[JudgedRow], list[Flag]]:
    """Audit each row; where all rows under one set of stated settings fail, solve for other settings."""
    audited = {id(row): audit_row(row) for row in rows}
    flags: list[Flag] = []
    for group in _group_by_settings(rows):
        checked = [row for row in group if audited[id(row)][0].verdict != "unchecked"]
        verdicts = {audited[id(row)][0].verdict for row in checked}
        if verdicts & {"agrees", "rounding"} or verdicts <= {"constant"}:
            continue
        if solutions := solve(checked):
            flags.append(_solved_flag(checked, solutions))
            audited |= {id(row): (_correct_rate(row, solutions[0]), []) for row in checked}
    return [audited[id(row)][0] for row in rows], flags + [row_flag for row in rows for row_flag in audited[id(row)][1]]


def _group_by_settings(rows: list[LogRow]) -> list[list[LogRow]]:
    """Group the rows that have equal settings and take their head dimension from the same statement in the log."""
    by_source: dict[str | None, list[LogRow]] = {}
    for row in rows:
        by_source.setdefault(row.sources.get("head_dim"), []).append(row)
    return [group for rows in by_source.values() for group in grouped(rows, "heads", "head_dim", "batch", "world_size")]


def _correct_rate(row: LogRow, solved: SolvedSettings) -> JudgedRow:
    """Return a row with its rate per GPU, corrected and computed again with the solved settings."""
    rate, world = rates_of(row)[0], row.world_size or 1
    computed = tflop_per_gpu(row, rate, solved.head_dim, causal=solved.causal) / rate.time_ms * 1e3
    return JudgedRow(row, "settings", computed, rate.tflops / world if solved.total else rate.tflops)


def _solved_flag(rows: list[LogRow], solutions: list[SolvedSettings]) -> Flag:
    """Create the flag that reports solved settings, with the arithmetic of the row with the longest time."""
    best = solutions[0]
    # The longest time is printed with the most digits.
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


def _inferred_masks(rows: list[JudgedRow]) -> list[Flag]:
    """Flag the mask that was used where a log states none: the mask with which its figures agree."""
    rows_by_mask: dict[tuple[str, int | None, bool], list[LogRow]] = {}
    for audited in rows:
        row = audited.row
        if row.causal is None and audited.verdict in ("agrees", "rounding"):
            rate = rates_of(row)[0]
            causal = follows(tflop_per_gpu(row, rate, causal=True), rate)
            rows_by_mask.setdefault((row.file, row.label_line, causal), []).append(row)
    flags = []
    for (file, line, causal), group in rows_by_mask.items():
        mask = "a causal mask" if causal else "no mask"
        message = f"no mask is stated; the TFLOP/s of {len(group)} rows follow from their times with {mask}"
        flags.append(Flag("mask_inferred", "note", file, line or group[0].line, message, None, causal))
    return flags


# --- peaks -----------------------------------------------------------------------------------------------


def _above_peak(audited: JudgedRow) -> list[Flag]:
    """Flag printed rates above the device's peak; only a warning where the figure is a total over GPUs."""
    row = audited.row
    other_size = any(bits in (row.dtype or "") for bits in ("4", "8", "32"))
    peak = None if other_size else peak_of(row.device, "bf16")
    flags = []
    for printed in {row.tflops, row.tflops_forward, row.tflops_backward} - {None}:
        if peak is None or printed is None or printed <= peak.tflops:
            continue
        message = f"{printed:g} TFLOP/s printed, the peak of one {row.device} is {peak.tflops:g}"
        severity: Severity = "error"
        per_gpu = audited.tflops_per_gpu if printed == row.tflops else None
        if per_gpu is not None and per_gpu <= peak.tflops:
            severity = "warning"
            message += f"; {per_gpu:.2f} once divided by {printed / per_gpu:g}"
        flags.append(flag(row, "above_peak", severity, message, printed, peak.tflops))
    return flags


# --- between logs ----------------------------------------------------------------------------------------


def _differing_rows(rows: list[JudgedRow], spread: float) -> list[Flag]:
    """Flag configurations that were measured more than once, with figures that differ by more than ``spread``."""
    usable = {
        id(audited.row): audited
        for audited in rows
        if audited.verdict != "inconsistent" and audited.row.system != "unknown"
    }
    names = ("system", "seq", "batch", "layout", "ulysses_degree", "ring_degree", "forward_only")
    flags = []
    for group in grouped((audited.row for audited in usable.values()), *names):
        rates = [(row, rate) for row in group if (rate := usable[id(row)].tflops_per_gpu)]
        precise = [row for row in group if row.steps.get("forward_ms", 0.0) <= _FINE * (row.forward_ms or 0.0)]
        times = [(row, time) for row in precise if (time := row.forward_ms)]
        flags += _largest_difference(rates, "TFLOP/s", spread) + _largest_difference(times, "ms forward", spread)
    return flags


def _largest_difference(valued_rows: list[tuple[LogRow, float]], unit: str, spread: float) -> list[Flag]:
    """Flag the pair of comparable rows whose values differ most, if by more than ``spread``."""
    valued_rows.sort(key=lambda pair: pair[1])
    # The largest difference is between a low and a high value; a long log has too many pairs to compare all.
    if len(valued_rows) > 2 * _MAX_COMPARED:
        valued_rows = valued_rows[:_MAX_COMPARED] + valued_rows[-_MAX_COMPARED:]
    pairs = [
        (max(a[1], b[1]) / min(a[1], b[1]), a, b) for a, b in combinations(valued_rows, 2) if _comparable(a[0], b[0])
    ]
    ratio, first, second = max(pairs, key=lambda pair: pair[0], default=(1.0, None, None))
    if ratio - 1 <= spread or first is None or second is None:
        return []
    partners = [pair for pair in valued_rows if pair is first or _comparable(pair[0], first[0])]
    listed = ", ".join(f"{value:g} ({PurePath(row.file).name}:{row.line})" for row, value in partners[:_MAX_LISTED])
    row = second[0]
    message = (
        f"{row.system} at seq {row.seq}: {listed} {unit}: {100 * (ratio - 1):.0f} % apart, "
        f"above the {100 * spread:.0f} % that repeated runs are allowed"
    )
    return [flag(row, "far_apart", "note", message, second[1], first[1])]


def _comparable(a: LogRow, b: LogRow) -> bool:
    """Return whether two rows may have the same configuration: no stated settings differ."""
    if (a.file, a.line) == (b.file, b.line):
        return False
    # A placement that is not stated may be either one, and the two placements differ widely in speed.
    if a.placement != b.placement:
        return False
    names = ("heads", "kv_heads", "head_dim", "causal", "world_size", "dtype", "device", "double_ring")
    return all(
        getattr(a, name) is None or getattr(b, name) is None or getattr(a, name) == getattr(b, name) for name in names
    )
