"""The recorder's count of memory, and the CPU tensors that it leaves to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("torch", reason="a dry run runs strategies on shapes")

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ringprof.dryrun import dispatch, fakes
from ringprof.dryrun.dispatch import Recorder, _allocated_bytes
from ringprof.dryrun.fakes import _split_bytes
from ringprof.prediction.schedules import schedule
from ringprof.workload.workload import Workload


def test_bytes_are_rounded_as_by_the_cuda_allocator() -> None:
    """From 10 MiB on, a tensor has its own segment, a multiple of 2 MiB; a remainder of up to 1 MiB stays with it."""
    mib = 1 << 20
    sizes = {1: 512, 9 * mib + 1: 9 * mib + 512, 27 * mib: 28 * mib, 28 * mib: 28 * mib, 26 * mib + 1: 26 * mib + 512}
    assert {size: _allocated_bytes(size) for size in sizes} == sizes


@pytest.mark.parametrize(
    ("shape", "splits"),
    [((1, 1536, 8, 128), 4), ((1, 2048, 8, 128), 1), ((1, 768, 16, 128), 4), ((1, 64, 8, 128), 12)],
)
def test_temporary_bytes_of_a_small_flash_call(shape: tuple[int, ...], splits: int) -> None:
    """1536 rows of 8 heads on an H200 held 24 MiB of outputs and 0.19 MiB of LSE in 4 splits.

    There are 64-row tiles: 8 x 24 = 192 and 16 x 12 of the 264 that fit at once, less than 0.8 of them; 4 splits fill
    2.9 of 3 waves. 8 x 32 = 256 are more. 8 x 1 = 8 tiles fill a part of one wave with any number of splits: one per
    128 keys.
    """
    q, k = torch.empty(shape, device="meta"), torch.empty(1, 1536, *shape[2:], device="meta")
    held = 4 * splits * shape[1] * shape[2] * 129 if splits > 1 else 0
    assert _split_bytes("flash-attn", q, k) == held and _split_bytes("cudnn", q, k) == 0


def test_host_tensors_are_computed_in_a_dry_run() -> None:
    """Values that a strategy knows without reading tensors, such as a rank's rows, are those of a run."""
    with Recorder() as recorder:
        held = torch.cat([torch.arange(3), torch.arange(7, 9)])
        assert torch.stack([held, held]).sum().item() == 2 * (0 + 1 + 2 + 7 + 8)
        assert torch.add(held, 1, out=torch.empty_like(held)).tolist() == [1, 2, 3, 8, 9]
    assert recorder.ops == []


@pytest.mark.parametrize(("strategy", "hops"), [("burst", "copy"), ("zigzag", "copy"), ("usp", "nccl")])
def test_shortcuts_past_the_dispatcher_change_no_program(
    strategy: str, hops: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Allocate through torch's dispatcher, cut every receive slot anew and take every view: operations, host calls and
    memory stay equal."""
    workload = Workload(seq=16384, heads=16, kv_heads=8, head_dim=128)
    fast = schedule(strategy, workload, 8, kernel="flash-attn-3", hops=hops, ranks=[0, 3])

    def empty(self: Recorder, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def last(self: Any, shapes: Any) -> list[torch.Tensor]:
        self._views.clear()
        return last_of_slots(self, shapes)

    def is_dense(tensor: torch.Tensor) -> bool:
        # The recorder counts this view, too; the caller's own count is taken back.
        recorder: Any = _get_current_dispatch_mode()
        dense = tensor[0].is_contiguous()
        recorder.repeated(-1)
        return dense

    last_of_slots = fakes._ReceiveSlots.last
    monkeypatch.setattr(Recorder, "empty", empty)
    monkeypatch.setattr(fakes._ReceiveSlots, "last", last)
    monkeypatch.setattr(dispatch, "_first_entry_is_dense", is_dense)
    assert schedule(strategy, workload, 8, kernel="flash-attn-3", hops=hops, ranks=[0, 3]) == fast
