"""Other people's context-parallel attention, called as their own examples call it.

Each peer's function takes this rank's (q, k, v), each (B, S/N, H, D), and returns the output, differentiable. ``like``
names the bundled strategy that shards the sequence the same way and computes the same thing, for the check.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Peer:
    """One peer's strategy."""

    system: str
    name: str
    function: Callable[..., Any]
    like: str
    params: dict[str, Any] = field(default_factory=dict)
    """Of ``like``."""
    kernel: str = "flash-attn"


def peers(degrees: list[tuple[int, int]]) -> tuple[list[Peer], list[str]]:
    """What can be imported here, and a line for each system that cannot.

    ``degrees``: Ulysses and ring degree of each hybrid, with both placements.
    """
    found: list[Peer] = []
    missing = []
    makers = (
        ("ring-flash-attn", _ring_flash_attn), ("yunchang", partial(_yunchang, degrees)), ("torch", _torch),
    )  # fmt: skip
    for system, maker in makers:
        try:
            found += maker()
        except Exception as error:  # noqa: PERF203 - twice
            missing.append(f"{system} is not measured: {type(error).__name__}: {error}")
    return found, missing


def _ring_flash_attn() -> list[Peer]:
    # Its adapters replace parts of transformers that no longer exist; the functions below need none of them.
    stub = types.ModuleType("ring_flash_attn.adapters")
    stub.substitute_hf_flash_attn = stub.update_ring_flash_attn_params = None  # type: ignore[attr-defined]
    sys.modules.setdefault("ring_flash_attn.adapters", stub)
    import ring_flash_attn as rfa

    functions = (
        ("ring", rfa.ring_flash_attn_func),
        ("zigzag", rfa.zigzag_ring_flash_attn_func),
        ("stripe", rfa.stripe_flash_attn_func),
    )
    return [Peer("ring-flash-attn", name, partial(function, causal=True), name) for name, function in functions]


def _yunchang(degrees: list[tuple[int, int]]) -> list[Peer]:
    import yunchang

    found = []
    for ulysses, ring in degrees:
        both = ulysses > 1 and ring > 1
        for placement in ("head-first", "ring-first") if both else ("head-first",):
            groups = _groups(yunchang, ulysses, ring, low=placement == "head-first")
            params = {"ulysses_degree": ulysses, "ring_degree": ring, "placement": placement, "layout": "zigzag"}
            name = f"ulysses {ulysses} x ring {ring}" + (f" {placement}" if both else "")
            layer = _layer(yunchang, groups)
            found.append(Peer("yunchang", name, layer, "usp" if ring > 1 else "ulysses", params if ring > 1 else {}))
    return found


def _torch() -> list[Peer]:
    """torch's own context parallelism, with both of its ways to bring keys and values round, on cuDNN's kernel."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    if not torch.cuda.is_available():
        raise RuntimeError("its attention needs GPUs")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    # It shards the buffers that it is given, and must be given one.
    buffer = torch.zeros(2 * dist.get_world_size(), device="cuda")

    def attention(rotate: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        set_rotate_method(rotate)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = k.shape[1] != q.shape[1]
        with (
            sdpa_kernel([SDPBackend.CUDNN_ATTENTION]),
            context_parallel(mesh, buffers=[buffer.clone()], buffer_seq_dims=[0]),
        ):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)

    return [
        Peer("torch", f"context parallel, {rotate}", partial(attention, rotate), "zigzag", kernel="cudnn")
        for rotate in ("allgather", "alltoall")
    ]


def _groups(yunchang: Any, ulysses: int, ring: int, *, low: bool) -> tuple[Any, Any]:
    """(Ulysses group, ring group) of this rank; its own function keeps the last ones made in a global."""
    yunchang.set_seq_parallel_pg(ulysses, ring, dist.get_rank(), dist.get_world_size(), use_ulysses_low=low)
    held = yunchang.globals.PROCESS_GROUP
    return held.ULYSSES_PG, held.RING_PG


def _layer(yunchang: Any, groups: tuple[Any, Any]) -> Callable[..., Any]:
    layer = yunchang.LongContextAttention(ring_impl_type="zigzag", attn_type=yunchang.kernels.AttnType.FA)
    layer.ulysses_pg, layer.ring_pg = groups

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return layer(q, k, v, causal=True)

    return attention
