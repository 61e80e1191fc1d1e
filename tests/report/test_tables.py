"""Tests of tables at limited widths: which columns are left out, how names fold, and that no digit is lost."""

from __future__ import annotations

import re

import pytest

import ringprof
from ringprof.analysis.findings.comparison import Difference
from ringprof.report import comparison
from ringprof.report.sections import OPTIONAL, steps
from ringprof.report.sections.breakdown import rank_table
from ringprof.report.tables import Column, Listing, Table, text_table
from ringprof.report.text import TextStyle, short_name
from tests.analysis.test_real_runs import NVLINK, TWO_HOSTS
from tests.loaded import analysis
from tests.paths import DATA, TRACES, VARIED
from tests.tiers import tiered

RUNS = [DATA / NVLINK, DATA / TWO_HOSTS, *sorted(path.parent for path in TRACES.glob("*/run.json"))]
COLUMNS = (Column("rank"), Column("wall"), Column("note", drop=2), Column("exposed\ncomm", drop=1))
ROWS = [["rank 0", "1,186.187", "long note", "14.366"], ["rank 1", "74.901", "-", "44.453"]]


def lines(width: int, columns: tuple[Column, ...] = COLUMNS) -> list[str]:
    return text_table(columns, ROWS, TextStyle(width=width)).split("\n")


def test_table_that_fits_is_shown_unchanged() -> None:
    assert lines(40) == [
        "                              exposed",
        "rank         wall       note     comm",
        "rank 0  1,186.187  long note   14.366",
        "rank 1     74.901          -   44.453",
    ]


def test_columns_are_dropped_by_priority_and_named() -> None:
    assert lines(30) == [
        "                   exposed",
        "rank         wall     comm",
        "rank 0  1,186.187   14.366",
        "rank 1     74.901   44.453",
        "no room for note: --width 37",
    ]
    assert lines(20)[:2] == ["rank         wall", "rank 0  1,186.187"]
    assert " ".join(lines(20)[3:]) == "no room for note, exposed comm: --width 37"


def test_columns_that_cannot_be_dropped_wrap_below() -> None:
    kept = tuple(column._replace(drop=0) for column in COLUMNS)
    assert lines(30, kept) == [
        "rank         wall       note",
        "rank 0  1,186.187  long note",
        "rank 1     74.901          -",
        "        exposed",
        "rank       comm",
        "rank 0   14.366",
        "rank 1   44.453",
    ]


def test_long_names_wrap_below() -> None:
    columns = (Column("kernel", folds=True), Column("time"))
    text = text_table(columns, [["k" * 50, "1.000"]], TextStyle(width=47))
    assert text.split("\n")[1:] == ["k" * 40 + "  1.000", "k" * 10]


TABLE = Table("steps", (Column(""), Column("exposed", "time"), Column("bound by"), Column("GB/s", "rate")), [
    ["fwd 0", 1_000_000, "wire", 300.0], ["fwd 1", 3_000_000, "compute", None], ["fwd 2", 2_000_000, "peer", 20.5],
], "--all")  # fmt: skip


def names(listing: Listing, default_rows: int | None = None) -> list[str]:
    return re.findall(r"fwd \d", TABLE.listed(TextStyle(), listing, default_rows))


def test_rows_are_sorted_and_limited_on_request() -> None:
    assert names(Listing()) == ["fwd 0", "fwd 1", "fwd 2"]
    assert names(Listing("exposed")) == ["fwd 1", "fwd 2", "fwd 0"]
    assert names(Listing("bound by")) == ["fwd 1", "fwd 2", "fwd 0"]
    assert names(Listing("gb/s")) == ["fwd 0", "fwd 2", "fwd 1"]
    assert names(Listing("exposed", top=1)) == ["fwd 1"]
    assert names(Listing(), default_rows=2) == ["fwd 0", "fwd 1"]
    assert names(Listing(everything=True), default_rows=2) == ["fwd 0", "fwd 1", "fwd 2"]
    assert "and 1 more: --all" in TABLE.listed(TextStyle(), Listing(), 2)


@tiered("folder", RUNS, [*RUNS[:2], *(TRACES / name for name in VARIED)], ids=lambda path: path.name)
@pytest.mark.parametrize("everything", [False, True])
def test_no_figure_of_a_committed_run_is_cut_at_80_columns(folder, everything: bool) -> None:
    """Every number shown in 80 columns is in the unlimited report, and no line is longer than the terminal."""
    run, sections, listing = analysis(folder), list(OPTIONAL), Listing(everything=everything)
    narrow = run.to_terminal(TextStyle(width=80), sections, listing)
    wide = run.to_terminal(TextStyle(width=80, wide_tables=True), sections, listing)
    assert "…" not in narrow + wide
    assert max(map(len, narrow.splitlines())) <= 80
    figures = re.compile(r"(?<![\w.])[\d,]+\.\d{3}(?![\w.])")
    assert set(figures.findall(narrow)) <= set(figures.findall(wide))
    missing = len(set(figures.findall(wide)) - set(figures.findall(narrow)))
    assert not missing or "no room for" in narrow


