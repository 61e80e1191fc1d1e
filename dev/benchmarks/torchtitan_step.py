"""Training step of torchtitan's Trainer: a strategy of ringprof, or torchtitan's own context parallelism.

    torchrun --nproc-per-node 2 dev/benchmarks/torchtitan_step.py --attention zigzag
    torchrun --nproc-per-node 2 dev/benchmarks/torchtitan_step.py --attention sdpa

One Llama 3 of the 8B model's layers, with random weights, under FSDP2 and bf16. ``flex`` and ``sdpa`` are torchtitan's
own inner attentions, which gather keys and values; ``sdpa`` knows no documents. Prints the steps of the slowest rank in
ms, and the losses.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import flex_attention
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from ringprof.integrations.torchtitan import with_strategy

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import torchtitan_llama


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attention", default="zigzag", help="a strategy, flex or sdpa")
    parser.add_argument("--seq", type=int, default=65536)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--documents", type=int, default=1, help="packed documents of equal lengths")
    parser.add_argument("--steps", type=int, default=6, help="the first two are not timed")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--model", default="8B")
    options = parser.parse_args()
    torchtitan_llama.SEQ, torchtitan_llama.VOCABULARY = options.seq, options.vocabulary
    torchtitan_llama.DOCUMENTS = options.documents
    size = int(os.environ["WORLD_SIZE"])
    config = torchtitan_llama.llama3(size)
    config.model_spec = model_registry(options.model, attn_backend="flex")
    model = config.model_spec.model
    model.layers = model.layers[: options.layers]
    model.vocab_size = model.tok_embeddings.num_embeddings = model.lm_head.out_features = options.vocabulary
    config.activation_checkpoint = None
    config.training.disable_cuda_graphs = True
    config.metrics = MetricsProcessor.Config(log_freq=1)
    if options.attention == "sdpa":
        for layer in model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    elif options.attention == "flex":
        # Without autotuning, which takes minutes.
        FlexAttention._compiled_flex_attn = torch.compile(flex_attention)
        config.parallelism.context_parallel_load_balancer = "ptrr"
    else:
        config = with_strategy(config, options.attention)

    trainer = Trainer(config)
    batches = trainer.batch_generator(trainer.dataloader)
    losses: list[float] = []
    processor: Any = trainer.metrics_processor
    log = processor.log
    processor.log = lambda step, average, *others, **more: (losses.append(average), log(step, average, *others, **more))
    times: list[float] = []
    for step in range(1, options.steps + 1):
        trainer.step = step
        torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        trainer.train_step(batches)
        torch.cuda.synchronize()
        took = torch.tensor([time.perf_counter() - begin], device=trainer.device)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        times.append(1e3 * took.item())
    if dist.get_rank() == 0:
        timed = times[2:]
        print(
            f"{options.attention}: {median(timed):.1f} ms ({min(timed):.1f} to {max(timed):.1f}), losses "
            f"{' '.join(f'{loss:.5f}' for loss in losses)}",
            flush=True,
        )
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
