"""What an audit of benchmark rows finds: flags, and one verdict a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ringprof.benchmark_logs.rows import LogRow

Severity = Literal["error", "warning", "note"]
"""``error``: cannot be right. ``warning``: hardly right, or wrong around the row. ``note``: good to know."""

VERDICTS = ("agrees", "rounding", "constant", "settings", "inconsistent", "unchecked")
"""Of the TFLOP/s of a row: they follow from its time and settings; within the rounding of the printed time; but for a
known constant; but for settings that were solved for; not at all; or too little is known."""


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
class Audited:
    """A row with what was made of it."""

    row: LogRow
    verdict: str
    computed_tflops: float | None = None
    """Per GPU, from the row's own time and settings."""
    tflops_per_gpu: float | None = None
    """As printed, or corrected where the printed figure is a total or otherwise off by a constant."""
    stated: Mapping[str, Any] = field(default_factory=dict)
    """What a setting was solved to, where it is not the one stated."""


def flag(row: LogRow, code: str, severity: Severity, message: str, printed: Any = None, computed: Any = None) -> Flag:
    """A flag at a row's own line."""
    return Flag(code, severity, row.file, row.line, message, printed, computed)


def at_label(rows: list[LogRow]) -> int:
    """The line that a finding about a whole section belongs to: its heading, else its first row."""
    return rows[0].label_line or rows[0].line
