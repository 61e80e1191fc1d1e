"""How a recording tells what it is doing: a reporter, and the diary that carries a rank's reports to its parent."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Protocol

from ringprof.json_object import JsonObject


class Reporter(Protocol):
    """Receives what a recording does; the command line shows it, the library prints nothing."""

    def say(self, text: str) -> None:
        """A line for the user."""

    def start(self, phase: str, total: int) -> None:
        """A phase of ``total`` steps begins; the one before has ended."""

    def advance(self) -> None:
        """One step of the current phase is done."""


class SilentReporter:
    """A reporter for nobody."""

    def say(self, text: str) -> None:
        pass

    def start(self, phase: str, total: int) -> None:
        pass

    def advance(self) -> None:
        pass


class PositionReporter:
    """Passes everything on to another reporter, and knows where this rank stands."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._phase, self._done = "set-up", 0

    def say(self, text: str) -> None:
        self._reporter.say(text)

    def start(self, phase: str, total: int) -> None:
        self._phase, self._done = phase, 0
        self._reporter.start(phase, total)

    def advance(self) -> None:
        self._done += 1
        self._reporter.advance()

    def where(self) -> str:
        """The phase, and the step within it."""
        return f"{self._phase}, step {self._done + 1}"


class ProgressLog(PositionReporter):
    """A rank's own file of JSON lines: its progress, its error, and its last words when it is stopped."""

    def __init__(self, path: Path) -> None:
        super().__init__(SilentReporter())
        self._path = path

    def say(self, text: str) -> None:
        self._write(say=text)

    def start(self, phase: str, total: int) -> None:
        super().start(phase, total)
        self._write(start=phase, total=total)

    def advance(self) -> None:
        super().advance()
        self._write(advance=1)

    def error(self, kind: str, message: str) -> None:
        """Why this rank fails: ``kind`` is the name of an error class."""
        self._write(error=kind, message=message)

    def done(self) -> None:
        """This rank has carried out its whole task: exit code 0 alone may be the user's code's."""
        self._write(done=True)

    def last_words(self, hops: int | None) -> None:
        """Where this rank stood when it was stopped, and how many hops it had posted in this iteration."""
        self._write(stopped=self.where(), hops=hops)

    def _write(self, **entry: Any) -> None:
        # Opened each time: a rank may be killed at any moment, and a line that is written stays written.
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"at": time.monotonic(), **entry}) + "\n")


class ProgressLogReader:
    """The entries of one diary, as they come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.entries: list[JsonObject] = []

    def read(self) -> list[JsonObject]:
        """The entries that have been added since the last call; half a line waits for the rest."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        fresh = [json.loads(line) for line in complete.splitlines()]
        self.entries.extend(fresh)
        return fresh

    def relay(self, reporter: Reporter) -> None:
        """Pass on to a reporter what is new."""
        for entry in self.read():
            if "say" in entry:
                reporter.say(entry["say"])
            elif "start" in entry:
                reporter.start(entry["start"], entry["total"])
            elif "advance" in entry:
                reporter.advance()

    def last(self, key: str) -> JsonObject | None:
        """The newest entry that has ``key``."""
        return next((entry for entry in reversed(self.entries) if key in entry), None)
