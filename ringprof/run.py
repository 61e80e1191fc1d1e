"""The `Run`, which holds a recording's request, hardware and measurements, and its file ``run.json``.

``run.json`` holds measurements only. Derived figures (rates, slow-downs, efficiencies) are computed when the file is
read. Times are integer nanoseconds, sizes are bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec

from ringprof.common.decoding import decode_json, refuse_deep
from ringprof.common.files import leading_out, read_whole, write_atomically
from ringprof.common.json_object import Params
from ringprof.common.limits import Limits
from ringprof.errors import RunFormatError
from ringprof.workload.workload import _SHARE, MOST_RANKS, Count, Nanoseconds, Size, Workload

_SCHEMA = "ringprof.run/1"

_WHAT = "a ringprof run"


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """Placement of the ranks on hosts and devices."""

    world_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
    hosts: list[str]
    """Host name of each rank."""
    ranks: list[Count] | None = None
    """Global rank of each rank, as used in the traces, if `capture` recorded a process group; None: 0, 1, ..."""
    local_ranks: list[Count]
    """Local rank of each rank on its host."""
    ranks_per_host: Size
    """Number of ranks per host that the strategy used (from the options or the launcher)."""
    device_type: str
    """``cuda`` or ``cpu``."""
    backend: str
    """``nccl`` or ``gloo``."""


class StrategyUsed(msgspec.Struct, frozen=True, kw_only=True):
    """The strategy of a run and all its parameters, including defaults."""

    name: str
    target: str
    """Class that ran, as ``package.module:Class``."""
    params: Params
    layout: str | None = None
    hops: str = "nccl"
    """Intra-node transport of the hops: ``nccl`` (gloo on CPU) or ``copy`` (copy engines)."""
    cuda_graph: bool = False
    """Whether an iteration was captured in a CUDA graph and replayed."""

    def __post_init__(self) -> None:
        refuse_deep(self.params)


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Hardware, driver, versions, and environment variables that change communication."""

    devices: list[str]
    """Device name of each rank."""
    driver: str | None = None
    versions: dict[str, str]
    """Versions of ``ringprof``, ``python``, ``torch``, and if present ``cuda``, ``nccl``, ``cudnn``, ``flash_attn``."""
    variables: dict[str, str]


class TensorError(msgspec.Struct, frozen=True, kw_only=True):
    """Error of one tensor against the float64 reference, over all ranks."""

    max_abs: float
    """Largest absolute error of any element."""
    rms: float
    """Root-mean-square error relative to the root mean square of the reference."""
    kernel_rms: float
    """Relative root-mean-square error of one call of the same kernel on one device over the whole sequence."""
    allowed_rms: float
    """Tolerance for ``rms``."""
    rank: Count
    """Rank with the largest relative error."""


