"""Exceptions that the strategies raise."""

from __future__ import annotations


class UnknownName(LookupError):
    """No strategy, kernel or layout has this name."""


class Unsupported(ValueError):
    """The tensors, the world size or the parameters do not fit the strategy; the message says which and why."""


class WrongGradient(RuntimeError):
    """A kernel computed a wrong gradient; the message says what caused it and how to avoid it."""


class PeerLost(RuntimeError):
    """A rank that hops were waiting for has ended, or has not answered within the group's timeout."""
