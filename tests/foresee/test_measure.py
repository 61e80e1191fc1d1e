"""What `calibrate` finds of a host, where its parts need no GPU."""

from __future__ import annotations

import msgspec
import pytest

pytest.importorskip("torch", reason="a calibration computes")

import torch

from ringprof.foresee.calibration import Calibration, Host, Value, read_calibration
from ringprof.foresee.measure import Bench, _host_in_a_pass


def with_host(us: float) -> Calibration:
    machine = read_calibration("h200")
    names = machine.host.__struct_fields__
    return msgspec.structs.replace(machine, host=Host(**{name: Value(us, 0.1, "measured", "a loop") for name in names}))


def test_host_times_grow_to_those_of_a_pass() -> None:
    """Told a nanosecond a call, all grow alike; told a second, which no pass takes, they stay."""
    bench = Bench(torch.device("cpu"))
    grown = [value.value for value in msgspec.structs.astuple(_host_in_a_pass(bench, with_host(1e-3), "reference"))]
    assert min(grown) == pytest.approx(max(grown)) and grown[0] > 1.0
    kept = [value.value for value in msgspec.structs.astuple(_host_in_a_pass(bench, with_host(1e6), "reference"))]
    assert kept == pytest.approx([1e6] * len(kept))
