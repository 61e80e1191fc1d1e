"""``ringprof export``: all ranks as one trace for Perfetto."""

from __future__ import annotations

import gzip
import json

import click

from ringprof.api import Analysis, load_any
from ringprof.cli.reading import newest_or, reads_traces
from ringprof.cli.write import written
from ringprof.errors import UsageError
from ringprof.options import LoadOptions
from ringprof.report.perfetto import events_of, metadata_of


@click.command(name="export")
@click.argument("paths", nargs=-1, type=click.Path(), metavar="[PATH]...")
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False), help="A .json or .json.gz file.")
@click.option("--launches", is_flag=True, help="With the CPU threads: their launches and named ranges.")
@reads_traces
def command(paths: tuple[str, ...], reading: LoadOptions, output: str, launches: bool) -> int:
    """Merge all ranks into one trace on one clock, with ring steps, waits, rates and arrows from send to receive.

    Open the file in https://ui.perfetto.dev, or in chrome://tracing.

    \b
    ringprof export traces/run.json -o merged.json.gz
    """
    suffix = output.lower()
    if not suffix.endswith((".json", ".json.gz")):
        raise UsageError(f"--output {output}: a trace is written as .json or .json.gz")
    analysis = load_any(newest_or(paths), reading)
    if not isinstance(analysis, Analysis):
        raise UsageError("export: a printed table has no timeline: give a run or traces")
    found = analysis.findings  # before a file is begun, as it may be refused
    opened = gzip.open if suffix.endswith(".gz") else open
    with written(output), opened(output, "wt", encoding="utf-8") as file:
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(metadata_of(found))}, "traceEvents": [\n')
        for number, event in enumerate(events_of(found, launches=launches)):
            file.write((",\n" if number else "") + json.dumps(event))
        file.write("\n]}\n")
    return 0
