"""Hands one file to Perfetto's page in the browser: over loopback, once, so that it leaves this machine to nobody."""

from __future__ import annotations

import http.server
import secrets
import webbrowser
from pathlib import Path

import click

from ringprof.errors import UsageError

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


def open_in_perfetto(path: Path) -> None:
    """Open a trace in the browser and serve it until the page has it. Raises `UsageError` where the port is in use."""
    try:
        server = _Once(PORT, path)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(
            f"--open: port {PORT}, which Perfetto's page fetches from: {reason}; open {path} there"
        ) from None
    with server:
        page = f"{VIEWER}/#!/?url=http://127.0.0.1:{server.server_port}/{server.name}"
        if not webbrowser.open(page):
            click.echo(f"ringprof: no browser to be had here: open {page}", err=True)
        click.echo("Waiting for the page to fetch the trace; Ctrl-C ends it.", err=True)
        while not server.fetched:
            server.handle_request()
