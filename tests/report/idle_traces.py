"""Small synthetic traces whose idle time has causes that are known in advance.

Four Kineto traces have the structure of public ones, with the same share of idle time for the longest cause: a data
loader 84.9 %, ``hipFree`` 93.9 %, a launch call that loads its kernel 54.8 %, nothing recorded 99.3 %. In each, the
device idles for 1000 µs between two kernels.
"""

from __future__ import annotations

import json
from typing import Any

from tests.analysis.build import FLASH, Builder

US = 1000
COPY = "Memcpy PtoP (Device -> Device)"
_DEVICE = {"device": 0, "stream": 7}


def _event(category: str, name: str, start: float, end: float, **args: Any) -> dict[str, Any]:
    track = {"pid": 0, "tid": 7} if category == "kernel" else {"pid": 1, "tid": 1}
    return {"ph": "X", "cat": category, "name": name, **track, "ts": start, "dur": end - start, "args": args}


def _trace(launch_span: tuple[float, float], *events: dict[str, Any], launch: str = "cudaLaunchKernel") -> bytes:
    """Return a trace with kernels from 0 to 100 µs and from 1100 to 1200 µs; ``launch_span`` launches the second."""
    all_events = [
        _event("cuda_runtime", launch, -50, -45, correlation=1),
        _event("kernel", "first_kernel", 0, 100, correlation=1, **_DEVICE),
        _event("cuda_runtime", launch, *launch_span, correlation=2),
        _event("kernel", "second_kernel", 1100, 1200, correlation=2, **_DEVICE),
        *events,
    ]
    for event in all_events:
        event["ts"] += 1000
    header = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "GPU"}]}
    return json.dumps({**header, "traceEvents": all_events}).encode()


def data_loader() -> bytes:
    """Return a trace whose loop waits for the next batch from 150 to 999 µs; then an operator launches."""
    return _trace(
        (1090, 1096),
        _event("user_annotation", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 150, 999),
        _event("cpu_op", "aten::copy_", 1020, 1098),
    )


def hip_free() -> bytes:
    """Return a trace whose convolution frees its workspace from 110 to 1049 µs, inside Python frames."""
    return _trace(
        (1092, 1097),
        _event("python_function", "nn.Module: Conv2d_1", -100, 1300),
        _event("cpu_op", "aten::convolution", 105, 1099),
        _event("cuda_runtime", "hipFree", 110, 1049, correlation=7),
        launch="hipLaunchKernel",
    )


def lazy_launch() -> bytes:
    """Return a trace whose launch call lasts from 550 to 1098 µs, because it loads the kernel."""
    return _trace((550, 1098), _event("cpu_op", "aten::index_select", 90, 1099))


def nothing_recorded() -> bytes:
    """Return a trace without operators: no host event covers the 993 µs before the launch call."""
    return _trace((1093, 1098))


KNOWN_CAUSES = {
    "data loader": (data_loader, "data loader", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 0.849),
    "hipFree": (hip_free, "allocation or free", "hipFree", 0.939),
    "lazy launch": (lazy_launch, "launch call", "cudaLaunchKernel", 0.548),
    "nothing recorded": (nothing_recorded, "nothing recorded", "", 0.993),
}
"""Name -> trace, class and name of the longest cause, and its share of the idle time."""


def copied_hop() -> list[Builder]:
    """Return two ranks that exchange one hop by the copy engine; a rank that waits for it runs nothing.

    Rank 0 posts its copy at once and computes until 100 µs. Rank 1 posts at 250 µs, after its computation, so rank 0
    waits 150 µs; its copy begins at 300 µs, after 50 µs of wire. Rank 1's next kernel needs that copy, which ends at
    400 µs: of its wait from 350 µs on, 50 µs are wire and 4 µs a gap. Rank 0 has a gap of 2 µs.
    """
    computes, copies, following = (100, 250), ((300, 400), (250, 350)), (402, 404)
    builders = []
    for rank in range(2):
        b = Builder(rank=rank, world_size=2, host="one")
        b.run(FLASH, 0, computes[rank] * US, launched=US)
        b.mark(f"ringprof::send/kv/to={1 - rank}", 9 * US, 20 * US)
        start, end = (time * US for time in copies[rank])
        b.run(COPY, start, end, launched=10 * US, stream=20, category=1, size=1 << 20)
        builders.append(b.run(FLASH, following[rank] * US, 500 * US, launched=30 * US))
    return builders


def many_names(count: int = 60) -> Builder:
    """Return one idle stretch: operators ``op1`` to ``opN`` in turn, the n-th for n µs, then 2 µs of gap."""
    b = Builder(world_size=1).run(FLASH, 0, 10 * US, launched=US)
    time_ns = 10 * US
    for number in range(1, count + 1):
        b.on_host(f"op{number}", time_ns, time_ns + number * US)
        time_ns += number * US
    return b.run(FLASH, time_ns + 2 * US, time_ns + 12 * US, launched=time_ns - 5)
