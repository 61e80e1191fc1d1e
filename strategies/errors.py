"""What a strategy raises when it is asked for something that it cannot do."""

from __future__ import annotations


class UnknownName(LookupError):
    """No strategy, kernel or layout has this name."""


class Unfit(ValueError):
    """The tensors, the world size or the parameters do not fit the strategy; the message says which and why."""
