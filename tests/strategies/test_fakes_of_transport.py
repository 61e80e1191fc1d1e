"""Memory layout of the tensors of every kernel call, the contents of a message, and the kernels for baselines."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor

from ringprof.strategies import create
from ringprof.strategies.base import _heads_together
from ringprof.strategies.kernels.kernel import Kernel
from ringprof.strategies.kernels.plan_check import plausible
from ringprof.strategies.kernels.reference import ReferenceKernel
from ringprof.strategies.kernels.registry import KERNELS
from ringprof.strategies.kernels.torch_kernels import CpuFlashKernel, _additive_mask
from ringprof.strategies.masks.mask_blocks import AttnRectangle
from ringprof.strategies.transport.baselines import RecordingKernel, TensorView
from ringprof.strategies.transport.message import Message, MessageLayout, layout_of, side_by_side
from tests.strategies.cases import CASES, WorkloadShard, inputs, with_kernel
from tests.strategies.ranks import run_ranks


class Recording(ReferenceKernel):
    """Computes, and keeps what is wrong with the strides of what it is given. It takes O, as cuDNN does, not delta."""

    takes_delta = False

    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[str] = []
        self.backward_calls = 0

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
        out: Tensor | None, delta: Tensor | None, scale: float, causal: bool,
    ) -> Any:  # fmt: skip
        assert out is not None
        self.backward_calls += 1
        # torch gives O the strides of an empty tensor like q, and dO those of O; the LSE is dense.
        for name, x, like in (("out", out, q), ("dout", dout, out)):
            wanted = _strides(torch.empty_like(like.transpose(1, 2)).transpose(1, 2))
            if _strides(x) != wanted:
                self.wrong.append(f"{name} {tuple(x.shape)} has strides {x.stride()}, q {q.stride()}")
        if not lse.is_contiguous():
            self.wrong.append(f"lse {tuple(lse.shape)} has strides {lse.stride()}")
        return super()._backward(dout, q, k, v, lse, out, delta, scale, causal)


def _strides(x: Tensor) -> list[int]:
    """Return the strides that matter: a dimension of one element has none."""
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def strides_seen(rank: int, world: int) -> list[str]:
    wrong_calls = []
    for batch, heads, kv_heads in [(1, 4, 4), (2, 4, 2), (3, 8, 2)]:
        problem = WorkloadShard(seq=32, batch=batch, heads=heads, kv_heads=kv_heads)
        full = inputs(problem)
        for case in [case for case in CASES if world in case.worlds]:
            strategy = create(case.name, kernel="reference", **case.params)
            kernel = Recording()
            strategy.kernel_for = lambda q, kernel=kernel, **_: kernel
            for causal in (True, False):
                for turned in (False, True):
                    q, k, v, dout = (strategy.shard(x) for x in full)
                    if turned:
                        q, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, dout))
                    leaves = [x.requires_grad_() for x in (q, k, v)]
                    torch.autograd.grad(strategy.attention(*leaves, causal=causal), leaves, dout)
            assert kernel.backward_calls >= 4
            wrong_calls += [f"{case} batch {batch}: {wrong}" for wrong in kernel.wrong]
    return wrong_calls


@pytest.mark.processes
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_backward_calls_have_the_strides_of_torch_autograd(world):
    for wrong_calls in run_ranks(world, strides_seen, world):
        assert wrong_calls == []


class LikeFlashAttn(Recording):
    """A kernel that takes O and dO as views, and returns dK and dV side by side, as flash-attn does."""

    dense_rows = False

    def _backward(self, *args: Any) -> Any:
        dq, dk, dv = super()._backward(*args)
        dk, dv = torch.stack([dk, dv]).unbind(0)
        assert side_by_side(dk, dv) is not None
        return dq, dk, dv


@pytest.mark.processes
@pytest.mark.parametrize("world", [1, 2, 4])
def test_views_are_passed_to_kernels_and_gradients_added_in_pairs(world):
    cases = [case for case in CASES if world in case.worlds]
    for rank, rows in enumerate(run_ranks(world, with_kernel, LikeFlashAttn, cases, WorkloadShard(seq=32, batch=2))):
        # dO and O travel as float64, but some gradients of some cases in the input's type, which is that, too.
        assert {case: error for case, error, _ in rows if not error < 1e-12} == {}
        # Half of a rank's queries see the keys of those before it: ranks but the last have such blocks.
        assert any(kernel.wrong for *_, kernel in rows) or rank == world - 1


def test_only_adjacent_tensors_are_joined_without_a_copy():
    pair = torch.rand(2, 1, 3, 4)
    first, second = pair.unbind(0)
    assert side_by_side(first, second) is pair
    for other in (first, second.clone(), second.bfloat16(), second[:, :2], second.transpose(1, 2)):
        assert side_by_side(first, other) is None
    assert side_by_side(second, first) is side_by_side(first.view(torch.int32), second.view(torch.int32)) is None
    assert side_by_side(*(x.reshape(1, 4, 3).transpose(1, 2) for x in (first, second))) is None
    assert side_by_side(*torch.rand(3, 4, 2).permute(2, 0, 1).unbind(0)) is None
    # Neighbours in memory by chance, or as parts of something else.
    assert side_by_side(pair[0, :, :, :2], pair[0, :, :, 2:]) is None


# --- the look at a plan's first gradients -----------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_plausibility_check_detects_gradients_of_wrong_memory(causal, scale):
    torch.manual_seed(0)
    kernel: Kernel = ReferenceKernel()
    q, dout = (torch.randn(2, 64, 4, 16).bfloat16() for _ in range(2))
    k, v = (torch.randn(2, 64, 2, 16).bfloat16() for _ in range(2))
    dout *= scale
    out, lse = kernel.forward(q, k, v, scale=0.25, causal=causal)

    def is_plausible(**other: Tensor) -> bool:
        rows = {"dout": dout, "lse": lse, "out": out, **other}
        gradients = kernel.backward(rows["dout"], q, k, v, rows["lse"], out=rows["out"], scale=0.25, causal=causal)
        return bool(plausible(gradients, dout, q, k, v, out, lse, 0.25, causal))

    assert is_plausible()
    # As if the memory were read with wrong strides: another batch entry, other rows, or no row at all.
    assert not is_plausible(out=out.flip(0))
    assert not is_plausible(dout=dout.roll(7, 1))
    assert not is_plausible(lse=lse.roll(1, 1))
    assert not is_plausible(lse=lse * torch.nan)
    # NaN in the inputs is not the fault of a kernel plan.
    q[-1] = torch.nan
    assert is_plausible()


# --- messages ---------------------------------------------------------------------------------------


def _allocate(layout: MessageLayout) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=dtype) for dtype, shape in layout.buffers]


@pytest.mark.parametrize(
    ("shapes", "messages"),
    [
        ([(torch.bfloat16, (2, 4, 2, 8))] * 2, 1),
        ([(torch.bfloat16, (1, 8)), (torch.bfloat16, (1, 8)), (torch.float32, (2, 4)), (torch.float32, (4,))], 1),
        # Sizes that no kernel may begin after: no padding is sent for them.
        ([(torch.bfloat16, (3, 5))] * 2, 2),
        ([(torch.float32, (4,)), (torch.bfloat16, (3,))], 2),
        ([(torch.float32, (4,))], 1),
    ],
)
def test_tensors_are_packed_in_one_message_without_padding(shapes, messages):
    torch.manual_seed(0)
    tensors = [torch.randn(shape).to(dtype) for dtype, shape in shapes]
    message = Message.pack(tensors)
    assert len(message.buffers) == messages
    assert message.size_bytes == sum(x.numel() * x.element_size() for x in tensors)
    for other in (message, message.with_buffers([buffer.clone() for buffer in message.buffers])):
        assert all(torch.equal(x, own) and own.is_contiguous() for x, own in zip(tensors, other.tensors, strict=True))
    for other in (message.empty_like(), Message.empty(layout_of(tuple(shapes)), _allocate)):
        assert [(x.dtype, tuple(x.shape)) for x in other.tensors] == shapes
        assert [tuple(x.shape) for x in other.buffers] == [tuple(x.shape) for x in message.buffers]
        starts = {x.data_ptr() for x in other.buffers} | {x.data_ptr() for x in message.buffers}
        assert len(starts) == 2 * messages


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sharpness", [1, 8, 60, 200])
def test_rounding_of_one_key_softmax_gradients_is_plausible(causal, sharpness):
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 256, 4, 64).bfloat16() for _ in range(4))
    k = (k + sharpness * q.float()).bfloat16()
    kernel = CpuFlashKernel()
    out, lse = kernel.forward(q, k, v, scale=0.1, causal=causal)

    def is_plausible(other_out: Tensor) -> bool:
        gradients = kernel.backward(dout, q, k, v, lse, out=other_out, scale=0.1, causal=causal)
        return bool(plausible(gradients, dout, q, k, v, out, lse, 0.1, causal))

    assert is_plausible(out.contiguous())
    # As if O were read with other strides: other rows, other heads.
    assert not is_plausible(out.roll(7, 1).contiguous())
    assert not is_plausible(out.flip(2).contiguous())


def test_kernel_is_created_once_per_strategy():
    strategy = create("ring", kernel="auto")
    single, wider, double = (
        strategy.kernel_for(torch.zeros(1, 4, 2, head_dim, dtype=dtype))
        for head_dim, dtype in ((8, torch.float32), (16, torch.float32), (8, torch.float64))
    )
    assert single is wider is double and strategy.kernels() == [single]
    assert strategy.kernel_for(torch.zeros(1, 4, 2, 8), softcap=2.0) is not single


def test_ordered_tensor_is_not_copied():
    """The tensor is not copied, even if a dimension of one element has a meaningless stride."""
    q = torch.empty(5, 4, 3, 8).transpose(0, 1)[::2, :1]
    assert q.shape == (2, 1, 3, 8) and not q.is_contiguous() and _heads_together(q) is q


def test_additive_mask_is_on_the_device_of_the_tensors():
    with torch.device("meta"):
        assert _additive_mask(AttnRectangle(0, 2, 0, 2, right=0), torch.zeros(1, device="cpu")).tolist() == [
            [0, -inf],
            [0, 0],
        ]


@pytest.mark.parametrize(
    ("name", "grouped_heads", "dense_rows", "windows", "deterministic"),
    [
        ("flash-attn", True, False, True, True),
        ("flash-attn-3", True, False, True, True),
        ("flash-attn-4", True, False, True, True),
        ("cudnn", True, True, False, False),
        ("torch-flash", False, True, True, True),
        ("torch-efficient", False, True, False, False),
        ("cpu-flash", False, True, True, True),
    ],
)
def test_features_of_third_party_kernels(name, grouped_heads, dense_rows, windows, deterministic):
    """The features are those that the kernels' authors document."""
    kernel = KERNELS[name]
    assert kernel.grouped_heads is grouped_heads and kernel.dense_rows is dense_rows
    assert kernel.takes_windows is windows and kernel.has_deterministic_mode is deterministic


