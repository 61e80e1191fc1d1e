"""Step of a transformers Llama with and without `ringprof.prove`, in blocks that take turns.

    torchrun --nproc-per-node 2 dev/benchmarks/prove_cost.py --seq 16384 --blocks 12 --steps 40

One model in bf16, its attention by zigzag, gradients by all-reduce. ``--first-proof-s 0.1`` makes the first proof fall
due within seconds, to see what one costs. Prints the median step of either kind, the median of the ratios of
neighbouring blocks, the range of those ratios, and the share of the time that the prover says it spent.
"""

from __future__ import annotations

import argparse
import time
import warnings
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from on_gpus import leave, say, start
from transformers import AutoModelForCausalLM, LlamaConfig

import ringprof
from ringprof.integrations.batches import shard_batch
from ringprof.integrations.transformers import register
from ringprof.strategies import create


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq", type=int, default=16384)
    parser.add_argument("--blocks", type=int, default=12, help="blocks of each kind")
    parser.add_argument("--steps", type=int, default=40, help="steps per block")
    parser.add_argument("--every", type=int, default=1000, help="steps between proofs, at least")
    parser.add_argument("--first-proof-s", type=float, help="estimate of the first proof's cost, in seconds")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    device = start()
    if options.first_proof_s is not None:
        from ringprof.training import prover

        prover._estimated_s = lambda *_: options.first_proof_s
    strategy = create("zigzag")
    register(strategy)
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4,
        vocab_size=8192, max_position_embeddings=options.seq,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="ringprof").to(device, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    ids = torch.randint(8192, (1, options.seq), generator=torch.Generator().manual_seed(0)).to(device)
    batch = {"input_ids": ids, "labels": ids.clone()}

    def step() -> float:
        """Train one step; return its time in ms."""
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(**shard_batch(batch, strategy)).loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e3

    def block(proving: Any) -> tuple[float, float, Any]:
        """Train one block of steps; return the median step and the whole time in ms, and the prover."""
        with proving as running:
            begin = time.perf_counter()
            times = [step() for _ in range(options.steps)]
            return median(times), (time.perf_counter() - begin) * 1e3, running

    for _ in range(10):
        step()
    plain, proved, spent_ms, total_ms, proofs = [], [], 0.0, 0.0, 0
    for number in range(options.blocks):
        for on in (False, True) if number % 2 else (True, False):  # each kind comes first equally often
            proving = ringprof.prove(model, every=options.every) if on else nullcontext()
            step_ms, whole_ms, running = block(proving)
            (proved if on else plain).append(step_ms)
            if on:
                spent_ms += running.spent_ns / 1e6
                total_ms += whole_ms
                proofs += running.proofs
    ratios = sorted(a / b for a, b in zip(proved, plain, strict=True))
    say(
        f"{options.seq} tokens, {options.blocks} blocks of {options.steps} steps of each kind:",
        f"plain {median(plain):.3f} ms, under prove {median(proved):.3f} ms",
        f"ratio of neighbouring blocks {median(ratios):.4f} ({ratios[0]:.4f} to {ratios[-1]:.4f})",
        f"{proofs} proofs, {spent_ms:.1f} ms spent = {spent_ms / total_ms:.3%}",
    )
    leave()


if __name__ == "__main__":
    main()
