"""The `Run`, which holds a recording's request, hardware and measurements, and its file ``run.json``.

``run.json`` holds measurements only. Derived figures (rates, slow-downs, efficiencies) are computed when the file is
read. Times are integer nanoseconds, sizes are bytes.
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

from ringprof.common.decoding import decode_json, refuse_deep
from ringprof.common.files import leading_out, read_whole, write_atomically
from ringprof.common.json_object import Params
from ringprof.common.limits import Limits
from ringprof.errors import RunFormatError
from ringprof.workload.mask import NO_LIMIT, Mask
from ringprof.workload.recurrences import RECURRENCES, Operator, recurrence_flops

_SCHEMA = "ringprof.run/1"

_WHAT = "a ringprof run"
_SHARE = 32
"""Ratio of the memory for reading to the largest accepted ``run.json``: one made of empty lists needs 20 times its
size. With 1 GiB, files of up to 32 MiB are read; the file of a run of 10,000 ranks has 25 MiB."""


MOST_RANKS = 1 << 20
"""Maximum number of ranks of a run: a larger number in a file is damage, and would only fill memory."""

Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
"""A size of at least 1, checked when a file is decoded, since the file may be untrusted."""
Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
"""A duration in nanoseconds, checked when a file is decoded."""
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""A count, checked when a file is decoded."""


Phase = Literal["training", "prefill", "decode"]
PATTERN_CONVOLUTION = 4
"""Tokens that the convolution of a pattern's gated delta nets and Mamba-2 layers reads, as in Qwen3-Next."""


