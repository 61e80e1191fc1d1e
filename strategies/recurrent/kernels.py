"""Choice of the kernel for a recurrence."""

from __future__ import annotations

import warnings
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from ..errors import Unsupported
from .kernel import Inputs, RecurrenceKernel
from .reference import ReferenceRecurrence

NAMES = ("auto", "fla", "reference")
_FLA_KEY_DIM = 256
"""Largest head size of keys that the kernels of flash-linear-attention take."""


def choose_kernel(name: str, x: Inputs) -> RecurrenceKernel:
    """Return the kernel ``name``, one of `NAMES`, for these inputs.

    ``auto`` is ``fla`` where flash-linear-attention is installed and takes these inputs, else ``reference``; on a GPU
    it warns of the latter, which is slow. Raises `Unsupported` where ``fla`` is named and cannot compute these inputs.
    """
    problem = _why_not_fla(x) if name != "reference" else "not asked for"
    if name == "fla" and problem:
        raise Unsupported(f"kernel fla: {problem}")
    if problem:
        if name == "auto" and x.q.is_cuda:
            warnings.warn(f"the recurrence runs in plain torch, which is slow: kernel fla {problem}", stacklevel=4)
        return ReferenceRecurrence()
    from .fla import FlaDeltaRule, FlaLinearAttention  # imports Triton

    return FlaLinearAttention() if x.beta is None else FlaDeltaRule()


def convolves_by_fla(name: str, x: Tensor, weight: Tensor) -> bool:
    """Return whether the kernel ``name``, one of `NAMES`, convolves x with flash-linear-attention's kernel."""
    return name != "reference" and x.is_cuda and x.dtype == weight.dtype == torch.bfloat16 and _is_installed()


@lru_cache(maxsize=1)
def _is_installed() -> bool:
    return find_spec("fla") is not None


def _why_not_fla(x: Inputs) -> str | None:
    """Return why the kernels of flash-linear-attention cannot compute these inputs; None where they can."""
    if not x.q.is_cuda:
        return "needs tensors on a GPU"
    if x.q.dtype != torch.bfloat16:
        return f"computes in bfloat16, not {str(x.q.dtype).removeprefix('torch.')}"
    if x.k.shape[-1] > _FLA_KEY_DIM:
        return f"takes keys of at most {_FLA_KEY_DIM} numbers per head"
    if not _is_installed():
        return "needs flash-linear-attention: pip install '.[fla]' in a clone of ringprof"
    if x.g.shape[-1] > 1:
        return None
    from fla.ops.common import chunk_o  # imports Triton

    if chunk_o.IS_NVIDIA_HOPPER and chunk_o.TRITON_ABOVE_3_4_0 and not chunk_o.TRITON_ABOVE_3_7_1:
        return "refuses gradients on Hopper with Triton 3.4 to 3.7.0, which compiles them wrongly: install Triton 3.7.1"
    return None
