"""Proof of kernels: the first use of a combination of features is compared with float64 on a small block.

Builds of one package differ: one compiled for heads of 128 alone may return garbage for heads of 64, without an error.
The block's inputs and its truth are computed on the CPU, the truth for the last kv head only; they take some
milliseconds. A verdict is kept for the process and in a file, so that a machine proves a build once. Its key holds
what the numbers depend on: device, driver, torch, and sizes and times of the files of the build and of this package.

All ranks of a group agree on the verdicts before anything is sent. FlexAttention compiles by batch and heads, so its
proof has those of the call. cuDNN builds plans by length, and flash-attn 4 compiles by kind of block: their proofs cost
more where the call itself needs fewer.
"""

from __future__ import annotations

import json
import os
import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import Unsupported
from ..masks.mask_blocks import AttnRectangle, MaskBlocks
from .kernel import NAMES, Kernel
from .reference import ReferenceKernel

SKIPPED_BY = "RINGPROF_SKIP_KERNEL_PROOF"
"""Environment variable that turns proofs off where it is 1."""
_MOST_FILE_BYTES = 2**18
"""Size up to which the file of verdicts grows before it begins again."""
_MOST_TOKENS = 34 * 8
"""Most queries and keys of `_BLOCKS`. No tensor of a proof is larger than 32 MiB."""
_TOLERANCES = {torch.bfloat16: 0.0234, torch.float16: 0.0029, torch.float32: 0.0029, torch.float64: 1e-9}
"""Allowed relative error: 3 eps of the 16-bit types; for float32 3 eps of TF32, which a user may allow."""
_CAUSAL, _ONE_SIDED = (-1, 0), (2, -1)
_BLOCKS: dict[str, tuple[int, int, tuple[tuple[int, ...], ...]]] = {
    "full": (9, 34, ()),
    "causal": (34, 34, ()),
    "documents": (13, 17, ((0, 5, 0, 7, -1, -1), (5, 12, 7, 17, -1, -1))),
    "causal documents": (13, 17, ((0, 5, 0, 5, *_CAUSAL), (5, 8, 5, 8, *_CAUSAL), (8, 12, 8, 17, -1, -1))),
    "window": (13, 17, ((0, 5, 0, 5, 2, 1), (5, 9, 5, 11, *_ONE_SIDED), (9, 13, 11, 17, -1, 1))),
    "causal window": (13, 17, ((0, 7, 0, 7, 2, 0), (7, 13, 7, 17, *_ONE_SIDED))),
}
"""Queries, keys and rectangles of each block that is proven: first and end of queries and keys, limits of the band.

In units of 8 tokens (4 where many heads share a kv head), so that blocks cross the kernels' tiles of 64 and 128. Plain
blocks have over 256 keys: with fewer, flash-attn 2 does not split keys of heads up to 64 among its thread blocks."""


class Case(NamedTuple):
    """One block of one combination of features."""

    block: str
    """Key of the kind of block: plain, or the rectangles that documents and windows lead to."""
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    group: int
    """Query heads per kv head."""
    softcap: float = 0.0
    deterministic: bool = False
    backward: bool = True
    shape: tuple[int, int] | None = None
    """Batch and kv heads of the call, for kernels that compile by them; None: 1 and 2."""

    def __str__(self) -> str:
        dtype = NAMES.get(self.dtype, str(self.dtype).removeprefix("torch."))
        parts = [f"{self.block} block", dtype, f"heads of {self.head_dim}"]
        parts += [f"{self.v_head_dim} for v"] if self.v_head_dim != self.head_dim else []
        parts += [f"{self.group} heads per kv head"] if self.group > 1 else []
        parts += [f"softcap {self.softcap:g}"] if self.softcap else []
        parts += ["deterministic"] if self.deterministic else []
        parts += [] if self.backward else ["forward only"]
        parts += [] if self.shape is None else [f"batch {self.shape[0]}, {self.shape[1]} kv heads"]
        return ", ".join(parts)


_Key = tuple[str, str, str]
_verdicts: dict[_Key, str | None] = {}
"""Errors, each the end of a sentence (None: right), by names of kernel, environment and case."""
_files_read: set[str] = set()
_warned: set[tuple[str, str]] = set()
_agreed: WeakKeyDictionary[Any, dict[Any, type[Kernel]]] = WeakKeyDictionary()
"""Kernels that all ranks of a group have agreed on, by what they were chosen for."""


