"""Public function `ringprof.logs`, and its result: benchmark logs as one audited table, as text, JSON and CSV."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from ringprof.analysis.findings.metric import Measurement, Metric
from ringprof.common.json_object import JsonObject
from ringprof.common.limits import MEMORY_BYTES, Limits
from ringprof.common.validation import refuse_below_one
from ringprof.printed.benchmarks.audit import SPREAD, LogAudit, audit, with_flags
from ringprof.printed.benchmarks.read import read_log
from ringprof.printed.benchmarks.rows import BenchmarkLog, Flag, JudgedRow, LogRow, LogSettings
from ringprof.report.result import Result
from ringprof.report.tables import Column, text_table
from ringprof.report.text import TextStyle, clean, csv_text, or_dash

if TYPE_CHECKING:
    import pandas as pd

LOGS_SCHEMA = "ringprof.logs/1"

LOG_COLUMNS = (
    "file", "line", "format", "system", "label", "seq", "batch", "heads", "kv_heads", "head_dim", "causal", "dtype",
    "world_size", "placement", "layout", "ulysses_degree", "ring_degree", "double_ring", "forward_only", "device",
    "forward_ms", "forward_backward_ms", "time_ms", "throughput_per_s", "tflops", "tflops_forward", "tflops_backward",
    "memory_mb", "oom", "missing", "computed_tflops", "tflops_per_gpu", "verdict",
)  # fmt: skip
"""Columns of the frame, the CSV and the rows in JSON.

Times are in ms, memory in MB, ``throughput_per_s`` in iterations per second, rates in TFLOP/s. ``tflops`` is the
printed rate, ``computed_tflops`` the rate per GPU from the row's own time, and ``tflops_per_gpu`` the printed rate,
corrected by a known constant factor.
"""

MAX_SEPARATE_FLAGS = 5
"""Most flags of one code and file that are printed as separate paragraphs."""
_COLUMNS = (
    Column("system"), Column("line"), Column("B", drop=1), Column("seq"), Column("fwd ms", drop=3),
    Column("fwd+bwd\nms"), Column("ms"), Column("it/s"), Column("memory\nMB", drop=2), Column("TFLOP/s"),
    Column("fwd\nTFLOP/s", drop=4), Column("computed"),
    Column("verdict", left=True),
)  # fmt: skip
_ROW_FIELDS = frozenset(field.name for field in fields(LogRow))


class BenchmarkLogs(Result):
    """Benchmark logs, read and audited. Created by `logs`. The columns of the data frame are `LOG_COLUMNS`."""

    _frames = ("rows",)

    def __init__(
        self, benchmark_logs: Sequence[BenchmarkLog], user_settings: LogSettings | None = None,
        spread: float | None = None,
    ) -> None:  # fmt: skip
        self._audit: LogAudit = audit(benchmark_logs, user_settings, SPREAD if spread is None else spread)

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

    @property
    def verdict(self) -> list[str]:
        """Number of flags by severity, then a sentence per flag, with similar ones joined."""
        return _flag_lines(self.flags)

    def _frame(self, name: str) -> pd.DataFrame:
        import pandas as pd  # imported here, because the import takes longer than reading most logs

        return pd.DataFrame(map(record_of, self.rows), columns=list(LOG_COLUMNS)).convert_dtypes()

    def report(self) -> JsonObject:
        """Return the report of ``--format json``, schema ``ringprof.logs/1``: null for values that are not printed."""
        rows, flags = [record_of(audited) for audited in self.rows], [asdict(flag) for flag in self.flags]
        return {"schema": LOGS_SCHEMA, "rows": rows, "flags": flags}

    def entries(self, label: str) -> list[Measurement]:
        """Return each row that has a figure as one side of a comparison.

        Rows are labelled by file and line; ``label`` is ignored.
        """
        return [entry_of_row(audited.row) for audited in self.rows if not audited.row.missing]

    def to_csv(self) -> str:
        """Return the rows as CSV with a header, safe to open in a spreadsheet."""
        return csv_text(LOG_COLUMNS, (record_of(audited).values() for audited in self.rows))

    def to_terminal(self, style: TextStyle | None = None) -> str:
        """Return rows and flags as text; without a style, tables are as wide as they need."""
        style = style or TextStyle(wide_tables=True)
        files: dict[str, list[JudgedRow]] = {}
        for audited in self.rows:
            files.setdefault(audited.row.file, []).append(audited)
        blocks = [
            f"{clean(file)} · {len(rows)} row{'s' * (len(rows) != 1)}\n" + _table(rows, style)
            for file, rows in files.items()
        ]
        return style.finish("\n\n".join([*blocks, style.fit("\n".join(self.verdict))]))

    def __repr__(self) -> str:
        files = len({audited.row.file for audited in self.rows})
        return f"<ringprof.BenchmarkLogs of {files} files: {len(self.rows)} rows, {len(self.flags)} flags>"


def logs(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], *, batch: int | None = None,
    heads: int | None = None, head_dim: int | None = None, world: int | None = None, causal: bool | None = None,
    device: str | None = None, spread: float = SPREAD, memory_bytes: int = MEMORY_BYTES,
) -> BenchmarkLogs:  # fmt: skip
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


def _table(rows: Sequence[JudgedRow], style: TextStyle) -> str:
    """Format the table of some rows, without columns that are empty in every row."""
    cells = [*map(_cells, rows)]
    used = [index for index, column in enumerate(_COLUMNS) if any(row[index] != "-" for row in cells)]
    return text_table([_COLUMNS[index] for index in used], [[row[index] for index in used] for row in cells], style)


def _cells(audited: JudgedRow) -> list[str]:
    """Format the cells of one row, in the order of `_COLUMNS`."""
    row = audited.row
    tflops = "OOM" if row.oom else "x" if row.missing else or_dash(row.tflops, ".2f")
    per_second = None if row.forward_ms or row.forward_backward_ms else row.throughput_per_s
    times = row.forward_ms, row.forward_backward_ms, row.time_ms, per_second, row.memory_mb
    integers = (or_dash(value, "d") for value in (row.line, row.batch, row.seq))
    forward = row.tflops_forward if row.format == "printout" else None
    rates = or_dash(forward, ".2f"), or_dash(audited.computed_tflops, ".2f")
    return [_system(row), *integers, *(or_dash(time, ".2f") for time in times), tflops, *rates, audited.verdict]


def _system(row: LogRow) -> str:
    """Format name, layout, degrees and placement of a row's system, as far as the log states them."""
    parts = [row.system if row.system != "unknown" else clean(row.label)[:16] or "unknown"]
    parts += [row.layout] if row.layout and row.layout != row.system else []
    parts += [f"u{row.ulysses_degree} r{row.ring_degree}"] if row.ulysses_degree and row.ring_degree else []
    parts += [row.placement.replace("_", "-")] if row.placement else []
    return " ".join(parts)


