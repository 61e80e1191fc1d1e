"""Reading of benchmark logs: the published rows against hand-written lists, and variants of the formats."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringprof.errors import InputError
from ringprof.printed.benchmarks import read
from ringprof.printed.benchmarks.audit import audit
from ringprof.printed.benchmarks.read import has_rows, parse_log, read_log
from ringprof.printed.benchmarks.rows import LogRow, LogSettings
from tests.growth import assert_linear
from tests.paths import LOGS


def rows(number: int) -> tuple[LogRow, ...]:
    return read_log(next(LOGS.glob(f"{number:03d}_*"))).rows


@pytest.mark.parametrize(("number", "count"), [(0, 15), (1, 6), (2, 1), (3, 16), (4, 42)])
def test_every_row_is_read(number: int, count: int) -> None:
    assert len(rows(number)) == count


def test_log_000_by_hand() -> None:
    values = [(r.line, r.system, r.placement, r.seq, r.forward_ms, r.forward_backward_ms, r.tflops) for r in rows(0)]
    assert values == [
        (5, "megatron_cp", None, 131072, 34.46, 329.61, 43.28),
        (6, "megatron_cp", None, 262144, 105.51, 343.59, 71.98),
        (7, "megatron_cp", None, 524288, 383.01, 1303.94, None),
        (14, "double_ring", None, 131072, 46.40, 180.39, 106.66),
        (15, "double_ring", None, 262144, 137.56, 463.70, 165.98),
        (16, "double_ring", None, 524288, 471.94, 1985.06, 155.09),
        (21, "burst", None, 131072, 60.0, 160.0, 121.59),
        (26, "burst", None, 262144, 130.0, 460.0, 165.88),
        (31, "burst", None, 524288, 460.0, 1710.0, 180.29),
        (38, "usp", "ring_first", 131072, 80.09, 310.01, 62.07),
        (39, "usp", "ring_first", 262144, 239.97, 898.68, 85.64),
        (40, "usp", "ring_first", 524288, 904.95, 3347.21, 91.98),
        (47, "usp", "head_first", 131072, 48.88, 140.66, 136.79),
        (48, "usp", "head_first", 262144, 117.77, 447.32, 172.06),
        (49, "usp", "head_first", 524288, 428.53, 1985.43, 155.06),
    ]
    assert [r.memory_mb for r in rows(0)[:3]] == [577.0, 1154.0, 2308.0]
    assert [r.oom for r in rows(0)].count(True) == 1 and rows(0)[2].oom
    assert all(r.heads is None for r in rows(0) if r.system != "burst")
    burst = rows(0)[6]
    assert (burst.heads, burst.head_dim, burst.causal, burst.double_ring) == (40, 128, True, True)
    assert (burst.tflops_forward, burst.tflops_backward) == (94.74, 137.13)


def test_log_001_with_its_wrapped_lines() -> None:
    values = [(r.line, r.system, r.seq, r.forward_ms, r.forward_backward_ms, r.tflops) for r in rows(1)]
    assert values == [
        (5, "burst", 131072, 50.0, 150.0, 129.44),
        (12, "burst", 262144, 130.0, 470.0, 165.48),
        (19, "burst", 524288, 470.0, 1720.0, 179.13),
        (31, "double_ring", 131072, 46.62, 148.48, 129.59),
        (32, "double_ring", 262144, 137.45, 467.88, 164.50),
        (33, "double_ring", 524288, 471.33, 1939.78, 158.71),
    ]


def test_log_002_takes_its_settings_from_the_results_block() -> None:
    log = read_log(next(LOGS.glob("002_*")))
    (row,) = log.rows
    assert (row.line, row.system, row.heads, row.kv_heads, row.head_dim) == (69, "double_ring", 40, 40, 128)
    assert (row.causal, row.world_size, row.sources["heads"]) == (True, 32, "line 40")
    assert (row.forward_ms, row.forward_backward_ms, row.tflops, row.memory_mb) == (530.17, 1941.49, 158.57, 4485.0)


def test_log_003_has_two_missing_values_and_stated_settings() -> None:
    log_rows = rows(3)
    assert [(r.line, r.missing) for r in log_rows if r.missing] == [(30, True), (31, True)]
    assert [r.tflops for r in log_rows] == [
        53.10, 104.59, None, None, 140.41, 166.84, 174.46, 181.70,
        99.11, 145.39, 160.25, 140.69, 128.76, 163.28, 178.56, 187.74,
    ]  # fmt: skip
    assert {(r.heads, r.head_dim, r.world_size, r.batch) for r in log_rows} == {(40, 128, 32, 1)}
    assert [r.system for r in log_rows[::4]] == ["megatron_cp", "usp", "double_ring", "burst"]


def test_log_004_by_ring_type() -> None:
    log_rows = rows(4)
    first, last = log_rows[0], log_rows[-1]
    assert (first.line, first.layout, first.seq, first.forward_ms, first.tflops) == (
        8,
        "contiguous",
        4096,
        11.902,
        11.5,
    )
    assert (first.batch, first.heads, first.head_dim, first.world_size, first.device) == (2, 16, 16, 8, "4090D")
    assert (first.ulysses_degree, first.ring_degree, first.forward_only) == (2, 4, True)
    assert (last.line, last.forward_ms, last.forward_backward_ms, last.tflops) == (61, None, 854.512, 549.7)
    assert [r.ulysses_degree for r in log_rows].count(4) == 6
    assert [r.forward_only for r in log_rows].count(False) == 6


def test_all_logs_in_one_file() -> None:
    text = "\n".join(path.read_text() for path in sorted(LOGS.glob("*.txt")))
    assert len(parse_log(text.encode(), "all").rows) == 80


@pytest.mark.parametrize("prefix", ["[rank0]:", "node-3: ", "2026-01-02 03:04:05 INFO "])
def test_rank_host_and_time_prefixes_are_removed(prefix: str) -> None:
    text = (LOGS / "001_70a12dcf62574dfd.txt").read_text().replace("g43: ", prefix)
    assert [r.tflops for r in parse_log(text.encode(), "log").rows] == [r.tflops for r in rows(1)]


TIMED = "2026-01-02 03:{:02d}:07,{:03d} - INFO - "


@pytest.mark.parametrize("prefix", ["(EngineCore_6 pid=1389346) ", "[2026-01-02 03:04:05] [INFO] ", TIMED])
@pytest.mark.parametrize("number", [0, 3, 4])
def test_line_prefixes_do_not_change_rows(prefix: str, number: int) -> None:
    text = re.sub(r"(?m)^g\d\d: |\n-$", "", next(LOGS.glob(f"{number:03d}_*")).read_text())
    plain = parse_log(text.encode(), "log")
    lines = "".join(
        f"{prefix.format(line_number % 60, line_number)}{line}\n" for line_number, line in enumerate(text.splitlines())
    )
    assert parse_log(lines.encode(), "log").rows == plain.rows and len(plain.rows) in (15, 16, 42)


def test_settings_of_pasted_json() -> None:
    text = '{"num_attention_heads": 40, "head_dim": 128, "batch_size": 1}\n' + WHOLE
    (row,) = parse_log(text.encode(), "log").rows
    assert (row.heads, row.head_dim, row.batch, row.sources) == (40, 128, 1, {"heads": "line 1", "head_dim": "line 1"})


def test_gpu_index_is_not_a_count_of_gpus() -> None:
    text = "step 3 tokens 4096 GPU 3 ok\non 32 GPUs\n| B | Seq Len | TFLOPs/s |\n| 1 | 8192 | 30.5 |\n"
    assert parse_log(text.encode(), "log").rows[0].world_size == 32


@pytest.mark.parametrize("cell", ["1_000", "1e3", "0x10", "1.5", "-3", "½"])
def test_length_must_be_a_whole_number(cell: str) -> None:
    text = f"| B | Seq Len | TFLOPs/s |\n| 1 | {cell} | 30.5 |\n| 1 | 1,000 | 30.5 |\n"
    assert [row.seq for row in parse_log(text.encode(), "log").rows] == [1000]


# --- a log that ends inside a row -----------------------------------------------------------------------

WHOLE = "| B | Seq Len | FWD (ms) | TFLOPs/s |\n|---|---|---|---|\n| 1 | 8192 | 2.00 | 136.79 |\n"


@pytest.mark.parametrize(
    ("end", "tflops", "severity"),
    [
        ("| 1 | 16384 | 4.00 | 155.06 |\n", [136.79, 155.06], None),
        ("| 1 | 16384 | 4.00 | 155.06 |", [136.79, 155.06], None),
        ("| 1 | 16384 | 4.00 | 155.06", [136.79, 155.06], None),
        ("| 1 | 16384 | 4.00 | 155.0", [136.79, None], "warning"),
        ("| 1 | 16384 | 4.00 | 15", [136.79, None], "warning"),
        ("| 1 | 16384 | 4.00 | ", [136.79, None], "warning"),
        ("| 1 | 16384 | 4.0", [136.79], "warning"),
        ("| 1 | 163", [136.79], "warning"),
        ("| 1 | 16384 | 4.00 | OOM", [136.79, None], None),
        ("loss 3 at step 5", [136.79], None),
        ("", [136.79], None),
    ],
)
def test_a_log_that_ends_inside_a_row(end: str, tflops: list[float | None], severity: str | None) -> None:
    log = parse_log((WHOLE + end).encode(), "log")
    assert [row.tflops for row in log.rows] == tflops
    assert [(flag.code, flag.severity, flag.line) for flag in log.flags] == [("cut_off", severity, 4)] * bool(severity)
    assert log.flags == tuple(flag for flag in audit([log]).flags if flag.code == "cut_off")


def test_last_figure_of_a_truncated_log_may_be_incomplete() -> None:
    log = parse_log(WHOLE[: WHOLE.index("6.79")].encode(), "log")
    assert [row.tflops for row in log.rows] == [13.0]
    assert [(flag.severity, flag.printed) for flag in log.flags] == [("note", "13")]


@pytest.mark.parametrize("path", sorted(LOGS.glob("*.txt")), ids=lambda path: path.name[:3])
def test_truncated_log_never_changes_a_figure_without_a_flag(path: Path) -> None:
    data = path.read_bytes()
    complete_rows = {row.line: row for row in read_log(path).rows}
    for cut in range(7, len(data), 13):
        with contextlib.suppress(InputError):
            log = parse_log(data[:cut], str(path))
            for row in log.rows:
                # Without its summary, the results block of log 002 is the row.
                complete_row = complete_rows.get(row.line, complete_rows.get(69))
                is_equal = all(getattr(row, name) == getattr(complete_row, name) for name in ("seq", *row.steps))
                assert is_equal or log.flags, (cut, row)


def test_a_results_block_alone_is_a_row() -> None:
    text = "".join((LOGS / "002_24cf2d6a9b1ed1f8.txt").read_text().splitlines(keepends=True)[33:62])
    (row,) = parse_log(text.encode(), "log").rows
    assert (row.format, row.seq, row.forward_backward_ms, row.world_size) == ("results", 524288, 1941.49, 32)


def test_a_table_wrapped_in_the_middle_of_cells() -> None:
    lines = (LOGS / "001_70a12dcf62574dfd.txt").read_text().splitlines()[27:33]
    pieces = [line[start : start + 70] for line in lines for start in range(0, len(line), 70)]
    assert [r.tflops for r in parse_log("\n".join(pieces).encode(), "log").rows] == [129.59, 164.50, 158.71]


def test_interleaved_hosts_keep_their_tables() -> None:
    first_host = (LOGS / "000_6ad8b6078955b01f.txt").read_text().splitlines()[1:8]
    second_host = [line.replace("g45:", "g46:").replace("43.28", "44.44") for line in first_host]
    text = "\n".join(line for pair in zip(first_host, second_host, strict=True) for line in pair)
    assert [r.tflops for r in parse_log(text.encode(), "log").rows] == [43.28, 44.44, 71.98, 71.98, None, None]


def test_text_without_benchmark_rows(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("| name | value |\n|---|---|\n| x | 1 |\n")
    with pytest.raises(InputError, match=r"a\.txt: no benchmark rows"):
        read_log(tmp_path / "a.txt")
    with pytest.raises(InputError, match=r"none\.txt"):
        read_log(tmp_path / "none.txt")
    assert not has_rows(b"Dtype | B | Seq Len | FWD (ms)\n")


def test_a_kernel_table_alone_names_the_other_command(tmp_path: Path) -> None:
    text = "\n".join((LOGS / "002_24cf2d6a9b1ed1f8.txt").read_text().splitlines()[:34])
    (tmp_path / "t.txt").write_text(text)
    with pytest.raises(InputError, match=r"ringprof report .*t\.txt"):
        read_log(tmp_path / "t.txt")


@settings(max_examples=200)
@given(st.data())
def test_damaged_log_raises_only_input_errors(data: st.DataObject) -> None:
    text = list(data.draw(st.sampled_from([path.read_text() for path in sorted(LOGS.glob("*.txt"))])))
    for _ in range(data.draw(st.integers(1, 8))):
        start = data.draw(st.integers(0, len(text) - 1))
        text[start : start + data.draw(st.integers(0, 300))] = data.draw(st.text(max_size=5))
        text = text or ["x"]
    with contextlib.suppress(InputError):
        parse_log("".join(text).encode(errors="replace"), "log")


@pytest.mark.parametrize(
    "text",
    [
        "|" * 300_000,
        "| Dtype | Seq Len | B |" * 10_000,
        "| Dtype | Seq Len | B |\n" * 10_000,
        "a |\n" * 60_000,
        "forward: 1" * 30_000,
        "seqlen | num_heads | dim | causal\n" * 8_000,
        "seq_len = 16" + ", 16" * 60_000,
        "[1, 2" + ", 3" * 60_000,
        "`" + "a/" * 100_000,
        "Benchmark Results for x\n" * 8_000,
        "heads" + " " * 200_000 + "= 3",
    ],
)
def test_time_is_linear_on_hostile_text(text: str) -> None:
    assert_linear(lambda part: has_rows(part.encode()), text)


TABLE = "seq_len | num_heads | head_dim | fwd(ms) | tflops\n65536 | 32 | 128 | 10.5 | 400.25\n\n"


@pytest.mark.parametrize("line", ["step 7\n", "loss | 2.5\n", "batch = 3\n", "| seqlen | loss | a |\n"])
def test_only_the_beginning_of_a_huge_log_is_read_and_reported(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log of 40 MB with a bar on every line would take minutes; the test lowers the limit to a hundredth."""
    monkeypatch.setattr(read, "_MAX_EFFORT", 10_000)
    filler = line * 12_000
    log = parse_log((TABLE + filler + TABLE).encode(), "some.log")
    assert [(row.line, row.tflops) for row in log.rows] == [(2, 400.25)]
    (warning,) = log.flags
    assert (warning.code, warning.severity) == ("too_long", "warning")
    assert warning.message.startswith(f"lines {warning.line} to 12007 are not read")
    with pytest.raises(InputError, match=r"some.log: no benchmark rows in the \d+ lines that were read"):
        parse_log((filler + TABLE).encode(), "some.log")


