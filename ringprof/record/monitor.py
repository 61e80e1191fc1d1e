"""Short looks at a user's own training loop, step by step: when to look, and what a look may cost. Loads torch."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.autograd.profiler import KinetoStepTracker
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import record_function
from torch.profiler.profiler import PROFILER_STEP_NAME

from ringprof.record.measure import ITERATION, profiler, profiler_is_busy
from ringprof.record.process_group import GroupRanks, gather_tensor
from ringprof.scratch import remove, scratch_folder

MOST_SHARE = 0.01
"""Of the loop's time that looking may take: after each look the next is put off until it does not take more."""
LARGEST_BYTES = 64 << 20
"""Of all ranks' reduced traces together; larger ones stay where they are, and the look tells nothing."""

_log = logging.getLogger("ringprof.monitor")

_Reduce = Callable[[Path], bytes]
"""A trace's reduced form; empty where it cannot be read."""
_Tell = Callable[[int, list[bytes], dict[str, float]], None]
"""Given, on the first rank, the step, every rank's reduced trace, and what looking has cost."""


class Monitor:
    """Profiles one step now and then; made by `ringprof.monitor`."""

    def __init__(self, every: int, ranks: GroupRanks, reduce: _Reduce, tell: _Tell) -> None:
        """Steps are those of the first optimizer that takes one, until `step` is called for the first time."""
        self.steps = 0
        """Done so far."""
        self.interval = every
        """Steps from one look to the next."""
        self.spent_ns = 0
        """What looking has cost this rank so far."""
        self._every, self._next, self._ranks, self._reduce, self._tell = every, every, ranks, reduce, tell
        self._own_steps, self._optimizer = False, 0
        self._window: ExitStack | None = None
        self._recording: Any = None
        self._marked: ExitStack | None = None
        self._plain: deque[int] = deque(maxlen=32)
        self._last = time.perf_counter_ns()
        self._cost = 0
        self._hook: Any = register_optimizer_step_post_hook(self._after_optimizer)

    def step(self) -> None:
        """One step of the loop is done. Every rank calls it, or none does."""
        self._own_steps = True
        self._advance()

    def close(self) -> None:
        """Look no more; a look that has begun is dropped."""
        self._hook.remove()
        if self._marked is not None:
            self._marked.close()
        if self._window is not None:
            self._window.close()
        self._window = self._marked = None

    def _after_optimizer(self, optimizer: Any, *_: Any) -> None:
        self._optimizer = self._optimizer or id(optimizer)
        if not self._own_steps and id(optimizer) == self._optimizer:
            self._advance()

    def _advance(self) -> None:
        self.steps += 1
        now = time.perf_counter_ns()
        took = now - self._last
        if self._window is None:
            self._plain.append(took)
            if self.steps >= self._next:
                self._open()
        else:
            # What the profiler slows a step down by is its cost, too.
            self._cost += max(0, took - round(median(self._plain)))
            if self._marked is None:
                self._mark()
            else:
                self._look()
        self._last = time.perf_counter_ns()
        self._cost += self._last - now

    def _open(self) -> None:
        """The next step warms the profiler up. A rank whose program has one of its own at work has no trace of it."""
        self._window, self._cost = ExitStack(), 0
        if not _is_taken():
            self._recording = self._window.enter_context(profiler())

    def _mark(self) -> None:
        """The next step is profiled, from a device at rest."""
        self._ranks.finish()
        self._marked = ExitStack()
        if self._recording is not None:
            self._recording.step()
            self._marked.enter_context(record_function(ITERATION))

    def _look(self) -> None:
        """The profiled step is over: reduce its trace, bring the ranks' together, and put the next look off."""
        began = time.perf_counter_ns()
        assert self._window is not None and self._marked is not None
        self._marked.close()
        self._ranks.finish()
        told = self._ranks.bytes_of_all(self._trace())
        self._window = self._marked = self._recording = None
        if self._ranks.rank == 0:
            step_ns = median(self._plain)
            try:
                self._tell(self.steps, told, {"step_ms": step_ns / 1e6, "interval": self.interval})
            except Exception as error:  # a look that fails must not end the training that it looks at
                _log.warning("step %d: nothing could be told: %s", self.steps, error)
        self._put_off(self._cost + time.perf_counter_ns() - began)

    def _trace(self) -> bytes:
        """This rank's reduced trace; nothing is kept."""
        assert self._window is not None
        if self._recording is None:
            _log.warning("step %d: rank %d has a torch.profiler of its own: no look", self.steps, self._ranks.number)
            return b""
        try:
            self._recording.step()
            with self._window, ExitStack() as after:
                folder = scratch_folder("look")
                after.callback(remove, folder)
                self._recording.export_chrome_trace(str(folder / "trace.json"))
                data = self._reduce(folder / "trace.json")
        except Exception as error:  # as above; the other ranks wait for this one's answer
            _log.warning("step %d: rank %d has no trace: %s", self.steps, self._ranks.number, error)
            return b""
        return data if len(data) * self._ranks.size <= LARGEST_BYTES else b""

    def _put_off(self, cost_ns: int) -> None:
        """As far as the dearest rank asks for: all ranks must look at the same steps."""
        self.spent_ns += cost_ns
        ranks, step_ns = self._ranks, max(1, round(median(self._plain)))
        asked = torch.tensor([interval_for(cost_ns, step_ns, self._every)], device=ranks.device)
        found: Sequence[Any] = gather_tensor(asked, ranks.group) if ranks.size > 1 else [asked]
        self.interval = max(int(one.item()) for one in found)
        self._next = self.steps + self.interval


def _is_taken() -> bool:
    """Whether the program has a profiler, at work or, in a ``with`` block, in between: two may end the process."""
    return profiler_is_busy() or PROFILER_STEP_NAME in getattr(KinetoStepTracker, "_step_dict", ())


def interval_for(cost_ns: int, step_ns: int, every: int) -> int:
    """Steps until the next look such that looking takes no more than `MOST_SHARE` of the time."""
    return max(every, math.ceil(cost_ns / (MOST_SHARE * step_ns)))
