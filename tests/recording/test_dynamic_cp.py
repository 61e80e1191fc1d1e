"""Recordings whose steps have different numbers of ranks per sequence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="recording needs torch")

import torch

from ringprof.errors import VerificationError
from ringprof.iteration.shard import DynamicCpShard, Measurement, row_sums
from ringprof.proof.verify_timed import _merge, verify_steps, verify_timed_steps
from ringprof.run import TensorError, Verification, Work
from ringprof.strategies import Dynamic
from ringprof.workload.workload import Workload
from tests.recording.command import report_of, run
from tests.strategies.ranks import run_ranks

WORK = Workload(seq=256, heads=4, kv_heads=2, head_dim=8, dtype="fp32", sequences=(1, 2, 4))
SIZES = (4, 2, 1)
CPU = torch.device("cpu")


def test_flops_count_the_sequences_of_every_step() -> None:
    # 7 · B · S² · H · D causal, forward and backward: of one sequence of 256, two of 128 and four of 64 tokens.
    assert WORK.model_flops() == 7 * 32 * (256**2 + 2 * 128**2 + 4 * 64**2)
    assert WORK.exact_flops() == 14 * 32 * (256 * 257 // 2 + 2 * 128 * 129 // 2 + 4 * 64 * 65 // 2)


def gates(rank: int) -> list[str]:
    dynamic = Dynamic("zigzag", kernel="cpu-flash")
    before = verify_steps(dynamic, WORK, SIZES, CPU)
    shard = DynamicCpShard.from_dynamic(dynamic, WORK, SIZES, CPU)
    outcomes = []
    for wrong in (None, 0, 1, 2):
        last = shard.run_for_verification()
        measured = Measurement([1], None, Work(block_flops=None, block_calls={}, sent=None), row_sums(last.out), last)
        if wrong is not None and rank == 3:
            view = shard.results_of_step(last, wrong).dk
            assert view is not None
            view *= 1.01
        try:
            timed = verify_timed_steps(shard, measured, before).timed
            assert timed is not None
            outcomes.append(f"{timed.seq}")
        except VerificationError as error:
            outcomes.append(str(error))
    assert len(shard.step_times_ns(2)) == 3
    return outcomes


@pytest.mark.processes
def test_both_verifications_check_every_step() -> None:
    said = run_ranks(4, gates)[0]
    assert said[0] == "256"
    for text, seq in zip(said[1:], (256, 128, 64), strict=True):
        assert text.startswith("wrong result on rank 3: dk is off by 0.01")
        assert f"at sequence {seq};" in text


def test_worst_relative_error_of_several_sizes_is_kept() -> None:
    def verified(seq: int, rms: float, allowed_rms: float) -> Verification:
        error = TensorError(max_abs=0.0, rms=rms, kernel_rms=0.0, allowed_rms=allowed_rms, rank=0)
        return Verification(passed=True, seq=seq, errors={"out": error})

    kept = _merge([verified(256, 0.2, 1.0), verified(128, 0.1, 0.2), verified(64, 0.1, 0.5)])
    assert kept.seq == 256 and (kept.errors["out"].rms, kept.errors["out"].allowed_rms) == (0.1, 0.2)


SMALL = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--device", "cpu", "--world", "2", "--seq", "512"]


@pytest.mark.processes
def test_recording_has_the_size_and_time_of_every_step(tmp_path: Path) -> None:
    process = run(["record", "--strategy", "zigzag", "--cp-sizes", "2,1", *SMALL], tmp_path)
    assert process.returncode == 0, process.stderr
    assert "steps of an iteration: 2, 1 ranks per sequence" in process.stderr
    run_data = json.loads((tmp_path / "traces/run.json").read_text())
    assert run_data["workload"]["sequences"] == [1, 2]
    assert [len(rank) for rank in run_data["timings"]["steps_ns"]] == [2, 2]
    assert all(time > 0 for rank in run_data["timings"]["steps_ns"] for time in rank)
    # Zigzag sends K and V once, 2 · 256 · 2 · 16 bf16 numbers, in the step of two ranks and in no other.
    (kv,) = [entry for entry in run_data["work"][0]["sent"] if (entry["channel"], entry["phase"]) == ("kv", "forward")]
    assert (kv["count"], kv["sent_bytes"]) == (1, 2 * 256 * 2 * 16 * 2)
    # By the exact areas: half of one sequence of 512 tokens, and one of 256.
    pairs = 512 * 513 // 2 + 2 * 256 * 257 // 2
    assert sum(rank["block_flops"] for rank in run_data["work"]) == 14 * 4 * 16 * pairs
    shown = report_of(tmp_path)
    assert "step 1: 2 ranks per sequence, 1 of 512 tokens" in shown
    assert "step 2: 1 rank per sequence, 2 of 256 tokens" in shown