FILL = "vectorized_elementwise_kernel<4, {0}FillFunctor<float>, {1}array<char*, 1ul> >"


@pytest.mark.parametrize(
    ("kernel", "shown"),
    [
        (f"void at::native::{FILL.format('at::native::', 'std::')}(int, std::array<char*, 1ul>)", FILL.format("", "")),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_SendRecv"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<int, 1>(int*)", "CatArrayBatchedCopy<int, 1>"),
        ("Memset (Device)", "Memset (Device)"),
        ("f(g(int))::{lambda(float)#1}", "f(g(int))::{lambda(float)#1}"),
        ("(anonymous)", "(anonymous)"),
        (")", ")"),
    ],
)
def test_short_names_of_kernels(kernel: str, shown: str) -> None:
    assert short_name(kernel) == shown


def test_rate_over_several_link_classes_is_left_out() -> None:
    two_hosts, one_host = (analysis(TRACES / name) for name in ("h200x4-burst-65536-two-hosts", "h200x4-zigzag-65536"))
    for run, rated in ((two_hosts, False), (one_host, True)):
        links = {row.link for row in run.summary.communication}
        assert (len(links) == 1) is rated
        by_rank = run.to_terminal().split("by rank")[1]
        assert ("GB/s" in by_rank.split("\n")[1]) is rated
        titles = rank_table(run.report()["ranks"], run.summary.communication).titles
        assert ("wire GB/s" in titles) is rated and "hop wire ms" in titles


def test_ratios_above_ten_and_cpu_names_in_comparisons() -> None:
    result = ringprof.compare(TRACES / "cpu4-burst-4096", TRACES / "h200x4-burst-262144")
    times = [entry.figures["tflops"].value for entry in result.entries]
    assert comparison.verdict_lines(result) == [f"1: more TFLOP/s, {times[1] / times[0]:,.1f} times"]
    assert result.differing["device"] == ("AMD EPYC", "NVIDIA H200")
    # A parameter that a strategy does not have is not "unknown".
    two = ringprof.compare(TRACES / "h200x4-burst-262144", TRACES / "h200x4-zigzag-262144")
    assert two.differing["-p ring_window"][1] is None
    assert "unknown" not in comparison.render(two, TextStyle())


@pytest.mark.parametrize("name", ["\x1b]0;owned\x07", "\x9b2Jx", "a\nverdict: fine", "\u202e", "\x00"])
def test_table_cells_are_escaped_for_the_terminal(name: str) -> None:
    """User ranges have names from the trace, too; a name of control characters only is not an error."""
    table = Table("t", (Column("name", folds=True), Column("n", "count")), [[name, 1]]).text(TextStyle(width=60))
    assert all(line.isprintable() for line in table.split("\n")) and table.count("\n") == 1


def test_mib_column_divides_by_2_to_the_20() -> None:
    table = Table("memory", (Column(""), Column("held", "MiB")), [["rank 0", 3 << 20]])
    assert table.text(TextStyle(width=40)).split("\n")[-1].split() == ["rank", "0", "3.0"]


@pytest.mark.parametrize(
    ("ratio", "low", "high", "verdict", "shown"),
    [
        (0.95, 0.94, 0.96, "better", "faster by 5.0 % (4.0 to 6.0)"),
        (1.10, 1.08, 1.13, "worse", "slower by 10.0 % (8.0 to 13.0)"),
        (0.99, 0.97, 1.01, "noise", "no difference proved: faster by 1.0 % (-1.0 to 3.0)"),
    ],
)
def test_the_interval_of_a_gain_has_the_sign_of_the_gain(
    ratio: float, low: float, high: float, verdict: str, shown: str
) -> None:
    difference = Difference("iteration_ms", 1, ratio - 1, ratio, verdict, low, high)
    assert comparison._describe(difference, "slower", "faster") == shown


def test_worst_rank_of_a_step_by_the_mean_over_calls() -> None:
    """Rank 0 exposes 10 and 20 in two calls, rank 1 18 in the one that it has."""
    steps_of_ranks = [{"rank": rank, "exposed_ns": ns} for rank, ns in ((0, 10), (0, 20), (1, 18))]
    assert steps.most_exposed(steps_of_ranks) == (1, 18)
