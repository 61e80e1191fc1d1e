"""Errors of failed runs: the rank that caused the failure, in one line, and the log with every rank's outcome."""

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
    """Return whether an error means that memory ran out, on the device or on the host."""
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def error_kind(error: BaseException) -> str:
    """Return the class name under which an error is sent to other processes; `OutOfMemory` where memory ran out."""
    return OutOfMemory.__name__ if ran_out(error) else type(error).__name__


LONGEST_LINE = 2000
"""Most characters of an error line that is sent between processes; the log holds all of them."""


def error_line(error: BaseException) -> str:
    """Return an error's first line, shortened to `LONGEST_LINE`, with text that is not valid Unicode escaped.

    The class name stands before the text of errors that are not from `ringprof.errors`.
    """
    line = _line(error).encode(errors="backslashreplace").decode()
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 3]}..."


def _line(error: BaseException) -> str:
    """Return the first line of an error, with its class where it is not from `ringprof.errors`."""
    if isinstance(error, RingprofError):
        return str(error)
    if ran_out(error):
        return "out of memory"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def traceback_text(error: BaseException) -> str:
    """Return the traceback of an error, for a log."""
    return "".join(traceback.format_exception(error))


def rank_error(rank: int, kind: str, message: str, log: str) -> RingprofError:
    """Return the error that the whole run ends with, from the kind and message of one rank's error."""
    if kind == OutOfMemory.__name__:
        return OutOfMemory(f"rank {rank} failed: {message}: use a shorter sequence or more ranks{log}")
    error_class = getattr(errors, kind, None)
    if isinstance(error_class, type) and issubclass(error_class, RecordError):
        return error_class(f"{message}{log}")
    if isinstance(error_class, type) and issubclass(error_class, RingprofError):
        # All ranks refuse for the same reason: the request is at fault, not a rank.
        return error_class(message)
    return RecordError(f"rank {rank} failed: {message}{log}")


def signal_error(rank: int, number: int, log: str) -> RecordError:
    """Return the error for a rank that was killed by a signal."""
    name = signal.Signals(number).name
    hint = " (often the system's answer to memory running out)" if number == signal.SIGKILL else ""
    return RecordError(f"rank {rank} was killed by {name}{hint}{log}")


_OF_PEERS = ("DistBackendError", "DistNetworkError", "DistStoreError")


def is_consequence(kind: str, message: str) -> bool:
    """Return whether an error is of a kind that follows from losing a peer, whose own error tells more."""
    if kind == RecordError.__name__:  # a check's error quotes the error of the call
        kind = next((name for name in (*_OF_PEERS, "RuntimeError") if f"{name}: " in message), kind)
    return kind in _OF_PEERS or (
        kind == "RuntimeError" and any(word in message for word in ("onnection", "gloo", "NCCL"))
    )


def slowest_rank(positions: Mapping[int, tuple[str, int | None]], world: int) -> str:
    """Describe the rank that the others waited for: one that sent no position, else the one with the fewest hops.

    ``positions`` maps each rank to the phase and step in which it was stopped, and to the number of hops that it had
    posted in that iteration.
    """
    silent = [rank for rank in range(world) if rank not in positions]
    if silent:
        return f"rank {silent[0]} hung and did not answer"
    if all(hops is None for _, hops in positions.values()):
        return _minority_position({rank: where for rank, (where, _) in positions.items()})
    rank, (where, hops) = min(positions.items(), key=lambda item: -1 if item[1][1] is None else item[1][1])
    posted = "" if hops is None else f", after {hops} hop{'' if hops == 1 else 's'}: hop {hops + 1} was not posted"
    return f"rank {rank} hung in {where}{posted},"


def _minority_position(positions: Mapping[int, str]) -> str:
    """Describe the smallest group of ranks that share a position, for runs in which hops are not counted."""
    ranks_per_position = Counter(positions.values())
    where, count = min(ranks_per_position.items(), key=lambda item: item[1])
    ranks = [rank for rank, position in positions.items() if position == where]
    if len(ranks_per_position) == 1 and count > 1:
        return f"all {count} ranks hung in {where},"
    return f"rank {', '.join(map(str, ranks))} hung in {where},"


INTERRUPT = signal.SIGINT.name


