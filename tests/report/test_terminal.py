"""Tests of the terminal report as people read it."""

from __future__ import annotations

import dataclasses
import re

import pytest
from msgspec.structs import replace

from ringprof.analysis.findings.findings import findings_in_memory
from ringprof.report.terminal import render
from ringprof.report.text import TextStyle
from ringprof.scale.pipeline import attribute
from ringprof.trace.columns import MEMCPY
from tests.analysis.build import FLASH, Builder, collective
from tests.analysis.findings.test_summary import ring_with_compute
from tests.analysis.recorded import recorded_run
from tests.analysis.test_real_runs import NVLINK, TWO_HOSTS, attribution_of
from tests.analysis.timeline.test_cpu import example as cpu_example


def shown(attribution, sections=(), **look):
    return render(findings_in_memory(attribution), TextStyle(**look), sections)


def shown_traces(*builders, run=None, **look):
    return shown(attribute([b.trace() for b in builders], run), **look)


def test_terminal_report_begins_with_the_most_important():
    lines = shown(attribution_of(NVLINK), width=250).splitlines()
    assert lines[0] == (
        "8 ranks, hosts unknown · NVIDIA H200 · cuDNN attention · 163.12 ms on the slowest rank "
        "(rank 5, 1.1 % over the mean)"
    )
    assert lines[2].startswith("6.7 % of the time is exposed communication")
    assert lines[6].startswith(
        "Largest loss outside attention: exposed wire, 9.51 ms of 163.1 ms, of which free communica"
    )
    assert lines[8].startswith("35 % of SendRecv time was waiting for a peer, 65 % on the wire (288 GB/s; 438 best")


@pytest.mark.parametrize(("last", "words"), [(149, "4 iterations"), (150, "4 iterations of 0.100 ms to 0.150 ms")])
def test_first_line_states_iterations_of_different_lengths(last, words):
    """A warm-up inside the window makes up most of its sums, so the first line must show it."""
    builders = [Builder(rank=rank, world_size=2) for rank in range(2)]
    for rank, b in enumerate(builders):
        for number, length in enumerate((last if rank else 100, 100, 100, 100)):
            start = number * 10**6
            b.mark(f"ProfilerStep#{number}", start, start + 900_000)
            b.run(FLASH, start + 10_000, start + 10_000 + length * 1000, launched=start + 5)
    assert shown_traces(*builders, width=250).splitlines()[0].endswith(f" · {words}")


def test_first_line_states_different_numbers_of_iterations():
    builders = [Builder(rank=rank, world_size=2) for rank in range(2)]
    for b, count in zip(builders, (3, 4), strict=True):
        for start in range(0, count * 1000, 1000):
            b.mark(f"ProfilerStep#{start}", start, start + 900).run(FLASH, start + 10, start + 800, launched=start + 5)
    assert shown_traces(*builders, width=250).splitlines()[0].endswith(" · 3 to 4 iterations")


def test_printed_parts_sum_to_the_wall():
    text = shown(attribution_of(NVLINK))
    rows = {}
    for line in text.splitlines():
        match = re.match(r"(compute|exposed communication|exposed memory|idle|wall) +([\d,.]+) ms.* ([\d.]+) %", line)
        if match:
            rows[match[1]] = round(float(match[2].replace(",", "")) * 1000), round(float(match[3]) * 10)
    wall = rows.pop("wall")
    assert len(rows) == 4
    assert tuple(map(sum, zip(*rows.values(), strict=True))) == wall


def test_printed_parts_of_each_rank_sum_to_its_wall():
    """Parts of 46.5644, 30.2524 ... ms, rounded one by one, would print as 95.468 ms, beside a wall of 95.469 ms."""
    builders = []
    for rank, (computes, copies) in enumerate([(46_564_400, 24_400), (61_237_400, 20_300)]):
        b = Builder(rank=rank, world_size=2).run(FLASH, 0, computes, launched=0)
        b.run("Memcpy DtoD", computes, computes + copies, launched=1, category=MEMCPY)
        reduce = collective("allreduce", group="0", group_ranks=(0, 1), group_size=2)
        b.run("ncclDevKernel_AllReduce", 77_000_400 - rank, 95_468_800, launched=2, own=reduce, stream=20)
        builders.append(b)
    text = shown_traces(*builders)
    rows = re.findall(r"^rank \d +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) ", text, re.MULTILINE)
    assert len(rows) == 2
    for wall, *parts in rows:
        assert sum(round(1000 * float(part)) for part in parts) == round(1000 * float(wall))
    ends = re.findall(r"^(?:compute|exposed \w+|idle|wall) +[\d.]+ ms +([\d.]+) +([\d.]+) ", text, re.MULTILINE)
    by_part = [*zip(*rows, strict=True)]
    assert ends == [(min(times), max(times)) for times in [*by_part[1:], by_part[0]]]


