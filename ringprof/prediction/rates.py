"""Kernel rates of a calibration, by its curves: what `ringprof.kernel_rates` reads."""

from __future__ import annotations

from itertools import product
from typing import Literal

import msgspec

from ringprof.kernel_rates import KernelRate
from ringprof.prediction.calibration import Calibration
from ringprof.prediction.kernel_model import OutsideCalibration
from ringprof.prediction.machine import Curves
from ringprof.record.dryrun.schedule import AttentionOp

_TOKENS = tuple(2**octave for octave in range(10, 19))
_GROUPS = (1, 4, 8)
_HEADS = 32
_PHASES: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")


def with_rates(calibration: Calibration) -> Calibration:
    """Return the calibration with the rates of its kernels at square blocks of 1024 to 262,144 tokens.

    Lengths and numbers of heads per kv head that no sample of the kernel is near to are left out.
    """
    rates = []
    for kernel in calibration.kernels:
        curves = Curves(calibration, kernel.name)
        plain = [sample for sample in kernel.samples if sample.pairs is None]
        for head_dim in sorted({sample.head_dim for sample in plain}):
            lengths = [min(sample.q, sample.kv) for sample in plain if sample.head_dim == head_dim]
            groups = {sample.heads / sample.kv_heads for sample in plain if sample.head_dim == head_dim}
            near_groups = [group for group in _GROUPS if any(group / 2 <= known <= 2 * group for known in groups)]
            for phase, group, causal, tokens in product(_PHASES, near_groups, (True, False), _TOKENS):
                if not min(lengths) <= tokens <= 2 * max(lengths):
                    continue
                block = AttentionOp(
                    label="", phase=phase, batch=1, q=tokens, kv=tokens, heads=_HEADS, kv_heads=_HEADS // group,
                    head_dim=head_dim, causal=causal,
                )  # fmt: skip
                try:
                    estimate = curves.estimate(block)
                except OutsideCalibration:
                    continue
                rates.append(
                    KernelRate(
                        kernel=kernel.name, phase=phase, head_dim=head_dim, group=group, causal=causal, tokens=tokens,
                        tflops=round(block.flops() / estimate.ns / 1e3, 1), spread=round(estimate.spread, 4),
                    )
                )  # fmt: skip
    return msgspec.structs.replace(calibration, kernel_rates=rates)
