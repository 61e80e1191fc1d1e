"""A headless Chromium controlled over its debugging protocol: open a page from disk, look, click, and listen."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

import websocket

from tests.recording.command import HANGS_S

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


class Browser:
    """A browser with one tab.

    ``messages`` and ``requests`` hold what the console and the network reported since the page was opened.
    """

    def __init__(self, *, dark: bool = False) -> None:
        assert CHROMIUM is not None
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
             "--disable-quic", "--no-first-run", "--disable-component-update", "--disable-sync",
             "--remote-debugging-port=0", "--remote-allow-origins=*", f"--user-data-dir={self._folder.name}",
             "--window-size=1280,1000", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "TMPDIR": self._folder.name},
        )  # fmt: skip
        self._number = 0
        self.messages: list[str] = []
        self.requests: list[str] = []
        try:
            self._connect(dark=dark)
        except BaseException:
            self._end()
            raise

    def _connect(self, *, dark: bool) -> None:
        port = self._port()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=HANGS_S) as answer:
            address = next(tab for tab in json.load(answer) if tab["type"] == "page")["webSocketDebuggerUrl"]
        self._socket = websocket.create_connection(address, timeout=HANGS_S)
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._end()

    def _port(self) -> int:
        file = Path(self._folder.name) / "DevToolsActivePort"
        for _ in range(400):
            if file.is_file() and (lines := file.read_text().split()):
                return int(lines[0])
            time.sleep(0.05)
        raise AssertionError("the browser does not start")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; events that arrive in between are kept."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._number:
                assert "error" not in message, message["error"]
                result: dict[str, Any] = message["result"]
                return result
            self._keep(message)

    def _keep(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event["method"] == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.messages.append(str(params["args"]))
        elif event["method"] == "Runtime.exceptionThrown":
            self.messages.append(str(params["exceptionDetails"]))
        elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.messages.append(params["entry"]["text"])
        elif event["method"] == "Page.javascriptDialogOpening":
            self.messages.append("a dialog opened")

    def open(self, path: Path) -> None:
        """Open a file and wait until its figures are drawn."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.until("document.readyState === 'complete' && (!window.Bokeh || Bokeh.documents.every(d => d.is_idle))")
        # A page of ringprof says when its script has taken over the figures.
        self.until("!document.querySelector('.tip') || document.documentElement.hasAttribute('data-ready')")

    def run(self, script: str) -> Any:
        """Evaluate an expression in the page through the debugger, which no content policy restricts."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until an expression is true."""
        for _ in range(400):
            if self.run(f"Boolean({condition})"):
                return
            time.sleep(0.05)
        raise AssertionError(f"it never became true: {condition}")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Send ``mouseMoved``, ``mousePressed``, ``mouseReleased`` or ``mouseWheel`` at a position in the window."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
