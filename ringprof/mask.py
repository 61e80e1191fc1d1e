"""Which keys a query sees, and how many pairs that makes: one definition for strategies, checks and counts.

Positions are those of the whole sequence, which may pack several documents. Query i of a document that lies in [a, b)
sees the keys j of the same document with

    max(a, i - left) <= j <= min(b - 1, i + right)

which is one stretch of consecutive keys. A causal mask has right = 0; -1 is no limit, as in flash-attn's
``window_size``. Beside its window it sees the first ``prefix`` keys of its document, a <= j < a + prefix; a causal mask
leaves those of them up to its own. With two documents, left = 2 and causal, without a prefix and with one of 1:

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
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

NO_LIMIT = -1
_Window = tuple[int, int]


@dataclass(frozen=True)
class Mask:
    """A mask over a sequence of any length, or, where it has documents, of exactly theirs."""

    causal: bool = True
    documents: tuple[int, ...] | None = None
    """Cumulative lengths from 0 to the sequence's, as flash-attn's ``cu_seqlens``; None: one document."""
    window: _Window = (NO_LIMIT, NO_LIMIT)
    """Tokens before and after its own that a query sees; a causal mask leaves none after it."""
    prefix: int = 0
    """Tokens that begin a document and are seen from everywhere in it, beside the window."""

    def __post_init__(self) -> None:
        if self.prefix and (self.prefix < 0 or not self.windowed):
            raise ValueError(
                f"a prefix of {self.prefix}: a number of tokens that are seen beside a window, which it needs"
            )
        if any(side < NO_LIMIT for side in self.window):
            raise ValueError(f"window_size {self.window}: a side is a number of tokens, or -1 for no limit")
        if self.documents is not None:
            _check_documents(self.documents)

    @classmethod
    def of(
        cls, documents: Any = None, window: Sequence[int] = (-1, -1), *, causal: bool = True, prefix: int = 0
    ) -> Mask:
        """The mask of these arguments; ``documents`` may be any sequence of integers, a tensor, too, or None."""
        left, right = window
        cumulative = None
        if documents is not None:
            cumulative = tuple(int(x) for x in getattr(documents, "tolist", lambda: documents)())
            _check_documents(cumulative)
        # One document is none, so that equal masks compare equal.
        documents = cumulative if cumulative and len(cumulative) > 2 else None
        return cls(causal, documents, (int(left), int(right)), int(prefix))

    @property
    def plain(self) -> bool:
        """Whether there is nothing but a causal mask, or none."""
        return self.documents is None and self.left == NO_LIMIT and self.right == (0 if self.causal else NO_LIMIT)

    @property
    def left(self) -> int:
        """Tokens before its own that a query sees; -1: all."""
        return self.window[0]

    @property
    def right(self) -> int:
        """Tokens after its own that a query sees; -1: all."""
        return 0 if self.causal else self.window[1]

    @property
    def windowed(self) -> bool:
        """Whether a query may miss keys of its own document that a plain mask would show it."""
        return self.left != NO_LIMIT or self.right > 0 or (not self.causal and self.right == 0)

    def asks_of_kernels(self) -> dict[str, bool]:
        """What the choice of a kernel is told of it: nothing of a plain mask."""
        return {} if self.plain else {"windows": self.windowed, "documents": self.documents is not None}

    def spans(self, seq: int) -> Iterator[tuple[int, int]]:
        """First position and end of every document that is not empty."""
        bounds = (0, seq) if self.documents is None else self.documents
        self.check(seq)
        yield from ((first, end) for first, end in pairwise(bounds) if end > first)

    def check(self, seq: int) -> None:
        """Raises ValueError where the documents are not ``seq`` tokens together."""
        if self.documents is not None and self.documents[-1] != seq:
            raise ValueError(f"the documents end at {self.documents[-1]}, and the sequence has {seq} tokens")

    def area(self, seq: int, queries: int | None = None) -> int:
        """How many pairs of a query and a key that it sees there are; of one document's last ``queries`` alone."""
        return _area(self, seq, queries)

    def scaled(self, seq: int, to: int) -> Mask:
        """The same mask over ``to`` tokens in place of ``seq``: all its lengths shrink alike, as well as they can.

        A document may lose all its tokens; a window and a prefix keep at least one.
        """
        if seq == to or self.plain:
            return self
        documents = self.documents and tuple(round(bound * to / seq) for bound in self.documents)
        left, right = (side if side < 0 else max(1, (side + 1) * to // seq) - 1 for side in self.window)
        prefix = self.prefix and max(1, self.prefix * to // seq)
        return Mask(self.causal, documents, (left, right), prefix)

    def __str__(self) -> str:
        both_ways = self.prefix > 0 and (self.causal, *self.window) == (False, NO_LIMIT, 0)
        parts = ["causal" if self.causal else "prefix LM" if both_ways else "full"]
        if self.documents is not None:
            lengths = [end - first for first, end in self.spans(self.documents[-1])]
            parts.append(f"{len(lengths)} documents of {min(lengths)} to {max(lengths)} tokens")
        if self.windowed and not both_ways:
            parts.append(f"window {self.left}, {self.right}" if not self.causal else f"window of {self.left + 1}")
        if self.prefix:
            parts.append(f"prefix of {self.prefix}")
        return ", ".join(parts)


def band_area(queries: int, keys: int, left: int, right: int) -> int:
    """Pairs of a block whose last query and last key are at the same place, as flash-attn aligns them.

    Query i sees the keys from i + keys - queries - left to i + keys - queries + right, -1 being no limit.
    """
    shift = keys - queries
    first = 0 if left == NO_LIMIT else _clamped_sum(queries, shift - left, keys)
    end = queries * keys if right == NO_LIMIT else _clamped_sum(queries, shift + right + 1, keys)
    return end - first


def _clamped_sum(count: int, start: int, high: int) -> int:
    """The sum of min(max(start + i, 0), high) over i from 0 to count - 1."""
    below = min(max(-start, 0), count)
    above = min(max(high - start, below), count)
    slope = above - below
    return slope * start + (below + above - 1) * slope // 2 + (count - above) * high


@lru_cache(maxsize=256)
def _area(mask: Mask, seq: int, queries: int | None) -> int:
    sizes = ((end - first if queries is None else queries, end - first) for first, end in mask.spans(seq))
    return sum(band_area(rows, keys, mask.left, mask.right) + _beside(mask, rows, keys) for rows, keys in sizes)


def _beside(mask: Mask, queries: int, length: int) -> int:
    """Pairs of a document's prefix with its last queries whose window does not show it: too late for it, or early."""
    keys = min(mask.prefix, length)
    late = 0 if mask.left == NO_LIMIT else _clamped_sum(queries, length - queries - mask.left, keys)
    early = 0 if mask.causal or mask.right == NO_LIMIT else _clamped_sum(queries, keys - length - mask.right, keys)
    return late + early


def _check_documents(documents: Sequence[int]) -> None:
    if len(documents) < 2 or documents[0] != 0 or any(b < a for a, b in pairwise(documents)):
        raise ValueError(
            "documents are cumulative lengths: 0, the end of the first, of the second, and so on, never falling; got "
            + ", ".join(map(str, documents[:6])) + (", ..." if len(documents) > 6 else "")
        )  # fmt: skip
