"""What a driver tells of a GPU through the timed iterations, with a driver of our own; and what is said of it."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringprof.record import device_watch
from ringprof.record.device_watch import DeviceWatch, looking, open_watch, watching
from ringprof.report.sections.machine import in_words
from ringprof.run import DeviceState
from tests.record.command import HANGS_S


class Driver:
    """Answers as NVML does: one clock, power, temperature and mask a look, the last for ever; None is refused."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, looks: list[tuple[int | None, int | None, int | None, int | None]]) -> None:
        self.looks, self.at, self.asked = looks, -1, threading.Event()

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1234":
            raise RuntimeError("Not Found")
        return uuid

    def nvmlDeviceGetClockInfo(self, handle: str, which: int) -> int:
        self.at += 1
        if self.at + 1 >= len(self.looks):
            self.asked.set()
        return self._told(0)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return self._told(1)

    def nvmlDeviceGetTemperature(self, handle: str, which: int) -> int:
        return self._told(2)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return self._told(3)

    def nvmlDeviceGetMaxClockInfo(self, handle: str, which: int) -> int:
        return 1980

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return 700_000

    def _told(self, column: int) -> int:
        value = self.looks[min(self.at, len(self.looks) - 1)][column]
        if value is None:
            raise RuntimeError("Not Supported")
        return value


def test_median_extremes_and_what_held_it_back() -> None:
    driver = Driver([(1980, 500_000, 50, 0x1), (1500, 690_500, 60, 0x4), (1700, 700_000, 64, 0x4 | 0x20)])
    watch = DeviceWatch(driver, "GPU-1234")
    for _ in range(3):
        watch.look()
    assert watch.state() == DeviceState(
        looks=3, sm_clock_mhz=1700, least_sm_clock_mhz=1500, rated_sm_clock_mhz=1980, power_w=690.5,
        power_limit_w=700.0, hottest_celsius=64, held_back={"power cap": 2 / 3, "software thermal slow-down": 1 / 3},
    )  # fmt: skip


def test_what_the_driver_does_not_tell_is_none() -> None:
    watch = DeviceWatch(Driver([(None, None, 41, None)]), "GPU-1234")
    watch.look()
    state = watch.state()
    assert state is not None
    assert (state.sm_clock_mhz, state.power_w, state.hottest_celsius, state.held_back) == (None, None, 41, {})
    assert DeviceWatch(Driver([(None, None, None, 0x4)]), "GPU-1234").state() is None


def test_it_looks_in_between_and_no_longer_than_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_watch, "EVERY_S", 0.001)
    driver = Driver([(1000, 1000, 30, 0)] * 5)
    watch = DeviceWatch(driver, "GPU-1234")
    with looking(watch):
        assert driver.asked.wait(timeout=HANGS_S)
    state = watch.state()
    assert state is not None and state.looks >= 5
    assert not [thread for thread in threading.enumerate() if thread.name == "ringprof device watch"]


def test_a_gpu_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Driver([(1000, 1000, 30, 0)]))
    assert open_watch("1234") is not None
    assert open_watch("a-mig-slice") is None
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))
    with watching(torch.device("cuda", 0)) as watch:
        assert watch is not None
    state = watch.state()
    assert state is not None and state.sm_clock_mhz == 1000


def test_without_a_driver_or_a_gpu_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with watching(torch.device("cpu")) as watch:
        assert watch is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_watch("1234") is None


def state(**changes: Any) -> DeviceState:
    known: dict[str, Any] = {
        "looks": 10, "sm_clock_mhz": 1980, "least_sm_clock_mhz": 1965, "rated_sm_clock_mhz": 1980, "power_w": 500.0,
        "power_limit_w": 700.0, "hottest_celsius": 50,
    }  # fmt: skip
    return DeviceState(**(known | changes))


def test_gpus_at_their_highest_clock_are_a_line() -> None:
    assert in_words({0: state(), 1: state(power_w=520.0, hottest_celsius=61)}) == [
        "GPUs while they were timed: SM clock 1,980 of 1,980 MHz, 500 to 520 of 700 W, at most 61 °C"
    ]


def test_what_held_gpus_back_and_which_is_slower_is_said() -> None:
    held = {0: state(sm_clock_mhz=1800, held_back={"power cap": 0.9}), 1: state(sm_clock_mhz=1600)}
    first, second, third = in_words(held)
    assert "SM clock 1,600 to 1,800 of 1,980 MHz" in first
    # 1600 of 1980 MHz.
    assert second.startswith(
        "held back by power cap (1 of 2 ranks, in 90 % of the samples): median SM clock up to 19.2 % below the highest;"
    )
    assert third == "rank 1's clock is 11.1 % below rank 0's"
    assert in_words({0: state(sm_clock_mhz=1800)})[1].startswith("held back by what is not told (1 of 1 ranks): ")


def test_a_limit_that_cost_no_clock_holds_nothing_back() -> None:
    # 1972 of 1980 MHz is 0.4 % below.
    at_limit = state(sm_clock_mhz=1972, held_back={"power cap": 0.25})
    assert in_words({0: state(), 1: at_limit})[1:] == [
        "the driver reports power cap (1 of 2 ranks, in 25 % of the samples), clock unaffected"
    ]
    unknown = DeviceState(looks=4, power_w=700.0, held_back={"power cap": 1.0})
    assert in_words({0: unknown})[1].endswith("(1 of 1 ranks, in 100 % of the samples), clock not known")
    both = {0: state(sm_clock_mhz=1800, held_back={"power cap": 1.0}), 1: at_limit}
    assert [line.split(" (")[0] for line in in_words(both)[1:3]] == [
        "held back by power cap", "the driver reports power cap",
    ]  # fmt: skip


def test_what_is_not_known_is_not_said() -> None:
    assert in_words({0: DeviceState(looks=3, hottest_celsius=40)}) == ["GPUs while they were timed: at most 40 °C"]
