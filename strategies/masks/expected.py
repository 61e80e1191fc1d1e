"""How evenly a strategy is expected to deal out the work, before it runs: for the plan of a recording."""

from __future__ import annotations

from typing import Any


def contiguous_imbalance(size: int) -> float:
    """Work of the busiest of N = ``size`` ranks over the mean, with a causal mask and a piece of the sequence each.

    Rank r sees r + 1/2 squares of keys: the last rank N - 1/2, the mean N / 2.
    """
    return 2 - 1 / size


class Expectations:
    """What every strategy class says of itself; None where it says nothing.

    It is not inherited: another strategy's figure, even a parent's, is not one's own. A bundled class without it cannot
    be made (TypeError); a user's own counts as unknown, and so does other people's code.
    """

    @classmethod
    def imbalance(cls, size: int, *, causal: bool, **params: Any) -> float | None:
        """Work of the busiest of ``size`` ranks over the mean; ``params`` are the strategy's own."""
        return None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "imbalance" in vars(cls):
            return
        if is_bundled(cls):
            raise TypeError(f"{cls.__module__}.{cls.__name__} must say imbalance itself: a parent's is not its own")
        cls.imbalance = vars(Expectations)["imbalance"]  # type: ignore[method-assign]


def is_bundled(kind: type) -> bool:
    """Whether ``kind`` is one of ringprof's own strategies: neither a base class nor an adapter of another project."""
    bundled = "ringprof.strategies.algorithms."
    return kind.__module__.startswith(bundled) and kind.__module__ != f"{bundled}cached"
