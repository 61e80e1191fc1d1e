"""Audit of benchmark logs: each row's TFLOP/s computed again, and contradictions reported with the arithmetic.

    forward FLOPs = 4 · batch · seq² · heads · head_dim, half when causal; forward and backward 3.5 times as many
    TFLOP/s per GPU = FLOPs / GPUs / time / 1e12

A printed figure stands for an interval: from half a unit of its last digit below it (if rounded) to a whole unit above
it (if truncated). So a comparison needs no further tolerance. Where it fails, known errors by a constant factor are
tried before a row counts as inconsistent.

Nothing is assumed. Settings that neither the log nor the caller states are requested by a flag, or solved for, which a
flag reports.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from operator import attrgetter
from pathlib import PurePath
from typing import Any

from ringprof.printed.benchmarks.rows import (
    STATED,
    BenchmarkLog,
    Flag,
    JudgedRow,
    LogRow,
    LogSettings,
    Severity,
    Verdict,
    completed,
    flag,
    section_flag,
)
from ringprof.workload.devices import peak_of

SPREAD = 0.10
"""Relative difference between logs above which rows of one configuration are noted."""

_FINE = 0.02
"""Largest rounding of a time, relative to the time, with which it is compared between logs."""
_MAX_COMPARED, _MAX_LISTED = 100, 8
GROWTH = 1.1
"""Smallest expected growth of a time when the sequence at least doubles; attention takes four times as long."""

PASS_RATIO = (1.5, 6.0)
"""Plausible bounds of the time of forward and backward over that of forward; the ratio of the FLOPs is 3.5."""

_SETTINGS = {"batch": "batch", "heads": "heads", "head_dim": "head-dim", "world_size": "world"}
"""Names of settings for ``--setting`` by the fields of a row."""
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
        log_rows = list(log.rows)
        if user_settings is not None:
            for index, log_row in enumerate(log.rows):
                unstated = [name for name in STATED if getattr(log_row, name) is None]
                log_rows[index] = completed(log_row, user_settings, unstated, "option")
        audited, row_flags = _audit_rows(log_rows)
        rows += audited
        flags += [*_section_flags(log_rows, log.settings), *row_flags, *log.flags]
    flags += [peak_flag for row in rows for peak_flag in _above_peak(row)]
    flags += [*_inferred_masks(rows), *_differing_rows(rows, spread)]
    return LogAudit(tuple(rows), _sort_flags(rows, flags))


def with_flags(result: LogAudit, further_flags: Iterable[Flag]) -> LogAudit:
    """Return an audit with additional flags, such as those of the plausibility check."""
    return replace(result, flags=_sort_flags(result.rows, [*result.flags, *further_flags]))


def _sort_flags(rows: Sequence[JudgedRow], flags: Iterable[Flag]) -> tuple[Flag, ...]:
    files = {file: index for index, file in enumerate(dict.fromkeys(item.row.file for item in rows))}
    return tuple(sorted(flags, key=lambda item: (files.get(item.file, 0), item.line, _ORDER[item.severity], item.code)))


def grouped(rows: Iterable[LogRow], key: Callable[[LogRow], Hashable]) -> list[list[LogRow]]:
    """Group the rows with equal keys; rows stay in order, groups are ordered by first row."""
    groups: dict[Hashable, list[LogRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())


# --- rates of one row ------------------------------------------------------------------------------------

BACKWARD_AND_FORWARD = 3.5
HEAD_DIMS = (32, 40, 48, 64, 72, 80, 96, 112, 128, 160, 192, 256)
"""Head dimensions that attention kernels support; only these are tried when solving for settings."""

_EXACT = 2e-4
"""Relative tolerance in addition to rounding: S² against S(S+1) in the FLOPs of a causal mask."""
_COARSE = 0.005
"""Relative value of a time's last digit above which the time counts as coarsely rounded."""

_VERDICTS_BEST_FIRST: tuple[Verdict, ...] = ("agrees", "rounding", "constant", "inconsistent")


