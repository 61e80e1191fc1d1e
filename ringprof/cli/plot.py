"""``ringprof plot``: draw one plot to an image file."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ringprof.cli.options import Command, OneOf
from ringprof.cli.progress import show_progress
from ringprof.cli.reading import reads_traces, refuse_unread
from ringprof.cli.write import OutputFile, written
from ringprof.errors import UsageError
from ringprof.report import plots
from ringprof.results.analysis import Analysis
from ringprof.results.comparison import compare
from ringprof.results.load import load_any
from ringprof.results.options import LoadOptions

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OF_ONE = ("waterfall", "breakdown", "timeline", "steps", "waiting", "idle")
OF_SEVERAL = ("comparison", "scaling")
_FORMATS = (".png", ".svg", ".pdf")


@click.command(name="plot", cls=Command)
@click.argument("kind", type=OneOf([*OF_ONE, *OF_SEVERAL]))
@click.argument("paths", nargs=-1, type=click.Path(), required=True, metavar="PATH...")
@click.option("-o", "--output", type=OutputFile(), help="Image file: .png, .svg or .pdf.  [default: KIND.png]")
@reads_traces
def command(kind: str, paths: tuple[str, ...], reading: LoadOptions, output: str | None) -> int:
    """Draw one plot of a run or traces, or of several runs side by side (comparison, scaling).

    \b
    ringprof plot timeline traces/run.json
    ringprof plot comparison traces/a traces/b -o comparison.svg
    """
    output = output or f"{kind}.png"
    if Path(output).suffix.lower() not in _FORMATS:
        raise UsageError(f"--output {output}: a plot is written as one of {', '.join(_FORMATS)}")
    matplotlib = _matplotlib()
    with matplotlib.rc_context():
        matplotlib.rcParams.update(plots.STYLE)
        with show_progress("reading") as notify:
            figure: Any = _draw(kind, paths, replace(reading, notify=notify)).get_figure()
        with written(output) as temporary:
            figure.savefig(temporary, format=Path(output).suffix[1:].lower())
    return 0


def _matplotlib() -> Any:
    """Import matplotlib without the settings of the current folder, which may be untrusted and run LaTeX.

    Matplotlib reads the settings during its import. It is imported here, since that takes longer than most commands.
    """
    backend = os.environ.get("MPLBACKEND")
    current = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))
    try:
        os.environ["MPLBACKEND"] = "agg"  # enough for image files; the backend of a notebook may not be installed
        os.chdir("/")
        logging.getLogger("matplotlib").setLevel(logging.ERROR)  # no long warning about a read-only home folder
        import matplotlib
    finally:
        # Child processes, such as the kernel of a notebook, need the original setting.
        os.environ.pop("MPLBACKEND") if backend is None else os.environ.update(MPLBACKEND=backend)
        os.fchdir(current)
        os.close(current)
    return matplotlib


def _draw(kind: str, paths: tuple[str, ...], reading: LoadOptions) -> Axes:
    if kind in OF_SEVERAL:
        comparison = compare(*paths, reading=reading)
        refuse_unread(entry.source for entry in comparison.entries)
        return comparison.plot(kind)
    analysis = load_any(paths, reading)
    if not isinstance(analysis, Analysis):
        raise UsageError(f"plot {kind}: a printed table has no such plot: give a run or traces")
    if kind in ("timeline", "steps", "waiting", "idle") and analysis.attribution.on_cpu:
        raise UsageError(f"plot {kind}: a CPU run records no device activities; waterfall and breakdown can be drawn")
    if kind in ("steps", "waiting") and not analysis.findings.steps:
        raise UsageError(f"plot {kind}: no ring steps were found in these traces")
    axes: Axes = getattr(analysis.plot, kind)()
    return axes
