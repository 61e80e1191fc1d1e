"""Measure how fast each kernel reads a K/V cache in decode on one GPU, relative to the memory bandwidth.

    python dev/benchmarks/decode_kernels.py --batch 8 --keys 524288 --heads 32 --kv-heads 8

Each sequence has one new token, computed as by a rank of ``dcp``: heads that share keys are rows of one head. The
output has one line per kernel with the median of its times, which are interleaved with those of the others, or with the
reason why it cannot run.
"""

from __future__ import annotations

import argparse
from statistics import median

import torch

from ringprof.strategies.algorithms.cached import block_attention
from ringprof.strategies.kernels.registry import KERNELS
from ringprof.strategies.masks.layouts import Block
from ringprof.workload.devices import bandwidth_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("batch", 8), ("keys", 524288), ("heads", 32), ("kv-heads", 8), ("rounds", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    device, dtype = torch.device("cuda"), torch.bfloat16
    q = torch.randn(options.batch, 1, options.heads, 128, device=device, dtype=dtype)
    k, v = (
        torch.randn(options.batch, options.keys, options.kv_heads, 128, device=device, dtype=dtype) for _ in range(2)
    )
    times: dict[str, list[float]] = {}
    for turn in range(options.rounds + 2):
        for name in [name for name, kernel in KERNELS.items() if kernel.production and not kernel.missing(device)]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            try:
                begin.record()
                block_attention(KERNELS[name](), q, k, v, Block(), 128**-0.5)
                end.record()
                torch.cuda.synchronize()
            except RuntimeError as error:
                if not turn:
                    print(f"{name}: {str(error).splitlines()[0]}")
                continue
            if turn > 1:
                times.setdefault(name, []).append(begin.elapsed_time(end))
    size, peak = 2 * k.numel() * k.element_size(), bandwidth_of(torch.cuda.get_device_name(device))
    for name, kernel_times in times.items():
        gbps = size / median(kernel_times) / 1e6
        share = f", {gbps / peak:.1%} of the memory's {peak:,.0f}" if peak else ""
        print(f"{name}: {median(kernel_times):.3f} ms, {gbps:,.0f} GB/s{share}")


if __name__ == "__main__":
    main()
