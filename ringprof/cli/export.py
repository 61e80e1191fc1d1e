"""``ringprof export``: merge all ranks into one trace for Perfetto, as a file or opened in the browser."""

from __future__ import annotations

import gzip
import html
import http.server
import io
import json
import re
import secrets
import webbrowser
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, cast

import click

from ringprof.analysis.findings.findings import Findings
from ringprof.cli.options import Command
from ringprof.cli.progress import show_progress
from ringprof.cli.reading import newest_or, reads_traces
from ringprof.cli.write import OutputFile, written
from ringprof.common.scratch import remove, scratch_folder
from ringprof.errors import UsageError
from ringprof.report.perfetto import events_of, run_metadata
from ringprof.results.analysis import Analysis
from ringprof.results.load import load_any
from ringprof.results.options import LoadOptions
from ringprof.trace.inputs import EXPORT_SUFFIX

VIEWER = "https://ui.perfetto.dev"
PORT = 9001
"""Only local port from which the content security policy of Perfetto's page allows a fetch."""


class _SingleFileServer(http.server.HTTPServer):
    """HTTP server of one file, used until the file has been fetched."""

    def __init__(self, port: int, path: Path) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.path, self.fetched = path, False
        # A random name that only the page knows, since other users can connect to this machine's loopback, too.
        self.name = f"ringprof-{secrets.token_hex(8)}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _SingleFileServer
    timeout = 5
    """Seconds for which a client that connects but sends no request may block the server."""

    def do_OPTIONS(self) -> None:
        """Answer the browser's preflight request, which asks whether a public page may access this machine."""
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
        """Log nothing to the user's terminal."""


_REDIRECT = """<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer"><title>ringprof</title>
<meta http-equiv="refresh" content="0; url={address}"><p><a href="{address}">Open the trace in Perfetto</a></p>
"""


def open_in_perfetto(path: Path, folder: Path) -> None:
    """Open a trace in the browser and serve it until the page has fetched it.

    The browser opens a file in ``folder`` that redirects to the trace's address. Only this user can read the file,
    whereas every user can see the arguments of a process. Raises `UsageError` if the port is in use.
    """
    try:
        server = _SingleFileServer(PORT, path)
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


@click.command(name="export", cls=Command)
@click.argument("paths", nargs=-1, type=click.Path(), metavar="[PATH]...")
@click.option(
    "-o",
    "--output",
    type=OutputFile(),
    help=f"Trace file to write: .json or .json.gz.  [default: NAME{EXPORT_SUFFIX}, after the run]",
)
@click.option("--open", "opens", is_flag=True, help="Open the trace in Perfetto; without -o, from a temporary file.")
@click.option("--launches", is_flag=True, help="Include the CPU threads: their launches and named ranges.")
@reads_traces
def command(paths: tuple[str, ...], reading: LoadOptions, output: str | None, *, opens: bool, launches: bool) -> int:
    """Merge all ranks into one trace on one clock, with ring steps, waits, rates and arrows from send to receive.

    Open the file in https://ui.perfetto.dev or chrome://tracing. With --open, the file is served once on this machine's
    loopback for ui.perfetto.dev; the page reads it in the browser and sends it nowhere.

    \b
    ringprof export traces/run.json
    ringprof export traces/run.json -o merged.json.gz
    ringprof export traces/run.json --open
    """
    if output is not None and not output.lower().endswith((".json", ".json.gz")):
        raise UsageError(f"--output {output}: a trace is written as .json or .json.gz")
    with show_progress("reading") as notify:
        analysis = load_any(newest_or(paths), replace(reading, notify=notify))
        if not isinstance(analysis, Analysis):
            raise UsageError("export: a printed table has no timeline: give a run or traces")
        findings = analysis.findings  # before the file is opened, since this may raise an error
        notify("writing", 0, 0)
        if output is None and not opens:
            output = default_output(analysis.name)
        if output is not None:
            _write(findings, Path(output), launches=launches)
    if opens:
        folder = scratch_folder("export")
        try:
            if output is None:
                _write(findings, folder / "merged.json.gz", launches=launches)
            open_in_perfetto(Path(output) if output is not None else folder / "merged.json.gz", folder)
        finally:
            remove(folder)
    return 0


def default_output(name: str) -> str:
    """Return a file name for a run or trace of this name, which may come from an untrusted file."""
    stem = re.sub(r"\.(json|gz|ringprof|sqlite)\b", "", name)
    return (re.sub(r"[^\w-]+", "_", stem, flags=re.ASCII)[:_LONGEST_STEM] or "trace") + EXPORT_SUFFIX


_LONGEST_STEM = 100


def _write(findings: Findings, path: Path, *, launches: bool) -> None:
    """Write the merged trace as JSON, compressed if the path ends with ``.gz``."""
    with written(path) as temporary, temporary.open("wb") as raw:
        packed = gzip.GzipFile(path.name, "wb", fileobj=raw) if path.suffix.lower() == ".gz" else raw
        with io.TextIOWrapper(cast(BinaryIO, packed), encoding="utf-8") as file:
            metadata = json.dumps(run_metadata(findings))
            file.write(f'{{"displayTimeUnit": "ms", "otherData": {metadata}, "traceEvents": [\n')
            for number, event in enumerate(events_of(findings, launches=launches)):
                file.write((",\n" if number else "") + json.dumps(event))
            file.write("\n]}\n")