@dataclass(frozen=True)
class Rate:
    """A printed rate with its time, the last-digit values of both, and its pass's FLOPs in units of a forward pass."""

    name: str
    tflops: float
    tflops_step: float
    time_ms: float
    time_step: float
    passes: float

    @property
    def work(self) -> tuple[float, float]:
        """Lower and upper bound of the TFLOP that rate and time imply, over as many GPUs as the rate is for."""
        low = (self.tflops - self.tflops_step / 2) * (self.time_ms - self.time_step / 2)
        high = (self.tflops + self.tflops_step) * (self.time_ms + self.time_step)
        return low / 1e3 * (1 - _EXACT), high / 1e3 * (1 + _EXACT)

    @property
    def coarse(self) -> bool:
        """Whether the time is rounded so coarsely that it says little by itself."""
        return self.time_ms > 0 and self.time_step / self.time_ms > _COARSE


def rates_of(row: LogRow) -> list[Rate]:
    """Return the printed rates of a row that have a printed time, with the row's main rate first."""
    main = ("forward and backward", "tflops", "forward_backward_ms", BACKWARD_AND_FORWARD)
    if row.forward_only:
        main = ("forward", "tflops", "forward_ms", 1.0)
    return [
        Rate(name, tflops, row.steps.get(key, 0.0), time, row.steps.get(time_key, 0.0), passes)
        for name, key, time_key, passes in (main, ("forward", "tflops_forward", "forward_ms", 1.0))
        if (tflops := getattr(row, key)) is not None and (time := getattr(row, time_key))
    ]


def missing_settings(row: LogRow) -> list[str]:
    """Return the names of the settings without which a row's TFLOP/s cannot be computed."""
    return [name for name in ("batch", "seq", "heads", "head_dim", "world_size") if getattr(row, name) is None]


def tflop_per_gpu(row: LogRow, rate: Rate, head_dim: int | None = None, *, causal: bool) -> float:
    """Compute the TFLOP per GPU of a rate's pass, for ``head_dim`` or else the stated head dimension.

    The row's settings must be known. Where the row prints 0 for one of them, the result is 0.
    """
    batch, seq, heads, stated_head_dim = row.batch or 0, row.seq or 0, row.heads or 0, row.head_dim or 0
    work = 4e-12 * batch * seq**2 * heads * stated_head_dim / (2 if causal else 1) * rate.passes
    return (work * head_dim / (stated_head_dim or 1) if head_dim else work) / (row.world_size or 1)


def follows(work: float, rate: Rate) -> bool:
    """Return whether a printed rate and its time are consistent with ``work`` in TFLOP."""
    low, high = rate.work
    return low <= work <= high


# --- one row ----------------------------------------------------------------------------------------


def audit_row(row: LogRow) -> tuple[JudgedRow, list[Flag]]:
    """Audit a single row; return it with its verdict, and its flags.

    The verdict is ``unchecked`` where the row lacks figures or settings.
    """
    rates = rates_of(row)
    if not rates or missing_settings(row):
        return JudgedRow(row, "unchecked", None, row.tflops), []
    audited_rates = [_audit_rate(row, rate) for rate in rates]
    # A block with several rates gets the worst verdict of them.
    worst = max((audited.verdict for audited, _ in audited_rates), key=_VERDICTS_BEST_FIRST.index)
    return replace(audited_rates[0][0], verdict=worst), [rate_flag for _, flags in audited_rates for rate_flag in flags]


