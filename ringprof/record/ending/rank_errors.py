"""Which rank failed and why, in one line."""

from __future__ import annotations

import signal
import traceback
from collections import Counter
from collections.abc import Mapping

from ringprof import errors
from ringprof.errors import OutOfMemory, RecordError, RingprofError
from ringprof.record.memory import ran_out


def error_kind(error: BaseException) -> str:
    """The name that a rank's error travels under: one of `ringprof.errors`, or its own class's."""
    return OutOfMemory.__name__ if ran_out(error) else type(error).__name__


def error_line(error: BaseException) -> str:
    """An error's first line, with its class where it is not one of ours; what is no text is escaped."""
    return _line(error).encode(errors="backslashreplace").decode()


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


def is_consequence(kind: str, message: str) -> bool:
    """Whether an error is of the kind that a rank has when it loses a peer: the peer's own tells more."""
    return kind in ("DistBackendError", "DistNetworkError", "DistStoreError") or (
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
