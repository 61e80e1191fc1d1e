"""Predictions against a small model of ring, Ulysses and all-gather that uses nothing of `ringprof.prediction`.

The machine has constant rates, without throttling, randomness, host time, merges and contention.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch", reason="a prediction runs strategies on shapes")

from ringprof.common.json_object import JsonObject
from ringprof.dryrun.schedule import AttentionOp
from ringprof.prediction import machine
from ringprof.prediction.calibration import (
    COLLECTIVES,
    Calibration,
    Host,
    KernelFigures,
    KernelSample,
    Link,
    Value,
    assumed_calibration,
)
from ringprof.prediction.kernel_model import Estimate
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import predict
from ringprof.prediction.query import Query
from ringprof.prediction.schedules import schedule_of
from ringprof.workload.workload import Workload

FORWARD, BACKWARD = 4, 10
"""FLOPs per query-key pair and channel."""


class Oracle:
    """One workload on one machine; times in seconds."""

    def __init__(
        self, ranks: int, seq: int, heads: int, kv_heads: int, *, flops: float, hop: float, collective: float,
        latency: float,
    ) -> None:  # fmt: skip
        """Set up heads of 128 in bf16 without a mask; ``flops`` per second, ``hop`` and ``collective`` in bytes per
        second."""
        self.ranks, self.local, self.heads, self.kv_heads = ranks, seq // ranks, heads, kv_heads
        self.flops, self.hop, self.collective, self.latency = flops, hop, collective, latency

    def block(self, kind: int, queries: int, keys: int, heads: int) -> float:
        return kind * queries * keys * heads * 128 / self.flops

    def bytes(self, heads: int) -> int:
        return self.local * heads * 128 * 2

    def ring_forward(self) -> float:
        """Return the time of n blocks and n - 1 hops: K and V travel while the previous block is computed."""
        each = self.block(FORWARD, self.local, self.local, self.heads)
        hop = self.latency + 2 * self.bytes(self.kv_heads) / self.hop
        return (self.ranks - 1) * max(each, hop) + each

    def ring_backward(self) -> float:
        """Return the backward time: dK and dV leave after a block, and the sum must arrive before the next ends.

        Block 0 is local, and its dK and dV are not sent; n - 1 hops carry the others, of twice the size unless there is
        only one: sums are in float32. Both rings share a communicator, so hops run in the order in which they are
        started.
        """
        block_s = self.block(BACKWARD, self.local, self.local, self.heads)
        hop = self.latency + 2 * self.bytes(self.kv_heads) / self.hop
        wide = self.latency + (2 if self.ranks > 2 else 1) * 2 * self.bytes(self.kv_heads) / self.hop
        now = arrived = gradients_at = free = 0.0
        for step in range(self.ranks):
            start = max(now, arrived)
            if step < self.ranks - 1:
                arrived = free = max(start, free) + hop
            now = start + block_s
            if step > 0:
                # The sum is one hop further on, and the next block comes after it.
                now = max(now, gradients_at)
                gradients_at = free = max(now, free) + wide
        return max(now, gradients_at)

    def ulysses(self, *, backward: bool) -> float:
        """Return the time of the block and of the all-to-alls: q, k, v and out; backward dout, dq, dk and dv.

        Nothing overlaps.
        """
        sent_share = (self.ranks - 1) / self.ranks
        seq, heads = self.local * self.ranks, self.heads / self.ranks
        kind = BACKWARD if backward else FORWARD
        sent_bytes = sent_share * sum(
            self.bytes(tensor_heads) for tensor_heads in (self.heads, self.heads, self.kv_heads, self.kv_heads)
        )
        return kind * seq * seq * heads * 128 / self.flops + sent_bytes / self.collective + 4 * self.latency

    # All-gather, with a causal mask or none. Ranks differ where the layout is contiguous.

    def gather(self) -> float:
        """Return the time to gather K and V, one after the other, or to scatter dK and dV.

        The gradients have the input's type.
        """
        return 2 * (self.latency + (self.ranks - 1) * self.bytes(self.kv_heads) / self.collective)

    def own(self, kind: int, *, causal: bool) -> tuple[float, float]:
        """Return the local block's times: the part computed during the gather, and the part kept for the
        reduce-scatter.

        From 32 MiB of K on, a backward pass keeps half. Of a square these are the later queries. Of a triangle they are
        the two smaller triangles on the diagonal; the square below them comes first.
        """
        pairs, half = self.local * (self.local + 1) // 2 if causal else self.local**2, self.local // 2
        kept = half * (half + 1) if causal else self.local**2 // 2
        if kind == FORWARD or self.bytes(self.kv_heads) < 32 << 20:
            kept = 0
        return self.block(kind, pairs - kept, 1, self.heads), self.block(kind, kept, 1, self.heads)

    def others(self, kind: int, layout: str, *, causal: bool) -> list[float]:
        """Return per rank the time of blocks with other ranks' keys.

        With zigzag's two chunks per rank, a rank sees 2n - 2 chunks of others. With contiguous pieces and a causal
        mask, rank r sees r others.
        """
        seen = [self.ranks - 1.0] * self.ranks
        if causal:
            seen = [(self.ranks - 1) / 2] * self.ranks if layout == "zigzag" else [float(r) for r in range(self.ranks)]
        return [self.block(kind, self.local, self.local, self.heads) * count for count in seen]

    def all_gather(self, layout: str, *, causal: bool, backward: bool) -> float:
        """Return the time; the gather starts when the last rank is ready, and so does the reduce-scatter."""
        now = [0.0] * self.ranks
        for kind in (FORWARD, BACKWARD) if backward else (FORWARD,):
            first, kept = self.own(kind, causal=causal)
            arrived = max(now) + self.gather()
            blocks = zip(now, self.others(kind, layout, causal=causal), strict=True)
            now = [max(begun + first, arrived) + more for begun, more in blocks]
        if backward:
            reduced = max(now) + self.gather()
            now = [max(time + kept, reduced) for time in now]
        return max(now)


def constant_machine(hop: float, collective: float, latency_us: float) -> Calibration:
    """Return a machine where everything else costs nothing and no two hops share a link."""

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
    kinds: Any = {name: nothing for name in Host.__struct_fields__ if name.endswith("_us")}
    host = Host(**kinds, host_variation=nothing)
    return msgspec.structs.replace(
        assumed_calibration("made up", "made up", 132, 1 << 40), kernels=[kernel], same_host=link,
        memory_gb_s=figure(1e12),
        reorder_gb_s=figure(1e12), memory_op_us=nothing, contention=nothing, hop_first=figure(1.0), handover_us=nothing,
        host=host, throttling=nothing, device_variation=nothing, noise=nothing, run_to_run_noise_us=nothing,
    )  # fmt: skip


def predicted_seconds(
    strategy: str, params: JsonObject, workload: Workload, ranks: int, calibration: Calibration
) -> float:
    """Return the predicted time in seconds."""
    query = Query(strategy, workload, Cluster(1, ranks), "flash-attn", "nccl", params)
    return predict(query, calibration, schedule_of, draws=1).median_ns / 1e9


def compute_at(flops: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks take one second per ``flops`` FLOPs."""

    def estimate(_: object, block: AttentionOp) -> Estimate:
        return Estimate(block.flops() / flops * 1e9, 0.0)

    monkeypatch.setattr(machine.Curves, "estimate", estimate)
    monkeypatch.setattr(machine, "JITTER", 0.0)


