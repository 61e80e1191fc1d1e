"""`ringprof.logs`: benchmark logs as one audited table."""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ringprof.analysis.findings.metric import Measurement
from ringprof.benchmark_logs import show
from ringprof.benchmark_logs.audit import SPREAD, LogAudit, audit, with_flags
from ringprof.benchmark_logs.read import read_log
from ringprof.benchmark_logs.rows import BenchmarkLog, Flag, JudgedRow, LogSettings
from ringprof.json_object import JsonObject
from ringprof.limits import MEMORY_BYTES, Limits
from ringprof.report.text import TextStyle, csv_text
from ringprof.validation import refuse_below_one

if TYPE_CHECKING:
    import pandas as pd


class BenchmarkLogs:
    """Benchmark logs, read and audited. Made by `logs`."""

    def __init__(self, read: Sequence[BenchmarkLog], given: LogSettings | None = None, spread: float = SPREAD) -> None:
        self._audit: LogAudit = audit(read, given, spread)

    @property
    def name(self) -> str:
        """The files that were read."""
        return ", ".join(dict.fromkeys(one.row.file for one in self.rows))

    @property
    def rows(self) -> tuple[JudgedRow, ...]:
        """Every printed row with its verdict, by file and line."""
        return self._audit.rows

    @property
    def flags(self) -> tuple[Flag, ...]:
        """What is odd, by file and line, each with the arithmetic that shows it."""
        return self._audit.flags

    def add(self, more: Iterable[Flag]) -> None:
        """Take in flags that others have found, each at its place."""
        self._audit = with_flags(self._audit, more)

    def frame(self) -> pd.DataFrame:
        """A row a printed row; columns `ringprof.benchmark_logs.show.LOG_COLUMNS`; what is not printed is missing."""
        import pandas as pd  # here, because it takes longer to import than most logs to read

        return pd.DataFrame(map(show.record_of, self.rows), columns=list(show.LOG_COLUMNS)).convert_dtypes()

    def report(self) -> JsonObject:
        """The report of ``--format json``, schema ``ringprof.logs/1``."""
        return show.audit_dict(self._audit)

    def entries(self, label: str) -> list[Measurement]:
        """Each row that has a figure as one side of a comparison, by file and line: ``label`` is not needed."""
        return [show.entry_of_row(one.row) for one in self.rows if not one.row.missing]

    def to_csv(self) -> str:
        """The rows as CSV with a header, safe to open in a spreadsheet."""
        return csv_text(show.LOG_COLUMNS, (show.record_of(one).values() for one in self.rows))

    def to_terminal(self, style: TextStyle | None = None) -> str:
        """Rows and flags for people, as text; without a style as wide as they need."""
        return show.audit_text(self._audit, style)

    def __repr__(self) -> str:
        files = len({one.row.file for one in self.rows})
        return f"<ringprof.BenchmarkLogs of {files} files: {len(self.rows)} rows, {len(self.flags)} flags>"

    def _repr_html_(self) -> str:
        """The terminal report, for notebooks."""
        return f'<pre style="line-height: 1.2">{html.escape(self.to_terminal())}</pre>'


def logs(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    batch: int | None = None,
    heads: int | None = None,
    head_dim: int | None = None,
    world: int | None = None,
    causal: bool | None = None,
    device: str | None = None,
    spread: float = SPREAD,
    memory_bytes: int = MEMORY_BYTES,
) -> BenchmarkLogs:
    """Read benchmark logs and audit them: every row's TFLOP/s computed again from its own time and settings.

    ``batch`` to ``device`` hold where a log does not state them: query heads, GPUs (``world``), the mask, the model of
    GPU (such as ``A800``). Nothing else is assumed. ``spread`` is the relative difference up to which one configuration
    may differ between logs, ``memory_bytes`` what reading one may take. Raises `InputError` where one cannot be read or
    holds no benchmark rows, `UsageError` for a count below 1.
    """
    refuse_below_one({"batch": batch, "heads": heads, "head_dim": head_dim, "world": world})
    listed = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    given = LogSettings(batch=batch, heads=heads, head_dim=head_dim, world_size=world, causal=causal, device=device)
    limits = Limits(memory_bytes)
    read = [read_log(path, limits) for path in dict.fromkeys(os.fspath(path) for path in listed)]
    return BenchmarkLogs(read, given, spread)
