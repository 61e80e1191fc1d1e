"""Synthetic passes of ring attention with simple times: step ``s`` of a pass begins at a multiple of `LENGTH`."""

from __future__ import annotations

from collections.abc import Callable

from tests.analysis.build import FLASH, Builder

BACKWARD = "flash_bwd_dq_dk_dv_loop_kernel<Flash_bwd_kernel_traits<128>>"
MERGE = "fused_to_sub_sigmoid_sub_mul_sub"
LENGTH = 1000
MERGING = 10

BlockTime = Callable[[int, int, str], int]
"""Function from rank, step and phase to the time of a block in nanoseconds; 0 where the rank has no work."""


def uniform_blocks(time_ns: int) -> BlockTime:
    """Return equal block times for all ranks and steps."""
    return lambda rank, step, phase: time_ns


def causal(time_ns: int) -> BlockTime:
    """Return the block times of contiguous pieces under a causal mask: work that rises with the rank."""
    return lambda rank, step, phase: time_ns if step <= rank else 0


class Pass:
    """Writer of one rank's trace; each hop is posted before the block that hides it, as in public implementations."""

    def __init__(self, rank: int, world: int, block: BlockTime, hop_ns: int, names: str | None) -> None:
        self.builder = Builder(rank=rank, world_size=world)
        self.rank, self.world, self.block, self.hop_ns, self.names = rank, world, block, hop_ns, names
        self.cpu = 1000
        self.free = 0

    def step(self, phase: str, step: int, start: int, hops: int) -> None:
        for _ in range(hops):
            self._hop(start)
        time_ns = self.block(self.rank, step, phase)
        if not time_ns:
            return
        launched_from = self.cpu
        self._run(FLASH if phase == "fwd" else BACKWARD, start, start + time_ns)
        if self.names:
            self.builder.mark(self.names.format(phase=phase, step=step), launched_from, self.cpu - 1)
        self._run(MERGE, start + time_ns, start + time_ns + MERGING)

    def _hop(self, start: int) -> None:
        start_ns = max(start, self.free)
        self.free = start_ns + self.hop_ns
        to, source = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        ranks = tuple(range(self.world))
        self.cpu += 200
        self.builder.batch(
            self.cpu, start_ns, self.free, to=to, source=source, group_ranks=ranks, group_size=self.world
        )

    def _run(self, name: str, start: int, end: int) -> None:
        self.cpu += 200
        self.builder.run(name, start, end, launched=self.cpu)
        self.cpu += 100


def ring_pass(
    world: int = 4, block: BlockTime | None = None, hop_ns: int = 400, layers: int = 1, names: str | None = None
) -> list[Builder]:
    """Return the traces of forward and backward passes of ``layers`` attention calls on every rank.

    Every forward step but the last hides one hop. A backward step hides the hop of its keys and that of the gradients
    of the step before. After the last step one hop returns the gradients to their ranks.
    """
    ranks = [Pass(rank, world, block or uniform_blocks(900), hop_ns, names) for rank in range(world)]
    for rank_pass in ranks:
        start = 0
        for _ in range(layers):
            for step in range(world):
                rank_pass.step("fwd", step, start, hops=int(step < world - 1))
                start += LENGTH
        for _ in range(layers):
            for step in range(world):
                rank_pass.step("bwd", step, start, hops=int(step < world - 1) + int(step > 0))
                start += LENGTH
            rank_pass._hop(start)
            start += LENGTH
    return [rank_pass.builder for rank_pass in ranks]
