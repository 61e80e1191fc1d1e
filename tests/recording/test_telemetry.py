"""Telemetry of a GPU during the timed iterations, and its connections, from fake drivers; their lines in a report."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringprof.recording import telemetry
from ringprof.recording.telemetry import (
    DeviceTelemetry,
    count_nvlinks,
    device_links,
    device_telemetry,
    list_adapters,
    sampling,
)
from ringprof.report.sections.machine import link_lines, state_lines
from ringprof.run import Adapter, DeviceLinks, DeviceState
from tests.recording.command import HANGS_S


class Driver:
    """Fake NVML: clock, power, temperature and mask per sample, the last repeated; None raises an error."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0
    NVML_TEMPERATURE_THRESHOLD_GPU_MAX = 3
    NVML_FI_DEV_POWER_INSTANT = 186
    NVML_SUCCESS = 0

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
        return self._value(0)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return self._value(1)

    def nvmlDeviceGetTemperature(self, handle: str, which: int) -> int:
        return self._value(2)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return self._value(3)

    def nvmlDeviceGetMaxClockInfo(self, handle: str, which: int) -> int:
        return 1980

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return 700_000

    def nvmlDeviceGetTemperatureThreshold(self, handle: str, which: int) -> int:
        return {self.NVML_TEMPERATURE_THRESHOLD_GPU_MAX: 87}[which]

    def _value(self, column: int) -> int:
        value = self.looks[min(self.at, len(self.looks) - 1)][column]
        if value is None:
            raise RuntimeError("Not Supported")
        return value


def test_telemetry_has_median_extremes_and_throttle_reasons() -> None:
    driver = Driver([(1980, 500_000, 50, 0x1), (1500, 690_500, 60, 0x4), (1700, 700_000, 64, 0x4 | 0x20)])
    gpu = DeviceTelemetry(driver, "GPU-1234")
    for _ in range(3):
        gpu.sample()
    assert gpu.state() == DeviceState(
        looks=3, sm_clock_mhz=1700, least_sm_clock_mhz=1500, rated_sm_clock_mhz=1980, power_w=690.5,
        highest_power_w=700.0, power_limit_w=700.0, instant_power=False, hottest_celsius=64, limit_celsius=87,
        held_back={"power cap": 2 / 3, "software thermal slow-down": 1 / 3},
    )  # fmt: skip


class InstantDriver(Driver):
    """Fake NVML with instantaneous power in mW as a field that may fail; its power usage lags far behind."""

    def __init__(self, instant: list[int | None]) -> None:
        super().__init__([(1600, 250_000, 50, 0x4)])
        self.instant = iter(instant)

    def nvmlDeviceGetFieldValues(self, handle: str, fields: list[int]) -> list[Any]:
        assert fields == [self.NVML_FI_DEV_POWER_INSTANT]
        power = next(self.instant)
        return [SimpleNamespace(nvmlReturn=3 if power is None else 0, value=SimpleNamespace(uiVal=power))]

    def NVMLError(self, code: int) -> Exception:
        return RuntimeError(code)


@pytest.mark.parametrize(
    ("powers", "expected"),
    [([690_000, 701_000, 650_000], (690.0, 701.0, True)), ([690_000, None], (250.0, 250.0, False))],
)
def test_power_is_instantaneous_where_the_driver_supports_it(
    powers: list[int | None], expected: tuple[float, float, bool]
) -> None:
    gpu = DeviceTelemetry(InstantDriver(powers), "GPU-1234")
    for _ in range(3):
        gpu.sample()
    state = gpu.state()
    assert state is not None
    assert (state.power_w, state.highest_power_w, state.instant_power) == expected


def test_values_unknown_to_the_driver_are_none() -> None:
    gpu = DeviceTelemetry(Driver([(None, None, 41, None)]), "GPU-1234")
    gpu.sample()
    state = gpu.state()
    assert state is not None
    assert (state.sm_clock_mhz, state.power_w, state.hottest_celsius, state.held_back) == (None, None, 41, {})
    assert DeviceTelemetry(Driver([(None, None, None, 0x4)]), "GPU-1234").state() is None