def blocks_of(*, causal: bool, several_ranks: bool, windows: bool = False, documents: bool = False) -> list[str]:
    """Return the kinds of blocks that a call may have, as keys of `Case.block`."""
    prefix = "causal " if causal else ""
    blocks = ["causal"] * causal + ["full"] * (not causal or several_ranks)
    return blocks + [f"{prefix}documents"] * documents + [f"{prefix}window"] * windows


def choose_proven(
    choose: Callable[[Mapping[str, str]], type[Kernel]], settings: tuple[Any, ...], wanted: Case, blocks: Sequence[str],
    device: torch.device, group: Any = None, exchange: Callable[[Any], list[Any]] = lambda value: [value],
) -> type[Kernel]:  # fmt: skip
    """Return the first kernel that computes the ``blocks`` right on all ranks; warn once of each that does not.

    ``choose`` returns the kernel to try, given why others are refused, by name; ``settings`` are what its choice
    depends on beside ``wanted``; ``exchange`` gathers a value of every rank of ``group``. Collective the first time.
    Raises `Unsupported` on every rank where one has no kernel left, or where the ranks choose different ones.
    """
    agreed = {} if group is None else _agreed.setdefault(group, {})
    key = settings, wanted, tuple(blocks), device
    refused: dict[str, str] = {}
    while key not in agreed:
        chosen, failure = None, None
        try:
            chosen = choose(refused)
            problem = first_problem(chosen, wanted, blocks, device)
        except (Unsupported, torch.cuda.OutOfMemoryError) as error:
            chosen, problem, failure = None, str(error), error
        answers = exchange((None if chosen is None else chosen.name, problem))
        for rank, (name, text) in enumerate(answers):
            if name is None:
                try:
                    raise failure or Unsupported(f"rank {rank} of the group refused: {text}")
                finally:
                    # Else this frame and its callers live on: the error holds them, and they hold the error.
                    del failure
        assert chosen is not None
        names = dict.fromkeys(name for name, _ in answers)
        if len(names) > 1:
            raise Unsupported(
                f"the ranks choose different kernels, {', '.join(names)}: install the same packages everywhere, or name"
                " the kernel"
            )
        for rank, (_, text) in enumerate(answers):
            problem = problem or (text and f"{text} (on rank {rank} of the group)")
        if problem is None:
            agreed[key] = chosen
        else:
            refused[chosen.name] = f"{problem} ({SKIPPED_BY}=1 uses it all the same)"
    for name, problem in refused.items():
        if (name, problem) not in _warned:
            _warned.add((name, problem))
            warnings.warn(f"kernel {name!r} is not used: it {problem}; {agreed[key].name!r} is", stacklevel=2)
    return agreed[key]


def first_problem(kernel: type[Kernel], wanted: Case, blocks: Sequence[str], device: torch.device) -> str | None:
    """Return what is wrong with a kernel in the first block that it computes wrongly; None if it is right or exempt."""
    if not kernel.production or os.environ.get(SKIPPED_BY) == "1":
        return None
    cases = cases_for(kernel, wanted, blocks, device)
    return next((error for case in cases if (error := prove(kernel, case, device))), None)


def cases_for(kernel: type[Kernel], wanted: Case, blocks: Sequence[str], device: torch.device) -> list[Case]:
    """Return the cases to prove for ``wanted``: those that stand for all calls which the kernel computes alike."""
    shape, group, v_head_dim = wanted.shape, min(wanted.group, 8) if kernel.grouped_heads else 1, wanted.v_head_dim
    most = 2**25 // (_MOST_TOKENS * 4 * wanted.group * wanted.head_dim)
    if kernel.compiles_by_heads and device.type == "cuda" and shape is not None and 0 < shape[0] * shape[1] <= most:
        group = wanted.group
    else:
        shape = None
    if not kernel.takes_v_head_dim(wanted.head_dim, v_head_dim):
        v_head_dim = wanted.head_dim
    case = wanted._replace(group=group, v_head_dim=v_head_dim, shape=shape)
    # One call per document is a full or a causal block.
    return [case._replace(block=block) for block in blocks if kernel.varlen or "documents" not in block]


