"""Which rank failed and why, in one line; and the log of what every rank told."""

from __future__ import annotations

import signal
import tempfile
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ringprof import errors
from ringprof.errors import Interrupted, OutOfMemory, RecordError, RingprofError
from ringprof.record.shutdown.heartbeat import RankOutcome
from ringprof.record.shutdown.watchdog import TIME_LIMIT


def ran_out(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on the device or on the host."""
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def error_kind(error: BaseException) -> str:
    """The name that a rank's error travels under: one of `ringprof.errors`, or its own class's."""
    return OutOfMemory.__name__ if ran_out(error) else type(error).__name__


LONGEST_LINE = 2000
"""Most characters of an error that travel between processes; its log holds all of them."""


def error_line(error: BaseException) -> str:
    """An error's first line, cut where it is long, with its class where it is not one of ours; odd text is escaped."""
    line = _line(error).encode(errors="backslashreplace").decode()
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 3]}..."


def _line(error: BaseException) -> str:
    if isinstance(error, RingprofError):
        return str(error)
    if ran_out(error):
        return "out of memory"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def traceback_text(error: BaseException) -> str:
    """The traceback, for a log."""
    return "".join(traceback.format_exception(error))


def rank_error(rank: int, kind: str, message: str, log: str) -> RingprofError:
    """The error that the whole run ends with, from what one rank said about its own."""
    if kind == OutOfMemory.__name__:
        return OutOfMemory(f"rank {rank} failed: {message}: use a shorter sequence or more ranks{log}")
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, RecordError):
        return found(f"{message}{log}")
    if isinstance(found, type) and issubclass(found, RingprofError):
        # All ranks refuse for the same reason: it is the request's fault, no rank's.
        return found(message)
    return RecordError(f"rank {rank} failed: {message}{log}")


def signal_error(rank: int, number: int, log: str) -> RecordError:
    """The error of a rank that a signal killed."""
    name = signal.Signals(number).name
    hint = " (often the system's answer to memory running out)" if number == signal.SIGKILL else ""
    return RecordError(f"rank {rank} was killed by {name}{hint}{log}")


_OF_PEERS = ("DistBackendError", "DistNetworkError", "DistStoreError")


def is_consequence(kind: str, message: str) -> bool:
    """Whether an error is of the kind that a rank has when it loses a peer: the peer's own tells more."""
    if kind == RecordError.__name__:  # that of a check quotes the error of the call
        kind = next((name for name in (*_OF_PEERS, "RuntimeError") if f"{name}: " in message), kind)
    return kind in _OF_PEERS or (
        kind == "RuntimeError" and any(word in message for word in ("onnection", "gloo", "NCCL"))
    )


def laggard(stood: Mapping[int, tuple[str, int | None]], world: int) -> str:
    """The rank that the others waited for: one that could not say where it was, else the one with fewest hops.

    ``stood`` is where each rank was stopped, and how many hops it had posted in that iteration.
    """
    silent = [rank for rank in range(world) if rank not in stood]
    if silent:
        return f"rank {silent[0]} hung and did not answer"
    if all(hops is None for _, hops in stood.values()):
        return _fewest_there({rank: where for rank, (where, _) in stood.items()})
    rank, (where, hops) = min(stood.items(), key=lambda item: -1 if item[1][1] is None else item[1][1])
    posted = "" if hops is None else f", after {hops} hop{'' if hops == 1 else 's'}: hop {hops + 1} was not posted"
    return f"rank {rank} hung in {where}{posted},"


def _fewest_there(stood: Mapping[int, str]) -> str:
    """Where no hops are counted: the ranks that are elsewhere than most, or all of them."""
    places = Counter(stood.values())
    where, count = min(places.items(), key=lambda item: item[1])
    ranks = [rank for rank, there in stood.items() if there == where]
    if len(places) == 1 and count > 1:
        return f"all {count} ranks hung in {where},"
    return f"rank {', '.join(map(str, ranks))} hung in {where},"


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
        listed = ", ".join(map(str, gone[:8])) + (" ..." if len(gone) > 8 else "")
        kind = f"rank {gone[0]} on host {host} has gone" if len(gone) == 1 else f"ranks {listed} have gone"
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
            with suppress(OSError):
                path.unlink(missing_ok=True)
            continue
        return path
    return None
