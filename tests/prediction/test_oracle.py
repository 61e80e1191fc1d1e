"""Predictions against a small simulator of ring, Ulysses and all-gather that uses nothing of `ringprof.prediction`.

On a machine of constant rates, without heat, chance, host, merges and contention.
"""

from __future__ import annotations

import random

import msgspec
import pytest

pytest.importorskip("torch", reason="a prediction runs strategies on shapes")

from ringprof.json_object import JsonObject
from ringprof.prediction import machine
from ringprof.prediction.calibration import (
    COLLECTIVES,
    Calibration,
    Host,
    KernelFigures,
    KernelSample,
    Link,
    Value,
    assumed,
)
from ringprof.prediction.kernel_model import Estimate
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import predict
from ringprof.prediction.query import Query
from ringprof.prediction.schedules import schedule_of
from ringprof.record.dryrun.schedule import AttentionOp
from ringprof.run import Workload

FORWARD, BACKWARD = 4, 10
"""FLOPs a pair of a query and a key and channel."""


class Oracle:
    """One problem on one machine; seconds."""

    def __init__(
        self, ranks: int, seq: int, heads: int, kv_heads: int, *, flops: float, hop: float, collective: float,
        latency: float,
    ) -> None:  # fmt: skip
        """``flops`` a second; ``hop`` and ``collective`` bytes a second; heads of 128, bf16, no mask."""
        self.ranks, self.local, self.heads, self.kv_heads = ranks, seq // ranks, heads, kv_heads
        self.flops, self.hop, self.collective, self.latency = flops, hop, collective, latency

    def block(self, kind: int, queries: int, keys: int, heads: int) -> float:
        return kind * queries * keys * heads * 128 / self.flops

    def bytes(self, heads: int) -> int:
        return self.local * heads * 128 * 2

    def ring_forward(self) -> float:
        """K and V travel while the block before is computed: n - 1 hops, n blocks, of all ranks alike."""
        each = self.block(FORWARD, self.local, self.local, self.heads)
        hop = self.latency + 2 * self.bytes(self.kv_heads) / self.hop
        return (self.ranks - 1) * max(each, hop) + each

    def ring_backward(self) -> float:
        """K and V as before; dK and dV leave after a block, and the sum must have come when the next is done.

        Block 0 is the rank's own, whose dK and dV stay at home; n - 1 hops carry the others', of twice the size unless
        there is one alone: sums are in float32. Both rings share a communicator: hop follows hop as they are posted.
        """
        each = self.block(BACKWARD, self.local, self.local, self.heads)
        hop = self.latency + 2 * self.bytes(self.kv_heads) / self.hop
        wide = self.latency + (2 if self.ranks > 2 else 1) * 2 * self.bytes(self.kv_heads) / self.hop
        now = arrived = home = free = 0.0
        for step in range(self.ranks):
            begun = max(now, arrived)
            if step < self.ranks - 1:
                arrived = free = max(begun, free) + hop
            now = begun + each
            if step > 0:
                # The sum is one hop further on, and the next block comes after it.
                now = max(now, home)
                home = free = max(now, free) + wide
        return max(now, home)

    def ulysses(self, *, backward: bool) -> float:
        """Sequence for heads and back: q, k, v, out; backward dout, dq, dk and dv; nothing overlaps."""
        away = (self.ranks - 1) / self.ranks
        seq, heads = self.local * self.ranks, self.heads / self.ranks
        kind = BACKWARD if backward else FORWARD
        moved = away * sum(self.bytes(one) for one in (self.heads, self.heads, self.kv_heads, self.kv_heads))
        return kind * seq * seq * heads * 128 / self.flops + moved / self.collective + 4 * self.latency

    # All-gather, with a causal mask or none. Ranks differ where the layout is contiguous.

    def gather(self) -> float:
        """K and V one after the other, or the scattered dK and dV, which have the input's type."""
        return 2 * (self.latency + (self.ranks - 1) * self.bytes(self.kv_heads) / self.collective)

    def own(self, kind: int, *, causal: bool) -> tuple[float, float]:
        """A rank's own block: the part that is computed while K and V come, and what is kept for the reduce-scatter.

        From 32 MiB of K on a backward pass keeps half: of a square the later queries; of a triangle the two smaller
        triangles on the diagonal, and the square below them comes first.
        """
        pairs, half = self.local * (self.local + 1) // 2 if causal else self.local**2, self.local // 2
        kept = half * (half + 1) if causal else self.local**2 // 2
        if kind == FORWARD or self.bytes(self.kv_heads) < 32 << 20:
            kept = 0
        return self.block(kind, pairs - kept, 1, self.heads), self.block(kind, kept, 1, self.heads)

    def others(self, kind: int, layout: str, *, causal: bool) -> list[float]:
        """By rank, the blocks with others' keys: of zigzag's two chunks a rank sees 2n - 2 chunks of others.

        Of contiguous pieces with a causal mask rank r sees r others.
        """
        seen = [self.ranks - 1.0] * self.ranks
        if causal:
            seen = [(self.ranks - 1) / 2] * self.ranks if layout == "zigzag" else [float(r) for r in range(self.ranks)]
        return [self.block(kind, self.local, self.local, self.heads) * count for count in seen]

    def all_gather(self, layout: str, *, causal: bool, backward: bool) -> float:
        """The gather begins when the last rank is there, and so does the reduce-scatter, after the others' blocks."""
        now = [0.0] * self.ranks
        for kind in (FORWARD, BACKWARD) if backward else (FORWARD,):
            first, kept = self.own(kind, causal=causal)
            arrived = max(now) + self.gather()
            blocks = zip(now, self.others(kind, layout, causal=causal), strict=True)
            now = [max(begun + first, arrived) + more for begun, more in blocks]
        if backward:
            home = max(now) + self.gather()
            now = [max(at + kept, home) for at in now]
        return max(now)