def test_telemetry_samples_only_within_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "SAMPLE_INTERVAL_S", 0.001)
    driver = Driver([(1000, 1000, 30, 0)] * 5)
    gpu = DeviceTelemetry(driver, "GPU-1234")
    with sampling(gpu):
        assert driver.asked.wait(timeout=HANGS_S)
    state = gpu.state()
    assert state is not None and state.looks >= 5
    assert not [thread for thread in threading.enumerate() if thread.name == "ringprof telemetry"]


def test_a_gpu_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Driver([(1000, 1000, 30, 0)]))
    uuids = ["1234", "a-mig-slice"]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[device.index]))
    with device_telemetry(torch.device("cuda", 1)) as slice_of_gpu:
        assert slice_of_gpu is None
    with device_telemetry(torch.device("cuda", 0)) as gpu:
        assert gpu is not None
    state = gpu.state()
    assert state is not None and state.sm_clock_mhz == 1000


def test_no_telemetry_without_a_driver_or_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with device_telemetry(torch.device("cpu")) as gpu:
        assert gpu is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))
    with device_telemetry(torch.device("cuda", 0)) as gpu:
        assert gpu is None


def state(**changes: Any) -> DeviceState:
    known: dict[str, Any] = {
        "looks": 10, "sm_clock_mhz": 1980, "least_sm_clock_mhz": 1965, "rated_sm_clock_mhz": 1980, "power_w": 500.0,
        "power_limit_w": 700.0, "hottest_celsius": 50,
    }  # fmt: skip
    return DeviceState(**(known | changes))


SECONDS = 10**9


def test_unthrottled_gpus_are_reported_in_one_line() -> None:
    assert state_lines({0: state(), 1: state(power_w=520.0, hottest_celsius=61)}, 95 * SECONDS // 100) == [
        "GPUs while they were timed (10 samples each in 0.95 s): SM clock 1,980 of 1,980 MHz, 500 to 520 of 700 W, "
        "at most 61 °C"
    ]


@pytest.mark.parametrize(
    ("timed_ns", "shown"),
    [(None, "(10 samples each)"), (23_160_000, "in 23 ms)"), (1_477_320_000, "in 1.5 s)"), (98 * SECONDS, "in 98 s)")],
)
def test_report_states_how_long_gpus_were_sampled(timed_ns: int | None, shown: str) -> None:
    assert shown in state_lines({0: state()}, timed_ns)[0]
    assert "(9 to 10 samples each" in state_lines({0: state(), 1: state(looks=9)}, timed_ns)[0]


def test_report_states_throttle_reasons_and_the_slower_gpu() -> None:
    held = {0: state(sm_clock_mhz=1800, power_w=690.0, held_back={"power cap": 0.9}), 1: state(sm_clock_mhz=1600)}
    first, second, third, fourth = state_lines(held)
    assert "SM clock 1,600 to 1,800 of 1,980 MHz" in first
    # 1800 and 1600 of 1980 MHz.
    assert second.startswith(
        "held back by power cap (1 of 2 ranks, in 90 % of the samples): median SM clock up to 9.1 % below the highest;"
    )
    assert third == (
        "the driver reports no limit (1 of 2 ranks): median SM clock up to 19.2 % below the highest, cause not certain"
        "; rates are of these clocks"
    )
    assert fourth == "rank 1's clock is 11.1 % below rank 0's"


CAPPED = {"power cap": 1.0}
LAGS = "; NVML's power is a mean over 1 s on most GPUs since Ampere, and lags behind in a run this short"


