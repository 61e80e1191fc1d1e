"""Heads of v that are smaller than those of q and k, with and without padding for the kernel, against float64."""

from __future__ import annotations

import pytest

from ringprof.strategies import names
from ringprof.strategies.kernels.reference import ReferenceKernel
from ringprof.strategies.transport.baselines import RecordingKernel
from tests.strategies.cases import CASES, WorkloadShard, with_kernel
from tests.strategies.ranks import run_ranks

PROBLEM = WorkloadShard(seq=32, batch=2, heads=8, kv_heads=4, head_dim=6, v_head_dim=4)


class OneSizeKernel(ReferenceKernel):
    """The reference as a kernel that takes heads of one size only."""

    name = "one size"

    @classmethod
    def takes_v_head_dim(cls, head_dim: int, v_head_dim: int) -> bool:
        return v_head_dim == head_dim


@pytest.mark.processes
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kernel", [ReferenceKernel, OneSizeKernel])
def test_smaller_v_is_exact_and_padded_only_for_a_kernel_of_one_size(world: int, kernel: type[ReferenceKernel]) -> None:
    cases = [case for case in CASES if world in case.worlds]
    assert {case.name for case in cases} == set(names())
    flops: dict[str, int] = {}
    for rows in run_ranks(world, with_kernel, lambda: RecordingKernel(kernel()), cases, PROBLEM):
        for case, error, recording in rows:
            assert error < 1e-13, case
            # Megatron's message holds K and V alike: it pads them before.
            padded = kernel is OneSizeKernel or case.startswith("megatron")
            assert {call.v.size[3] for call in recording.recorded_calls} == {6 if padded else 4}, case
            flops[case] = flops.get(case, 0) + recording.kernel.flops
    pairs = PROBLEM.batch * PROBLEM.heads * PROBLEM.seq * (PROBLEM.seq + 1) // 2
    for case, counted in flops.items():
        size = 6 if kernel is OneSizeKernel or case.startswith("megatron") else 4
        assert counted == pairs * 2 * ((6 + size) + (3 * 6 + 2 * size)), case
