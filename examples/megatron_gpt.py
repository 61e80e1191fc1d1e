"""Context parallelism in Megatron-LM: a GPT of megatron-core whose core attention is a strategy of ringprof.

torchrun --nproc-per-node 2 examples/megatron_gpt.py traces/megatron

Needs megatron-core 0.16 and GPUs. In Megatron's own training script, the layer specification is what changes.
"""

import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank
from setup_ranks import log, setup
from tiny_model import VOCABULARY, batch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

import ringprof
from ringprof.integrations.megatron import core_attention

SEQ = 128
device = setup()
ranks = dist.get_world_size()
parallel_state.initialize_model_parallel(context_parallel_size=ranks)
tensor_parallel.model_parallel_cuda_manual_seed(0)

spec = get_gpt_layer_local_spec()
spec.submodules.self_attention.submodules.core_attention = core_attention("zigzag")
config = TransformerConfig(
    num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, context_parallel_size=ranks,
    attention_dropout=0.0, hidden_dropout=0.0, use_cpu_initialization=True, gradient_accumulation_fusion=False,
)  # fmt: skip
torch.manual_seed(0)
model = GPTModel(config, spec, VOCABULARY, SEQ, position_embedding_type="rope").to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_step(step: int) -> None:
    tokens, labels = (x.to(device) for x in batch(step, SEQ))
    labels_per_rank = (labels != -100).sum() / ranks
    whole = {"tokens": tokens, "labels": labels, "positions": torch.arange(SEQ, device=device)[None]}
    local = get_batch_on_this_cp_rank(whole)  # Megatron's own sharding: zigzag
    logits = model(local["tokens"], local["positions"], None)
    loss = cross_entropy(logits.flatten(0, 1), local["labels"].flatten(), reduction="sum") / labels_per_rank
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():  # what Megatron's DistributedDataParallel does
        dist.all_reduce(parameter.grad)
        parameter.grad /= ranks
    log(step, loss, clip_grad_norm_(model.parameters(), 1.0))
    optimizer.step()


for step in range(8):
    train_step(step)
with ringprof.capture(sys.argv[1]):
    train_step(8)
    train_step(9)

dist.destroy_process_group()
