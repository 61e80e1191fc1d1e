"""Training step of a transformers Llama under FSDP2: ringprof's strategies beside accelerate's context parallelism.

    torchrun --nproc-per-node 2 dev/benchmarks/transformers_step.py --seq 65536 --strategies zigzag,ulysses

Both use accelerate's ``Accelerator`` with ``ParallelismConfig(cp_size=N)`` and FSDP2, one model of random weights in
bf16, and the same batch. Rounds alternate. Prints the median step of the slowest rank in ms, the loss, and peak memory.
"""

from __future__ import annotations

import argparse
import json
import warnings
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from on_gpus import leave, say, start, timed
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ringprof.integrations.accelerate import context_parallel
from ringprof.integrations.transformers import register
from ringprof.strategies import create


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq", type=int, default=65536)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--strategies", default="zigzag,ulysses")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="timed steps per competitor and round")
    parser.add_argument("--out", help="write the rows as JSON, too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    device = start()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        reshard_after_forward=True,
    )  # fmt: skip
    size = dist.get_world_size()
    accelerator = Accelerator(
        parallelism_config=ParallelismConfig(cp_size=size), fsdp_plugin=plugin, mixed_precision="bf16"
    )
    own_context = accelerator.maybe_context_parallel
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=options.layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=32000, max_position_embeddings=options.seq, attn_implementation="sdpa",
        use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    whole = torch.randint(config.vocab_size, (1, options.seq), generator=generator).to(device)

    losses: dict[str, float] = {}

    def step(name: str, strategy: Any) -> None:
        ids = whole.clone()
        labels = nn.functional.pad(whole[:, 1:], (0, 1), value=-100).clone()
        positions = torch.arange(options.seq, device=device)[None].clone()
        buffers = [ids, labels, positions]
        named = {"buffers": buffers, "buffer_seq_dims": [1] * 3, "no_restore_buffers": set(buffers)}
        context = own_context(**named) if strategy is None else context_parallel(strategy, **named)
        with context:
            loss = model(
                input_ids=ids, position_ids=positions, labels=labels, shift_labels=labels, use_cache=False,
                num_items_in_batch=(options.seq - 1) / size,
            ).loss  # fmt: skip
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses[name] = float(mean) / size

    competitors: dict[str, Any] = {"accelerate": None}
    competitors |= {name: create(name) for name in options.strategies.split(",")}
    times: dict[str, list[int]] = {name: [] for name in competitors}
    memory: dict[str, float] = {}
    for turn in range(options.rounds + 1):
        for name, strategy in competitors.items():
            if strategy is not None:
                register(strategy)
            model.config._attn_implementation = "sdpa" if strategy is None else "ringprof"
            torch.cuda.reset_peak_memory_stats()
            measured = timed(lambda name=name, strategy=strategy: step(name, strategy), device, options.steps)
            memory[name] = torch.cuda.max_memory_allocated() / 2**30
            # The first round warms up.
            times[name] += measured if turn else []
    for name in competitors:
        low, high = min(times[name]) / 1e6, max(times[name]) / 1e6
        say(
            f"{name:<12} {median(times[name]) / 1e6:9.1f} ms ({low:.1f} to {high:.1f})  loss {losses[name]:.5f}"
            f"  peak {memory[name]:.1f} GiB"
        )
    if options.out and dist.get_rank() == 0:
        with open(options.out, "w") as file:
            json.dump({"times_ns": times, "losses": losses, "peak_gib": memory}, file)
    leave()


if __name__ == "__main__":
    main()
