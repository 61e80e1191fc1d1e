"""Rows that equal an earlier row in every column are dropped; rows without ids, which may still differ, are kept."""

from __future__ import annotations

from typing import Any

import pytest

from ringprof.trace.columns import Trace
from ringprof.trace.kineto import parse_trace
from tests.trace.kineto_text import document, kernel

SEND = {
    "Collective name": "send", "In msg nelems": 8, "Out msg nelems": 8, "dtype": "BFloat16", "Dst Rank": 1,
    "Process Group Name": "1", "Group size": 2, "Process Group Ranks": "[0, 1]",
}  # fmt: skip


def call(number: int, **args: Any) -> dict[str, Any]:
    return kernel(number, cat="cpu_op", name="record_param_comms", args={**SEND, **args})


def mark(number: int, **args: Any) -> dict[str, Any]:
    return kernel(number, cat="user_annotation", name="ProfilerStep#1", args=args)


def lengths(trace: Trace) -> tuple[int, ...]:
    return tuple(len(getattr(trace, name).start_ns) for name in ("activities", "comm_records", "annotations"))


def test_duplicated_events_are_read_once():
    events = [kernel(n) for n in range(5)] + [call(0, **{"External id": 3}), mark(0, **{"External id": 4})]
    for listed in (events + events, [event for event in events for _ in range(2)], events + events[::-1]):
        trace = parse_trace(document(listed))
        assert lengths(trace) == (5, 1, 1)
        (warning,) = trace.warnings
        assert (warning.code, warning.count, warning.rank) == ("repeated_events", 7, 3)


def test_event_repeated_three_times_counts_two_repeats():
    (warning,) = parse_trace(document([kernel(1)] * 3 + [kernel(2)])).warnings
    assert warning.count == 2


@pytest.mark.parametrize(
    "change",
    [
        {"ts": 1000.501},
        {"dur": 50.251},
        {"name": "k1"},
        {"cat": "gpu_memset"},
        {"args": {"device": 1, "stream": 7, "correlation": 0}},
        {"args": {"device": 0, "stream": 8, "correlation": 0}},
        {"args": {"device": 0, "stream": 7, "correlation": 1}},
        {"args": {"device": 0, "stream": 7, "correlation": 0, "graph node id": 5}},
        {"args": {"device": 0, "stream": 7, "correlation": 0, "bytes": 5}},
    ],
)
def test_events_that_differ_are_not_repeats(change):
    trace = parse_trace(document([kernel(0), kernel(0, **change)]))
    assert len(trace.activities.start_ns) == 2
    assert "repeated_events" not in {warning.code for warning in trace.warnings}


def test_calls_without_an_id_are_not_repeats():
    """Keep equal rows such as the sends of K and V, which old profilers write with the same microsecond."""
    trace = parse_trace(document([kernel(5), call(0), call(0), mark(0), mark(0)]))
    assert (lengths(trace), trace.warnings) == ((1, 2, 2), [])
