"""Report of a printed kernel table: as text, as the ``table`` part of ``ringprof.report/1``, and as figures.

Only units and shares are computed here. Names come from logs, and are cleaned before they are printed to a terminal.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringprof.analysis.findings.metric import Measurement, Metric
from ringprof.common.formatting import percent
from ringprof.common.json_object import JsonObject
from ringprof.kernel_tables.analyse import ASSUMPTIONS, KindSum, TableReport
from ringprof.kernel_tables.iterations import Iterations
from ringprof.kernel_tables.stated_shares import CheckedShare
from ringprof.report.as_json import whole_report
from ringprof.report.page.document import Report
from ringprof.report.terms import LABELS
from ringprof.report.text import TextStyle, clean, duration, in_unit, unit_for
from ringprof.trace.columns import Notice

_SUMMED = {"kernels": "kernel time", "operators": "device time", "cpu": "CPU time"}
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


# --- terminal ---------------------------------------------------------------------------------------


def tables_text(reports: Sequence[TableReport], style: TextStyle) -> str:
    """Format the reports of all tables in a log as text, in order."""
    return style.finish("\n".join(_table_text(report, style) for report in reports))


def _table_text(report: TableReport, style: TextStyle) -> str:
    """Format the report of one table."""
    missing = ", with that of kernels that have no row here" if report.missing_ns else ""
    summed = f"shares are of summed time{missing}: kinds that run at once are each counted in full"
    lines = [summed, "", *_overlap_lines(report)]
    if report.iterations is not None:
        lines += ["", _iteration_line(report.iterations)]
    if report.shares:
        lines += ["", "the log's own summary, and the table's"]
        lines += [line for share in report.shares for line in _share_lines(share, clean(report.table.path))]
    if left_out := report.counted.left_out:
        names = ", ".join(dict.fromkeys(clean(out.row.stem) for out in left_out[:4]))
        suffix = f" and {len(left_out) - 4} more" if len(left_out) > 4 else ""
        lines += ["", f"not added up, since they repeat their kernels' time: {names}{suffix}"]
    if report.warnings:
        lines += ["", *(f"warning: {warning.message}" for warning in report.warnings)]
    text = [style.fit(_title(report)), "", *_kind_lines(report), style.fit("\n".join(lines))]
    return "\n".join(text) + "\n"


def _title(report: TableReport) -> str:
    """Format the line with the table's position, number of rows, summed time and footer."""
    table, summed = report.table, _SUMMED[report.counted.basis]
    title = (
        f"{clean(table.path)}:{table.line} · {len(table.rows)} rows · {summed} {duration(report.total_ns, 3)} summed"
    )
    if report.footer_ns is None or report.difference_ns is None:
        return f"{title} · no total in its footer"
    rounding = ", within rounding" if abs(report.difference_ns) <= report.slack_ns else ""
    return f"{title}, footer {duration(report.footer_ns, 3)} ({report.difference_ns / 1e6:+,.3f} ms{rounding})"


def _kind_lines(report: TableReport) -> list[str]:
    """Format the table of times by kind."""
    iteration_title = f"{'an iteration':>14}" if report.iterations is not None else ""
    unit = unit_for(max((kind.time_ns for kind in report.kinds), default=0))
    whole_ns = report.whole_ns or 1
    lines = [
        f"{'by kind':<22}{'time':>13}{'share':>9}{'calls':>9}{'average':>13}{iteration_title}",
        *(_kind_line(kind, report.whole_ns, unit) for kind in report.kinds),
        f"{'all, summed':<22}{duration(report.total_ns, 3):>13}{percent(report.total_ns / whole_ns):>9}",
    ]
    if report.missing_ns:
        missing = f"{duration(report.missing_ns, 3):>13}{percent(report.missing_ns / whole_ns):>9}"
        lines.append(f"{'not in this table':<22}{missing}")
    return lines


def _kind_line(kind: KindSum, whole_ns: int, unit: tuple[float, str]) -> str:
    """Format one row of the table of times by kind."""
    average = duration(kind.average_ns, 3) if kind.average_ns is not None else "-"
    share = percent(kind.time_ns / whole_ns) if whole_ns else "-"
    time = f"{in_unit(kind.time_ns, unit[0])} {unit[1]}"
    line = f"{LABELS.get(kind.kind, kind.kind):<22}{time:>13}{share:>9}{kind.calls:>9,}{average:>13}"
    return line + (f"{duration(kind.per_iteration_ns, 3):>14}" if kind.per_iteration_ns is not None else "")


def _overlap_lines(report: TableReport) -> list[str]:
    """Format the bounds on overlap with their assumptions, or the reason why they are unknown."""
    overlap = report.overlap
    if overlap.least is None or overlap.most is None or overlap.wall_ns is None:
        return [f"overlap: not known from this table: {overlap.reason}"]
    basis = f"{_WALLS[overlap.wall_source or 'given']} ({duration(overlap.wall_ns, 3)})"
    return [
        f"overlap: {percent(overlap.least)} to {percent(overlap.most)} of the communication was hidden behind compute,",
        f"  from {basis}, communication {duration(overlap.comm_ns, 3)}, compute {duration(overlap.compute_ns, 3)};",
        *(f"  assumed: {assumption}" for assumption in ASSUMPTIONS),
    ]


