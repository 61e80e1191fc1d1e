"""Exceptions that the strategies raise."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class UnknownName(LookupError):
    """No strategy, kernel or layout has this name."""


class Unsupported(ValueError):
    """The tensors, the world size or the parameters do not fit the strategy; the message says which and why."""


class WrongGradient(RuntimeError):
    """A kernel computed a wrong gradient; the message says what caused it and how to avoid it."""


class PeerLost(RuntimeError):
    """A rank that hops were waiting for has ended, or has not answered within the group's timeout."""


class RankRaised(PeerLost):
    """A rank has raised in the middle of a call. `Strategy.recover`, called on all ranks, makes the next call right."""


def why_not_tensors(*tensors: Any) -> str | None:
    """Return why no strategy computes with these tensors, DTensors or types that are not real; None where one may."""
    if any(hasattr(x, "to_local") for x in tensors):
        return "strategies take and return this rank's tensors, not DTensors: call to_local() on each"
    if not all(x.is_floating_point() for x in tensors):
        return f"strategies compute in real floating point: got {', '.join(str(x.dtype) for x in tensors)}"
    return None


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Return a hint for an error message, `` (did you mean 'NAME'?)``; empty if no known name is similar.

    Case does not count. A known name that is one word of ``name`` is similar, too: ``ring`` for ``ring_attention``.
    """
    folded = {other.lower().replace("_", "-"): other for other in known}
    wanted = name.lower().replace("_", "-")
    words = [word for word in wanted.split("-") if word in folded]
    close = difflib.get_close_matches(wanted, folded, cutoff=0.75) or words or difflib.get_close_matches(wanted, folded)
    return f" (did you mean {folded[close[0]]!r}?)" if close else ""
