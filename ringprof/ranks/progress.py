"""Progress of a recording: reporters, and the progress log that carries a rank's reports to its parent process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

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


class ProgressLog(PositionReporter):
    """Progress log of a rank: a file of JSON lines with its progress and its outcome."""

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

    def end(self, outcome: msgspec.Struct) -> None:
        """Log how the run ends on this rank, a `RankOutcome` of `ringprof.ranks.rank_errors`."""
        self._write(outcome=msgspec.to_builtins(outcome))

    def _write(self, **entry: Any) -> None:
        # The file is opened for each line: a rank may be killed at any moment, and must not lose lines.
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"at": time.monotonic(), **entry}) + "\n")


class ProgressLogReader:
    """Reader of a progress log while a rank still writes it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = self._relayed = 0
        self.entries: list[JsonObject] = []

    def read(self) -> None:
        """Read the entries added since the last call; an incomplete line waits for its rest."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
            complete = data[: data.rfind(b"\n") + 1]
            self._offset += len(complete)
            self.entries.extend(json.loads(line) for line in complete.splitlines())

    def relay(self, reporter: Reporter) -> None:
        """Read the new entries and forward to a reporter all that were not forwarded yet."""
        self.read()
        for entry in self.entries[self._relayed :]:
            if "say" in entry:
                reporter.say(entry["say"])
            elif "start" in entry:
                reporter.start(entry["start"], entry["total"])
            elif "advance" in entry:
                reporter.advance()
        self._relayed = len(self.entries)

    def last(self, key: str) -> JsonObject | None:
        """Return the newest entry that has ``key``; None if there is none."""
        return next((entry for entry in reversed(self.entries) if key in entry), None)

    def outcome(self) -> JsonObject | None:
        """Read the new entries; return the entry of the rank's first outcome, None if there is none."""
        self.read()
        return next((entry for entry in self.entries if "outcome" in entry), None)