def _audit_rate(row: LogRow, rate: Rate) -> tuple[JudgedRow, list[Flag]]:
    """Audit one printed rate of a row; return the row with the verdict on that rate, and its flags."""
    # Where no mask is stated, both are tried, causal first, since the figures show which one was used.
    for causal in (True, False) if row.causal is None else (row.causal,):
        work = tflop_per_gpu(row, rate, causal=causal)
        if follows(work, rate):
            computed = work / rate.time_ms * 1e3
            if not rate.coarse:
                return JudgedRow(row, "agrees", computed, rate.tflops), []
            time = work / rate.tflops * 1e3
            message = (
                f"{rate.name}: the time is rounded to {rate.time_ms:g} ms (+-{rate.time_step / 2:g}); "
                f"{work:.4f} TFLOP per GPU / {rate.tflops:g} TFLOP/s = {time:.2f} ms"
            )
            rounded_time = flag(row, "rounded_time", "note", message, rate.time_ms, round(time, 4))
            return JudgedRow(row, "rounding", computed, rate.tflops), [rounded_time]
    work = tflop_per_gpu(row, rate, causal=row.causal is not False)
    computed = work / rate.time_ms * 1e3
    flop = flop_in_words(row, rate, row.head_dim, "" if row.causal is False else " / 2 (causal)")
    arithmetic = f"{rate.name}: {flop} / {row.world_size} GPUs / {rate.time_ms:g} ms = {computed:.2f} TFLOP/s"
    arithmetic += f"; printed {rate.tflops:g}"
    for factor, explanation in _constant_errors(row, rate):
        if factor != 1 and follows(work * factor, rate):
            message = f"{arithmetic}, {factor:g} times that: {explanation}"
            constant_flag = flag(row, "tflops_constant", "warning", message, rate.tflops, round(computed, 4))
            return JudgedRow(row, "constant", computed, rate.tflops / factor), [constant_flag]
    # A rate of 0, or one computed as 0 from a very long time, follows from no number of heads.
    if computed and rate.tflops:
        heads, time = (row.heads or 0) * rate.tflops / computed, work / rate.tflops * 1e3
        arithmetic += f": that needs {heads:.2f} heads, or {time:.2f} ms"
    inconsistent = flag(row, "tflops_inconsistent", "error", arithmetic, rate.tflops, round(computed, 4))
    return JudgedRow(row, "inconsistent", computed, None), [inconsistent]


def _constant_errors(row: LogRow, rate: Rate) -> list[tuple[float, str]]:
    """List the known errors that multiply a rate by a constant, as (factor, explanation), most likely first."""
    world = float(row.world_size or 1)
    halving = 2.0 if row.causal is not False else 0.5
    mask = "without the causal halving" if halving == 2 else "halved as if causal"
    slips = [(world, f"a total over {world:g} GPUs, not per GPU"), (halving, mask)]
    if rate.passes != 1:
        slips.append((1 / rate.passes, "counts the forward pass only"))
        slips.append((3 / rate.passes, "counts backward as 2 forward passes instead of 2.5"))
    slips += [(1e3, "the time is in ms though labelled s"), (1e-3, "the time is in s though labelled ms")]
    pairs = [(a * b, f"{x}, and {y}") for i, (a, x) in enumerate(slips[:3]) for b, y in slips[i + 1 : 3]]
    return slips + pairs


def flop_in_words(row: LogRow, rate: Rate, head_dim: int | None, halved: str) -> str:
    """Format the arithmetic of a rate's pass over all GPUs: ``4 x 1 x 8192^2 x 32 x 128 / 2 x 3.5 FLOP``."""
    times = f" x {rate.passes:g}" if rate.passes != 1 else ""
    return f"4 x {row.batch} x {row.seq}^2 x {row.heads} x {head_dim}{halved}{times} FLOP"


# --- settings that a whole log gets wrong ------------------------------------------------------------


@dataclass(frozen=True)
class SolvedSettings:
    """Settings with which every rate of a group of rows follows from its time."""

    head_dim: int
    causal: bool
    total: bool
    """Whether the printed rates are totals over all GPUs."""

    def tflop(self, row: LogRow, rate: Rate) -> float:
        """Compute the TFLOP of the rate's pass, over as many GPUs as the printed rate is for."""
        return tflop_per_gpu(row, rate, self.head_dim, causal=self.causal) * (row.world_size or 1 if self.total else 1)


def solve(rows: Sequence[LogRow]) -> list[SolvedSettings]:
    """Return the combinations of head dimension, mask and meaning of the rates that fit every row, simplest first."""
    checked = [(row, rate) for row in rows for rate in rates_of(row)[:1]]
    if len(checked) < 2 or any(missing_settings(row) for row, _ in checked):
        return []
    masks = (True, False) if rows[0].causal is None else (rows[0].causal,)
    candidates = [SolvedSettings(dim, mask, total) for mask in masks for total in (False, True) for dim in HEAD_DIMS]
    return [option for option in candidates if all(follows(option.tflop(row, rate), rate) for row, rate in checked)]


# --- verdicts, alone and together ------------------------------------------------------------------------


