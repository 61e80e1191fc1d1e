"""Planned memory against what GPUs held, against sums by hand, and of user code."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from typing import Any

import pytest
from msgspec.structs import replace

from tests.paths import ROOT, TRACES

pytest.importorskip("torch", reason="a dry run runs strategies on shapes")

import torch

from dev.benchmarks import plan_memory
from ringprof.dryrun import memory
from ringprof.dryrun.memory import peak_bytes
from ringprof.errors import UnsupportedWorkloadError
from ringprof.iteration.request import RecordRequest
from ringprof.run import read_run
from ringprof.strategies import find, names
from ringprof.workload.workload import Workload
from tests.recording.dryrun import untrusted_strategies

MIB = 2**20
Q, KV, LSE = 40.0, 16.0, 0.625
"""MiB of 4096 tokens of 40 heads of 128 numbers in bf16, of K and V of 8 heads, and of the LSE in float32."""
GRADIENTS = Q + KV + (2 * Q + LSE) + 2 * Q
"""MiB that a backward block creates and holds: dQ, dQ in float32, row sums, dK and dV of every query head."""
WORKLOAD = Workload(seq=4096, heads=40, kv_heads=8, head_dim=128, causal=False)


def request_for(strategy: str, world: int, **options: Any) -> RecordRequest:
    base = RecordRequest(workload=WORKLOAD, strategy=strategy, device="cuda", world=world, hops="nccl", verify=False)
    return replace(base, **options)


def held_mib(strategy: str, world: int, *, backward: bool, kernel: str = "flash-attn", **options: Any) -> float:
    workload = replace(WORKLOAD, seq=4096 * world, backward=backward)
    return peak_bytes(request_for(strategy, world, **options), workload, kernel, world) / MIB


# --- what GPUs held ---------------------------------------------------------------------------------

RUNS = {
    "h200x2-decode-1048576": 16416.7, "h200x2-decode-1048576-window": 16416.7, "h200x2-ring-65536-window": 2378.3,
    "h200x2-ring-prefill-262144": 2480.1, "h200x2-zigzag-65536": 2922.3, "h200x2-zigzag-65536-layer": 8558.8,
    "h200x2-zigzag-65536-packed": 2890.8, "h200x2-zigzag-65536-prefix": 2816.3, "h200x2-zigzag-65536-sizes": 6592.8,
}  # fmt: skip
"""MiB that ranks held in runs whose code holds as much as today's, or one message more."""


@pytest.mark.parametrize("name", RUNS)
def test_planned_memory_is_within_5_percent_of_committed_runs(name: str) -> None:
    run = read_run(TRACES / name / "run.json")
    assert run.workload and run.strategy and run.kernel and run.peak_memory_bytes
    assert max(run.peak_memory_bytes) / MIB == pytest.approx(RUNS[name], abs=0.1)
    used = run.strategy
    request = request_for(used.name, 2, params=used.params, hops=used.hops, verify=True)
    assert peak_bytes(request, run.workload, run.kernel, 2) / MIB == pytest.approx(RUNS[name], rel=0.05)


SAVED_SINCE = {
    "zigzag documents flash-attn copy": 2 * 64, "zigzag window flash-attn copy": 16 + 8,
    "zigzag window and prefix flash-attn copy": 20, "megatron forward flash-attn nccl": 516,
    "megatron forward flash-attn copy": 516, "allgather trains flash-attn nccl": 64,
    "allgather trains flash-attn copy": 64, "allgather controls flash-attn copy": 64,
    "allgather as many kv heads cudnn copy": 448,
}  # fmt: skip
"""MiB that the measured code held besides.

With documents new tensors for dK and dV: other ranks' parts are now added in place. With a window the gradients of
2 x 2047 rows, and of 2 x 512 of the prefix, each of 2 x 1024 numbers that travelled in 4 bytes, now in 2; and the 2047
rows of K and V that travel, which are sent from where they lie. Megatron's outputs were merged in float32, and are now
merged in their own type by one kernel. Allgather's dK and dV to be summed were allocated beside the gathered keys.
"""


def measured_cases() -> list[Any]:
    """Return the cases of dev/benchmarks/plan_memory.py on 2 H200: MiB at the peak, and MiB in earlier workspaces."""
    with (ROOT / "dev" / "benchmarks" / "data" / "h200_plan_memory.csv").open() as file:
        rows = list(csv.DictReader(file))
    held = {x["case"]: (float(x["held_mib"]) - SAVED_SINCE.get(x["case"], 0), float(x["rest_mib"])) for x in rows}
    return [
        pytest.param(request, kernel, *held[name], id=name)
        for name, request, kernel in plan_memory.cases(2) if name in held
    ]  # fmt: skip


