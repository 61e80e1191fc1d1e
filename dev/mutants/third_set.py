"""Small bugs written by hand in code that only GPUs run: each is to be noticed on a CPU. The third set of rules."""

from __future__ import annotations

from rule import Rule

TRANSPORT = "strategies/transport"
COPIES, HOPS = (f"tests/strategies/test_{name}.py" for name in ("copy_engine", "hops_on_cpu"))
KERNELS = "strategies/kernels"
FUSED, FAKES = (f"tests/strategies/{name}.py" for name in ("test_fused", "test_newer_flash_attn"))

RULES = [
    # --- transport --------------------------------------------------------------------------------------
    Rule(f"{TRANSPORT}/copy_engine.py", "target = slots.following + slots.number % SLOTS",
         "target = slots.following + (slots.number + 1) % SLOTS",
         "a hop overwrites what its receiver still reads", test=COPIES),
    Rule(f"{TRANSPORT}/copy_engine.py", "self._write_and_wait(slots, slots.previous, _FREE)",
         "self._write_and_wait(slots, slots.following, _FREE)",
         "the wrong neighbour is told that a slot is free", test=COPIES),
    Rule(f"{TRANSPORT}/copy_engine.py", "return self.slots.received(layout, self.slots.number).buffers",
         "return self.slots.received(layout, self.slots.number + 1).buffers",
         "a reserved message lies where the next hop arrives", test=HOPS),
    Rule(f"{TRANSPORT}/copy_engine.py", "_Slots(-(-size // _GROWS_BY) * _GROWS_BY,",
         "_Slots(max(1, size // _GROWS_BY) * _GROWS_BY,",
         "copies overrun slots that are smaller than their message", test=HOPS),
    Rule(f"{TRANSPORT}/copy_engine.py", "| cuda.wait_event(stream, ready, 0)", "",
         "a message is sent before it is computed", test=COPIES),
    Rule(f"{TRANSPORT}/copy_engine.py", "address, self.slots.number + _RELEASED, 0))",
         "address, self.slots.number, 0))",
         "streams hang after a peer's death", test=COPIES),
    Rule(f"{TRANSPORT}/copy_engine.py", "if len(self._in_flight) >= _MOST_IN_FLIGHT:", "if not self._in_flight:",
         "memory of finished hops grows until the watchdog looks", test=COPIES),
    Rule("strategies/algorithms/megatron.py",
         "        streams.join(result for _, out, lse, _ in steps for result in (out, lse))\n", "",
         "results are merged while another stream computes them", test=HOPS),
    Rule(f"{TRANSPORT}/ring_channel.py",
         "if self.transport.free_slot is not None and all([tensor.is_contiguous() for tensor in tensors]):",
         "if self.transport.free_slot is not None:",
         "views are refused, or sent as if they were dense", test=HOPS),
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
