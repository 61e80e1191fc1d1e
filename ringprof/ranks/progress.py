"""Progress of a recording: reporters, and the progress log that carries a rank's reports to its parent process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from ringprof.common.json_object import JsonObject


class Reporter(Protocol):
    """Receiver of a recording's progress. The command line shows it, the library prints nothing."""

    def say(self, text: str) -> None:
        """Show a line to the user."""

    def start(self, phase: str, total: int) -> None:
        """Begin a phase of ``total`` steps; the one before has ended."""

    def advance(self) -> None:
        """Count one finished step of the current phase."""


class SilentReporter:
    """Reporter that discards everything."""

    def say(self, text: str) -> None:
        pass

    def start(self, phase: str, total: int) -> None:
        pass

    def advance(self) -> None:
        pass


class PositionReporter:
    """Reporter that forwards everything to another reporter and tracks the position of this rank."""

    def __init__(self, reporter: Reporter) -> None:
        self.hops: Callable[[], int | None] = lambda: None
        """Function that returns how many hops this rank has begun in this iteration; None where none are counted."""
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
        """Return the current phase and the step within it, such as ``warm-up, step 2``."""
        return f"{self._phase}, step {self._done + 1}"


def log_path(scratch: Path, rank: int) -> Path:
    """Return the path of the file that holds a rank's output."""
    return scratch / f"rank{rank}.log"


def progress_log_path(scratch: Path, rank: int) -> Path:
    """Return the path of a rank's progress log."""
    return scratch / f"rank{rank}.jsonl"


class ProgressLog:
    """Reporter that writes a rank's calls and its outcome to a file: per call a line of JSON, the time first."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def say(self, text: str) -> None:
        self._write("say", text)

    def start(self, phase: str, total: int) -> None:
        self._write("start", phase, total)

    def advance(self) -> None:
        self._write("advance")

    def end(self, outcome: msgspec.Struct) -> None:
        """Log how the run ends on this rank, a `RankOutcome` of `ringprof.ranks.rank_errors`."""
        self._write("end", msgspec.to_builtins(outcome))

    def _write(self, *call: object) -> None:
        # The file is opened for each line: a rank may be killed at any moment, and must not lose lines.
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([time.monotonic(), *call]) + "\n")


class ProgressLogReader:
    """Reader of a progress log while a rank still writes it, which passes the calls on to a reporter."""

    def __init__(self, path: Path, reporter: Reporter) -> None:
        self._path, self._reporter, self._offset = path, reporter, 0
        self.phase: str | None = None
        """Phase that the rank is in; None before the first."""
        self.outcome: tuple[float, JsonObject] | None = None
        """Time and value of the rank's first outcome; None if it has none."""

    def read(self) -> None:
        """Read the lines added since the last call; an incomplete line waits for its rest."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
            complete = data[: data.rfind(b"\n") + 1]
            self._offset += len(complete)
            for time_s, name, *arguments in map(json.loads, complete.splitlines()):
                if name == "end":
                    self.outcome = self.outcome or (time_s, arguments[0])
                    continue
                self.phase = arguments[0] if name == "start" else self.phase
                getattr(self._reporter, name)(*arguments)
