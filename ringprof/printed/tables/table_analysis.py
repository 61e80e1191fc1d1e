"""Public result of `ringprof.load_tables`: the kernel tables in a log as text, JSON, figures and measurements.

Only units and shares are computed here. Names come from logs, and are cleaned before they are printed to a terminal.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ringprof.analysis.findings.metric import Measurement, Metric
from ringprof.common.files import read_whole
from ringprof.common.formatting import percent
from ringprof.common.json_object import JsonObject
from ringprof.common.limits import MEMORY_BYTES, Limits
from ringprof.common.log_lines import TEXT_SHARE
from ringprof.errors import UsageError
from ringprof.printed.tables.analyse import ASSUMPTIONS, CheckedShare, TableReport, analyse_table
from ringprof.printed.tables.read import read_tables
from ringprof.report.as_json import whole_report
from ringprof.report.page.document import Report
from ringprof.report.result import Result
from ringprof.report.terms import LABELS
from ringprof.report.text import TextStyle, clean, duration, in_unit, unit_for
from ringprof.trace.columns import Notice

if TYPE_CHECKING:
    import pandas as pd

_SUMMED = {"kernels": "kernel time", "operators": "device time", "cpu": "CPU time"}
_WALLS = {
    "given": "the wall time given", "iteration_time": "the log's own time of one iteration",
    "cpu_total": "the footer's CPU total taken for the wall time",
}  # fmt: skip
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


class TableAnalysis(Result):
    """Analysis of printed kernel tables, limited to what a table alone can prove. Created by `load_tables`."""

    _frames = ("kinds",)

    def __init__(self, name: str, reports: Sequence[TableReport]) -> None:
        self.name, self.reports = name, tuple(reports)

    @property
    def verdict(self) -> list[str]:
        """Always raises `UsageError`: a table does not say when anything ran."""
        raise UsageError("a printed table does not say when anything ran, so no cause follows: see report() or a trace")

    @property
    def warnings(self) -> list[Notice]:
        """Warnings of all tables."""
        return [warning for report in self.reports for warning in report.warnings]

    def report(self) -> Report:
        """Return the JSON report (schema ``ringprof.report/1``) of the largest table; a warning names the others."""
        largest, warnings = _largest_of(self.reports), self.warnings
        if len(self.reports) > 1:
            lines = ", ".join(str(report.table.line) for report in self.reports if report is not largest)
            text = f"{len(self.reports)} kernel tables: the JSON report holds the largest, of line {largest.table.line}"
            warnings.append(Notice("several_tables", f"{text}; the others are at lines {lines}"))
        return whole_report("table", [self.name], warnings, {"table": table_dict(largest)})

    def kinds(self) -> pd.DataFrame:
        """Return one row per table and kind: line of the table, time in nanoseconds, and number of calls."""
        import pandas as pd  # imported here, because the import takes longer than reading most logs

        rows = [{"line": report.table.line, **vars(kind)} for report in self.reports for kind in report.kinds]
        return pd.DataFrame(rows)

    def figures(self) -> dict[str, float]:
        """Return the figures of the largest table by name, for conditions.

        `ringprof.printed.tables.table_analysis.figures_of_table` describes them.
        """
        return figures_of_table(_largest_of(self.reports))

    def entries(self, label: str) -> list[Measurement]:
        """Return each table as one side of a comparison."""
        several = len(self.reports) > 1
        return [
            entry_of_table(f"{label} table {number}" if several else label, report)
            for number, report in enumerate(self.reports, 1)
        ]

    def to_terminal(self, style: TextStyle | None = None) -> str:
        """Return the report of all tables as text."""
        style = style or TextStyle(wide_tables=True)
        return style.finish("\n".join(_table_text(report, style) for report in self.reports))

    def __repr__(self) -> str:
        return f"<ringprof.TableAnalysis of {self.name}: {len(self.reports)} tables>"


def load_tables(
    path: str | os.PathLike[str], *, wall_ns: int | None = None, iterations: int | None = None,
    memory_bytes: int = MEMORY_BYTES,
) -> TableAnalysis:  # fmt: skip
    """Load a log that contains printed kernel tables of torch.profiler, ``nsys stats`` or nvprof.

    ``wall_ns`` is the wall time of the profiled window, ``iterations`` the number of iterations in it, and
    ``memory_bytes`` the most memory that reading may take. Raises `KernelTableError` where there is no table, and
    `InputError`.
    """
    name = os.fspath(path)
    return analyse_tables(read_whole(name, Limits(memory_bytes), TEXT_SHARE), name, wall_ns, iterations)


def analyse_tables(data: bytes, name: str, wall_ns: int | None = None, iterations: int | None = None) -> TableAnalysis:
    """Analyse the kernel tables in the content of a log; `load_tables` describes the parameters and the errors."""
    return TableAnalysis(name, [analyse_table(table, wall_ns, iterations) for table in read_tables(data, name)])


# --- terminal ---------------------------------------------------------------------------------------


def _table_text(report: TableReport, style: TextStyle) -> str:
    """Format the report of one table."""
    table, missing_ns = report.table, report.missing_ns
    path, summed = clean(table.path), _SUMMED[report.counted.basis]
    title = f"{path}:{table.line} · {len(table.rows)} rows · {summed} {duration(report.total_ns, 3)} summed"
    if report.footer_ns is None or report.difference_ns is None:
        title += " · no total in its footer"
    else:
        rounding = ", within rounding" if abs(report.difference_ns) <= report.slack_ns else ""
        difference = f"{report.difference_ns / 1e6:+,.3f} ms{rounding}"
        title += f", footer {duration(report.footer_ns, 3)} ({difference})"
    missing = ", with that of kernels that have no row here" if missing_ns else ""
    lines = [f"shares are of summed time{missing}: kinds that run at once are each counted in full", ""]
    overlap = report.overlap
    if overlap.least is None or overlap.most is None or overlap.wall_ns is None:
        lines.append(f"overlap: not known from this table: {overlap.reason}")
    else:
        bounds = f"{percent(overlap.least)} to {percent(overlap.most)}"
        basis = f"{_WALLS[overlap.wall_source or 'given']} ({duration(overlap.wall_ns, 3)})"
        times = f"communication {duration(overlap.comm_ns, 3)}, compute {duration(overlap.compute_ns, 3)}"
        lines.append(f"overlap: {bounds} of the communication was hidden behind compute,")
        lines.append(f"  from {basis}, {times};")
        lines += [f"  assumed: {assumption}" for assumption in ASSUMPTIONS]
    if (iterations := report.iterations) is not None:
        lines += ["", f"iterations: {iterations.cpu} in the CPU rows ({_SOURCES[iterations.source]})"]
        if iterations.leak:
            counts = [f"{c.launch} {c.launched:,} launched, {c.ran:,} ran" for c in iterations.counts]
            counts += [f"{LABELS[f.kind]} {f.calls} calls, {f.per_iteration} per iteration" for f in iterations.flash]
            low, high = iterations.device_range
            lines[-1] += f", {low:.1f} to {high:.1f} in the device rows ({'; '.join(counts)})"
    if report.shares:
        lines += ["", "the log's own summary, and the table's"]
        lines += [line for share in report.shares for line in _share_lines(share, path)]
    if left_out := report.counted.left_out:
        names = ", ".join(dict.fromkeys(clean(row.stem) for row, _ in left_out[:4]))
        suffix = f" and {len(left_out) - 4} more" if len(left_out) > 4 else ""
        lines += ["", f"not added up, since they repeat their kernels' time: {names}{suffix}"]
    if report.warnings:
        lines += ["", *(f"warning: {warning.message}" for warning in report.warnings)]
    return "\n".join([style.fit(title), "", *_kind_lines(report), style.fit("\n".join(lines))]) + "\n"


def _kind_lines(report: TableReport) -> list[str]:
    """Format the table of times by kind."""
    iteration_title = f"{'per iteration':>14}" if report.iterations is not None else ""
    unit_ns, unit = unit_for(max((kind.time_ns for kind in report.kinds), default=0))
    whole_ns = report.whole_ns or 1
    lines = [f"{'by kind':<22}{'time':>13}{'share':>9}{'calls':>9}{'average':>13}{iteration_title}"]
    for kind in report.kinds:
        time, share = f"{in_unit(kind.time_ns, unit_ns)} {unit}", percent(kind.time_ns / whole_ns)
        average = duration(kind.average_ns, 3) if kind.average_ns is not None else "-"
        each = f"{duration(kind.per_iteration_ns, 3):>14}" if kind.per_iteration_ns is not None else ""
        lines.append(
            f"{LABELS.get(kind.kind, kind.kind):<22}{time:>13}{share if report.whole_ns else '-':>9}"
            f"{kind.calls:>9,}{average:>13}{each}"
        )
    totals = {"all, summed": report.total_ns} | ({"not in this table": report.missing_ns} if report.missing_ns else {})
    lines += [f"{name:<22}{duration(time, 3):>13}{percent(time / whole_ns):>9}" for name, time in totals.items()]
    return lines


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


def _largest_of(reports: Sequence[TableReport]) -> TableReport:
    """Return the report of the table with the largest total time."""
    return max(reports, key=lambda report: report.total_ns)


def table_dict(report: TableReport) -> JsonObject:
    """Build the ``table`` part of ``ringprof.report/1``: times in integer nanoseconds, shares and ratios 0..1."""
    overlap, iterations = report.overlap, report.iterations
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
        "iterations": iterations
        and {
            "cpu": iterations.cpu,
            "source": iterations.source,
            "device_min": iterations.device_range[0],
            "device_max": iterations.device_range[1],
            "warmup_in_window": iterations.leak,
            "launches": [{"launch": c.launch, "launched": c.launched, "ran": c.ran} for c in iterations.counts],
        },
        "left_out": [
            {"name": row.name, "line": row.line, "time_ns": row.self_device_ns, "reason": reason}
            for row, reason in report.counted.left_out
        ],
        "claims": [
            {
                "subject": checked.stated.subject,
                "label": checked.stated.label,
                "line": checked.stated.line,
                "printed": _printed(checked),
                "share": checked.share,
                "agrees": checked.agrees,
                "causes": list(checked.causes),
            }
            for checked in report.shares
        ],
    }


def figures_of_table(report: TableReport) -> dict[str, float]:
    """Return figures by name, for conditions: times by kind as ``KIND_ns``, and shares of the total as ``KIND``."""
    times, whole_ns = report.kinds_ns, report.whole_ns or 1
    shares = {kind: time / whole_ns for kind, time in times.items()}
    return {f"{kind}_ns": float(time) for kind, time in times.items()} | shares


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
