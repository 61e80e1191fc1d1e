"""A machine as `events.simulate` asks for it: a calibration, a cluster, and one draw of what is not known exactly."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from ringprof.prediction.calibration import Calibration, KernelFigures, KernelSample
from ringprof.prediction.host_model import host_ns
from ringprof.prediction.kernel_model import Curve, Estimate, OutsideCalibration
from ringprof.prediction.network import Links
from ringprof.prediction.simulator import BlockTime, Transfer
from ringprof.record.dryrun.schedule import AttentionOp, CommStart, MemoryOp, Program

JITTER = 0.01
"""Of a block from one call to the next."""


class Curves:
    """The curves of one kernel on one machine, with the estimates that were asked for."""

    def __init__(self, calibration: Calibration, kernel: str) -> None:
        self.kernel: KernelFigures = calibration.kernel(kernel)
        self._calibration = calibration
        self._of: dict[tuple[str, int], Curve] = {}
        self._known: dict[tuple[object, ...], Estimate] = {}

    def at(self, block: AttentionOp) -> Estimate:
        """On a hot device. Raises `OutsideCalibration`."""
        key = (
            block.phase, block.batch, block.q, block.kv, block.heads, block.kv_heads, block.head_dim, block.causal,
            block.pairs, block.sequences,
        )  # fmt: skip
        if key not in self._known:
            self._known[key] = self._curve(block.phase, block.head_dim, masked=block.pairs is not None).at(block)
        return self._known[key]

    def _curve(self, phase: str, head_dim: int, *, masked: bool) -> Curve:
        name = f"{self.kernel.name} {phase}{' of documents and windows' if masked else ''}"
        if (name, head_dim) not in self._of:
            samples = [
                sample for sample in self.kernel.samples if (sample.phase, sample.pairs is not None) == (phase, masked)
            ]
            known = sorted({sample.head_dim for sample in samples})
            if samples and head_dim not in known:
                raise OutsideCalibration(f"kernel {name!r} is calibrated for head_dim {known}, not {head_dim}")
            samples = [sample for sample in samples if sample.head_dim == head_dim]
            self._of[name, head_dim] = Curve(name, samples, self._calibration.multiprocessors, self._cooler)
        return self._of[name, head_dim]

    def _cooler(self, sample: KernelSample) -> float:
        slowed = self._calibration.slowed
        return slowed(self.kernel, 1.0, None) / slowed(self.kernel, sample.duty, sample.busy_s)


_KNOWN: deque[tuple[Calibration, str, Curves]] = deque(maxlen=4)


def curves_of(calibration: Calibration, kernel: str) -> Curves:
    """The curves of a kernel, kept for the next question to the same machine: fitting them takes a tenth of a second.

    Raises `UsageError` where the file has none.
    """
    for machine, name, curves in _KNOWN:
        if machine is calibration and name == kernel:
            return curves
    made = Curves(calibration, kernel)
    _KNOWN.append((calibration, kernel, made))
    return made


@dataclass(frozen=True)
class Draw:
    """One possible machine; `Draw()` is the likeliest."""

    seed: int = 0
    host: float = 1.0
    """Factor on its host's times."""


LIKELIEST = Draw()


class CalibratedMachine:
    """Times by a calibration. Ranks' duty makes their blocks cooler and faster (see `Calibration.heat`)."""

    def __init__(
        self, calibration: Calibration, links: Links, curves: Curves, draw: Draw = LIKELIEST,
        duty: Mapping[int, float] | None = None, busy_s: float | None = None,
    ) -> None:  # fmt: skip
        """``busy_s`` is for how long the devices have computed; None: for long."""
        self._calibration, self._curves, self._draw = calibration, curves, draw
        self.links = links
        self.handover_ns = calibration.handover_us.value * 1e3
        self._duty, self._busy_s = duty or {}, busy_s
        self._chance = random.Random(draw.seed)
        self._jitter: dict[tuple[int, int], float] = defaultdict(lambda: self._chance.gauss(1.0, JITTER))
        self._unlike: dict[int, float] = defaultdict(lambda: self._chance.gauss(1.0, calibration.unlike.value))
        hosts = random.Random(draw.seed)
        self._host_of: dict[int, float] = defaultdict(lambda: hosts.gauss(1.0, calibration.host.unlike.value))

    def block(self, rank: int, place: int, block: AttentionOp) -> BlockTime:
        slowed = self._calibration.slowed
        kernel = self._curves.kernel
        cool = slowed(kernel, self._duty.get(rank, 1.0), self._busy_s) / slowed(kernel, 1.0, None)
        jitter = self._jitter[rank, place] * self._unlike[rank] if self._draw.seed else 1.0
        total = self._curves.at(block).ns * cool * jitter
        lead = kernel.lead.value * total if block.phase == "backward" else 0.0
        return BlockTime(total, lead, kernel.tail.value * total, kernel.fills_device)

    def touch(self, rank: int, place: int, touch: MemoryOp) -> float:
        calibration = self._calibration
        rate = calibration.reorder_gb_s.value if touch.strided else calibration.memory_gb_s.value
        return calibration.touch_us.value * 1e3 + touch.bytes / rate

    def leg(self, post: CommStart, sender: int, receiver: int) -> Transfer:
        return self.links.leg(post, sender, receiver)

    def collective(self, post: CommStart) -> float:
        return self.links.collective(post)

    def share(self, post: CommStart) -> float:
        return self.links.share(post)

    def capacity(self, link: Hashable) -> float:
        return self.links.capacity(link)

    def hop_is_first(self, rank: int, place: int) -> bool:
        return self._chance.random() < self._calibration.hop_first.value

    def host(self, program: Program) -> list[float]:
        factor = self._draw.host * (self._host_of[program.rank] if self._draw.seed else 1.0)
        return [ns * factor for ns in host_ns(self._calibration, self._curves.kernel, program)]
