"""Bound of a verified result, and the sequence length of the verification; real verifications are in test_faults."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch", reason="recording needs torch")

import torch

from ringprof.errors import UnsupportedWorkloadError, VerificationError
from ringprof.proof.dense import allowed_rms
from ringprof.proof.result import TensorCheck
from ringprof.proof.verify import raise_if_wrong, roundings, verification_seq
from ringprof.run import TensorError
from ringprof.strategies import find
from ringprof.workload.workload import Workload

ZIGZAG = find("zigzag").load()


UNIT = 2.0**-8


@pytest.mark.parametrize(("kernel_rms", "dtype", "hops", "allowed"), [
    (0.002, torch.bfloat16, 0, 0.006),
    # The tolerance of rounding grows with the square root of the hops.
    (0.0, torch.bfloat16, 12, 3 * 2 * UNIT), (0.0, torch.bfloat16, 48, 3 * 4 * UNIT),
    # The error of the kernel counts up to a limit, or not at all.
    (0.9, torch.bfloat16, 0, 3 * 16 * UNIT), (math.nan, torch.bfloat16, 0, 0.0),
    (1e-9, torch.float32, 0, 64 * 2.0**-24),
])  # fmt: skip
def test_tolerance_by_hand(kernel_rms: float, dtype: torch.dtype, hops: int, allowed: float) -> None:
    assert allowed_rms(kernel_rms, dtype, hops) == pytest.approx(allowed)


def error(rms: float, rank: int = 0, wrong: int = 0) -> TensorCheck:
    first = (7, 1) if wrong else (None, None)
    return TensorCheck(
        max_abs=rms, rms=rms, kernel_rms=0.002, allowed_rms=0.006, rank=rank, wrong_tokens=wrong, first_token=first[0],
        first_rank=first[1],
    )  # fmt: skip


@pytest.mark.parametrize("wrong", [0.0061, math.nan, math.inf])
def test_errors_above_tolerance_or_not_finite_are_refused(wrong: float) -> None:
    with pytest.raises(VerificationError, match=r"wrong result on rank 3: dk is off by .* 0\.006 allowed"):
        raise_if_wrong({"out": error(0.005), "dk": error(wrong, rank=3)}, "at sequence 256")


def test_errors_within_tolerance_pass() -> None:
    kept = raise_if_wrong({"out": error(0.006), "dv": error(0.0)}, "at sequence 256")
    assert kept["out"] == TensorError(max_abs=0.006, rms=0.006, kernel_rms=0.002, allowed_rms=0.006, rank=0)


def test_wrong_tokens_are_refused_below_the_mean_error() -> None:
    with pytest.raises(VerificationError) as refused:
        raise_if_wrong({"out": error(0.005), "dk": error(0.001, wrong=2)}, "at sequence 256")
    assert str(refused.value) == (
        "wrong result on rank 1: dk is off by more than rounding explains at 2 tokens, the first is token 7, at"
        " sequence 256"
    )


def test_exact_result_passes_a_tolerance_of_zero() -> None:
    """With one key per row, the kernel alone has no error, and the strategy must have none."""
    exact = msgspec.structs.replace(error(0.0), kernel_rms=0.0, allowed_rms=0.0)
    raise_if_wrong({"out": exact, "dk": error(0.005)}, "")
    with pytest.raises(VerificationError, match="out is off by 1e-09"):
        raise_if_wrong({"out": msgspec.structs.replace(exact, rms=1e-9), "dk": error(0.005)}, "")


@pytest.mark.parametrize(
    ("seq", "world", "device", "expected"),
    [
        (2**20, 4, "cpu", 256),
        (2**20, 8, "cuda", 2048),
        (2**20, 64, "cuda", 8192),
        (64, 4, "cpu", 64),
        (2**20, 3, "cpu", 192),
    ],
)
def test_verification_workload_is_short_and_fits_the_layout(seq: int, world: int, device: str, expected: int) -> None:
    workload = Workload(seq=seq, heads=4, kv_heads=4, head_dim=32)
    assert verification_seq(ZIGZAG, workload, world, device, {}) == expected


def test_unsupported_workload_has_no_verification_size() -> None:
    with pytest.raises(UnsupportedWorkloadError):
        verification_seq(ZIGZAG, Workload(seq=512, heads=6, kv_heads=4, head_dim=32), 4, "cpu", {})


@pytest.mark.parametrize(
    ("parameters", "name", "size", "count"),
    [
        ({"grad_wire": "fp32"}, "dk", 4, 0), ({"grad_wire": "exact"}, "dk", 4, 0), ({"grad_wire": "input"}, "dk", 4, 4),
        ({}, "dq", 4, 4), ({"grad_wire": "input"}, "out", 4, 0), ({"grad_wire": "input"}, "dk", 1, 0),
    ],
)  # fmt: skip
def test_only_gradients_sent_in_the_input_dtype_are_rounded(
    parameters: dict[str, str], name: str, size: int, count: int
) -> None:
    strategy: Any = SimpleNamespace(GRAD_WIRE="input", parameters=parameters, comm=SimpleNamespace(size=size))
    assert roundings(name, strategy) == count