def _audit_rows(rows: list[LogRow]) -> tuple[list[JudgedRow], list[Flag]]:
    """Audit each row; where all rows under one set of stated settings fail, solve for other settings."""
    audited = {id(row): audit_row(row) for row in rows}
    flags: list[Flag] = []
    # Rows with equal settings that take their head dimension from the same statement in the log.
    settings = attrgetter("heads", "head_dim", "batch", "world_size")
    for group in grouped(rows, lambda row: (row.sources.get("head_dim"), settings(row))):
        checked = [row for row in group if audited[id(row)][0].verdict != "unchecked"]
        verdicts = {audited[id(row)][0].verdict for row in checked}
        if verdicts & {"agrees", "rounding"} or verdicts <= {"constant"}:
            continue
        if solutions := solve(checked):
            flags.append(_solved_flag(checked, solutions))
            best = solutions[0]
            for row in checked:
                rate, world = rates_of(row)[0], row.world_size or 1
                computed = tflop_per_gpu(row, rate, best.head_dim, causal=best.causal) / rate.time_ms * 1e3
                per_gpu = rate.tflops / world if best.total else rate.tflops
                audited[id(row)] = JudgedRow(row, "settings", computed, per_gpu), []
    return [audited[id(row)][0] for row in rows], flags + [row_flag for row in rows for row_flag in audited[id(row)][1]]


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


# --- tables and rows, without settings -----------------------------------------------------------------


def _section_flags(rows: Sequence[LogRow], settings: LogSettings) -> list[Flag]:
    """Return all findings about the tables of one log; rows with one heading and equal columns form a table."""
    flags: list[Flag] = []
    for section in grouped(rows, attrgetter("label_line", "format", "columns")):
        flags += [*_foreign_columns(section), *_conflicting_rates(section), *_length_flags(section, settings)]
        flags += [*_growth_flags(section), *(row_flag for row in section for row_flag in _row_flags(row))]
    return flags + _repeated_rows(rows)


def _repeated_rows(rows: Sequence[LogRow]) -> list[Flag]:
    """Note each stretch of rows that repeats earlier rows of the same log to the last digit."""
    first: dict[tuple[Any, ...], LogRow] = {}
    stretches: list[list[tuple[LogRow, LogRow]]] = []
    in_stretch = False
    for row in rows:
        times = row.forward_ms, row.forward_backward_ms, row.throughput_per_s
        method = row.label if row.format in ("csv", "printout") else ""
        settings = row.system, method, row.seq, row.ulysses_degree, row.ring_degree, row.placement
        earlier = first.setdefault((*settings, *times, row.tflops, row.memory_mb), row)
        is_repeated = earlier is not row and any(value is not None for value in times)
        if is_repeated:
            stretches += [] if in_stretch else [[]]
            stretches[-1].append((row, earlier))
        in_stretch = is_repeated
    flags = []
    for stretch in stretches:
        repeated_lines, earlier_lines = (
            f"line {first}" if first == last else f"lines {first} to {last}"
            for first, last in ((rows[0].line, rows[-1].line) for rows in zip(*stretch, strict=True))
        )
        message = f"{repeated_lines} repeat {earlier_lines} to the last digit: the same measurement, printed again"
        flags.append(flag(stretch[0][0], "repeated_rows", "note", message))
    return flags


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


def _conflicting_rates(rows: list[LogRow]) -> list[Flag]:
    """Flag a table whose rates imply different values of heads x head_dim / GPUs, which must be equal.

    Where they are equal but settings are missing, a note names the options that state them.
    """
    # Bounds that a row's rate and time imply for a causal mask; without one, the true value is half of it.
    rows_with_size: list[tuple[LogRow, tuple[float, float]]] = []
    for row in rows:
        if row.batch and row.seq and (rates := rates_of(row)):
            unit = 2e-12 * row.batch * row.seq**2 * rates[0].passes
            rows_with_size.append((row, (rates[0].work[0] / unit, rates[0].work[1] / unit)))
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
    missing = [f"--setting {_SETTINGS[name]}=N" for name in missing_settings(first) if name in _SETTINGS]
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


