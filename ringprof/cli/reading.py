"""Options of every command that reads runs or traces, defined once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

import click

from ringprof.cli.options import Advanced, all_of, refuse_unused
from ringprof.cli.values import Whole
from ringprof.common.files import is_file
from ringprof.errors import InputError
from ringprof.results.options import LoadOptions

NEWEST = "traces/run.json"
"""Path that is read if the command line has none."""

_OPTIONS = all_of(
    click.option("--window", metavar="NAME",
                 help="Analyse the ranges of this name (* and ? match any text), or the whole 'trace'."),
    click.option("--between", metavar="T1,T2",
                 help="Analyse the time between two offsets from the start of the trace, such as 10ms,20ms."),
    click.option("--group", multiple=True, callback=lambda context, option, values: ";".join(values) or None,
                 help="Analyse the communication of these process groups only: names or descriptions (* and ? match"
                 " any text), or the ranks of a group (0,1,2,3); repeatable."),
    click.option("--rules", cls=Advanced, type=click.Path(dir_okay=False),
                 help="File of your own rules for the kinds of kernels."),
    click.option("--machine", cls=Advanced, metavar="FILE_OR_NAME",
                 help="Calibration of the device, to compare its kernels with.  [default: the bundled one]"),
    click.option("--mixed-runs", cls=Advanced, is_flag=True,
                 help="Accept traces that do not overlap in time, such as those of two runs."),
    click.option("--ranks-per-node", "ranks_per_host", cls=Advanced, type=Whole(min=1),
                 help="Ranks per node, if the traces do not name their nodes."),
    click.option("--max-memory", "memory_bytes", cls=Advanced, type=Whole(min=1),
                 help="Maximum memory per process for reading and analysing, in bytes.  [default: 1 GiB]"),
    click.option("--max-bytes", "limit_bytes", cls=Advanced, type=Whole(min=1),
                 help="Maximum size of a compressed trace after expansion, in bytes.  [default: 16 GiB]"),
    click.option("--jobs", cls=Advanced, type=Whole(min=1),
                 help="Number of processes for many ranks.  [default: one per CPU]"),
    click.option("--scheduler", cls=Advanced, metavar="ADDRESS",
                 help="Address of a Dask scheduler whose workers read the traces (tcp://...)."),
)  # fmt: skip
_NAMES = tuple(field.name for field in fields(LoadOptions) if field.name != "notify")


def newest_or(paths: Sequence[str]) -> Sequence[str]:
    """Return the paths or, if there are none, the newest run. Raises `InputError` if there is no run."""
    if not paths and not is_file(NEWEST):
        raise InputError(f"{NEWEST}: no run here yet: give a path, or record one with: ringprof record --help")
    return paths or (NEWEST,)


def refuse_unread(sources: Iterable[str]) -> None:
    """Raise `UsageError` for an option of traces if the sources of all measurements are printed tables or logs."""
    if {*sources} <= {"table", "log"}:
        unused = {*_NAMES} - {"memory_bytes", "limit_bytes"}
        refuse_unused(": not for printed tables and benchmark logs", unused=unused)


def reads_traces(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command, which receives them as one argument ``reading``."""

    @functools.wraps(function)
    def command(**options: Any) -> Any:
        chosen = {name: options.pop(name) for name in _NAMES}
        return function(reading=LoadOptions(**chosen), **options)

    return _OPTIONS(command)
