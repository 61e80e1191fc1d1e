"""Prefill a prompt in chunks, move its cache to the ranks where decode wants it, and decode token by token.

    torchrun --nproc-per-node 2 examples/prefill_to_decode.py

Any number of ranks that divides the heads. Each rank compares its part of every output with dense attention over the
whole sequence, computed in this process, and prints the largest difference.
"""

import torch
import torch.distributed as dist

from ringprof.strategies import create, redistribute_cache

dist.init_process_group("gloo")
prefill, decode = create("ring-prefill"), create("dcp")
prompt, heads, kv_heads, head_dim, window = 53, 12, 4, 8, 16
chunks = [20, 20, 13]
torch.manual_seed(0)  # the same full tensors on every rank, to compare with
q, k, v = (torch.randn(1, 60, h, head_dim, dtype=torch.float64) for h in (heads, kv_heads, kv_heads))


def dense(first, end):
    """Compute the window's attention of tokens first to end in one process."""
    distance = torch.arange(first, end)[:, None] - torch.arange(end)
    hidden = (distance < 0) | (distance >= window)
    keys, values = (x[:, :end].repeat_interleave(heads // kv_heads, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q[:, first:end], keys) * head_dim**-0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)


error, end = 0.0, 0
with torch.no_grad():
    k_cache, v_cache = (x[:, :0] for x in (k, v))
    for index, length in enumerate(chunks):
        first, end = end, end + length
        q_new, k_new, v_new = (prefill.shard(x[:, first:end]) for x in (q, k, v))
        k_cache, v_cache = torch.cat([k_cache, k_new], 1), torch.cat([v_cache, v_new], 1)
        out = prefill.attention(q_new, k_cache, v_cache, kv_chunks=chunks[: index + 1], window_size=(window - 1, 0))
        error = max([error, *(out - prefill.shard_output(dense(first, end))).abs().flatten().tolist()])
    k_cache, v_cache = redistribute_cache(prefill, decode, k_cache, v_cache, kv_chunks=chunks)
    for token in range(prompt, 60):
        if token % dist.get_world_size() == dist.get_rank():  # the new token's key belongs to one rank
            k_cache = torch.cat([k_cache, k[:, token : token + 1]], 1)
            v_cache = torch.cat([v_cache, v[:, token : token + 1]], 1)
        out = decode.attention(
            decode.shard(q[:, token : token + 1]), k_cache, v_cache, kv_length=token + 1,
            window_size=(window - 1, 0),
        )  # fmt: skip
        error = max(error, float((out - decode.shard_output(dense(token, token + 1))).abs().max()))
print(f"rank {dist.get_rank()}: largest difference {error:.1e}")
dist.destroy_process_group()
