"""A run under somebody else's launcher that failed: the cause in one line, and the log of what every rank told."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ringprof.errors import Interrupted, RecordError, RingprofError
from ringprof.record.ending.lifeline import RankOutcome
from ringprof.record.ending.rank_errors import laggard, rank_error
from ringprof.record.ending.watchdog import TIME_LIMIT

INTERRUPT = signal.SIGINT.name


@dataclass
class FailedRun:
    """What is known when a run has failed."""

    hosts: Sequence[str]
    """Of each rank."""
    outcomes: Mapping[int, RankOutcome] = field(default_factory=dict)
    """In the order in which they came."""
    gone: Sequence[int] = ()
    """Ranks that said nothing and are no more."""
    limit_s: float = 0.0
    overdue: bool = False
    """Whether rank 0 has let the time limit pass."""

    def cause(self) -> RingprofError:
        """The error to end with: the user's wish before a rank that is gone, before one that failed by itself.

        A rank that the launcher stops, or that loses its peers, is no cause where there is another.
        """
        failed = {rank: outcome for rank, outcome in self.outcomes.items() if outcome.kind == "failed"}
        stopped = {rank: outcome for rank, outcome in self.outcomes.items() if outcome.kind == "stopped"}
        interrupted = [outcome for outcome in stopped.values() if outcome.reason == INTERRUPT]
        if interrupted:
            return Interrupted(f"interrupted during {interrupted[0].where}; nothing was recorded")
        if self.gone:
            return RecordError(f"{self._gone_in_words()}{self._stood()}; nothing was recorded")
        for effect in (False, True):
            for rank, outcome in failed.items():
                if outcome.effect == effect:
                    return rank_error(rank, outcome.reason, outcome.message, "")
        if self.overdue or any(outcome.reason == TIME_LIMIT for outcome in stopped.values()):
            stood = {rank: (outcome.where, outcome.hops) for rank, outcome in stopped.items()}
            slowest = laggard(stood, len(self.hosts))
            return RecordError(f"{slowest} when the time limit of {self.limit_s:.0f} s was over; nothing was recorded")
        for rank, outcome in stopped.items():
            if outcome.reason:
                what = f"rank {rank} was stopped by {outcome.reason} in {outcome.where}"
                return RecordError(f"{what}; nothing was recorded")
        return RecordError("a rank ended and said nothing; nothing was recorded")

    def log(self, command: Sequence[str]) -> str:
        """Every rank's last outcomes, with the tracebacks."""
        lines = [f"$ {' '.join(command)}", f"{self.cause()}", ""]
        for rank, host in enumerate(self.hosts):
            lines.append(f"rank {rank} on {host}: {self._last(rank)}")
            detail = self.outcomes[rank].detail if rank in self.outcomes else ""
            lines += [f"    {line}" for line in detail.splitlines()]
        return "\n".join(lines) + "\n"

    def _last(self, rank: int) -> str:
        outcome = self.outcomes.get(rank)
        if outcome is None:
            return "gone without a word" if rank in self.gone else "said nothing"
        posted = "" if outcome.hops is None else f", {outcome.hops} hops posted"
        place = f" in {outcome.where}{posted}" if outcome.where else ""
        said = f": {outcome.message}" if outcome.message else f" ({outcome.reason})" if outcome.reason else ""
        return f"{outcome.kind}{place}{said}"

    def _gone_in_words(self) -> str:
        gone = sorted(self.gone)
        host = self.hosts[gone[0]]
        there = [rank for rank, name in enumerate(self.hosts) if name == host]
        if gone == there and len(set(self.hosts)) > 1:
            what = f"ranks {', '.join(map(str, there))}" if len(there) > 1 else f"rank {there[0]}"
            return f"host {host} with {what} has gone: it is down, cannot be reached, or its ranks were killed"
        kind = f"rank {gone[0]} on host {host} has gone" if len(gone) == 1 else f"ranks {_listed(gone)} have gone"
        return f"{kind} without a word: killed (often the system's answer to memory running out), or out of reach"

    def _stood(self) -> str:
        told = next((outcome.where for outcome in self.outcomes.values() if outcome.where), "")
        return f", while the others were in {told}" if told else ""


def write_log(text: str, output: Path, name: str) -> Path | None:
    """Keep the log of a failed run beside the runs, or where temporary files go; None where neither can be written."""
    for folder in (output.parent, Path(tempfile.gettempdir())):
        path = folder / f"{name}.failed.log"
        try:
            # Never through a link that somebody else has put there.
            with path.open("x", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
        except FileExistsError:
            continue
        except OSError:
            # A full disk leaves half a file.
            _remove(path)
            continue
        return path
    return None


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        pass


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
