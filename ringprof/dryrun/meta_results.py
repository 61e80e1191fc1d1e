"""Results of torch operations on ``meta`` tensors, without torch where torch is slow.

For some operations torch runs Python for milliseconds. For others it loads its compiler: a second of processor time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringprof.common.json_object import JsonObject

_ALLOCATES = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias")
_FACTORIES = ("empty", "randn")
_KEEP_TYPE = ("exp", "logaddexp", "sub")


class OpInfo(NamedTuple):
    """Properties of a torch operation."""

    name: str
    allocates: bool
    """Whether it only allocates or aliases memory and launches nothing."""
    is_view: bool
    is_elementwise: bool
    is_mutable: bool

    @property
    def launches(self) -> bool:
        return not self.allocates and not self.is_view


@cache
def op_info(func: Any) -> OpInfo:
    """Return the properties of an operation."""
    name = func.overloadpacket.__name__
    allocates = name in _ALLOCATES
    return OpInfo(
        name, allocates, func.is_view and not allocates, torch.Tag.pointwise in func.tags and not func.is_view,
        func._schema.is_mutable,
    )  # fmt: skip


def is_meta(tensor: Any) -> bool:
    """Return whether the value is a tensor on ``meta``."""
    return isinstance(tensor, Tensor) and tensor.is_meta


def meta_result(func: Any, info: OpInfo, args: Any, kwargs: JsonObject) -> Any:
    """Infer output metadata on ``meta``; run CPU tensors, such as positions, for real."""
    if info.name in _FACTORIES and kwargs["device"].type == "meta":
        return torch.empty(*args, **{name: value for name, value in kwargs.items() if name != "generator"})
    first = args[0][0] if args and isinstance(args[0], list | tuple) and args[0] else args[0] if args else None
    if not is_meta(first):
        return func(*args, **kwargs)
    if is_meta(kwargs.get("out")):
        return kwargs["out"]
    if info.name in _SHORTCUTS:
        return _SHORTCUTS[info.name](*args, **kwargs)
    if not info.is_elementwise:
        return func(*args, **kwargs)
    operands = {name: _operand(value) for name, value in kwargs.items()}
    shape, stride, dtype = _meta_form(func, info.name, *map(_operand, args), **operands)
    return args[0] if info.is_mutable else torch.empty_strided(shape, stride, dtype=dtype, device="meta")


class _Operand(NamedTuple):
    """Metadata of a tensor; hashable."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def tensor(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


def _operand(value: Any) -> Any:
    return _Operand(value.shape, value.stride(), value.dtype, value.device) if isinstance(value, Tensor) else value


@lru_cache(maxsize=4096, typed=True)
def _meta_form(func: Any, name: str, *operands: Any, **named: Any) -> tuple[Any, ...]:
    """Return shape, stride and dtype of an operation's result. Raises what the operation raises."""
    tensors = [operand.tensor() if isinstance(operand, _Operand) else operand for operand in operands]
    keyword_tensors = {
        key: operand.tensor() if isinstance(operand, _Operand) else operand for key, operand in named.items()
    }
    keeps_form = name in _KEEP_TYPE and not keyword_tensors and _same_layout(tensors)
    result = (
        torch.empty(tensors[0].shape, dtype=tensors[0].dtype, device="meta")
        if keeps_form
        else func(*tensors, **keyword_tensors)
    )
    return result.shape, result.stride(), result.dtype


def _same_layout(tensors: Sequence[Any]) -> bool:
    """Return whether all are floating-point tensors of one shape and dtype, with their dimensions in memory order."""
    first = tensors[0]
    return all(
        isinstance(tensor, Tensor)
        and tensor.is_floating_point()
        and (tensor.shape, tensor.dtype) == (first.shape, first.dtype)
        and list(tensor.stride()) == sorted(tensor.stride(), reverse=True)
        for tensor in tensors
    )


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape.insert(dim % (len(shape) + 1), len(tensors))
    return torch.empty(shape, dtype=tensors[0].dtype, device=tensors[0].device)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return torch.empty(shape, dtype=tensors[0].dtype, device=tensors[0].device)


def _to_copy(tensor: Tensor, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=device or tensor.device)


def _empty_like(tensor: Tensor, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    if tensor.is_contiguous():
        return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=tensor.device)
    return torch.empty_like(tensor, dtype=dtype, **options)


_SHORTCUTS: JsonObject = {
    "stack": _stack, "cat": _cat, "_to_copy": _to_copy, "empty_like": _empty_like, "zeros_like": _empty_like,
}  # fmt: skip
