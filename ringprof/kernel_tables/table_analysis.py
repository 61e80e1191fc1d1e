"""Public result of `ringprof.load_tables`: the analysis of the kernel tables in a log."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence

from ringprof.analysis.findings.metric import Measurement
from ringprof.common.files import read_whole
from ringprof.common.limits import MEMORY_BYTES, Limits
from ringprof.common.log_lines import TEXT_SHARE
from ringprof.kernel_tables import show
from ringprof.kernel_tables.analyse import TableReport, analyse_table
from ringprof.kernel_tables.read import read_tables
from ringprof.report.page.document import Report
from ringprof.report.text import TextStyle
from ringprof.trace.columns import Notice


class TableAnalysis:
    """Analysis of printed kernel tables, limited to what a table alone can prove. Created by `load_tables`."""

    def __init__(self, name: str, reports: Sequence[TableReport]) -> None:
        self.name, self.reports = name, tuple(reports)

    @property
    def warnings(self) -> list[Notice]:
        """Warnings of all tables."""
        return [warning for report in self.reports for warning in report.warnings]

    def report(self) -> Report:
        """Return the JSON report (schema ``ringprof.report/1``) of the largest table."""
        return show.tables_dict(self.reports, self.name)

    def figures(self) -> dict[str, float]:
        """Return the figures of the largest table by name, for conditions.

        `ringprof.kernel_tables.show.figures_of_table` describes them.
        """
        return show.figures_of_table(show.largest_of(self.reports))

    def entries(self, label: str) -> list[Measurement]:
        """Return each table as one side of a comparison."""
        several = len(self.reports) > 1
        labels = [f"{label} table {number}" if several else label for number in range(1, len(self.reports) + 1)]
        return [show.entry_of_table(name, report) for name, report in zip(labels, self.reports, strict=True)]

    def to_terminal(self, style: TextStyle | None = None) -> str:
        """Return the report of all tables as text."""
        return show.tables_text(self.reports, style or TextStyle(wide_tables=True))

    def __repr__(self) -> str:
        return f"<ringprof.TableAnalysis of {self.name}: {len(self.reports)} tables>"

    def _repr_html_(self) -> str:
        """Return the terminal report as HTML, for notebooks."""
        return f'<pre style="line-height: 1.2">{html.escape(self.to_terminal())}</pre>'


def load_tables(
    path: str | os.PathLike[str],
    *,
    wall_ns: int | None = None,
    iterations: int | None = None,
    memory_bytes: int = MEMORY_BYTES,
) -> TableAnalysis:
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
