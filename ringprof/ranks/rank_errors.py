"""How a run ends on its ranks: each rank's outcome, the one-line error of a failed run, and the log of all outcomes."""

from __future__ import annotations

import signal
import tempfile
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from ringprof import errors
from ringprof.errors import Interrupted, OutOfMemory, RecordError, RingprofError
from ringprof.ranks.progress import PositionReporter, log_path
from ringprof.ranks.watchdog import INTERRUPT, TIME_LIMIT


class RankOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How the run ended on one rank, as that rank reports it."""

    kind: str
    """``failed``, ``stopped`` or ``done``. Exit code 0 does not prove ``done``, since user code may exit."""
    where: str = ""
    """Phase and step that the rank was in."""
    hops: int | None = None
    """Number of hops that the rank had begun in this iteration; None where hops are not counted."""
    reason: str = ""
    """The signal that stopped the rank, or the class name of its error."""
    message: str = ""
    """First line of the error."""
    effect: bool = False
    """Whether the error is of a kind that follows from losing a peer."""
    detail: str = ""
    """Traceback, for the log."""


def stopped_outcome(position: PositionReporter, reason: str) -> RankOutcome:
    """Return the outcome of this rank when it is stopped; ``reason`` is empty where rank 0 stops it."""
    return RankOutcome(kind="stopped", where=position.where(), hops=position.hops(), reason=reason)


def failed_outcome(position: PositionReporter, error: BaseException) -> RankOutcome:
    """Return the outcome of this rank when it fails with ``error``."""
    kind, message = error_kind(error), error_line(error)
    return RankOutcome(
        kind="failed", where=position.where(), hops=position.hops(), reason=kind, message=message,
        effect=is_consequence(kind, message), detail="".join(traceback.format_exception(error)),
    )  # fmt: skip


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
    if isinstance(error, RingprofError):
        line = str(error)
    elif ran_out(error):
        line = "out of memory"
    elif isinstance(error, OSError) and error.filename is not None and error.strerror:
        line = f"{error.filename}: {error.strerror}"
    else:
        line = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
    line = line.encode(errors="backslashreplace").decode()
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 3]}..."


def rank_error(rank: int, outcome: RankOutcome, log: str = "") -> RingprofError:
    """Return the error that the whole run ends with, from the outcome of the rank that failed."""
    if outcome.reason == OutOfMemory.__name__:
        return OutOfMemory(f"rank {rank} failed: {outcome.message}: use a shorter sequence or more ranks{log}")
    error_class = getattr(errors, outcome.reason, None)
    if isinstance(error_class, type) and issubclass(error_class, RecordError):
        return error_class(f"{outcome.message}{log}")
    if isinstance(error_class, type) and issubclass(error_class, RingprofError):
        # All ranks refuse for the same reason: the request is at fault, not a rank.
        return error_class(outcome.message)
    return RecordError(f"rank {rank} failed: {outcome.message}{log}")


_OF_PEERS = ("DistBackendError", "DistNetworkError", "DistStoreError", "PeerLost", "RankRaised")


def is_consequence(kind: str, message: str) -> bool:
    """Return whether an error is of a kind that follows from losing a peer, whose own error tells more."""
    if kind == RecordError.__name__:  # a check's error quotes the error of the call
        kind = next((name for name in (*_OF_PEERS, "RuntimeError") if f"{name}: " in message), kind)
    return kind in _OF_PEERS or (
        kind == "RuntimeError" and any(word in message for word in ("onnection", "gloo", "NCCL"))
    )


def slowest_rank(outcomes: Mapping[int, RankOutcome], world: int) -> str:
    """Describe the rank that the others waited for: one that sent no outcome, else those with the fewest hops.

    If hops are not counted, it is the smallest group of ranks that share a position. ``outcomes`` maps each rank to its
    outcome when it was ended.
    """
    silent = [rank for rank in range(world) if rank not in outcomes]
    if silent:
        return f"rank {silent[0]} hung and did not answer"
    if all(outcome.hops is None for outcome in outcomes.values()):
        positions = Counter(outcome.where for outcome in outcomes.values())
        where, count = min(positions.items(), key=lambda item: item[1])
        if len(positions) == 1 and count > 1:
            return f"all {count} ranks hung in {where},"
        ranks = [str(rank) for rank, outcome in outcomes.items() if outcome.where == where]
        return f"rank {', '.join(ranks)} hung in {where},"
    first = min(outcomes, key=lambda rank: -1 if (hops := outcomes[rank].hops) is None else hops)
    where, hops = outcomes[first].where, outcomes[first].hops
    ranks = [str(rank) for rank in sorted(outcomes) if (outcomes[rank].where, outcomes[rank].hops) == (where, hops)]
    named = f"all {world} ranks" if len(ranks) == world > 1 else f"rank {', '.join(ranks)}"
    posted = "" if hops is None else f", after {hops} hop{'' if hops == 1 else 's'}: hop {hops + 1} was not posted"
    return f"{named} hung in {where}{posted},"


@dataclass
class FailedRun:
    """A failed run: the ranks' outcomes, and how ranks ended that sent none.

    Rank 0 of an external launcher sees that a rank has disconnected, the parent of local ranks sees their exit codes.
    """

    hosts: Sequence[str]
    """Host of each rank."""
    outcomes: Mapping[int, RankOutcome] = field(default_factory=dict)
    """Outcome of each rank that sent one, in order of arrival."""
    disconnected: Sequence[int] = ()
    """Ranks whose connection ended before they had sent an outcome."""
    limit_s: float = 0.0
    """Time limit of the run."""
    overdue: bool = False
    """Whether the time limit has passed: that of a local run, or one that rank 0 let pass."""
    statuses: Mapping[int, int] = field(default_factory=dict)
    """Exit codes of the local ranks that ended by themselves before all had succeeded; negative for signals."""
    interrupted: bool = False
    """Whether the user interrupted the parent of local ranks."""
    logs: Path | None = None
    """Folder of the local ranks' logs."""
    records: bool = True
    """Whether the run was to be recorded; a check is not."""

    def cause(self) -> RingprofError:
        """Return the error to end with, from the most likely cause.

        The order is: an interrupt by the user, a rank that was killed or disconnected, a rank that failed by itself, a
        rank that ended without an error, the time limit, a rank that failed because it lost a peer, a rank that the
        launcher stopped.
        """
        failed = {rank: outcome for rank, outcome in self.outcomes.items() if outcome.kind == "failed"}
        stopped = {rank: outcome for rank, outcome in self.outcomes.items() if outcome.kind == "stopped"}
        position = next((outcome.where for outcome in self.outcomes.values() if outcome.where), "")
        nothing = "; nothing was recorded" if self.records else ""
        if self.interrupted or any(outcome.reason == INTERRUPT for outcome in stopped.values()):
            during = f" during {position}" if position else ""
            return Interrupted(f"interrupted{during}{nothing}{self._logs()}")
        for rank, status in self.statuses.items():
            if status < 0:
                name = signal.Signals(-status).name
                hint = " (often the system's answer to memory running out)" if name == "SIGKILL" else ""
                return RecordError(f"rank {rank} was killed by {name}{hint}{nothing}{self._logs(rank)}")
        if self.disconnected:
            others = f", while the others were in {position}" if position else ""
            return RecordError(f"{self._describe_disconnected()}{others}{nothing}")
        own = next((rank for rank, outcome in failed.items() if not outcome.effect), None)
        if own is not None:
            return rank_error(own, failed[own], self._logs(own))
        # All errors are consequences: the cause is a rank that ended without an error, whatever its exit code.
        silent = [rank for rank in self.statuses if rank not in failed]
        if silent:
            rank = max(silent, key=lambda rank: self.statuses[rank] != 0)
            how = f"exited with code {self.statuses[rank]} and printed no error"
            if rank in stopped:
                how = f"was stopped by {stopped[rank].reason} in {stopped[rank].where}"
            return RecordError(f"rank {rank} {how}{nothing}{self._logs(rank)}")
        if self.overdue or any(outcome.reason == TIME_LIMIT for outcome in stopped.values()):
            # A rank that is ended may lose its peers first.
            slowest = slowest_rank(self.outcomes, len(self.hosts))
            return RecordError(f"{slowest} when the time limit of {self.limit_s:.0f} s was over{nothing}{self._logs()}")
        if failed:
            rank = next(iter(failed))
            return rank_error(rank, failed[rank], self._logs(rank))
        for rank, outcome in stopped.items():
            if outcome.reason:
                return RecordError(f"rank {rank} was stopped by {outcome.reason} in {outcome.where}{nothing}")
        return RecordError(f"a rank exited without an error{nothing}")

    def _logs(self, rank: int | None = None) -> str:
        """Return the end of a message that names the log of a local rank, by default the folder of all logs."""
        if self.logs is None:
            return ""
        return f"; logs kept in {self.logs}" if rank is None else f"; log: {log_path(self.logs, rank)}"

    def log(self, command: Sequence[str]) -> str:
        """Return the text of the log: the command, the cause, and every rank's outcome with its traceback."""
        lines = [f"$ {' '.join(command)}", f"{self.cause()}", ""]
        for rank, host in enumerate(self.hosts):
            outcome = self.outcomes.get(rank)
            if outcome is None:
                text = "connection lost" if rank in self.disconnected else "no message"
            else:
                posted = "" if outcome.hops is None else f", {outcome.hops} hops begun"
                position = f" in {outcome.where}{posted}" if outcome.where else ""
                why = f": {outcome.message}" if outcome.message else f" ({outcome.reason})" if outcome.reason else ""
                text = f"{outcome.kind}{position}{why}"
            lines.append(f"rank {rank} on {host}: {text}")
            lines += [f"    {line}" for line in (outcome.detail.splitlines() if outcome else ())]
        return "\n".join(lines) + "\n"

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