@pytest.mark.parametrize(("request_", "kernel", "held", "before"), measured_cases())
def test_planned_memory_equals_measurements_on_two_gpus(
    request_: RecordRequest, kernel: str, held: float, before: float
) -> None:
    """Within half a percent. The plan counts earlier workspaces if the case itself needs them."""
    counted = kernel == "cudnn" or request_.workload.layer is not None or kernel == "reference"
    plan = peak_bytes(request_, request_.workload, kernel, 2) / MIB
    assert plan == pytest.approx(held + (before if counted else 0), rel=0.005)


def test_every_strategy_was_measured_in_all_variants() -> None:
    measured = {case.id for case in measured_cases()}
    for name in names():
        assert {
            f"{name} {what} flash-attn {hops}" for what in ("trains", "forward") for hops in ("nccl", "copy")
        } < measured


# --- by hand ----------------------------------------------------------------------------------------


def test_memory_of_one_rank_by_hand() -> None:
    """Forward q, k, v, O and the LSE; backward also dO and the gradients."""
    assert held_mib("ring", 1, backward=False) == Q + KV + Q + LSE == 96.625
    assert held_mib("ring", 1, backward=True) == 3 * Q + KV + LSE + GRADIENTS == 353.25


@pytest.mark.parametrize("name", ["ring", "zigzag"])
def test_memory_of_rings_by_hand(name: str) -> None:
    """Two ranks: at the second block, received K and V, and two outputs.

    Backward: received K and V, dQ, dK and dV of the first block, and the second block's gradients. On four ranks, at
    the third of these, K and V that arrive meanwhile. dQ is a float32 sum by then, and dK and dV are sent and received
    in float32, besides those of the local block.
    """
    assert held_mib(name, 2, backward=False) == Q + KV + KV + 2 * (Q + LSE) == 153.25
    assert held_mib(name, 2, backward=True) == 3 * Q + KV + LSE + KV + Q + KV + GRADIENTS == 425.25
    travelling = 2 * KV + 2 * (2 * KV) + KV
    assert held_mib(name, 4, backward=True) == 3 * Q + KV + LSE + travelling + 2 * Q + GRADIENTS == 545.25


def test_first_hop_of_a_ring_by_hand() -> None:
    """K and V have as many heads as Q: sent ones are copied into one message; others arrive during the block."""
    workload = replace(WORKLOAD, seq=8192, kv_heads=40, backward=False)
    assert peak_bytes(request_for("ring", 2), workload, "flash-attn", 2) / MIB == Q + 3 * 2 * Q + Q + LSE == 320.625


@pytest.mark.parametrize("world", [2, 4])
def test_memory_of_ulysses_by_hand(world: int) -> None:
    """Everything twice: a rank's tokens, and all tokens of its heads.

    Forward has the output three times: as computed, as received and reassembled. There are as many heads of K and V, so
    that none is repeated.
    """
    whole = replace(WORKLOAD, seq=4096 * world, kv_heads=40)
    forward, backward = (
        peak_bytes(request_for("ulysses", world), replace(whole, backward=trains), "flash-attn", world) / MIB
        for trains in (False, True)
    )
    assert forward == 2 * 3 * Q + 3 * Q == 360
    assert backward == 2 * (5 * Q) + LSE + (3 * Q + 2 * Q + LSE) == 601.25


@pytest.mark.parametrize("world", [2, 4])
def test_memory_of_all_gather_by_hand(world: int) -> None:
    """Forward all gathered tensors, and two outputs: of the local keys and of all others.

    Between the first and the last of four ranks there are others on both sides. When the third output exists, the first
    two are summed in float32.
    """
    outputs = 2 * (Q + LSE) if world == 2 else 3 * (Q + LSE) + 2 * Q
    assert held_mib("allgather", world, backward=False) == Q + KV + world * KV + outputs


def test_memory_of_copied_hops_by_hand() -> None:
    """Slots exist as long as the ring: instead of received data, one more message of K and V."""
    nccl, copied = (held_mib("ring", 2, backward=False, hops=hops) for hops in ("nccl", "copy"))
    assert copied - nccl == KV


def test_memory_of_the_dense_reference_by_hand() -> None:
    """The reference's scores are float64: 1024 x 1024 pairs and 2 heads are 16 MiB, several times at once."""
    workload = Workload(seq=1024, heads=2, kv_heads=2, head_dim=8, causal=False, backward=False, dtype="fp32")
    held = peak_bytes(request_for("ring", 1), workload, "reference", 1)
    twice = peak_bytes(request_for("ring", 1), replace(workload, seq=2048), "reference", 1)
    assert 2 * 16 * MIB < held - memory._CUBLAS_BYTES < 4 * 16 * MIB
    assert (twice - memory._CUBLAS_BYTES) / (held - memory._CUBLAS_BYTES) == pytest.approx(4, rel=0.02)


# --- many ranks and tokens --------------------------------------------------------------------------


