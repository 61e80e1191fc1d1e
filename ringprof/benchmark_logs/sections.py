"""Findings about a whole table or a single row that need no settings.

They are rates that follow from no settings, columns of another tool, unexpected lengths, and times that do not grow.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from ringprof.benchmark_logs.rates import RateBounds, missing_settings, rates_of
from ringprof.benchmark_logs.rows import Flag, LogRow, LogSettings, flag, section_flag

GROWTH = 1.1
"""Smallest expected growth of a time when the sequence at least doubles; attention takes four times as long."""

PASS_RATIO = (1.5, 6.0)
"""Plausible bounds of the time of forward and backward over that of forward; the ratio of the FLOPs is 3.5."""

_OPTIONS = {"batch": "--batch", "heads": "--heads", "head_dim": "--head-dim", "world_size": "--world"}


def grouped(rows: Iterable[LogRow], *names: str) -> list[list[LogRow]]:
    """Group the rows with equal values of the named fields; rows stay in order, groups are ordered by first row."""
    groups: dict[tuple[Hashable, ...], list[LogRow]] = {}
    for row in rows:
        groups.setdefault(tuple(getattr(row, name) for name in names), []).append(row)
    return list(groups.values())


def section_flags(rows: Sequence[LogRow], settings: LogSettings) -> list[Flag]:
    """Return all findings about the tables of one log; rows with one heading and equal columns form a table."""
    flags: list[Flag] = []
    for section in grouped(rows, "label_line", "format", "columns"):
        flags += [*_foreign_columns(section), *_conflicting_rates(section), *_length_flags(section, settings)]
        flags += [*_growth_flags(section), *(row_flag for row in section for row_flag in _row_flags(row))]
    return flags + _repeated_rows(rows)


# --- columns and rates -------------------------------------------------------------------------------


def _repeated_rows(rows: Sequence[LogRow]) -> list[Flag]:
    """Note each stretch of rows that repeats earlier rows of the same log to the last digit."""
    first: dict[tuple[Any, ...], LogRow] = {}
    stretches: list[list[tuple[LogRow, LogRow]]] = []
    in_stretch = False
    for row in rows:
        times = row.forward_ms, row.forward_backward_ms, row.throughput_per_s
        settings = row.system, row.seq, row.ulysses_degree, row.ring_degree, row.placement
        earlier = first.setdefault((*settings, *times, row.tflops, row.memory_mb), row)
        is_repeated = earlier is not row and any(value is not None for value in times)
        if is_repeated and not in_stretch:
            stretches.append([])
        if is_repeated:
            stretches[-1].append((row, earlier))
        in_stretch = is_repeated
    return [_repetition_flag(stretch) for stretch in stretches]


def _repetition_flag(stretch: list[tuple[LogRow, LogRow]]) -> Flag:
    """Create the note about one stretch of repeated rows, from pairs of (row, earlier row)."""
    repeated_lines, earlier_lines = (_format_lines(rows[0].line, rows[-1].line) for rows in zip(*stretch, strict=True))
    message = f"{repeated_lines} repeat {earlier_lines} to the last digit: the same measurement, printed again"
    return flag(stretch[0][0], "repeated_rows", "note", message)


def _format_lines(first: int, last: int) -> str:
    return f"line {first}" if first == last else f"lines {first} to {last}"


def _foreign_columns(rows: list[LogRow]) -> list[Flag]:
    """Flag a table whose columns are those of a Ulysses benchmark although its heading names another system."""
    first = rows[0]
    if "SP Size" not in first.columns or first.system in ("ulysses", "unknown"):
        return []
    message = (
        f"headed {first.label!r}, but its columns ({', '.join(first.columns)}) are those of a Ulysses benchmark: "
        "the rows below are of another tool than the heading says"
    )
    return [section_flag(rows, "foreign_columns", "warning", message, "SP Size")]


def _implied_size(row: LogRow) -> RateBounds | None:
    """Return bounds of heads x head_dim / GPUs that a row's rate and time imply for a causal mask.

    Without a causal mask, the true value is half of it.
    """
    rates = rates_of(row)
    if not rates or not row.batch or not row.seq:
        return None
    unit = 2e-12 * row.batch * row.seq**2 * rates[0].passes
    return rates[0].work[0] / unit, rates[0].work[1] / unit


def _conflicting_rates(rows: list[LogRow]) -> list[Flag]:
    """Flag a table whose rates imply different values of heads x head_dim / GPUs, which must be equal.

    Where they are equal but settings are missing, a note names the options that state them.
    """
    rows_with_size = [(row, size) for row in rows if (size := _implied_size(row)) is not None]
    if not rows_with_size:
        return []
    low, high = max(size[0] for _, size in rows_with_size), min(size[1] for _, size in rows_with_size)
    first = rows_with_size[0][0]
    if low > high:
        implied_sizes = ", ".join(f"{sum(size) / 2:.1f} (line {row.line})" for row, size in rows_with_size)
        heads = ""
        if first.head_dim and first.world_size:
            scale = first.world_size / first.head_dim
            heads = "; heads: " + ", ".join(f"{sum(size) / 2 * scale:.2f}" for _, size in rows_with_size)
        message = (
            f"the TFLOP/s follow from the times for no head count: rate x time / (2 x batch x seq^2 x "
            f"{rates_of(first)[0].passes:g}) gives heads x head_dim / GPUs = {implied_sizes}{heads}: they must be equal"
        )
        return [
            section_flag(rows, "tflops_no_settings", "error", message, None, [sum(s) / 2 for _, s in rows_with_size])
        ]
    missing = [_OPTIONS[name] for name in missing_settings(first) if name in _OPTIONS]
    if not missing:
        return []
    # Where only the number of GPUs is missing, it is solved for.
    hint = ""
    if first.heads and first.head_dim and first.world_size is None:
        gpus = 2 * first.heads * first.head_dim / (low + high)
        hint = f", so {gpus:.2f} GPUs for {first.heads} heads of {first.head_dim}"
    message = (
        f"{len(rows_with_size)} rows cannot be checked in full without {' '.join(missing)}: their TFLOP/s agree with "
        f"one another and imply heads x head_dim / GPUs = {(low + high) / 2:.2f} if causal{hint}"
    )
    return [section_flag(rows, "settings_missing", "note", message, None, (low + high) / 2)]


# --- lengths and growth --------------------------------------------------------------------------------


def _length_flags(rows: list[LogRow], settings: LogSettings) -> list[Flag]:
    """Flag lengths that the log does not state, and stated lengths that a table lacks."""
    stated, line = settings.seqs, settings.lines.get("seqs", 0)
    extra = [row for row in rows if row.seq not in stated]
    if not stated or line > rows[0].line or not extra:
        return []
    words = f"is not among those of line {line} ({', '.join(map(str, stated))})"
    flags = [flag(row, "length_not_stated", "warning", f"seq {row.seq} {words}", row.seq) for row in extra]
    lacking = [seq for seq in stated if seq not in {row.seq for row in rows}]
    if lacking:
        message = f"lacks {', '.join(map(str, lacking))} of line {line}{_factor_hint(rows, stated)}"
        flags.append(section_flag(rows, "length_missing", "warning", message, None, lacking))
    return flags


def _factor_hint(rows: list[LogRow], stated: Sequence[int]) -> str:
    """Return a hint if some lengths differ from the stated ones by one common factor; else an empty text."""
    lengths, stated_lengths = sorted(row.seq or 0 for row in rows), sorted(stated)
    if len(lengths) != len(stated_lengths) or 0 in lengths:
        return ""
    factors = {
        stated_length / length
        for length, stated_length in zip(lengths, stated_lengths, strict=True)
        if length != stated_length
    }
    if len(factors) != 1:
        return ""
    shifted_lines = [
        str(row.line) for row in rows if row.seq in lengths and row.seq != stated_lengths[lengths.index(row.seq)]
    ]
    return f"; with lines {', '.join(shifted_lines)} times {factors.pop():g} they would be those stated"


def _growth_flags(rows: list[LogRow]) -> list[Flag]:
    """Flag times that hardly grow with the sequence length, within each series of comparable rows."""
    flags = []
    for series in grouped(rows, "system", "layout", "ulysses_degree", "ring_degree", "forward_only", "batch"):
        ordered = sorted((row for row in series if row.seq), key=lambda row: row.seq or 0)
        for before, after in pairwise(ordered):
            flags += _not_growing(before, after)
    return flags


def _not_growing(before: LogRow, after: LogRow) -> list[Flag]:
    """Flag the times of two rows that hardly grow although the sequence at least doubles."""
    longer = (after.seq or 0) / (before.seq or 1)
    flags = []
    for name, label in (("forward_ms", "forward"), ("forward_backward_ms", "forward and backward")):
        first, second = getattr(before, name), getattr(after, name)
        if longer >= 2 and first and second and second < GROWTH * first:
            message = (
                f"{label} takes {second:g} ms at seq {after.seq} and {first:g} ms at {before.seq} "
                f"(line {before.line}): {second / first:.2f} times for {longer:g} times the sequence, "
                f"where attention takes {longer**2:g} times"
            )
            flags.append(flag(after, "no_growth", "warning", message, second, round(second / first, 4)))
    return flags


# --- single rows -----------------------------------------------------------------------------------------


def _row_flags(row: LogRow) -> list[Flag]:
    """Return the findings about a single row: times beside OOM, an implausible ratio, a wrong throughput."""
    flags = []
    times = [time for time in (row.forward_ms, row.forward_backward_ms) if time]
    if row.oom and times:
        listed = ", ".join(f"{time:g} ms" for time in times)
        message = f"OOM stands beside times ({listed}): one of them is of another run"
        flags.append(flag(row, "oom_with_times", "error", message, "OOM", times[-1]))
    if len(times) == 2 and not PASS_RATIO[0] <= (ratio := times[1] / times[0]) <= PASS_RATIO[1]:
        message = (
            f"forward and backward {times[1]:g} ms is {ratio:.2f} times forward {times[0]:g} ms, where 3.5 is the "
            "ratio of the FLOPs: set-up may have been timed"
        )
        flags.append(flag(row, "pass_ratio", "warning", message, times[1], round(ratio, 4)))
    if row.throughput_per_s and times:
        flags += _throughput_flags(row, row.throughput_per_s, times[-1])
    return flags


def _throughput_flags(row: LogRow, printed: float, time_ms: float) -> list[Flag]:
    """Flag a throughput that is not the inverse of the latency, within the rounding of both."""
    step = row.steps.get("forward_ms" if row.forward_only else "forward_backward_ms", 0.0)
    slack = row.steps.get("throughput_per_s", 0.0)
    if 1e3 / (time_ms + step) - slack <= printed <= 1e3 / max(time_ms - step, 1e-12) + slack:
        return []
    message = f"{printed:g} iterations/s printed; 1000 / {time_ms:g} ms = {1e3 / time_ms:.3f}"
    return [flag(row, "throughput_mismatch", "error", message, printed, round(1e3 / time_ms, 4))]