class TimedVerification(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the check after timing: samples of the last timed iteration against dense attention."""

    seq: Count
    places: Count
    """Number of query rows of ``out`` and ``dq``, and of keys of ``dk`` and ``dv``, that each rank compared; of a
    recurrence, the tokens of each rank."""
    kv_head: Count
    """Index of the kv head whose keys were compared; query rows were compared for all heads. Of a recurrence, the head
    of keys that was compared, with the heads of values that read it."""
    same_output: bool
    """Whether the output is bitwise equal to that of the first iteration at this length."""
    errors: dict[str, TensorError]
    """Errors over the compared rows and keys, by tensor: ``out`` and, with backward, ``dq``, ``dk``, ``dv``."""
    took_ns: Nanoseconds
    """Duration of this check on rank 0, in nanoseconds."""


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the check before timing: output and gradients against a dense float64 reference."""

    passed: bool
    seq: Count
    errors: dict[str, TensorError]
    """Errors by tensor: ``out`` and, with backward, ``dq``, ``dk``, ``dv``; of a recurrence ``out``, ``final_state``,
    and the gradients of its inputs and of ``initial_state``."""
    timed: TimedVerification | None = None
    """Result of the check after timing; None in runs recorded before it existed."""


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Wall time of every iteration on every rank, measured without the profiler."""

    warmup: Count
    """Number of untimed iterations before."""
    iterations_ns: list[list[Nanoseconds]]
    """Times in nanoseconds, by rank and iteration."""
    steps_ns: list[list[Nanoseconds]] | None = None
    """Dynamic context parallelism: median time of each step over the iterations, by rank and step."""

    def median_ns(self) -> float | None:
        """Return the time of the run: the median of the slowest rank's times; None if nothing was timed."""
        return slowest_median(self.iterations_ns)


def slowest(iterations_ns: Sequence[Sequence[int]]) -> list[int]:
    """Return the time of the slowest rank for every iteration that all ranks timed."""
    return [max(times) for times in zip(*iterations_ns, strict=False) if max(times) > 0]


def slowest_median(iterations_ns: Sequence[Sequence[int]]) -> float | None:
    """Return the median over iterations of the slowest rank's time; None if there is none."""
    times = slowest(iterations_ns)
    return float(median(times)) if times else None


class DeviceState(msgspec.Struct, frozen=True, kw_only=True):
    """Telemetry of one rank's GPU during the timed iterations; a field is None if the driver does not report it."""

    looks: Count
    """Number of samples."""
    sm_clock_mhz: Count | None = None
    """Median SM clock in MHz."""
    least_sm_clock_mhz: Count | None = None
    """Lowest sample of the SM clock in MHz."""
    rated_sm_clock_mhz: Count | None = None
    """Maximum SM clock of the GPU in MHz."""
    power_w: float | None = None
    """Median power in watts."""
    highest_power_w: float | None = None
    """Highest sample of the power in watts; None in runs recorded before this field existed."""
    power_limit_w: float | None = None
    """Power limit in watts."""
    instant_power: bool = False
    """Whether power samples are instantaneous. If False, they come from ``nvmlDeviceGetPowerUsage``: on Ampere GPUs
    except GA100, and on newer GPUs, the mean of the last second."""
    hottest_celsius: int | None = None
    """Highest sample of the temperature in degrees Celsius."""
    limit_celsius: int | None = None
    """Maximum operating temperature in degrees Celsius, above which the driver lowers the clock."""
    held_back: dict[str, float] = {}
    """Share of samples, 0..1, by the reason for which the driver limits the clock, such as ``power cap``. Only the
    clocks show by how much it was lowered."""


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """Active port of a network adapter, from ``/sys/class/infiniband``."""

    name: str
    """Adapter and port, such as ``mlx5_0:1``."""
    gbits: float | None = None
    """Link rate in Gbit/s."""
    layer: str | None = None
    """Link layer: ``InfiniBand`` or ``Ethernet``."""


class DeviceLinks(msgspec.Struct, frozen=True, kw_only=True):
    """Interconnects of one rank's GPU and host; a field is None if it is unknown."""

    nvlinks: dict[str, int] | None = None
    """Number of active NVLinks by their remote end: ``switch``, the PCI address of a GPU, or ``unknown``."""
    adapters: list[Adapter] | None = None
    """Network adapters of the host; reported by the first rank of the host only."""


class Baselines(msgspec.Struct, frozen=True, kw_only=True):
    """Times of ordinary iterations and of three baselines, interleaved after `Timings`, without the profiler.

    Times are in nanoseconds, by rank and iteration.
    """

    warmup: Count
    """Number of untimed iterations before each baseline."""
    rounds: Count
    """Number of rounds; each round times all kinds of iterations in one of several orders."""
    ordinary_ns: list[list[Nanoseconds]]
    """Times of ordinary iterations."""
    solo_ns: list[list[Nanoseconds]]
    """Times of the kernel-only baseline: the same kernel calls back to back on all ranks at once, without merging and
    communication; of a recurrence, the kernel over each rank's tokens as if they were a whole sequence."""
    compute_only_ns: list[list[Nanoseconds]] | None = None
    """Times of the strategy on a communicator that sends nothing; None with a single rank."""
    communication_only_ns: list[list[Nanoseconds]] | None = None
    """Times of the strategy with a kernel that computes nothing; None with a single rank."""
    solo_flops: list[Count]
    """FLOPs of one kernel-only iteration of each rank, from exact mask areas."""


class Profiled(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the profiled iterations, measured with the clock of `Timings`."""

    iterations_ns: list[list[Nanoseconds]]
    """Times in nanoseconds, by rank and iteration."""


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """Communication of one rank in one iteration over one ring or group."""

    channel: str
    """Name of the channel, such as ``kv``, ``dkv``, ``read``, ``dq``."""
    phase: str
    """Pass: ``forward`` or ``backward``."""
    operation: str
    """Operation: ``send_recv``, ``all_to_all``, ``all_gather`` or ``reduce_scatter``."""
    link: str
    """Link class: ``same_host`` or ``other_host``."""
    count: Count
    """Number of hops, or of collective calls."""
    sent_bytes: Count
    to: Count | None = None
    """Rank that receives the hops; None for collectives, and in runs recorded before this field existed."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Work of one rank in one iteration, counted by the kernel and the communicator at run time."""

    block_flops: Count | None
    """FLOPs of its attention blocks, forward and backward, from exact mask areas, or of its recurrence; None if the
    strategy uses kernels that do not count, such as those of third-party code."""
    block_calls: dict[str, Count]
    """Number of blocks computed, by ``forward`` and ``backward``."""
    sent: list[Sent] | None
    """Communication by channel; None if the strategy does not send through ringprof's communicator."""


class RankTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Location of one rank's trace."""

    rank: Count
    path: str
    """Path relative to the ``run.json`` that names it, with forward slashes."""
    reduced: str | None = None
    """Path of the reduced trace (`ringprof.trace.reduced`), relative to the ``run.json``; None if there is none."""
    size_bytes: Count | None = None
    """Size of the file at ``path`` when it was reduced; another size today means that the trace was replaced."""


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """Basis of a predicted run (`ringprof.prediction`)."""

    machine: str
    """Name of the calibration."""
    evidence: str
    """Weakest origin among its figures: ``measured``, ``published`` or ``assumed``."""
    simulated_ranks: Count
    """Number of ranks that were simulated."""
    p10_ns: Nanoseconds
    """Lower end of the 80 % interval of the slowest rank's time. The three quantiles are also the run's iterations."""
    p50_ns: Nanoseconds
    """Median of the slowest rank's time."""
    p90_ns: Nanoseconds
    """Upper end of the 80 % interval of the slowest rank's time."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One recording (schema ``ringprof.run/1``)."""

    schema: str = _SCHEMA
    name: str
    """Name of the run and of its folder."""
    created: str
    """Time of the recording: UTC, ISO 8601."""
    command: list[str]
    workload: Workload | None
    """Recorded workload; None if `capture` got none."""
    workload_ranks: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)] | None = None
    """Number of ranks that share the workload: the size of the context-parallel group. None: all ranks of the run."""
    topology: Topology
    strategy: StrategyUsed | None
    kernel: str | None
    environment: Environment
    verification: Verification | None = None
    timings: Timings | None = None
    controls: Baselines | None = None
    """Times of the baselines; None if they were not requested."""
    profiled: Profiled | None = None
    peak_memory_bytes: list[Count] | None = None
    """Peak memory of each rank during the timed iterations: allocated on its GPU, or resident (including libraries) on
    CPU."""
    device_states: list[DeviceState | None] | None = None
    """GPU telemetry of each rank; None if no GPU reported any, and in runs recorded before this field existed."""
    device_links: list[DeviceLinks | None] | None = None
    """Interconnects of each rank; None if none are known, and in runs recorded before this field existed."""
    work: list[Work] | None = None
    """Counted work of each rank."""
    traces: list[RankTrace]
    predicted: Predicted | None = None
    """Basis of a predicted run; None for a recorded run."""

    def tflops(self, time_ns: float | None) -> float | None:
        """Return the TFLOP/s per device of an iteration of ``time_ns``, from the model FLOPs; None if unknown."""
        if self.workload is None or not time_ns:
            return None
        return self.workload.model_flops() / self.sharing_ranks / time_ns / 1e3

    @property
    def captured(self) -> bool:
        """Whether `capture` recorded the run: a block of a user's program, timed only under the profiler."""
        return self.timings is None and self.profiled is not None

    @property
    def sharing_ranks(self) -> int:
        """Number of ranks that share one workload; with data parallelism, every such group has its own workload."""
        return self.workload_ranks or self.topology.world_size

    def needed_flops(self) -> int | None:
        """Return the attention FLOPs that the workload needs over all ranks of the run, from exact mask areas."""
        if self.workload is None:
            return None
        return self.workload.exact_flops() * self.topology.world_size // self.sharing_ranks

    def ranks(self) -> Sequence[int]:
        """Return the global rank of each rank, as used in its trace."""
        return self.topology.ranks or range(self.topology.world_size)

    def work_of(self, rank: int) -> Work | None:
        """Return the work of the given global rank in one iteration; None if it was not counted."""
        return dict(zip(self.ranks(), self.work or (), strict=False)).get(rank)

    def block_flops(self) -> dict[int, int] | None:
        """Return the FLOPs of the attention blocks of each rank in one iteration; None if they were not counted."""
        works = zip(self.ranks(), self.work or (), strict=False)
        counted = {rank: work.block_flops for rank, work in works if work.block_flops is not None}
        return counted if len(counted) == self.topology.world_size else None


