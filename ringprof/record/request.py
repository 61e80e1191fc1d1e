"""Request and task of a recording: plain values, sent to the ranks as JSON."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, TypeVar

import msgspec

from ringprof.common.json_object import Params
from ringprof.common.validation import refuse_below_one
from ringprof.errors import MissingExtraError, UsageError, install_command
from ringprof.record.run_folder import discard
from ringprof.run import Run, Workload, read_run

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
MIN_GPU_WARMUP = 3
"""Least warm-up iterations on a GPU. The first ones set up communicators, allocator and kernels, and are not timed."""


_Value = TypeVar("_Value", bound=msgspec.Struct)


def require_packages(*packages: str) -> None:
    """Check that these packages are installed, before modules that import them. Raises `MissingExtraError`."""
    for package in packages:
        if find_spec(package) is None:
            raise MissingExtraError(f"recording needs {package}: {install_command('record')}")


class RecordRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one recording, as the user gave them; None stands for a default that depends on the machine."""

    workload: Workload
    strategy: str
    """Name of a bundled strategy, or ``package.module:Class``."""
    params: Params = {}
    """Parameters of the strategy: text from the command line, until `resolve` converts them to their types."""
    cp_sizes: tuple[int, ...] = ()
    """Ranks per sequence in each step of an iteration (dynamic CP); empty: one step, with all ranks."""
    kernel: str = "auto"
    hops: str = "auto"
    """Intra-node transport of hops: ``nccl`` (gloo on CPU), ``copy`` (the GPUs' copy engines) or ``auto``."""
    cuda_graph: bool = False
    """Capture an iteration in a CUDA graph, and time and profile its replays."""
    device: str = "auto"
    """Device type: ``auto``, ``cuda`` or ``cpu``."""
    world: int | None = None
    """Number of ranks to start; None: all GPUs, 4 on CPU. Under torchrun or srun it must equal the launcher's."""
    ranks_per_host: int | None = None
    """Number of ranks that share a host, if it shall differ from the launcher's."""
    warmup: int | None = None
    iters: int | None = None
    profile_iters: int = 1
    controls: bool = False
    """Whether to time the baselines, too: kernels only, without communication, and without computation."""
    verify: bool = True
    output: str = "traces/run.json"
    """Path of the newest run's file; every run's own folder is beside it."""
    force: bool = False
    """Whether to run even if the estimate exceeds the available memory or the time."""
    time_limit: float | None = None
    """Seconds after which the whole command counts as hung; None: derived from the estimate."""
    command: list[str] = []
    """Command line, stored in the run."""


class RankTask(msgspec.Struct, frozen=True, kw_only=True):
    """Task of the ranks of a recording: a resolved request, and the folders that the ranks work in."""

    job: ClassVar[str] = "record"
    request: RecordRequest
    name: str
    """Name of the run and of its folder."""
    staging: str
    """Folder that the ranks write to. It is renamed to the run's name when it is complete."""
    token: str
    """Token by which a rank recognises that it sees the staging folder."""
    scratch: str | None
    """Folder of the logs of ranks that ringprof started; None for ranks of an external launcher."""
    created: str
    """Time of creation: UTC, ISO 8601."""
    time_limit: float
    """Time limit of the whole recording, in seconds."""

    def limit_of(self, phase: str | None) -> float | None:
        """Return the time limit in seconds for the phase None, before the first, and None for later ones.

        A recording has a single limit, which starts with the ranks.
        """
        return self.time_limit if phase is None else None

    def result(self) -> Run:
        """Read the run that rank 0 has published."""
        return read_run(self.request.output)

    def discard(self) -> None:
        """Remove the half-written run."""
        discard(Path(self.staging))


def check_numbers(request: RecordRequest) -> None:
    """Refuse sizes and counts that are out of range. Raises `UsageError`."""
    sizes = {
        name: getattr(request.workload, name) for name in ("batch", "seq", "heads", "kv_heads", "head_dim", "kv_length")
    }
    counts = {"world": request.world, "ranks-per-node": request.ranks_per_host, "iters": request.iters}
    numbers = {**sizes, **counts, "profile-iters": request.profile_iters}
    refuse_below_one({f"--{name.replace('_', '-')}": value for name, value in numbers.items()})
    if request.warmup is not None and request.warmup < 0:
        raise UsageError(f"--warmup must be at least 0, not {request.warmup}")
    if request.time_limit is not None and not request.time_limit > 0:
        raise UsageError(f"--time-limit must be above 0 seconds, not {request.time_limit}")


def to_json(value: msgspec.Struct) -> bytes:
    """Encode a struct as JSON, for `from_json`. msgspec's own encoder refuses file names that are not UTF-8."""
    return json.dumps(msgspec.to_builtins(value)).encode()


def from_json(data: bytes, kind: type[_Value]) -> _Value:
    """Decode a struct of type ``kind`` that `to_json` has encoded."""
    return msgspec.convert(json.loads(data), kind)
