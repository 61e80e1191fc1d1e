"""Analysis window: the activities launched inside the marked iterations."""

from __future__ import annotations

from ringprof.analysis.kinds.classify import launches_of
from ringprof.analysis.timeline.window import find_window
from tests.analysis.build import FLASH, MAIN, Builder


def window_of(builder):
    trace = builder.trace()
    return find_window(trace, launches_of(trace))


def kernels(*launched):
    b = Builder()
    for number, launch_ns in enumerate(launched):
        b.run(FLASH, 1000 + 10 * number, 1005 + 10 * number, launched=launch_ns)
    return b


def test_window_without_marks_is_the_whole_trace():
    window = window_of(kernels(1, 2, 3))
    assert (window.source, window.activities().tolist(), window.span_ns) == ("trace", [0, 1, 2], ())


def test_window_includes_launches_of_any_thread():
    b = kernels(5, 15, 25).mark("ringprof::iteration", 10, 20)
    b.run(FLASH, 2000, 2005, launched=12, thread=MAIN + 1)
    window = window_of(b)
    assert window.source == "ringprof"
    assert window.activities().tolist() == [1, 3]


def test_window_has_one_part_per_iteration():
    b = kernels(5, 15, 25).mark("ringprof::iteration", 0, 10).mark("ringprof::iteration", 12, 30)
    assert [part.tolist() for part in window_of(b).iterations] == [[0], [1, 2]]


def test_profiler_steps_are_used_without_ringprof_marks():
    b = kernels(5, 15, 25).mark("ProfilerStep#3", 0, 10).mark("ProfilerStep#4", 12, 20)
    window = window_of(b)
    assert window.source == "profiler"
    assert window.activities().tolist() == [0, 1]


def test_ringprof_marks_come_before_profiler_steps():
    b = kernels(5, 15, 25).mark("ProfilerStep#3", 0, 30).mark("ringprof::iteration", 12, 20)
    assert window_of(b).activities().tolist() == [1]


def test_other_ranges_never_define_the_window():
    b = kernels(5, 15).mark("iter", 0, 10).mark("ProfilerStep#x", 0, 10).mark("ringprof::fwd/step=1/block", 0, 10)
    assert window_of(b).source == "trace"


def test_without_a_launch_record_the_device_annotation_decides():
    b = Builder().mark("ringprof::iteration", 0, 10).mark_device("ringprof::iteration", 100, 200)
    b.run(FLASH, 100, 150).run(FLASH, 150, 260).run(FLASH, 300, 310)
    assert window_of(b).activities().tolist() == [0, 1]


def test_marks_around_nothing_leave_the_whole_trace():
    window = window_of(kernels(5, 15).mark("ringprof::iteration", 100, 200))
    assert (window.source, window.marked, len(window.activities())) == ("trace", True, 2)