@pytest.mark.parametrize("name", names())
def test_planned_memory_of_many_ranks_from_few_dry_runs(name: str) -> None:
    """Five and six hosts of eight ranks stand for eight of them, whose ranks are run one by one."""
    workload = replace(WORKLOAD, seq=4096 * 64, heads=64, kv_heads=64, causal=True)
    request = request_for(name, 64, params=find(name).load().with_placement(64, 8))
    setup = memory._Setup(request, "flash-attn", 8)
    largest = max(memory._RankDryRun(setup, workload, rank, 64).run() for rank in (0, 1, 9, 31, 62, 63))
    assert peak_bytes(request, workload, "flash-attn", 8) == pytest.approx(largest, rel=0.001)


@pytest.mark.parametrize("name", names())
def test_three_ranks_determine_the_memory_of_many(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = replace(WORKLOAD, seq=4096 * 12, heads=12, kv_heads=12, causal=True)
    three = peak_bytes(request_for(name, 12), workload, "flash-attn", 4)
    monkeypatch.setattr(memory, "MAX_ALL_RANKS", 12)
    assert three == peak_bytes(request_for(name, 12), workload, "flash-attn", 4)


def test_dry_run_of_16384_ranks_and_billions_of_tokens() -> None:
    """Rings hold as much as 48 ranks with the same tokens per rank; all-gather holds K and V of all ranks."""
    world, tokens = 16384, 2**17
    workload = replace(WORKLOAD, seq=world * tokens, backward=False)
    few = peak_bytes(request_for("zigzag", 48), replace(workload, seq=48 * tokens), "flash-attn", 8)
    assert peak_bytes(request_for("zigzag", world), workload, "flash-attn", 8) == few
    gathered = world * tokens * 2 * 8 * 128 * 2
    assert peak_bytes(request_for("allgather", world), workload, "flash-attn", 8) == pytest.approx(gathered, rel=0.01)
    with pytest.raises(UnsupportedWorkloadError, match="packed documents on 64 ranks"):
        peak_bytes(request_for("zigzag", 64), replace(WORKLOAD, seq=2048, documents=(2000, 48)), "flash-attn", 8)


# --- user strategies --------------------------------------------------------------------------------

USER_MODULE = "tests.recording.dryrun.untrusted_strategies"


def user_strategy_bytes(name: str) -> int:
    workload = replace(WORKLOAD, seq=8192)
    return peak_bytes(request_for(f"{USER_MODULE}:{name}", 2), workload, "flash-attn", 2)


@pytest.mark.parametrize("name", ["Prints", "Multiplies"])
def test_a_user_strategy_is_run_in_a_fork(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    # Torch's threads must exist when the fork begins.
    assert torch.ones(500, 500).mm(torch.ones(500, 500)).sum() > 0
    assert user_strategy_bytes(name) == peak_bytes(
        request_for("zigzag", 2), replace(WORKLOAD, seq=8192), "flash-attn", 2
    )
    assert capfd.readouterr() == ("", "") and untrusted_strategies.CREATED == []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Exits", "it ends the process on shapes alone"),
        ("Dies", "it ends the process on shapes alone"),
        ("Raises", "LookupError: no such thing"),
        ("Sends", "fails on shapes alone .*untrusted_strategies.py, line"),
        ("Hangs", "it does not end within 1 s on shapes alone"),
        ("Forked", "this process has computed gradients on devices, and torch computes none in a fork"),
    ],
)
def test_the_failure_of_a_user_strategy_is_the_reason(name: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "Hangs":
        monkeypatch.setattr(memory, "USER_STRATEGY_LIMIT_S", 1.0)
    with pytest.raises(UnsupportedWorkloadError, match=why) as refused:
        user_strategy_bytes(name)
    assert "\n" not in str(refused.value)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@pytest.mark.processes
def test_a_block_of_flex_is_measured_after_the_fork() -> None:
    """Run in its own process: with a CUDA build, a fork computes no gradients after flex's on a CPU."""
    plan = f"""if True:
        from ringprof.recording.estimate import estimate_of
        from ringprof.iteration.request import RecordRequest
        from ringprof.run import Workload
        workload = Workload(seq=256, heads=2, kv_heads=2, head_dim=64, dtype="fp32")
        request = RecordRequest(
            workload=workload, strategy="{USER_MODULE}:Prints", device="cpu", world=2, hops="nccl", kernel="flex",
            warmup=1, iters=1,
        )
        plan = estimate_of(request)
        assert plan.memory_bytes and plan.memory_bytes > 0, plan.memory_note
    """
    completed = subprocess.run([sys.executable, "-c", plan], cwd=ROOT, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr


def test_third_party_strategies_are_not_run_in_a_dry_run() -> None:
    with pytest.raises(UnsupportedWorkloadError, match="other people's code computes and sends by itself"):
        peak_bytes(request_for("torch-cp", 2), replace(WORKLOAD, seq=8192), "flash-attn", 2)


def test_a_dry_run_does_not_initialize_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError("CUDA begins")

    monkeypatch.setattr(torch.cuda, "_lazy_init", fail)
    for name in names():
        assert held_mib(name, 2, backward=True, hops="copy", controls=True) > 0