def test_ranks_that_end_together_have_a_smallest_and_a_largest_time():
    builders = []
    for rank, computes in enumerate((400, 600)):
        b = Builder(rank=rank, world_size=2).run(FLASH, 0, computes, launched=1)
        reduce = collective("allreduce", group="0", group_ranks=(0, 1), group_size=2)
        builders.append(b.run("ncclDevKernel_AllReduce", computes, 1000, launched=2, own=reduce, stream=20))
    table = shown_traces(*builders)
    assert re.search(r"^where the time went +mean +min +max", table, re.MULTILINE)
    assert re.search(r"^compute +0.500 [^ ]+ +0.400 +0.600 ", table, re.MULTILINE)


def test_shares_in_the_table_equal_those_in_the_verdict():
    """The nearest tenths of 92.825, 4.846, 0.021 and 2.308 % sum to 99.9; the second must not become 4.9 for that."""
    b = Builder(world_size=1).mark("ringprof::iteration", 0, 100_000).operate("aten::mm", 0, 92_825)
    text = shown_traces(b.mark("ringprof::wait", 92_825, 97_671).operate("aten::copy_", 97_671, 97_692))
    assert "4.8 % of the time is exposed communication" in text
    shares = re.findall(r"^(?:compute|exposed|idle|wall).* ([\d.]+) %", text, re.MULTILINE)
    assert shares == ["92.9", "4.8", "0.0", "2.3", "100.0"]


@pytest.mark.parametrize("run", [NVLINK, TWO_HOSTS])
@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_line_is_longer_than_the_terminal(run, width):
    assert max(map(len, shown(attribution_of(run), width=width).splitlines())) <= width


@pytest.mark.parametrize("run", [NVLINK, TWO_HOSTS])
def test_nothing_is_truncated_at_80_columns(run):
    assert "…" not in shown(attribution_of(run), width=80)


def test_without_colour_there_is_no_escape_code():
    assert "\x1b" not in shown(attribution_of(NVLINK))


def test_colour_does_not_change_the_text():
    plain, coloured = (shown(attribution_of(NVLINK), color=color) for color in (False, True))
    assert "\x1b[" in coloured
    stripped = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert [line.rstrip() for line in stripped.splitlines()] == plain.splitlines()


def test_ascii_output_is_pure_ascii():
    text = shown(attribution_of(NVLINK), ascii_only=True)
    assert text.isascii()
    assert "####" in text
    assert "?" not in text


def test_terminal_report_of_one_gpu_has_no_communication():
    text = shown_traces(Builder(world_size=1).run(FLASH, 0, 1000, launched=1))
    assert "one GPU: nothing is communicated" in text
    assert "by rank" not in text


def test_many_ranks_are_summarised():
    builders = [Builder(rank=rank, world_size=17).run(FLASH, 0, 1000 + rank, launched=1) for rank in range(17)]
    text = shown_traces(*builders)
    assert "rank 16 " not in text
    assert re.search(r"^mean +\d.*\nmin +\d.*\nmax +\d", text, re.MULTILINE)


def test_a_run_shows_its_workload_check_and_speed():
    text = shown_traces(*ring_with_compute(), run=recorded_run(), width=200)
    assert "burst (double_ring=False) · 1024 tokens, 8 heads of 64 · causal · bf16 · kernel cudnn" in text
    assert "worst error: out, 2.0e-03 relative" in text
    assert "GFLOP/s per device achieved (median of 3," in text
    assert "its attention kernels run at" in text
    assert "3.00 ms per iteration without the profiler, 10.0 % slower with it; peak memory 1.0 GiB per device" in text


def test_warnings_are_shown_with_their_code():
    text = shown_traces(*ring_with_compute()[:1], width=100)
    assert "warnings\n  3 of 4 ranks have no trace: 1, 2, 3 [missing_ranks]" in text


def test_terminal_report_of_a_cpu_run_shows_blocked_time():
    text = shown_traces(cpu_example(), width=100)
    assert "10.0 % of the time is exposed communication: time blocked in waiting for a transfer." in text
    assert "· CPU, no device activity ·" in text
    assert re.search(r"^send/recv .* blocked in wait$", text, re.MULTILINE)
    assert "[cpu_no_transfer_times]" in text


def test_a_range_of_gloo_is_not_called_blocked_time():
    """The transfer is posted at 100 and waited for from 300 on, after a product."""
    b = Builder(world_size=2).mark("ProfilerStep#1", 0, 1000).mark("gloo:recv", 100, 400).operate("aten::mm", 100, 300)
    assert re.search(r"^send/recv .* posting to end of wait$", shown_traces(b, width=100), re.MULTILINE)


def test_names_from_a_trace_are_escaped_in_the_terminal_report():
    attribution = attribution_of(NVLINK)
    evil = tuple(
        dataclasses.replace(rank, device="\x1b[2J[bold]GPU\x07\n", host="a\u202eb") for rank in attribution.ranks
    )
    text = shown(replace(attribution, ranks=evil), width=200)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold]GPU" in text
    assert "host a b" in text
