"""What operations give on ``meta`` tensors, found without torch where torch takes long to say.

For some it runs Python for milliseconds, and for some it loads its compiler: a second of processor time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringprof.json_object import JsonObject

_ALLOCATES = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias")
_FACTORIES = ("empty", "randn")
_KEEP_TYPE = ("exp", "logaddexp", "sub")


class Kind(NamedTuple):
    """What is to be known of an operation of torch."""

    name: str
    allocates: bool
    """It launches nothing: its result is memory as it is."""
    is_view: bool
    is_elementwise: bool
    is_mutable: bool

    @property
    def launches(self) -> bool:
        return not self.allocates and not self.is_view


@cache
def kind_of(func: Any) -> Kind:
    name = func.overloadpacket.__name__
    allocates = name in _ALLOCATES
    return Kind(
        name, allocates, func.is_view and not allocates, torch.Tag.pointwise in func.tags and not func.is_view,
        func._schema.is_mutable,
    )  # fmt: skip


def is_shape(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_meta


def result_of(func: Any, kind: Kind, args: Any, kwargs: JsonObject) -> Any:
    """Of shapes a shape; of the host's own tensors, such as positions, what they hold."""
    if kind.name in _FACTORIES and kwargs["device"].type == "meta":
        return torch.empty(*args, **{name: value for name, value in kwargs.items() if name != "generator"})
    first = args[0][0] if args and isinstance(args[0], list | tuple) and args[0] else args[0] if args else None
    if not is_shape(first):
        return func(*args, **kwargs)
    if is_shape(kwargs.get("out")):
        return kwargs["out"]
    if kind.name in _SHORTCUTS:
        return _SHORTCUTS[kind.name](*args, **kwargs)
    return _elementwise(func, kind, args, kwargs) if kind.is_elementwise else func(*args, **kwargs)


def _elementwise(func: Any, kind: Kind, args: Any, kwargs: JsonObject) -> Any:
    operands = {name: _operand(one) for name, one in kwargs.items()}
    shape, stride, dtype = _form(func, kind.name, *map(_operand, args), **operands)
    return args[0] if kind.is_mutable else torch.empty_strided(shape, stride, dtype=dtype, device="meta")


class _Operand(NamedTuple):
    """A tensor without its memory."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def tensor(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


def _operand(one: Any) -> Any:
    return _Operand(one.shape, one.stride(), one.dtype, one.device) if isinstance(one, Tensor) else one


@lru_cache(maxsize=4096, typed=True)
def _form(func: Any, name: str, *operands: Any, **named: Any) -> tuple[Any, ...]:
    """Shape, stride and type of what an operation gives of such operands. Raises what it raises of them."""
    made = [one.tensor() if isinstance(one, _Operand) else one for one in operands]
    given = {key: one.tensor() if isinstance(one, _Operand) else one for key, one in named.items()}
    plain = name in _KEEP_TYPE and not given and _alike(made)
    result = torch.empty(made[0].shape, dtype=made[0].dtype, device="meta") if plain else func(*made, **given)
    return result.shape, result.stride(), result.dtype


def _alike(tensors: Sequence[Any]) -> bool:
    """Whether they are floating point of one shape and type, with their dimensions in order in memory."""
    one = tensors[0]
    return all(
        isinstance(x, Tensor) and x.is_floating_point() and (x.shape, x.dtype) == (one.shape, one.dtype)
        and list(x.stride()) == sorted(x.stride(), reverse=True) for x in tensors
    )  # fmt: skip


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


def _empty_like(tensor: Tensor, *, dtype: torch.dtype | None = None, **given: Any) -> Tensor:
    if tensor.is_contiguous():
        return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=tensor.device)
    return torch.empty_like(tensor, dtype=dtype, **given)


_SHORTCUTS: JsonObject = {
    "stack": _stack, "cat": _cat, "_to_copy": _to_copy, "empty_like": _empty_like, "zeros_like": _empty_like,
}  # fmt: skip
