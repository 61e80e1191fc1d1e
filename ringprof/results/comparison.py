"""Comparison of runs, traces, printed kernel tables and benchmark logs: the public function `compare`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ringprof.analysis.findings import comparison
from ringprof.analysis.findings.comparison import Comparison, combine_recordings
from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.measurements import shortest_labels
from ringprof.analysis.findings.metric import Measurement
from ringprof.common.json_object import JsonObject
from ringprof.errors import UsageError
from ringprof.printed.benchmarks.logs import BenchmarkLogs
from ringprof.printed.tables.table_analysis import TableAnalysis
from ringprof.report import comparison as shown
from ringprof.report import notebook, plots
from ringprof.report.page import html
from ringprof.report.page.pages import comparison_document
from ringprof.report.result import Result
from ringprof.report.text import TextStyle, clean
from ringprof.results.analysis import Analysis
from ringprof.results.load import load_any
from ringprof.results.options import LoadOptions

if TYPE_CHECKING:
    import pandas as pd


Source = str | os.PathLike[str] | Analysis | TableAnalysis | BenchmarkLogs
"""A path, or an object that was loaded from one."""
_SINGLE = (str, os.PathLike, Analysis, TableAnalysis, BenchmarkLogs)


class RunComparison(Comparison, Result):
    """A `Comparison` as a result, whose data frame has one row per entry. Created by `compare`."""

    _frames = ("entries",)

    def __repr__(self) -> str:
        return f"<ringprof.compare of {', '.join(entry.label for entry in self.entries)}>"

    @property
    def verdict(self) -> list[str]:
        """Sentences on what is not compared and why, and on how much slower or faster each entry is than the first."""
        names = [clean(entry.label) for entry in self.entries]
        return [*shown.work_notices(self), *shown.verdict_lines(self, names)]

    def report(self) -> JsonObject:
        """Return the comparison as ``--format json`` prints it, schema ``ringprof.compare/1``."""
        return shown.as_dict(self)

    def _frame(self, name: str) -> pd.DataFrame:
        import pandas as pd  # here, because it takes longer to import than most comparisons to make

        rows = [
            {"label": entry.label, **entry.settings, **{name: figure.value for name, figure in entry.figures.items()}}
            for entry in self.entries
        ]
        return pd.DataFrame(rows).set_index("label")

    @property
    def plot(self) -> plots.ComparisonPlots:
        """Plots with matplotlib: ``comparison`` (one bar per entry) and ``scaling`` (one line per strategy)."""
        return plots.ComparisonPlots(self)

    def to_terminal(self, style: TextStyle | None = None) -> str:
        """Return the text that ``ringprof compare`` prints."""
        return shown.render(self, style or TextStyle())

    def _page(self) -> str:
        return html.render(comparison_document(self))

    def view(self, height: int | None = None) -> notebook.View:
        """Show the interactive page in a notebook cell, ``height`` pixels high."""
        return notebook.View(comparison_document(self), height)

    def _repr_html_(self) -> str:
        return notebook.comparison_html(self)


def compare(
    *sources: Source | Sequence[Source], reading: LoadOptions | None = None, same_work: bool = False
) -> RunComparison:
    """Compare runs, traces, printed tables and benchmark logs, in any mix, with the first.

    A log gives one entry per row. A list of sources gives one entry: several recordings of one run. ``reading`` says
    how to read the paths. ``same_work`` compares times and memory even if neither the stated workloads nor the traces
    show that the work was the same.

    Raises `UsageError` for fewer than two entries, and the errors of `load`.
    """
    groups = [[source] if isinstance(source, _SINGLE) else list(source) for source in sources]
    flat = [source for group in groups for source in group]
    names = [str(source) if isinstance(source, (str, os.PathLike)) else source.name for source in flat]
    labels = iter(shortest_labels(names) if names else [])
    entries: list[Measurement] = []
    runs: list[Findings] = []
    for argument, group in zip(sources, groups, strict=True):
        loaded = [_loaded(source, reading or LoadOptions()) for source in group]
        group_entries = [entry for item in loaded for entry in item.entries(next(labels))]
        entries += (
            group_entries if isinstance(argument, _SINGLE) or not group_entries else [combine_recordings(group_entries)]
        )
        runs += [item.findings for item in loaded if isinstance(item, Analysis) and len(group) == 1]
    if len(entries) < 2:
        raise UsageError("a comparison needs two measurements or more: name another run, trace, table or log")
    compared = comparison.compare_measurements(entries, runs, did_same_work=same_work)
    return RunComparison(**{field.name: getattr(compared, field.name) for field in dataclasses.fields(compared)})


def _loaded(source: Source, reading: LoadOptions) -> Analysis | TableAnalysis | BenchmarkLogs:
    if isinstance(source, (Analysis, TableAnalysis, BenchmarkLogs)):
        return source
    return load_any([source], reading)