def constant(hop: float, collective: float, latency_us: float) -> Calibration:
    """All that is not asked about costs nothing, and no two hops share a link."""

    def figure(value: float) -> Value:
        return Value(value, 0.0, "assumed", "made up")

    nothing = figure(0.0)
    link = Link(
        channel_gb_s=figure(hop / 1e9), hop_gb_s=figure(hop / 1e9), total_gb_s=figure(1e6),
        latency_us=figure(latency_us), collective_gb_s={name: figure(collective / 1e9) for name in COLLECTIVES},
    )  # fmt: skip
    sample = KernelSample(
        phase="forward", q=1, kv=1, heads=1, kv_heads=1, head_dim=128, causal=False, ns=1.0, origin="assumed", source=""
    )  # fmt: skip
    kernel = KernelFigures(name="flash-attn", fills_device=False, tail=nothing, lead=nothing, samples=[sample])
    host = Host(
        call_us=nothing, launch_us=nothing, forward_us=nothing, backward_us=nothing, post_us=nothing, wait_us=nothing,
        unlike=nothing,
    )  # fmt: skip
    return msgspec.structs.replace(
        assumed("made up", "made up", 132, 1 << 40), kernels=[kernel], same_host=link, memory_gb_s=figure(1e12),
        reorder_gb_s=figure(1e12), touch_us=nothing, contention=nothing, hop_first=figure(1.0), handover_us=nothing,
        host=host, heat=nothing, unlike=nothing, noise=nothing, unsteady_us=nothing,
    )  # fmt: skip


def foreseen(strategy: str, params: JsonObject, workload: Workload, ranks: int, known: Calibration) -> float:
    """Seconds."""
    asked = Query(strategy, workload, Cluster(1, ranks), "flash-attn", "nccl", params)
    return predict(asked, known, schedule_of, draws=1).median_ns / 1e9


def computing_at(flops: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks take as long as their FLOPs, a second for ``flops``."""

    def at(_: object, block: AttentionOp) -> Estimate:
        return Estimate(block.flops() / flops * 1e9, 0.0)

    monkeypatch.setattr(machine.Curves, "at", at)
    monkeypatch.setattr(machine, "JITTER", 0.0)


@pytest.mark.parametrize("seed", range(30))
def test_constant_rates(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    ranks, kv_heads, flops = (
        draw.choice([2, 3, 4, 5, 8, 12]),
        draw.choice([1, 2, 4, 8]),
        draw.choice([1e14, 4e14, 1e15]),
    )
    heads, seq = kv_heads * draw.choice([1, 2, 4]), ranks * draw.choice([512, 2048, 8192, 5000])
    hop, latency_us = draw.choice([5e9, 2e10, 1e11, 4e11]), draw.choice([0, 20, 100])
    computing_at(flops, monkeypatch)
    oracle = Oracle(
        ranks, seq, heads, kv_heads, flops=flops, hop=hop, collective=0.8 * hop, latency=latency_us * 1e-6
    )  # fmt: skip
    known = constant(hop, 0.8 * hop, latency_us)
    names = ["ring"] if heads % ranks or kv_heads % ranks else ["ring", "ulysses"]
    for name, backward in ((name, backward) for name in names for backward in (False, True)):
        workload = Workload(
            seq=seq, heads=heads, kv_heads=kv_heads, head_dim=128, causal=False, backward=backward
        )  # fmt: skip
        found = foreseen(name, {}, workload, ranks, known)
        passes = (False, True) if backward else (False,)
        if name == "ulysses":
            expected = sum(oracle.ulysses(backward=one) for one in passes)
        else:
            expected = oracle.ring_forward() + (oracle.ring_backward() if backward else 0.0)
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("seed", range(10))
def test_constant_rates_of_all_gather(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both layouts, with a causal mask and without; a rank has more than 32 MiB of K or less."""
    draw = random.Random(seed)
    ranks, kv_heads, flops = draw.choice([2, 3, 4, 6, 8]), draw.choice([2, 4, 8]), draw.choice([1e14, 4e14, 1e15])
    heads, local = kv_heads * draw.choice([1, 4]), draw.choice([1024, 5000, 16384, 65536])
    collective, latency_us = draw.choice([4e9, 2e10, 1e11, 4e11]), draw.choice([0, 20, 100])
    computing_at(flops, monkeypatch)
    oracle = Oracle(
        ranks, ranks * local, heads, kv_heads, flops=flops, hop=1e9, collective=collective, latency=latency_us * 1e-6
    )
    known = constant(1e9, collective, latency_us)
    for layout in ("contiguous", "zigzag"):
        for causal, backward in ((False, False), (False, True), (True, False), (True, True)):
            workload = Workload(
                seq=ranks * local, heads=heads, kv_heads=kv_heads, head_dim=128, causal=causal, backward=backward
            )  # fmt: skip
            found = foreseen("allgather", {"layout": layout}, workload, ranks, known)
            expected = oracle.all_gather(layout, causal=causal, backward=backward)
            assert found == pytest.approx(expected, rel=1e-6), (layout, causal, backward)