@pytest.mark.parametrize("count", [1, 2, 7, 9])
@pytest.mark.parametrize("end", ["", "\n", "\nstep 7\n"])
def test_short_table_without_a_rule_is_not_read_as_a_wrapped_header(count: int, end: str) -> None:
    head, row, _ = TABLE.split("\n", 2)
    log = parse_log((f"{head}\n" + f"{row}\n" * count + end).encode(), "some.log")
    assert [row.line for row in log.rows] == list(range(2, count + 2))


def test_a_log_of_a_thousand_tables_is_read_whole() -> None:
    log = parse_log((TABLE * 1000 + "step 7\n" * 100_000 + TABLE).encode(), "some.log")
    assert len(log.rows) == 1001 and not log.flags


def values_of(text: str, *names: str) -> list[tuple[object, ...]]:
    return [tuple(getattr(row, name) for name in names) for row in parse_log(text.encode(), "a.txt").rows]


PRINTOUT = """
### causal=True, headdim=128, batch_size=4, seqlen=4096 ###
Flash2 fwd: 150.25 TFLOPs/s, bwd: 170.50 TFLOPs/s, fwd + bwd: 164.25 TFLOPs/s
Pytorch fwd: 20.25 TFLOPs/s, bwd: nan TFLOPs/s, fwd + bwd: nan TFLOPs/s
### headdim = 128, causal = False, seqlen = 8192, batch_size = 2, nheads = 16 ###
Fav3 fwd: torch.Size([2, 8192, 16, 128])|(16777216, 2048, 128, 1)
Fav3 fwd: 1.765ms, 622.9 TFLOPS
Fav3 bwd: 5.000ms, 549.8 TFLOPS
CuDNN fwd: 17.650ms, 622.9 TFLOPS
"""


