"""Proofs of the kernels that are installed here, on a GPU: what they find, what they cost, what they leave."""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ringprof.strategies import Unsupported, create
from ringprof.strategies.kernels import proof, registry
from ringprof.strategies.kernels.kernel import Kernel
from ringprof.strategies.kernels.reference import ReferenceKernel
from ringprof.strategies.kernels.registry import KERNELS, reason_against
from ringprof.strategies.kernels.torch_kernels import TorchFlashKernel
from tests.strategies.gpu_ranks import needs_two_gpus, run_gpu_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # flash-attn 4 and the packages that it compiles with warn of each other.
    pytest.mark.filterwarnings("default"),
]
GPU_KERNELS = ["cudnn", "flash-attn-3", "flash-attn-4", "flash-attn", "torch-flash", "torch-efficient", "flex"]
CUDA = torch.device("cuda", 0)
COMPILED = ("cudnn", "flash-attn-4", "flex")
"""Kernels that compile or plan for what a proof computes."""


def _only_128(name: str) -> bool:
    """Return whether the installed flash-attn 2 was compiled for bf16 and heads of 128 alone."""
    try:
        return name == "flash-attn" and "+hdim128" in version("flash-attn")
    except PackageNotFoundError:
        return False


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Give each test no verdicts, and a folder of its own for them."""
    monkeypatch.delenv(proof.SKIPPED_BY, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _forget()
    yield
    _forget()


def _forget() -> None:
    for known in (proof._verdicts, proof._files_read, proof._warned):
        known.clear()


def _skip_without(name: str, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> None:
    if reason := KERNELS[name].why_unsupported(CUDA, dtype, head_dim):
        pytest.skip(f"{name} {reason}")


def _inputs(head_dim: int, seq: int = 256, kv_heads: int = 2) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(1, seq, heads, head_dim, device=CUDA, dtype=torch.bfloat16, generator=generator)
        for heads in (4, kv_heads, kv_heads)
    ]


def _timed_proof(kernel: type[Kernel], case: proof.Case) -> tuple[float, str | None]:
    """Return the milliseconds of a proof, and what is wrong."""
    _forget()
    Path(proof.verdict_file() or "").unlink(missing_ok=True)
    torch.cuda.synchronize()
    start = time.perf_counter()
    error = proof.prove(kernel, case, CUDA)
    return (time.perf_counter() - start) * 1e3, error


@pytest.mark.parametrize("name", GPU_KERNELS)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_verdicts_and_their_cost(name: str, head_dim: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Right kernels pass, and verdicts on a build for heads of 128 agree with longer blocks. Print the costs."""
    _skip_without(name, head_dim)
    kernel = KERNELS[name]
    if name in COMPILED and head_dim not in (64, 128):
        pytest.skip("compiles for minutes")
    proof.prove(TorchFlashKernel, proof.Case("full", torch.bfloat16, 64, 64, 1), CUDA)  # the first work on the GPU
    lines, wrong = [], []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for kv_heads, softcap in ((4, 0.0), (1, 0.0), (4, 30.0)):
            needs = {"windows": kernel.takes_windows, "softcap": bool(softcap)}
            if reason_against(kernel, CUDA, dtype, head_dim, **needs):
                continue
            if name == "flex" and (dtype, kv_heads, softcap) != (torch.bfloat16, 4, 0.0):
                continue
            wanted = proof.Case("", dtype, head_dim, head_dim, 4 // kv_heads, softcap, shape=(1, kv_heads))
            for causal in (True, False):
                blocks = proof.blocks_of(
                    causal=causal, several_ranks=False, windows=kernel.takes_windows, documents=True
                )
                for case in proof.cases_for(kernel, wanted, blocks, CUDA):
                    (first, error), (again, same) = (_timed_proof(kernel, case) for _ in range(2))
                    lines.append(f"{name}, {case}: {first:.1f} ms, again {again:.1f} ms, {error or 'right'}")
                    assert (error is None) == (same is None)  # what is left unwritten may differ
                    wrong += [lines[-1]] * (error is not None)
    with capsys.disabled():
        print("", *lines, sep="\n")
    assert lines
    if not _only_128(name):
        assert not wrong
        return
    assert not [line for line in wrong if head_dim == 128 and "bf16" in line and "softcap" not in line]
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = (torch.randn(1, 320, 4, head_dim, device=CUDA, dtype=dtype) for _ in range(3))
        out, _ = KERNELS[name]().forward(q, k, v, scale=head_dim**-0.5, causal=False)
        exact, _ = ReferenceKernel().forward(q.double(), k.double(), v.double(), scale=head_dim**-0.5, causal=False)
        case = proof.Case("full", dtype, head_dim, head_dim, 1)
        is_right = float((out - exact).norm() / exact.norm()) < 0.01
        assert is_right == (proof.prove(KERNELS[name], case, CUDA) is None), case


@pytest.mark.parametrize("name", GPU_KERNELS)
def test_a_first_call_costs_little_more_than_the_kernels_own(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Print the time that a proof adds to a first call whose kernel has run before, as in a second strategy."""
    _skip_without(name)
    proof.environment.cache_clear()
    proof._build_hash.cache_clear()
    q, k, v = _inputs(128)
    times = []
    for skipped in ("1", "0", "0", "0"):  # the kernel's own first call, then with a proof, known, known
        monkeypatch.setenv(proof.SKIPPED_BY, skipped)
        strategy = create("zigzag", kernel=name)
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        strategy.attention(q, k, v)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    with capsys.disabled():
        print(f"\n{name}: first call {times[0]:.1f} ms, with proof {times[1]:.1f} ms, known {times[2]:.2f} ms", end="")


@pytest.mark.parametrize("head_dim", [96, 192])
def test_a_build_for_heads_of_128_alone_is_refused_for_others(head_dim: int) -> None:
    if not _only_128("flash-attn"):
        pytest.skip("needs the wheel of flash-attn 2 that was compiled for heads of 128 alone")
    q, k, v = _inputs(head_dim)
    with pytest.raises(Unsupported, match=rf"'flash-attn' is not available: it co.* heads of {head_dim}"):
        create("zigzag", kernel="flash-attn").attention(q, k, v)
    documents = [0, 100, 256]
    with pytest.MonkeyPatch.context() as patch:
        # Kernels that auto prefers, and that this machine may have.
        patch.setattr(registry, "KERNELS", {x: KERNELS[x] for x in ("flash-attn", "torch-flash", "reference")})
        strategy = create("zigzag")
        with pytest.warns(UserWarning, match="kernel 'flash-attn' is not used: it co"):
            out = strategy.attention(q, k, v, documents=documents)
    assert strategy.kernels()[0].name == "torch-flash"
    exact = create("zigzag", kernel="reference").attention(*(x.double() for x in (q, k, v)), documents=documents)
    assert (out.double() - exact).norm() / exact.norm() < 0.02
    fitting = create("zigzag", kernel="flash-attn")
    fitting.attention(*_inputs(128))
    assert fitting.kernels()[0].name == "flash-attn"


@pytest.mark.parametrize("name", GPU_KERNELS)
def test_memory_and_generators_are_as_before(name: str) -> None:
    _skip_without(name)
    case = proof.Case("causal", torch.bfloat16, 128, 128, 1)
    _timed_proof(KERNELS[name], case)  # a kernel keeps what it needs once, such as workspaces
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    gc.collect()  # of what earlier tests left
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert _timed_proof(KERNELS[name], case)[1] is None
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before <= 2**25
    assert torch.equal(torch.get_rng_state(), states[0]) and torch.equal(torch.cuda.get_rng_state(), states[1])


def test_a_capture_needs_a_known_verdict() -> None:
    q, k, v = _inputs(128)
    strategy = create("zigzag", kernel="torch-flash")
    warm = create("zigzag", kernel="torch-flash")
    stream = torch.cuda.Stream()
    with pytest.raises(Unsupported, match="is being captured"), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        strategy.attention(q, k, v)
    eager = warm.attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = strategy.attention(q, k, v)  # the verdict is known, this strategy's first call
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, eager)


class _WrongDk(TorchFlashKernel):
    name = "planted"

    def _backward(self, *args: Any) -> Any:
        dq, dk, dv = super()._backward(*args)
        return dq, dk * 1.1, dv


def _attend_with_wrong_rank(rank: int, folder: str, kernel: str) -> list[str]:
    os.environ["XDG_CACHE_HOME"] = f"{folder}/{rank}"
    planted: type[Kernel] = _WrongDk if rank == 1 else type("Right", (TorchFlashKernel,), {"name": "planted"})
    registry.KERNELS = {"planted": planted, **KERNELS}
    strategy = create("zigzag", kernel=kernel)
    q, k, v = (torch.randn(1, 256, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            strategy.attention(q, k, v)
        except Unsupported as error:
            return [str(error)]
    return [
        strategy.kernels()[0].name,
        *(str(warning.message) for warning in caught if "planted" in str(warning.message)),
    ]


@needs_two_gpus
def test_all_ranks_refuse_a_kernel_that_is_wrong_on_one(tmp_path: Path) -> None:
    (first, warning), (second, _) = run_gpu_ranks(2, _attend_with_wrong_rank, str(tmp_path), "auto")
    assert first == second != "planted" and "on rank 1 of the group" in warning and "dk is off by" in warning
    for refusal in run_gpu_ranks(2, _attend_with_wrong_rank, str(tmp_path / "named"), "planted"):
        assert "kernel 'planted' is not available: it computes a" in refusal[0]


def test_the_truth_is_the_reference() -> None:
    """On the GPU, the reference itself agrees with what proofs compare with."""
    reference = type("Checked", (ReferenceKernel,), {"production": True})
    for block in proof._BLOCKS:
        case = proof.Case(block, torch.float64, 64, 64, 1, softcap=30.0)
        assert proof.prove(reference, case, CUDA) is None
