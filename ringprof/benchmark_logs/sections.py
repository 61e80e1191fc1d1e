"""Findings about a table as a whole: rates that follow from no settings, foreign columns, lengths, growth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from ringprof.benchmark_logs.flags import Flag, at_label, flag
from ringprof.benchmark_logs.rates import Interval, missing_settings, rates_of
from ringprof.benchmark_logs.rows import LogRow, Settings

GROWTH = 1.1
"""A time that grows by less than this while the sequence at least doubles does not grow: attention takes four times."""

PASS_RATIO = (1.5, 6.0)
"""Forward and backward over forward is 3.5 in FLOPs; outside these bounds something else was timed."""

_NAMES = {"batch": "--batch", "heads": "--heads", "head_dim": "--head-dim", "world_size": "--world"}


def sections(rows: Iterable[LogRow]) -> list[list[LogRow]]:
    """Rows of one table: same file, heading and columns, in order."""
    found: dict[tuple[object, ...], list[LogRow]] = {}
    for row in rows:
        found.setdefault((row.file, row.label_line, row.format, row.columns), []).append(row)
    return list(found.values())


def section_flags(rows: list[LogRow], settings: Settings) -> list[Flag]:
    """Everything odd about one table."""
    return [
        *_foreign_columns(rows),
        *_rates_together(rows),
        *_lengths(rows, settings),
        *_growth(rows),
        *(one for row in rows for one in _row_flags(row)),
    ]


# --- columns and rates -------------------------------------------------------------------------------


def repeated_rows(rows: Sequence[LogRow]) -> list[Flag]:
    """A note for each stretch of rows that are earlier rows of the same log, to the last digit."""
    first: dict[tuple[Any, ...], LogRow] = {}
    stretches: list[list[tuple[LogRow, LogRow]]] = []
    going_on = False
    for row in rows:
        times = row.forward_ms, row.forward_backward_ms, row.throughput_per_s
        settings = row.system, row.seq, row.ulysses_degree, row.ring_degree, row.placement
        key = (*settings, *times, row.tflops, row.memory_mb)
        earlier = first.setdefault(key, row)
        again = earlier is not row and any(value is not None for value in times)
        if again and going_on:
            stretches[-1].append((row, earlier))
        elif again:
            stretches.append([(row, earlier)])
        going_on = again
    return [
        flag(
            stretch[0][0],
            "repeated_rows",
            "note",
            f"{_lines([row for row, _ in stretch])} repeat {_lines([earlier for _, earlier in stretch])} to the last "
            "digit: the same measurement, printed again",
        )
        for stretch in stretches
    ]


def _lines(rows: Sequence[LogRow]) -> str:
    first, last = rows[0].line, rows[-1].line
    return f"line {first}" if first == last else f"lines {first} to {last}"


def _foreign_columns(rows: list[LogRow]) -> list[Flag]:
    first = rows[0]
    if "SP Size" not in first.columns or first.system in ("ulysses", "unknown"):
        return []
    message = (
        f"headed {first.label!r}, but its columns ({', '.join(first.columns)}) are those of a Ulysses benchmark: "
        "the rows below are of another tool than the heading says"
    )
    return [Flag("foreign_columns", "warning", first.file, at_label(rows), message, "SP Size", None)]


def implied_size(row: LogRow) -> Interval | None:
    """heads x head_dim / GPUs that a row's rate and time imply for a causal mask; twice that without one."""
    rates = rates_of(row)
    if not rates or not row.batch or not row.seq:
        return None
    unit = 2e-12 * row.batch * row.seq**2 * rates[0].passes
    return rates[0].work[0] / unit, rates[0].work[1] / unit


def _rates_together(rows: list[LogRow]) -> list[Flag]:
    """Rates of one table must imply one heads x head_dim / GPUs, whatever that is."""
    sized = [(row, size) for row in rows if (size := implied_size(row)) is not None]
    if not sized:
        return []
    low, high = max(size[0] for _, size in sized), min(size[1] for _, size in sized)
    first, file, line = sized[0][0], rows[0].file, at_label(rows)
    if low > high:
        each = ", ".join(f"{sum(size) / 2:.1f} (line {row.line})" for row, size in sized)
        heads = ""
        if first.head_dim and first.world_size:
            scale = first.world_size / first.head_dim
            heads = "; heads: " + ", ".join(f"{sum(size) / 2 * scale:.2f}" for _, size in sized)
        message = (
            f"the TFLOP/s follow from the times for no head count: rate x time / (2 x batch x seq^2 x "
            f"{rates_of(first)[0].passes:g}) gives heads x head_dim / GPUs = {each}{heads}: they must be equal"
        )
        return [Flag("tflops_no_settings", "error", file, line, message, None, [sum(s) / 2 for _, s in sized])]
    missing = [_NAMES[name] for name in missing_settings(first) if name in _NAMES]
    if not missing:
        return []
    message = (
        f"{len(sized)} rows cannot be checked in full without {' '.join(missing)}: their TFLOP/s agree with one "
        f"another and imply heads x head_dim / GPUs = {(low + high) / 2:.2f} if causal{_hint(first, low, high)}"
    )
    return [Flag("settings_missing", "note", file, line, message, None, (low + high) / 2)]