def test_power_cap_is_a_cause_only_near_the_power_limit() -> None:
    """A run of 1.5 s whose driver reports a cap in every sample, at 256 to 259 of 700 W."""
    ranks = {0: state(sm_clock_mhz=1650, power_w=256.0, held_back=CAPPED),
             1: state(sm_clock_mhz=1650, power_w=259.0, held_back=CAPPED)}  # fmt: skip
    said = (
        "the driver reports power cap (2 of 2 ranks, in 100 % of the samples) while the sampled power was 256 to 259 "
        "of 700 W: median SM clock up to 16.7 % below the highest, cause not certain; rates are of these clocks"
    )
    assert state_lines(ranks, 15 * SECONDS // 10)[1:] == [said + LAGS]
    # After 5 s a mean over 1 s is that of the run.
    assert state_lines(ranks, 5 * SECONDS)[1:] == [said]
    instant = {0: state(sm_clock_mhz=1650, power_w=256.0, highest_power_w=300.0, instant_power=True, held_back=CAPPED)}
    (line,) = state_lines(instant, SECONDS)[1:]
    assert "while the sampled power was at most 300 of 700 W: " in line and LAGS not in line


@pytest.mark.parametrize(
    ("sampled", "is_cause"),
    [
        ({"power_w": 665.0}, True),  # 95 % of 700 W
        ({"power_w": 664.9}, False),
        ({"power_w": 500.0, "highest_power_w": 690.0}, True),
        ({"power_w": None}, False),
        ({"power_w": 690.0, "power_limit_w": None}, False),
    ],
)
def test_power_cap_is_the_cause_from_95_percent_of_the_limit(sampled: dict[str, float | None], is_cause: bool) -> None:
    line = state_lines({0: state(sm_clock_mhz=1650, held_back=CAPPED, **sampled)})[1]
    assert line.startswith("held back by power cap") is is_cause
    assert line.startswith("the driver reports power cap") is not is_cause
    if sampled["power_w"] is None:
        assert " while the power is not known: " in line


def test_thermal_limit_is_a_cause_only_near_the_temperature_limit() -> None:
    heat = {"software thermal slow-down": 0.5}
    hot = state(sm_clock_mhz=1650, hottest_celsius=86, limit_celsius=87, held_back=heat)
    assert state_lines({0: hot})[1].startswith("held back by software thermal slow-down (1 of 1 ranks, in 50 % of the")
    cool = state(sm_clock_mhz=1650, hottest_celsius=56, limit_celsius=87, held_back=heat)
    assert " while the GPU was at most at 56 of 87 °C: " in state_lines({0: cool})[1]
    unknown = state(sm_clock_mhz=1650, hottest_celsius=56, held_back=heat)
    assert " while the GPU was at most at 56 °C, limit not known: " in state_lines({0: unknown})[1]


def test_unsampled_limit_is_the_cause_beside_other_limits() -> None:
    both = state(sm_clock_mhz=990, held_back={"hardware power brake": 1.0, "power cap": 0.5})
    (line,) = state_lines({0: both})[1:]
    assert line.startswith("held back by hardware power brake (1 of 1 ranks, in 100 % of the samples): ")
    assert line.endswith(
        "; the driver also reports power cap (1 of 1 ranks, in 50 % of the samples) while the sampled power was 500 of "
        "700 W"
    )


def test_limit_at_full_clock_is_not_throttling() -> None:
    # 1972 of 1980 MHz is 0.4 % below.
    at_limit = state(sm_clock_mhz=1972, power_w=690.0, held_back={"power cap": 0.25})
    assert state_lines({0: state(), 1: at_limit})[1:] == [
        "the driver reports power cap (1 of 2 ranks, in 25 % of the samples), clock unaffected"
    ]
    below = state(sm_clock_mhz=1972, power_w=207.0, held_back={"power cap": 0.25})
    assert state_lines({0: state(), 1: below})[1:] == [
        "the driver reports power cap (1 of 2 ranks, in 25 % of the samples) while the sampled power was 207 of 700 W, "
        "clock unaffected"
    ]
    unknown = DeviceState(looks=4, power_w=700.0, held_back={"power cap": 1.0})
    assert state_lines({0: unknown})[1] == (
        "the driver reports power cap (1 of 1 ranks, in 100 % of the samples) while the sampled power was 700 W, limit "
        "not known, clock not known"
    )
    both = {0: state(sm_clock_mhz=1800, power_w=690.0, held_back={"power cap": 1.0}), 1: at_limit}
    assert [line.split(" (")[0] for line in state_lines(both)[1:3]] == [
        "held back by power cap", "the driver reports power cap",
    ]  # fmt: skip


def test_unknown_telemetry_values_are_left_out() -> None:
    assert state_lines({0: DeviceState(looks=3, hottest_celsius=40)}) == [
        "GPUs while they were timed (3 samples each): at most 40 °C"
    ]


# --- connections of GPUs and hosts, from a fake driver and a fake folder -------------------------------


class LinkDriver:
    """Fake NVML with links, each as type and PCI address of its remote end; None is a link that is down."""

    def __init__(self, links: list[tuple[int, str] | None]) -> None:
        self.links = links

    def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:
        return int(self._at(link) is not None)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: str, link: int) -> int:
        return (self._at(link) or (0, ""))[0]

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: str, link: int) -> SimpleNamespace:
        return SimpleNamespace(busId=(self._at(link) or (0, ""))[1].encode())

    def _at(self, link: int) -> tuple[int, str] | None:
        if link >= len(self.links):
            raise RuntimeError("Invalid Argument")
        return self.links[link]


