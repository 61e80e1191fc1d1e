"""Small bugs written by hand in code that only GPUs run: each is to be noticed on a CPU. The third set of rules."""

from __future__ import annotations

from rule import Rule

TRANSPORT = "strategies/transport"
COPIES, HOPS = (f"tests/strategies/test_{name}.py" for name in ("copy_engine", "hops_on_cpu"))

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
         "        streams.join(result for step in steps for result in (step.out, step.lse))\n", "",
         "results are merged while another stream computes them", test=HOPS),
    Rule(f"{TRANSPORT}/ring_channel.py",
         "if self.transport.free_slot is not None and all([tensor.is_contiguous() for tensor in tensors]):",
         "if self.transport.free_slot is not None:",
         "views are refused, or sent as if they were dense", test=HOPS),
]  # fmt: skip
