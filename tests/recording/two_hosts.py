"""Two hosts on one machine: two network namespaces joined by a link of limited rate, with torchrun in each."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.recording.command import HANGS_S, environment

RATE = "400mbit"
PORT = 29_511


class TwoHosts:
    """Pair of network namespaces, by number, each with its own torchrun."""

    def __init__(self, name: str) -> None:
        self.namespaces = [f"{name}-{node}" for node in range(2)]
        self.devices = [f"{name}v{node}" for node in range(2)]
        self.addresses = ["10.77.0.1", "10.77.0.2"]
        self._started: list[subprocess.Popen[str]] = []

    def set_up(self) -> None:
        for namespace in self.namespaces:
            _tool("ip", "netns", "add", namespace)
        _tool("ip", "link", "add", self.devices[0], "netns", self.namespaces[0], "type", "veth",
              "peer", "name", self.devices[1], "netns", self.namespaces[1])  # fmt: skip
        for namespace, device, address in zip(self.namespaces, self.devices, self.addresses, strict=True):
            _tool("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", device)
            for up in (device, "lo"):
                _tool("ip", "-n", namespace, "link", "set", up, "up")
            _tool("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", "rate", RATE,
                  "burst", "256kb", "latency", "200ms")  # fmt: skip

    def tear_down(self) -> None:
        for namespace in self.namespaces:
            self.kill(namespace)
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)
        for process in self._started:
            process.wait(HANGS_S)

    def start(self, arguments: list[str], folders: list[Path], ranks: int = 2, before: str = ":") -> None:
        """Start torchrun on both hosts, each with an output file ``printed0.txt`` or ``printed1.txt`` in its folder.

        ``before`` is a shell command that the second host runs first, in a mount namespace of its own.
        """
        for node, folder in enumerate(folders):
            program = [
                sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(ranks),
                "--node-rank", str(node), "--rdzv-backend", "c10d", "--rdzv-id", "run",
                "--rdzv-endpoint", f"{self.addresses[0]}:{PORT}", "--rdzv-conf",
                f"is_host={1 - node},timeout={HANGS_S}",
                "--local-addr", self.addresses[node], "-m", "ringprof", *arguments,
            ]  # fmt: skip
            self.start_process(node, program, folder, before if node else ":", f"printed{node}.txt")

    def start_process(
        self, node: int, program: list[str], folder: Path, before: str = ":", printed: str = "printed.txt",
        **env: str,
    ) -> subprocess.Popen[str]:  # fmt: skip
        """Start a program on one host."""
        shell = ["sh", "-c", f'{before} && exec "$@"', "sh", *program]
        with (folder / printed).open("w") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespaces[node], *shell], cwd=folder, stdout=output, stderr=output,
                text=True, start_new_session=True,
                env=environment(GLOO_SOCKET_IFNAME=self.devices[node], OMP_NUM_THREADS="1", TMPDIR=str(folder), **env),
            )  # fmt: skip
        self._started.append(process)
        return process

    def wait(self, seconds: float = HANGS_S) -> list[int]:
        """Wait for all started processes and return their exit codes."""
        return [process.wait(seconds) for process in self._started]

    def pids(self, node: int) -> list[int]:
        """Return the ids of all processes of one host."""
        return _pids(self.namespaces[node])

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks on both hosts."""
        pids = []
        for node in range(2):
            for pid in self.pids(node):
                try:
                    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                except OSError:
                    continue
                if any(variable.startswith(b"LOCAL_RANK=") for variable in variables):
                    pids.append(pid)
        return pids

    def kill(self, namespace: str) -> None:
        """Kill all processes of one host."""
        for pid in _pids(namespace):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def disconnect(self) -> None:
        """Take down the link between the hosts."""
        _tool("ip", "-n", self.namespaces[1], "link", "set", self.devices[1], "down")


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Yield the two hosts; skip, with the reason, where namespaces are not permitted."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"network namespaces need {' and '.join(missing)} (iproute2)")
    hosts = TwoHosts(f"rp{os.getpid() % 1_000_000}")
    try:
        hosts.set_up()
    except subprocess.CalledProcessError as error:
        hosts.tear_down()
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
    try:
        yield hosts
    finally:
        hosts.tear_down()


def _tool(*command: str) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True)


def _pids(namespace: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return [int(pid) for pid in done.stdout.split()]
