"""The report of a printed kernel table, for people and as the ``table`` part of ``ringprof.report/1``.

Nothing is computed here but units; names come from logs and are cleaned before a terminal sees them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from ringprof.kernel_tables.analyse import ASSUMPTIONS, KindTime, TableReport
from ringprof.kernel_tables.claims import ClaimCheck
from ringprof.report.terms import LABELS
from ringprof.report.text import clean, duration, in_ascii, in_unit, percent, unit_for
from ringprof.trace.columns import Caveat

_WIDTH = 110

_WALLS = {
    "given": "the wall time given",
    "iteration_time": "the log's own time of one iteration",
    "cpu_total": "the footer's CPU total taken for the wall time",
}
_SOURCES = {
    "given": "as given",
    "log": "as the log says",
    "profiler_steps": "from its ProfilerStep rows",
    "inferred": "inferred: the greatest common divisor of the launch counts",
}
_CAUSES = {
    "seconds_dropped": "rows printed in s were not read",
    "fraction_as_percent": "a fraction was printed with a % sign",
}


def render_all(reports: Sequence[TableReport], ascii_only: bool = False) -> str:
    """Every table of a log as text, in order."""
    text = "\n".join(render(report) for report in reports)
    return in_ascii(text) if ascii_only else text


def render(report: TableReport) -> str:
    """One table's report as text."""
    table = report.table
    lines = [_title(report), ""]
    lines += _kind_lines(report)
    lines += ["", *_overlap_lines(report)]
    if report.iterations is not None:
        lines += ["", *_wrapped(_iteration_line(report))]
    if report.claims:
        lines += ["", "the log's own summary, and the table's"]
        lines += [line for claim in report.claims for line in _claim_lines(claim, clean(table.path))]
    if report.left_out:
        names = ", ".join(dict.fromkeys(clean(out.row.stem) for out in report.left_out[:4]))
        more = f" and {len(report.left_out) - 4} more" if len(report.left_out) > 4 else ""
        lines += ["", f"not added up, since they repeat their kernels' time: {names}{more}"]
    if report.warnings:
        lines += [""]
        for warning in report.warnings:
            lines += _wrapped("warning: " + warning.message)
    return "\n".join(lines) + "\n"


