"""The Triton kernels of `fused` against their plain forms in `merge`, on a GPU or in Triton's interpreter on a CPU.

`test_fused` runs this file by pytest in a process of its own, with TRITON_INTERPRET=1: the interpreter is chosen when
triton is first imported.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from ringprof.strategies.kernels import merge

# numpy, in which the interpreter computes, warns of 0 / 0 in lanes whose value is not used.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def operations(device: str, head_dim: int, dtype: torch.dtype, half: int) -> dict[str, Tensor]:
    """Return the results of every operation that has a fused kernel, on tensors of 2 · ``half`` rows."""
    torch.manual_seed(0)
    full, full_lse = torch.randn(2, 2 * half, 3, head_dim), 3 * torch.randn(2, 3, 2 * half)
    block, block_lse = torch.randn(2, half, 3, head_dim).to(dtype), 3 * torch.randn(2, 3, half)
    narrow_delta = torch.randn(2, 5, half)
    on_device = [x.to(device) for x in (block, block_lse, narrow_delta)]
    block, block_lse, narrow_delta = on_device

    def fresh(x: Tensor) -> Tensor:
        return x.to(device, copy=True)

    results: dict[str, Tensor] = {}
    for first in (half, half // 2):
        out, lse = fresh(full), fresh(full_lse)
        merge.merge_into(out, out, lse, block, block_lse, slice(first, first + half))
        results |= {f"out from {first}": out, f"lse from {first}": lse}
    narrow, lse = torch.empty_like(full, dtype=dtype, device=device), fresh(full_lse)
    # An LSE of some heads is strided.
    strided_lse = torch.cat([block_lse, block_lse], 1)[:, 1:4]
    merge.merge_into(narrow, fresh(full), lse, block, strided_lse, slice(half))
    results |= {"narrow": narrow, "narrow_lse": lse}
    total = fresh(full)
    merge.accumulate(total[:, :half], block)
    merge.accumulate(total[:, half:], fresh(full)[:, :half])
    results["total"] = total
    results["delta"] = merge.row_product(block, fresh(full)[:, :half].to(dtype).contiguous())
    results["stand_in"] = merge.output_with_delta(block, results["delta"])
    results["stand_in of some heads"] = merge.output_with_delta(block, narrow_delta[:, 1:4])
    # A gradient of 0 has no direction that could carry delta.
    zero = torch.where(torch.arange(half, device=device)[:, None, None] == 1, 0, block)
    results["stand_in of a row of 0"] = merge.output_with_delta(zero, narrow_delta[:, :3])
    results["begun"] = merge.write_rows(fresh(full), slice(half // 2, half // 2 + half), block)
    parts = [(slice(0, half), block), (slice(half, 2 * half), block)]
    results["settled"] = merge.add_and_cast(fresh(full), parts, dtype)
    results["twice"] = merge.add_and_cast(fresh(full).to(dtype), parts[:1] * 2, torch.float32)
    stacked = torch.stack([full, -full]).to(device)
    merge.accumulate(stacked[..., half:, :, :], torch.stack([block, block]))
    results["stacked"] = stacked
    return {name: x.cpu().double() for name, x in results.items()}


def differences(plain: dict[str, Tensor], fused: dict[str, Tensor], dtype: torch.dtype) -> list[str]:
    """Return the names of the results that differ by more than rounding."""
    # float32 sums in another order; these results are rounded to the input's type.
    narrow = ("narrow", "stand_in", "stand_in of some heads", "stand_in of a row of 0", "settled")
    eps = {name: max(2.5 * torch.finfo(dtype).eps, 1e-4) if name in narrow else 1e-4 for name in plain}
    return [name for name, x in plain.items() if not (x - fused[name]).abs().max() <= eps[name] * x.abs().max()]


class _Specialized:
    """A kernel as Triton compiles it: for the types of its tensors and for its numbers, to be launched by addresses."""

    def __init__(self, kernel: Any, types: list[torch.dtype] | None = None, numbers: tuple[Any, ...] = ()) -> None:
        self._kernel, self._types, self._numbers = kernel, types, numbers

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **options: Any) -> _Specialized:
            tensors = [x for x in arguments if isinstance(x, Tensor)]
            if self._types is not None:
                addresses, numbers = arguments[: len(self._types)], arguments[len(self._types) :]
                assert numbers == self._numbers, "launched with numbers that it was not compiled for"
                tensors = [_at(*pair) for pair in zip(addresses, self._types, strict=True)]
            numbers = arguments[len(tensors) :]
            self._kernel[grid](*tensors, *numbers, **options)
            return _Specialized(self._kernel, [x.dtype for x in tensors], numbers)

        return launch


def _at(address: int, dtype: torch.dtype) -> Tensor:
    """Return the first element of a tensor of ``dtype`` at an address."""
    return torch.frombuffer((ctypes.c_char * dtype.itemsize).from_address(address), dtype=dtype)


@pytest.mark.parametrize(("head_dim", "half"), [(8, 10), (20, 13)])
def test_fused_kernels_equal_plain_torch(head_dim: int, half: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel is launched by what an earlier launch left, too; types take turns, which must not share it."""
    from ringprof.strategies.kernels import fused

    monkeypatch.setattr(merge, "FUSED_FROM", 0)
    plain = {dtype: operations("cpu", head_dim, dtype, half) for dtype in DTYPES}
    launches: list[str] = []
    for name in [name for name in vars(fused) if name.startswith("ringprof_")]:
        launches.append(name)
        monkeypatch.setattr(fused, name, _Specialized(getattr(fused, name)))
    assert len(launches) == 4
    monkeypatch.setitem(merge.FUSED, "cpu", lambda: fused)
    for dtype in [*DTYPES, *DTYPES[::2]]:
        assert differences(plain[dtype], operations("cpu", head_dim, dtype, half), dtype) == [], dtype
    assert fused._compiled
