"""Context parallelism in a Hugging Face model through its attention interface.

    torchrun --nproc-per-node 2 examples/hugging_face.py traces/hf

Needs transformers 5. The model has random weights; `from_pretrained(..., attn_implementation="ringprof")` works alike.
"""

import sys

import torch
import torch.distributed as dist
from setup_ranks import log, setup
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import AttentionMaskInterface

import ringprof
from ringprof.strategies import create

SEQ = 128
device = setup()
strategy = create("zigzag")


def ring_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **_):
    """Attend over the tokens of all ranks. Tensors are (B, H, S, D) here, (B, S, H, D) for a strategy."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return strategy.attention(q, k, v, causal=True, softmax_scale=scaling, dropout_p=dropout), None


AttentionInterface.register("ringprof", ring_attention)
AttentionMaskInterface.register("ringprof", lambda *_, **__: None)  # the strategy has its own causal mask

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=SEQ, attn_implementation="ringprof",
)  # fmt: skip
model = DistributedDataParallel(LlamaForCausalLM(config).to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
positions = strategy.positions(SEQ, device)[None]


def train_step(step: int) -> None:
    tokens = torch.randint(256, (1, SEQ), generator=torch.Generator().manual_seed(step))
    # Shift labels before sharding: a rank's next token may be on another rank. -100 marks the end of the sequence.
    labels = torch.cat([tokens[:, 1:], torch.full((1, 1), -100)], 1)
    tokens, labels = strategy.shard(tokens).to(device), strategy.shard(labels).to(device)
    # Ranks have different numbers of labels: divide by the mean number, since DDP takes the mean over ranks.
    labels_per_rank = (SEQ - 1) / dist.get_world_size()
    loss = model(
        input_ids=tokens, position_ids=positions, labels=labels, shift_labels=labels,
        num_items_in_batch=labels_per_rank, use_cache=False,
    ).loss  # fmt: skip
    optimizer.zero_grad()
    loss.backward()
    log(step, loss, clip_grad_norm_(model.parameters(), 1.0))
    optimizer.step()


train_step(0)
train_step(1)
with ringprof.capture(sys.argv[1], strategy=strategy):
    train_step(2)
    train_step(3)

dist.destroy_process_group()