def test_printouts_of_flash_attention() -> None:
    """Read one row per method; its backward pass may stand on a line of its own."""
    names = ("line", "label", "seq", "batch", "head_dim", "heads", "causal", "world_size", "forward_ms")
    rates = ("tflops_forward", "tflops_backward", "tflops")
    assert values_of(PRINTOUT, *names, *rates) == [
        (3, "Flash2", 4096, 4, 128, None, True, 1, None, 150.25, 170.5, 164.25),
        (4, "Pytorch", 4096, 4, 128, None, True, 1, None, 20.25, None, None),
        (7, "Fav3", 8192, 2, 128, 16, False, 1, 1.765, 622.9, 549.8, None),
        (9, "CuDNN", 8192, 2, 128, 16, False, 1, 17.65, 622.9, None, None),
    ]
    judged = audit([parse_log(PRINTOUT.encode(), "a.txt")])
    # 4 x 2 x 8192^2 x 16 x 128 FLOP / 1.765 ms = 623.0 TFLOP/s; the last line says ten times as much as it computes.
    assert [row.verdict for row in judged.rows] == ["unchecked", "unchecked", "agrees", "inconsistent"]


def test_csv_without_units() -> None:
    """Leave out times and memory whose unit is not printed; a size too large for a head is no head dimension."""
    text = "bs,bw,dim,gpus,seqlen,method,mem,time,tflops,toks\n1,True,4096,8,65536,burst,12.1,1.53,150.2,42833\n"
    names = ("line", "format", "system", "batch", "head_dim", "world_size", "seq", "memory_mb", "time_ms", "tflops")
    assert values_of(text, *names) == [(2, "csv", "burst", 1, None, 8, 65536, None, None, 150.2)]
    assert audit([parse_log(text.encode(), "a.csv")]).rows[0].verdict == "unchecked"
    assert has_rows(text.encode())


