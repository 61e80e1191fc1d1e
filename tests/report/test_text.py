"""Tests of figures and names as text."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ringprof.report import text


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain", "plain"),
        ("\x1b[31mred\x1b[0m", "[31mred [0m"),
        ("two\nlines\r\n", "two lines"),
        ("right\u202eleft", "right left"),
        ("bell\x07 null\x00", "bell null"),
        ("[bold]markup[/bold]", "[bold]markup[/bold]"),
        ("x" * 300, "x" * 199 + "…"),
    ],
)
def test_clean_text_removes_terminal_control_sequences(raw, shown):
    assert text.clean(raw) == shown


@given(st.text())
def test_clean_text_is_one_printable_line(raw):
    assert all(char.isprintable() for char in text.clean(raw))


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        (["traces/run.json", "two words"], "traces/run.json 'two words'"),
        (["a; rm -r ~", "$(id)", "`id`", "a'b"], """'a; rm -r ~' '$(id)' '`id`' 'a'"'"'b'"""),
        (["\x1b]0;owned\x07", "two\nlines", "\u202egnp.exe", "sound"], "PATH PATH PATH sound"),
    ],
)
def test_paths_in_hints_are_shell_quoted(paths, words):
    assert text.shell_words(paths) == words


@pytest.mark.parametrize(
    "formula", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", *(f"{sign}1" for sign in "\uff1d\uff0b\uff0d\uff20")]
)
def test_csv_cells_that_look_like_formulas_are_quoted(formula):
    (cell,) = text.csv_text(["name"], [[formula]]).splitlines()[1:]
    assert cell == f"'{formula.strip()}"


@given(st.text())
def test_ascii_only_text_has_no_other_characters(raw):
    assert text.in_ascii(raw).isascii()


@pytest.mark.parametrize(
    ("time_ns", "shown"),
    [(163_122_749, "163.12 ms"), (950_000, "950.00 µs"), (12_500_000_000, "12.50 s"), (3_343_305_547, "3.343 s")],
)
def test_durations_use_a_suitable_unit(time_ns, shown):
    assert text.duration(time_ns) == shown


@given(st.lists(st.floats(min_value=0, max_value=1e4), min_size=1, max_size=6), st.integers(0, 3))
@example([0.05], 1)
def test_rounded_parts_sum_to_the_rounded_whole(values, digits):
    parts = text.rounded_to_sum(values, sum(values), digits)
    assert round(sum(parts), digits) == pytest.approx(round(sum(values), digits), abs=0.11 * 10**-digits)
    assert all(abs(part - value) <= 10**-digits + 1e-9 for part, value in zip(parts, values, strict=True))


@pytest.mark.parametrize(
    ("values", "digits", "rounded"),
    [
        # The two that are cut most are rounded up.
        ([0.16, 0.178, 0.272], 1, [0.1, 0.2, 0.3]),
        ([33.31, 33.35, 33.34], 1, [33.3, 33.4, 33.3]),
        ([1.4, 1.3, 1.3], 0, [2.0, 1.0, 1.0]),
    ],
)
def test_largest_remainders_are_rounded_up_to_the_sum(values, digits, rounded):
    assert text.rounded_to_sum(values, sum(values), digits) == pytest.approx(rounded)


@pytest.mark.parametrize(
    ("tflops", "shown"), [(520.04, "520.0 TFLOP/s"), (0.0101, "10.1 GFLOP/s"), (4e-5, "40 MFLOP/s")]
)
def test_formatted_rates(tflops, shown):
    assert text.rate(tflops) == shown


@pytest.mark.parametrize(
    ("size", "shown"), [(3685 << 20, "3.6 GiB"), (6 << 20, "6.0 MiB"), (2048, "2.0 KiB"), (5, "5 bytes")]
)
def test_formatted_sizes(size, shown):
    assert text.binary_size(size) == shown


def test_text_bars_are_as_long_as_their_share():
    bar = text.TextStyle().bar
    assert bar(0.5, 10) == "█" * 5
    assert bar(0.0, 10) == ""
    assert bar(1 / 80, 10) == "▏"
    assert bar(2.0, 10) == "█" * 10
    assert text.TextStyle(ascii_only=True).bar(0.5, 10) == "#####"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("as long as it may be", ["as long as it may be"]),
        ("one word more than that", ["one word more than", "  that"]),
        ("  a part of something else", ["  a part of", "    something else"]),
        ("a name  what it is here for", ["a name  what it is", "        here for"]),
        # No room below the second column for a path, which stays whole.
        ("name  in /some/long/path x", ["name  in", "  /some/long/path x"]),
        ("a/path/longer/than/a/line/is x", ["a/path/longer/than/a/line/is", "  x"]),
    ],
)
def test_long_lines_wrap_below(line: str, shown: list[str]) -> None:
    assert text.TextStyle(width=20).fit(line).split("\n") == shown


def test_lines_in_a_pipe_are_wrapped_at_100_columns() -> None:
    # 20 words, 19 below the indent, the other 11 and what is left of the control sequence.
    words = " ".join(["word"] * 50)
    lines = text.TextStyle(wide_tables=True).fit(f"{words}\x1b[2J\n\n{words}").split("\n")
    assert [len(line) for line in lines] == [99, 96, 60, 0, 99, 96, 56] and "\x1b" not in "".join(lines)