class LayerAround(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a layer other than attention; its hidden size is heads · head_dim."""

    parallel: Literal["ddp", "fsdp2"]
    """Data parallelism that reduces the gradients of the parameters, over all ranks."""
    mlp_size: Size
    """Intermediate size of the gated MLP."""
    checkpoint: bool = False
    """Whether the backward pass recomputes each layer (activation checkpointing)."""
    pattern: tuple[Operator, ...] | None = None
    """Operators of a hybrid model's layers, in order, repeated over all layers; None: attention in all of them."""
    recurrent_strategy: str | None = None
    """Strategy of the pattern's recurrences; None without a pattern."""

    def __str__(self) -> str:
        recomputed = ", computed again in the backward pass" if self.checkpoint else ""
        hybrid = f", pattern {','.join(self.pattern)} with {self.recurrent_strategy}" if self.pattern else ""
        return f"whole layer: MLP of {self.mlp_size}, {self.parallel.upper()}{recomputed}{hybrid}"


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """One attention or recurrence, shared by the ranks of one context-parallel group (`Run.workload_ranks`).

    With a recurrence, ``heads`` are those of values and states, and ``kv_heads`` those of queries and keys (the groups
    of Mamba-2). ``head_dim`` is the size of a key (Mamba-2's state size), ``v_head_dim`` that of a value (the head size
    of Mamba-2). The mask is causal.
    """

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
    """Whether an iteration has a backward pass after its forward pass."""
    layers: Size = 1
    """Number of attention layers per captured step."""
    steps: Size = 1
    """Number of steps in a captured block."""
    documents: tuple[Size, ...] | None = None
    """Lengths of the packed documents, in order; None: one document."""
    window: Size | None = None
    """Sliding window: keys up to and including its own that a query attends to; without a causal mask as many after
    it. None: all."""
    prefix: Size | None = None
    """Number of first tokens of each document that all its queries attend to, in addition to the window; without a
    window the mask is that of a prefix LM. None: no prefix."""
    sequences: tuple[Size, ...] | None = None
    """Dynamic context parallelism: number of sequences that share the ``seq`` tokens in each step of an iteration; all
    sequences of a step run on the same number of ranks. None: one step with one sequence."""
    phase: Phase = "training"
    kv_length: Size | None = None
    """Keys per sequence in inference: the last ``seq`` of them are new tokens, the others are cached. None in
    training."""
    layer: LayerAround | None = None
    """The rest of each of the ``layers``; None: attention alone."""

    v_head_dim: Size | None = None
    """Head size of v if it differs from that of q and k: smaller in attention (MLA), any with a recurrence."""
    softcap: Annotated[float, msgspec.Meta(gt=0, le=1e9)] | None = None
    """Soft cap: scores s become softcap · tanh(s / softcap); None: no cap."""
    sinks: Literal["learned"] | None = None
    """Attention sinks: with ``learned``, one learned logit per head takes part in the softmax and gets a gradient."""
    operator: Operator = "attention"
    """``attention``, or a recurrence: ``gdn`` (gated delta net), ``mamba2``, ``simple-gla`` or ``gla``."""
    conv_width: Size | None = None
    """Tokens that the short causal convolution before a recurrence reads; None: no convolution."""

    def __post_init__(self) -> None:
        self._check_phase()
        if self.recurrent:
            self._check_recurrence()
        elif self.conv_width is not None:
            raise ValueError("attention has no convolution before it")
        elif self.v_head_dim is not None and self.v_head_dim > self.head_dim:
            raise ValueError(f"heads of v are at most as large as those of q and k: {self.v_head_dim}, {self.head_dim}")
        if self.sequences is not None and any(self.seq % count for count in self.sequences):
            raise ValueError(f"{self.seq} tokens are no even sequences, {self.sequences} of them")
        if self.prefix is not None and self.window is None and self.causal:
            raise ValueError(
                f"a prefix of {self.prefix} tokens goes with a window, or without a causal mask (prefix LM)"
            )
        if self.layer is not None and self.layer.pattern is not None:
            recurrent = any(operator in RECURRENCES for operator in self.layer.pattern)
            if "attention" not in self.layer.pattern or recurrent != (self.layer.recurrent_strategy is not None):
                raise ValueError("a pattern has attention, and with recurrences a strategy for them")
        if self.layers % len(self.pattern):
            raise ValueError(f"{self.layers} layers are no multiple of the pattern {','.join(self.pattern)}")
        if self.documents is not None and sum(self.documents) != self.seq:
            raise ValueError(f"the documents are {sum(self.documents)} tokens together, the sequence has {self.seq}")

    @property
    def pattern(self) -> tuple[Operator, ...]:
        """Operators of the layers, in order, repeated over all of them."""
        return (self.layer and self.layer.pattern) or (self.operator,)

    def part(self, operator: Operator) -> Workload | None:
        """Return what the layers of one operator compute, without the rest of a layer; None without such layers.

        A pattern's recurrences have as many heads of keys as of values, of one size, and Mamba-2 one group. Windows and
        other options of the softmax belong to its attention alone.
        """
        count = self.pattern.count(operator) * (self.layers // len(self.pattern))
        if not count:
            return None
        if len(set(self.pattern)) == 1 or operator == "attention":
            return msgspec.structs.replace(self, layer=None, layers=count)
        return Workload(
            batch=self.batch, seq=self.seq, heads=self.heads, kv_heads=1 if operator == "mamba2" else self.heads,
            head_dim=self.head_dim, dtype=self.dtype, backward=self.backward, layers=count, steps=self.steps,
            documents=self.documents, operator=operator,
            conv_width=PATTERN_CONVOLUTION if operator in ("gdn", "mamba2") else None,
        )  # fmt: skip

    @property
    def recurrent(self) -> bool:
        """Whether the operator is a recurrence."""
        return self.operator in RECURRENCES

    @property
    def value_dim(self) -> int:
        """Head size of v."""
        return self.v_head_dim or self.head_dim

    def _check_recurrence(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads are not a multiple of {self.kv_heads} heads of keys")
        softmax_alone = {
            "a full mask": not self.causal, "a window": self.window, "a prefix": self.prefix,
            "a soft cap": self.softcap, "sinks": self.sinks, "a cache": self.kv_length,
        }  # fmt: skip
        for name, value in softmax_alone.items():
            if value:
                raise ValueError(f"{name} belongs to attention, and the operator is {self.operator}")

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
        """Return the attention mask over all keys; in inference, only the last tokens have queries."""
        cumulative = None if self.documents is None else [0, *accumulate(self.documents)]
        before = NO_LIMIT if self.window is None else self.window - 1
        after = 0 if self.window is None and self.prefix else before
        return Mask.of(cumulative, (before, after), causal=self.causal, prefix=self.prefix or 0)

    def step(self, count: int) -> Workload:
        """Return the workload of one group of ranks in a step with ``count`` sequences (dynamic CP)."""
        return msgspec.structs.replace(self, seq=self.seq // count, sequences=None)

    def at(self, seq: int, kv_length: int | None = None) -> Workload:
        """Scale the workload to ``seq`` tokens and ``kv_length`` keys; documents, window and prefix scale with them."""
        scaled = self.mask().scaled(self.kv_length or self.seq, kv_length or seq)
        documents = None if scaled.documents is None else tuple(end - first for first, end in scaled.spans(seq))
        window = None if self.window is None else scaled.left + 1
        prefix = scaled.prefix or None
        return msgspec.structs.replace(
            self, seq=seq, kv_length=kv_length, documents=documents, window=window, prefix=prefix
        )

    def model_flops(self) -> int:
        """Count the FLOPs of one iteration over all ranks: forward 4·B·S²·H·D, half if causal; backward 2.5 times that.

        If the heads of v have another size E, forward uses 2·(D + E) instead of 4·D, and backward 2·(3·D + 2·E) instead
        of 10·D. S² is summed over the documents; with a window and in inference, the exact mask area replaces it. For a
        recurrence it is the count of `ringprof.workload.recurrences`. All steps and layers of a captured block are
        included, and for whole layers their matrix products.
        """
        if self.sequences is not None:
            return sum(count * self.step(count).model_flops() for count in self.sequences)
        parts = self._parts()
        own = sum(part.model_flops() for part in parts) if parts else self._attention_flops()
        return own + self._flops_around()

    def _parts(self) -> list[Workload]:
        """Return what the layers of each operator of a pattern compute; empty for layers of one operator."""
        kinds = dict.fromkeys(self.pattern)
        return [part for kind in kinds if (part := self.part(kind))] if len(kinds) > 1 else []

    def _attention_flops(self) -> int:
        if self.recurrent or self.mask().windowed or self.kv_length is not None:
            return self.exact_flops()
        squares = sum(length**2 for length in self.documents or (self.seq,))
        return self._flops(squares if self.causal else 2 * squares)

    def exact_flops(self) -> int:
        """Count the FLOPs of attention alone from the exact mask area: S(S+1)/2 per causal document, not S²/2.

        For a recurrence the count equals `model_flops` without the rest of a layer. With a pattern of layers, only
        those with attention count.
        """
        if self.sequences is not None:
            return sum(count * self.step(count).exact_flops() for count in self.sequences)
        if self._parts():
            attention = self.part("attention")
            return 0 if attention is None else attention.exact_flops()
        if self.recurrent:
            tokens, passes = self.batch * self.seq * self.layers * self.steps, 3 if self.backward else 1
            sizes = self.heads, self.head_dim, self.value_dim
            return recurrence_flops(tokens, *sizes, delta_rule=self.operator == "gdn", passes=passes)
        return self._flops(2 * self.pairs())

    def pairs(self) -> int:
        """Count the pairs of a query and a key that it attends to, for one head of one sequence."""
        return self.mask().area(self.kv_length or self.seq, None if self.kv_length is None else self.seq)

    def parameters(self, operator: Operator = "attention") -> int:
        """Count the parameters of the matrices of one layer of a pattern.

        They are q, k, v, output, and the three of the gated MLP. A recurrence also has a gate as large as its output,
        and projections to its decays and writing strengths.
        """
        if self.layer is None:
            return 0
        hidden, size = self.heads * self.head_dim, self.head_dim
        kv, gates = {
            "attention": (2 * self.kv_heads * size, 0), "gdn": (2 * hidden, hidden + 2 * self.heads),
            "mamba2": (2 * size, hidden + self.heads), "simple-gla": (2 * hidden, hidden + self.heads),
            "gla": (2 * hidden, 2 * hidden),
        }[operator]  # fmt: skip
        return hidden * (2 * hidden + kv + gates + 3 * self.layer.mlp_size)

    def all_parameters(self) -> int:
        """Count the parameters of the matrices of all layers."""
        return sum(map(self.parameters, self.pattern)) * (self.layers // len(self.pattern))

    def _flops_around(self) -> int:
        forward = 2 * self.batch * self.seq * self.all_parameters() * self.steps
        return 3 * forward if self.backward else forward

    def cache_bytes(self) -> int:
        """Return the bytes of K and V that all ranks hold and the new tokens attend to.

        That is batch · keys · kv_heads · (head_dim + v_head_dim) elements, with the keys that a window leaves.
        """
        keys = self.kv_length or self.seq
        if self.window is not None:
            keys = min(keys, self.seq + self.window - 1 + (self.prefix or 0))
        elements = self.batch * keys * self.kv_heads * (self.head_dim + (self.v_head_dim or self.head_dim))
        return elements * (4 if self.dtype == "fp32" else 2)

    def _flops(self, twice_the_area: int) -> int:
        """Count the FLOPs of attention over a mask of the given area (in pairs), doubled to stay an integer."""
        size, v_size = self.head_dim, self.v_head_dim or self.head_dim
        flops_per_pair = (size + v_size) + (3 * size + 2 * v_size if self.backward else 0)
        return self.batch * twice_the_area * self.heads * flops_per_pair * self.layers * self.steps

    def extras(self) -> list[str]:
        """Describe the soft cap, the sinks and the convolution, if any, in words."""
        words = [] if self.softcap is None else [f"softcap {self.softcap:g}"]
        words += [] if self.conv_width is None else [f"convolution of {self.conv_width} tokens"]
        return words + ([] if self.sinks is None else [f"{self.sinks} sinks"])

    def mask_in_words(self) -> str:
        """Describe the mask, or the recurrence and its documents: ``causal, 3 documents of 100 to 900 tokens``."""
        words = str(self.mask())
        return words.replace("causal", RECURRENCES[self.operator], 1) if self.recurrent else words

    def mask_in_short(self) -> str:
        """Describe the mask or recurrence, with its options, in a few words: ``causal, 15 documents, window 4096``."""
        parts = ["causal" if self.causal else "prefix LM" if self.prefix and not self.window else "full"]
        parts = [self.operator] if self.recurrent else parts
        parts += [f"{len(self.documents)} documents"] if self.documents else []
        parts += [f"window {self.window}"] if self.window else []
        parts += [f"prefix {self.prefix}"] if self.prefix else []
        return ", ".join([*parts, *self.extras()])

    def heads_in_words(self) -> str:
        """Describe the heads: ``40 heads (8 kv) of 128`` or, with another size of v, ``16 heads of 192 (v 128)``."""
        grouped = f" ({self.kv_heads} {'of keys' if self.recurrent else 'kv'})" if self.kv_heads != self.heads else ""
        v_size = f" (v {self.v_head_dim})" if self.v_head_dim else ""
        return f"{self.heads} heads{grouped} of {self.head_dim}{v_size}"


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


# --- run.json -------------------------------------------------------------------------------------


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
