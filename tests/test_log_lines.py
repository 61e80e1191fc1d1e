"""Lines of a log by index, in no more memory than the log's bytes."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringprof.common import log_lines
from ringprof.common.log_lines import LONGEST_LINE, LogLines


def test_log_lines_equal_the_lines_of_the_text() -> None:
    assert list(LogLines(b"a\nb\r\n\n c")) == ["a", "b", "", " c"]
    assert list(LogLines(b"")) == [""]
    assert list(LogLines(b"a\n")) == ["a", ""]
    # Other separators may stand inside names.
    assert list(LogLines("a\x0bb\u2028c\rd\n".encode())) == ["a\x0bb\u2028c\rd", ""]


def test_escape_sequences_are_removed() -> None:
    assert list(LogLines(b"\x1b[1;31mred\x1b[0m\n\x1b]0;title\x07text\n\x1b[2K|")) == ["red", "text", "|"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_utf_8_and_utf_16_logs_are_read(encoding: str) -> None:
    text = "zwölf 🚀 ≤ 3\n" * 20_000 + "end"
    lines = LogLines(text.encode(encoding))
    assert (lines[0], lines[19_999], lines[20_000], len(lines)) == ("zwölf 🚀 ≤ 3", "zwölf 🚀 ≤ 3", "end", 20_001)


def test_invalid_utf_8_is_replaced() -> None:
    assert list(LogLines(b"a\xff\nb\xe2\x82")) == ["a\ufffd", "b\ufffd"]


@given(
    st.lists(st.text(st.characters(exclude_characters="\n\r\x1b", exclude_categories=["Cs"]), max_size=40), min_size=1),
    st.sampled_from(["\n", "\r\n"]),
    st.integers(1, 60),
    st.data(),
)
def test_lines_can_be_indexed_in_any_order(lines: list[str], end: str, block: int, data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_lines, "_BLOCK_BYTES", block)
        log = LogLines(end.join(lines).removeprefix("\ufeff").encode())
        expected = end.join(lines).removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
        assert len(log) == len(expected) and list(log) == expected
        for index in data.draw(st.lists(st.integers(0, len(lines) - 1), max_size=20)):
            assert log[index] == expected[index]
        start = data.draw(st.integers(0, len(lines)))
        assert log.between(start, start + 3) == expected[start : start + 3]
        for outside in (-1, len(lines)):
            with pytest.raises(IndexError):
                log[outside]


def test_endless_line_is_read_up_to_a_limit() -> None:
    lines = LogLines(b"first\n" + b"x" * (3 * LONGEST_LINE) + b"\nlast")
    assert [line[:5] for line in lines] == ["first", "xxxxx", "last"]
    assert LONGEST_LINE <= len(lines[1]) < 2 * LONGEST_LINE


def test_one_emoji_does_not_multiply_memory() -> None:
    data = "🚀\n".encode() + b"step 1 loss 2.5\n" * 500_000
    tracemalloc.start()
    try:
        lines = LogLines(data)
        assert sum(len(line) for line in lines) == 1 + 15 * 500_000
        assert lines[400_000] == "step 1 loss 2.5"
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < len(data)


@pytest.mark.parametrize(
    ("data", "opened"), [(b"a", True), (b"a\n", False), (b"a\nb 1", True), (b"a |", True), (b"", False)]
)
def test_last_line_may_be_truncated(data: bytes, opened: bool) -> None:
    lines = LogLines(data)
    assert [lines.is_open(index) for index in range(len(lines))] == [*[False] * (len(lines) - 1), opened]
