"""Analysis of kernel tables: the published log, and tables that are small enough to add up by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files

import pytest

from ringprof.printed.tables.analyse import TableReport, analyse_table
from ringprof.printed.tables.kernels import kind_of_row
from ringprof.printed.tables.read import read_tables
from ringprof.printed.tables.rows import KernelTable, TableRow
from ringprof.printed.tables.table_analysis import TableAnalysis, table_dict
from ringprof.report.text import TextStyle
from tests.paths import LOGS

LOG = LOGS / "002_24cf2d6a9b1ed1f8.txt"
MS = 1_000_000

FLASH = "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false>, true>(Flash_fwd_params)"
FLASH_BWD = "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128>>(Flash_bwd_params)"
SEND = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def kernel_row(name: str, ms: float, calls: int = 1) -> TableRow:
    return TableRow(name, 1, calls, 0, 0, round(ms * MS), unit="ms", step_ns=1000)


def cpu_row(name: str, ms: float, device_ms: float = 0, calls: int = 1) -> TableRow:
    time = round(ms * MS)
    return TableRow(name, 1, calls, time, time, round(device_ms * MS), unit="ms", step_ns=1000)


def make_table(*rows: TableRow, total_ms: float | None = None, cpu_ms: float | None = None) -> KernelTable:
    total = None if total_ms is None else round(total_ms * MS)
    wall = None if cpu_ms is None else round(cpu_ms * MS)
    return KernelTable("log", 1, "torch", "CUDA", ("Name",), rows, wall, total, 1000)


def warning_codes(report: TableReport) -> list[str]:
    return [warning.code for warning in report.warnings]


# --- the published log ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published() -> TableReport:
    return analyse_table(read_tables(LOG.read_bytes(), "log")[0])


def test_published_times(published: TableReport) -> None:
    kinds = published.kinds_ns
    assert kinds["flash_fwd"] / 1e9 == pytest.approx(5.564, abs=0.0005)
    assert kinds["flash_bwd"] / 1e9 == pytest.approx(15.191, abs=0.0005)
    assert kinds["send_recv"] / 1e9 == 11.306
    assert published.table.self_device_total_ns == 32_686 * MS
    assert published.total_ns == sum(kinds.values()) == 32_684_743_000
    assert published.difference_ns == -1_257_000
    assert abs(published.difference_ns) <= published.slack_ns
    assert warning_codes(published) == ["warmup_in_window"]


def test_published_warmup(published: TableReport) -> None:
    iterations = published.iterations
    assert iterations is not None and iterations.leak
    assert (iterations.cpu, iterations.source) == (10, "inferred")
    assert [round(value, 2) for value in iterations.device_range] == [12.0, 12.5]
    assert {(count.launched, count.ran) for count in iterations.counts} >= {(980, 1211), (310, 372)}
    assert [(count.calls, count.per_iteration) for count in iterations.flash] == [(384, 32), (400, 32)]


def test_published_overlap_is_an_interval_for_one_iteration(published: TableReport) -> None:
    overlap = published.overlap
    assert overlap.wall_source == "iteration_time"
    # Flash rows by their own calls (12 forward and 12.5 backward iterations), the rest by their launches.
    assert overlap.least == pytest.approx(0.761, abs=0.001)
    assert overlap.most == 1.0


def test_published_summary_is_explained(published: TableReport) -> None:
    flash, ring = published.shares
    assert (flash.stated.printed, round(flash.share, 4), flash.listed) == ("0.03", 0.6350, True)
    assert flash.causes == ("seconds_dropped", "fraction_as_percent")
    assert (ring.stated.printed, round(ring.share, 4), ring.causes) == ("0.00", 0.3459, ("seconds_dropped",))
    text = TableAnalysis("log", [published]).to_terminal(TextStyle())
    for figure in ("0.03 %", "63.50 %", "0.00 %", "34.59 %", "14.531 s", "11.306 s", "5.564 s", "15.191 s"):
        assert figure in text


def test_cpu_total_is_not_used_where_earlier_work_ran_in_the_window(published: TableReport) -> None:
    bare = replace(published.table, iteration_ns=None)
    overlap = analyse_table(bare).overlap
    assert (overlap.least, overlap.most, overlap.wall_source) == (None, None, "cpu_total")
    assert "before the window" in (overlap.reason or "")


def test_stated_iterations_are_used(published: TableReport) -> None:
    counted_iterations = analyse_table(published.table, iterations=5).iterations
    assert counted_iterations is not None
    assert (counted_iterations.cpu, counted_iterations.source) == (5, "given")


def test_published_json(published: TableReport) -> None:
    data = json.loads(json.dumps(table_dict(published), allow_nan=False))
    assert {"total_ns", "kinds_ns", "overlap_ratio_min", "overlap_ratio_max"} <= set(data)
    assert data["kinds_ns"]["send_recv"] == 11_306 * MS


def test_the_whole_json_report(published: TableReport) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((files("ringprof.report") / "schema" / "report-1.schema.json").read_text())
    small = analyse_table(make_table(kernel_row(FLASH, 5)))
    for reports in ([published], [small], [small, published]):
        data = TableAnalysis("log", reports).report()
        jsonschema.validate(data, schema)
    assert data["table"]["total_ns"] == published.total_ns
    assert "several_tables" in [warning["code"] for warning in data["warnings"]]


# --- which rows count -------------------------------------------------------------------------------


def test_operators_and_annotations_are_not_added() -> None:
    report = analyse_table(
        make_table(
            cpu_row("flash_attn::_flash_attn_backward", 1, 8),
            cpu_row("aten::mm", 1, 2),
            kernel_row("ProfilerStep*", 30),
            kernel_row("nccl:coalesced", 3),
            kernel_row(FLASH_BWD, 8),
            kernel_row("ampere_sgemm_128x64", 2),
            kernel_row(SEND, 3),
            total_ms=13,
        )
    )
    assert report.kinds_ns == {"flash_bwd": 8 * MS, "send_recv": 3 * MS, "gemm": 2 * MS}
    assert report.difference_ns == 0
    assert [reason for _, reason in report.counted.left_out].count("annotation") == 2
    assert warning_codes(report) == []


def test_kernel_and_operator_with_one_name_count_once() -> None:
    report = analyse_table(make_table(cpu_row("fused_add", 1, 5), kernel_row("fused_add", 5), total_ms=5))
    assert report.kinds_ns == {"elementwise": 5 * MS}


def test_an_annotation_of_the_users_own_has_a_cpu_row() -> None:
    report = analyse_table(
        make_table(cpu_row("my step", 9, 0), kernel_row("my step", 9), kernel_row(FLASH, 5), total_ms=5)
    )
    assert report.kinds_ns == {"flash_fwd": 5 * MS}
    assert "same_name_on_cpu" in [reason for _, reason in report.counted.left_out]


def test_footer_identifies_an_annotation_without_a_cpu_row() -> None:
    report = analyse_table(
        make_table(kernel_row("phase one", 7), kernel_row("fused_add", 1), kernel_row(FLASH, 5), total_ms=6)
    )
    assert report.kinds_ns == {"flash_fwd": 5 * MS, "elementwise": 1 * MS}
    assert warning_codes(report) == ["table_annotations_by_footer"]


def test_missing_rows_are_reported() -> None:
    report = analyse_table(make_table(kernel_row(FLASH, 5), total_ms=9))
    assert report.difference_ns == -4 * MS
    assert warning_codes(report) == ["table_off_footer"]


def test_all_to_all_is_split_from_hops_by_its_annotations() -> None:
    report = analyse_table(
        make_table(
            kernel_row(SEND, 12, 10),
            kernel_row("nccl:coalesced", 9, 7),
            kernel_row("nccl:all_to_all", 3, 3),
            total_ms=12,
        )
    )
    assert report.kinds_ns == {"send_recv": 9 * MS, "all_to_all": 3 * MS}
    assert {kind.kind: kind.calls for kind in report.kinds} == {"send_recv": 7, "all_to_all": 3}
    assert warning_codes(report) == ["send_recv_split"]


def test_a_table_of_operators_only() -> None:
    report = analyse_table(
        make_table(cpu_row("aten::_flash_attention_forward", 1, 4), cpu_row("aten::add", 1, 1), total_ms=5)
    )
    assert report.kinds_ns == {"flash_fwd": 4 * MS, "other": 1 * MS}
    assert warning_codes(report) == ["table_operators_only"]


def test_a_cpu_table() -> None:
    rows = (TableRow("aten::add", 1, 3, 2 * MS, 2 * MS),)
    report = analyse_table(KernelTable("log", 1, "torch", None, ("Name",), rows, 2 * MS))
    assert (report.total_ns, report.difference_ns, warning_codes(report)) == (2 * MS, 0, ["table_cpu_only"])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Memcpy DtoD (Device -> Device)", "memcpy"),
        ("Memcpy PtoP (Device -> Device)", "copy_engine"),
        ("[CUDA memcpy Peer-to-Peer]", "copy_engine"),
        ("[CUDA memset]", "memset"),
        ("void flash_fwd_ker...", "flash_fwd"),
        ("void flash_fwd...", "flash_fwd"),
        ("void flash_...", "other"),
        ("ncclDevKernel_Sen...", "send_recv"),
        ("ncclDevKernel_A...", "comm_other"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_par...", "flash_bwd"),
    ],
)
def test_kinds_of_printed_kernel_names(name: str, kind: str) -> None:
    assert kind_of_row(name) == kind


# --- overlap ----------------------------------------------------------------------------------------


def overlap_of(compute_ms: float, comm_ms: float, wall_ms: float) -> tuple[float | None, float | None]:
    rows = make_table(kernel_row(FLASH, compute_ms), kernel_row(SEND, comm_ms))
    overlap = analyse_table(rows, wall_ns=round(wall_ms * MS)).overlap
    return overlap.least, overlap.most


def test_overlap_by_hand() -> None:
    # 8 ms of compute and 4 ms of communication in 10 ms: at least 2 of the 4 ms ran beside compute.
    assert overlap_of(8, 4, 10) == (0.5, 1.0)
    assert overlap_of(8, 4, 12) == (0.0, 1.0)
    # 2 ms of compute cannot hide more than 2 of 4 ms.
    assert overlap_of(2, 4, 10) == (0.0, 0.5)
    assert overlap_of(8, 4, 8) == (1.0, 1.0)


def test_overlap_is_null_where_the_table_shows_that_kernels_overlap_themselves() -> None:
    assert overlap_of(12, 4, 10) == (None, None)
    assert overlap_of(4, 12, 10) == (None, None)


def test_overlap_needs_communication_and_a_wall_time() -> None:
    assert analyse_table(make_table(kernel_row(FLASH, 5)), wall_ns=9 * MS).overlap.reason == "there is no communication"
    assert analyse_table(make_table(kernel_row(SEND, 5))).overlap.reason == "no wall time is known"


def test_overlap_from_the_cpu_total_states_its_source() -> None:
    overlap = analyse_table(make_table(kernel_row(FLASH, 8), kernel_row(SEND, 4), cpu_ms=10)).overlap
    assert (overlap.least, overlap.wall_source) == (0.5, "cpu_total")


# --- warm-up ----------------------------------------------------------------------------------------


def test_no_iteration_leak_where_every_launch_ran_once() -> None:
    rows = [cpu_row("cudaLaunchKernel", 1, calls=40), kernel_row(FLASH, 5, 30), kernel_row(SEND, 5, 10)]
    report = analyse_table(make_table(*rows), iterations=10)
    assert report.iterations is not None and not report.iterations.leak
    assert {kind.per_iteration_ns for kind in report.kinds} == {0.5 * MS}


def test_no_leak_is_reported_with_cuda_graphs() -> None:
    rows = [cpu_row("cudaLaunchKernel", 1, calls=4), cpu_row("cudaGraphLaunch", 1, calls=4), kernel_row(FLASH, 5, 400)]
    report = analyse_table(make_table(*rows), iterations=4)
    assert report.iterations is not None and not report.iterations.leak


# --- text -------------------------------------------------------------------------------------------


def test_two_tables_are_both_shown(published: TableReport) -> None:
    text = TableAnalysis("log", [published, published]).to_terminal(TextStyle())
    assert text.count("by kind") == 2
    assert TableAnalysis("log", [published]).to_terminal(TextStyle(ascii_only=True)).isascii()


def test_kernel_names_are_escaped_for_the_terminal() -> None:
    report = analyse_table(make_table(kernel_row("nccl:\x1b[31m\x07evil\u202e", 3), kernel_row(FLASH, 5)))
    text = TableAnalysis("log", [report]).to_terminal(TextStyle())
    assert not [char for char in text if char != "\n" and not char.isprintable()]
