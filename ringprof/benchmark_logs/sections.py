"""Findings about a table as a whole: rates that follow from no settings, foreign columns, lengths, growth."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from ringprof.benchmark_logs.rates import RateBounds, missing_settings, rates_of
from ringprof.benchmark_logs.rows import Flag, LogRow, LogSettings, flag, section_flag

GROWTH = 1.1
"""A time that grows by less than this while the sequence at least doubles does not grow: attention takes four times."""

PASS_RATIO = (1.5, 6.0)
"""Forward and backward over forward is 3.5 in FLOPs; outside these bounds something else was timed."""

_OPTIONS = {"batch": "--batch", "heads": "--heads", "head_dim": "--head-dim", "world_size": "--world"}


def grouped(rows: Iterable[LogRow], *names: str) -> list[list[LogRow]]:
    """Rows that are alike in what is named, each group in order, the groups by their first row."""
    found: dict[tuple[Hashable, ...], list[LogRow]] = {}
    for row in rows:
        found.setdefault(tuple(getattr(row, name) for name in names), []).append(row)
    return list(found.values())


def section_flags(rows: Sequence[LogRow], settings: LogSettings) -> list[Flag]:
    """Everything odd about the tables of one log: rows of one heading and the same columns belong together."""
    found: list[Flag] = []
    for section in grouped(rows, "label_line", "format", "columns"):
        found += [*_foreign_columns(section), *_rates_together(section), *_lengths(section, settings)]
        found += [*_growth(section), *(one for row in section for one in _row_flags(row))]
    return found + _repeated_rows(rows)


# --- columns and rates -------------------------------------------------------------------------------


def _repeated_rows(rows: Sequence[LogRow]) -> list[Flag]:
    """A note for each stretch of rows that are earlier rows of the same log, to the last digit."""
    first: dict[tuple[Any, ...], LogRow] = {}
    stretches: list[list[tuple[LogRow, LogRow]]] = []
    going_on = False
    for row in rows:
        times = row.forward_ms, row.forward_backward_ms, row.throughput_per_s
        settings = row.system, row.seq, row.ulysses_degree, row.ring_degree, row.placement
        earlier = first.setdefault((*settings, *times, row.tflops, row.memory_mb), row)
        again = earlier is not row and any(value is not None for value in times)
        if again and not going_on:
            stretches.append([])
        if again:
            stretches[-1].append((row, earlier))
        going_on = again
    return [_repetition(stretch) for stretch in stretches]


def _repetition(stretch: list[tuple[LogRow, LogRow]]) -> Flag:
    own, earlier = (_lines(rows[0].line, rows[-1].line) for rows in zip(*stretch, strict=True))
    message = f"{own} repeat {earlier} to the last digit: the same measurement, printed again"
    return flag(stretch[0][0], "repeated_rows", "note", message)


def _lines(first: int, last: int) -> str:
    return f"line {first}" if first == last else f"lines {first} to {last}"


def _foreign_columns(rows: list[LogRow]) -> list[Flag]:
    first = rows[0]
    if "SP Size" not in first.columns or first.system in ("ulysses", "unknown"):
        return []
    message = (
        f"headed {first.label!r}, but its columns ({', '.join(first.columns)}) are those of a Ulysses benchmark: "
        "the rows below are of another tool than the heading says"
    )
    return [section_flag(rows, "foreign_columns", "warning", message, "SP Size")]


def _implied_size(row: LogRow) -> RateBounds | None:
    """heads x head_dim / GPUs that a row's rate and time imply for a causal mask; twice that without one."""
    rates = rates_of(row)
    if not rates or not row.batch or not row.seq:
        return None
    unit = 2e-12 * row.batch * row.seq**2 * rates[0].passes
    return rates[0].work[0] / unit, rates[0].work[1] / unit


def _rates_together(rows: list[LogRow]) -> list[Flag]:
    """Rates of one table must imply one heads x head_dim / GPUs, whatever that is."""
    sized = [(row, size) for row in rows if (size := _implied_size(row)) is not None]
    if not sized:
        return []
    low, high = max(size[0] for _, size in sized), min(size[1] for _, size in sized)
    first = sized[0][0]
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
        return [section_flag(rows, "tflops_no_settings", "error", message, None, [sum(s) / 2 for _, s in sized])]
    missing = [_OPTIONS[name] for name in missing_settings(first) if name in _OPTIONS]
    if not missing:
        return []
    # Where one setting is missing it is solved for.
    hint = ""
    if first.heads and first.head_dim and first.world_size is None:
        gpus = 2 * first.heads * first.head_dim / (low + high)
        hint = f", so {gpus:.2f} GPUs for {first.heads} heads of {first.head_dim}"
    message = (
        f"{len(sized)} rows cannot be checked in full without {' '.join(missing)}: their TFLOP/s agree with one "
        f"another and imply heads x head_dim / GPUs = {(low + high) / 2:.2f} if causal{hint}"
    )
    return [section_flag(rows, "settings_missing", "note", message, None, (low + high) / 2)]


# --- lengths and growth --------------------------------------------------------------------------------


def _lengths(rows: list[LogRow], settings: LogSettings) -> list[Flag]:
    """Lengths that the log does not say it measures, and those it says and a table lacks."""
    stated, line = settings.seqs, settings.lines.get("seqs", 0)
    extra = [row for row in rows if row.seq not in stated]
    if not stated or line > rows[0].line or not extra:
        return []
    words = f"is not among those of line {line} ({', '.join(map(str, stated))})"
    found = [flag(row, "length_not_stated", "warning", f"seq {row.seq} {words}", row.seq) for row in extra]
    lacking = [seq for seq in stated if seq not in {row.seq for row in rows}]
    if lacking:
        message = f"lacks {', '.join(map(str, lacking))} of line {line}{_shifted(rows, stated)}"
        found.append(section_flag(rows, "length_missing", "warning", message, None, lacking))
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
    found = []
    for series in grouped(rows, "system", "layout", "ulysses_degree", "ring_degree", "forward_only", "batch"):
        ordered = sorted((row for row in series if row.seq), key=lambda row: row.seq or 0)
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
        listed = ", ".join(f"{time:g} ms" for time in times)
        message = f"OOM stands beside times ({listed}): one of them is of another run"
        found.append(flag(row, "oom_with_times", "error", message, "OOM", times[-1]))
    if len(times) == 2 and not PASS_RATIO[0] <= (ratio := times[1] / times[0]) <= PASS_RATIO[1]:
        message = (
            f"forward and backward {times[1]:g} ms is {ratio:.2f} times forward {times[0]:g} ms, where 3.5 is the "
            "ratio of the FLOPs: set-up may have been timed"
        )
        found.append(flag(row, "pass_ratio", "warning", message, times[1], round(ratio, 4)))
    if row.throughput_per_s and times:
        found += _throughput(row, row.throughput_per_s, times[-1])
    return found


def _throughput(row: LogRow, printed: float, time_ms: float) -> list[Flag]:
    """Iterations a second are the inverse of the latency, but for rounding of both."""
    step = row.steps.get("forward_ms" if row.forward_only else "forward_backward_ms", 0.0)
    slack = row.steps.get("throughput_per_s", 0.0)
    if 1e3 / (time_ms + step) - slack <= printed <= 1e3 / max(time_ms - step, 1e-12) + slack:
        return []
    message = f"{printed:g} iterations/s printed; 1000 / {time_ms:g} ms = {1e3 / time_ms:.3f}"
    return [flag(row, "throughput_mismatch", "error", message, printed, round(1e3 / time_ms, 4))]
