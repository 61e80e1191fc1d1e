"""Audited benchmark logs as text, JSON (schema ``ringprof.logs/1``) and entries of a comparison; no arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields

from ringprof.analysis.findings.metric import Measurement, Metric
from ringprof.benchmark_logs.audit import LogAudit
from ringprof.benchmark_logs.rows import Flag, JudgedRow, LogRow
from ringprof.json_object import JsonObject
from ringprof.report.tables import Column, text_table
from ringprof.report.text import TextStyle, clean, or_dash

LOGS_SCHEMA = "ringprof.logs/1"

LOG_COLUMNS = (
    "file", "line", "format", "system", "label", "seq", "batch", "heads", "kv_heads", "head_dim", "causal", "dtype",
    "world_size", "placement", "layout", "ulysses_degree", "ring_degree", "double_ring", "forward_only", "device",
    "forward_ms", "forward_backward_ms", "throughput_per_s", "tflops", "tflops_forward", "tflops_backward",
    "memory_mb", "oom", "missing", "computed_tflops", "tflops_per_gpu", "verdict",
)  # fmt: skip
"""Of the frame, the CSV and the rows in JSON. Times in ms, memory in MB, ``throughput_per_s`` in iterations a second;
``tflops`` as printed, ``computed_tflops`` per GPU from the row's own time, ``tflops_per_gpu`` as printed or corrected
by a known constant; all rates in TFLOP/s."""

MOST_ALIKE = 5
"""Flags of one kind and file up to which each has a paragraph of its own."""
_COLUMNS = (
    Column("system"), Column("line"), Column("B", drop=1), Column("seq"), Column("fwd ms", drop=3),
    Column("fwd+bwd\nms"), Column("memory\nMB", drop=2), Column("TFLOP/s"), Column("computed"),
    Column("verdict", left=True),
)  # fmt: skip
_OF_ROW = frozenset(field.name for field in fields(LogRow))


# --- terminal ---------------------------------------------------------------------------------------


def audit_text(audit: LogAudit, style: TextStyle | None = None) -> str:
    """The rows of each file, then the flags; figures as printed, beside them what they come to."""
    style = style or TextStyle(wide_tables=True)
    files: dict[str, list[JudgedRow]] = {}
    for one in audit.rows:
        files.setdefault(one.row.file, []).append(one)
    blocks = [
        f"{clean(file)} · {len(rows)} row{'s' * (len(rows) != 1)}\n" + _table(rows, style)
        for file, rows in files.items()
    ]
    blocks.append(style.fit("\n".join(_flag_lines(audit.flags))))
    return style.finish("\n\n".join(blocks))


def _table(rows: Sequence[JudgedRow], style: TextStyle) -> str:
    """Without columns that say nothing of any row."""
    cells = [*map(_cells, rows)]
    said = [place for place, column in enumerate(_COLUMNS) if any(row[place] != "-" for row in cells)]
    return text_table([_COLUMNS[place] for place in said], [[row[place] for place in said] for row in cells], style)


def _cells(one: JudgedRow) -> list[str]:
    row = one.row
    tflops = "OOM" if row.oom else "x" if row.missing else or_dash(row.tflops, ".2f")
    times = (or_dash(value, ".2f") for value in (row.forward_ms, row.forward_backward_ms, row.memory_mb))
    whole = (or_dash(value, "d") for value in (row.line, row.batch, row.seq))
    return [_system(row), *whole, *times, tflops, or_dash(one.computed_tflops, ".2f"), one.verdict]


def _system(row: LogRow) -> str:
    """Name, layout, degrees and placement, as far as the log states them."""
    parts = [row.system if row.system != "unknown" else clean(row.label)[:16] or "unknown"]
    parts += [row.layout] if row.layout and row.layout != row.system else []
    parts += [f"u{row.ulysses_degree} r{row.ring_degree}"] if row.ulysses_degree and row.ring_degree else []
    parts += [row.placement.replace("_", "-")] if row.placement else []
    return " ".join(parts)


def _flag_lines(flags: Sequence[Flag]) -> list[str]:
    if not flags:
        return ["nothing to flag"]
    counts = {name: sum(flag.severity == name for flag in flags) for name in ("error", "warning", "note")}
    lines = ["flags: " + ", ".join(f"{count} {name}{'s' * (count != 1)}" for name, count in counts.items())]
    alike: dict[tuple[str, str], list[Flag]] = {}
    for flag in flags:
        alike.setdefault((flag.file, flag.code), []).append(flag)
    for flag in flags:
        first, *others = alike[flag.file, flag.code]
        if len(others) < MOST_ALIKE:
            more = ""
        elif flag is first:
            more = f"; and {len(others)} more like it, lines {', '.join(str(other.line) for other in others)}"
        else:
            continue
        lines.append(f"{flag.severity}: {flag.file}:{flag.line}: {flag.message}{more} [{flag.code}]")
    return lines


# --- data -------------------------------------------------------------------------------------------


def record_of(one: JudgedRow) -> JsonObject:
    """One row as plain values in the order of `LOG_COLUMNS`, None for what is not printed."""
    values = {name: getattr(one.row if name in _OF_ROW else one, name) for name in LOG_COLUMNS}
    return {name: value if value != "" else None for name, value in values.items()}


def audit_dict(audit: LogAudit) -> JsonObject:
    """The whole audit: ``rows`` with the fields `LOG_COLUMNS`, null for what is not printed, and ``flags``."""
    rows = [record_of(one) for one in audit.rows]
    return {"schema": LOGS_SCHEMA, "rows": rows, "flags": [asdict(flag) for flag in audit.flags]}


def entry_of_row(row: LogRow) -> Measurement:
    """A row as one side of a comparison. Its TFLOP/s are what it printed."""
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
