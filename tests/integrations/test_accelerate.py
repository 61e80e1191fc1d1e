"""The context in the place of accelerate's: buffers are sharded within it, and restored after it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="sharding needs torch")

import torch

from ringprof.integrations.accelerate import context_parallel
from ringprof.strategies import Unsupported, create
from tests.strategies.ranks import run_ranks

pytestmark = pytest.mark.processes


def _buffers(rank: int) -> Any:
    strategy = create("zigzag")
    ids, labels = torch.arange(32).reshape(2, 16), torch.arange(32.0).reshape(16, 2)
    kept, results = torch.arange(16)[None], []
    try:
        with context_parallel(
            strategy, buffers=[ids, labels, kept], buffer_seq_dims=[1, 0, 1], no_restore_buffers={kept}
        ):
            results += [ids.tolist(), labels.tolist(), kept.tolist()]
            raise KeyError
    except KeyError:
        results += [ids.tolist(), labels.tolist(), kept.tolist()]
    with (
        pytest.raises(Unsupported, match="divisible by 4"),
        context_parallel(strategy, buffers=[ids, torch.arange(6)], buffer_seq_dims=[1, 0]),
    ):
        pass
    with (
        pytest.raises(Unsupported, match="requires a gradient"),
        context_parallel(strategy, buffers=[torch.ones(1, 16, requires_grad=True)], buffer_seq_dims=[1]),
    ):
        pass
    with (
        pytest.raises(Unsupported, match="2 buffers have 1"),
        context_parallel(strategy, buffers=[ids, kept], buffer_seq_dims=[1]),
    ):
        pass
    return [*results, ids.tolist()]


def test_buffers_are_sharded_in_the_context_and_restored_after_it() -> None:
    ids, labels = torch.arange(32).reshape(2, 16), torch.arange(32.0).reshape(16, 2)
    for rank, results in enumerate(run_ranks(2, _buffers)):
        # Zigzag over 2 ranks: 4 chunks of 4 tokens, of which rank 0 holds the first and the last.
        own = [*range(4), *range(12, 16)] if rank == 0 else list(range(4, 12))
        expected = [ids[:, own].tolist(), labels[own].tolist(), [own]]
        assert results == [*expected, ids.tolist(), labels.tolist(), [own], ids.tolist()]
