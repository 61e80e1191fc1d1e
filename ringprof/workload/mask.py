"""Attention masks: which keys a query attends to, and how many pairs that makes. Used by strategies, checks and counts.

Positions refer to the whole sequence, which may pack several documents. Query i of a document in [a, b) attends to the
keys j of the same document with

    max(a, i - left) <= j <= min(b - 1, i + right)

which are consecutive keys. A causal mask has right = 0; -1 means no limit, as in flash-attn's ``window_size``. In
addition to its window, a query attends to the first ``prefix`` keys of its document, a <= j < a + prefix; under a
causal mask, only to those up to its own position. Two documents, left = 2, causal, without a prefix and with prefix 1:

    x . . . . | . .        x . . . . | . .
    x x . . . | . .        x x . . . | . .
    x x x . . | . .        x x x . . | . .
    . x x x . | . .        x x x x . | . .
    . . x x x | . .        x . x x x | . .
    ----------+----        ----------+----
    . . . . . | x .        . . . . . | x .
    . . . . . | x x        . . . . . | x x
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from operator import index
from typing import Any

NO_LIMIT = -1
_Window = tuple[int, int]


@dataclass(frozen=True)
class Mask:
    """Mask over a sequence of any length or, with documents, over a sequence of exactly their total length."""

    causal: bool = True
    documents: tuple[int, ...] | None = None
    """Cumulative lengths from 0 to the length of the sequence, as flash-attn's ``cu_seqlens``; None: one document."""
    window: _Window = (NO_LIMIT, NO_LIMIT)
    """Number of keys before and after its own position that a query attends to; a causal mask allows none after it."""
    prefix: int = 0
    """Number of first tokens of a document that all its queries attend to, in addition to the window."""
    total: int | None = field(default=None, compare=False, repr=False)
    """Number of tokens of the documents that `of` was given, a single one included; None: not known."""

    def __post_init__(self) -> None:
        if self.causal not in (True, False):
            raise ValueError(f"causal is True or False: not {self.causal}")
        if self.prefix and (self.prefix < 0 or not self.windowed):
            raise ValueError(
                f"a prefix of {self.prefix}: a number of tokens that are seen beside a window, which it needs"
            )
        if len(self.window) != 2 or any(side < NO_LIMIT for side in self.window):
            raise ValueError(f"{WINDOW}: not {self.window}")
        if self.documents is not None:
            _check_documents(self.documents)

    @classmethod
    def of(
        cls, documents: Any = None, window: Sequence[int] = (-1, -1), *, causal: bool = True, prefix: int = 0
    ) -> Mask:
        """Create a mask; ``documents`` are cumulative lengths in any sequence of integers or a tensor, or None."""
        cumulative = None if documents is None else integers(documents, DOCUMENTS)
        if cumulative is not None:
            _check_documents(cumulative)
        # One document is stored as None, so that equal masks compare equal.
        several = cumulative if cumulative and len(cumulative) > 2 else None
        sides, (first,) = integers(window, WINDOW), integers((prefix,), "prefix is a number of tokens")
        return cls(causal, several, sides, first, cumulative and cumulative[-1])  # type: ignore[arg-type]

    @property
    def plain(self) -> bool:
        """Whether this is a plain causal mask or full attention."""
        return self.documents is None and self.left == NO_LIMIT and self.right == (0 if self.causal else NO_LIMIT)

    @property
    def left(self) -> int:
        """Number of keys before its own position that a query attends to; -1: all."""
        return self.window[0]

    @property
    def right(self) -> int:
        """Number of keys after its own position that a query attends to; -1: all."""
        return 0 if self.causal else self.window[1]

    @property
    def windowed(self) -> bool:
        """Whether the window can exclude keys of a query's document that a plain mask includes."""
        return self.left != NO_LIMIT or self.right > 0 or (not self.causal and self.right == 0)

    def asks_of_kernels(self) -> dict[str, bool]:
        """Return the features that a kernel must support, as arguments for the choice of a kernel."""
        return {} if self.plain else {"windows": self.windowed, "documents": self.documents is not None}

    def spans(self, seq: int) -> Iterator[tuple[int, int]]:
        """Yield the first position and the end of every document that is not empty."""
        bounds = (0, seq) if self.documents is None else self.documents
        self.check(seq)
        yield from ((first, end) for first, end in pairwise(bounds) if end > first)

    def check(self, seq: int) -> None:
        """Raise ValueError if the documents do not have ``seq`` tokens in total."""
        total = self.total if self.documents is None else self.documents[-1]
        if total not in (None, seq):
            raise ValueError(f"the documents end at {total}, and the sequence has {seq} tokens")

    def area(self, seq: int, queries: int | None = None) -> int:
        """Count the pairs of a query and a key that it attends to; with ``queries``, for each document's last ones."""
        self.check(seq)  # equal masks may have other totals
        return _area(self, seq, queries)

    def scaled(self, seq: int, to: int) -> Mask:
        """Scale the mask from ``seq`` to ``to`` tokens: all lengths change in proportion, rounded to whole tokens.

        A document may lose all its tokens; a window and a prefix keep at least one.
        """
        if seq == to:
            return self
        documents = self.documents and tuple(round(bound * to / seq) for bound in self.documents)
        left, right = (side if side < 0 else max(1, (side + 1) * to // seq) - 1 for side in self.window)
        prefix = self.prefix and max(1, self.prefix * to // seq)
        return Mask(self.causal, documents, (left, right), prefix)

    def __str__(self) -> str:
        is_prefix_lm = self.prefix > 0 and (self.causal, *self.window) == (False, NO_LIMIT, 0)
        parts = ["causal" if self.causal else "prefix LM" if is_prefix_lm else "full"]
        if self.documents is not None:
            lengths = [end - first for first, end in self.spans(self.documents[-1])]
            sizes = f"{min(lengths)} to {max(lengths)}" if min(lengths) < max(lengths) else f"{min(lengths)}"
            parts.append(f"{len(lengths)} document{'s' if len(lengths) > 1 else ''} of {sizes} tokens")
        if self.windowed and not is_prefix_lm:
            parts.append(f"window {self.left}, {self.right}" if not self.causal else f"window of {self.left + 1}")
        if self.prefix:
            parts.append(f"prefix of {self.prefix}")
        return ", ".join(parts)


def band_area(queries: int, keys: int, left: int, right: int) -> int:
    """Count the pairs of a block whose last query and last key have the same position, as flash-attn aligns them.

    Query i attends to the keys from i + keys - queries - left to i + keys - queries + right; -1 means no limit.
    """
    shift = keys - queries
    first = 0 if left == NO_LIMIT else _clamped_sum(queries, shift - left, keys)
    end = queries * keys if right == NO_LIMIT else _clamped_sum(queries, shift + right + 1, keys)
    return end - first


def _clamped_sum(count: int, start: int, high: int) -> int:
    """Return the sum of min(max(start + i, 0), high) over i from 0 to count - 1."""
    below = min(max(-start, 0), count)
    above = min(max(high - start, below), count)
    slope = above - below
    return slope * start + (below + above - 1) * slope // 2 + (count - above) * high


@lru_cache(maxsize=256)
def _area(mask: Mask, seq: int, queries: int | None) -> int:
    sizes = ((end - first if queries is None else queries, end - first) for first, end in mask.spans(seq))
    return sum(band_area(rows, keys, mask.left, mask.right) + _prefix_area(mask, rows, keys) for rows, keys in sizes)


def _prefix_area(mask: Mask, queries: int, length: int) -> int:
    """Count the pairs of a document's last queries with prefix keys outside the window, before or after it."""
    keys = min(mask.prefix, length)
    late = 0 if mask.left == NO_LIMIT else _clamped_sum(queries, length - queries - mask.left, keys)
    early = 0 if mask.causal or mask.right == NO_LIMIT else _clamped_sum(queries, keys - length - mask.right, keys)
    return late + early


DOCUMENTS = "documents are cumulative lengths, integers in one dimension, the same for every batch entry"
WINDOW = "window_size is two integers, the tokens before and after its own that a query attends to, -1 for all"


def integers(values: Any, description: str) -> tuple[int, ...]:
    """Return a sequence or tensor as integers. Raises ValueError, with the ``description``, where it holds others."""
    try:
        return tuple(map(index, getattr(values, "tolist", lambda: values)()))
    except TypeError:
        raise ValueError(f"{description}: not {' '.join(repr(values).split())[:60]}") from None


def _check_documents(documents: Sequence[int]) -> None:
    if len(documents) < 2 or documents[0] != 0 or any(end < start for start, end in pairwise(documents)):
        raise ValueError(
            "documents are cumulative lengths: 0, the end of the first, of the second, and so on, never falling; got "
            + ", ".join(map(str, documents[:6])) + (", ..." if len(documents) > 6 else "")
        )  # fmt: skip
