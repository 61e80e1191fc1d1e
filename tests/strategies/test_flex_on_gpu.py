"""FlexAttention on GPUs against float64: masks, softcaps, head sizes, and strategies on two GPUs.

It compiles for every number of heads and every length, in seconds, so few of them are tested.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ringprof.strategies.kernels.kernel import Kernel
from ringprof.strategies.kernels.reference import ReferenceKernel
from ringprof.strategies.kernels.registry import KERNELS
from ringprof.workload.mask import Mask
from tests.strategies.cases import Case, worst
from tests.strategies.gpu_ranks import needs_two_gpus, run_gpu_ranks
from tests.strategies.test_masks_on_gpu import (
    DOCUMENTS,
    MASKS,
    PROBLEMS,
    SOFTCAP,
    Options,
    check_mask_blocks,
    rows_of,
    wrong_on_a_rank,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch's compiler warns of what torch itself does.
    pytest.mark.filterwarnings("default"),
]


@pytest.mark.parametrize("softcap", [0.0, SOFTCAP])
def test_flex_on_mask_blocks_agrees_with_float64(softcap: float) -> None:
    check_mask_blocks("flex", softcap, PROBLEMS[1:2])


OPTIONS: list[Options] = [
    ([Case("zigzag")], [("flex", PROBLEMS[4])], [DOCUMENTS], [0.0]),
    ([Case("ring"), Case("usp", {"ulysses_degree": 1})], [("flex", PROBLEMS[1])], MASKS[2:3], [0.0]),
    ([Case("zigzag")], [("flex", PROBLEMS[1])], [Mask.of()], [SOFTCAP]),
]


@needs_two_gpus
def test_masked_strategies_with_flex_are_exact_on_two_gpus() -> None:
    rows = [row for options in OPTIONS for row in rows_of(options)]
    assert run_gpu_ranks(2, wrong_on_a_rank, rows) == [[], []]


@pytest.mark.parametrize("head_dim", [16, 192, *(pytest.param(size, marks=pytest.mark.long) for size in (64, 96, 256))])
def test_flex_takes_heads_of_any_size(head_dim: int) -> None:
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 300, heads, head_dim, device="cuda").bfloat16() for heads in (4, 2, 2, 4))
    truth = truth_with(ReferenceKernel(), q, k, v, dout, head_dim)
    results = truth_with(KERNELS["flex"](), q, k, v, dout, head_dim)
    assert worst(results, truth) < 0.02


def truth_with(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, head_dim: int) -> list[Tensor]:
    if kernel.name == "reference":
        q, k, v, dout = (x.double() for x in (q, k, v, dout))
    out, lse = kernel.forward(q, k, v, scale=head_dim**-0.5, causal=True)
    return [out, *kernel.backward(dout, q, k, v, lse, out=out, scale=head_dim**-0.5, causal=True)]
