"""``ringprof export``: all ranks as one trace for Perfetto."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import click

from ringprof.api import Analysis, load
from ringprof.errors import InputError, UsageError


@click.command(name="export")
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False), help="A .json or .json.gz file.")
def command(paths: tuple[str, ...], output: str) -> int:
    """Merge all ranks into one trace on one clock, with ring steps, exposed stretches and arrows from send to receive.

    Open the file in https://ui.perfetto.dev, or in chrome://tracing.

    \b
    ringprof export traces/run.json -o merged.json.gz
    """
    from ringprof.report.perfetto import events_of

    if not output.lower().endswith((".json", ".json.gz")):
        raise UsageError(f"--output {output}: a trace is written as .json or .json.gz")
    analysis = load(list(paths) or ["traces/run.json"])
    if not isinstance(analysis, Analysis):
        raise UsageError("export: a printed table has no timeline: give a run or traces")
    try:
        with (
            gzip.open(output, "wt", encoding="utf-8")
            if output.lower().endswith(".gz")
            else Path(output).open("w", encoding="utf-8") as file
        ):
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            for number, event in enumerate(events_of(analysis.findings)):
                file.write((",\n" if number else "") + json.dumps(event))
            file.write("\n]}\n")
    except OSError as error:
        raise InputError(f"{output}: cannot be written: {error.strerror or error}") from None
    click.echo(f"Wrote {output}", err=True)
    return 0
