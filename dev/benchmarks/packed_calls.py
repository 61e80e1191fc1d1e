"""Time what a program adds to attention calls that gathers padded rows into packed ones and scatters results back.

    python dev/benchmarks/packed_calls.py

Prints the rates of a copy, of ``gather``, ``zeros`` and ``scatter_`` of whole rows in GB/s, and the time of flash-attn
3 with ``cu_seqlens`` of one sequence over its time without them. `ringprof.prediction.machine` has the figures of an
H200.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

ROWS = ((8192, 64), (8192, 8), (65536, 8))
"""Rows and heads of 128 channels in bf16."""
CALLS = (
    (8192, 8192, 64, 8, False), (8192, 4096, 64, 8, False), (4096, 8192, 64, 8, False), (8192, 8192, 64, 8, True),
    (65536, 65536, 8, 1, False), (65536, 65536, 8, 1, True),
)  # fmt: skip
"""Queries, keys, heads, kv heads and whether the mask is causal."""


def milliseconds(body: Callable[[], object], count: int) -> float:
    """Return the mean time of ``count`` runs on the GPU, after three that are not counted."""
    for _ in range(3):
        body()
    event: Any = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    start.record()
    for _ in range(count):
        body()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / count


def show_copies(device: torch.device) -> None:
    for rows, heads in ROWS:
        x = torch.randn(rows, heads, 128, device=device, dtype=torch.bfloat16)
        y, index = torch.empty_like(x), torch.arange(rows, device=device)[:, None, None].expand_as(x)
        bodies: dict[str, tuple[Callable[[], object], int]] = {
            "copy": (partial(y.copy_, x), 2), "gather": (partial(torch.gather, x, 0, index), 2),
            "zeros": (partial(torch.zeros_like, x), 1), "scatter_": (partial(y.scatter_, 0, index, x), 2),
        }  # fmt: skip
        print(f"{rows} rows of {heads} heads, GB/s:", end="")
        for name, (body, times) in bodies.items():
            print(f" {name} {times * x.nbytes / milliseconds(body, 20) / 1e6:,.0f}", end="")
        print()


def show_calls(device: torch.device) -> None:
    """Print packed over plain, forward and backward; the two take turns, because a hot device is slower."""
    from flash_attn_interface import flash_attn_3_gpu as operators

    for queries, keys, heads, kv_heads, causal in CALLS:
        q, dout = (torch.randn(queries, heads, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
        k, v = (torch.randn(keys, kv_heads, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
        ends = {count: torch.tensor([0, count], device=device, dtype=torch.int32) for count in (queries, keys)}
        packed = {
            "cu_seqlens_q": ends[queries], "cu_seqlens_k": ends[keys], "max_seqlen_q": queries, "max_seqlen_k": keys,
            "window_size_left": -1, "window_size_right": 0 if causal else -1,
        }  # fmt: skip
        count = max(4, int(4e13 / (4 * queries * keys * heads * 128)))
        ratios: dict[str, list[float]] = {"forward": [], "backward": []}
        for _ in range(3):
            times = []
            for arguments in ({}, packed):
                inputs = [x if arguments else x[None] for x in (q, k, v)]
                options = {"softmax_scale": 128**-0.5, "is_causal": causal, **arguments}
                forward = partial(operators.fwd.default, *inputs, num_splits=1, **options)
                out, lse, *_ = forward()
                grads = [torch.empty_like(x) for x in inputs]
                backward = partial(
                    operators.bwd.default, dout if arguments else dout[None], *inputs, out, lse, *grads, **options
                )
                times.append((milliseconds(forward, count), milliseconds(backward, max(2, count // 3))))
            for phase, plain_ms, packed_ms in zip(ratios, *times, strict=True):
                ratios[phase].append(packed_ms / plain_ms)
        shape = f"{queries} x {keys}, {heads}/{kv_heads} heads, {'causal' if causal else 'full'}"
        print(f"{shape}: packed over plain", *(f"{phase} {median(values):.3f}" for phase, values in ratios.items()))


if __name__ == "__main__":
    show_copies(torch.device("cuda"))
    show_calls(torch.device("cuda"))
