"""Connections of GPUs and hosts, read from a fake driver and a fake folder, and their lines in a report."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ringprof.recording import telemetry
from ringprof.recording.telemetry import count_nvlinks, device_links, list_adapters
from ringprof.report.sections.machine import link_lines
from ringprof.run import Adapter, DeviceLinks


class Driver:
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
    assert count_nvlinks(Driver([(2, "")] * 18), "gpu") == {"switch": 18}
    neighbours: list[tuple[int, str] | None] = [(0, "00000000:65:00.0"), None, (0, "00000000:65:00.0"), (0, "1:0.0")]
    assert count_nvlinks(Driver(neighbours), "gpu") == {"00000000:65:00.0": 2, "1:0.0": 1}
    assert count_nvlinks(Driver([None, None]), "gpu") == {}
    # A GPU that has no such links refuses the question.
    assert count_nvlinks(Driver([]), "gpu") is None


def test_older_driver_counts_nvlinks_of_unknown_remote() -> None:
    driver = SimpleNamespace(nvmlDeviceGetNvLinkState=Driver([(0, "x"), (0, "x")]).nvmlDeviceGetNvLinkState)
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
