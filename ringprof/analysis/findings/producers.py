"""Advice in the words of the program that wrote the traces, and of its devices."""

from __future__ import annotations

import re

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.claim import Claim
from ringprof.trace.producers import PRODUCERS, Producer

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
