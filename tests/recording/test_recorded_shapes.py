"""FLOPs from recorded shapes against `torch.utils.flop_counter`, which counts the same calls as they are dispatched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="recording shapes needs torch")

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import ringprof
from ringprof.analysis.findings.step_rates import step_rates_of
from ringprof.results.analysis import Analysis
from ringprof.trace.columns import FLOP_DTYPES, Trace
from ringprof.trace.kineto import read_trace
from ringprof.trace.operator_flops import _ATTENTION, FORMULAS

aten = torch.ops.aten
Step = Callable[[], Any]


def recorded(step: Step, folder: Path) -> Trace:
    """Profile a step with shapes and return its trace."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recording:
        step()
    recording.export_chrome_trace(str(folder / "trace.json"))
    return read_trace(folder / "trace.json")


def counted(step: Step) -> int:
    """Count a step's FLOPs with PyTorch's counter; CPU attention, which it lacks, by the counter's own formulas."""

    def forward(*shapes: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return int(sdpa_flop_count(*shapes[:3]))

    def backward(*shapes: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return int(sdpa_backward_flop_count(*shapes[:4]))

    on_cpu = {
        aten._scaled_dot_product_flash_attention_for_cpu: forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }
    with FlopCounterMode(display=False, custom_mapping=on_cpu) as counter:
        step()
    return int(counter.get_total_flops())


def meta(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*sizes, device="meta", dtype=dtype)


A, B = meta(3, 5), meta(5, 7)
Q, K, V, DOUT = meta(2, 8, 64, 32), meta(2, 8, 96, 32), meta(2, 8, 96, 16), meta(2, 8, 64, 16)
LSE, SEED = meta(2, 8, 64, dtype=torch.float32), meta(1, dtype=torch.int64)


def flash_layout(tensor: torch.Tensor) -> torch.Tensor:
    return meta(*tensor.transpose(1, 2).shape)


QF, KF, VF, DOUTF = map(flash_layout, (Q, K, V, DOUT))

CALLS: dict[str, Step] = {
    "mm": lambda: aten.mm(A, B),
    "addmm": lambda: aten.addmm(meta(7), A, B),
    "bmm": lambda: aten.bmm(meta(4, 3, 5), meta(4, 5, 7)),
    "baddbmm": lambda: aten.baddbmm(meta(4, 3, 7), meta(4, 3, 5), meta(4, 5, 7)),
    "linear": lambda: F.linear(meta(2, 3, 5), meta(7, 5), meta(7)),
    "conv1d": lambda: F.conv1d(meta(2, 4, 50), meta(6, 4, 5), stride=3, padding=2, dilation=2),
    "conv2d, grouped": lambda: F.conv2d(meta(2, 4, 9, 8), meta(6, 2, 3, 3), stride=2, padding=(1, 2), groups=2),
    "conv2d, same": lambda: F.conv2d(meta(2, 4, 9, 8), meta(6, 4, 3, 3), padding="same"),
    "conv3d": lambda: F.conv3d(meta(2, 4, 5, 9, 8), meta(6, 4, 1, 3, 3)),
    "conv2d, transposed": lambda: F.conv_transpose2d(meta(2, 4, 9, 8), meta(4, 6, 3, 3), stride=2),
    "convolution_backward": lambda: aten.convolution_backward(
        meta(2, 6, 4, 4), meta(2, 4, 9, 9), meta(6, 4, 3, 3), [6], [2, 2], [0, 0], [1, 1], False, [0, 0], 1, [True] * 3
    ),
    "convolution_backward, of one": lambda: aten.convolution_backward(
        meta(2, 6, 4, 4), meta(2, 4, 9, 9), meta(6, 4, 3, 3), [6], [2, 2], [0, 0], [1, 1], False, [0, 0], 1,
        [False, True, False]
    ),
    "convolution_backward, transposed": lambda: aten.convolution_backward(
        meta(2, 6, 19, 19), meta(2, 4, 9, 9), meta(4, 6, 3, 3), [6], [2, 2], [0, 0], [1, 1], True, [0, 0], 1, [True] * 3
    ),
    "flash": lambda: aten._scaled_dot_product_flash_attention(Q, K, V),
    "efficient": lambda: aten._scaled_dot_product_efficient_attention(Q, K, V, None, True),
    "cudnn": lambda: aten._scaled_dot_product_cudnn_attention(Q, K, V, None, True),
    "flash, backward": lambda: aten._scaled_dot_product_flash_attention_backward(
        DOUT, Q, K, V, DOUT, LSE, None, None, 64, 96, 0.0, False, SEED, SEED
    ),
    "cudnn, backward": lambda: aten._scaled_dot_product_cudnn_attention_backward(
        DOUT, Q, K, V, DOUT, LSE, SEED, SEED, None, None, None, 64, 96, 0.0, False
    ),
    "efficient, backward": lambda: aten._scaled_dot_product_efficient_attention_backward(
        DOUT, Q, K, V, None, DOUT, LSE, SEED, SEED, 0.0, [True, True, True, False]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_every_operator_counts_what_pytorch_counts(name: str, tmp_path: Path) -> None:
    """Recorded by the profiler, read from its trace; nothing is computed on the meta device."""
    records = recorded(CALLS[name], tmp_path).flop_records
    assert len(set(records.flops.tolist())) == 1
    assert records.flops[0] == counted(CALLS[name]) > 0
    # Around those that the meta device computes it with, in other data types.
    assert FLOP_DTYPES[records.dtype[0]] == "bf16"
    assert set(records.causal.tolist()) == {0}


KERNELS: dict[str, Step] = {
    "flash kernel": lambda: aten._flash_attention_forward(QF, KF, VF, None, None, 64, 96, 0.0, False, False),
    "efficient kernel": lambda: aten._efficient_attention_forward(
        QF, KF, VF, None, None, None, None, None, 0.0, 0, True
    ),
    "flash kernel, backward": lambda: aten._flash_attention_backward(
        DOUTF, QF, KF, VF, DOUTF, LSE, None, None, 64, 96, 0.0, False, SEED, SEED
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_tokens_first_kernels_count_as_pytorch_counts_attention(name: str, tmp_path: Path) -> None:
    """Not as its counter does, which takes tokens for heads there."""
    records = recorded(KERNELS[name], tmp_path).flop_records
    shapes = Q.shape, K.shape, V.shape
    dense = sdpa_backward_flop_count(DOUT.shape, *shapes) if "backward" in name else sdpa_flop_count(*shapes)
    assert (records.flops.tolist(), records.causal.tolist()) == ([dense], [0])


def test_grouped_query_attention_counts_as_if_every_query_had_its_own_key(tmp_path: Path) -> None:
    def step() -> None:
        aten._scaled_dot_product_flash_attention(Q, meta(2, 2, 96, 32), meta(2, 2, 96, 16))

    assert recorded(step, tmp_path).flop_records.flops.tolist() == [counted(CALLS["flash"])]


def test_gradient_of_a_grouped_convolution_counts_its_groups(tmp_path: Path) -> None:
    """PyTorch's counter takes each group's weight for one over all channels."""
    x, weight = meta(2, 4, 9, 9), meta(6, 2, 3, 3)

    def step() -> None:
        aten.convolution_backward(
            meta(2, 6, 7, 7), x, weight, [6], [1, 1], [0, 0], [1, 1], False, [0, 0], 2, [False, True, False]
        )

    forward = 2 * 2 * (7 * 7) * 6 * 2 * 9
    assert recorded(step, tmp_path).flop_records.flops.tolist() == [forward]
    assert counted(step) == 2 * forward


NAMES = {
    "query": ("query",),
    "causal": ("is_causal",),
    "window": ("window_size_left", "window_size_right"),
    "mask_type": ("custom_mask_type",),
    "absent": ("cum_seq_q", "cum_seq_k", "cu_seqlens_q", "cu_seqlens_k", "seqlen_k", "seqused_k", "block_table",
               "window_size"),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in FORMULAS if name.startswith("aten::") and not name.endswith("_")])
def test_argument_positions_match_pytorch_schemas(name: str) -> None:
    packet = getattr(aten, name.removeprefix("aten::"))
    arguments = [argument.name for argument in packet.default._schema.arguments]
    places = _ATTENTION.get(name)
    if places is None:
        return
    for field, names in NAMES.items():
        value = getattr(places, field)
        for index in value if isinstance(value, tuple) else () if value is None else (value,):
            assert arguments[index] in names, (field, index)
    lengths = {"cum_seq_q", "cum_seq_k", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "seqlen_k", "block_table"}
    assert {arguments.index(argument) for argument in lengths & {*arguments}} <= {*places.absent}


QKV = "Tensor q, Tensor k, Tensor v"
OPTIONS = (
    "float dropout_p, float softmax_scale, bool causal, int window_size_left, int window_size_right, float softcap, "
    "Tensor? alibi_slopes"
)
GRADIENTS = "Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv"
FLASH_ATTN = {
    "_flash_attn_forward": f"{QKV}, {OPTIONS}, bool return_softmax",
    "_flash_attn_backward": f"Tensor dout, {QKV}, Tensor out, Tensor softmax_lse, {GRADIENTS}, {OPTIONS}, "
    "bool deterministic, Tensor? rng_state=None",
    "_flash_attn_varlen_forward": f"{QKV}, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, "
    "int max_seqlen_k, float dropout_p, float softmax_scale, bool causal",
}


def test_flash_attn_operators_count_by_their_schema_arguments(tmp_path: Path) -> None:
    """Operators of its names and arguments that compute nothing: a dense, a causal, a packed call, and a gradient."""
    library = torch.library.Library("flash_attn", "FRAGMENT")
    for name, schema in FLASH_ATTN.items():
        library.define(f"{name}({schema}) -> Tensor")
        library.impl(name, lambda *arguments, **options: torch.empty_like(arguments[0]), "Meta")
    flash = torch.ops.flash_attn
    bounds = meta(3, dtype=torch.int32)

    def step() -> None:
        flash._flash_attn_forward(QF, KF, VF, 0.0, 0.1, False, -1, -1, 0.0, None, False)
        flash._flash_attn_forward(QF, QF, QF, 0.0, 0.1, True, -1, -1, 0.0, None, False)
        flash._flash_attn_varlen_forward(QF[0], QF[0], QF[0], bounds, bounds, 64, 64, 0.0, 0.1, True)
        flash._flash_attn_backward(
            DOUTF, QF, KF, VF, DOUTF, LSE, None, None, None, 0.0, 0.1, False, -1, -1, 0.0, None, False
        )

    forward, square = sdpa_flop_count(Q.shape, K.shape, V.shape), sdpa_flop_count(Q.shape, Q.shape, Q.shape)
    backward = sdpa_backward_flop_count(DOUT.shape, Q.shape, K.shape, V.shape)
    assert recorded(step, tmp_path).flop_records.flops.tolist() == [forward, square // 2, backward]


class Layer(torch.nn.Module):
    """A transformer layer with grouped-query attention."""

    def __init__(self, size: int, heads: int, kv_heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.causal = heads, kv_heads, size // heads, causal
        self.norm = torch.nn.LayerNorm(size)
        self.qkv = torch.nn.Linear(size, (heads + 2 * kv_heads) * self.head_dim)
        self.out = torch.nn.Linear(size, size)
        up, down = torch.nn.Linear(size, 3 * size), torch.nn.Linear(3 * size, size)
        self.mlp = torch.nn.Sequential(up, torch.nn.GELU(), down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, size = x.shape
        widths = [count * self.head_dim for count in (self.heads, self.kv_heads, self.kv_heads)]
        parts = self.qkv(self.norm(x)).split(widths, dim=-1)
        q, k, v = (part.view(batch, seq, -1, self.head_dim).transpose(1, 2) for part in parts)
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, dim=1) for part in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, seq, size))
        together: torch.Tensor = x + self.mlp(x)
        return together


def training_step(*, causal: bool) -> Step:
    """Forward, backward and optimizer of two layers."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Layer(48, 6, 2, causal=causal), Layer(48, 6, 2, causal=causal))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(2, 80, 48)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step()
    return step


@pytest.mark.parametrize("causal", [False, True])
def test_a_captured_training_step_counts_what_pytorch_counts(causal: bool, tmp_path: Path) -> None:
    step = training_step(causal=causal)
    dense = counted(step)
    with ringprof.capture(tmp_path / "mine", record_shapes=True):
        step()
    analysis = ringprof.load(tmp_path / "mine/run.json")
    assert isinstance(analysis, Analysis)
    rates = step_rates_of(analysis.findings.attribution)
    assert rates is not None
    heads, seq, head_dim, batch, layers = 6, 80, 8, 2, 2
    attention = batch * layers * heads * seq * seq * head_dim * (4 + 10)
    parts = {row.part: row.flops for row in rates.parts}
    assert parts == {"attention": attention // 2 if causal else attention, "matrix_products": dense - attention}
    assert rates.flops == dense - (attention // 2 if causal else 0)
    assert [row.mask_unknown for row in rates.parts] == [0.0, 0.0]
    assert {row.coverage for row in rates.parts} == {1.0}
    assert rates.mfu is None
    assert all(row.tflops == pytest.approx(row.flops / row.time_ns / 1e3) for row in rates.parts)


def test_a_capture_without_shapes_has_no_rates(tmp_path: Path) -> None:
    with ringprof.capture(tmp_path / "mine"):
        torch.mm(torch.randn(64, 64), torch.randn(64, 64))
    analysis = ringprof.load(tmp_path / "mine/run.json")
    assert isinstance(analysis, Analysis)
    assert step_rates_of(analysis.findings.attribution) is None


def test_redispatched_operator_counts_once(tmp_path: Path) -> None:
    """Under a dispatch mode, as within DTensor, an operator's record lies in another of the same name."""
    a, b = torch.randn(64, 32), torch.randn(32, 16)

    def step() -> None:
        with FlopCounterMode(display=False):
            torch.mm(a, b)

    trace = recorded(step, tmp_path)
    assert trace.flop_records.flops.tolist() == [2 * 64 * 32 * 16] * 2
    analysis = ringprof.load(tmp_path / "trace.json")
    assert isinstance(analysis, Analysis)
    rates = step_rates_of(analysis.findings.attribution)
    assert rates is not None
    assert rates.flops == 2 * 64 * 32 * 16
