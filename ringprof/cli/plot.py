"""``ringprof plot``: one plot as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ringprof.api import Analysis, compare, load
from ringprof.errors import InputError, UsageError

OF_ONE = ("waterfall", "breakdown", "timeline", "steps", "waiting")
OF_SEVERAL = ("comparison", "scaling")
FORMATS = (".png", ".svg", ".pdf")


@click.command(name="plot")
@click.argument("kind", type=click.Choice([*OF_ONE, *OF_SEVERAL]))
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False), help="A .png, .svg or .pdf file.")
def command(kind: str, paths: tuple[str, ...], output: str) -> int:
    """Draw one plot of a run or traces, or of several side by side (comparison, scaling).

    \b
    ringprof plot timeline traces/run.json -o timeline.png
    ringprof plot comparison traces/a traces/b -o comparison.svg
    """
    if Path(output).suffix.lower() not in FORMATS:
        raise UsageError(f"--output {output}: a plot is written as one of {', '.join(FORMATS)}")
    import matplotlib

    from ringprof.report import plots

    with matplotlib.rc_context():
        if Path(matplotlib.matplotlib_fname()).resolve().parent == Path.cwd():
            # A stranger's folder must not say how plots are drawn: its settings may run LaTeX.
            matplotlib.rcdefaults()
        matplotlib.rcParams.update(plots.STYLE)
        figure = _drawn(kind, paths, plots).get_figure()
        try:
            figure.savefig(output)
        except OSError as error:
            raise InputError(f"{output}: cannot be written: {error.strerror or error}") from None
    click.echo(f"Wrote {output}", err=True)
    return 0


def _drawn(kind: str, paths: tuple[str, ...], plots: Any) -> Any:
    if kind in OF_SEVERAL:
        return getattr(plots, kind)(compare(*paths))
    analysis = load(list(paths))
    if not isinstance(analysis, Analysis):
        raise UsageError(f"plot {kind}: a printed table has no such plot: give a run or traces")
    if kind in ("timeline", "steps", "waiting") and analysis.attribution.on_cpu:
        raise UsageError(f"plot {kind}: a CPU run records no device activities; waterfall and breakdown can be drawn")
    if kind in ("steps", "waiting") and not analysis.findings.steps:
        raise UsageError(f"plot {kind}: no ring steps were found in these traces")
    return getattr(analysis.plot, kind)()
