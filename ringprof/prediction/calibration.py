"""The calibration file (schema ``ringprof.calibration/1``): figures of a machine, each with its origin.

``ringprof calibrate`` writes one from measurements or from recorded runs. `BUNDLED` names the files that come with the
package.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal

import msgspec

from ringprof.common.decoding import decode_json, read_small
from ringprof.errors import InputError, UnsupportedWorkloadError, UsageError, nearest
from ringprof.kernel_rates import BUNDLED, KernelRate, machine_file
from ringprof.workload.workload import Size

_SCHEMA = "ringprof.calibration/1"
TIME_SHARES = {"kernels": 0.55, "host": 0.15, "memory": 0.01, "matmul": 0.02, "links": 0.15, "heat": 0.12}
"""Parts that `ringprof calibrate` measures, with the share of the time limit that each gets."""

PERSISTENT_KERNELS = ("cudnn", "flash-attn-3", "flash-attn-4")
"""Kernels of which one call is one wave of blocks that fill the device until its end."""
OPTIONAL_SHARES = {"recurrences": 0.3}
"""Parts that `ringprof calibrate` measures on request alone, because Triton compiles their kernels for minutes."""
PART_SHARES = {**TIME_SHARES, **OPTIONAL_SHARES}

COLLECTIVES = ("all_to_all", "all_gather", "reduce_scatter")
Origin = Literal["measured", "published", "assumed"]
Positive = Annotated[float, msgspec.Meta(gt=0, lt=1e18)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Value(msgspec.Struct, frozen=True):
    """A figure with its uncertainty and its source."""

    value: Annotated[float, msgspec.Meta(ge=0, lt=1e18)]
    spread: Annotated[float, msgspec.Meta(ge=0, le=2)]
    """Standard deviation, as a fraction of the value."""
    origin: Origin
    source: str
    """The measurement or the publication behind the value, or the reason why it is assumed."""


def measured(value: float, spread: float, source: str = "ringprof calibrate") -> Value:
    """Return a measured value with a spread between 1 % and 100 %."""
    return Value(value, min(max(spread, 0.01), 1.0), "measured", source)


class KernelSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Measured time of one attention call, helper kernels included, on a device that does nothing else."""

    phase: Literal["forward", "backward"]
    batch: Size = 1
    q: Size
    kv: Size
    heads: Size
    kv_heads: Size
    head_dim: Size
    causal: bool
    pairs: Size | None = None
    """Query-key pairs that the mask keeps; None for a causal or a full mask (see
    `ringprof.dryrun.schedule.AttentionOp.pairs`)."""
    sequences: Size = 1
    ns: Positive
    spread: Share = 0.01
    """Standard deviation over the calls, as a fraction of the time."""
    count: Size = 1
    """Number of calls."""
    utilisation: Share = msgspec.field(default=1.0, name="duty")
    """Fraction of the time around the calls in which the device computed. A cool device is faster."""
    busy_s: Positive | None = None
    """Seconds for which the device had computed before the calls; None means a long time."""
    origin: Origin
    source: str

    @property
    def tflops(self) -> float:
        """TFLOP/s of the call, by model FLOPs."""
        pairs = self.pairs or self.q * self.kv / (2 if self.causal else 1)
        flops = (4 if self.phase == "forward" else 10) * self.batch * self.heads * self.head_dim * pairs
        return flops / self.ns / 1e3


class KernelFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one attention kernel on this device."""

    name: str
    fills_device: bool
    """Whether the kernel is one wave of persistent blocks, so that a later transfer kernel waits for its end."""
    fills_backward: bool | None = None
    """``fills_device`` of backward calls, if it differs from that of forward calls."""
    tail: Value
    """Fraction of a call, at its end, in which the device drains and other kernels can start."""
    lead: Value
    """Fraction of a backward call, at its start, that helper kernels take before the main kernel fills the device."""
    samples: list[KernelSample]
    throttling: Value | None = msgspec.field(default=None, name="heat")
    """Thermal throttling under this kernel; None means `Calibration.throttling`. A kernel that draws less power heats
    the device less."""
    forward_us: Value | None = None
    """Host time per forward call, in microseconds; None means `Host.forward_us`."""
    backward_us: Value | None = None
    cache_gb_s: Value | None = None
    """GB/s at which a call of few queries reads its keys and values, as in decode; None if it is not known."""

    def fills(self, phase: str) -> bool:
        """Return whether calls of a phase fill the device."""
        return self.fills_device if phase == "forward" or self.fills_backward is None else self.fills_backward


def unmeasured_kernel(name: str) -> KernelFigures:
    """Return the figures of a kernel without samples, which is taken for one of many short blocks."""
    unknown = Value(0.0, 0.5, "assumed", "a kernel of many short blocks")
    return KernelFigures(name=name, fills_device=False, tail=unknown, lead=unknown, samples=[])


class RecurrencePoint(msgspec.Struct, frozen=True, array_like=True):
    """Measured time of one part of a recurrence's kernel over ``tokens`` tokens."""

    tokens: Size
    ns: Positive
    spread: Share
    """Standard deviation over the calls, as a fraction of the time."""
    host_us: Positive
    """Microseconds of the host until its calls return."""


class RecurrenceCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Measured times of one part of a recurrence's kernel by tokens, on a device that does nothing else.

    The shape is that of `ringprof.dryrun.schedule.RecurrenceOp`, with one batch entry.
    """

    kernel: str
    operator: Literal["gated_delta_rule", "simple_gla", "gla"]
    phase: Literal["forward", "backward"]
    part: Literal["local", "block"]
    heads: Size
    head_dim: Size
    v_head_dim: Size
    receives: bool
    sends: bool
    points: list[RecurrencePoint]
    """Times in the order of tokens."""
    origin: Origin
    source: str

    def __post_init__(self) -> None:
        tokens = [point.tokens for point in self.points]
        if not tokens or tokens != sorted(set(tokens)):
            raise ValueError("a curve has points, in the order of their tokens")


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """Transfer rates over one class of link, per direction with both directions in use."""

    channel_gb_s: Value
    """GB/s of one NCCL channel."""
    hop_gb_s: Value
    """Highest GB/s of one NCCL hop, with any number of channels."""
    total_gb_s: Value
    """Highest GB/s of all transfers of one device together; between hosts, the rate of the device's NIC."""
    latency_us: Value
    """Latency of a hop in microseconds."""
    collective_gb_s: dict[str, Value] = {}
    """Bytes that leave a rank divided by the time, per operation; inside a host the keys are `COLLECTIVES`."""
    copy_gb_s: Value | None = None
    """GB/s of a hop by copy engine."""
    line_gbit: Positive | None = None
    """Line rate in Gbit/s of the NICs that ``total_gb_s`` was measured on."""