def test_a_recording_kernel_keeps_the_layout_of_its_arguments():
    """A kernel that takes ``delta`` is recorded with it, any other with the output that replaces it."""
    torch.manual_seed(0)
    q, dout, k, v = (torch.randn(2, 4, heads, 8) for heads in (2, 2, 1, 1))
    lse, delta = torch.randn(2, 2, 4), torch.randn(2, 2, 4)
    rows, heads = (2, 2, 4), (2, 4, 2, 8)
    for kernel, taken in (
        (ReferenceKernel(), (None, TensorView(rows, (8, 4, 1), torch.float32))),
        (CpuFlashKernel(), (TensorView(heads, (64, 16, 8, 1), torch.float32), None)),
    ):
        recorder = RecordingKernel(kernel)
        recorder.forward(q[:, :2], k, v, scale=0.5, causal=False)
        recorder.backward(dout, q, k, v, lse, delta=delta, scale=0.5, causal=True)
        forward, backward = recorder.recorded_calls
        assert forward.q == TensorView((2, 2, 2, 8), (64, 16, 8, 1), torch.float32) and forward.rows is None
        assert backward.rows is not None and (backward.rows.out, backward.rows.delta) == taken
        recorder.backward(dout, q, k, v, lse, out=dout, scale=0.5, causal=True)
        last = recorder.recorded_calls[-1].rows
        assert last is not None and last.delta is None and last.out == TensorView.of(dout)


def test_span_of_a_view_is_first_to_last_element():
    x = torch.empty(5, 4, 8)
    assert [TensorView.of(view).span for view in (x, x[:, :2], x.transpose(0, 2), x[:, 1])] == [160, 144, 160, 136]
