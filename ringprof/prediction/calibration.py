"""The calibration file (schema ``ringprof.calibration/1``): what is known of a machine, every value with its origin.

``ringprof calibrate`` writes one from measurements or from recorded runs; `bundled` names those that come with the
package.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal

import msgspec

from ringprof.decoding import decode_json, read_small
from ringprof.errors import InputError, UsageError
from ringprof.run import Size

_SCHEMA = "ringprof.calibration/1"
BUNDLED = ("h200", "h100", "b200", "a800")
TIME_SHARES = {"kernels": 0.55, "host": 0.15, "memory": 0.01, "links": 0.16, "heat": 0.13}
"""What `ringprof calibrate` measures, and the part of its time that each is given."""

COLLECTIVES = ("all_to_all", "all_gather", "reduce_scatter")
Origin = Literal["measured", "published", "assumed"]
Positive = Annotated[float, msgspec.Meta(gt=0, lt=1e18)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Value(msgspec.Struct, frozen=True):
    """One figure: what it is, how sure, and where it is from."""

    value: Annotated[float, msgspec.Meta(ge=0, lt=1e18)]
    spread: Annotated[float, msgspec.Meta(ge=0, le=2)]
    """Standard deviation, as a part of the value."""
    origin: Origin
    source: str
    """What measured it, who published it, or why it is assumed."""


class KernelSample(msgspec.Struct, frozen=True, kw_only=True):
    """The time of one attention call, helpers included, on a device that does nothing else."""

    phase: Literal["forward", "backward"]
    batch: Size = 1
    q: Size
    kv: Size
    heads: Size
    kv_heads: Size
    head_dim: Size
    causal: bool
    pairs: Size | None = None
    """As in `ringprof.record.dryrun.schedule.AttentionCall`, also below."""
    sequences: Size = 1
    ns: Positive
    spread: Share = 0.01
    """Standard deviation of the calls, as a part of the time."""
    count: Size = 1
    """Calls."""
    duty: Share = 1.0
    """Part of the time around the calls in which the device computed: a cool device is faster."""
    busy_s: Positive | None = None
    """Seconds that the device had been at it; None: for long."""
    origin: Origin
    source: str

    @property
    def tflops(self) -> float:
        """Its rate, by model FLOPs."""
        pairs = self.pairs or self.q * self.kv / (2 if self.causal else 1)
        flops = (4 if self.phase == "forward" else 10) * self.batch * self.heads * self.head_dim * pairs
        return flops / self.ns / 1e3


class KernelFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One attention kernel on this device."""

    name: str
    fills_device: bool
    """Whether it is one wave of persistent blocks, so that a hop's kernel that comes later waits for its end."""
    tail: Value
    """The part of a call, at its end, in which the device drains and others find room."""
    lead: Value
    """The part of a backward call, at its beginning, that helpers take before the kernel that fills the device."""
    samples: list[KernelSample]
    heat: Value | None = None
    """As the machine's, of this kernel: those that draw less power warm it less; None: as the machine's."""
    forward_us: Value | None = None
    """Of the host, a call; None: as `Host` has it."""
    backward_us: Value | None = None


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """How fast transfers go over one class of link, in each direction with both in use."""

    channel_gb_s: Value
    """Of one of NCCL's channels."""
    hop_gb_s: Value
    """The most that one hop by NCCL reaches, however many its channels."""
    total_gb_s: Value
    """The most that all transfers of a device reach together; between hosts of a device's NIC."""
    latency_us: Value
    """Of a hop."""
    collective_gb_s: dict[str, Value] = {}
    """Bytes that leave a rank over time, by operation: inside a host all of `COLLECTIVES`."""
    copy_gb_s: Value | None = None
    """By copy engine."""
    line_gbit: Positive | None = None
    """Line rate of the NICs that ``total_gb_s`` was seen on."""


