"""The options of every command that reads runs or traces: defined once, they mean and do the same everywhere."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import click

from ringprof.cli.values import all_of
from ringprof.errors import InputError
from ringprof.files import is_file
from ringprof.options import LoadOptions

NEWEST = "traces/run.json"
"""What is read where no path is given."""

_OPTIONS = all_of(
    click.option("--window", metavar="NAME",
                 help="Look at the ranges of this name (* and ? fit any text), or at the whole 'trace'."),
    click.option("--between", metavar="T1,T2",
                 help="Look between two times from the trace's start, such as 10ms,20ms."),
    click.option("--group", multiple=True, callback=lambda context, option, given: ";".join(given) or None,
                 help="Only these process groups' communication: names or descriptions (* and ? fit any text), or a "
                 "group's ranks (0,1,2,3); repeatable."),
    click.option("--rules", type=click.Path(dir_okay=False), help="File of your own rules for what kernels are."),
    click.option("--mixed-runs", is_flag=True,
                 help="Take traces together though they have no moment in common, as of two runs."),
    click.option("--ranks-per-host", type=click.IntRange(min=1), help="Name the hosts where no trace does."),
    click.option("--max-memory", "memory_bytes", type=click.IntRange(min=1),
                 help="Bytes of memory that a process may take to read and analyse.  [default: 1 GiB]"),
    click.option("--max-bytes", "limit_bytes", type=click.IntRange(min=1),
                 help="How far a compressed trace may expand.  [default: 16 GiB]"),
    click.option("--jobs", type=click.IntRange(min=1), help="Processes for many ranks.  [default: one a CPU]"),
    click.option("--scheduler", metavar="ADDRESS",
                 help="Have the workers of a Dask cluster read the traces (tcp://...)."),
)  # fmt: skip
_NAMES = tuple(field.name for field in fields(LoadOptions) if field.name != "notify")


def newest_or(paths: Sequence[str]) -> Sequence[str]:
    """The paths, or without any the newest run. Raises `InputError` where there is none."""
    if not paths and not is_file(NEWEST):
        raise InputError(f"{NEWEST}: no run here yet: give a path, or record one with: ringprof record --help")
    return paths or (NEWEST,)


def reads_traces(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command the options; it gets them as one argument, ``reading``."""

    @functools.wraps(function)
    def command(**options: Any) -> Any:
        chosen = {name: options.pop(name) for name in _NAMES}
        return function(reading=LoadOptions(**chosen), **options)

    return _OPTIONS(command)
