"""Verification at the timed length: its reference is dense attention, and it detects errors in all sampled rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("torch", reason="recording needs torch")

import torch
from torch import Tensor

from ringprof.errors import VerificationError
from ringprof.iteration.shard import Results, WorkloadShard, row_sums
from ringprof.proof import verify_timed as subject
from ringprof.proof.verify_timed import SAMPLED_ROWS, softmax_rows, verify_timed
from ringprof.run import TensorError, TimedVerification, Verification
from ringprof.strategies import create
from ringprof.strategies.kernels.reference import KeyStretches
from ringprof.workload.mask import Mask
from ringprof.workload.workload import Workload
from tests.strategies import cases
from tests.strategies.cases import Case, dense, inputs
from tests.strategies.ranks import run_ranks

SEQ = 192
LAYOUTS = [
    Case("ring"), Case("zigzag"), Case("stripe"), Case("ulysses"), Case("allgather", {"layout": "zigzag"}),
    Case("usp", {"ulysses_degree": 2, "layout": "stripe"}),
    Case("double-ring", {"ulysses_degree": 2, "ring_window": 2}),
]  # fmt: skip


def stated(dtype: torch.dtype, causal: bool) -> tuple[cases.WorkloadShard, Workload]:
    """Return one workload in the forms of the strategies' tests and of the recorder; grouped heads, batch of two."""
    problem = cases.WorkloadShard(SEQ, batch=2, heads=4, kv_heads=2, head_dim=8, causal=causal, dtype=dtype)
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    return problem, Workload(batch=2, seq=SEQ, heads=4, kv_heads=2, head_dim=8, causal=causal, dtype=name)


def on_this_rank(case: Case, dtype: torch.dtype, causal: bool = True) -> tuple[WorkloadShard, Results, Workload]:
    """Return this rank's shard of a workload, its share of dense attention's results, and the workload."""
    problem, workload = stated(dtype, causal)
    strategy = create(case.name, **case.params)
    q, k, v, dout = (strategy.shard(x).contiguous() for x in inputs(problem))
    local = WorkloadShard(strategy, causal, q, k, v, dout)
    return local, Results(*(strategy.shard(x) for x in dense(problem))), workload


def reference_is_dense(rank: int, dtype: torch.dtype, causal: bool, limit: float) -> None:
    small = patch.dict(subject.BLOCK_NUMBERS, cpu=256), patch.object(subject, "KEYS_AT_A_TIME", 16)
    for case in LAYOUTS:
        shard, truth, workload = on_this_rank(case, dtype, causal)
        with small[0], small[1]:
            sample = subject._RowSample(shard, workload)
            expected = sample.reference_rows() | sample.reference_keys(1)
        measured = sample.select_results(truth, 1)
        for name, value in sample.kernel_rows(1).items():
            reference = measured[name][:1, :, -value.shape[2] :]
            assert (value - reference).norm() / reference.norm() < (1e-5 if dtype == torch.float32 else 2e-2), (
                case,
                name,
            )
        for name, value in expected.items():
            error = (value - measured[name]).norm() / measured[name].norm()
            assert value.shape == measured[name].shape and error < limit, (case, name, error)


@pytest.mark.processes
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-12), (torch.bfloat16, 1e-5)])
def test_timed_reference_equals_dense_attention(dtype: torch.dtype, causal: bool, limit: float) -> None:
    """Computed in blocks of a few keys and rows; float64, with LSE and delta of 16-bit inputs in float32."""
    run_ranks(4, reference_is_dense, dtype, causal, limit)


def judged(
    shard: WorkloadShard, last: Results, workload: Workload, first: Tensor | None = None, kernel_rms: float = 1e-3
) -> TimedVerification:
    before = TensorError(max_abs=0.0, rms=0.0, kernel_rms=kernel_rms, allowed_rms=1e-2, rank=0)
    verification = Verification(passed=True, seq=64, errors=dict.fromkeys(("out", "dq", "dk", "dv"), before))
    rows = row_sums(last.out) if first is None else first
    timed = verify_timed(shard, rows, last, workload, verification).timed
    assert timed is not None
    return timed


DAMAGES: dict[str, tuple[str, Any]] = {
    "one number that is none": ("dv", lambda x: x.where(torch.arange(x.numel()).view_as(x) != 5, float("nan"))),
    "an output 5 % too large": ("out", lambda x: x * 1.05),
    "dQ without its last kv head": ("dq", lambda x: x * (torch.arange(4) < 2)[:, None]),
    "dK of other tokens": ("dk", lambda x: x.roll(1, 1)),
    "dV not there": ("dv", torch.zeros_like),
}