def _hint(row: LogRow, low: float, high: float) -> str:
    """The one setting that is missing, solved for."""
    if row.heads and row.head_dim and row.world_size is None:
        return f", so {2 * row.heads * row.head_dim / (low + high):.2f} GPUs for {row.heads} heads of {row.head_dim}"
    return ""


# --- lengths and growth --------------------------------------------------------------------------------


def _lengths(rows: list[LogRow], settings: Settings) -> list[Flag]:
    """Lengths that the log does not say it measures, and those it says and a table lacks."""
    stated = settings.seqs
    if not stated or settings.lines.get("seqs", 0) > rows[0].line:
        return []
    at = f"line {settings.lines.get('seqs', 0)}"
    listed = ", ".join(map(str, stated))
    extra = [row for row in rows if row.seq not in stated]
    found = [
        flag(row, "length_not_stated", "warning", f"seq {row.seq} is not among those of {at} ({listed})", row.seq)
        for row in extra
    ]
    lacking = [seq for seq in stated if seq not in {row.seq for row in rows}]
    if extra and lacking:
        message = f"lacks {', '.join(map(str, lacking))} of {at}{_shifted(rows, stated)}"
        found.append(Flag("length_missing", "warning", rows[0].file, at_label(rows), message, None, lacking))
    return found


def _shifted(rows: list[LogRow], stated: Sequence[int]) -> str:
    """Whether the lengths are the stated ones, in order, but for one factor on some of them."""
    own, wanted = sorted(row.seq or 0 for row in rows), sorted(stated)
    if len(own) != len(wanted) or 0 in own:
        return ""
    factors = {want / have for have, want in zip(own, wanted, strict=True) if have != want}
    if len(factors) != 1:
        return ""
    off = [str(row.line) for row in rows if row.seq in own and row.seq != wanted[own.index(row.seq)]]
    return f"; with lines {', '.join(off)} times {factors.pop():g} they would be those stated"


def _growth(rows: list[LogRow]) -> list[Flag]:
    series: dict[tuple[object, ...], list[LogRow]] = {}
    for row in rows:
        key = (row.system, row.layout, row.ulysses_degree, row.ring_degree, row.forward_only, row.batch)
        series.setdefault(key, []).append(row)
    found = []
    for some in series.values():
        ordered = sorted((row for row in some if row.seq), key=lambda row: row.seq or 0)
        for before, after in pairwise(ordered):
            found += _not_growing(before, after)
    return found


def _not_growing(before: LogRow, after: LogRow) -> list[Flag]:
    longer = (after.seq or 0) / (before.seq or 1)
    found = []
    for name, label in (("forward_ms", "forward"), ("forward_backward_ms", "forward and backward")):
        first, second = getattr(before, name), getattr(after, name)
        if longer >= 2 and first and second and second < GROWTH * first:
            message = (
                f"{label} takes {second:g} ms at seq {after.seq} and {first:g} ms at {before.seq} "
                f"(line {before.line}): {second / first:.2f} times for {longer:g} times the sequence, "
                f"where attention takes {longer**2:g} times"
            )
            found.append(flag(after, "no_growth", "warning", message, second, round(second / first, 4)))
    return found


# --- single rows -----------------------------------------------------------------------------------------


def _row_flags(row: LogRow) -> list[Flag]:
    found = []
    times = [time for time in (row.forward_ms, row.forward_backward_ms) if time]
    if row.oom and times:
        message = (
            f"OOM stands beside times ({', '.join(f'{time:g} ms' for time in times)}): one of them is of another run"
        )
        found.append(flag(row, "oom_with_times", "error", message, "OOM", times[-1]))
    if len(times) == 2 and not PASS_RATIO[0] <= times[1] / times[0] <= PASS_RATIO[1]:
        ratio = times[1] / times[0]
        message = (
            f"forward and backward {times[1]:g} ms is {ratio:.2f} times forward {times[0]:g} ms, where 3.5 is the "
            "ratio of the FLOPs: set-up may have been timed"
        )
        found.append(flag(row, "pass_ratio", "warning", message, times[1], round(ratio, 4)))
    if row.throughput_per_s and times:
        found += _throughput(row, times[-1])
    return found


def _throughput(row: LogRow, time_ms: float) -> list[Flag]:
    """Iterations a second are the inverse of the latency, but for rounding of both."""
    step = row.steps.get("forward_ms" if row.forward_only else "forward_backward_ms", 0.0)
    low, high = 1e3 / (time_ms + step), 1e3 / max(time_ms - step, 1e-12)
    slack = row.steps.get("throughput_per_s", 0.0)
    printed = row.throughput_per_s or 0.0
    if low - slack <= printed <= high + slack:
        return []
    message = f"{printed:g} iterations/s printed; 1000 / {time_ms:g} ms = {1e3 / time_ms:.3f}"
    return [flag(row, "throughput_mismatch", "error", message, printed, round(1e3 / time_ms, 4))]
