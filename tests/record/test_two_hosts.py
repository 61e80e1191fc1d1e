"""One run over two hosts: who is where, what crossed the wire by the closed formulas, and every rank's trace in one folder."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from ringprof.run import Run, Sent, read_run
from tests.record.two_hosts import TwoHosts

SEQ, HEADS, HEAD_DIM = 1024, 2, 32
BF16, FP32 = 2, 4
LOCAL_BYTES = SEQ // 4 * HEADS * HEAD_DIM
"""Elements of one rank's K, V or Q."""
SHAPE = ["--seq", str(SEQ), "--heads", str(HEADS), "--head-dim", str(HEAD_DIM), "--device", "cpu", "--iters", "1"]


def printed(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob("printed*.txt")))


def recorded(hosts: TwoHosts, folder: Path, strategy: str, *more: str) -> Run:
    hosts.start(["record", "--strategy", strategy, *SHAPE, *more], [folder, folder])
    assert hosts.wait() == [0, 0], printed(folder)
    return read_run(folder / "traces/run.json")


def crossing(sent: list[Sent], link: str) -> int:
    return sum(entry.sent_bytes for entry in sent if entry.link == link)


def traces_of_all_ranks(run: Run, folder: Path) -> None:
    """Each is a whole trace, and its own rank's."""
    for entry in run.traces:
        with gzip.open(folder / entry.path) as file:
            trace = json.load(file)
        assert trace["distributedInfo"]["rank"] == entry.rank
        assert any(event.get("name") == "ringprof::iteration" for event in trace["traceEvents"])


def test_separate_folders_on_two_hosts_make_one_run(hosts: TwoHosts, tmp_path: Path) -> None:
    """The second host has a file system of its own where the first has the output: its traces are sent."""
    other = tmp_path / "disk-of-the-second"
    other.mkdir()
    hosts.start(
        ["record", "--strategy", "zigzag", *SHAPE, "--output", str(tmp_path / "traces/run.json")],
        [tmp_path, tmp_path], before=f"mkdir -p {tmp_path}/traces && mount --bind {other} {tmp_path}/traces",
    )  # fmt: skip
    assert hosts.wait() == [0, 0], printed(tmp_path)
    run = read_run(tmp_path / "traces/run.json")
    assert printed(tmp_path).count("next: ringprof report") == 1
    traces_of_all_ranks(run, tmp_path / "traces")
    assert list(other.iterdir()) == [] and not list(tmp_path.glob("ringprof-trace-*"))
    # Namespaces have the machine's one name: the launcher's number tells them apart.
    first, second = dict.fromkeys(run.topology.hosts)
    assert run.topology.hosts == [first, first, second, second] and (first[-2:], second[-2:]) == ("#0", "#1")
    assert run.topology.local_ranks == [0, 1, 0, 1] and run.topology.ranks_per_host == 2
    assert run.work is not None
    for rank, work in enumerate(run.work):
        # A flat ring: ranks 1 and 3 send all they send to the other host. K and V make 3 hops a pass; dK and dV, which
        # travel in float32, make 4.
        link = "other_host" if rank % 2 else "same_host"
        expected = 2 * 3 * 2 * LOCAL_BYTES * BF16 + 4 * 2 * LOCAL_BYTES * FP32
        assert {entry.link for entry in work.sent} == {link} and crossing(work.sent, link) == expected