@pytest.mark.parametrize("bar", ["|", ","])
@pytest.mark.parametrize("passes", [("", None, None), ("fwd_only", "True", "forward_ms")])
def test_time_of_unknown_passes_has_no_verdict(bar: str, passes: tuple[str, str | None, str | None]) -> None:
    """Check a forward time of 4 x 8192^2 x 32 x 128 / 2 / 8 FLOP: 68.7 TFLOP/s at 1 ms."""
    title, cell, name = passes
    titles = ["method", "seqlen", "batch", "heads", "head_dim", "gpus", "causal", title, "time (ms)", "TFLOP/s"]
    cells = ["zigzag", "8192", "1", "32", "128", "8", "True", cell or "", "1.000", "68.72"]
    text = "\n".join(bar.join(line) for line in (titles, cells)) + "\n"
    (row,) = audit([parse_log(text.encode(), "a.txt")]).rows
    assert (row.row.system, getattr(row.row, name or "time_ms")) == ("zigzag", 1.0)
    assert row.verdict == ("agrees" if name else "unchecked")


def test_iterations_per_second_by_method() -> None:
    """Read a column per method; a cell with a computation or a share is no measurement."""
    text = """
| api | GPU | theoretic | ring_attn | **zigzag_ring** |
| --- | --- | --- | --- | --- |
| fwd only (iter/sec) | 8xH800 | 590.0 / 8 = 73.8 | 38.5 | 63.0 |
|  |  |  | 52.1% | **85.4%** |
| fwd + bwd (iter/sec) | 8xH800 | 154.0 / 8 = 19.2 | 10.4 | **17.4** |
"""
    names = ("line", "label", "system", "world_size", "device", "forward_only", "throughput_per_s", "seq")
    assert values_of(text, *names) == [
        (4, "ring_attn", "ring", 8, "H800", True, 38.5, None),
        (4, "zigzag_ring", "zigzag", 8, "H800", True, 63.0, None),
        (6, "ring_attn", "ring", 8, "H800", False, 10.4, None),
        (6, "zigzag_ring", "zigzag", 8, "H800", False, 17.4, None),
    ]
    assert not audit([parse_log(text.encode(), "a.md")]).flags