def _wrapped(text: str) -> list[str]:
    """A sentence of ours on lines of readable width, without what a terminal would obey."""
    plain = "".join(char if char.isprintable() else " " for char in text)
    return textwrap.wrap(plain, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _title(report: TableReport) -> str:
    table = report.table
    what = {"kernels": "kernel time", "operators": "device time", "cpu": "CPU time"}[report.chosen.basis]
    title = f"{clean(table.path)}:{table.line} · {len(table.rows)} rows · {what} {duration(report.total_ns, 3)} summed"
    footer = table.self_cpu_total_ns if report.chosen.basis == "cpu" else table.self_device_total_ns
    if footer is None or report.difference_ns is None:
        return f"{title} · no total in its footer"
    off = f"{report.difference_ns / 1e6:+,.3f} ms"
    rounding = ", within rounding" if abs(report.difference_ns) <= report.slack_ns else ""
    return f"{title}, footer {duration(footer, 3)} ({off}{rounding})"


def _kind_lines(report: TableReport) -> list[str]:
    each = any(kind.per_iteration_ns is not None for kind in report.kinds)
    head = f"{'by kind':<22}{'time':>13}{'share':>9}{'calls':>9}{'average':>13}"
    lines = [head + (f"{'an iteration':>15}" if each else "")]
    unit = unit_for(max((kind.time_ns for kind in report.kinds), default=0))
    lines += [_kind_line(kind, report.total_ns, unit) for kind in report.kinds]
    total = f"{'all, summed':<22}{duration(report.total_ns, 3):>13}{percent(1.0):>9}"
    return [*lines, total, "shares are of summed time: kinds that run at once are each counted in full"]


def _kind_line(kind: KindTime, total_ns: int, unit: tuple[float, str]) -> str:
    average = duration(kind.average_ns, 3) if kind.average_ns is not None else "-"
    share = percent(kind.time_ns / total_ns) if total_ns else "-"
    time = f"{in_unit(kind.time_ns, unit[0])} {unit[1]}"
    line = f"{LABELS.get(kind.kind, kind.kind):<22}{time:>13}{share:>9}{kind.calls:>9,}{average:>13}"
    return line + (f"{duration(kind.per_iteration_ns, 3):>15}" if kind.per_iteration_ns is not None else "")


def _overlap_lines(report: TableReport) -> list[str]:
    overlap = report.overlap
    if overlap.least is None or overlap.most is None or overlap.wall_ns is None:
        return [f"overlap: not known from this table: {overlap.reason}"]
    basis = f"{_WALLS[overlap.wall_source or 'given']} ({duration(overlap.wall_ns, 3)})"
    return [
        f"overlap: {percent(overlap.least)} to {percent(overlap.most)} of the communication was hidden behind compute,",
        f"  from {basis}, communication {duration(overlap.comm_ns, 3)}, compute {duration(overlap.compute_ns, 3)};",
        *(f"  assumed: {assumption}" for assumption in ASSUMPTIONS),
    ]


def _iteration_line(report: TableReport) -> str:
    counted = report.iterations
    assert counted is not None
    low, high = counted.device_range
    line = f"iterations: {counted.cpu} in the CPU rows ({_SOURCES[counted.source]})"
    if not counted.leak:
        return line
    counts = "; ".join(
        [f"{c.launch} {c.launched:,} launched, {c.ran:,} ran" for c in counted.counts]
        + [f"{LABELS[f.kind]} {f.calls} calls, {f.per_iteration} an iteration" for f in counted.flash]
    )
    return f"{line}, {low:.1f} to {high:.1f} in the device rows ({counts})"


def _claim_lines(check: ClaimCheck, path: str) -> list[str]:
    sign = " %" if check.claim.percent else ""
    printed = f"{clean(check.claim.label)}: printed {check.claim.printed}{sign}, is {percent(check.share, 2)}"
    if check.agrees:
        why = "agrees"
    elif check.causes:
        why = " and ".join(_CAUSES[cause] for cause in check.causes)
    else:
        why = "the printed figure follows from no reading of the table that is known here"
    lines = [f"  {printed} ({path}:{check.claim.line}): {why}"]
    if "seconds_dropped" in check.causes:
        lost = ", ".join(f"{(row.self_device_ns or 0) / 1e9:.3f} s (line {row.line})" for row in check.missing)
        listed = "; the author's list beside the table names just those" if check.listed else ""
        lines += [f"    missing: {lost}", f"    the rows in us and ms make {percent(check.partial_share, 2)}{listed}"]
    return lines


# --- JSON -------------------------------------------------------------------------------------------


def largest_of(reports: Sequence[TableReport]) -> TableReport:
    """The table with most time in it."""
    return max(reports, key=lambda report: report.total_ns)


def whole_report(reports: Sequence[TableReport], paths: Sequence[str]) -> dict[str, Any]:
    """All of ``ringprof.report/1`` for a log: ``table`` is its largest, and a warning says where the others are."""
    largest = largest_of(reports)
    warnings = [warning for report in reports for warning in report.warnings]
    if len(reports) > 1:
        lines = ", ".join(str(report.table.line) for report in reports if report is not largest)
        text = f"{len(reports)} kernel tables: the JSON report holds the largest, of line {largest.table.line}"
        warnings.append(Caveat("several_tables", f"{text}; the others are at lines {lines}"))
    return {
        "schema": "ringprof.report/1",
        "source": {"type": "table", "paths": list(paths)},
        "summary": None,
        "ranks": [],
        "steps": [],
        "waterfall": None,
        "run": None,
        "table": as_dict(largest),
        "warnings": [{"code": one.code, "message": one.message, "rank": one.rank, "count": one.count,
                      "byte_offset": one.byte_offset} for one in warnings],
    }  # fmt: skip


def as_dict(report: TableReport) -> dict[str, Any]:
    """The ``table`` part of ``ringprof.report/1``: times in integer nanoseconds, shares and ratios 0..1."""
    overlap, table = report.overlap, report.table
    return {
        "line": table.line,
        "source": table.source,
        "total_ns": report.total_ns,
        "footer_ns": table.self_cpu_total_ns if report.chosen.basis == "cpu" else table.self_device_total_ns,
        "difference_ns": report.difference_ns,
        "basis": report.chosen.basis,
        "kinds_ns": report.kinds_ns,
        "kinds": {
            kind.kind: {
                "calls": kind.calls,
                "average_ns": kind.average_ns,
                "per_iteration_ns": kind.per_iteration_ns,
            }
            for kind in report.kinds
        },
        "overlap_ratio_min": overlap.least,
        "overlap_ratio_max": overlap.most,
        "overlap": {
            "wall_ns": overlap.wall_ns,
            "wall_source": overlap.wall_source,
            "comm_ns": round(overlap.comm_ns),
            "compute_ns": round(overlap.compute_ns),
            "reason": overlap.reason,
            "assumptions": list(ASSUMPTIONS),
        },
        "iterations": _iterations(report),
        "left_out": [
            {"name": out.row.name, "line": out.row.line, "time_ns": out.row.self_device_ns, "reason": out.reason}
            for out in report.left_out
        ],
        "claims": [_claim(check) for check in report.claims],
    }


def _iterations(report: TableReport) -> dict[str, Any] | None:
    counted = report.iterations
    if counted is None:
        return None
    low, high = counted.device_range
    return {
        "cpu": counted.cpu,
        "source": counted.source,
        "device_min": low,
        "device_max": high,
        "warmup_in_window": counted.leak,
        "launches": [
            {"launch": count.launch, "launched": count.launched, "ran": count.ran} for count in counted.counts
        ],
    }


def _claim(check: ClaimCheck) -> dict[str, Any]:
    return {
        "subject": check.claim.subject,
        "label": check.claim.label,
        "line": check.claim.line,
        "printed": check.claim.printed + (" %" if check.claim.percent else ""),
        "share": check.share,
        "agrees": check.agrees,
        "causes": list(check.causes),
    }