def prove(kernel: type[Kernel], case: Case, device: torch.device) -> str | None:
    """Return what is wrong with a kernel in a case: as known, or by a proof, whose verdict is kept.

    Raises `Unsupported` while a CUDA graph is captured, if there is no known verdict.
    """
    key = kernel.name, environment(kernel, device), str(case)
    if key not in _verdicts:
        _read_file()
    if key not in _verdicts:
        if _is_capturing(device):
            raise Unsupported(
                f"kernel {kernel.name!r} is used for the first time ({case}), and a CUDA graph is being captured: make"
                " one call like it before the capture, or run ringprof kernels --prove"
            )
        on_gpu = device.type == "cuda"
        with (
            torch.cuda.device(device if on_gpu else -1), torch.random.fork_rng([device] if on_gpu else []),
            torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False),
            _disable_current_modes(),
        ):  # fmt: skip
            error, raised = _error(kernel, case, device)
        _verdicts[key] = error
        if not raised:  # what a call raised may have passed by the next process
            _append_to_file(key)
    return _verdicts[key]


def known_verdicts(kernel: type[Kernel], device: torch.device) -> dict[str, str | None]:
    """Return what is known to be wrong with a kernel's present build (None: nothing), by case."""
    _read_file()
    names = kernel.name, environment(kernel, device)
    return {key[2]: error for key, error in _verdicts.items() if key[:2] == names}


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _error(kernel: type[Kernel], case: Case, device: torch.device) -> tuple[str | None, bool]:
    """Compute a case with a kernel and in float64. Return what is wrong, and whether a call raised it."""
    unit = 8 if case.group < 4 or case.block == "full" else 4
    queries, keys, rectangles = _BLOCKS[case.block]
    parts = [AttnRectangle(*(x * unit if x > 0 else x for x in numbers)) for numbers in rectangles]
    batch, kv_heads = case.shape or (1, 2)
    # Inputs of their own for each kernel and case: memory left unwritten may hold the results of the one before.
    generator = torch.Generator("cpu").manual_seed(crc32(f"{kernel.name}, {case}".encode()))
    sizes = (queries, case.group, case.head_dim), (keys, 1, case.head_dim), (keys, 1, case.v_head_dim)
    q, k, v, dout = (
        torch.randn(
            (batch, rows * unit, heads * kv_heads, size), generator=generator, dtype=torch.float32, device="cpu"
        ).to(case.dtype)
        for rows, heads, size in (*sizes, (queries, case.group, case.v_head_dim))
    )
    # The larger the scores, the more a softcap changes them; too large ones make a softmax of one key.
    scale = min(max(1.25, case.softcap / 8), 4.0) * case.head_dim**-0.5
    # Windows of one kind at a time, since FlexAttention compiles for the number of kinds in a call.
    kinds: list[MaskBlocks | None] = [
        MaskBlocks(tuple(part for part in parts if part.band == band), queries * unit, keys * unit)
        for band in dict.fromkeys(part.band for part in parts)
    ]
    (last_q, last_dout), (last_k, last_v) = (
        [x[-1:, :, -heads:].double() for x in tensors] for tensors, heads in (((q, dout), case.group), ((k, v), 1))
    )
    q, k, v, dout = (x.to(device) for x in (q, k, v, dout))
    allowed = _TOLERANCES.get(case.dtype, 3 * torch.finfo(case.dtype).eps)
    for mask in kinds or [None]:
        how: dict[str, Any] = {"scale": scale, "causal": case.block == "causal", "parts": mask}
        how["backward"] = case.backward
        try:
            results = _results(kernel(deterministic=case.deterministic, softcap=case.softcap), q, k, v, dout, **how)
            values = {name: value.to("cpu", torch.float64) for name, value in results.items()}
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as raised:
            return f"cannot compute a {case}: {' '.join(f'{type(raised).__name__}: {raised}'.split())[:200]}", True
        truth = _results(ReferenceKernel(softcap=case.softcap), last_q, last_k, last_v, last_dout, **how)
        for name, exact in truth.items():
            value = values[name][-1:]
            value = value[:, -case.group :] if name == "lse" else value[:, :, -exact.shape[2] :]
            if name == "lse":  # -inf in rows without keys
                value, exact = value.exp(), exact.exp()
            error = float((value - exact).norm() / exact.norm())
            if not error <= allowed:
                difference = f"{name} is off by {error:.2g} relative, allowed is {allowed:g}"
                return f"computes a {case} wrongly: {difference}", False
    return None, False