@dataclass
class FailedRun:
    """A failed run: the outcome of every rank that sent one, and the ranks that disconnected."""

    hosts: Sequence[str]
    """Host of each rank."""
    outcomes: Mapping[int, RankOutcome] = field(default_factory=dict)
    """Outcome of each rank that sent one, in order of arrival."""
    disconnected: Sequence[int] = ()
    """Ranks whose connection ended before they had sent an outcome."""
    limit_s: float = 0.0
    """Time limit of the run."""
    overdue: bool = False
    """Whether rank 0 let the time limit pass without ending the run."""

    def cause(self) -> RingprofError:
        """Return the error to end with, from the most likely cause.

        The order is: an interrupt by the user, a rank that disconnected, a rank that failed by itself, a rank that
        failed because it lost a peer, the time limit, a rank that the launcher stopped.
        """
        failed = {rank: outcome for rank, outcome in self.outcomes.items() if outcome.kind == "failed"}
        stopped = {rank: outcome for rank, outcome in self.outcomes.items() if outcome.kind == "stopped"}
        interrupted = [outcome for outcome in stopped.values() if outcome.reason == INTERRUPT]
        if interrupted:
            return Interrupted(f"interrupted during {interrupted[0].where}; nothing was recorded")
        if self.disconnected:
            return RecordError(f"{self._describe_disconnected()}{self._others_position()}; nothing was recorded")
        for effect in (False, True):
            for rank, outcome in failed.items():
                if outcome.effect == effect:
                    return rank_error(rank, outcome.reason, outcome.message, "")
        if self.overdue or any(outcome.reason == TIME_LIMIT for outcome in stopped.values()):
            positions = {rank: (outcome.where, outcome.hops) for rank, outcome in stopped.items()}
            slowest = slowest_rank(positions, len(self.hosts))
            return RecordError(f"{slowest} when the time limit of {self.limit_s:.0f} s was over; nothing was recorded")
        for rank, outcome in stopped.items():
            if outcome.reason:
                stopped_rank = f"rank {rank} was stopped by {outcome.reason} in {outcome.where}"
                return RecordError(f"{stopped_rank}; nothing was recorded")
        return RecordError("a rank ended and said nothing; nothing was recorded")

    def log(self, command: Sequence[str]) -> str:
        """Return the text of the log: the command, the cause, and every rank's outcome with its traceback."""
        lines = [f"$ {' '.join(command)}", f"{self.cause()}", ""]
        for rank, host in enumerate(self.hosts):
            lines.append(f"rank {rank} on {host}: {self._last_outcome(rank)}")
            detail = self.outcomes[rank].detail if rank in self.outcomes else ""
            lines += [f"    {line}" for line in detail.splitlines()]
        return "\n".join(lines) + "\n"

    def _last_outcome(self, rank: int) -> str:
        """Describe the outcome of one rank, for the log."""
        outcome = self.outcomes.get(rank)
        if outcome is None:
            return "gone without a word" if rank in self.disconnected else "said nothing"
        posted = "" if outcome.hops is None else f", {outcome.hops} hops posted"
        position = f" in {outcome.where}{posted}" if outcome.where else ""
        explanation = f": {outcome.message}" if outcome.message else f" ({outcome.reason})" if outcome.reason else ""
        return f"{outcome.kind}{position}{explanation}"

    def _describe_disconnected(self) -> str:
        """Describe the ranks that disconnected; as a host where they are all ranks of it."""
        disconnected = sorted(self.disconnected)
        host = self.hosts[disconnected[0]]
        on_host = [rank for rank, name in enumerate(self.hosts) if name == host]
        if disconnected == on_host and len(set(self.hosts)) > 1:
            names = f"ranks {', '.join(map(str, on_host))}" if len(on_host) > 1 else f"rank {on_host[0]}"
            return f"host {host} with {names} has gone: it is down, cannot be reached, or its ranks were killed"
        listed = ", ".join(map(str, disconnected[:8])) + (" ..." if len(disconnected) > 8 else "")
        subject = (
            f"rank {disconnected[0]} on host {host} has gone" if len(disconnected) == 1 else f"ranks {listed} have gone"
        )
        return f"{subject} without a word: killed (often the system's answer to memory running out), or out of reach"

    def _others_position(self) -> str:
        position = next((outcome.where for outcome in self.outcomes.values() if outcome.where), "")
        return f", while the others were in {position}" if position else ""


def write_log(text: str, output: Path, name: str) -> Path | None:
    """Write the log of a failed run beside the output file, else to the temporary folder.

    Returns the path, or None where neither folder can be written to.
    """
    for folder in (output.parent, Path(tempfile.gettempdir())):
        path = folder / f"{name}.failed.log"
        try:
            # Mode "x" never writes through a symbolic link that another user has created.
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
