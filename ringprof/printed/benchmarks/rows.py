"""Contents of a benchmark log, as rows, and the audit's results for them.

Times are in ms, memory in MB, rates in TFLOP/s. None stands for a value that is not printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
"""Severity of a flag.

``error``: a contradiction. ``warning``: implausible, or an error near the row. ``note``: information.
"""

Verdict = Literal["agrees", "rounding", "constant", "settings", "inconsistent", "unchecked"]
"""Verdict on the TFLOP/s of a row.

``agrees``: they follow from its time and settings. ``rounding``: they do within the rounding of a coarse time.
``constant``: they differ by a known constant factor. ``settings``: they follow with settings that were solved for.
``inconsistent``: they do not follow. ``unchecked``: figures or settings are missing.
"""

Fields = dict[str, Any]
"""Values for a `LogRow` or `LogSettings` by field name, as far as they were read."""

STATED = ("batch", "heads", "kv_heads", "head_dim", "causal", "world_size", "device")
"""Settings of a row that may be stated elsewhere in the log, or by the user."""


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """Settings that a log states outside its rows, or that a user states; None: not stated."""

    batch: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    hidden: int | None = None
    causal: bool | None = None
    world_size: int | None = None
    device: str | None = None
    seqs: tuple[int, ...] = ()
    """Sequence lengths that the log states it measures."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """Number of the line that each setting was read from."""


@dataclass(frozen=True, kw_only=True)
class LogRow:
    """One printed table row, one Burst block, or a results block that no table row repeats."""

    file: str
    line: int
    format: str
    """``columns``, ``markdown``, ``csv``, ``ring_type``, ``burst``, ``results`` or ``printout``."""
    system: str
    """Normalised system name, ``unknown`` where no heading names one.

    ``burst``, ``double_ring``, ``megatron_cp``, ``ulysses``, ``usp``, ``zigzag``, ``stripe`` or ``ring``.
    """
    label: str
    """Printed heading (untrusted text)."""
    label_line: int | None = None
    seq: int | None = None
    batch: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    causal: bool | None = None
    dtype: str | None = None
    world_size: int | None = None
    placement: str | None = None
    """``head_first`` or ``ring_first``."""
    layout: str | None = None
    """``contiguous``, ``zigzag`` or ``stripe``; None where the row does not name it."""
    ulysses_degree: int | None = None
    ring_degree: int | None = None
    double_ring: bool | None = None
    forward_only: bool | None = None
    forward_ms: float | None = None
    forward_backward_ms: float | None = None
    time_ms: float | None = None
    """Time of passes that the row does not state; never compared with a rate."""
    throughput_per_s: float | None = None
    tflops: float | None = None
    """Rate of forward and backward; of forward alone where `forward_only`."""
    tflops_forward: float | None = None
    tflops_backward: float | None = None
    memory_mb: float | None = None
    oom: bool = False
    missing: bool = False
    """Whether the row prints a mark such as ``x`` in place of a value."""
    device: str | None = None
    columns: tuple[str, ...] = ()
    """Titles of the row's table."""
    steps: Mapping[str, float] = field(default_factory=dict)
    """Value of one unit in the last printed digit of each figure, in the figure's unit."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Source of each setting that the row itself does not print: ``line 13`` or ``option``."""


@dataclass(frozen=True)
class Flag:
    """One finding of the audit, at one line of one file."""

    code: str
    severity: Severity
    file: str
    line: int
    message: str
    """Sentence that describes the finding, with the arithmetic."""
    printed: Any = None
    computed: Any = None


@dataclass(frozen=True)
class BenchmarkLog:
    """Rows of one file, with the settings and findings from the text around them."""

    path: str
    rows: tuple[LogRow, ...]
    settings: LogSettings
    """Last stated value of each setting."""
    flags: tuple[Flag, ...] = ()
    """Findings about the text: files named twice, an end inside a row."""


@dataclass(frozen=True)
class JudgedRow:
    """A row with the results of its audit."""

    row: LogRow
    verdict: Verdict
    computed_tflops: float | None = None
    """Rate per GPU, computed from the row's own time and settings."""
    tflops_per_gpu: float | None = None
    """Printed rate, corrected where it is a total or otherwise off by a constant factor."""


def flag(row: LogRow, code: str, severity: Severity, message: str, printed: Any = None, computed: Any = None) -> Flag:
    """Create a flag at a row's line."""
    return Flag(code, severity, row.file, row.line, message, printed, computed)


def section_flag(
    rows: list[LogRow], code: str, severity: Severity, message: str, printed: Any = None, computed: Any = None
) -> Flag:
    """Create a flag about a whole section, at its heading, or at its first row if it has none."""
    return Flag(code, severity, rows[0].file, rows[0].label_line or rows[0].line, message, printed, computed)


def completed(row: LogRow, settings: LogSettings | LogRow, names: Iterable[str], source: str) -> LogRow:
    """Return a row with the named settings taken from ``settings``, as far as they are known there."""
    added = {name: value for name in names if (value := getattr(settings, name)) is not None}
    return replace(row, **added, sources={**row.sources, **dict.fromkeys(added, source)})
