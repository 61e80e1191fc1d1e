"""The check of whole models on a loop with torch's context parallelism: clean it passes, each mistake is named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("torch", reason="checking needs torch")

import torch
import torch.fx.experimental.symbolic_shapes  # what a first backward pass imports: once, and not in every forked rank
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as torchs_ring

from ringprof.proof.result import ModelCheck
from tests.recording.tiny_model import VOCAB, check_verdicts, in_ddp, mistakes_in_ddp, shifted
from tests.strategies.gpu_ranks import needs_two_gpus, run_gpu_ranks
from tests.strategies.ranks import run_ranks

# Memory-efficient attention pads its LSE to 32 rows, and torch's ring halves each rank's rows.
SEQ, ROWS = 256, 4


def by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Call the function that `context_parallel` replaces, looked up at the call as its users must."""
    q, k, v = (x.transpose(1, 2) for x in (q, *(x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))))
    out: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    return out


def with_torch(mesh: Any) -> tuple[Any, Any]:
    """Return the attention that torch's context parallelism replaces, and its sharding."""

    @contextmanager
    def sharded(*buffers: Tensor) -> Iterator[tuple[Tensor, ...]]:
        with context_parallel(mesh, buffers=list(buffers), buffer_seq_dims=[1, 1, 0]):
            yield buffers

    return by_torch, sharded


MISTAKES = mistakes_in_ddp(SEQ, 200) | {"averaged over context-parallel ranks": ({"scale": 0.5}, "0.5, 1 / ")}


def loops(rank: int, device: str, dtype: torch.dtype) -> dict[str, ModelCheck]:
    if device == "cpu":
        handlers: dict[Any, Any] = dict.fromkeys(ON_CPU, ring_on_cpu)
        torchs_ring.custom_ops |= handlers
    batch = torch.randint(VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(0)).to(device)
    targets = shifted(batch)
    # Rank 0 of a pair holds the first and the last quarter: fewer labels than rank 1.
    targets[:, :40] = -100
    options = {"right": {}, **{name: options for name, (options, _) in MISTAKES.items()}}
    return {name: in_ddp(with_torch, batch, targets, dtype, **x) for name, x in options.items()}


ON_CPU = [
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
]
"""Operators that torch's context parallelism does not replace, as it does those of GPUs."""


def ring_on_cpu(op: Any, args: Any, kwargs: dict[str, Any]) -> object:
    """Send one of `ON_CPU` through torch's ring."""
    mesh = next(x for x in args if isinstance(x, DTensor)).device_mesh
    local: list[Any] = [x.to_local() if isinstance(x, DTensor) else x for x in args]
    if op is ON_CPU[0]:
        q, k, v, _, causal = local
        results = torchs_ring._templated_ring_attention(
            mesh.get_group(), 2, op, q, k, v, is_causal=causal, dropout_p=0.0, **kwargs
        )
    else:
        dout, q, k, v, out, lse, _, causal = local
        results = torchs_ring._templated_ring_attention_backward(
            mesh.get_group(), 2, op, dout, "grad_out", q, k, v, out, lse, is_causal=causal, dropout_p=0.0, **kwargs
        )
    return tuple(DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in results)


@pytest.mark.processes
def test_mistakes_around_torchs_ring_on_cpus() -> None:
    check_verdicts(run_ranks(4, loops, "cpu", torch.float32)[0], MISTAKES)


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mistakes_around_torchs_context_parallelism(dtype: torch.dtype) -> None:
    check_verdicts(run_gpu_ranks(2, loops, "cuda", dtype)[0], MISTAKES)
