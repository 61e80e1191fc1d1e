"""`ringprof export --open`: the trace is served to the page that requests it, once, on loopback."""

from __future__ import annotations

import gzip
import html
import json
import re
import shutil
import socket
import stat
import sys
import threading
import webbrowser
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import parse_qs, urlsplit
from urllib.request import Request, urlopen

import pytest

import ringprof
from ringprof import cli
from ringprof.cli import export
from tests.paths import ROOT
from tests.recording.command import HANGS_S

RUN = str(ROOT / "traces" / "h200x4-zigzag-65536")


class Browser:
    """Fake browser that acts like Perfetto's page: a preflight request, then another path, then the trace."""

    def __init__(self) -> None:
        self.page = ""
        self.file = Path()
        self.mode = 0
        self.allowed: list[str | None] = []
        self.refused = 0
        self.body = b""
        self.thread: threading.Thread | None = None

    def open(self, address: str) -> bool:
        """Follow the redirect of a page on disk, whose path is all that the browser's command line shows."""
        self.file = Path(urlsplit(address).path)
        assert urlsplit(address).scheme == "file" and "ringprof-" not in self.file.name
        self.mode = stat.S_IMODE(self.file.parent.stat().st_mode)
        redirect = re.search(r'http-equiv="refresh" content="0; url=([^"]+)"', self.file.read_text("utf-8"))
        assert redirect is not None
        self.page = html.unescape(redirect[1])
        self.thread = threading.Thread(target=self._fetch)
        self.thread.start()
        return True

    def _fetch(self) -> None:
        (url,) = parse_qs(self.page.partition("?")[2])["url"]
        # A client that sends nothing blocks the page only for a moment.
        silent = socket.create_connection(("127.0.0.1", int(url.split(":")[2].partition("/")[0])))
        preflight = urlopen(Request(url, method="OPTIONS"))
        try:
            urlopen(url + ".other")
        except HTTPError as error:
            self.refused = error.code
        answer = urlopen(url)
        silent.close()
        self.allowed = [response.headers["Access-Control-Allow-Origin"] for response in (preflight, answer)]
        self.body = answer.read()


@pytest.fixture
def browser(monkeypatch: pytest.MonkeyPatch) -> Browser:
    fake = Browser()
    monkeypatch.setattr(webbrowser, "open", fake.open)
    monkeypatch.setattr(export, "PORT", 0)
    return fake


STAND_IN = """#!{python}
import html, os, re, sys
from urllib.parse import parse_qs
from urllib.request import urlopen

open({seen!r}, "w").write(" ".join(sys.argv[1:]))
if not os.fork():
    redirect = re.search('content="0; url=([^"]+)"', urlopen(sys.argv[1]).read().decode())
    urlopen(parse_qs(html.unescape(redirect[1]).partition("?")[2])["url"][0]).read()
"""


def test_browser_process_arguments_contain_no_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Replace the browser by a program that stores its arguments, and follows the page on disk."""
    program, seen = tmp_path / "browser", tmp_path / "seen"
    program.write_text(STAND_IN.format(python=sys.executable, seen=str(seen)))
    program.chmod(0o755)
    monkeypatch.setattr(webbrowser, "open", webbrowser.GenericBrowser(str(program)).open)
    monkeypatch.setattr(export, "PORT", 0)
    assert cli.run(["export", RUN, "--open"]) == 0
    arguments = seen.read_text()
    assert arguments.startswith("file:///") and "http:" not in arguments and "perfetto" not in arguments


@pytest.mark.parametrize("kept", [False, True])
def test_page_fetches_the_trace_and_the_command_ends(browser: Browser, kept: bool, tmp_path: Path) -> None:
    out = tmp_path / "a name.json.gz"
    assert cli.run(["export", RUN, "--open", *(["-o", str(out)] if kept else [])]) == 0
    assert browser.thread is not None
    browser.thread.join(timeout=HANGS_S)
    assert browser.page.startswith("https://ui.perfetto.dev/#!/?url=http://127.0.0.1:")
    assert browser.mode == 0o700 and not browser.file.parent.exists()
    assert browser.allowed == ["https://ui.perfetto.dev"] * 2 and browser.refused == 404
    assert len(json.loads(gzip.decompress(browser.body))["traceEvents"]) > 500
    assert out.exists() == kept and (not kept or out.read_bytes() == browser.body)


def test_a_port_in_use_is_one_line(
    browser: Browser, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr(export, "PORT", taken.getsockname()[1])
        assert cli.run(["export", RUN, "--open"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("ringprof: --open: port") and "in use" in last and not browser.page


def test_export_names_its_file_after_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(RUN, tmp_path / "run")
    (tmp_path / "run" / "run.json").unlink()
    monkeypatch.chdir(tmp_path / "run")
    traces = ringprof.load(".").ranks
    assert cli.run(["export", "."]) == 0
    (written,) = Path().glob("*.perfetto.json.gz")
    assert json.loads(gzip.decompress(written.read_bytes()))["traceEvents"]
    # The file lies in the folder of the traces that it was made from, and is not one of them.
    assert ringprof.load(".").ranks == traces


@pytest.mark.parametrize(
    ("name", "stem"),
    [("a run", "a_run"), ("../../etc/x", "_etc_x"), ("rank0.json.gz", "rank0"), ("\x1b[31m", "_31m"), ("", "trace"),
     (5000 * "x", 100 * "x")],
)  # fmt: skip
def test_default_name_of_an_export_stays_in_its_folder(name: str, stem: str) -> None:
    assert export.default_output(name) == f"{stem}.perfetto.json.gz"