def damaged(rank: int, name: str) -> str:
    problem, right, workload = on_this_rank(Case("zigzag"), torch.bfloat16)
    field, damage = DAMAGES[name]
    last = replace(right, **{field: damage(getattr(right, field))}) if rank == 1 else right
    with pytest.raises(VerificationError) as refused:
        judged(problem, last, workload)
    return str(refused.value)


@pytest.mark.processes
@pytest.mark.parametrize("name", DAMAGES)
def test_error_on_one_rank_is_refused_on_every_rank(name: str) -> None:
    said = run_ranks(2, damaged, name)
    assert said[0] == said[1] and said[0].startswith(f"wrong result on rank 1: {DAMAGES[name][0]} is ")
    assert said[0].endswith("in the last timed iteration, at sequence 192; nothing was recorded")


def passes(rank: int) -> tuple[TimedVerification, TimedVerification]:
    problem, right, workload = on_this_rank(Case("zigzag"), torch.bfloat16)
    return judged(problem, right, workload), judged(problem, right, workload, torch.zeros_like(row_sums(right.out)))


@pytest.mark.processes
def test_right_result_passes_and_reports_bitwise_repetition() -> None:
    (same, other), _ = run_ranks(2, passes)
    assert (same.seq, same.places, same.same_output, other.same_output) == (SEQ, SAMPLED_ROWS, True, False)
    assert set(same.errors) == {"out", "dq", "dk", "dv"} and all(e.rms < 1e-5 for e in same.errors.values())


def bound_by(rank: int, most_iterations: int) -> dict[str, float]:
    problem, right, workload = on_this_rank(Case("zigzag"), torch.bfloat16)
    with patch.object(subject, "MOST_ITERATIONS", most_iterations):
        errors = judged(problem, right, workload, kernel_rms=0.0123).errors
    return {name: error.kernel_rms for name, error in errors.items()}


@pytest.mark.processes
def test_kernel_error_is_measured_at_the_timed_length_if_cheap() -> None:
    """Then it is at least the unit roundoff of bf16; where it is not measured, it is that of the check before."""
    measured, assumed = (run_ranks(2, bound_by, most)[0] for most in (2, 0))
    assert assumed == dict.fromkeys(("out", "dq", "dk", "dv"), 0.0123)
    assert all(2.0**-8 <= error < 0.01 for error in measured.values())


def not_the_first(rank: int) -> None:
    problem, right, workload = on_this_rank(Case("zigzag", {"deterministic": True}), torch.bfloat16)
    other = row_sums(right.out)
    if rank == 1:
        other[1, 7] += 1
    with pytest.raises(VerificationError, match="not the first's to the bit"):
        judged(problem, right, workload, other)


@pytest.mark.processes
def test_deterministic_kernel_must_repeat_its_first_output() -> None:
    run_ranks(2, not_the_first)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_softmax_in_blocks(dtype: torch.dtype) -> None:
    """Scores of several hundred, which overflow where the maximum is not taken out."""
    torch.manual_seed(0)
    q, k, v = (40 * torch.randn(rows, 8, dtype=torch.float64) for rows in (5, 300, 300))
    positions = torch.tensor([0, 3, 77, 299, 150])
    with patch.dict(subject.BLOCK_NUMBERS, cpu=5 * 7):
        out, lse = softmax_rows(q, k, v, KeyStretches.of(Mask(), positions, 300), 0.5, dtype)
    scores = q @ k.T * 0.5
    scores[torch.arange(300) > positions[:, None]] = float("-inf")
    assert torch.allclose(lse.double(), scores.logsumexp(1), rtol=1e-5)
    assert torch.allclose(out.double(), scores.softmax(1) @ v, rtol=1e-3, atol=1e-3)


def test_row_sums_distinguish_outputs() -> None:
    x = torch.randn(2, 6, 3, 4).to(torch.bfloat16)
    y = x.clone()
    y[1, 4, 2, 3] = -y[1, 4, 2, 3]
    assert (row_sums(x) != row_sums(y)).nonzero().tolist() == [[1, 4]]
    assert not torch.equal(row_sums(x), row_sums(x.roll(1, 1)))
