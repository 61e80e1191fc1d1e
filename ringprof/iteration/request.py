"""Request and task of a recording: plain values, sent to the ranks as JSON."""

from __future__ import annotations

import msgspec

from ringprof.common.json_object import Params
from ringprof.common.validation import refuse_below_one
from ringprof.errors import UsageError
from ringprof.workload.workload import Workload

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
MIN_GPU_WARMUP = 3
"""Least warm-up iterations on a GPU. The first ones set up communicators, allocator and kernels, and are not timed."""


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