@pytest.mark.parametrize("seed", range(30))
def test_simulator_equals_the_oracle_at_constant_rates(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    ranks, kv_heads, flops = (
        draw.choice([2, 3, 4, 5, 8, 12]),
        draw.choice([1, 2, 4, 8]),
        draw.choice([1e14, 4e14, 1e15]),
    )
    heads, seq = kv_heads * draw.choice([1, 2, 4]), ranks * draw.choice([512, 2048, 8192, 5000])
    hop, latency_us = draw.choice([5e9, 2e10, 1e11, 4e11]), draw.choice([0, 20, 100])
    compute_at(flops, monkeypatch)
    oracle = Oracle(
        ranks, seq, heads, kv_heads, flops=flops, hop=hop, collective=0.8 * hop, latency=latency_us * 1e-6
    )  # fmt: skip
    calibration = constant_machine(hop, 0.8 * hop, latency_us)
    names = ["ring"] if heads % ranks or kv_heads % ranks else ["ring", "ulysses"]
    for name, backward in ((name, backward) for name in names for backward in (False, True)):
        workload = Workload(
            seq=seq, heads=heads, kv_heads=kv_heads, head_dim=128, causal=False, backward=backward
        )  # fmt: skip
        predicted = predicted_seconds(name, {}, workload, ranks, calibration)
        passes = (False, True) if backward else (False,)
        if name == "ulysses":
            expected = sum(oracle.ulysses(backward=with_backward) for with_backward in passes)
        else:
            expected = oracle.ring_forward() + (oracle.ring_backward() if backward else 0.0)
        assert predicted == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("seed", range(10))
def test_simulated_all_gather_equals_the_oracle(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both layouts, with a causal mask and without; a rank has more than 32 MiB of K or less."""
    draw = random.Random(seed)
    ranks, kv_heads, flops = draw.choice([2, 3, 4, 6, 8]), draw.choice([2, 4, 8]), draw.choice([1e14, 4e14, 1e15])
    heads, local = kv_heads * draw.choice([1, 4]), draw.choice([1024, 5000, 16384, 65536])
    collective, latency_us = draw.choice([4e9, 2e10, 1e11, 4e11]), draw.choice([0, 20, 100])
    compute_at(flops, monkeypatch)
    oracle = Oracle(
        ranks, ranks * local, heads, kv_heads, flops=flops, hop=1e9, collective=collective, latency=latency_us * 1e-6
    )
    calibration = constant_machine(1e9, collective, latency_us)
    for layout in ("contiguous", "zigzag"):
        for causal, backward in ((False, False), (False, True), (True, False), (True, True)):
            workload = Workload(
                seq=ranks * local, heads=heads, kv_heads=kv_heads, head_dim=128, causal=causal, backward=backward
            )  # fmt: skip
            predicted = predicted_seconds("allgather", {"layout": layout}, workload, ranks, calibration)
            expected = oracle.all_gather(layout, causal=causal, backward=backward)
            assert predicted == pytest.approx(expected, rel=1e-6), (layout, causal, backward)