class Nccl(msgspec.Struct, frozen=True, kw_only=True):
    """What decides how many channels a message gets; see `ringprof.prediction.network`."""

    version: str
    peer_channels: Size = 32
    """Channels to a peer that NCCL begins with (p2pnChannelsPerPeer, p2pnChannels)."""
    collective_channels: Size = 24
    """Multiprocessors that a ring collective holds."""


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """Time of the host, in microseconds: small problems are bound by it."""

    call_us: Value
    """A call into torch: a view, an allocation."""
    launch_us: Value
    """A kernel that moves memory."""
    forward_us: Value
    """An attention call."""
    backward_us: Value
    post_us: Value
    """A hop by NCCL begun."""
    wait_us: Value
    collective_us: Value | None = None
    """A collective begun; None, also below: as `post_us`."""
    copy_us: Value | None = None
    """A hop by copy engine begun."""
    autograd_us: Value | None = None
    """What a backward pass takes beside its operations; None: nothing."""
    unlike: Value = Value(0.095, 0.3, "assumed", "as ranks of recorded runs of 2 H200")
    """How far ranks' hosts are apart in one run: the standard deviation. All go at the slowest one's pace."""
    pass_spread: Share | None = None
    """Standard deviation of a whole pass's host time, as a part of it: kinds' errors cancel. None: `launch_us`'s."""


class HostPass(msgspec.Struct, frozen=True, kw_only=True):
    """What a pass of a strategy took that the host was the bound of."""

    strategy: str
    kernel: str
    hops: Literal["nccl", "copy"]
    ranks: Size
    backward: bool
    kinds: dict[str, int]
    """How many operations of each kind, by the names of `Host`, its program had."""
    us: Positive
    """Of the slowest rank."""
    spread: Share = 0.1
    """Standard deviation from turn to turn, as a part of the time."""
    turns: Size = 1
    ranks_us: list[float] = []
    """Of every rank, from the call of a pass to its return."""
    source: str


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """One machine."""

    schema: str = _SCHEMA
    name: str
    device: str
    created: str
    multiprocessors: Size
    memory_bytes: Size
    """Of a device."""
    environment: dict[str, str]
    """Versions of driver, torch, NCCL, cuDNN and flash-attn that the figures are of."""
    kernels: list[KernelFigures]
    memory_gb_s: Value
    """Of kernels that only move memory, read and written together."""
    reorder_gb_s: Value
    """Of those that change the order in memory, as packing for an all-to-all does."""
    touch_us: Value
    """Shortest time of such a kernel, with the gap after it."""
    same_host: Link
    other_host: Link
    nccl: Nccl
    contention: Value
    """How much of the multiprocessors that a hop's kernel holds is lost to a block beside it."""
    hop_first: Value
    """How often a hop begins before the block that it became ready together with."""
    host: Host
    passes: list[HostPass] = []
    """What the host's times are told by, where they were measured."""
    elsewhere: dict[str, Value] = {}
    """By what is the bound, ``device`` or ``host``: how many times as wide as by its inputs an interval is on another
    machine of the kind, for four of five runs that were held out to lie within. One's own machine needs none."""
    handover_us: Value
    """From an event on one stream to another that waited for it."""
    heat: Value
    """How much longer a block takes on a device that always computes than on a cool one."""
    heat_s: Value = Value(0.15, 0.3, "assumed", "as an H200 does")
    """Seconds of computing after which all but 1 / e of that is there."""
    unlike: Value
    """How far devices of this kind differ in speed: the standard deviation. A ring goes at its slowest one's."""
    noise: Value
    """Spread of a run's time from day to day that nothing here explains."""
    unsteady_us: Value = Value(200.0, 0.5, "assumed", "as on H200: of runs of 2 to 8 ms that were held out")
    """And of that, what a run has however short it is."""
    unmeasured: list[str] = []
    """What could not be measured, and why."""

    def slowed(self, kernel: KernelFigures, duty: float, busy_s: float | None) -> float:
        """How many times as long as on a cool device a block takes, of a duty that has lasted for some time."""
        warm = 1.0 if busy_s is None or not self.heat_s.value else 1 - math.exp(-busy_s / self.heat_s.value)
        return 1 + (kernel.heat or self.heat).value * duty * warm

    def kernel(self, name: str) -> KernelFigures:
        """Raises `UsageError` where the file has no curves of it."""
        for kernel in self.kernels:
            if kernel.name == name:
                return kernel
        known = ", ".join(kernel.name for kernel in self.kernels) or "none"
        raise UsageError(f"machine {self.name!r} has no curves of kernel {name!r}: it has {known} (ringprof calibrate)")