def test_nvlinks_are_counted_by_their_remote_end() -> None:
    assert count_nvlinks(LinkDriver([(2, "")] * 18), "gpu") == {"switch": 18}
    neighbours: list[tuple[int, str] | None] = [(0, "00000000:65:00.0"), None, (0, "00000000:65:00.0"), (0, "1:0.0")]
    assert count_nvlinks(LinkDriver(neighbours), "gpu") == {"00000000:65:00.0": 2, "1:0.0": 1}
    assert count_nvlinks(LinkDriver([None, None]), "gpu") == {}
    # A GPU that has no such links refuses the question.
    assert count_nvlinks(LinkDriver([]), "gpu") is None


def test_older_driver_counts_nvlinks_of_unknown_remote() -> None:
    driver = SimpleNamespace(nvmlDeviceGetNvLinkState=LinkDriver([(0, "x"), (0, "x")]).nvmlDeviceGetNvLinkState)
    assert count_nvlinks(driver, "gpu") == {"unknown": 2}


def _port(folder: Path, name: str, state: str, rate: str, layer: str) -> None:
    port = folder / name / "ports" / "1"
    port.mkdir(parents=True)
    for file, said in (("state", state), ("rate", rate), ("link_layer", layer)):
        (port / file).write_text(said + "\n")


def test_active_ports_of_adapters_are_listed(tmp_path: Path) -> None:
    _port(tmp_path, "mlx5_1", "4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand")
    _port(tmp_path, "mlx5_0", "4: ACTIVE", "2.5 Gb/sec (1X SDR)", "Ethernet")
    _port(tmp_path, "mlx5_2", "1: DOWN", "40 Gb/sec (4X QDR)", "InfiniBand")
    (tmp_path / "mlx5_3" / "ports" / "1").mkdir(parents=True)
    assert list_adapters(tmp_path) == [
        Adapter(name="mlx5_0:1", gbits=2.5, layer="Ethernet"),
        Adapter(name="mlx5_1:1", gbits=400.0, layer="InfiniBand"),
    ]
    assert list_adapters(tmp_path / "nowhere") is None


def test_device_links_of_a_cpu_and_of_a_gpu_without_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert device_links(torch.device("cpu"), first_on_host=True) is None
    _port(tmp_path, "mlx5_0", "4: ACTIVE", "strange", "")
    monkeypatch.setattr(telemetry, "ADAPTERS", tmp_path)
    monkeypatch.setattr(telemetry, "nvml_handle", lambda device: None)
    assert device_links(torch.device("cuda", 0), first_on_host=True) == DeviceLinks(adapters=[Adapter(name="mlx5_0:1")])
    assert device_links(torch.device("cuda", 1), first_on_host=False) is None


def test_device_links_are_reported_in_one_line() -> None:
    ports = [Adapter(name=f"mlx5_{number}:1", gbits=400.0, layer="InfiniBand") for number in range(8)]
    first = DeviceLinks(nvlinks={"switch": 18}, adapters=[*ports, Adapter(name="mlx5_8:1", gbits=100.0)])
    assert link_lines([first, DeviceLinks(nvlinks={"switch": 18})]) == [
        "links: each GPU 18 NVLinks to switches; each host 8 x 400 Gbit/s InfiniBand + 1 x 100 Gbit/s network"
    ]
    assert link_lines([DeviceLinks(nvlinks={"a": 2, "b": 2})]) == ["links: each GPU 4 NVLinks to 2 GPUs"]
    assert link_lines([DeviceLinks(nvlinks={})]) == ["links: each GPU no NVLink"]
    assert link_lines([]) == []
