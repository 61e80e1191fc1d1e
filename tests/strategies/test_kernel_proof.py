"""Kernels that are planted wrong in one feature: each is refused there, on all ranks, and used everywhere else."""

from __future__ import annotations

import gc
import json
import os
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ringprof.strategies import Unsupported, create, create_recurrent
from ringprof.strategies.kernels import proof, registry
from ringprof.strategies.kernels.kernel import Kernel
from ringprof.strategies.kernels.reference import ReferenceKernel, masked_scores
from ringprof.strategies.kernels.registry import KERNELS
from ringprof.strategies.kernels.torch_kernels import CpuFlashKernel
from tests.strategies.ranks import refusal, run_ranks
from tests.tiers import tiered

CPU = torch.device("cpu")


class Planted(CpuFlashKernel):
    """A kernel that is right, counts its calls, and belongs to a package of its own."""

    name = "planted"
    packages: ClassVar[tuple[str, ...]] = ("planted_package",)
    proofs: ClassVar[list[str]] = []

    def _forward(self, q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        type(self).proofs.append(f"{q.shape[-1]}")
        return super()._forward(q, *args)


def planted(change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> type[Planted]:
    """Return a kernel that changes the output and LSE of a right one: ``change(q, out, lse)``."""

    class Changed(Planted):
        def _forward(self, q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
            return change(q, *super()._forward(q, *args))

    return Changed


# A build for heads of 128 alone.
GarbageFor64 = planted(lambda q, out, lse: (out.roll(1, 1) if q.shape[-1] == 64 else out, lse))
WrongLse = planted(lambda q, out, lse: (out, lse + 0.1))
WrongFp16 = planted(lambda q, out, lse: (out * float("nan") if q.dtype == torch.float16 else out, lse))


class WrongDk(Planted):
    def _backward(self, *args: Any) -> Any:
        dq, dk, dv = super()._backward(*args)
        return dq, dk * 1.1, dv


class WrongWindows(Planted):
    def _forward_band(self, q: Tensor, k: Tensor, v: Tensor, scale: float, part: Any) -> tuple[Tensor, Tensor]:
        return self._forward(q, k, v, scale, False)


class NoCausal(Planted):
    def _forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, *args: Any) -> Any:
        return super()._forward(q, k, v, scale, False, *args)


class Grouped(Planted):
    """A right kernel that takes fewer kv heads than heads."""

    grouped_heads = varlen = True

    def _repeated(self, x: Tensor, group: int) -> Tensor:
        return x.repeat_interleave(group, 2)

    def _summed(self, x: Tensor, group: int) -> Tensor:
        summed: Tensor = x.unflatten(2, (-1, group)).sum(3)
        return summed

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        group = q.shape[2] // k.shape[2]
        return super()._forward(q, self._repeated(k, group), self._repeated(v, group), *args)

    def _backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Any:
        group = q.shape[2] // k.shape[2]
        k, v = self._repeated(k, group), self._repeated(v, group)
        dq, dk, dv = super()._backward(dout, q, k, v, *args)
        return dq, self._summed(dk, group), self._summed(dv, group)


class WrongGroups(Grouped):
    """A kernel that takes the kv heads in turns for the query heads, not one after another."""

    def _repeated(self, x: Tensor, group: int) -> Tensor:
        return x.repeat(1, 1, group, 1)

    def _summed(self, x: Tensor, group: int) -> Tensor:
        summed: Tensor = x.unflatten(2, (group, -1)).sum(2)
        return summed


class NoSoftcap(ReferenceKernel):
    name, production = "planted", True

    def _scores(self, q: Tensor, k: Tensor, scale: float, mask: Tensor | None) -> tuple[Tensor, Tensor | float]:
        return masked_scores(torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * scale, mask)


class Raises(Planted):
    def _forward(self, q: Tensor, *args: Any) -> Any:
        raise RuntimeError("no image of this kernel\nfor the device")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Give each test no verdicts, and a folder of its own for them."""
    monkeypatch.delenv(proof.SKIPPED_BY, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Planted.proofs.clear()
    _forget()
    yield tmp_path / "cache" / "ringprof" / "kernel-proofs.jsonl"
    _forget()


def _forget() -> None:
    """Forget what this process knows, as a new one would."""
    for known in (proof._verdicts, proof._files_read, proof._warned):
        known.clear()
    proof.environment.cache_clear()
    proof._build_hash.cache_clear()


def _plant(monkeypatch: pytest.MonkeyPatch, kernel: type[Kernel]) -> None:
    """Make ``auto`` prefer a kernel to all others."""
    monkeypatch.setattr(registry, "KERNELS", {kernel.name: kernel, **KERNELS})


def _attend(
    kernel: str = "auto", head_dim: int = 64, dtype: torch.dtype = torch.float32, heads: int = 2, **options: Any
) -> str:
    """Make one call forward and backward; return the name of the kernel that computed it."""
    strategy = create("zigzag", kernel=kernel)
    q, k, v = (torch.randn(1, 32, heads, head_dim, dtype=dtype) for heads in (heads, 2, 2))
    strategy.attention(q.requires_grad_(), k, v, **options).sum().backward()
    (used,) = strategy.kernels()
    name: str = used.name
    return name


@pytest.mark.parametrize(
    ("kernel", "wrong", "right"),
    [
        (GarbageFor64, {"head_dim": 64}, {"head_dim": 128}),
        (WrongWindows, {"window_size": (3, 0)}, {}),
        (WrongWindows, {"window_size": (3, 2), "causal": False}, {"documents": [0, 9, 32]}),
        (WrongFp16, {"dtype": torch.float16}, {"dtype": torch.bfloat16}),
        (NoCausal, {}, {"causal": False}),
        (NoCausal, {"documents": [0, 9, 32]}, {"documents": [0, 9, 32], "causal": False}),
        (WrongGroups, {"heads": 4}, {"heads": 2}),
        (NoSoftcap, {"softcap": 30.0, "dtype": torch.bfloat16}, {}),
        (NoSoftcap, {"softcap": 2.0}, {}),
        (WrongDk, {}, None),
        (WrongLse, {}, None),
        (Raises, {}, None),
    ],
)
def test_a_wrong_kernel_is_refused_where_it_is_wrong(
    monkeypatch: pytest.MonkeyPatch, kernel: type[Kernel], wrong: dict[str, Any], right: dict[str, Any] | None
) -> None:
    monkeypatch.setattr(NoSoftcap, "grouped_heads", False)
    _plant(monkeypatch, kernel)
    if right is not None:
        # As good as cpu-flash, which takes no softcap.
        assert _attend(**right) == "planted"
    with pytest.warns(
        UserWarning, match=r"kernel 'planted' is not used: it (computes|cannot compute) a .* is$"
    ) as caught:
        assert _attend(**wrong) == ("flex" if "softcap" in wrong else "cpu-flash")
        _attend(**wrong)
    assert len(caught) == 1
    with pytest.raises(Unsupported, match=r"kernel 'planted' is not available: it (computes|cannot compute) a"):
        _attend("planted", **wrong)
    if right is not None:
        assert _attend("planted", **right) == "planted"


def test_results_that_a_kernel_leaves_unwritten_are_not_those_of_the_kernel_before() -> None:
    """Memory is used again: what a right kernel has computed may lie where another one does not write."""
    kept: list[Any] = []

    class Right(Planted):
        name = "right"

        def _forward(self, *args: Any) -> Any:
            kept.append(super()._forward(*args))
            return kept[-1]

    class Unwritten(Planted):
        name = "unwritten"

        def _forward(self, *args: Any) -> Any:
            return kept[-1]

    case = proof.Case("full", torch.float32, 64, 64, 1)
    assert proof.prove(Right, case, CPU) is None
    assert "out is off by" in str(proof.prove(Unwritten, case, CPU))


@pytest.mark.parametrize(("kernel", "name"), [(GarbageFor64, "out"), (WrongDk, "dk"), (WrongLse, "lse")])
def test_the_error_names_what_is_wrong_and_by_how_much(
    monkeypatch: pytest.MonkeyPatch, kernel: type[Kernel], name: str
) -> None:
    _plant(monkeypatch, kernel)
    with pytest.raises(Unsupported, match=rf"causal block, fp32, heads of 64 wrongly: {name} is off by ") as refusal:
        _attend("planted")
    error = float(str(refusal.value).split("off by ")[1].split()[0])
    # exp(0.1) - 1 for the LSE; two rows that have nothing in common for the output.
    assert {"dk": 0.0999, "lse": 0.1049, "out": 0.9}[name] < error < {"dk": 0.1001, "lse": 0.1101, "out": 2.0}[name]
    assert proof.SKIPPED_BY in str(refusal.value)


def test_a_wrong_backward_pass_does_not_matter_over_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    _plant(monkeypatch, WrongDk)
    strategy = create("ring-prefill", kernel="planted")
    q, k, v = torch.randn(3, 1, 16, 2, 64)
    out = strategy.attention(q, k, v)
    assert torch.allclose(out, create("ring-prefill", kernel="reference").attention(q, k, v), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("block", list(proof._BLOCKS))
def test_the_kernels_of_this_machine_are_right(block: str, dtype: torch.dtype) -> None:
    case = proof.Case(block, dtype, 80, 80, 1, deterministic=True)
    assert proof.prove(CpuFlashKernel, case, CPU) is None
    if dtype == torch.float16 and "causal" in block:
        assert proof.prove(KERNELS["flex"], case._replace(group=4, softcap=50.0), CPU) is None


def test_a_known_call_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = create("zigzag")
    q, k, v = torch.randn(3, 1, 32, 2, 64)
    strategy.attention(q, k, v)
    monkeypatch.setattr(proof, "prove", None)
    monkeypatch.setattr(type(strategy), "_proven_class", None)
    strategy.attention(q, k, v)
    strategy.attention(q[:, :16], k[:, :16], v[:, :16])


def test_the_reference_needs_no_proof(cache: Path) -> None:
    assert _attend("reference") == "reference" and not proof._verdicts and not cache.exists()


def test_proofs_can_be_turned_off(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    _plant(monkeypatch, GarbageFor64)
    monkeypatch.setenv(proof.SKIPPED_BY, "1")
    assert _attend() == "planted" and len(Planted.proofs) == 1 and not cache.exists()


# --- what a proof must leave as it was ------------------------------------------------------------------------


def test_random_generators_keep_their_states() -> None:
    class Draws(Planted):
        def _forward(self, q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
            torch.rand(3)
            return super()._forward(q, *args)

    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()  # type: ignore[index]
    assert proof.prove(Draws, proof.Case("full", torch.float32, 64, 64, 1), CPU) is None
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert numpy.random.get_state()[1].tolist() == before[2]  # type: ignore[index]


def test_modes_of_the_caller_do_not_reach_a_proof() -> None:
    seen = []

    class Looks(Planted):
        def _forward(self, q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), q.is_inference(),
                         torch.is_autocast_enabled("cpu"), torch.compiler.is_compiling()))  # fmt: skip
            return super()._forward(q, *args)

    def prove(head_dim: int) -> None:
        for kernel in (Looks, KERNELS["flex"]):
            case = proof.Case("full", torch.float32, head_dim, head_dim, 1)
            assert proof.prove(kernel, case, CPU) is None

    with torch.inference_mode():
        prove(8)
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        prove(16)
    with FlopCounterMode(display=False) as counter:
        prove(24)
    torch.set_default_dtype(torch.float64)
    try:
        prove(32)
    finally:
        torch.set_default_dtype(torch.float32)
    assert counter.get_total_flops() == 0 and len(seen) == 4 and not any(map(any, seen))


def test_the_first_use_may_be_in_a_compiled_function() -> None:
    strategy = create("zigzag")
    q, k, v = torch.randn(3, 1, 32, 2, 64)
    compiled = torch.compile(lambda q, k, v: 2 * strategy.attention(q, k, v), backend="eager")
    assert torch.allclose(compiled(q, k, v), 2 * strategy.attention(q, k, v)) and proof._verdicts


@tiered("group", [1, 2, 8, 64], [64])
@pytest.mark.parametrize("block", list(proof._BLOCKS))
def test_tensors_are_small_and_freed(monkeypatch: pytest.MonkeyPatch, group: int, block: str) -> None:
    largest, alive = 0, []

    class Watches(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for x in result if isinstance(result, tuple | list) else [result]:
                if isinstance(x, Tensor):
                    largest = max(largest, x.nbytes)
                    alive.append(weakref.ref(x))
            return result

    (case,) = proof.cases_for(Grouped, proof.Case("", torch.float32, 256, 256, group), [block], CPU)
    monkeypatch.setattr(proof, "_disable_current_modes", Watches)
    assert proof.prove(Grouped, case, CPU) is None
    assert 0 < largest <= 2**25 and not any(x() is not None for x in alive)


def test_a_capture_takes_a_known_verdict_or_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_is_capturing", lambda device: True)
    with pytest.raises(
        Unsupported, match=r"'cpu-flash' is used for the first time \(causal block, fp32.*before the cap"
    ):
        _attend()
    monkeypatch.undo()


def test_a_capture_takes_the_verdict_of_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    _plant(monkeypatch, GarbageFor64)
    with pytest.warns(UserWarning, match="not used"):
        _attend()
    _forget()
    monkeypatch.setattr(proof, "_is_capturing", lambda device: True)
    with pytest.warns(UserWarning, match="'planted' is not used"):
        assert _attend() == "cpu-flash"


def test_what_runs_out_of_memory_is_neither_right_nor_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hungry(Planted):
        def _forward(self, q: Tensor, *args: Any) -> Any:
            raise torch.cuda.OutOfMemoryError("out of memory")

    _plant(monkeypatch, Hungry)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        _attend()
    assert not proof._verdicts


def test_creating_proves_nothing(cache: Path) -> None:
    create("zigzag")
    assert not proof._verdicts and not proof._files_read and not cache.parent.exists()


# --- the file of verdicts ------------------------------------------------------------------------------------


CASE = proof.Case("full", torch.float32, 64, 64, 1)


def _is_proven_again(kernel: type[Planted] = Planted) -> bool:
    """Return whether a new process computes a block with the kernel to know whether it is right."""
    _forget()
    kernel.proofs.clear()
    assert proof.prove(kernel, CASE, CPU) is None
    return bool(kernel.proofs)


def test_a_machine_proves_a_build_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path) -> None:
    package = tmp_path / "planted_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    library = package / "planted.cpython-311.so"
    library.write_bytes(b"one build")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert _is_proven_again() and not _is_proven_again()
    library.write_bytes(b"another build")
    assert _is_proven_again() and not _is_proven_again()
    os.utime(library, ns=(1, 1))
    assert _is_proven_again() and not _is_proven_again()
    (package / "notes.txt").write_text("no code")
    assert not _is_proven_again()
    monkeypatch.setattr(torch, "__version__", "9.0")
    assert _is_proven_again()
    rows = [json.loads(line) for line in cache.read_text().split("\n\n")]
    assert len(rows) == 4 and {row["kernel"] for row in rows} == {"planted"} and rows[0]["case"] == str(CASE)


DAMAGE = {
    "binary": bytes(range(256)) * 9,
    "cut off": b'{"kernel": "planted", "environment": "x86',
    "other types": b'[1]\n7\nnull\n{"kernel": 1}\n{"kernel": [], "environment": {}, "case": 1, "error": null}\n',
    "nested": b"[" * 100_000,
    "too large": b"." * (proof._MOST_FILE_BYTES + 9),
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_a_damaged_file_costs_a_proof(cache: Path, damage: str) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_bytes(DAMAGE[damage])
    assert _is_proven_again() and not _is_proven_again()
    assert cache.stat().st_size <= proof._MOST_FILE_BYTES + 9


def test_a_file_that_cannot_be_written_costs_a_proof_per_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert _is_proven_again() and _is_proven_again()
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert proof.verdict_file() is None and _is_proven_again() and _is_proven_again()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    assert proof.verdict_file() is None and _is_proven_again() and _is_proven_again()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert proof.verdict_file() == str(tmp_path / ".cache" / "ringprof" / "kernel-proofs.jsonl")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cache.parent.mkdir(parents=True)
    cache.symlink_to("/dev/full")
    assert _is_proven_again() and _is_proven_again()
    cache.unlink()
    cache.mkdir()
    assert _is_proven_again() and _is_proven_again()
    cache.rmdir()
    cache.touch()

    def refuse(path: Any, mode: str = "r", **how: Any) -> Any:
        if mode != "rb":
            raise PermissionError(13, "Read-only file system", path)
        return open(path, mode, **how)

    monkeypatch.setattr(proof, "open", refuse, raising=False)
    assert _is_proven_again() and _is_proven_again()


def test_the_file_of_another_user_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _is_proven_again() and not _is_proven_again()
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    assert _is_proven_again() and _is_proven_again()


def test_what_a_kernel_raises_is_tried_again_by_the_next_process(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    assert proof.prove(Raises, CASE, CPU) == (
        "cannot compute a full block, fp32, heads of 64: RuntimeError: no image of this kernel for the device"
    )
    assert not cache.exists() and len(proof._verdicts) == 1


def test_a_failure_outweighs_a_success(cache: Path) -> None:
    assert _is_proven_again()
    row = json.loads(cache.read_text())
    with cache.open("a") as file:
        file.write(f"\n{json.dumps({**row, 'error': 'computes it wrongly'})}\n{json.dumps(row)}\n")
    _forget()
    assert proof.prove(Planted, CASE, CPU) == "computes it wrongly"


# --- ranks ---------------------------------------------------------------------------------------------------


def _prove_many(rank: int, folder: str) -> int:
    os.environ["XDG_CACHE_HOME"] = folder
    _forget()
    for head_dim in range(8, 168, 8):
        proof.prove(CpuFlashKernel, CASE._replace(head_dim=head_dim, v_head_dim=head_dim), CPU)
    return len(proof._verdicts)


def _attend_with_wrong_rank(rank: int, kernel: str, folder: str, warm: bool) -> list[str]:
    """Make a call on several ranks, on one of which the planted kernel is wrong."""
    os.environ["XDG_CACHE_HOME"] = f"{folder}/{rank}"
    _forget()
    planted = WrongDk if rank == 1 else Planted
    registry.KERNELS = {"planted": planted, **KERNELS}
    results = []
    if warm:  # this rank knows already, the others do not
        proof.first_problem(planted, CASE, ["full"], CPU)
    import warnings

    q, k, v = torch.randn(3, 1, 32, 2, 64)
    for _ in range(2):
        strategy = create("zigzag", kernel=kernel)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                strategy.attention(q, k, v)
                results.append(strategy.kernels()[0].name)
            except Unsupported as error:
                results.append(str(error))
        results += [str(warning.message) for warning in caught]
    return results


@pytest.mark.processes
@pytest.mark.parametrize("warm", [False, True])
def test_all_ranks_refuse_a_kernel_that_is_wrong_on_one(tmp_path: Path, warm: bool) -> None:
    for rank, (first, warning, second) in enumerate(run_ranks(3, _attend_with_wrong_rank, "auto", str(tmp_path), warm)):
        assert first == second == "cpu-flash"
        assert "kernel 'planted' is not used: it computes a causal block, fp32, heads of 64 wrongly: dk is" in warning
        assert ("on rank 1 of the group" in warning) == (rank != 1)
    for results in run_ranks(3, _attend_with_wrong_rank, "planted", str(tmp_path / "named"), warm):
        assert len(results) == 2 and all("kernel 'planted' is not available: it comp" in text for text in results)


def _attend_with_other_packages(rank: int, kernel: str) -> str:
    if rank == 1:
        registry.KERNELS = {"planted": Planted, **KERNELS}
    return refusal(create("zigzag", kernel=kernel).attention, *torch.randn(3, 1, 32, 2, 64))


@pytest.mark.processes
def test_ranks_with_different_packages_refuse_alike() -> None:
    refusals = run_ranks(2, _attend_with_other_packages, "auto")
    assert all("different kernels, cpu-flash, planted: install" in text for text in refusals)


@pytest.mark.processes
def test_processes_write_their_verdicts_at_once(tmp_path: Path) -> None:
    assert run_ranks(4, _prove_many, str(tmp_path)) == [20] * 4
    lines = (tmp_path / "ringprof" / "kernel-proofs.jsonl").read_text().split("\n")
    rows = [json.loads(line) for line in lines if line]
    assert len({row["case"] for row in rows}) == 20
    assert all(row["error"] is None for row in rows)


def test_a_refusal_does_not_keep_the_frames_that_it_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame that lives on keeps its checkpoint, whose hooks for saved tensors then hold those of later steps."""
    _plant(monkeypatch, GarbageFor64)
    strategy, right = create("zigzag", kernel="planted"), create("zigzag", kernel="reference")
    q, k, v = (torch.randn(1, 32, 2, 64, requires_grad=True) for _ in range(3))
    refusals: list[Callable[[], Any]] = [
        lambda: strategy.attention(q, k, v),
        lambda: right.attention(q, k, v[:, :1]),
        lambda: right.attention(q, k, v, documents=[0, 20]),
        lambda: create("zigzag", kernel="nothing").attention(q, k, v),
        lambda: create("nothing"),
        lambda: create_recurrent("nothing"),
    ]

    def frame_of(refused: Callable[[], Any]) -> weakref.ref[Any]:
        local = torch.ones(1)
        try:
            checkpoint(lambda _: refused(), local.requires_grad_(), use_reentrant=False)
        except (ValueError, LookupError):
            return weakref.ref(local)
        raise AssertionError("not refused")

    checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=False)  # the first one imports
    gc.collect()
    gc.disable()
    try:
        assert [number for number, refused in enumerate(refusals) if frame_of(refused)() is not None] == []
    finally:
        gc.enable()
