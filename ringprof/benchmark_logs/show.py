"""Audited benchmark logs as text, JSON (schema ``ringprof.logs/1``) and entries of a comparison.

Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields

from ringprof.analysis.findings.metric import Measurement, Metric
from ringprof.benchmark_logs.audit import LogAudit
from ringprof.benchmark_logs.rows import Flag, JudgedRow, LogRow
from ringprof.common.json_object import JsonObject
from ringprof.report.tables import Column, text_table
from ringprof.report.text import TextStyle, clean, or_dash

LOGS_SCHEMA = "ringprof.logs/1"

LOG_COLUMNS = (
    "file", "line", "format", "system", "label", "seq", "batch", "heads", "kv_heads", "head_dim", "causal", "dtype",
    "world_size", "placement", "layout", "ulysses_degree", "ring_degree", "double_ring", "forward_only", "device",
    "forward_ms", "forward_backward_ms", "throughput_per_s", "tflops", "tflops_forward", "tflops_backward",
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
    Column("fwd+bwd\nms"), Column("memory\nMB", drop=2), Column("TFLOP/s"), Column("computed"),
    Column("verdict", left=True),
)  # fmt: skip
_ROW_FIELDS = frozenset(field.name for field in fields(LogRow))


# --- terminal ---------------------------------------------------------------------------------------


def audit_text(audit: LogAudit, style: TextStyle | None = None) -> str:
    """Format the rows of each file with printed and computed figures, then the flags."""
    style = style or TextStyle(wide_tables=True)
    files: dict[str, list[JudgedRow]] = {}
    for audited in audit.rows:
        files.setdefault(audited.row.file, []).append(audited)
    blocks = [
        f"{clean(file)} · {len(rows)} row{'s' * (len(rows) != 1)}\n" + _table(rows, style)
        for file, rows in files.items()
    ]
    blocks.append(style.fit("\n".join(_flag_lines(audit.flags))))
    return style.finish("\n\n".join(blocks))


def _table(rows: Sequence[JudgedRow], style: TextStyle) -> str:
    """Format the table of some rows, without columns that are empty in every row."""
    cells = [*map(_cells, rows)]
    used = [index for index, column in enumerate(_COLUMNS) if any(row[index] != "-" for row in cells)]
    return text_table([_COLUMNS[index] for index in used], [[row[index] for index in used] for row in cells], style)


def _cells(audited: JudgedRow) -> list[str]:
    """Format the cells of one row, in the order of `_COLUMNS`."""
    row = audited.row
    tflops = "OOM" if row.oom else "x" if row.missing else or_dash(row.tflops, ".2f")
    times = (or_dash(value, ".2f") for value in (row.forward_ms, row.forward_backward_ms, row.memory_mb))
    integers = (or_dash(value, "d") for value in (row.line, row.batch, row.seq))
    return [_system(row), *integers, *times, tflops, or_dash(audited.computed_tflops, ".2f"), audited.verdict]


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


# --- data -------------------------------------------------------------------------------------------


def record_of(audited: JudgedRow) -> JsonObject:
    """Return one row as plain values in the order of `LOG_COLUMNS`; None for a value that is not printed."""
    values = {name: getattr(audited.row if name in _ROW_FIELDS else audited, name) for name in LOG_COLUMNS}
    return {name: value if value != "" else None for name, value in values.items()}


def audit_dict(audit: LogAudit) -> JsonObject:
    """Return the whole audit: ``rows`` with the fields `LOG_COLUMNS`, null for values not printed, and ``flags``."""
    rows = [record_of(audited) for audited in audit.rows]
    return {"schema": LOGS_SCHEMA, "rows": rows, "flags": [asdict(flag) for flag in audit.flags]}


def entry_of_row(row: LogRow) -> Measurement:
    """Build one side of a comparison from a row, with the printed TFLOP/s."""
    kv_heads = row.kv_heads if row.kv_heads is not None else row.heads
    numbers = {"seq": row.seq, "batch": row.batch, "heads": row.heads, "kv_heads": kv_heads, "head_dim": row.head_dim}
    settings = {
        "strategy": row.system,
        **{name: None if value is None else str(value) for name, value in numbers.items()},
        "causal": None if row.causal is None else str(row.causal).lower(),
        "dtype": row.dtype,
        "world_size": None if row.world_size is None else str(row.world_size),
        "passes": "forward" if row.forward_only else "forward and backward",
        "device": row.device,
    }
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
