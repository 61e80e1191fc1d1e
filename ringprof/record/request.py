"""What a recording is asked to do, as plain values that travel to the ranks as JSON."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import TypeVar

import msgspec

from ringprof.errors import MissingExtraError, UsageError
from ringprof.json_object import Params
from ringprof.run import Workload
from ringprof.validation import refuse_below_one

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
MIN_GPU_WARMUP = 3
"""The first iterations on a GPU set up communicators, allocator and kernels: fewer warm-ups would time that."""


_Value = TypeVar("_Value", bound=msgspec.Struct)


def need(*packages: str) -> None:
    """Raises `MissingExtraError` where one of these is not installed: before what imports them is imported."""
    for package in packages:
        if find_spec(package) is None:
            raise MissingExtraError(f"recording needs {package}: pip install 'ringprof[record]'")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One recording as the user asked for it; None stands for a default that depends on the machine."""

    workload: Workload
    strategy: str
    """A bundled strategy's name, or ``package.module:Class``."""
    params: Params = {}
    """The strategy's own parameters: text from the command line until `resolve` has typed them."""
    cp_sizes: tuple[int, ...] = ()
    """Ranks that attend a sequence in each step of an iteration; none: one step, with all of them."""
    kernel: str = "auto"
    hops: str = "auto"
    """What carries the hops within a host: ``nccl`` (gloo on CPU), ``copy``, the GPUs' copy engines, or ``auto``."""
    cuda_graph: bool = False
    """Capture an iteration in a CUDA graph, and time and profile its replays."""
    device: str = "auto"
    """``auto``, ``cuda`` or ``cpu``."""
    world: int | None = None
    """Ranks to start; None: all GPUs, 4 on CPU. Under torchrun or srun it must equal theirs."""
    ranks_per_host: int | None = None
    """Ranks that share a host, where the launcher's answer is not the one wanted."""
    warmup: int | None = None
    iters: int | None = None
    profile_iters: int = 1
    controls: bool = False
    """Time the blocks alone, the strategy without sending and without computing, too."""
    verify: bool = True
    output: str = "traces/run.json"
    """Where the newest run is named; every run's own folder lies beside it."""
    force: bool = False
    """Run even where the plan says that memory or time will not do."""
    time_limit: float | None = None
    """Seconds after which the whole command counts as hung; None: from the plan's estimate."""
    command: list[str] = []
    """The command line, for the record."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A request with every choice made, and the folders that its ranks work in."""

    request: Request
    name: str
    """The run's name, and its folder's."""
    staging: str
    """The folder that is written to; it takes the run's name when it is complete."""
    token: str
    """By which a rank knows that it sees that folder."""
    scratch: str | None
    """Where ranks that ringprof started keep their logs; None for ranks of another launcher."""
    created: str
    """UTC, ISO 8601."""
    time_limit: float
    """Seconds, for all of it."""

    def limit_of(self, phase: str | None) -> float | None:
        """As ranks of our own are watched: one limit, from the beginning."""
        return self.time_limit if phase is None else None


def check_numbers(request: Request) -> None:
    """Refuse sizes and counts that cannot be meant. Raises `UsageError`."""
    sizes = {
        name: getattr(request.workload, name) for name in ("batch", "seq", "heads", "kv_heads", "head_dim", "kv_length")
    }
    counts = {"world": request.world, "ranks-per-host": request.ranks_per_host, "iters": request.iters}
    named = {**sizes, **counts, "profile-iters": request.profile_iters}
    refuse_below_one({f"--{name.replace('_', '-')}": value for name, value in named.items()})
    if request.warmup is not None and request.warmup < 0:
        raise UsageError(f"--warmup must be at least 0, not {request.warmup}")
    if request.time_limit is not None and not request.time_limit > 0:
        raise UsageError(f"--time-limit must be above 0 seconds, not {request.time_limit}")


def to_json(value: msgspec.Struct) -> bytes:
    """As JSON, for `from_json`. msgspec's own encoder refuses the names of files that are not UTF-8."""
    return json.dumps(msgspec.to_builtins(value)).encode()


def from_json(data: bytes, kind: type[_Value]) -> _Value:
    """What `to_json` wrote."""
    return msgspec.convert(json.loads(data), kind)