def test_methods_of_a_table_are_not_compared_with_one_another() -> None:
    """Check that a method which is faster at twice the length than another one, or as fast, is no contradiction."""
    text = "method,seqlen,gpus,fwd_ms\nzigzag_a,8192,8,9.00\nzigzag_b,16384,8,4.00\nzigzag_c,8192,8,9.00\n"
    assert not audit([parse_log(text.encode(), "a.csv")]).flags


def test_rates_above_the_peak_in_a_printout() -> None:
    text = PRINTOUT.replace("622.9", "6229.0").replace("1.765", "0.1765").replace("17.650ms", "0.1765ms")
    flags = audit([parse_log(text.encode(), "a.txt")], LogSettings(device="H100")).flags
    assert [(flag.code, flag.severity, flag.line) for flag in flags if flag.code == "above_peak"] == [
        ("above_peak", "error", 7),
        ("above_peak", "error", 9),
    ]


def test_the_error_names_the_formats() -> None:
    nccl_tests = b"#  size  count  type  redop  root  time  algbw  busbw #wrong\n 8 2 float sum -1 5.0 0.0 0.0 0\n"
    with pytest.raises(InputError, match=r"nccl-tests, which time links alone: ringprof calibrate a.txt"):
        parse_log(nccl_tests, "a.txt")
    with pytest.raises(InputError, match=r"column seqlen .* flash-attention's .* 'Benchmark Results for' blocks"):
        parse_log(b"seq, a, b\n", "a.txt")
