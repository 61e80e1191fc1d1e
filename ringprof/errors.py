"""Every error that ringprof raises on purpose.

The hierarchy::

    RingprofError                     exit code 2 unless noted
    |- UsageError                     an option or an argument that cannot be honoured
    |  |- UnknownStrategyError        lists the names, suggests the nearest
    |  `- UnsupportedWorkloadError    the strategy, kernel or machine does not support the sequence, heads or dtype
    |- InputError                     a file that cannot be read: path, what is wrong, what to do
    |  |- TraceFormatError
    |  |- RunFormatError
    |  `- KernelTableError
    |     `- NoKernelTableError
    |- MissingExtraError              the exact pip install line
    `- RecordError                    a run failed: rank and log (exit 3)
       |- OutOfMemory                 a rank's device or host ran out of memory
       |- VerificationError           a run computed a wrong result
       `- Interrupted                 the user stopped the run (exit 130)

The command line turns each into one line on stderr; the library never prints and never exits.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib.util import find_spec


class RingprofError(Exception):
    """Base of all errors raised on purpose; ``exit_code`` is what the command line returns."""

    exit_code = 2


class UsageError(RingprofError):
    """An option or an argument that cannot be honoured."""


class UnknownStrategyError(UsageError):
    """No strategy has this name."""


class UnsupportedWorkloadError(UsageError):
    """The strategy, the kernel or the machine does not support the workload."""


class InputError(RingprofError):
    """A file or folder that cannot be read, or does not have the expected content."""


class TraceFormatError(InputError):
    """A file is not a Kineto trace, or the trace has nothing to analyse."""


class RunFormatError(InputError):
    """A file is not a run.json, or was written by a newer ringprof."""


class KernelTableError(InputError):
    """A text has no kernel table that can be read."""


class NoKernelTableError(KernelTableError):
    """A text has no kernel table at all."""


class MissingExtraError(RingprofError):
    """A required optional dependency is not installed."""


class RecordError(RingprofError):
    """A recording failed; the message names the rank and the reason."""

    exit_code = 3


class OutOfMemory(RecordError):
    """A rank's device or host ran out of memory."""


class VerificationError(RecordError):
    """A strategy computed a wrong result, so no run was written."""


class Interrupted(RecordError):
    """The user stopped the run."""

    exit_code = 130


def install_command(extra: str, *packages: str) -> str:
    """Return what installs one of ringprof's optional dependencies, and further packages with it, for a message."""
    return " ".join([f"pip install '.[{extra}]'", *map(repr, packages), "in a clone of ringprof"])


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for an error message, `` (did you mean 'NAME'?)``; empty if no known name is similar.

    Case does not count, nor whether words are joined by a dash or by an underscore. A known name that is one word of
    ``name`` is similar, too: ``ring`` for ``ring_attention``.
    """
    folded = {other.casefold().replace("_", "-"): other for other in known}
    wanted = name.casefold().replace("_", "-")
    words = [word for word in wanted.split("-") if word in folded]
    close = difflib.get_close_matches(wanted, folded, cutoff=0.75) or words or difflib.get_close_matches(wanted, folded)
    return f" (did you mean {folded[close[0]]!r}?)" if close else ""


def require_packages(*packages: str) -> None:
    """Check that these packages are installed, before modules that import them. Raises `MissingExtraError`."""
    for package in packages:
        if find_spec(package) is None:
            raise MissingExtraError(f"recording needs {package}: {install_command('record')}")