def read_run(path: str | os.PathLike[str], limits: Limits | None = None) -> Run:
    """Read a ``run.json``.

    Raises `RunFormatError` if the file is not a run, was written by a newer ringprof, is inconsistent, or names a trace
    outside its own folder.
    """
    name = os.fspath(path)
    return parse_run(read_whole(name, limits, _SHARE), name)


def parse_run(data: bytes, path: str | os.PathLike[str]) -> Run:
    """Decode the text of a ``run.json``, which was read from ``path``. Raises `RunFormatError`."""
    file = os.fspath(path)
    schema = decode_json(data, _SchemaOnly, file, _WHAT, RunFormatError).schema
    if schema != _SCHEMA:
        raise RunFormatError(f"{file}: schema {schema!r} is not {_SCHEMA!r}: update ringprof, or record again")
    run = decode_json(data, Run, file, _WHAT, RunFormatError)
    named = (path for trace in run.traces for path in (trace.path, trace.reduced) if path is not None)
    for relative, reason in leading_out(file, named):
        raise RunFormatError(f"{file}: trace path {relative!r} {reason}")
    for problem in _contradictions(run):
        raise RunFormatError(f"{file}: not a ringprof run: {problem}")
    return run


def _contradictions(run: Run) -> Iterator[str]:
    """Yield a sentence for each inconsistency of a run; reports assume that there are none."""
    size = run.topology.world_size
    by_rank: dict[str, Sequence[object] | None] = {
        "topology.hosts": run.topology.hosts,
        "topology.ranks": run.topology.ranks,
        "topology.local_ranks": run.topology.local_ranks,
        "peak_memory_bytes": run.peak_memory_bytes,
        "device_states": run.device_states,
        "device_links": run.device_links,
        "work": run.work,
    }
    times = {"timings": run.timings, "profiled": run.profiled, "controls": run.controls}
    for part, recorded in times.items():
        named = msgspec.structs.asdict(recorded) if recorded else {}
        by_rank |= {f"{part}.{name}": values for name, values in named.items() if name.endswith(("_ns", "_flops"))}
    for name, values in by_rank.items():
        if values is not None and len(values) != size:
            yield f"{name} is of {len(values)} ranks, the run of {size}"
        if name.endswith("_ns") and len({len(row) for row in values or () if isinstance(row, list)}) > 1:
            yield f"{name} holds more iterations of some ranks than of others"
    ranks = [trace.rank for trace in run.traces]
    if len(set(ranks)) < len(ranks) or not set(ranks) <= set(run.ranks()):
        yield f"its traces are not one each of {size} ranks"
    if max(run.topology.ranks or [0]) >= MOST_RANKS:
        yield "its ranks have numbers that no world has"
    if len({trace.path for trace in run.traces}) < len(ranks):
        yield "it names one trace for several ranks"
    if run.verification and not run.verification.errors:
        yield "its verification compared nothing"


class _SchemaOnly(msgspec.Struct):
    schema: str = ""


def write_run(run: Run, path: str | os.PathLike[str]) -> None:
    """Write a ``run.json`` atomically: an incomplete file never exists."""
    try:
        text = msgspec.json.encode(run)
    except UnicodeEncodeError:
        # A command line or an environment variable that is not valid text.
        text = json.dumps(msgspec.to_builtins(run), ensure_ascii=False).encode(errors="replace")
    write_atomically(Path(path), msgspec.json.format(text, indent=1) + b"\n")


def relocated(run: Run, folder: str) -> Run:
    """Return the run for a ``run.json`` in the folder above its own: trace paths get the prefix ``folder/``."""
    traces = [
        msgspec.structs.replace(
            trace, path=f"{folder}/{trace.path}", reduced=f"{folder}/{trace.reduced}" if trace.reduced else None
        )
        for trace in run.traces
    ]
    return msgspec.structs.replace(run, traces=traces)
