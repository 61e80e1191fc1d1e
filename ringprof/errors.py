"""Every error that ringprof raises on purpose.

    RingprofError                     exit code 2 unless noted
    |- UsageError                     an option or an argument that cannot be honoured
    |  |- UnknownStrategyError        lists the names, suggests the nearest
    |  `- UnfitWorkloadError          the sequence, heads or dtype do not fit the strategy, kernel or machine
    |- InputError                     a file that cannot be read: path, what is wrong, what to do
    |  |- TraceFormatError
    |  |- RunFormatError
    |  `- KernelTableError
    |     `- NoKernelTableError
    |- MissingExtraError              the exact pip install line
    `- RecordError                    a run failed: rank and log (exit 3)
       |- OutOfMemory                 a rank's device or host had no more memory
       |- VerificationError           a run computed a wrong result
       `- Interrupted                 the user stopped the run (exit 130)

The command line turns each into one line on stderr; the library never prints and never exits.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RingprofError(Exception):
    """Base of all errors raised on purpose; ``exit_code`` is what the command line returns."""

    exit_code = 2


class UsageError(RingprofError):
    """An option or an argument that cannot be honoured."""


class UnknownStrategyError(UsageError):
    """No strategy has this name."""


class UnsupportedWorkloadError(UsageError):
    """The workload does not fit the strategy, the kernel or the machine."""


class InputError(RingprofError):
    """A file or folder that cannot be read as what it was taken for."""


class TraceFormatError(InputError):
    """Not a Kineto trace, or one with nothing in it to analyse."""


class RunFormatError(InputError):
    """Not a run.json, or one written by a newer ringprof."""


class KernelTableError(InputError):
    """Text without a kernel table that can be read."""


class NoKernelTableError(KernelTableError):
    """Text in which no kernel table stands at all."""


class MissingExtraError(RingprofError):
    """An optional dependency is needed and not installed."""


class RecordError(RingprofError):
    """A recording failed; the message names the rank and the reason."""

    exit_code = 3


class OutOfMemory(RecordError):
    """A rank's device or host had no more memory."""


class VerificationError(RecordError):
    """A strategy computed a wrong result; there is no run."""


class Interrupted(RecordError):
    """The user stopped the run."""

    exit_code = 130


def nearest(name: str, known: Iterable[str]) -> str:
    """For a message: which known name was likely meant; empty where none is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
