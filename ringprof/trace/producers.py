"""Words of the programs that write traces, for advice."""

from __future__ import annotations

from typing import NamedTuple


class Producer(NamedTuple):
    """Names of the ways to see more with one profiler, and to launch less in its programs."""

    phases: str
    """Marks that name the phases of a program."""
    launches: str
    """Way to record the host's launches."""
    steps: str
    """Marks of the steps of a program, which ``--window`` can choose."""
    graphs: str
    """Ways to launch many kernels at once; the graphs come first."""


PRODUCERS = {
    "torch": Producer(
        "torch.profiler.record_function", "ProfilerActivity.CPU", "step() of torch.profiler",
        "CUDA graphs or torch.compile",
    ),
    "nsys": Producer(
        "NVTX ranges", "nsys profile --trace cuda,nvtx", "an NVTX range around each", "CUDA graphs",
    ),
    "rocprof": Producer("roctx ranges", "rocprofv3 --hip-trace", "a roctx range around each", "HIP graphs"),
    "ascend": Producer(
        "mstx ranges", "torch_npu.profiler with ProfilerActivity.CPU", "step() of torch_npu.profiler", "graph mode",
    ),
    "xla": Producer(
        "jax.profiler.TraceAnnotation", "jax.profiler's host tracer", "jax.profiler.StepTraceAnnotation",
        "more of the step in one jax.jit",
    ),
}  # fmt: skip
"""Words by the producer of a trace (`ringprof.trace.columns.Trace.producer`)."""
