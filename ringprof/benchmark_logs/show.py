"""Audited benchmark logs as text, JSON (schema ``ringprof.logs/1``) and CSV; no arithmetic."""

from __future__ import annotations

import csv
import io
import json
import textwrap
from collections.abc import Sequence
from typing import Any

from ringprof.benchmark_logs.audit import COLUMNS, Audit, record
from ringprof.benchmark_logs.flags import Audited, Flag
from ringprof.report.text import clean, in_ascii

SCHEMA = "ringprof.logs/1"
MOST_ALIKE = 5
"""Flags of one kind and file up to which each has a paragraph of its own."""
_WIDTH = 110
_HEAD = (
    f"{'line':>5} {'system':<26}{'B':>3}{'seq':>9}{'fwd ms':>11}{'fwd+bwd ms':>12}{'memory MB':>11}"
    f"{'TFLOP/s':>9}{'computed':>10}  verdict"
)


# --- terminal ---------------------------------------------------------------------------------------


def render(audit: Audit, ascii_only: bool = False) -> str:
    """The rows of each file, then the flags; figures as printed, beside them what they come to."""
    lines: list[str] = []
    for file in dict.fromkeys(one.row.file for one in audit.rows):
        rows = [one for one in audit.rows if one.row.file == file]
        lines += [
            f"{clean(file)} · {len(rows)} row{'s' * (len(rows) != 1)}",
            _HEAD,
            *(_row_line(one) for one in rows),
            "",
        ]
    lines += _flag_lines(audit.flags)
    text = "\n".join(line.rstrip() for line in lines) + "\n"
    return in_ascii(text) if ascii_only else text


def _row_line(one: Audited) -> str:
    row = one.row
    tflops = "OOM" if row.oom else "x" if row.missing else _figure(row.tflops)
    return (
        f"{row.line:>5} {_system(one):<26}{_whole(row.batch):>3}{_whole(row.seq):>9}{_figure(row.forward_ms):>11}"
        f"{_figure(row.forward_backward_ms):>12}{_figure(row.memory_mb):>11}{tflops:>9}"
        f"{_figure(one.computed_tflops):>10}  {one.verdict}"
    )


def _system(one: Audited) -> str:
    """Name, layout, degrees and placement, as far as the log states them."""
    row = one.row
    parts = [row.system if row.system != "unknown" else clean(row.label)[:16] or "unknown"]
    parts += [row.layout] if row.layout and row.layout != row.system else []
    parts += [f"u{row.ulysses_degree} r{row.ring_degree}"] if row.ulysses_degree and row.ring_degree else []
    parts += [row.placement.replace("_", "-")] if row.placement else []
    return " ".join(parts)[:25]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _whole(value: int | None) -> str:
    return "-" if value is None else str(value)


def _flag_lines(flags: Sequence[Flag]) -> list[str]:
    if not flags:
        return ["nothing to flag"]
    counts = {name: sum(flag.severity == name for flag in flags) for name in ("error", "warning", "note")}
    lines = ["flags: " + ", ".join(f"{count} {name}{'s' * (count != 1)}" for name, count in counts.items())]
    for flag, others in _collapsed(flags):
        lines_of_others = ", ".join(str(other.line) for other in others)
        more = f"; and {len(others)} more like it, lines {lines_of_others}" if others else ""
        text = f"{flag.severity}: {flag.file}:{flag.line}: {flag.message}{more} [{flag.code}]"
        plain = "".join(char if char.isprintable() else " " for char in text)
        lines += textwrap.wrap(plain, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return lines


def _collapsed(flags: Sequence[Flag]) -> list[tuple[Flag, list[Flag]]]:
    """Each flag with those of its kind in the same file, where there are more than `MOST_ALIKE`."""
    alike: dict[tuple[str, str], list[Flag]] = {}
    for flag in flags:
        alike.setdefault((flag.file, flag.code), []).append(flag)
    result: list[tuple[Flag, list[Flag]]] = []
    for flag in flags:
        group = alike[flag.file, flag.code]
        if len(group) <= MOST_ALIKE:
            result.append((flag, []))
        elif flag is group[0]:
            result.append((flag, group[1:]))
    return result


# --- data -------------------------------------------------------------------------------------------


def as_dict(audit: Audit) -> dict[str, Any]:
    """The whole audit: ``rows`` with the fields `COLUMNS`, null for what is not printed, and ``flags``."""
    return {
        "schema": SCHEMA,
        "rows": [record(one) for one in audit.rows],
        "flags": [_flag(flag) for flag in audit.flags],
    }


def _flag(flag: Flag) -> dict[str, Any]:
    names = ("code", "severity", "file", "line", "message", "printed", "computed")
    return {name: getattr(flag, name) for name in names}


def render_json(audit: Audit) -> str:
    """`as_dict` as JSON text, in ASCII so that no locale can spoil it."""
    return json.dumps(as_dict(audit), indent=1, ensure_ascii=True, allow_nan=False) + "\n"


def render_csv(audit: Audit) -> str:
    """The rows as CSV with a header; empty for what is not printed."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for one in audit.rows:
        writer.writerow({name: _safe(value) for name, value in record(one).items()})
    return stream.getvalue()


def _safe(value: Any) -> Any:
    """Text from a log on one line, and none that a spreadsheet would run as a formula."""
    if not isinstance(value, str):
        return value
    plain = clean(value)
    return f"'{plain}" if plain.startswith(("=", "+", "-", "@")) else plain
