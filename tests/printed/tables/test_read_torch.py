"""Tables that torch's own formatter prints are parsed back to their rows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, note
from hypothesis import strategies as st

from ringprof.printed.tables.read import read_tables

pytest.importorskip("torch", reason="needs torch's own table formatter")
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEventAvg, _format_time

# Every character but line ends, which no log keeps inside a line, and the escape of colours, which are removed.
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\x1b"), min_size=1, max_size=90)
TYPICAL = st.sampled_from(
    [
        "aten::mm",
        "void at::native::elementwise_kernel<128, 2, at::detail::Array<char*, 3>>",
        "Memcpy DtoD (Device -> Device)",
    ]
)
MICROSECONDS = st.one_of(st.just(0.0), st.floats(0.001, 1e3), st.floats(1e3, 1e6), st.floats(1e6, 1e12))


@st.composite
def events(draw: Any) -> list[FunctionEventAvg]:
    rows = []
    with_shapes, with_overloads, with_stack = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    with_flops, with_node = draw(st.booleans()), draw(st.booleans())
    device = draw(st.sampled_from(["cuda", "xpu", "privateuseone", None]))
    for _ in range(draw(st.integers(1, 8))):
        on_device = device is not None and draw(st.booleans())
        event: Any = FunctionEventAvg()
        event.key = draw(st.one_of(NAMES, TYPICAL).filter(lambda name: name.strip() and set(name) - set("- ")))
        event.count = draw(st.integers(1, 10**9))
        event.use_device = device
        event.is_async = event.is_legacy = event.is_remote = event.is_user_annotation = False
        event.device_type = DeviceType.CUDA if on_device else DeviceType.CPU
        event.node_id = draw(st.integers(0, 99)) if with_node else -1
        event.overload_name = draw(st.sampled_from(["", "Tensor_out", "x" * 40])) if with_overloads else ""
        event.input_shapes = draw(st.sampled_from([[], [[2, 3], []], [[10**6] * 9] * 4])) if with_shapes else []
        event.stack = draw(st.sampled_from([[], ["a.py(3): f", "b.py(4): g"], ["/x" * 60]])) if with_stack else []
        event.flops = draw(st.integers(0, 10**14)) if with_flops else 0
        event.cpu_memory_usage = draw(st.integers(-(10**12), 10**12))
        event.self_cpu_memory_usage = event.device_memory_usage = event.self_device_memory_usage = (
            event.cpu_memory_usage
        )
        event.self_cpu_time_total = 0.0 if on_device else draw(MICROSECONDS)
        event.cpu_time_total = event.self_cpu_time_total
        event.self_device_time_total = draw(MICROSECONDS) if device is not None else 0.0
        event.device_time_total = event.self_device_time_total
        rows.append(event)
    if not any(row.self_device_time_total for row in rows if row.device_type != DeviceType.CPU):
        for row in rows:  # torch refuses to print operators with device time where no device row has any
            row.self_device_time_total = row.device_time_total = 0.0
    return rows


def print_table(rows: list[FunctionEventAvg], **options: Any) -> str:
    listed: Any = EventList(rows, use_device=rows[0].use_device, profile_memory=options.pop("memory"), with_flops=True)
    return str(listed.table(row_limit=-1, **options))


def logged_text(text: str, prefix: str, wrap: int, strip: bool) -> str:
    """Return the text like a launcher writes it: a prefix on each line, wrapped at a width, optionally stripped."""
    lines = []
    for line in (prefix + line for line in text.split("\n")):
        pieces = [line[start : start + wrap] for start in range(0, len(line), wrap)]
        lines += [piece.rstrip(" ") for piece in pieces] if strip else pieces
    return "\n".join(lines) + "\n"


def printed_ns(microseconds: float, unit: str | None) -> float:
    """Return the time in ns after the rounding of torch's formatter."""
    scale = {"s": 1e6, "ms": 1e3, "us": 1.0}
    if unit is None:
        unit = _format_time(microseconds).lstrip("0123456789.")
    return round(float(f"{microseconds / scale[unit]:.3f}") * scale[unit] * 1000)


PREFIXES = st.sampled_from(["", "g43: ", "[rank0]:", "2026-01-02 03:04:05,678 - INFO - "])
UNITS = st.sampled_from([None, "us", "ms", "s"])
WIDTHS = st.sampled_from([20, 55, 100, None])


@given(rows=events(), unit=UNITS, width=WIDTHS, memory=st.booleans(), prefix=PREFIXES)
def test_any_table_parses_back(
    rows: list[FunctionEventAvg], unit: str | None, width: int | None, memory: bool, prefix: str
) -> None:
    text = print_table(rows, memory=memory, time_unit=unit, max_name_column_width=width)
    check_rows(logged_text(text, prefix, 10**6, False), rows, unit, width)


@given(
    rows=events(), width=WIDTHS, memory=st.booleans(), prefix=PREFIXES,
    wrap=st.sampled_from([80, 100, 132]), strip=st.booleans(),
)  # fmt: skip
def test_a_wrapped_table_parses_back(
    rows: list[FunctionEventAvg], width: int | None, memory: bool, prefix: str, wrap: int, strip: bool
) -> None:
    row: Any
    for row in rows:  # cells wider than their column leave open where a wrapped row ends
        row.overload_name = ""
        row.self_cpu_time_total = min(row.self_cpu_time_total, 9e9)
        row.self_device_time_total = min(row.self_device_time_total, 9e9)
        row.device_time_total, row.cpu_time_total = row.self_device_time_total, row.self_cpu_time_total
        row.flops = min(row.flops, 10**6)
    text = print_table(rows, memory=memory, max_name_column_width=width)
    # A wrap right behind a gap between columns leaves open where they end, once the gap is stripped.
    rule = prefix + next(line for line in text.split("\n") if line.startswith("--"))
    assume(not strip or all(rule[end - 1] != " " for end in range(wrap, len(rule), wrap)))
    check_rows(logged_text(text, prefix, wrap, strip), rows, None, width)


def check_rows(text: str, rows: list[FunctionEventAvg], unit: str | None, width: int | None) -> None:
    note(text)
    table = read_tables(text.encode(), "log")[0]
    assert len(table.rows) == len(rows)
    for row, event in zip(table.rows, rows, strict=True):
        name = str(event.key)
        if width is not None and len(name) >= width - 3:
            name = name[: width - 3] + "..."
        assert row.name == name.strip()
        assert row.calls == event.count
        assert row.self_cpu_ns == printed_ns(event.self_cpu_time_total, unit)
        if table.device:
            assert row.self_device_ns == printed_ns(event.self_device_time_total, unit)
            assert table.device == str(rows[0].use_device).upper()
