"""Training step of Llama layers over all GPUs, timed and beside the prediction from one GPU's layers.

    cd benchmarks && ringprof calibrate --model step_prediction:llama --tokens 8k,32k --base h200 -o machine.json
    torchrun --nproc-per-node 2 step_prediction.py --machine machine.json --seq 65536 --layers 4

The layers have the sizes of Llama 3 8B, random weights in bf16, and transformers' code. Prints predicted and measured
steps of the slowest rank in ms, the error with its sign, and whether the measured median lies inside the 80 % interval.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 32000


def llama(
    layers: int, hidden: int = 4096, heads: int = 32, kv_heads: int = 8, attention: str = "sdpa"
) -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    """Return a Llama of so many layers, and a function of the number of tokens that returns its arguments."""
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 7 // 2, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=VOCABULARY, max_position_embeddings=1 << 20,
        attn_implementation=attention, use_cache=False,
    )  # fmt: skip
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)

    def inputs(tokens: int) -> dict[str, Any]:
        ids = torch.randint(VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(1))
        return {"input_ids": ids, "labels": ids, "use_cache": False}

    return model, inputs


def main() -> None:
    import torch.distributed as dist
    from on_gpus import leave, say, start, timed
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from ringprof.integrations.transformers import register, shard_batch
    from ringprof.prediction.calibration import read_calibration
    from ringprof.prediction.network import Cluster
    from ringprof.prediction.query import Query
    from ringprof.prediction.schedules import schedule_of
    from ringprof.prediction.whole_steps import predict_step, step_dict
    from ringprof.strategies import create
    from ringprof.workload.workload import LayerAround, Workload

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", required=True)
    parser.add_argument("--seq", type=int, default=65536)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--strategy", default="zigzag")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--parallel", choices=["fsdp2", "ddp"], default="fsdp2")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, help="append a row as JSON, too")
    options = parser.parse_args()
    device = start()
    size = dist.get_world_size()
    strategy = create(options.strategy, kernel=options.kernel)
    register(strategy)
    torch.manual_seed(0)
    model, inputs = llama(options.layers, attention="ringprof")
    if options.parallel == "fsdp2":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model, device_ids=[device.index])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    batch = shard_batch({name: x for name, x in inputs(options.seq).items() if name != "use_cache"}, strategy)
    batch = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    timed(step, device, 3)
    times = timed(step, device, options.steps)
    measured_ms = median(times) / 1e6
    if dist.get_rank() == 0:
        machine = read_calibration(options.machine)
        workload = Workload(
            seq=options.seq, heads=32, kv_heads=8, head_dim=128, layers=options.layers,
            layer=LayerAround(parallel=options.parallel, mlp_size=4096 * 7 // 2),
        )  # fmt: skip
        kernel = strategy.kernel_for(torch.empty(1, 1, 1, 128, dtype=torch.bfloat16, device=device)).name
        query = Query(options.strategy, workload, Cluster(1, size), kernel, strategy.comm.hops)
        prediction = predict_step(query, machine, schedule_of)
        low, middle, high = (ns / 1e6 for ns in prediction.interval_ns)
        say(
            f"{options.strategy} {options.parallel} {options.seq} tokens, {options.layers} layers, {size} x"
            f" {torch.cuda.get_device_name(device)}, {kernel}: predicted {middle:.1f} ms ({low:.1f} to {high:.1f}),"
            f" measured {measured_ms:.1f} ({min(times) / 1e6:.1f} to {max(times) / 1e6:.1f}): error"
            f" {middle / measured_ms - 1:+.1%}, {'inside' if low <= measured_ms <= high else 'outside'}"
        )
        say(json.dumps(step_dict(prediction)["parts_ms"]))
        if options.out:
            row = {
                "strategy": options.strategy, "seq": options.seq, "size": size, "kernel": kernel, "times_ns": times,
                "hops": strategy.comm.hops, "device": torch.cuda.get_device_name(device), **step_dict(prediction),
            }  # fmt: skip
            with options.out.open("a") as file:
                print(json.dumps(row), file=file)
    leave()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