def read_calibration(path: str | os.PathLike[str]) -> Calibration:
    """Read a calibration file, or a bundled one by its name. Raises `InputError` and `UsageError`."""
    name = os.fspath(path)
    if name in BUNDLED:
        return _bundled(name)
    if not name.endswith(".json") and not os.path.exists(name):
        raise UsageError(f"no machine {name!r}; there are: {', '.join(BUNDLED)}, or a file of `ringprof calibrate`")
    return parse_calibration(read_small(name, "a calibration"), name)


@cache
def _bundled(name: str) -> Calibration:
    """Read once: curves that were fitted to a machine are kept with it."""
    return parse_calibration((files(__package__) / "machines" / f"{name}.json").read_bytes(), name)


def parse_calibration(data: bytes, name: str) -> Calibration:
    """Decode a calibration; ``name`` is where it lies. Raises `InputError`."""
    calibration = decode_json(data, Calibration, name, "a calibration")
    if calibration.schema != _SCHEMA:
        raise InputError(f"{name}: schema {calibration.schema!r} is not {_SCHEMA!r}: calibrate again")
    if not all(math.isfinite(sample.ns) for kernel in calibration.kernels for sample in kernel.samples):
        raise InputError(f"{name}: not a calibration: a time is not finite")
    missing = (f"same_host.{one}_gb_s" for one in COLLECTIVES if one not in calibration.same_host.collective_gb_s)
    zero = (figure for figure, value in figures(calibration) if figure.endswith("_gb_s") and not value.value)
    for figure in (*missing, *zero):
        raise InputError(f"{name}: not a calibration: {figure} must be more than 0")
    return calibration


def figures(of: Any, within: str = "") -> Iterator[tuple[str, Value]]:
    """Every `Value` of a calibration by its name in the file; of kernels and what only a machine's kind has, none."""
    for name in of.__struct_fields__:
        found = getattr(of, name)
        if isinstance(found, Value):
            yield within + name, found
        elif isinstance(found, Host | Link):
            yield from figures(found, f"{name}.")
        elif name == "collective_gb_s":
            yield from ((f"{within}{operation}_gb_s", value) for operation, value in found.items())


def calibration_json(calibration: Calibration) -> bytes:
    """The text of a calibration file."""
    return msgspec.json.format(msgspec.json.encode(calibration), indent=1) + b"\n"


def assumed(name: str, device: str, multiprocessors: int, memory_bytes: int) -> Calibration:
    """What is known of no machine in particular: of the order of a Hopper GPU's figures. A place to begin from."""

    def about(value: float, why: str = "of the usual order") -> Value:
        return Value(value, 0.3, "assumed", why)

    def kernel(name: str, *, fills: bool) -> KernelFigures:
        lead, tail = about(0.007), about(0.012) if fills else about(0.0, "a kernel of many short blocks")
        return KernelFigures(name=name, fills_device=fills, tail=tail, lead=lead, samples=[])

    kernels = [kernel(one, fills=one == "cudnn") for one in ("cudnn", "flash-attn", "torch-flash")]
    host = Host(
        call_us=about(2.0), launch_us=about(12.0), forward_us=about(60.0), backward_us=about(100.0),
        post_us=about(150.0), wait_us=about(15.0), collective_us=about(150.0), copy_us=about(150.0),
        autograd_us=about(300.0),
    )  # fmt: skip
    return Calibration(
        name=name, device=device, created="", multiprocessors=multiprocessors, memory_bytes=memory_bytes,
        environment={}, kernels=kernels,
        memory_gb_s=about(3000.0), reorder_gb_s=about(1000.0), touch_us=about(4.0),
        same_host=Link(
            channel_gb_s=about(18.0), hop_gb_s=about(350.0), total_gb_s=about(390.0), latency_us=about(40.0),
            collective_gb_s={"all_to_all": about(310.0), "all_gather": about(300.0), "reduce_scatter": about(300.0)},
        ),
        other_host=Link(
            channel_gb_s=about(13.0), hop_gb_s=about(45.0), total_gb_s=about(40.0), latency_us=about(50.0),
            collective_gb_s={},
        ),
        nccl=Nccl(version="2.28"), contention=about(0.83), hop_first=about(0.35), host=host, handover_us=about(5.0),
        heat=about(0.1), unlike=about(0.015), noise=about(0.0185),
    )  # fmt: skip


def base_for(device: str) -> Calibration:
    """The bundled machine of this device; where there is none, one that knows nothing."""
    for name in BUNDLED:
        known = read_calibration(name)
        if known.device == device:
            return known
    return assumed(device, device, 132, 80 << 30)