def _results(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, backward: bool, **how: Any
) -> dict[str, Tensor]:
    """Return output, LSE and gradients of one block, whose rows see further keys elsewhere."""
    out, lse = kernel.forward(q, k, v, **how)
    results = {"out": out, "lse": lse}
    if backward:
        out = out.to(q.dtype).contiguous()
        rows = lse.nan_to_num(neginf=0.0).add(0.3).contiguous()
        gradients = kernel.backward(dout, q, k, v, rows, out=out, **how)
        results.update(zip(("dq", "dk", "dv"), gradients, strict=True))
    return results


# --- what numbers depend on, and the file of verdicts ---------------------------------------------------------


@cache
def environment(kernel: type[Kernel], device: torch.device) -> str:
    """Describe what a kernel's numbers depend on: device, torch, and a hash of the driver's version and the build."""
    on_gpu = device.type == "cuda"
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    name = torch.cuda.get_device_properties(device).name if on_gpu else cpu
    return f"{name}, torch {torch.__version__}, build {_build_hash(kernel.packages, on_gpu)}"


@cache
def _build_hash(packages: tuple[str, ...], on_gpu: bool) -> str:
    """Return a hash of the names, sizes and times of the code of some packages and of this one, and of the driver."""
    digest = blake2b(digest_size=8)
    folders = [str(Path(__file__).parent)]
    for package in packages:
        with suppress(ImportError, ValueError):
            if spec := find_spec(package):
                folders += list(spec.submodule_search_locations or ()) or [spec.origin or ""]
    for folder in folders:
        files = [file for file in Path(folder).rglob("*") if file.suffix == ".py" or ".so" in file.suffixes]
        for file in sorted(files) or [Path(folder)]:
            with suppress(OSError):
                status = file.stat()
                digest.update(f"{file} {status.st_size} {status.st_mtime_ns}\n".encode())
    if on_gpu:
        with suppress(OSError):
            digest.update(Path("/proc/driver/nvidia/version").read_bytes())
    return digest.hexdigest()


def verdict_file() -> str | None:
    """Return the path of the file of verdicts; None where the environment names no folder for it."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.environ.get("HOME", ""), ".cache")
    return os.path.join(base, "ringprof", "kernel-proofs.jsonl") if os.path.isabs(base) else None


def _read_file(*, again: bool = False) -> None:
    """Add the verdicts of the file to those of this process; a failure outweighs a success. Skip damaged lines."""
    path = verdict_file()
    if path is None or (path in _files_read and not again):
        return
    _files_read.add(path)
    text = b""
    with suppress(OSError), open(path, "rb") as file:
        if os.fstat(file.fileno()).st_uid == os.getuid():  # another user could vouch for a wrong kernel
            text = file.read(_MOST_FILE_BYTES)
    for line in text.splitlines():
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            row = json.loads(line)
            key, error = (row["kernel"], row["environment"], row["case"]), row["error"]
            if all(isinstance(x, str) for x in key) and isinstance(error, str | None):
                _verdicts[key] = _verdicts.get(key) or error


def _append_to_file(key: _Key) -> None:
    """Append a verdict to the file, unless it is there. Without a file that can be written, each process proves anew.

    One write of one line, so that processes can append at once. The line begins with a newline: the one before may be
    cut off, where a disk was full.
    """
    error, path = _verdicts.pop(key), verdict_file()
    _read_file(again=True)
    if path is not None and key not in _verdicts:
        row = dict(zip(("kernel", "environment", "case", "error"), (*key, error), strict=True))
        with suppress(OSError):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            is_full = os.path.exists(path) and os.path.getsize(path) > _MOST_FILE_BYTES
            with open(path, "wb" if is_full else "ab", buffering=0) as file:
                file.write(f"\n{json.dumps(row)}\n".encode())
    _verdicts[key] = _verdicts.get(key) or error
