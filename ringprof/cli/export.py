"""``ringprof export``: all ranks as one trace for Perfetto."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import BinaryIO, cast

import click

from ringprof.analysis.findings.findings import Findings
from ringprof.api import Analysis, load_any
from ringprof.cli.reading import newest_or, reads_traces
from ringprof.cli.serve import open_in_perfetto
from ringprof.cli.write import written
from ringprof.errors import UsageError
from ringprof.options import LoadOptions
from ringprof.report.perfetto import events_of, run_metadata
from ringprof.scratch import remove, scratch_folder


@click.command(name="export")
@click.argument("paths", nargs=-1, type=click.Path(), metavar="[PATH]...")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="A .json or .json.gz file.")
@click.option("--open", "opens", is_flag=True, help="Show it in Perfetto's page; without -o from a temporary file.")
@click.option("--launches", is_flag=True, help="With the CPU threads: their launches and named ranges.")
@reads_traces
def command(paths: tuple[str, ...], reading: LoadOptions, output: str | None, *, opens: bool, launches: bool) -> int:
    """Merge all ranks into one trace on one clock, with ring steps, waits, rates and arrows from send to receive.

    Open the file in https://ui.perfetto.dev, or in chrome://tracing. With --open it is served to the first on this
    machine's loopback, once; the page reads it in the browser and sends it nowhere.

    \b
    ringprof export traces/run.json -o merged.json.gz
    ringprof export traces/run.json --open
    """
    if output is None and not opens:
        raise UsageError("export: give a file to write (-o merged.json.gz), or --open")
    if output is not None and not output.lower().endswith((".json", ".json.gz")):
        raise UsageError(f"--output {output}: a trace is written as .json or .json.gz")
    analysis = load_any(newest_or(paths), reading)
    if not isinstance(analysis, Analysis):
        raise UsageError("export: a printed table has no timeline: give a run or traces")
    found = analysis.findings  # before a file is begun, as it may be refused
    if output is not None:
        _write(found, Path(output), launches=launches)
        if opens:
            open_in_perfetto(Path(output))
        return 0
    folder = scratch_folder("export")
    try:
        _write(found, folder / "merged.json.gz", launches=launches)
        open_in_perfetto(folder / "merged.json.gz")
    finally:
        remove(folder)
    return 0


def _write(found: Findings, path: Path, *, launches: bool) -> None:
    with written(path) as place, place.open("wb") as raw:
        packed = gzip.GzipFile(path.name, "wb", fileobj=raw) if path.suffix.lower() == ".gz" else raw
        with io.TextIOWrapper(cast(BinaryIO, packed), encoding="utf-8") as file:
            file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(run_metadata(found))}, "traceEvents": [\n')
            for number, event in enumerate(events_of(found, launches=launches)):
                file.write((",\n" if number else "") + json.dumps(event))
            file.write("\n]}\n")
