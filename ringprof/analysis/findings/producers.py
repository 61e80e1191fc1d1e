"""Advice in the words of the program that wrote the traces, and of its devices."""

from __future__ import annotations

import re
from typing import NamedTuple

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.claim import Claim


class Producer(NamedTuple):
    """Names of the ways to see more with one profiler, and to launch less in its programs."""

    phases: str
    """Marks that name the phases of a program."""
    launches: str
    """Way to record the host's launches."""
    graphs: str
    """Ways to launch many kernels at once; the graphs come first."""


PRODUCERS = {
    "torch": Producer("torch.profiler.record_function", "ProfilerActivity.CPU", "CUDA graphs or torch.compile"),
    "nsys": Producer("NVTX ranges", "nsys profile --trace cuda,nvtx", "CUDA graphs"),
    "rocprof": Producer("roctx ranges", "rocprofv3 --hip-trace", "HIP graphs"),
    "ascend": Producer("mstx ranges", "torch_npu.profiler with ProfilerActivity.CPU", "graph mode"),
    "xla": Producer("jax.profiler.TraceAnnotation", "jax.profiler's host tracer", "more of the step in one jax.jit"),
}
_AMD = re.compile("AMD|Instinct|Radeon|MI[0-9]{3}")


def producer_of(attribution: Attribution) -> Producer:
    """Return the words for the program that wrote the traces, with HIP in place of CUDA on an AMD GPU."""
    rank = attribution.ranks[0]
    words = PRODUCERS.get(rank.producer, PRODUCERS["torch"])
    calls = {event.name for other in attribution.ranks if other.idle for event in other.idle.events}
    on_amd = _AMD.search(rank.device or "") or any(name.startswith("hip") for name in calls)
    return words._replace(graphs=words.graphs.replace("CUDA", "HIP")) if on_amd else words


def graphs_advice(attribution: Attribution) -> str:
    """Recommend to launch many kernels at once; where graphs do so already, name what is launched one by one."""
    words = producer_of(attribution).graphs
    graphs, _, compilation = words.partition(" or ")
    launches = [rank.one_by_one for rank in attribution.ranks if rank.one_by_one is not None]
    if not launches:
        is_compiled = any(_COMPILED.match(kernel.name) for kernel in attribution.kernels)
        return graphs if is_compiled and compilation else words
    single, total = sum(row.single for row in launches), sum(row.kernels for row in launches)
    if not single:
        return ""
    operators: dict[str, int] = {}
    for row in launches:
        for name, count in row.operators.items():
            operators[name] = operators.get(name, 0) + count
    most = sorted(operators, key=lambda name: (-operators[name], name))[:2]
    named = f" ({', '.join(most)})" if most else ""
    template = "{} for the {one_by_one:,} of {kernels:,} kernels still launched one by one{}"
    return Claim(template, graphs, single, total, named)


_COMPILED = re.compile("triton_(poi|red|per)_")
