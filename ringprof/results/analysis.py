"""Main entry of the library: `load` reads a run or traces and returns an `Analysis`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.measurements import measurement_of_run
from ringprof.analysis.findings.metric import Measurement
from ringprof.analysis.findings.summary import Summary
from ringprof.analysis.transfers.clocks import Clocks
from ringprof.errors import InputError, MissingExtraError, install_command
from ringprof.report import as_json, terminal
from ringprof.report.page.document import Report
from ringprof.report.result import Result
from ringprof.report.tables import Listing
from ringprof.report.text import TextStyle, shell_words
from ringprof.results import frames
from ringprof.run import Run
from ringprof.trace.columns import Notice
from ringprof.trace.inputs import Input

if TYPE_CHECKING:
    import pandas as pd

    from ringprof.report.notebook import View
    from ringprof.report.plots import Plots


MOST_PATHS_SHOWN = 3
"""Maximum number of paths that a suggested command repeats."""


_HTA_SUFFIXES = (".json", ".json.gz")


class Analysis(Result):
    """Analysis of one run, or of the traces of one run. Created by `load`."""

    _frames = tuple(frames.FRAMES)

    def __init__(self, findings: Findings, source: Input) -> None:
        self.findings = findings
        """Steps, waterfall and verdict, as values."""
        self.given: tuple[str, ...] = source.paths
        """Paths from which the analysis was loaded, as passed to `load`."""
        self._source = source

    @property
    def attribution(self) -> Attribution:
        """Figures of every rank, as values."""
        return self.findings.attribution

    @property
    def run(self) -> Run | None:
        """Recorded run; None for traces that ringprof did not record."""
        return self.attribution.run

    @property
    def name(self) -> str:
        """Name of the run; without a run, name of the trace or of the folder of the traces."""
        paths = [Path(path) for path in self._source.paths]
        return self.run.name if self.run else (paths[0] if len(paths) == 1 else paths[0].resolve().parent).name

    @property
    def summary(self) -> Summary:
        """Figures of the run as a whole."""
        return self.findings.summary

    @property
    def verdict(self) -> list[str]:
        """Sentences on missing data, the cost of communication, its causes, and what a fix would gain."""
        return list(self.findings.verdict)

    @property
    def ranks(self) -> list[int]:
        """Ranks that have a trace, ascending."""
        return [rank.rank for rank in self.attribution.ranks]

    @property
    def warnings(self) -> list[Notice]:
        """Warnings about the input, and about figures that could not be determined."""
        return list(self.attribution.warnings)

    @frames.documents_columns
    def breakdown(self) -> pd.DataFrame:
        """Return the time breakdown of each rank: one row per rank."""
        return frames.frame_of(self.findings, "breakdown")

    @frames.documents_columns
    def iterations(self) -> pd.DataFrame:
        """Return the time breakdown of each iteration: one row per rank and iteration."""
        return frames.frame_of(self.findings, "iterations")

    @frames.documents_columns
    def hops(self) -> pd.DataFrame:
        """Return all neighbour transfers: one row per hop, ordered by rank and start."""
        return frames.frame_of(self.findings, "hops")

    @frames.documents_columns
    def steps(self) -> pd.DataFrame:
        """Return all ring steps: one row per rank and step; may be empty."""
        return frames.frame_of(self.findings, "steps")

    @frames.documents_columns
    def kernels(self) -> pd.DataFrame:
        """Return kernels, copies and sets: one row per name and kind, longest first; empty on CPU."""
        return frames.frame_of(self.findings, "kernels")

    @frames.documents_columns
    def idle(self) -> pd.DataFrame:
        """Return the idle time: one row per rank, cause, class and name, longest first within a rank; empty on CPU."""
        return frames.frame_of(self.findings, "idle")

    @frames.documents_columns
    def gemms(self) -> pd.DataFrame:
        """Return matrix products: one row per shape, longest time first; empty without ``record_shapes=True``."""
        return frames.frame_of(self.findings, "gemms")

    @frames.documents_columns
    def collectives(self) -> pd.DataFrame:
        """Return communication: one row per kind, group, size and link, longest time first; empty on CPU."""
        return frames.frame_of(self.findings, "collectives")

    @frames.documents_columns
    def layers(self) -> pd.DataFrame:
        """Return times by layer of the model: one row per rank and layer; empty where the traces name no layers."""
        return frames.frame_of(self.findings, "layers")

    @frames.documents_columns
    def annotations(self) -> pd.DataFrame:
        """Return the user's annotated ranges: one row per name; empty on CPU."""
        return frames.frame_of(self.findings, "annotations")

    @frames.documents_columns
    def waterfall(self) -> pd.DataFrame:
        """Return the waterfall from peak to achieved speed: one row per part of the slowest rank's wall."""
        return frames.frame_of(self.findings, "waterfall")

    @frames.documents_columns
    def memory(self) -> pd.DataFrame:
        """Return the memory held by the allocators over time; empty unless the profiler had ``profile_memory=True``."""
        return frames.frame_of(self.findings, "memory")

    def figures(self) -> dict[str, float]:
        """Return all figures of the report by name, for conditions; see `ringprof.analysis.findings.conditions`."""
        (entry,) = self.entries(self.name)
        return entry.values()

    def entries(self, label: str) -> list[Measurement]:
        """Return the run as the entry of a comparison, in a list of one."""
        return [measurement_of_run(label, self.findings)]

    def clocks(self) -> Clocks:
        """Return the offsets added to each rank's times to put all hosts on one clock, with their uncertainty."""
        return self.attribution.clocks

    def hta(self) -> Any:
        """Return HolisticTraceAnalysis's ``TraceAnalysis`` of the same traces.

        Raises `MissingExtraError` if it is not installed, `InputError` if it cannot read these traces.
        """
        paths = {rank.rank: rank.path for rank in self.attribution.ranks}
        for path in paths.values():
            if not path.lower().endswith(_HTA_SUFFIXES) or not Path(path).is_file():
                raise InputError(f"{path}: HolisticTraceAnalysis reads Kineto files only ({', '.join(_HTA_SUFFIXES)})")
        try:
            from hta.trace_analysis import TraceAnalysis
        except ImportError as error:
            advice = install_command("hta", "pandas<3")
            raise MissingExtraError(f"HolisticTraceAnalysis cannot be imported ({error}): {advice}") from None
        # HTA joins each path to trace_dir, which leaves absolute paths unchanged.
        return TraceAnalysis(
            trace_files={rank: str(Path(path).resolve()) for rank, path in paths.items()}, trace_dir="/"
        )

    def report(self) -> Report:
        """Return the report as ``--format json`` prints it, schema ``ringprof.report/1``."""
        return as_json.as_dict(self.findings, source=self._source.type, paths=self._read())

    def _read(self) -> list[str]:
        return [self._source.run] if self._source.run else list(self._source.paths)

    def to_terminal(
        self, style: TextStyle | None = None, sections: Sequence[str] = (), listing: Listing | None = None
    ) -> str:
        """Format the report as text; ``sections`` names optional sections of `ringprof.report.sections.OPTIONAL`."""
        return terminal.render(self.findings, style, sections, listing, self._path())

    def _path(self) -> str:
        """Return the paths as arguments of a suggested command; ``PATH...`` if there are many."""
        here = os.path.join(os.getcwd(), "")
        shown = [os.path.relpath(path) if os.path.normpath(path).startswith(here) else path for path in self.given]
        return shell_words(shown) if 0 < len(shown) <= MOST_PATHS_SHOWN else "PATH..."

    @cached_property
    def plot(self) -> Plots:
        """Plots with matplotlib, such as ``run.plot.timeline()``; see `ringprof.report.plots.Plots`."""
        from ringprof.report.plots import Plots

        return Plots(self.findings)

    def _page(self) -> str:
        from ringprof.report.page import html
        from ringprof.report.page.pages import run_document

        return html.render(run_document(self.findings, self._read(), self.name))

    def view(self, *sections: str, height: int | None = None) -> View:
        """Show interactive sections of the page in a notebook cell: ``run.view()``, ``run.view("steps", "hops")``.

        The default sections are the timeline and the waterfall. ``height`` is in pixels. Raises `UsageError` for a
        section that the page of this run does not have.
        """
        from ringprof.report.notebook import View
        from ringprof.report.page.pages import part_document

        return View(part_document(self.findings, self._read(), self.name, sections), height)

    def __repr__(self) -> str:
        return f"<ringprof.Analysis of {self.name}, {len(self.ranks)} ranks>"

    def _repr_html_(self) -> str:
        """Render the header, verdict and breakdown for notebooks."""
        from ringprof.report import notebook

        return notebook.findings_html(self.findings)
