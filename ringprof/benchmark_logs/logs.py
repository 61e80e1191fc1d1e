"""Public function `ringprof.logs`, and its result: benchmark logs as one audited table."""

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
from ringprof.common.json_object import JsonObject
from ringprof.common.limits import MEMORY_BYTES, Limits
from ringprof.common.validation import refuse_below_one
from ringprof.report.text import TextStyle, csv_text

if TYPE_CHECKING:
    import pandas as pd


class BenchmarkLogs:
    """Benchmark logs, read and audited. Created by `logs`."""

    def __init__(
        self, benchmark_logs: Sequence[BenchmarkLog], user_settings: LogSettings | None = None, spread: float = SPREAD
    ) -> None:
        self._audit: LogAudit = audit(benchmark_logs, user_settings, spread)

    @property
    def name(self) -> str:
        """Names of the files that were read, joined by commas."""
        return ", ".join(dict.fromkeys(audited.row.file for audited in self.rows))

    @property
    def rows(self) -> tuple[JudgedRow, ...]:
        """Every printed row with its verdict, by file and line."""
        return self._audit.rows

    @property
    def flags(self) -> tuple[Flag, ...]:
        """Findings of the audit by file and line, each with the arithmetic that shows it."""
        return self._audit.flags

    def add(self, further_flags: Iterable[Flag]) -> None:
        """Add further flags, sorted by file and line among the others."""
        self._audit = with_flags(self._audit, further_flags)

    def frame(self) -> pd.DataFrame:
        """Return a data frame with one row per printed row; a value that is not printed is missing.

        The columns are `ringprof.benchmark_logs.show.LOG_COLUMNS`.
        """
        import pandas as pd  # imported here, because the import takes longer than reading most logs

        return pd.DataFrame(map(show.record_of, self.rows), columns=list(show.LOG_COLUMNS)).convert_dtypes()

    def report(self) -> JsonObject:
        """Return the report of ``--format json``, schema ``ringprof.logs/1``."""
        return show.audit_dict(self._audit)

    def entries(self, label: str) -> list[Measurement]:
        """Return each row that has a figure as one side of a comparison.

        Rows are labelled by file and line; ``label`` is ignored.
        """
        return [show.entry_of_row(audited.row) for audited in self.rows if not audited.row.missing]

    def to_csv(self) -> str:
        """Return the rows as CSV with a header, safe to open in a spreadsheet."""
        return csv_text(show.LOG_COLUMNS, (show.record_of(audited).values() for audited in self.rows))

    def to_terminal(self, style: TextStyle | None = None) -> str:
        """Return rows and flags as text; without a style, tables are as wide as they need."""
        return show.audit_text(self._audit, style)

    def __repr__(self) -> str:
        files = len({audited.row.file for audited in self.rows})
        return f"<ringprof.BenchmarkLogs of {files} files: {len(self.rows)} rows, {len(self.flags)} flags>"

    def _repr_html_(self) -> str:
        """Return the terminal report as HTML, for notebooks."""
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
    """Read benchmark logs and audit them: every row's TFLOP/s are computed again from its own time and settings.

    ``batch``, ``heads`` (query heads), ``head_dim``, ``world`` (number of GPUs), ``causal`` and ``device`` (GPU model,
    such as ``A800``) apply where a log does not state them. Nothing else is assumed. ``spread`` is the largest relative
    difference between logs that is not flagged for one configuration. ``memory_bytes`` is the most memory that reading
    one log may take. Raises `InputError` for a log that cannot be read or holds no benchmark rows, and `UsageError` for
    a count below 1.
    """
    refuse_below_one({"batch": batch, "heads": heads, "head_dim": head_dim, "world": world})
    path_list = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    user_settings = LogSettings(
        batch=batch, heads=heads, head_dim=head_dim, world_size=world, causal=causal, device=device
    )
    limits = Limits(memory_bytes)
    benchmark_logs = [read_log(path, limits) for path in dict.fromkeys(os.fspath(path) for path in path_list)]
    return BenchmarkLogs(benchmark_logs, user_settings, spread)