def _flag_lines(flags: Sequence[Flag]) -> list[str]:
    """Format the number of flags by severity, and one paragraph per flag, with similar ones joined."""
    if not flags:
        return ["nothing to flag"]
    counts = {name: sum(flag.severity == name for flag in flags) for name in ("error", "warning", "note")}
    lines = ["flags: " + ", ".join(f"{count} {name}{'s' * (count != 1)}" for name, count in counts.items())]
    alike: dict[tuple[str, str], list[Flag]] = {}
    for flag in flags:
        alike.setdefault((flag.file, flag.code), []).append(flag)
    for flag in flags:
        first, *others = alike[flag.file, flag.code]
        if len(others) < MAX_SEPARATE_FLAGS:
            suffix = ""
        elif flag is first:
            suffix = f"; and {len(others)} more like it, lines {', '.join(str(other.line) for other in others)}"
        else:
            continue
        lines.append(f"{flag.severity}: {flag.file}:{flag.line}: {flag.message}{suffix} [{flag.code}]")
    return lines


def record_of(audited: JudgedRow) -> JsonObject:
    """Return one row as plain values in the order of `LOG_COLUMNS`; None for a value that is not printed."""
    values = {name: getattr(audited.row if name in _ROW_FIELDS else audited, name) for name in LOG_COLUMNS}
    return {name: value if value != "" else None for name, value in values.items()}


def entry_of_row(row: LogRow) -> Measurement:
    """Build one side of a comparison from a row, with the printed TFLOP/s."""
    kv_heads = row.kv_heads if row.kv_heads is not None else row.heads
    numbers = {"seq": row.seq, "batch": row.batch, "heads": row.heads, "kv_heads": kv_heads, "head_dim": row.head_dim}
    settings = {
        "strategy": row.system, **{name: None if value is None else str(value) for name, value in numbers.items()},
        "causal": None if row.causal is None else str(row.causal).lower(), "dtype": row.dtype,
        "world_size": None if row.world_size is None else str(row.world_size),
        "passes": "forward" if row.forward_only else "forward and backward", "device": row.device,
    }  # fmt: skip
    times = {"forward_ms": row.forward_ms, "iteration_ms": row.forward_backward_ms}
    figures = {
        name: Metric(value, "ms", higher_is_better=False, depends_on_work=True)
        for name, value in times.items()
        if value is not None
    }
    if row.tflops is not None:
        figures["tflops"] = Metric(row.tflops, "TFLOP/s", higher_is_better=True)
    if row.memory_mb is not None:
        figures["peak_memory_mb"] = Metric(row.memory_mb, "MB", higher_is_better=False, depends_on_work=True)
    return Measurement(f"{row.file}:{row.line}", "log", settings, figures)
