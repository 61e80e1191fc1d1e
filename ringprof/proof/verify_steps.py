"""Verification of the steps of dynamic context parallelism."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from ringprof.iteration.shard import DynamicCpShard, Measurement
from ringprof.proof.dense import severity
from ringprof.proof.verify import verify
from ringprof.proof.verify_timed import verify_timed
from ringprof.run import TensorError, Verification
from ringprof.workload.workload import Workload


def verify_steps(dynamic: Any, workload: Workload, sizes: tuple[int, ...], device: torch.device) -> Verification:
    """Verify the strategy of every size before timing, all groups of ranks at once; see `ringprof.proof.verify`.

    Raises `VerificationError`.
    """
    return _merge(
        [verify(dynamic.of(size), workload.step(dynamic.comm.size // size), device) for size in dict.fromkeys(sizes)]
    )


def verify_timed_steps(shard: DynamicCpShard, measured: Measurement, before: Verification) -> Verification:
    """Verify the last timed result of every step; see `ringprof.proof.verify_timed`. Raises `VerificationError`."""
    assert measured.last is not None
    rows = measured.first_rows.chunk(len(shard.steps), 1)
    return _merge([
        verify_timed(step, rows[number], shard.results_of_step(measured.last, number), workload, before)
        for number, (step, workload) in enumerate(zip(shard.steps, shard.workloads, strict=True))
    ])  # fmt: skip


def _merge(verifications: list[Verification]) -> Verification:
    """Merge verifications: keep each tensor's error nearest its bound, and the lengths of the longest sequence."""
    longest = max(
        verifications, key=lambda verification: verification.timed.seq if verification.timed else verification.seq
    )
    timed = [verification.timed for verification in verifications if verification.timed is not None]
    merged = msgspec.structs.replace(
        longest, errors=_worst_errors([verification.errors for verification in verifications])
    )
    if longest.timed is None:
        return merged
    merged_timed = msgspec.structs.replace(
        longest.timed, errors=_worst_errors([verification.errors for verification in timed]),
        took_ns=sum(verification.took_ns for verification in timed),
        same_output=all(verification.same_output for verification in timed),
    )  # fmt: skip
    return msgspec.structs.replace(merged, timed=merged_timed)


def _worst_errors(errors: list[dict[str, TensorError]]) -> dict[str, TensorError]:
    return {name: max((errors_of_step[name] for errors_of_step in errors), key=severity) for name in errors[0]}
