"""What a benchmark log says, as rows, and what the audit says of them.

Times are in ms, memory in MB, rates in TFLOP/s; None stands for what is not printed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
"""``error``: cannot be right. ``warning``: hardly right, or wrong around the row. ``note``: good to know."""

Verdict = Literal["agrees", "rounding", "constant", "settings", "inconsistent", "unchecked"]
"""Of the TFLOP/s of a row: they follow from its time and settings; within the rounding of the printed time; but for a
known constant; but for settings that were solved for; not at all; or too little is known."""

Fields = dict[str, Any]
"""Fields of a `LogRow` or of `LogSettings`, as far as they are read."""

STATED = ("batch", "heads", "kv_heads", "head_dim", "causal", "world_size", "device")
"""Settings that hold for rows though they stand elsewhere, or come from the user."""


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """What a log states about its runs outside the rows, or a user does; None: not stated."""

    batch: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    hidden: int | None = None
    causal: bool | None = None
    world_size: int | None = None
    device: str | None = None
    seqs: tuple[int, ...] = ()
    """Sequence lengths that the log says it measures."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """Line that each was read from."""


@dataclass(frozen=True, kw_only=True)
class LogRow:
    """One printed table row, one Burst block, or a results block that no table row repeats."""

    file: str
    line: int
    format: str
    """``columns``, ``markdown``, ``ring_type``, ``burst`` or ``results``."""
    system: str
    """Normalised: ``burst``, ``double_ring``, ``megatron_cp``, ``ulysses``, ``usp``, ``zigzag``, ``stripe``, ``ring``;
    ``unknown`` where no heading tells."""
    label: str
    """The heading as printed (untrusted text)."""
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
    """``contiguous``, ``zigzag`` or ``stripe``, where a row names it."""
    ulysses_degree: int | None = None
    ring_degree: int | None = None
    double_ring: bool | None = None
    forward_only: bool | None = None
    forward_ms: float | None = None
    forward_backward_ms: float | None = None
    throughput_per_s: float | None = None
    tflops: float | None = None
    """Of forward and backward; of forward where `forward_only`."""
    tflops_forward: float | None = None
    tflops_backward: float | None = None
    memory_mb: float | None = None
    oom: bool = False
    missing: bool = False
    """The row stands for a measurement that has no value (``x``)."""
    device: str | None = None
    columns: tuple[str, ...] = ()
    """Titles of its table."""
    steps: Mapping[str, float] = field(default_factory=dict)
    """Worth of the last printed digit of each figure, in its own unit."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where a setting comes from that the row itself does not print: ``line 13`` or ``option``."""


@dataclass(frozen=True)
class Flag:
    """One finding, at one line of one file."""

    code: str
    severity: Severity
    file: str
    line: int
    message: str
    """With the arithmetic."""
    printed: Any = None
    computed: Any = None


@dataclass(frozen=True)
class BenchmarkLog:
    """One file's rows, with what it says around them."""

    path: str
    rows: tuple[LogRow, ...]
    settings: LogSettings
    """The last stated of each."""
    flags: tuple[Flag, ...] = ()
    """What is odd about its text: files named twice, an end inside a row."""


@dataclass(frozen=True)
class JudgedRow:
    """A row with what was made of it."""

    row: LogRow
    verdict: Verdict
    computed_tflops: float | None = None
    """Per GPU, from the row's own time and settings."""
    tflops_per_gpu: float | None = None
    """As printed, or corrected where the printed figure is a total or otherwise off by a constant."""


def flag(row: LogRow, code: str, severity: Severity, message: str, printed: Any = None, computed: Any = None) -> Flag:
    """A flag at a row's own line."""
    return Flag(code, severity, row.file, row.line, message, printed, computed)


def section_flag(
    rows: list[LogRow], code: str, severity: Severity, message: str, printed: Any = None, computed: Any = None
) -> Flag:
    """A flag about a whole section: at its heading, else at its first row."""
    return Flag(code, severity, rows[0].file, rows[0].label_line or rows[0].line, message, printed, computed)
