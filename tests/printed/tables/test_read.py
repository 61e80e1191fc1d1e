"""Kernel tables in logs: prefixes, colours, cut-off tables, several tables in one file, and text without a table."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringprof
from ringprof.errors import KernelTableError
from ringprof.printed.benchmarks.logs import BenchmarkLogs
from ringprof.printed.tables.read import read_tables
from ringprof.results.load import parse_any
from ringprof.results.options import LoadOptions
from tests.growth import assert_linear
from tests.paths import LOGS

LOG = LOGS / "002_24cf2d6a9b1ed1f8.txt"

SMALL = """\
-------------------------  ------------  ------------  ------------  ------------  ------------  ------------
                     Name    Self CPU %      Self CPU     Self CUDA   Self CUDA %    CUDA total    # of Calls
-------------------------  ------------  ------------  ------------  ------------  ------------  ------------
                 aten::mm        50.00%      10.000us       0.000us         0.00%       2.000ms             4
             gemm_a, b c         0.00%       0.000us       2.000ms        40.00%       2.000ms             4
  ncclDevKernel_SendRe...         0.00%       0.000us       3.000ms        60.00%       3.000ms             2
-------------------------  ------------  ------------  ------------  ------------  ------------  ------------
Self CPU time total: 20.000us
Self CUDA time total: 5.000ms
"""

NSYS = """\
 ** CUDA API Summary (cuda_api_sum):

 Time (%)  Total Time (ns)  Num Calls  Avg (ns)  Name
 --------  ---------------  ---------  --------  ----------------
    100.0           40,000         40    1000.0  cudaLaunchKernel

 ** CUDA GPU Kernel Summary (cuda_gpu_kern_sum):

 Time (%)  Total Time (ns)  Instances  Avg (ns)   Name
 --------  ---------------  ---------  ---------  -----------------------------------------------
     60.0        6,000,000         12   500000.0  void flash_fwd_kernel<Traits<128, 64>, (bool)0>(Flash_fwd_params)
     40.0          4000000         28   142857.1  ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)

 ** CUDA GPU MemOps Summary (by Time) (cuda_gpu_mem_time_sum):

 Time (%)  Total Time (ns)  Count  Avg (ns)  Operation
 --------  ---------------  -----  --------  ------------------------------
    100.0           70,000      7   10000.0  [CUDA memcpy Device-to-Device]
"""


def test_published_log_is_read() -> None:
    table = read_tables(LOG.read_bytes(), "log")[0]
    assert (len(table.rows), table.device, table.line) == (29, "CUDA", 1)
    assert table.self_cpu_total_ns == 22_088_000_000
    assert table.self_device_total_ns == 32_686_000_000
    first = table.rows[0]
    assert first.cut and first.stem.startswith("void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<")
    assert (first.self_device_ns, first.calls, first.unit, first.step_ns) == (14_531_000_000, 388, "s", 1_000_000)
    assert table.iteration_ns == 1_941_490_000
    assert table.world_size == 32
    assert [(share.printed, share.parts) for share in table.shares] == [
        ("0.03", (0.0138, 0.0051, 0.0044, 0.002)),
        ("0.00", ()),
    ]


@pytest.mark.parametrize(
    "prefix",
    ["", "g43: ", "[rank0]:", "[rank0]: ", "2026-01-02 03:04:05,678 INFO - ", "I0102 03:04:05.678901 77 a.py:3] "],
)
def test_line_prefixes_are_removed(prefix: str) -> None:
    table = read_tables("".join(f"{prefix}{line}\n" for line in SMALL.splitlines()).encode(), "log")[0]
    assert [row.name for row in table.rows] == ["aten::mm", "gemm_a, b c", "ncclDevKernel_SendRe..."]
    assert [row.self_device_ns for row in table.rows] == [0, 2_000_000, 3_000_000]
    assert table.self_device_total_ns == 5_000_000


def test_prefix_with_changing_times_is_removed() -> None:
    lines = [f"2026-01-02 03:04:{index:02d},{index}00 rank 3: {line}" for index, line in enumerate(SMALL.splitlines())]
    table = read_tables("\n".join(lines).encode(), "log")[0]
    assert (len(table.rows), table.self_cpu_total_ns) == (3, 20_000)


def test_colours_and_windows_line_ends() -> None:
    coloured = SMALL.replace("2.000ms", "\x1b[1;31m2.000ms\x1b[0m").replace("\n", "\r\n")
    assert [row.self_device_ns for row in read_tables(coloured.encode(), "log")[0].rows] == [0, 2_000_000, 3_000_000]


def test_tables_of_two_ranks_line_by_line() -> None:
    other_rank = SMALL.replace("3.000ms        60.00%", "7.000ms        60.00%")
    lines = [f"[rank{rank}]:{line}" for pair in zip(SMALL.splitlines(), other_rank.splitlines(), strict=True)
             for rank, line in enumerate(pair)]  # fmt: skip
    tables = read_tables("\n".join(lines).encode(), "log")
    assert [[row.self_device_ns for row in table.rows] for table in tables] == [
        [0, 2_000_000, 3_000_000],
        [0, 2_000_000, 7_000_000],
    ]


def test_several_tables_and_text_between() -> None:
    tables = read_tables(f"epoch 1\n{SMALL}\nloss: 3.0\n{SMALL}".encode(), "log")
    assert [len(table.rows) for table in tables] == [3, 3]
    assert [table.line for table in tables] == [3, 14]


def test_unrelated_line_inside_a_table_is_skipped_and_reported() -> None:
    lines = SMALL.splitlines()
    table = read_tables("\n".join([*lines[:4], "NCCL WARN something", *lines[4:]]).encode(), "log")[0]
    assert len(table.rows) == 3
    assert [warning.code for warning in table.warnings] == ["table_lines_skipped"]


def test_a_cut_off_table_keeps_its_rows() -> None:
    table = read_tables("\n".join(SMALL.splitlines()[:5]).encode(), "log")[0]
    assert len(table.rows) == 2
    assert [warning.code for warning in table.warnings] == ["table_cut_off"]


def test_a_name_with_a_line_feed() -> None:
    text = SMALL.replace("             gemm_a, b c ", "             gemm_a\n b c ")
    assert [row.name for row in read_tables(text.encode(), "log")[0].rows][1] == "gemm_a\n b c"


@pytest.mark.parametrize("width", [60, 80, 97])
def test_wrapped_table_lines_are_joined(width: int) -> None:
    lines = [f"g43: {line}" for line in SMALL.splitlines()]
    pieces = [line[start : start + width] for line in lines for start in range(0, len(line), width)]
    assert [row.self_device_ns for row in read_tables("\n".join(pieces).encode(), "log")[0].rows] == [
        0,
        2_000_000,
        3_000_000,
    ]


def test_table_with_old_columns() -> None:
    text = """\
