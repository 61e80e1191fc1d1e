"""Expected load imbalance of a strategy before it runs, for the plan of a recording."""

from __future__ import annotations

from typing import Any


def contiguous_imbalance(size: int) -> float:
    """Return the work of the busiest of N = ``size`` ranks over the mean, for contiguous shards under a causal mask.

    Rank r computes r + 1/2 squares of keys: the last rank N - 1/2, the mean N / 2.
    """
    return 2 - 1 / size


class Expectations:
    """Base class of strategies, which declares their expected load imbalance.

    The method is not inherited, because a parent's figure need not hold for a subclass. Defining a bundled class
    without it raises TypeError. For a user's strategy or a peer's the imbalance is then unknown.
    """

    @classmethod
    def imbalance(cls, size: int, *, causal: bool, **params: Any) -> float | None:
        """Return the work of the busiest of ``size`` ranks over the mean; None where it is unknown.

        ``params`` are the strategy's parameters.
        """
        return None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "imbalance" in vars(cls):
            return
        if is_bundled(cls):
            raise TypeError(f"{cls.__module__}.{cls.__name__} must say imbalance itself: a parent's is not its own")
        cls.imbalance = vars(Expectations)["imbalance"]  # type: ignore[method-assign]


def is_bundled(kind: type) -> bool:
    """Return whether ``kind`` is one of ringprof's own strategies: neither a base class nor an adapter of a peer."""
    bundled = "ringprof.strategies.algorithms."
    return kind.__module__.startswith(bundled) and kind.__module__ != f"{bundled}cached"
