"""The mask against its own definition, pair by pair."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringprof.workload.mask import Mask, band_area


def sees(mask: Mask, query: int, key: int) -> bool:
    """Evaluate the definition of the mask for one pair."""
    left, right = mask.window
    low, high = sorted((query, key))
    same_document = not any(low < begins <= high for begins in mask.documents or ())
    begin = max(first for first in (0, *(mask.documents or ())) if first <= query)
    inside = (left < 0 or query - key <= left) and (mask.causal or right < 0 or key - query <= right)
    return same_document and (not mask.causal or key <= query) and (inside or begin <= key < begin + mask.prefix)


@st.composite
def masks(draw) -> tuple[Mask, int]:
    """Draw a mask and the length of its sequence; documents may be empty, or one token long."""
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(sum))
    window = draw(st.tuples(st.integers(-1, 10), st.integers(-1, 10)))
    documents = [0, *itertools.accumulate(lengths)] if draw(st.booleans()) else None
    causal = draw(st.booleans())
    prefix = draw(st.integers(0, 11)) if Mask.of(documents, window, causal=causal).windowed else 0
    return Mask.of(documents, window, causal=causal, prefix=prefix), sum(lengths)


@settings(max_examples=200, deadline=None)
@given(masks())
def test_area_counts_every_pair(drawn):
    mask, seq = drawn
    assert mask.area(seq) == sum(sees(mask, query, key) for query in range(seq) for key in range(seq))


def test_mask_areas_by_hand():
    assert Mask().area(131072) == 131072 * 131073 // 2
    assert Mask(causal=False).area(1000) == 10**6
    assert Mask.of(documents=[0, 3, 3, 5]).area(5) == 6 + 3
    assert Mask.of(window=(2, 0)).area(6) == 1 + 2 + 3 * 4
    # A prefix of 2: queries 3, 4 and 5 see key 0 as well, and the last two key 1.
    assert Mask.of(window=(2, 0), prefix=2).area(6) == 1 + 2 + 3 * 4 + 3 + 2
    # The first 4 of 6 see each other: 6 pairs more than a causal mask has.
    assert Mask.of(causal=False, window=(-1, 0), prefix=4).area(6) == 21 + 6
    # Without a causal mask both sides count: 2 + 3 + 3 + 2.
    assert Mask.of(causal=False, window=(1, 1)).area(4) == 10


@given(*(st.integers(1, 8),) * 2, *(st.integers(-1, 9),) * 2)
def test_band_area_is_aligned_to_the_last_query_and_key(queries, keys, left, right):
    shift = keys - queries
    pairs = itertools.product(range(queries), range(keys))
    expected = sum(
        (left < 0 or key >= query + shift - left) and (right < 0 or key <= query + shift + right)
        for query, key in pairs
    )
    assert band_area(queries, keys, left, right) == expected


def test_scaled_mask_keeps_relative_lengths():
    mask = Mask.of(documents=[0, 1000, 3000, 4000], window=(399, 0)).scaled(4000, 400)
    assert (mask.documents, mask.window) == ((0, 100, 300, 400), (39, 0))
    assert Mask.of(window=(0, 0)).scaled(4000, 4) == Mask.of(window=(0, 0))
    assert Mask.of(window=(399, 0), prefix=64).scaled(4000, 400) == Mask.of(window=(39, 0), prefix=6)
    assert Mask.of(window=(399, 0), prefix=64).scaled(4000, 4) == Mask.of(window=(0, 0), prefix=1)


def test_invalid_masks_are_refused():
    for documents in ([1, 4], [0, 5, 3], [0]):
        with pytest.raises(ValueError, match="cumulative lengths"):
            Mask.of(documents=documents)
    with pytest.raises(ValueError, match="window_size"):
        Mask.of(window=(-2, 0))
    for prefix, window in ((-1, (3, 0)), (4, (-1, -1))):
        with pytest.raises(ValueError, match="a prefix of"):
            Mask.of(window=window, prefix=prefix)
    with pytest.raises(ValueError, match="end at 4, and the sequence has 5"):
        Mask.of(documents=[0, 2, 4]).area(5)
    windows: list[Any] = [5, None, (3,), (3.0, 0.0), (1, 2, 3), ("3", 0)]
    for window in windows:
        with pytest.raises(ValueError, match=r"^window_size is two integers, .*: not "):
            Mask.of(window=window)
    lengths: list[Any] = [8, [0.0, 8.0], [[0, 8], [0, 8]]]
    for documents in lengths:
        with pytest.raises(ValueError, match=r"^documents are cumulative lengths, integers in one dimension"):
            Mask.of(documents=documents)
    with pytest.raises(ValueError, match=r"^causal is True or False: not None$"):
        Mask.of(causal=cast(Any, None))
    with pytest.raises(ValueError, match=r"^prefix is a number of tokens"):
        Mask.of(prefix=cast(Any, None))


@pytest.mark.parametrize("documents", [[0, 20], [0, 60], [0, 20, 40], [0, 20, 60]])
def test_documents_of_another_total_are_refused_a_single_one_too(documents):
    Mask.of().area(48), Mask.of(documents=[0, 48]).area(48)  # equal masks, whose results are cached
    for ask in (Mask.check, Mask.area, lambda mask, seq: list(mask.spans(seq))):
        with pytest.raises(ValueError, match=f"^the documents end at {documents[-1]}, and the sequence has 48 tokens$"):
            ask(Mask.of(documents=documents), 48)


def test_one_document_is_a_plain_mask():
    assert Mask.of(documents=[0, 8]) == Mask() and Mask().plain and Mask(causal=False).plain
    assert not Mask.of(documents=[0, 4, 8]).plain and not Mask.of(window=(3, 0)).plain


def test_documents_of_one_length_are_described_by_it() -> None:
    assert str(Mask.of([0, 256, 512], (-1, -1), causal=True)) == "causal, 2 documents of 256 tokens"
    assert str(Mask.of([0, 100, 512], (-1, -1), causal=True)) == "causal, 2 documents of 100 to 412 tokens"