class Nccl(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of NCCL's rule for the number of channels per message; see `ringprof.prediction.network`."""

    version: str
    peer_channels: Size = 32
    """Number of channels to a peer that NCCL starts from (p2pnChannelsPerPeer, p2pnChannels)."""
    collective_channels: Size = 24
    """Number of multiprocessors that a ring collective occupies."""


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """Host time per operation in microseconds; it bounds small workloads."""

    call_us: Value
    """A call into torch, such as a view or an allocation."""
    launch_us: Value
    """The launch of a kernel that moves memory."""
    forward_us: Value
    """A forward attention call."""
    backward_us: Value
    post_us: Value
    """The start of an NCCL hop."""
    wait_us: Value
    collective_us: Value
    """The start of a collective."""
    copy_us: Value
    """The start of a hop by copy engine."""
    autograd_us: Value
    """Overhead of a backward pass beyond its operations."""
    host_variation: Value = msgspec.field(
        default=Value(0.095, 0.3, "assumed", "as ranks of recorded runs of 2 H200"), name="unlike"
    )
    """Relative standard deviation of host speed between the ranks of a run. All ranks wait for the slowest one."""
    pass_spread: Share | None = None
    """Relative standard deviation of a whole pass's host time; None means the spread of ``launch_us``.

    It is usually smaller than the spreads of the kinds, because their errors partly cancel in a pass.
    """


class HostPass(msgspec.Struct, frozen=True, kw_only=True):
    """Measured time of a host-bound pass of one strategy."""

    strategy: str
    kernel: str
    hops: Literal["nccl", "copy"]
    ranks: Size
    backward: bool
    kinds: dict[str, int]
    """Number of operations in the pass per kind; the keys are field names of `Host`."""
    us: Positive
    """Microseconds on the slowest rank."""
    spread: Share = 0.1
    """Standard deviation between turns, as a fraction of the time."""
    turns: Size = 1
    ranks_us: list[float] = []
    """Microseconds per rank from the call of a pass to its return."""
    source: str


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one machine."""

    schema: str = _SCHEMA
    name: str
    device: str
    created: str
    multiprocessors: Size
    memory_bytes: Size
    """Memory of one device."""
    environment: dict[str, str]
    """Versions of the driver, torch, NCCL, cuDNN and flash-attn that the figures were measured with."""
    kernels: list[KernelFigures]
    recurrences: list[RecurrenceCurve] = []
    """Times of the kernels of linear recurrences; empty where they were not measured."""
    matmul_tflops: Value | None = None
    """TFLOP/s of a large bfloat16 matrix product on a device that always computes; None if not measured."""
    matmul_clock_mhz: Positive | None = None
    """Median clock of the multiprocessors during those matrix products; None if the driver did not report it."""
    memory_gb_s: Value
    """GB/s of kernels that only move memory, reads and writes added."""
    reorder_gb_s: Value
    """GB/s of kernels that change the order in memory, such as packing for an all-to-all."""
    memory_op_us: Value = msgspec.field(name="touch_us")
    """Shortest time of a kernel that only moves memory, with the gap after it."""
    same_host: Link
    other_host: Link
    nccl: Nccl
    contention: Value
    """Fraction of the multiprocessors held by a transfer kernel that a concurrent attention block loses."""
    hop_first: Value
    """Probability that a hop starts before an attention block that became ready at the same time."""
    host: Host
    passes: list[HostPass] = []
    """Passes that the host times were fitted to, where they were measured."""
    transfer_margin: dict[str, Value] = msgspec.field(default_factory=dict, name="elsewhere")
    """Factor by which intervals are widened on other machines of this kind, per bound (``device`` or ``host``).

    It is chosen so that four of five held-out runs lie within their interval. The calibrated machine itself needs none.
    """
    family_spread: dict[str, Value] = {}
    """Relative spread of a time that only the strategy's family explains, by the strategy's name, or ``other``.

    Programs of one strategy share it, those of different strategies do not. It is chosen so that four of five published
    rows lie within their interval (scripts/build_machines.py).
    """
    family_spread_from_hosts: Size = 2
    """Number of hosts from which ``family_spread`` applies: on fewer, the machine's own runs say more."""
    handover_us: Value
    """Microseconds from an event on one stream to the start of another stream that waited for it."""
    throttling: Value = msgspec.field(name="heat")
    """Relative slowdown of a block on a device that always computes, compared with a cool one."""
    throttling_s: Value = msgspec.field(default=Value(0.15, 0.3, "assumed", "as an H200 does"), name="heat_s")
    """Time constant of the throttling: seconds of computing after which all but 1 / e of it is reached."""
    device_variation: Value = msgspec.field(name="unlike")
    """Relative standard deviation of speed between devices of this kind. A ring runs at the speed of its slowest one.
    """
    noise: Value
    """Relative spread of a run's time from day to day that no other figure explains."""
    run_to_run_noise_us: Value = msgspec.field(
        default=Value(200.0, 0.5, "assumed", "as on H200: of runs of 2 to 8 ms that were held out"), name="unsteady_us"
    )
    """Part of the run-to-run noise that does not shrink with the length of the run, in microseconds."""
    kernel_rates: list[KernelRate] = []
    """Rates of the kernels at square blocks, by the curves of ``kernels``: what reports compare a run with."""
    model: ModelFigures | None = None
    """Layers of a model, measured outside attention; None where ``calibrate --model`` did not run."""
    unmeasured: list[str] = []
    """Parts that could not be measured, each with the reason."""

    def family_variance(self, strategy: str, hosts: int) -> float:
        """Return the log-variance that programs of one strategy share on ``hosts`` hosts."""
        spread = self.family_spread.get(strategy, self.family_spread.get("other"))
        return 0.0 if spread is None or hosts < self.family_spread_from_hosts else float(spread.value) ** 2

    def slowdown(self, kernel: KernelFigures, utilisation: float, busy_s: float | None) -> float:
        """Return the factor by which a block is slower than on a cool device.

        The device has computed for a fraction ``utilisation`` of the last ``busy_s`` seconds; None means a long time.
        """
        warmth = (
            1.0 if busy_s is None or not self.throttling_s.value else 1 - math.exp(-busy_s / self.throttling_s.value)
        )
        return 1 + (kernel.throttling or self.throttling).value * utilisation * warmth

    def kernel(self, name: str) -> KernelFigures:
        """Return the figures of the named kernel. Raises `UsageError` if the file has none."""
        for kernel in self.kernels:
            if kernel.name == name:
                return kernel
        names = [kernel.name for kernel in self.kernels]
        raise UsageError(
            f"machine {self.name!r} has no curves of kernel {name!r}{nearest(name, names)}: it has"
            f" {', '.join(names) or 'none'} (ringprof calibrate)"
        )


def read_calibration(path: str | os.PathLike[str]) -> Calibration:
    """Read a calibration file, or a bundled one by its name in any case. Raises `InputError` and `UsageError`."""
    name = os.fspath(path).lower()
    return _bundled(name) if name in BUNDLED else _read(machine_file(path))


@cache
def _bundled(name: str) -> Calibration:
    """Read a bundled file once, because the curves fitted to a machine are cached with it."""
    return _read(machine_file(name), name)


def _read(path: str, name: str = "") -> Calibration:
    return parse_calibration(read_small(path, "a calibration"), name or path)


def parse_calibration(data: bytes, path: str) -> Calibration:
    """Decode a calibration; ``path`` is where it was read from. Raises `InputError`."""
    calibration = decode_json(data, Calibration, path, "a calibration")
    if calibration.schema != _SCHEMA:
        raise InputError(f"{path}: schema {calibration.schema!r} is not {_SCHEMA!r}: calibrate again")
    if not all(math.isfinite(sample.ns) for kernel in calibration.kernels for sample in kernel.samples):
        raise InputError(f"{path}: not a calibration: a time is not finite")
    model = calibration.model
    if model is not None and (
        {step.phase for step in model.steps} != set(PHASES) or not {"forward", "backward"} <= set(model.attention_calls)
    ):
        raise InputError(f"{path}: not a calibration: its model lacks a phase")
    missing = (f"same_host.{name}_gb_s" for name in COLLECTIVES if name not in calibration.same_host.collective_gb_s)
    not_positive = (
        figure for figure, value in named_values(calibration) if figure.endswith("_gb_s") and not value.value
    )
    for figure in (*missing, *not_positive):
        raise InputError(f"{path}: not a calibration: {figure} must be more than 0")
    return calibration


def named_values(owner: Any, prefix: str = "") -> Iterator[tuple[str, Value]]:
    """Yield every `Value` of a calibration with its key in the file, except those of kernels and optional structs."""
    for attribute, key in zip(owner.__struct_fields__, owner.__struct_encode_fields__, strict=True):
        field = getattr(owner, attribute)
        if isinstance(field, Value):
            yield prefix + key, field
        elif isinstance(field, Host | Link):
            yield from named_values(field, f"{key}.")
        elif key == "collective_gb_s":
            yield from ((f"{prefix}{operation}_gb_s", value) for operation, value in field.items())


def calibration_json(calibration: Calibration) -> bytes:
    """Return the text of a calibration file, with each sample, rate and figure on one line."""
    text = msgspec.json.format(msgspec.json.encode(calibration), indent=1)
    return re.sub(rb"\{[^{}]*\}", lambda innermost: re.sub(rb"\n\s*", b" ", innermost[0]), text) + b"\n"


def assumed_calibration(name: str, device: str, multiprocessors: int, memory_bytes: int) -> Calibration:
    """Return a starting calibration for an unknown machine, with figures in the order of a Hopper GPU's."""

    def typical(value: float, reason: str = "of the usual order") -> Value:
        return Value(value, 0.3, "assumed", reason)

    def kernel(name: str, *, fills: bool) -> KernelFigures:
        lead, tail = typical(0.007), typical(0.012) if fills else typical(0.0, "a kernel of many short blocks")
        return KernelFigures(name=name, fills_device=fills, tail=tail, lead=lead, samples=[])

    kernels = [
        kernel(kernel_name, fills=kernel_name in PERSISTENT_KERNELS)
        for kernel_name in ("cudnn", "flash-attn-3", "flash-attn", "torch-flash")
    ]
    host = Host(
        call_us=typical(2.0), launch_us=typical(12.0), forward_us=typical(60.0), backward_us=typical(100.0),
        post_us=typical(150.0), wait_us=typical(15.0), collective_us=typical(150.0), copy_us=typical(150.0),
        autograd_us=typical(300.0),
    )  # fmt: skip
    return Calibration(
        name=name, device=device, created="", multiprocessors=multiprocessors, memory_bytes=memory_bytes,
        environment={}, kernels=kernels,
        memory_gb_s=typical(3000.0), reorder_gb_s=typical(1000.0), memory_op_us=typical(4.0),
        same_host=Link(
            channel_gb_s=typical(18.0), hop_gb_s=typical(350.0), total_gb_s=typical(390.0), latency_us=typical(40.0),
            collective_gb_s={"all_to_all": typical(310.0), "all_gather": typical(300.0),
            "reduce_scatter": typical(300.0)},
        ),
        other_host=Link(
            channel_gb_s=typical(13.0), hop_gb_s=typical(45.0), total_gb_s=typical(40.0), latency_us=typical(50.0),
            collective_gb_s={},
        ),
        nccl=Nccl(version="2.28"), contention=typical(0.83), hop_first=typical(0.35), host=host,
        handover_us=typical(5.0),
        throttling=typical(0.1), device_variation=typical(0.015), noise=typical(0.0185),
    )  # fmt: skip


def base_for(device: str) -> Calibration:
    """Return the bundled machine of this device, or an assumed one if there is none."""
    for name in BUNDLED:
        machine = read_calibration(name)
        if machine.device == device:
            return machine
    return assumed_calibration(device, device, 132, 80 << 30)


# --- a model outside attention ---

Phase = Literal["forward", "backward", "optimizer"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")
REACH = 2.0
"""Factor by which a prediction's tokens per rank may lie outside the measured lengths."""
Time = Annotated[float, msgspec.Meta(ge=0, lt=1e18)]


class ModelStep(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of the steps of a model with one and with two layers over equally many tokens: nanoseconds outside
    attention."""

    phase: Phase
    tokens: Size
    """Tokens of one device, all sequences of a batch together."""
    one_layer_ns: Time
    two_layers_ns: Time
    spread: Annotated[float, msgspec.Meta(ge=0, le=2)]
    """Standard deviation over the steps, as a fraction of the time."""
    count: Size

    @property
    def layer_ns(self) -> float:
        """Nanoseconds that one more layer takes."""
        return max(0.0, self.two_layers_ns - self.one_layer_ns)

    @property
    def rest_ns(self) -> float:
        """Nanoseconds of what the model has once: embeddings, the head and the loss."""
        return max(0.0, self.one_layer_ns - self.layer_ns)


class ModelFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Measured steps of one model on one device."""

    target: str
    """``module:function`` that created the model."""
    device: str
    heads: Size
    kv_heads: Size
    head_dim: Size
    dtype: str
    layer_bytes: Size
    """Bytes of one layer's parameters; gradients have as many."""
    rest_bytes: Annotated[int, msgspec.Meta(ge=0)]
    """Bytes of the parameters that the model has once."""
    attention_calls: dict[str, int]
    """Attention calls of one layer in a step, ``forward`` and ``backward``; two forward calls where the layer is
    computed again in the backward pass."""
    attention_ns: dict[str, list[tuple[int, float]]]
    """Nanoseconds of one attention call over all tokens of the device, by pass, as pairs of tokens and time."""
    steps: list[ModelStep]

    def times_ns(self, phase: Phase, tokens: int) -> tuple[float, float, float]:
        """Return the time per layer, the time of the rest, both in nanoseconds, and the standard deviation of a layer's
        time as a fraction of it.

        Between measured lengths the times are interpolated. Beyond, the nearest time is scaled by the tokens, except
        the optimizer's. Raises `UnsupportedWorkloadError` beyond `REACH` times the measured lengths.
        """
        steps = sorted((step for step in self.steps if step.phase == phase), key=lambda step: step.tokens)
        shortest, longest = steps[0], steps[-1]
        if not shortest.tokens / REACH <= tokens <= longest.tokens * REACH:
            raise UnsupportedWorkloadError(
                f"{tokens} tokens per GPU: the layers of {self.target} were measured with {shortest.tokens} to"
                f" {longest.tokens} (ringprof calibrate --model, --tokens)"
            )
        low = max((step for step in steps if step.tokens <= tokens), default=shortest, key=lambda step: step.tokens)
        high = min((step for step in steps if step.tokens >= tokens), default=longest, key=lambda step: step.tokens)
        spread = max(_difference_spread(low), _difference_spread(high))
        if low.tokens == high.tokens:
            scale = 1.0 if phase == "optimizer" else tokens / low.tokens
            return scale * low.layer_ns, scale * low.rest_ns, spread
        share = (tokens - low.tokens) / (high.tokens - low.tokens)
        layer_ns, rest_ns = (
            (1 - share) * a + share * b for a, b in ((low.layer_ns, high.layer_ns), (low.rest_ns, high.rest_ns))
        )
        return layer_ns, rest_ns, spread


def _difference_spread(step: ModelStep) -> float:
    """Return the standard error of a layer's time, the difference of two medians, as a fraction of it."""
    if not step.layer_ns:
        return 0.0
    error_ns: float = step.spread * (step.one_layer_ns**2 + step.two_layers_ns**2) ** 0.5 / step.count**0.5
    return min(1.0, error_ns / step.layer_ns)
