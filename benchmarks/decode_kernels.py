"""How fast each kernel reads the keys and values of a cache, on one GPU: the share of the memory's rate in decode.

    python benchmarks/decode_kernels.py --batch 8 --keys 524288 --heads 32 --kv-heads 8

One new token a sequence, as a rank of ``dcp`` computes it: the heads that share keys are rows of one head. A line a
kernel with the median of its times, all in turns; of a kernel that cannot, the reason.
"""

from __future__ import annotations

import argparse
from statistics import median

import torch

from ringprof.devices import bandwidth_of
from ringprof.strategies.algorithms.cached import block_attention
from ringprof.strategies.kernels.registry import KERNELS
from ringprof.strategies.masks.layouts import Block


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("batch", 8), ("keys", 524288), ("heads", 32), ("kv-heads", 8), ("rounds", 10)):
        options.add_argument(f"--{name}", type=int, default=default)
    given = options.parse_args()
    device, dtype = torch.device("cuda"), torch.bfloat16
    q = torch.randn(given.batch, 1, given.heads, 128, device=device, dtype=dtype)
    k, v = (torch.randn(given.batch, given.keys, given.kv_heads, 128, device=device, dtype=dtype) for _ in range(2))
    times: dict[str, list[float]] = {}
    for turn in range(given.rounds + 2):
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
    for name, found in times.items():
        gbps = size / median(found) / 1e6
        share = f", {gbps / peak:.1%} of the memory's {peak:,.0f}" if peak else ""
        print(f"{name}: {median(found):.3f} ms, {gbps:,.0f} GB/s{share}")


if __name__ == "__main__":
    main()
