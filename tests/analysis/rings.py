"""Whole passes of ring attention whose times are plain: step ``s`` of a pass begins at a multiple of `LENGTH`."""

from __future__ import annotations

from collections.abc import Callable

from tests.analysis.build import FLASH, Builder

BACKWARD = "flash_bwd_dq_dk_dv_loop_kernel<Flash_bwd_kernel_traits<128>>"
MERGE = "fused_to_sub_sigmoid_sub_mul_sub"
LENGTH = 1000
MERGING = 10

BlockTime = Callable[[int, int, str], int]
"""Of a rank, step and phase; 0 where the rank has no work."""


def everybody(time_ns: int) -> BlockTime:
    return lambda rank, step, phase: time_ns


def causal(time_ns: int) -> BlockTime:
    """As with contiguous pieces under a causal mask."""
    return lambda rank, step, phase: time_ns if step <= rank else 0


class Pass:
    """Writes one rank's trace; the hop is posted before the block that hides it, as public implementations do."""

    def __init__(self, rank: int, world: int, block: BlockTime, hop_ns: int, names: str | None) -> None:
        self.builder = Builder(rank=rank, world_size=world)
        self.rank, self.world, self.block, self.hop_ns, self.names = rank, world, block, hop_ns, names
        self.cpu = 1000
        self.free = 0

    def step(self, phase: str, step: int, start: int, hops: int) -> None:
        for _ in range(hops):
            self._hop(start)
        time = self.block(self.rank, step, phase)
        if not time:
            return
        begun = self.cpu
        self._run(FLASH if phase == "fwd" else BACKWARD, start, start + time)
        if self.names:
            self.builder.mark(self.names.format(phase=phase, step=step), begun, self.cpu - 1)
        self._run(MERGE, start + time, start + time + MERGING)

    def _hop(self, start: int) -> None:
        begun = max(start, self.free)
        self.free = begun + self.hop_ns
        to, source = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        ranks = tuple(range(self.world))
        self.cpu += 200
        self.builder.batch(self.cpu, begun, self.free, to=to, source=source, group_ranks=ranks, group_size=self.world)

    def _run(self, name: str, start: int, end: int) -> None:
        self.cpu += 200
        self.builder.run(name, start, end, launched=self.cpu)
        self.cpu += 100


def ring_pass(
    world: int = 4, block: BlockTime | None = None, hop_ns: int = 400, layers: int = 1, names: str | None = None
) -> list[Builder]:
    """Forward and backward of ``layers`` attention calls on every rank.

    Forward step s hides one hop but the last; backward step s the hop of its keys and that of the gradients before,
    and after the last one the gradients go home.
    """
    ranks = [Pass(rank, world, block or everybody(900), hop_ns, names) for rank in range(world)]
    for one in ranks:
        at = 0
        for _ in range(layers):
            for step in range(world):
                one.step("fwd", step, at, hops=int(step < world - 1))
                at += LENGTH
        for _ in range(layers):
            for step in range(world):
                one.step("bwd", step, at, hops=int(step < world - 1) + int(step > 0))
                at += LENGTH
            one._hop(at)
            at += LENGTH
    return [one.builder for one in ranks]
