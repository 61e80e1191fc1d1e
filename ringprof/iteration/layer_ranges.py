"""Ranges in a trace around the calls of a model's layers, opened by hooks. Imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.profiler import record_function

NAMED_LAYER = "ringprof::layer "
"""Start of the names of these ranges; the layer's name follows."""


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a model by name: the members of its outermost `nn.ModuleList`s of two or more modules."""
    layers: dict[str, nn.Module] = {}
    for list_name, modules in model.named_modules():
        if isinstance(modules, nn.ModuleList) and len(modules) > 1:
            prefix = f"{list_name}." if list_name else ""
            if not any(prefix.startswith(f"{name}.") for name in layers):
                layers |= {f"{prefix}{name}": module for name, module in modules.named_children()}
    return layers


@contextmanager
def named_layers(model: nn.Module | None) -> Iterator[None]:
    """Open a range in the trace around each call of a layer, for as long as the block runs; does nothing for None.

    Where `torch.compile` compiles the whole model, calls may open no range, since the compiler may drop the hooks.
    """
    handles: list[Any] = []
    for name, layer in layers_of(model).items() if model is not None else ():
        opened: list[record_function] = []

        # Bound as defaults, since the loop's variables change.
        def enter(*_: Any, name: str = name, opened: list[record_function] = opened) -> None:
            opened.append(record_function(NAMED_LAYER + name))
            opened[-1].__enter__()  # type: ignore[no-untyped-call]

        def leave(*_: Any, opened: list[record_function] = opened) -> None:
            if opened:
                opened.pop().__exit__(None, None, None)

        # Before the hooks of FSDP, so that what these launch belongs to the layer.
        handles.append(layer.register_forward_pre_hook(enter, prepend=True))
        handles.append(layer.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