---------------  ---------------  ---------------  ---------------  ---------------  ---------------
Name             Self CPU total   CPU total        CUDA total %     CUDA total       Number of Calls
---------------  ---------------  ---------------  ---------------  ---------------  ---------------
matmul           1.500ms          2.000ms          100.00%          3.250s           7
---------------  ---------------  ---------------  ---------------  ---------------  ---------------
Self CPU time total: 1.500ms
CUDA time total: 3.250s
"""
    table = read_tables(text.encode(), "log")[0]
    row = table.rows[0]
    assert (row.name, row.self_cpu_ns, row.self_device_ns, row.calls) == ("matmul", 1_500_000, 3_250_000_000, 7)
    assert table.self_device_total_ns == 3_250_000_000


@pytest.mark.parametrize(
    ("title", "cell"), [("Type", "CUDA kernel"), ("Full Name", "void gemm<(int)4, float>(Params)")]
)
@pytest.mark.parametrize("position", [25, 53, None])
def test_columns_of_text_may_stand_anywhere(title: str, cell: str, position: int | None) -> None:
    """After the name, between numbers or at the end."""
    lines = SMALL.splitlines()
    cells = ["-" * 40, title, "-" * 40, cell, cell, cell, "-" * 40]
    lines[:7] = [
        f"{line[:position]}  {text:>40}{line[position:] if position else ''}"
        for line, text in zip(lines, cells, strict=False)
    ]
    (table,), (without,) = read_tables("\n".join(lines).encode(), "log"), read_tables(SMALL.encode(), "log")
    assert (table.rows, table.warnings) == (without.rows, ())
    assert title in table.columns and table.self_device_total_ns == 5_000_000


def test_nsys_summaries_become_one_table() -> None:
    table = read_tables(NSYS.encode(), "log")[0]
    assert [(row.name[:20], row.calls, row.self_device_ns, row.self_cpu_ns) for row in table.rows] == [
        ("cudaLaunchKernel", 40, None, 40_000),
        ("void flash_fwd_kerne", 12, 6_000_000, 0),
        ("ncclDevKernel_SendRe", 28, 4_000_000, 0),
        ("[CUDA memcpy Device-", 7, 70_000, 0),
    ]


def test_nsys_summaries_by_size_are_no_tables_of_times() -> None:
    by_size = """
 Total (MB)  Count  Avg (MB)  Operation
 ----------  -----  --------  ---------------------------
     22.500     15     1.500  [CUDA memcpy Host-to-Device]
