"""Inferred results on ``meta`` against torch's own results of the same operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="shapes are torch's")

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ringprof.dryrun.meta_results import meta_result, op_info


class _Ours(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return meta_result(func, op_info(func), args, kwargs or {})


def _form(result: Tensor) -> tuple[object, ...]:
    return tuple(result.shape), result.stride(), result.dtype, result.device.type


def _wide() -> Tensor:
    return torch.empty(2, 6, 4, 8, device="meta")


def _narrow() -> Tensor:
    return torch.empty(2, 6, 4, 8, dtype=torch.bfloat16, device="meta")


def _odd() -> Tensor:
    """Return a tensor whose dimensions are not in memory order."""
    return torch.empty(2, 4, 6, 8, device="meta").transpose(1, 2)


OPERATIONS: dict[str, Callable[[], Tensor]] = {
    "like": lambda: torch.logaddexp(_wide(), _wide()),
    "slice": lambda: torch.logaddexp(_wide()[:, 3:], _wide()[:, 3:]),
    "broadcast": lambda: torch.logaddexp(_wide(), torch.empty(2, 1, 4, 1, device="meta")),
    "broadcast by the first": lambda: torch.empty(4, 1, device="meta") - _wide(),
    "out of order": lambda: torch.exp(_odd()),
    "out of order and in order": lambda: _odd() - _wide(),
    "two types": lambda: _narrow() - _wide(),
    "narrow": lambda: _narrow().exp(),
    "whole numbers": lambda: torch.empty(3, dtype=torch.int64, device="meta").exp(),
    "a number": lambda: 2 * _narrow() + 1,
    "with a factor": lambda: torch.sub(_wide(), _wide(), alpha=2),
    "a comparison": lambda: _narrow() > 0.5,
    "chosen": lambda: torch.where(_wide() > 0, _wide(), _narrow()),
    "bounded": lambda: torch.clamp(_wide(), min=torch.empty(8, device="meta")),
    "in place": lambda: _wide().add_(_narrow()),
    "in place of a part": lambda: _wide()[:, 3:].addcmul_(_narrow()[:, 3:], torch.empty(2, 3, 4, 1, device="meta")),
    "copy": lambda: _odd().clone(),
    "copy in order": lambda: _odd().clone(memory_format=torch.contiguous_format),
    "empty like": lambda: torch.empty_like(_narrow()),
    "empty like a slice": lambda: torch.empty_like(_narrow()[:, 3:]),
    "empty out of order": lambda: torch.empty_like(_odd(), dtype=torch.float16),
    "zeros": lambda: torch.zeros_like(_narrow(), dtype=torch.float32),
    "random": lambda: torch.randn(3, 5, dtype=torch.bfloat16, device="meta"),
    "on the host": lambda: torch.arange(6)[2:] * 2,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_fake_results_equal_those_of_torch(name: str) -> None:
    """Run twice: the second result comes from the cache."""
    truth = _form(OPERATIONS[name]())
    with _Ours():
        assert [_form(OPERATIONS[name]()) for _ in range(2)] == [truth, truth]


def test_fake_results_are_new_storage_or_the_mutated_input() -> None:
    first, second = _wide(), _wide()
    with _Ours():
        results = [first.add_(second), first + second, first + second]
    assert results[0].untyped_storage()._cdata == first.untyped_storage()._cdata
    assert len({tensor.untyped_storage()._cdata for tensor in (first, second, *results[1:])}) == 4


def test_invalid_operations_raise_as_in_torch() -> None:
    with _Ours(), pytest.raises(RuntimeError, match="roadcast"):
        _wide().add_(torch.empty(5, device="meta"))


def test_host_values_are_computed() -> None:
    with _Ours():
        assert (torch.arange(4) * 3).tolist() == [0, 3, 6, 9]
