"""Launches of Triton kernels without the search for the compiled kernel that Triton repeats at every call.

At each call Triton computes heuristics, looks up the tuned configuration, and inspects every argument for the compiled
kernel that fits. For short sequences that takes longer than the kernel runs. `CachedKernel` searches once for all calls
whose arguments differ in the addresses and shapes of tensors only. A compiled kernel does not depend on these: it is
told lengths as numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
import triton
from torch import Tensor
from triton.runtime.autotuner import Heuristics
from triton.runtime.jit import JITFunction, KernelInterface

_Function = TypeVar("_Function", bound=Callable[..., Any])
_KNOWS_TRITON = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 4) and torch.version.hip is None
"""Whether launches are cached. Before 3.4 compiled kernels took no constants; on AMD they depend on tensors' sizes."""
_MOST_COMPILED = 1024
"""Most sets of arguments that a kernel remembers; sequence lengths that never recur must not fill the memory."""
_ALIGNMENT = 16
"""Triton compiles for addresses that are multiples of so many bytes, or that are not."""


_Launch = tuple[Any, list[Any], list[tuple[int, str]], dict[str, Any]]
"""A compiled kernel; its arguments in order, with None instead of tensors; index and name of the arguments that are
tensors; and the others by name, which a function that computes the grid reads."""


class CachedKernel:
    """Triton kernel that keeps its compiled kernels; launched as ``kernel[grid](name=value, ...)``, by names only."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._launches: dict[Any, _Launch] = {}

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: Any, **arguments: Any) -> None:
        device = torch.cuda.current_device()
        values = arguments.values()
        # A compiled kernel can depend on the values that are no tensors and on their types: 1 is neither True nor 1.0.
        key = (device, *arguments, *map(type, values), *map(_specialisation, values))
        launch = self._launches.get(key)
        if launch is None:
            self._search(key, grid, arguments)
            return
        compiled, cached_arguments, tensors, known = launch
        ordered = cached_arguments.copy()
        for index, name in tensors:
            ordered[index] = arguments[name]
        blocks = grid(known) if callable(grid) else grid
        compiled[(*blocks, 1, 1)[:3]](*ordered)

    def _search(self, key: Any, grid: Any, arguments: dict[str, Any]) -> None:
        """Launch the kernel through Triton, and cache the compiled kernel and the arguments that Triton chose."""
        compiled = self._kernel[grid](**arguments)
        values, layer = dict(arguments), self._kernel
        while not isinstance(layer, JITFunction):
            if isinstance(layer, Heuristics):
                for name, rule in layer.values.items():
                    values[name] = rule(values)
            else:
                values |= layer.best_config.kwargs
            layer = layer.fn
        ordered = [values.get(parameter.name, parameter.default) for parameter in layer.params]
        if compiled is None or not _KNOWS_TRITON or any(value is inspect.Parameter.empty for value in ordered):
            return
        if len(self._launches) >= _MOST_COMPILED:
            self._launches.clear()
        tensors = [
            (index, parameter.name) for index, parameter in enumerate(layer.params)
            if isinstance(ordered[index], Tensor)
        ]  # fmt: skip
        for index, name in tensors:
            ordered[index] = None
            del values[name]
        self._launches[key] = compiled, ordered, tensors, values


def _specialisation(value: Any) -> Any:
    """Return what of an argument a compiled kernel can depend on besides its type."""
    return (value.dtype, value.data_ptr() % _ALIGNMENT) if isinstance(value, Tensor) else value


class _HostTriton:
    """Triton's arithmetic for grids in plain Python, in a tenth of the host time; other names are Triton's."""

    @staticmethod
    def cdiv(count: int, size: int) -> int:
        return -(-count // size)

    @staticmethod
    def next_power_of_2(number: int) -> int:
        return 1 << (number - 1).bit_length()

    def __getattr__(self, name: str) -> Any:
        return getattr(triton, name)


@cache
def cached_kernel(kernel: KernelInterface[Any]) -> CachedKernel:
    """Return the one `CachedKernel` of a Triton kernel."""
    return CachedKernel(kernel)


@cache
def with_cached_kernels(function: _Function, package: str = "fla.ops") -> _Function:
    """Copy a function of ``package`` so that it launches its kernels as `CachedKernel`.

    The functions of the package that it calls are copied, too, all without their decorators; those that compute
    indices, which keep their results, are not. The package itself stays as it is. Arguments must be contiguous.
    """
    plain = cast(FunctionType, inspect.unwrap(function))
    names = dict(plain.__globals__)
    for name in plain.__code__.co_names:
        value = names.get(name)
        if value is triton:
            names[name] = _HostTriton()
        elif isinstance(value, KernelInterface):
            names[name] = cached_kernel(value)
        elif callable(value) and isinstance(inspect.unwrap(value), FunctionType):
            module = getattr(inspect.unwrap(value), "__module__", "") or ""
            if module.startswith(f"{package}.") and not module.endswith(".index"):
                names[name] = with_cached_kernels(value, package)
    copied = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    copied.__kwdefaults__ = plain.__kwdefaults__
    return cast(_Function, copied)
