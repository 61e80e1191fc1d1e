"""``ringprof export``: all ranks as one trace for Perfetto, in a file or handed to its page in the browser."""

from __future__ import annotations

import gzip
import html
import http.server
import io
import json
import secrets
import webbrowser
from pathlib import Path
from typing import BinaryIO, cast

import click

from ringprof.analysis.findings.findings import Findings
from ringprof.api import Analysis, load_any
from ringprof.cli.reading import newest_or, reads_traces
from ringprof.cli.write import written
from ringprof.errors import UsageError
from ringprof.options import LoadOptions
from ringprof.report.perfetto import events_of, run_metadata
from ringprof.scratch import remove, scratch_folder

VIEWER = "https://ui.perfetto.dev"
PORT = 9001
"""The one that Perfetto's page may fetch from, by its own content security policy."""


class _Once(http.server.HTTPServer):
    """Serves one file until it has been fetched."""

    def __init__(self, port: int, path: Path) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.path, self.fetched = path, False
        # Not the file's, which may hold spaces, and known to the page alone: others use this machine's loopback, too.
        self.name = f"ringprof-{secrets.token_hex(8)}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Once
    timeout = 5
    """Seconds that whoever connects and asks nothing may hold up the page."""

    def do_OPTIONS(self) -> None:
        """A browser asks first whether a public page may reach this machine."""
        self._answer(204)
        self.end_headers()

    def do_GET(self) -> None:
        if self.path != f"/{self.server.name}":
            self.send_error(404)
            return
        data = self.server.path.read_bytes()
        self._answer(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.server.fetched = True

    def _answer(self, code: int) -> None:
        self.send_response(code)
        self.send_header("Access-Control-Allow-Origin", VIEWER)
        self.send_header("Access-Control-Allow-Private-Network", "true")
        self.send_header("Cache-Control", "no-store")

    def log_message(self, *_: object) -> None:
        """Nothing: the terminal is the user's."""


_REDIRECT = """<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer"><title>ringprof</title>
<meta http-equiv="refresh" content="0; url={address}"><p><a href="{address}">Open the trace in Perfetto</a></p>
"""


def open_in_perfetto(path: Path, folder: Path) -> None:
    """Open a trace in the browser and serve it until the page has fetched it.

    The browser is started with a file in ``folder``, which only this user may read, and which sends it on to the
    trace's address: the arguments of a process are there for every user to see. Raises `UsageError` where the port is
    in use.
    """
    try:
        server = _Once(PORT, path)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(
            f"--open: port {PORT}, which Perfetto's page fetches from: {reason}; open {path} there"
        ) from None
    with server:
        page = f"{VIEWER}/#!/?url=http://127.0.0.1:{server.server_port}/{server.name}"
        redirect = folder / "open.html"
        redirect.write_text(_REDIRECT.format(address=html.escape(page)), encoding="utf-8")
        if not webbrowser.open(redirect.as_uri()):
            click.echo("ringprof: no browser can be started here", err=True)
        click.echo(f"Waiting for the page to fetch the trace; if none appears, open {page}", err=True)
        click.echo("Ctrl-C ends it.", err=True)
        while not server.fetched:
            server.handle_request()


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
        folder = scratch_folder("export")
        try:
            if output is None:
                _write(found, folder / "merged.json.gz", launches=launches)
            open_in_perfetto(Path(output) if output is not None else folder / "merged.json.gz", folder)
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
