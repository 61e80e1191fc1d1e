"""The Run: what a recording was asked to do, on what, and what was measured; and its store.

``run.json`` holds measurements only. What follows from them (rates, slow-downs, efficiencies) is
computed when the file is read. Times are integer nanoseconds, sizes bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

import msgspec

from ringprof.decoding import decode_json, refuse_deep
from ringprof.errors import RunFormatError
from ringprof.files import leading_out, read_whole, write_atomically
from ringprof.json_object import Params
from ringprof.limits import Limits
from ringprof.mask import NO_LIMIT, Mask

_SCHEMA = "ringprof.run/1"

_WHAT = "a ringprof run"
_SHARE = 32
"""A ``run.json`` may be as large as one part in so many of the memory for reading: made of empty lists, one needs 20
times its size. Of 1 GiB that is 32 MiB; a run of 10,000 ranks has 25."""


MOST_RANKS = 1 << 20
"""No run has more: a larger number in a file is damage, and would only fill memory."""

Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
"""Checked when a file is decoded, as the next: a run may come from a stranger."""
Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


Phase = Literal["training", "prefill", "decode"]


class LayerAround(msgspec.Struct, frozen=True, kw_only=True):
    """The rest of a layer, whose hidden size is heads · head_dim."""

    parallel: Literal["ddp", "fsdp2"]
    """How the parameters' gradients come together, over all ranks."""
    mlp_size: Size
    """Between the projections of the gated MLP."""
    checkpoint: bool = False
    """Whether the backward pass computes each layer again."""

    def __str__(self) -> str:
        recomputed = ", computed again in the backward pass" if self.checkpoint else ""
        return f"whole layer: MLP of {self.mlp_size}, {self.parallel.upper()}{recomputed}"


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """One attention problem, shared by the ranks of one context-parallel group (`Run.workload_ranks`)."""

    batch: Size = 1
    seq: Size
    """Global sequence length in tokens."""
    heads: Size
    kv_heads: Size
    head_dim: Size
    causal: bool = True
    dtype: str = "bf16"
    """``bf16``, ``fp16`` or ``fp32``."""
    backward: bool = True
    """Whether an iteration is forward and backward, or forward only."""
    layers: Size = 1
    """Attention layers that a captured step goes through."""
    steps: Size = 1
    """Steps in a captured block."""
    documents: tuple[Size, ...] | None = None
    """Lengths of the documents that the sequence packs, in their order; None: one."""
    window: Size | None = None
    """Keys that a query sees before it, its own counted, and without a causal mask as many after it; None: all."""
    prefix: Size | None = None
    """First tokens of each document, seen beside the window; without one by each other, too (prefix LM); None: none."""
    sequences: tuple[Size, ...] | None = None
    """Of dynamic context parallelism: how many sequences ``seq`` tokens are in each step of an iteration, each on as
    many ranks as all others; None: one step, of one sequence."""
    phase: Phase = "training"
    kv_length: Size | None = None
    """In inference, the keys of each sequence: ``seq`` tokens are new, the last of these, and the others are cached."""
    layer: LayerAround | None = None
    """What stands around the attention, as many times as there are ``layers``; None: nothing."""

    v_head_dim: Size | None = None
    """Size of v's heads where it is smaller than that of q and k (MLA)."""
    softcap: Annotated[float, msgspec.Meta(gt=0, le=1e9)] | None = None
    """Scores s become softcap · tanh(s / softcap); None: they stay."""
    sinks: Literal["learned"] | None = None
    """Whether a logit a head takes part in the softmax, and gets a gradient."""

    def __post_init__(self) -> None:
        self._check_phase()
        if self.v_head_dim is not None and self.v_head_dim > self.head_dim:
            raise ValueError(f"heads of v are at most as large as those of q and k: {self.v_head_dim}, {self.head_dim}")
        if self.sequences is not None and any(self.seq % count for count in self.sequences):
            raise ValueError(f"{self.seq} tokens are no even sequences, {self.sequences} of them")
        if self.prefix is not None and self.window is None and self.causal:
            raise ValueError(
                f"a prefix of {self.prefix} tokens goes with a window, or without a causal mask (prefix LM)"
            )
        if self.documents is not None and sum(self.documents) != self.seq:
            raise ValueError(f"the documents are {sum(self.documents)} tokens together, the sequence has {self.seq}")

    def _check_phase(self) -> None:
        if (self.phase == "training") != (self.kv_length is None):
            raise ValueError(f"phase {self.phase} and kv_length {self.kv_length}: inference has both, training neither")
        if self.kv_length is None:
            return
        if self.kv_length < self.seq:
            raise ValueError(f"kv_length {self.kv_length} holds the {self.seq} new tokens, too")
        if self.backward or self.documents is not None:
            raise ValueError(f"{self.phase} is forward only, over one document")

    def mask(self) -> Mask:
        """Which keys a query sees; in inference, those of the whole sequence, whose last tokens alone have queries."""
        cumulative = None if self.documents is None else [0, *accumulate(self.documents)]
        side = NO_LIMIT if self.window is None else self.window - 1
        after = 0 if self.window is None and self.prefix else side
        return Mask.of(cumulative, (side, after), causal=self.causal, prefix=self.prefix or 0)

    def step(self, count: int) -> Workload:
        """What one group of ranks has to do in a step with so many sequences."""
        return msgspec.structs.replace(self, seq=self.seq // count, sequences=None)

    def at(self, seq: int, kv_length: int | None = None) -> Workload:
        """The same over another number of tokens, and of keys: documents, window and prefix shrink or grow alike."""
        scaled = self.mask().scaled(self.kv_length or self.seq, kv_length or seq)
        documents = None if scaled.documents is None else tuple(end - first for first, end in scaled.spans(seq))
        window = None if self.window is None else scaled.left + 1
        prefix = scaled.prefix or None
        return msgspec.structs.replace(
            self, seq=seq, kv_length=kv_length, documents=documents, window=window, prefix=prefix
        )

    def model_flops(self) -> int:
        """FLOPs of one iteration over all ranks: 4·B·S²·H·D forward, half when causal; backward 2.5 times.

        Where heads of v have another size E, forward has 2·(D + E) in place of 4·D, and backward 2·(3·D + 2·E) of 10·D.
        S² is the sum over the documents of each one's; with a window, and in inference, the exact area stands in its
        place. Of a captured block, of all its steps and layers. Of whole layers with their matrix products, too.
        """
        if self.sequences is not None:
            return sum(count * self.step(count).model_flops() for count in self.sequences)
        return self._attention_flops() + self._flops_around()

    def _attention_flops(self) -> int:
        if self.mask().windowed or self.kv_length is not None:
            return self.exact_flops()
        squares = sum(length**2 for length in self.documents or (self.seq,))
        return self._flops(squares if self.causal else 2 * squares)

    def exact_flops(self) -> int:
        """Of attention alone, from the mask's exact area: S(S+1)/2 instead of S²/2 for a document when causal."""
        if self.sequences is not None:
            return sum(count * self.step(count).exact_flops() for count in self.sequences)
        return self._flops(2 * self.pairs())

    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, of one head and sequence."""
        return self.mask().area(self.kv_length or self.seq, None if self.kv_length is None else self.seq)

    def parameters(self) -> int:
        """Of the matrices of one whole layer: q, k and v, output, and the three of the gated MLP."""
        if self.layer is None:
            return 0
        hidden = self.heads * self.head_dim
        return hidden * (2 * hidden + 2 * self.kv_heads * self.head_dim + 3 * self.layer.mlp_size)

    def _flops_around(self) -> int:
        forward = 2 * self.batch * self.seq * self.parameters() * self.layers * self.steps
        return 3 * forward if self.backward else forward

    def cache_bytes(self) -> int:
        """Of the keys and values of all sequences that new tokens see: batch · keys · kv_heads · (D + E) numbers."""
        keys = self.kv_length or self.seq
        if self.window is not None:
            keys = min(keys, self.seq + self.window - 1 + (self.prefix or 0))
        numbers = self.batch * keys * self.kv_heads * (self.head_dim + (self.v_head_dim or self.head_dim))
        return numbers * (4 if self.dtype == "fp32" else 2)

    def _flops(self, twice_the_area: int) -> int:
        size, of_v = self.head_dim, self.v_head_dim or self.head_dim
        numbers = (size + of_v) + (3 * size + 2 * of_v if self.backward else 0)
        return self.batch * twice_the_area * self.heads * numbers * self.layers * self.steps

    def extras(self) -> list[str]:
        """What is more than queries, keys and values of one size, in words."""
        found = [] if self.softcap is None else [f"softcap {self.softcap:g}"]
        return found + ([] if self.sinks is None else [f"{self.sinks} sinks"])

    def mask_in_short(self) -> str:
        """What a query sees, and what else is asked of its scores: ``causal, 15 documents, window 4096``."""
        parts = ["causal" if self.causal else "prefix LM" if self.prefix and not self.window else "full"]
        parts += [f"{len(self.documents)} documents"] if self.documents else []
        parts += [f"window {self.window}"] if self.window else []
        parts += [f"prefix {self.prefix}"] if self.prefix else []
        return ", ".join([*parts, *self.extras()])

    def heads_in_words(self) -> str:
        """How many and of which size: ``40 heads (8 kv) of 128``, or of v apart: ``16 heads of 192 (v 128)``."""
        grouped = f" ({self.kv_heads} kv)" if self.kv_heads != self.heads else ""
        of_v = f" (v {self.v_head_dim})" if self.v_head_dim else ""
        return f"{self.heads} heads{grouped} of {self.head_dim}{of_v}"


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """Which rank ran where."""

    world_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
    hosts: list[str]
    """Host name of each rank."""
    ranks: list[Count] | None = None
    """The ranks' numbers in their world, by which traces name them, where `capture` was of a group; None: from 0 on."""
    local_ranks: list[Count]
    ranks_per_host: Size
    """Ranks that share a host as the strategy saw it (given, or from the launcher)."""
    device_type: str
    """``cuda`` or ``cpu``."""
    backend: str
    """``nccl`` or ``gloo``."""


class StrategyUsed(msgspec.Struct, frozen=True, kw_only=True):
    """The strategy and every parameter it ran with, defaults included."""

    name: str
    target: str
    """``package.module:Class`` that ran."""
    params: Params
    layout: str | None = None
    hops: str = "nccl"
    """What carried the hops within a host: ``nccl`` (gloo on CPU) or ``copy``, copy engines."""
    cuda_graph: bool = False
    """Whether an iteration was captured once and replayed."""

    def __post_init__(self) -> None:
        refuse_deep(self.params)


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Hardware, driver, versions and the variables that change communication."""

    devices: list[str]
    """Device name of each rank."""
    driver: str | None = None
    versions: dict[str, str]
    """``ringprof``, ``python``, ``torch``, and where they exist ``cuda``, ``nccl``, ``cudnn``, ``flash_attn``."""
    variables: dict[str, str]


class TensorError(msgspec.Struct, frozen=True, kw_only=True):
    """How far one result was from the float64 reference, over all ranks."""

    max_abs: float
    """Largest absolute error of any element."""
    rms: float
    """Root-mean-square error relative to the reference's root mean square."""
    kernel_rms: float
    """The same for one call of the same kernel on one device over the whole sequence."""
    allowed_rms: float
    rank: Count
    """The rank with the largest relative error."""


class TimedVerification(msgspec.Struct, frozen=True, kw_only=True):
    """The check after timing, of the last timed iteration: in places, against attention over the whole sequence."""

    seq: Count
    places: Count
    """Query rows of ``out`` and ``dq``, and keys of ``dk`` and ``dv``, that each rank looked at."""
    kv_head: Count
    """Whose keys those are; the rows are of all heads."""
    same_output: bool
    """Whether the output has the same bits as that of the first iteration at this length."""
    errors: dict[str, TensorError]
    """As those of `Verification`, over the places."""
    took_ns: Nanoseconds
    """How long this check took on rank 0."""


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """The check before timing: output and gradients against a dense float64 reference."""

    passed: bool
    seq: Count
    errors: dict[str, TensorError]
    """Keys ``out``, and with backward ``dq``, ``dk``, ``dv``."""
    timed: TimedVerification | None = None
    """None in runs of before there was this check."""


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Wall time of every iteration on every rank, measured without the profiler."""

    warmup: Count
    iterations_ns: list[list[Nanoseconds]]
    """One list a rank, one figure an iteration."""
    steps_ns: list[list[Nanoseconds]] | None = None
    """Of dynamic context parallelism: one list a rank, of each step its median over the iterations."""

    def median_ns(self) -> float | None:
        """The run's time: the `slowest_median`; None where nothing was timed."""
        return slowest_median(self.iterations_ns)


def slowest(iterations_ns: Sequence[Sequence[int]]) -> list[int]:
    """The slowest rank's time of every iteration that all ranks have a time of."""
    return [max(times) for times in zip(*iterations_ns, strict=False) if max(times) > 0]


def slowest_median(iterations_ns: Sequence[Sequence[int]]) -> float | None:
    """The median over iterations of the slowest rank's time; None where there is none."""
    times = slowest(iterations_ns)
    return float(median(times)) if times else None


class DeviceState(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's GPU through the timed iterations, as its driver told; None for what it did not."""

    looks: Count
    """How often it was asked."""
    sm_clock_mhz: Count | None = None
    """The median, as of ``power_w``."""
    least_sm_clock_mhz: Count | None = None
    rated_sm_clock_mhz: Count | None = None
    """The highest that the GPU can run at."""
    power_w: float | None = None
    highest_power_w: float | None = None
    """The highest sample; None in runs of before this was recorded."""
    power_limit_w: float | None = None
    instant_power: bool = False
    """Whether power is that of the moment. Else it is what ``nvmlDeviceGetPowerUsage`` gives: on Ampere GPUs but GA100,
    and on newer ones, the mean of the last second."""
    hottest_celsius: int | None = None
    limit_celsius: int | None = None
    """The highest temperature that the driver lets the GPU operate at before it slows the clock down."""
    held_back: dict[str, float] = {}
    """What the driver says limits the clock, such as ``power cap``, and in which share of the looks, 0..1. How far the
    clock fell is told by the clocks alone."""


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """An active port of a network adapter of a host, as Linux lists it (``/sys/class/infiniband``)."""

    name: str
    """Adapter and port, such as ``mlx5_0:1``."""
    gbits: float | None = None
    """Of the link, in Gbit/s."""
    layer: str | None = None
    """``InfiniBand`` or ``Ethernet``."""


class DeviceLinks(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank's GPU and host are connected by; None for what was not told."""

    nvlinks: dict[str, int] | None = None
    """Active NVLinks by what is at their other end: ``switch``, a GPU's PCI address, or ``unknown``."""
    adapters: list[Adapter] | None = None
    """Of the host; told by its first rank alone."""


class Controls(msgspec.Struct, frozen=True, kw_only=True):
    """Times of ordinary iterations and of three controls, measured in turns after `Timings`, without the profiler.

    One list a rank, one figure an iteration, as in `Timings`.
    """

    warmup: Count
    """Untimed iterations of each control before."""
    rounds: Count
    ordinary_ns: list[list[Nanoseconds]]
    solo_ns: list[list[Nanoseconds]]
    """The same kernel calls back to back on all ranks at once, nothing merged, nothing sent."""
    compute_only_ns: list[list[Nanoseconds]] | None = None
    """The strategy on a communicator that sends nothing; None, as the next, where one rank has nobody to send to."""
    communication_only_ns: list[list[Nanoseconds]] | None = None
    """The strategy with a kernel that computes nothing."""
    solo_flops: list[Count]
    """FLOPs of one solo iteration of each rank, from exact mask areas."""


class Profiled(msgspec.Struct, frozen=True, kw_only=True):
    """The window under the profiler, by the same clock as `Timings`."""

    iterations_ns: list[list[Nanoseconds]]


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank sent in one iteration over one ring or group."""

    channel: str
    """Such as ``kv``, ``dkv``, ``read``, ``dq``."""
    phase: str
    """``forward`` or ``backward``."""
    operation: str
    """``send_recv``, ``all_to_all``, ``all_gather`` or ``reduce_scatter``."""
    link: str
    """``same_host`` or ``other_host``."""
    count: Count
    """Hops, or collective calls."""
    sent_bytes: Count
    to: Count | None = None
    """The rank that hops go to; None for collectives, and in runs of before this was recorded."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank did in one iteration, counted by the kernel and the communicator as they ran."""

    block_flops: Count | None
    """FLOPs of its attention blocks, forward and backward, from exact mask areas; None where the strategy computes
    with other kernels than those that count, as other people's code does."""
    block_calls: dict[str, Count]
    """Blocks computed, by ``forward`` and ``backward``."""
    sent: list[Sent] | None
    """None where the strategy sends by other ways than those that count."""


class RankTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank's trace lies."""

    rank: Count
    path: str
    """Relative to the ``run.json`` that names it, with forward slashes."""
    reduced: str | None = None
    """The same trace reduced (`ringprof.trace.reduced`), relative as ``path``; None where it was not."""
    size_bytes: Count | None = None
    """Of the file at ``path`` when it was reduced: another size shows that it is another trace by now."""


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """What a run that was foreseen, not made, rests on (`ringprof.prediction`)."""

    machine: str
    """The calibration's name."""
    evidence: str
    """The weakest origin among its figures: ``measured``, ``published`` or ``assumed``."""
    simulated_ranks: Count
    p10_ns: Nanoseconds
    """With ``p90_ns`` the 80 % interval of the slowest rank's time; they are the run's iterations, too."""
    p50_ns: Nanoseconds
    p90_ns: Nanoseconds


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One recording (schema ``ringprof.run/1``)."""

    schema: str = _SCHEMA
    name: str
    """Also the name of the run's folder."""
    created: str
    """UTC, ISO 8601."""
    command: list[str]
    workload: Workload | None
    """None where `capture` was given none."""
    workload_ranks: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)] | None = None
    """Ranks that share the workload: the size of the context-parallel group. None: all ranks of the run."""
    topology: Topology
    strategy: StrategyUsed | None
    kernel: str | None
    environment: Environment
    verification: Verification | None = None
    timings: Timings | None = None
    controls: Controls | None = None
    """None where they were not asked for."""
    profiled: Profiled | None = None
    peak_memory_bytes: list[Count] | None = None
    """Most memory of each rank during the timed iterations: allocated on its GPU, or resident (libraries included) on
    CPU."""
    device_states: list[DeviceState | None] | None = None
    """One a rank; None where no GPU told, and in runs of before this was recorded."""
    device_links: list[DeviceLinks | None] | None = None
    """As ``device_states``."""
    work: list[Work] | None = None
    """One a rank."""
    traces: list[RankTrace]
    predicted: Predicted | None = None
    """None for a run that was made."""

    def tflops(self, time_ns: float | None) -> float | None:
        """The rate per device of an iteration of this time, by the model's FLOPs; None where either is unknown."""
        if self.workload is None or not time_ns:
            return None
        return self.workload.model_flops() / self.sharing_ranks / time_ns / 1e3

    @property
    def captured(self) -> bool:
        """Whether `capture` recorded the run: a block of a user's program, timed only under the profiler."""
        return self.timings is None and self.profiled is not None

    @property
    def sharing_ranks(self) -> int:
        """Number of ranks that share one workload; with data parallelism every such group has a workload of its own."""
        return self.workload_ranks or self.topology.world_size

    def needed_flops(self) -> int | None:
        """Return the attention FLOPs that the workload needs over all ranks of the run, from exact mask areas."""
        if self.workload is None:
            return None
        return self.workload.exact_flops() * self.topology.world_size // self.sharing_ranks

    def ranks(self) -> Sequence[int]:
        """The number of each rank, as its trace names it."""
        return self.topology.ranks or range(self.topology.world_size)

    def work_of(self, rank: int) -> Work | None:
        """What the rank of this number did in one iteration; None where it was not counted."""
        return dict(zip(self.ranks(), self.work or (), strict=False)).get(rank)

    def block_flops(self) -> dict[int, int] | None:
        """FLOPs of every rank's attention blocks in one iteration; None where they were not counted."""
        works = zip(self.ranks(), self.work or (), strict=False)
        counted = {rank: work.block_flops for rank, work in works if work.block_flops is not None}
        return counted if len(counted) == self.topology.world_size else None


# --- the store ------------------------------------------------------------------------------------


def read_run(path: str | os.PathLike[str], limits: Limits | None = None) -> Run:
    """Read a ``run.json``.

    Raises `RunFormatError` where the file is not a run, was written by a newer ringprof, contradicts itself, or names
    a trace outside its own folder.
    """
    name = os.fspath(path)
    return parse_run(read_whole(name, limits, _SHARE), name)


def parse_run(data: bytes, path: str | os.PathLike[str]) -> Run:
    """Decode the text of a ``run.json``; ``path`` is where it lies."""
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
    """What cannot be of one recording; the report takes it for granted that there is none."""
    size = run.topology.world_size
    each: dict[str, Sequence[object] | None] = {
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
        each |= {f"{part}.{name}": values for name, values in named.items() if name.endswith(("_ns", "_flops"))}
    for name, values in each.items():
        if values is not None and len(values) != size:
            yield f"{name} is of {len(values)} ranks, the run of {size}"
        if name.endswith("_ns") and len({len(one) for one in values or () if isinstance(one, list)}) > 1:
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
    """Write a ``run.json`` atomically: it is complete, or it is not there."""
    try:
        text = msgspec.json.encode(run)
    except UnicodeEncodeError:
        # A command line or a variable that is no text.
        text = json.dumps(msgspec.to_builtins(run), ensure_ascii=False).encode(errors="replace")
    write_atomically(Path(path), msgspec.json.format(text, indent=1) + b"\n")


def relocated(run: Run, folder: str) -> Run:
    """The same run as named from the folder above its own: trace paths gain ``folder/``."""
    traces = [
        msgspec.structs.replace(t, path=f"{folder}/{t.path}", reduced=f"{folder}/{t.reduced}" if t.reduced else None)
        for t in run.traces
    ]
    return msgspec.structs.replace(run, traces=traces)
