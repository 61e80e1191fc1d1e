"""User annotations: the work launched in them, to the nanosecond."""

from __future__ import annotations

import pytest

from ringprof.analysis.findings.annotations import Annotation, annotations_of
from ringprof.analysis.findings.findings import findings_in_memory
from ringprof.scale.pipeline import attribute
from tests.analysis.build import FLASH, NCCL, Builder
from tests.analysis.timeline.test_cpu import example as cpu_example
from tests.loaded import analysis
from tests.paths import TRACES


def annotations_in(*builders):
    return annotations_of(attribute([b.trace() for b in builders]).ranks)


def example(rank=0):
    """Attention 100 to 500; communication 300 to 900, of which the copy at 600 to 700 hides nothing."""
    b = Builder(rank=rank, world_size=2)
    b.mark("forward", 0, 50).mark("attn(F)", 0, 20).mark("combine", 20, 50)
    b.run(FLASH, 100, 500, launched=10).run(NCCL, 300, 900, launched=30, stream=20)
    return b.run("at::native::vectorized_elementwise_kernel", 600, 700, launched=60)


def test_annotation_sums_the_kernels_launched_in_its_range():
    assert annotations_in(example()) == (
        # 100 to 900; exposed where neither attention nor, later and outside, the elementwise kernel runs.
        Annotation("forward", 1, 800, 400, 600, 300),
        Annotation("combine", 1, 600, 0, 600, 300),
        Annotation("attn(F)", 1, 400, 400, 0, 0),
    )


def test_annotations_are_summed_over_ranks():
    (forward, *_) = annotations_in(example(0), example(1))
    assert (forward.calls, forward.busy_ns, forward.exposed_ns, forward.hidden) == (2, 1600, 600, 0.5)


def test_overlapping_ranges_of_one_name_count_once():
    b = Builder(world_size=1).mark("a", 0, 20).mark("a", 5, 30).mark("a", 40, 50)
    b.run(FLASH, 100, 200, launched=10).run(FLASH, 150, 250, launched=25, stream=8)
    (annotation,) = annotations_in(b)
    assert (annotation.calls, annotation.busy_ns, annotation.hidden) == (2, 150, None)


def test_profiler_steps_are_one_annotation():
    b = Builder(world_size=1).mark("ProfilerStep#4", 0, 10).mark("ProfilerStep#5", 10, 20)
    b.run(FLASH, 100, 200, launched=5).run(FLASH, 300, 400, launched=15)
    assert annotations_in(b) == (Annotation("ProfilerStep", 2, 200, 200, 0, 0),)


def test_ranges_of_libraries_are_not_annotations():
    b = Builder(world_size=1).mark("nccl:all_reduce", 0, 10).mark("ringprof::iteration", 0, 10)
    assert annotations_in(b.run(FLASH, 100, 200, launched=5)) == ()


def test_graph_kernels_without_launches_use_the_device_annotation():
    b = Builder(world_size=1).mark("step", 0, 10).mark_device("step", 90, 450)
    b.run(FLASH, 100, 200, node=1).run(FLASH, 300, 400, node=2).run(FLASH, 500, 600, node=3)
    assert annotations_in(b) == (Annotation("step", 1, 200, 200, 0, 0),)


def test_cpu_run_has_no_annotations():
    assert findings_in_memory(attribute([cpu_example().trace()])).annotations == ()


@pytest.mark.parametrize("form", ["terminal", "json", "frame"])
def test_annotations_in_terminal_json_and_frame(form):
    run = analysis(TRACES / "h200x4-ring-262144")
    shown = {
        "terminal": lambda: run.to_terminal(sections=["annotations"]),
        "json": lambda: str(run.report()["summary"]["annotations"]),
        "frame": lambda: run.annotations().to_csv(),
    }[form]()
    names = [annotation.name for annotation in run.findings.annotations]
    assert all(name in shown for name in names[:3])
