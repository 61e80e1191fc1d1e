"""Small bugs written by hand in code that only GPUs run: each is to be noticed on a CPU. The third set of rules."""

from __future__ import annotations

from rule import Rule

KERNELS = "strategies/kernels"
FUSED, FAKES = (f"tests/strategies/{name}.py" for name in ("test_fused", "test_newer_flash_attn"))

RULES = [
    # --- kernels ----------------------------------------------------------------------------------------
    Rule(f"{KERNELS}/fused.py", "merged = in_range & (query >= first)", "merged = in_range & (query > first)",
         "the first query of every merged block keeps its old result", test=FUSED),
    Rule(f"{KERNELS}/fused.py", "(dout, delta.contiguous(), out)", "(dout, delta, out)",
         "a delta of some heads is read at the wrong places: dQ and dK are wrong", test=FUSED),
    Rule(f"{KERNELS}/fused.py", "constants, *[tensor.dtype for tensor in tensors]", "constants",
         "a kernel for bf16 runs on float32 tensors of the same shape", test=FUSED),
    Rule(f"{KERNELS}/fused.py", "tensors[0].device, numbers, constants,", "tensors[0].device, constants,",
         "a kernel runs with sizes that it was not specialized for", test=FUSED),
    Rule(f"{KERNELS}/fused.py", "out.stride(0), summand.stride(0),", "out.stride(0), out.stride(0),",
         "the second batch entry of a sum is read at the wrong places", test=FUSED),
    Rule(f"{KERNELS}/newer_flash_attn.py",
         '"max_seqlen_q": batch.most_queries, "max_seqlen_k": batch.most_keys',
         '"max_seqlen_q": batch.most_keys, "max_seqlen_k": batch.most_queries',
         "rectangular blocks of documents are cut off", test=FAKES),
    Rule(f"{KERNELS}/flash_attn.py",
         "dq, dk, dv, lengths.cumulative_q, lengths.cumulative_kv, batch.most_queries,\n            batch.most_keys,",
         "dq, dk, dv, lengths.cumulative_q, lengths.cumulative_kv, batch.most_keys,\n            batch.most_queries,",
         "gradients of rectangular blocks of documents are cut off", test=FAKES),
    Rule(f"{KERNELS}/torch_kernels.py",
         "lse, lengths.cumulative_q, lengths.cumulative_kv, batch.most_queries,\n                batch.most_keys,",
         "lse, lengths.cumulative_q, lengths.cumulative_kv, batch.most_keys,\n                batch.most_queries,",
         "gradients of rectangular blocks of documents are cut off", test=FAKES),
    Rule(f"{KERNELS}/newer_flash_attn.py", "copy_(dv[..., :-missing])", "copy_(dv[..., missing:])",
         "dV of heads of 192 and 128 holds the padding", test=FAKES),
    Rule(f"{KERNELS}/newer_flash_attn.py",
         "            deterministic=self.deterministic, **packed,", "            deterministic=False, **packed,",
         "a deterministic backward pass of flash-attn 3 is not", test=FAKES),
    Rule(f"{KERNELS}/torch_kernels.py",
         "batch.causal, False, scale=scale, window_size_left=batch.left,",
         "batch.causal, False, scale=scale, window_size_left=-1,",
         "torch's flash attention ignores the window", test=FAKES),
    Rule(f"{KERNELS}/torch_kernels.py", 'value=float("inf")', "value=0.0",
         "rows behind the end add to dK and dV", test=FAKES),
]  # fmt: skip