"""
    assert read_tables((NSYS + by_size).encode(), "log") == read_tables((NSYS + "\n" * 5).encode(), "log")


def test_a_table_copied_without_the_indentation_of_its_first_line() -> None:
    lines = NSYS.splitlines()
    header = next(index for index, line in enumerate(lines) if "Instances" in line)
    lines[header] = lines[header].lstrip()
    assert read_tables("\n".join(lines).encode(), "log")[0].rows == read_tables(NSYS.encode(), "log")[0].rows


def test_nsys_csv_is_read() -> None:
    text = 'Time (%),Total Time (ns),Instances,Name\n60.0,6000,12,"void k<1, 2>(int)"\n40.0,4000,2,other\n\nrest'
    assert [(row.name, row.self_device_ns) for row in read_tables(text.encode(), "log")[0].rows] == [
        ("void k<1, 2>(int)", 6000),
        ("other", 4000),
    ]


@pytest.mark.parametrize(
    "text", ["", "hello", "Name # of Calls\n---", "-----  -----  -----\n" * 5, "| a | b |\n|---|---|"]
)
def test_text_without_a_table_is_refused(text: str) -> None:
    with pytest.raises(KernelTableError, match="log"):
        read_tables(text.encode(), "log")


def test_benchmark_rows_without_a_table_are_read_as_such() -> None:
    """Rows of a log with kernel tables, too, are read on request; `load` names the function that reads them."""
    name = LOG.parent / "000_6ad8b6078955b01f.txt"
    assert isinstance(parse_any(name.read_bytes(), "some.txt", LoadOptions()), BenchmarkLogs)
    with pytest.raises(KernelTableError, match=r"rows of a benchmark: read it with ringprof\.logs"):
        ringprof.load(name)
    both = (LOG.parent / "002_24cf2d6a9b1ed1f8.txt").read_bytes()
    assert isinstance(parse_any(both, "both.txt", LoadOptions()), ringprof.TableAnalysis)
    assert isinstance(parse_any(both, "both.txt", LoadOptions(), rows=True), BenchmarkLogs)


def test_table_without_rows_error_has_the_line() -> None:
    with pytest.raises(KernelTableError, match=r"log:\d+: a kernel table without a row"):
        read_tables("\n".join([*SMALL.splitlines()[:3], *SMALL.splitlines()[6:]]).encode(), "log")


@settings(max_examples=300)
@given(st.data())
def test_damaged_table_raises_only_table_errors(data: st.DataObject) -> None:
    text = list(SMALL)
    for _ in range(data.draw(st.integers(1, 12))):
        start = data.draw(st.integers(0, len(text) - 1))
        text[start : start + data.draw(st.integers(0, 150))] = data.draw(st.text(max_size=5))
        text = text or ["x"]
    with contextlib.suppress(KernelTableError):
        read_tables("".join(text).encode(errors="replace"), "log")


@pytest.mark.parametrize(
    "text",
    [
        "-" * 300_000,
        "- " * 150_000,
        "-----  " * 40_000,
        ("-----  -----  -----\n" * 15_000),
        ("\x1b[" + "0" * 50) * 6_000,
        "'flash': [" * 30_000,
        "Name  " * 50_000,
        SMALL[:220] + "a b  " * 60_000,
        SMALL.splitlines()[1] + "\n" + "-" * 100_000 + "\n",
        "Total,Instances,Name," * 15_000,
        "Name    Calls  Type    Self CPU\n------  -----  ------  --------\n" + f"a  {'1  ' * 20}{'b ' * 40}\n" * 2_000,
        "".join(f"{'Name':<{9 + n}}  Calls  Self CPU\n{'-' * (7 + n)}  -----  --------\n" for n in range(400))
        + f"{'a':<500}  1  1.000us\n" * 4_000,
        "".join(f"r{n}:Name   Calls  Self CPU\nr{n}:-----  -----  --------\n" for n in range(2_000)),
    ],
)
def test_time_is_linear_on_hostile_text(text: str) -> None:
    def read(part: str) -> None:
        with contextlib.suppress(KernelTableError):
            read_tables(part.encode(), "log")

    assert_linear(read, text)


TABLE = "Name    Calls  Self CPU\n------  -----  --------\n"


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("------  -----  --------\n" * 100_001, "100000 dashed lines"),
        ("Name,Instances,Total Time (ns)\na,1,1\n" * 10_001, "10000 kernel tables"),
        (TABLE + "a           1   1.000us\n" * 100_001, "100000 rows of kernel tables"),
        ("Name,Instances,Total Time (ns)\n" + "a,1,1\n" * 100_001, "100000 rows of kernel tables"),
    ],
)
def test_log_with_too_many_tables_is_refused(text: str, most: str) -> None:
    with pytest.raises(KernelTableError, match=f"some.log: more than {most}: cut out the part"):
        read_tables(text.encode(), "some.log")


def test_a_thousand_tables_are_read() -> None:
    table = TABLE + "a           1   1.000us\n" + TABLE.splitlines()[1] + "\n"
    assert [len(kernel_table.rows) for kernel_table in read_tables(table.encode() * 1000, "log")] == [1] * 1000
