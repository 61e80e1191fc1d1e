"""Runs, traces, printed tables and benchmark logs side by side."""

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
from ringprof.api import Analysis, load_any
from ringprof.benchmark_logs.logs import BenchmarkLogs, logs
from ringprof.errors import KernelTableError, UsageError
from ringprof.kernel_tables.table_analysis import TableAnalysis
from ringprof.options import LoadOptions
from ringprof.report import comparison as shown
from ringprof.report import notebook, plots
from ringprof.report.page import html
from ringprof.report.page.pages import comparison_document
from ringprof.report.text import TextStyle

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


Source = str | os.PathLike[str] | Analysis | TableAnalysis | BenchmarkLogs
"""A path or what was loaded from one."""
_SINGLE = (str, os.PathLike, Analysis, TableAnalysis, BenchmarkLogs)


class RunComparison(Comparison):
    """What `compare` returns: a `Comparison` with a frame, plots, and a look in notebooks."""

    def __repr__(self) -> str:
        return f"<ringprof.compare of {', '.join(entry.label for entry in self.entries)}>"

    def frame(self) -> pd.DataFrame:
        """A row an entry: its label, its settings as text, its figures in their own units."""
        import pandas as pd  # here, because it takes longer to import than most comparisons to make

        rows = [
            {"label": entry.label, **entry.settings, **{name: one.value for name, one in entry.figures.items()}}
            for entry in self.entries
        ]
        return pd.DataFrame(rows).set_index("label")

    def plot(self, kind: str = "comparison", ax: Axes | None = None) -> Axes:
        """``comparison`` (a bar an entry) or ``scaling`` (a line a strategy over tokens), with matplotlib."""
        draw = {"comparison": plots.comparison, "scaling": plots.scaling}
        if kind not in draw:
            raise UsageError(f"plot {kind!r}: there are {', '.join(draw)}")
        return draw[kind](self, ax=ax)

    def to_terminal(self, style: TextStyle | None = None) -> str:
        """What ``ringprof compare`` prints."""
        return shown.render(self, style or TextStyle())

    def to_html(self) -> str:
        """One HTML page that needs nothing else. Raises `MissingExtraError` without Bokeh."""
        return html.render(comparison_document(self))

    def view(self, height: int | None = None) -> notebook.View:
        """The page in a notebook's cell, to zoom and hover; ``height`` in pixels. Raises as `to_html` does."""
        return notebook.View(comparison_document(self), height)

    def _repr_html_(self) -> str:
        return notebook.comparison_html(self)


def compare(
    *sources: Source | Sequence[Source], reading: LoadOptions | None = None, same_work: bool = False
) -> RunComparison:
    """Set runs, traces, printed tables and benchmark logs side by side, in any mix, against the first.

    A log stands for as many entries as it has rows; a list of sources for one entry: several recordings of one run.
    ``reading``: how to read the paths. ``same_work``: compare times and memory though neither the stated workloads nor
    the traces show that the work was the same.

    Raises `UsageError` for fewer than two entries, and what `load` raises.
    """
    groups = [[one] if isinstance(one, _SINGLE) else list(one) for one in sources]
    each = [source for group in groups for source in group]
    names = [str(source) if isinstance(source, (str, os.PathLike)) else source.name for source in each]
    labels = iter(shortest_labels(names) if names else [])
    entries: list[Measurement] = []
    runs: list[Findings] = []
    for given, group in zip(sources, groups, strict=True):
        loaded = [_loaded(source, reading or LoadOptions()) for source in group]
        made = [entry for one in loaded for entry in one.entries(next(labels))]
        entries += made if isinstance(given, _SINGLE) or not made else [combine_recordings(made)]
        runs += [one.findings for one in loaded if isinstance(one, Analysis) and len(group) == 1]
    if len(entries) < 2:
        raise UsageError("a comparison needs two measurements or more: name another run, trace, table or log")
    found = comparison.compare_measurements(entries, runs, did_same_work=same_work)
    return RunComparison(**{part.name: getattr(found, part.name) for part in dataclasses.fields(found)})


def _loaded(source: Source, reading: LoadOptions) -> Analysis | TableAnalysis | BenchmarkLogs:
    if isinstance(source, (Analysis, TableAnalysis, BenchmarkLogs)):
        return source
    try:
        return load_any([source], reading)
    except KernelTableError:
        return logs(source, memory_bytes=reading.limits().memory_bytes)