def _length_flags(rows: list[LogRow], settings: LogSettings) -> list[Flag]:
    """Flag lengths that the log does not state, and stated lengths that a table lacks."""
    stated, line = settings.seqs, settings.lines.get("seqs", 0)
    extra = [row for row in rows if row.seq not in stated]
    if not stated or line > rows[0].line or not extra:
        return []
    words = f"is not among those of line {line} ({', '.join(map(str, stated))})"
    flags = [flag(row, "length_not_stated", "warning", f"seq {row.seq} {words}", row.seq) for row in extra]
    lacking = [seq for seq in stated if seq not in {row.seq for row in rows}]
    if not lacking:
        return flags
    hint = ""
    lengths, stated_lengths = sorted(row.seq or 0 for row in rows), sorted(stated)
    if len(lengths) == len(stated_lengths) and 0 not in lengths:
        pairs = list(zip(lengths, stated_lengths, strict=True))
        factors = {stated_length / length for length, stated_length in pairs if length != stated_length}
        # Where one common factor separates some lengths from the stated ones, it is named.
        if len(factors) == 1:
            shifted = [row for row in rows if row.seq != stated_lengths[lengths.index(row.seq or 0)]]
            lines = ", ".join(str(row.line) for row in shifted)
            hint = f"; with lines {lines} times {factors.pop():g} they would be those stated"
    message = f"lacks {', '.join(map(str, lacking))} of line {line}{hint}"
    return [*flags, section_flag(rows, "length_missing", "warning", message, None, lacking)]


def _growth_flags(rows: list[LogRow]) -> list[Flag]:
    """Flag times that hardly grow with the sequence length, within each series of comparable rows."""
    flags = []
    names = ("system", "label", "layout", "ulysses_degree", "ring_degree", "forward_only", "batch")
    passes = (("forward_ms", "forward"), ("forward_backward_ms", "forward and backward"))
    for series in grouped(rows, attrgetter(*names)):
        ordered = sorted((row for row in series if row.seq), key=lambda row: row.seq or 0)
        for (before, after), (name, label) in product(pairwise(ordered), passes):
            longer = (after.seq or 0) / (before.seq or 1)
            first, second = getattr(before, name), getattr(after, name)
            if longer >= 2 and first and second and second < GROWTH * first:
                message = (
                    f"{label} takes {second:g} ms at seq {after.seq} and {first:g} ms at {before.seq} "
                    f"(line {before.line}): {second / first:.2f} times for {longer:g} times the sequence, "
                    f"where attention takes {longer**2:g} times"
                )
                flags.append(flag(after, "no_growth", "warning", message, second, round(second / first, 4)))
    return flags


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
    if (printed := row.throughput_per_s) and times:
        # A throughput is the inverse of the latency, within the rounding of both.
        time_ms = times[-1]
        step = row.steps.get("forward_ms" if row.forward_only else "forward_backward_ms", 0.0)
        slack = row.steps.get("throughput_per_s", 0.0)
        if not 1e3 / (time_ms + step) - slack <= printed <= 1e3 / max(time_ms - step, 1e-12) + slack:
            message = f"{printed:g} iterations/s printed; 1000 / {time_ms:g} ms = {1e3 / time_ms:.3f}"
            flags.append(flag(row, "throughput_mismatch", "error", message, printed, round(1e3 / time_ms, 4)))
    return flags


# --- between logs ----------------------------------------------------------------------------------------


def _differing_rows(rows: list[JudgedRow], spread: float) -> list[Flag]:
    """Flag configurations that were measured more than once, with figures that differ by more than ``spread``."""
    known = (audited for audited in rows if audited.verdict != "inconsistent" and audited.row.system != "unknown")
    usable = {id(audited.row): audited for audited in known}
    names = ("system", "seq", "batch", "layout", "ulysses_degree", "ring_degree", "forward_only")
    flags = []
    for group in grouped((audited.row for audited in usable.values()), attrgetter(*names)):
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
    # Methods of one table.
    if (a.file, a.label_line) == (b.file, b.label_line) and a.label != b.label:
        return False
    # A placement that is not stated may be either one, and the two placements differ widely in speed.
    if a.placement != b.placement:
        return False
    values = attrgetter("heads", "kv_heads", "head_dim", "causal", "world_size", "dtype", "device", "double_ring")
    return all(x is None or y is None or x == y for x, y in zip(values(a), values(b), strict=True))