def _iteration_line(iterations: Iterations) -> str:
    """Format the numbers of iterations in the CPU rows and in the device rows."""
    line = f"iterations: {iterations.cpu} in the CPU rows ({_SOURCES[iterations.source]})"
    if not iterations.leak:
        return line
    counts = [f"{c.launch} {c.launched:,} launched, {c.ran:,} ran" for c in iterations.counts]
    counts += [f"{LABELS[f.kind]} {f.calls} calls, {f.per_iteration} an iteration" for f in iterations.flash]
    low, high = iterations.device_range
    return f"{line}, {low:.1f} to {high:.1f} in the device rows ({'; '.join(counts)})"


def _share_lines(checked: CheckedShare, path: str) -> list[str]:
    """Format one printed share with the share by the table and the causes of a difference."""
    stated = checked.stated
    printed = f"{clean(stated.label)}: printed {_printed(checked)}, is {percent(checked.share, 2)}"
    why = " and ".join(_CAUSES[cause] for cause in checked.causes)
    why = why or "the printed figure follows from no reading of the table that is known here"
    lines = [f"  {printed} ({path}:{stated.line}): {'agrees' if checked.agrees else why}"]
    if "seconds_dropped" in checked.causes:
        lost = ", ".join(f"{(row.self_device_ns or 0) / 1e9:.3f} s (line {row.line})" for row in checked.missing)
        listed = "; the author's list beside the table names just those" if checked.listed else ""
        lines.append(f"    missing: {lost}")
        lines.append(f"    the rows in us and ms make {percent(checked.partial_share, 2)}{listed}")
    return lines


def _printed(checked: CheckedShare) -> str:
    return checked.stated.printed + (" %" if checked.stated.percent else "")


# --- data -------------------------------------------------------------------------------------------


def largest_of(reports: Sequence[TableReport]) -> TableReport:
    """Return the report of the table with the largest total time."""
    return max(reports, key=lambda report: report.total_ns)


def tables_dict(reports: Sequence[TableReport], path: str) -> Report:
    """Build the whole ``ringprof.report/1`` of a log from its largest table; a warning names the others' lines."""
    largest = largest_of(reports)
    warnings = [warning for report in reports for warning in report.warnings]
    if len(reports) > 1:
        lines = ", ".join(str(report.table.line) for report in reports if report is not largest)
        text = f"{len(reports)} kernel tables: the JSON report holds the largest, of line {largest.table.line}"
        warnings.append(Notice("several_tables", f"{text}; the others are at lines {lines}"))
    return whole_report("table", [path], warnings, {"table": table_dict(largest)})


def table_dict(report: TableReport) -> JsonObject:
    """Build the ``table`` part of ``ringprof.report/1``: times in integer nanoseconds, shares and ratios 0..1."""
    overlap = report.overlap
    return {
        "line": report.table.line,
        "source": report.table.source,
        "total_ns": report.total_ns,
        "footer_ns": report.footer_ns,
        "difference_ns": report.difference_ns,
        "whole_ns": report.whole_ns,
        "basis": report.counted.basis,
        "kinds_ns": report.kinds_ns,
        "kinds": {
            kind.kind: {"calls": kind.calls, "average_ns": kind.average_ns, "per_iteration_ns": kind.per_iteration_ns}
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
        "iterations": _iterations(report.iterations) if report.iterations else None,
        "left_out": [
            {"name": out.row.name, "line": out.row.line, "time_ns": out.row.self_device_ns, "reason": out.reason}
            for out in report.counted.left_out
        ],
        "claims": [_share(checked) for checked in report.shares],
    }


def _iterations(iterations: Iterations) -> JsonObject:
    """Return the numbers of iterations for JSON."""
    low, high = iterations.device_range
    launches = [{"launch": count.launch, "launched": count.launched, "ran": count.ran} for count in iterations.counts]
    return {
        "cpu": iterations.cpu,
        "source": iterations.source,
        "device_min": low,
        "device_max": high,
        "warmup_in_window": iterations.leak,
        "launches": launches,
    }


def _share(checked: CheckedShare) -> JsonObject:
    """Return one checked share for JSON."""
    stated = checked.stated
    return {
        "subject": stated.subject,
        "label": stated.label,
        "line": stated.line,
        "printed": _printed(checked),
        "share": checked.share,
        "agrees": checked.agrees,
        "causes": list(checked.causes),
    }


def figures_of_table(report: TableReport) -> dict[str, float]:
    """Return figures by name, for conditions: times by kind as ``KIND_ns``, and shares of the total as ``KIND``."""
    times, whole_ns = report.kinds_ns, report.whole_ns or 1
    return {f"{kind}_ns": float(time) for kind, time in times.items()} | {
        k: time / whole_ns for k, time in times.items()
    }


def entry_of_table(label: str, report: TableReport) -> Measurement:
    """Build one side of a comparison from a table; times per iteration only where the number of iterations is known."""
    figures = {
        f"{kind.kind}_ms": Metric(kind.per_iteration_ns / 1e6, "ms", higher_is_better=False, depends_on_work=True)
        for kind in report.kinds
        if kind.per_iteration_ns is not None
    }
    others = figures_of_table(report)
    for kind in ("flash_fwd", "flash_bwd", "send_recv"):
        figures[kind] = Metric(others.pop(kind, 0.0), "share")
    return Measurement(label, "table", {}, figures, others=others)
