"""Tables in the shapes that other people post: cut names, first rows only, servers' prefixes, nsys and nvprof."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest

from ringprof.cli import run
from ringprof.printed.tables.analyse import TableReport, analyse_table, total_from_shares
from ringprof.printed.tables.read import read_tables
from ringprof.printed.tables.rows import KernelTable, TableRow
from ringprof.printed.tables.table_analysis import TableAnalysis, entry_of_table, figures_of_table, table_dict
from ringprof.report.text import TextStyle
from tests.paths import DATA

TABLES = DATA / "tables"
US, MS, S = 1_000, 1_000_000, 1_000_000_000


def report(name: str) -> TableReport:
    (table,) = read_tables((TABLES / name).read_bytes(), name)
    return analyse_table(table)


def warning_codes(table_report: TableReport) -> list[str]:
    return [warning.code for warning in table_report.warnings]


# --- names cut too early, whose kinds follow from their operators --------------------------------------------


def test_operators_classify_truncated_names() -> None:
    table_report = report("cut-names.txt")
    assert table_report.kinds_ns == {"flash_fwd": 75 * US, "cast": 20 * US, "elementwise": 5 * US}
    assert figures_of_table(table_report)["flash_fwd"] == 0.75
    assert warning_codes(table_report) == []


def kernel(name: str, us: int, calls: int = 4) -> TableRow:
    return TableRow(name, 1, calls, 0, 0, us * US, unit="us", step_ns=1)


def operator(name: str, us: int, calls: int = 4) -> TableRow:
    return TableRow(name, 1, calls, 9, 9, us * US, unit="us", step_ns=1)


def kinds(*rows: TableRow) -> dict[str, int]:
    times = analyse_table(KernelTable("log", 1, "torch", "CUDA", ("Name",), rows)).kinds_ns
    return {kind: time // US for kind, time in times.items()}


CUT = "void cutlass::device_kernel<flash::enable_sm90_or_la..."


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([operator("flash_attn_3::fwd", 30), kernel(CUT, 30)], {"flash_fwd": 30}),
        ([operator("flash_attn_3::bwd", 30), kernel(CUT, 30)], {"flash_bwd": 30}),
        # Forward and backward, each by its own time.
        (
            [operator("flash_attn_3::fwd", 30), operator("flash_attn_3::bwd", 70), kernel(CUT, 70), kernel(CUT, 30)],
            {"flash_bwd": 70, "flash_fwd": 30},
        ),
        # Two kernels a call, one of them called twice as often.
        ([operator("flash_attn_3::fwd", 30), kernel(CUT, 20), kernel(CUT, 10, 8)], {"flash_fwd": 30}),
        ([operator("aten::mm", 50), kernel("void cutlass::Kernel2<cutlass_80_tens...", 50)], {"gemm": 50}),
        ([operator("aten::addmm", 50), kernel("gemm_a", 20), kernel("void cutlass::Ker...", 30)], {"gemm": 50}),
        # Two choices fit: neither is taken.
        ([operator("flash_attn_3::fwd", 30), kernel(CUT, 30), kernel(CUT, 30)], {"other": 60}),
        # No choice fits, another number of calls, an operator that says nothing, all of its time known.
        ([operator("flash_attn_3::fwd", 31), kernel(CUT, 30)], {"other": 30}),
        ([operator("flash_attn_3::fwd", 30, 3), kernel(CUT, 30)], {"other": 30}),
        ([operator("aten::add", 30), kernel(CUT, 30)], {"other": 30}),
        (
            [operator("flash_attn_3::fwd", 10), kernel("flash_fwd_kernel<1>", 10), kernel(CUT, 9)],
            {"flash_fwd": 10, "other": 9},
        ),
        # Names that are whole, or cut but not of a template library, stay what they are.
        ([operator("flash_attn_3::fwd", 30), kernel("void cutlass::device_kernel<x>", 30)], {"other": 30}),
        ([operator("flash_attn_3::fwd", 30), kernel("void my_very_lo...", 30)], {"other": 30}),
    ],
)
def test_truncated_names_get_a_kind_only_if_operators_prove_it(rows: list[TableRow], expected: dict[str, int]) -> None:
    assert kinds(*rows) == expected


# --- rows that are not there ----------------------------------------------------------------------------------


def test_table_of_first_rows_reports_missing_time() -> None:
    table_report = report("first-rows.txt")
    # 40 s are 32.00 %, 31.25 s 25.00 % and 30 s 24.00 %: of 125 s.
    total, slack = total_from_shares(table_report.table)
    assert total is not None and abs(total - 125 * S) <= slack <= 0.0003 * 125 * S
    assert table_report.total_ns == 70_062_500_000
    assert abs(table_report.missing_ns - 54_937_500_000) <= slack
    assert figures_of_table(table_report)["all_gather"] == pytest.approx(0.32, abs=1e-4)
    assert warning_codes(table_report) == ["table_cut_off", "table_rows_missing"]
    assert table_dict(table_report)["whole_ns"] == total
    lines = TableAnalysis("log", [table_report]).to_terminal(TextStyle()).splitlines()
    assert next(line for line in lines if line.startswith("all-gather")).split()[-4:-2] == ["%", "1,528"]
    assert next(line for line in lines if line.startswith("not in this table")).split()[-2:] == ["44.0", "%"]
    assert entry_of_table("a", table_report).figures["send_recv"].value == 0.0


def test_footer_total_shows_missing_kernels() -> None:
    table_report = report("prefixed.txt")
    assert (table_report.total_ns, table_report.whole_ns, table_report.missing_ns) == (
        500 * US,
        2 * S,
        2 * S - 500 * US,
    )
    assert figures_of_table(table_report)["gemm"] == 0.00025
    assert warning_codes(table_report) == ["table_off_footer"]


def test_contradictory_shares_give_no_total() -> None:
    rows = tuple(
        TableRow(name, 1, 1, 0, 0, 30 * MS, share, "ms", 1000) for name, share in (("a<1>", 0.30), ("b<1>", 0.20))
    )
    table = KernelTable("log", 1, "torch", "CUDA", ("Name",), rows)
    assert total_from_shares(table) == (None, 0)
    assert analyse_table(table).missing_ns == 0


def test_missing_kernels_may_have_hidden_communication() -> None:
    rows = (kernel("flash_fwd_kernel<1>", 10), kernel("ncclDevKernel_SendRecv(x)", 40))
    table = KernelTable("log", 1, "torch", "CUDA", ("Name",), rows, None, 70 * US)
    overlap = analyse_table(table, wall_ns=60 * US).overlap
    # Of 40 us of communication at most 10 of what is there and 20 of what is not.
    assert (overlap.least, overlap.most) == (0.0, 0.75)


# --- nsys and nvprof ------------------------------------------------------------------------------------------


def test_names_truncated_by_nsys() -> None:
    table_report = report("nsys.txt")
    assert table_report.kinds_ns == {"all_reduce": 8 * MS, "gemm": 1_500 * US, "flash_fwd": 500 * US}
    assert [row.cut for row in table_report.table.rows] == [True, False, True]
    assert table_report.table.rows[0].stem.endswith("ncclDevKernelArg")
    assert warning_codes(table_report) == []


def test_nvprof_table_is_read() -> None:
    table_report = report("nvprof.txt")
    table = table_report.table
    assert (table.source, table.line, table.device, len(table.rows)) == ("nvprof", 3, "CUDA", 5)
    assert table_report.kinds_ns == {"all_reduce": 1_600 * US, "gemm": 300 * US, "memcpy": 20 * US}
    assert [(row.name, row.calls, row.self_cpu_ns) for row in table.rows[3:]] == [
        ("cudaLaunchKernel", 5, 90 * MS),
        ("cudaMemcpyAsync", 2, 10 * MS),
    ]
    assert (table.rows[0].device_share, table.rows[0].step_ns) == (0.8, 100)
    # 1.92 ms are 96 % of it.
    assert table_report.missing_ns == pytest.approx(80 * US, abs=2 * US)


OLD_NVPROF = """\
[rank1] ==9261== Profiling result:
[rank1] Time(%)      Time     Calls       Avg       Min       Max  Name
[rank1]  58.00%  580.00ms      1000  580.00us  424.00us  1.1400ms  flash_fwd_kernel(float const *, int)
[rank1]  42.00%  420.00ms         1  420.00ms  420.00ms  420.00ms  [CUDA memcpy DtoH]
[rank1]
[rank1] ==9261== API calls:
[rank1] Time(%)      Time     Calls       Avg       Min       Max  Name
[rank1]  99.00%  1.20000s       500  2.4000ms  1.0000us  1.0000ms  cudaDeviceSynchronize
epoch 2
"""


def test_old_nvprof_with_a_header_per_part() -> None:
    (table,) = read_tables(OLD_NVPROF.encode(), "log")
    assert [(row.name, row.self_device_ns, row.self_cpu_ns) for row in table.rows] == [
        ("flash_fwd_kernel(float const *, int)", 580 * MS, 0),
        ("[CUDA memcpy DtoH]", 420 * MS, 0),
        ("cudaDeviceSynchronize", None, 1_200 * MS),
    ]
    assert analyse_table(table).missing_ns == 0


@pytest.mark.parametrize("name", ["nsys.txt", "nvprof.txt"])
def test_log_that_ends_inside_a_table(name: str) -> None:
    data = (TABLES / name).read_bytes()
    (table,) = read_tables(data[: data.index(b"flash_fwd" if name == "nsys.txt" else b"cudaMemcpyAsync") + 5], "log")
    assert [warning.code for warning in table.warnings] == ["table_cut_off"]


def test_cut_off_table_also_reports_skipped_lines() -> None:
    lines = (TABLES / "first-rows.txt").read_text().splitlines(keepends=True)
    (table,) = read_tables("".join([*lines[:4], "NCCL WARN something\n", *lines[4:]]).encode(), "log")
    assert [(warning.code, warning.count) for warning in table.warnings] == [
        ("table_cut_off", 1),
        ("table_lines_skipped", 1),
    ]


# --- all of them ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.txt")), ids=lambda path: path.stem)
def test_reports_follow_the_schema(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    assert run(["report", str(path), "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    schema = json.loads((files("ringprof.report") / "schema" / "report-1.schema.json").read_text())
    jsonschema.validate(data, schema)
    assert data["table"]["total_ns"] == sum(data["table"]["kinds_ns"].values()) <= data["table"]["whole_ns"]


def test_huge_call_counts_are_analysed_in_bounded_time() -> None:
    rows = (
        TableRow("cudaLaunchKernel", 1, 9 * 10**16, 9, 9),
        TableRow("flash_fwd_kernel<1>", 1, 1, 0, 0, 5),
        TableRow("flash_bwd_kernel<1>", 1, 10**17, 0, 0, 5),
        TableRow("cudaMemcpyAsync", 1, 10, 9, 9),
        TableRow("Memcpy DtoD", 1, 11, 0, 0, 5),
    )
    table_report = analyse_table(KernelTable("log", 1, "torch", "CUDA", ("Name",), rows), iterations=10)
    assert table_report.iterations is not None and table_report.iterations.leak
    assert table_report.iterations.flash == ()
