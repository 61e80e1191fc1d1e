"""Rates of the links within a node, from timed hops and from the tables that nccl-tests print.

``sendrecv_perf`` sends to the next rank of a ring, as a hop does. The busbw of ``all_gather_perf``,
``reduce_scatter_perf`` and ``alltoall_perf`` is the bytes that leave a rank divided by the time (doc/PERFORMANCE.md).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from ringprof.common.decoding import read_small
from ringprof.common.files import read_bytes
from ringprof.errors import InputError, UsageError
from ringprof.prediction.calibration import Calibration, Link, Nccl, measured
from ringprof.prediction.network import channels

_RANK = re.compile(r"# {1,8}Rank .{0,200}? on {1,80}(\S{1,200}) {1,8}device {1,8}[0-9]+ {1,8}\[[^\]]{0,40}\] (.{1,80})")
_PROGRAM = re.compile(r"\b(\w{1,40}?)_perf(?:_mpi)?\b")
_TAG = re.compile(r"\[[0-9,]{1,20}\]<std\w{3}>: ?")
"""Mark that Open MPI puts before each line."""
_FIGURE = re.compile(r"[0-9]{1,15}(\.[0-9]{1,9})?(e\+?[0-9]{1,2})?")
_OPERATIONS = {
    "sendrecv": "", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "alltoall": "all_to_all",
}  # fmt: skip
"""Program -> collective of a `Link`; empty for hops."""

_LARGE = 32 << 20
"""Bytes above which a message's time is mostly transfer; less in a log of shorter messages."""


class Table(NamedTuple):
    """Out-of-place results of one program on one set of ranks."""

    file: str
    program: str
    """Name without ``_perf``; one of `_OPERATIONS`."""
    hosts: list[str]
    """Host of each rank."""
    device: str
    rows: dict[int, tuple[float, float]]
    """Size in bytes -> time in microseconds, and bus bandwidth in GB/s."""


def hop_rates(times: Mapping[int, float], over: int, ranks: int, nccl: Nccl) -> dict[bool, list[float]]:
    """Return the GB/s of hops of more than ``over`` bytes: on all NCCL channels (True), and of one channel else.

    ``times`` are nanoseconds by size in bytes; that of the shortest message is the latency.
    """
    rates: dict[bool, list[float]] = {True: [], False: []}
    for size, ns in times.items():
        count = channels(size, ranks, 1, nccl, 0.0)
        all_channels = count >= nccl.peer_channels
        if size > over:
            rates[all_channels].append(size / max(ns - times[min(times)], 1.0) / (1 if all_channels else count))
    return rates


def with_hops(link: Link, latency_ns: float, rates: Mapping[bool, Sequence[float]], source: str) -> Link:
    """Return a link with the latency and the rates of hops that `hop_rates` found."""
    link = msgspec.structs.replace(link, latency_us=measured(latency_ns / 1e3, 0.3, source))
    if rates[False]:
        link = msgspec.structs.replace(link, channel_gb_s=measured(median(rates[False]), 0.05, source))
    if rates[True]:
        hop = measured(max(rates[True]), 0.03, source)
        link = msgspec.structs.replace(link, hop_gb_s=hop, total_gb_s=max(hop, link.total_gb_s, key=lambda v: v.value))
    return link


def is_log(path: str) -> bool:
    """Return whether a path is a file that nccl-tests printed, not a recorded run."""
    return os.path.isfile(path) and not path.endswith(".json") and b"busbw" in read_bytes(path, 1 << 20)


def read_tables(file: str) -> list[Table]:
    """Read all tables of a log that time links. Raises `InputError` where there are none."""
    tables: list[Table] = []
    named = _PROGRAM.search(file)
    program, hosts, device = named[1] if named else "", list[str](), ""
    columns: list[int] = []
    for line in read_small(file, "a log of nccl-tests").decode(errors="replace").splitlines():
        line = _TAG.sub("", line, count=1)
        if "#" in line:
            if rank := _RANK.search(line):
                if columns:
                    hosts, columns = [], []
                hosts.append(rank[1])
                device = rank[2].strip()
            elif "algbw" in line and "busbw" in line:
                titles = line[line.index("#") + 1 :].split()
                columns = [titles.index(title) for title in ("size", "time", "busbw") if title in titles]
                tables.append(Table(file, program, hosts, device, {}))
                continue
        if stated := _PROGRAM.search(line):
            program = stated[1]
        cells = line.split()
        if len(columns) == 3 and len(cells) > max(columns):
            size, us, gb_s = (_FIGURE.fullmatch(cells[column]) for column in columns)
            if size and us and gb_s and float(us[0]):
                tables[-1].rows[int(float(size[0]))] = float(us[0]), float(gb_s[0])
    usable = [table for table in tables if table.program in _OPERATIONS and len(table.hosts) > 1 and table.rows]
    if not usable:
        programs = ", ".join(
            sorted({f"{table.program or 'unnamed'}_perf, {len(table.hosts)} ranks" for table in tables})
        )
        raise InputError(
            f"{file}: no table that times links (found: {programs or 'none'}): sendrecv_perf, all_gather_perf,"
            " reduce_scatter_perf or alltoall_perf of nccl-tests on several GPUs, with the '# Rank' lines above it"
        )
    return usable


def calibrate_from_tables(tables: Sequence[Table], base: Calibration) -> Calibration:
    """Return ``base`` with the rates of links within a node that the tables show.

    Raises `UsageError` for tables of another device or of several nodes.
    """
    latencies, by_channels = list[float](), {True: list[float](), False: list[float]()}
    collectives = dict[str, list[float]]()
    for table in tables:
        if table.device != base.device:
            raise UsageError(f"{table.file}: of {table.device}, and the calibration is of {base.device}")
        if len(set(table.hosts)) > 1:
            raise UsageError(f"{table.file}: of several nodes: tables of the GPUs of one node show what its links do")
        if operation := _OPERATIONS[table.program]:
            collectives.setdefault(operation, []).append(max(gb_s for _, gb_s in table.rows.values()))
            continue
        times = {size: us * 1e3 for size, (us, _) in table.rows.items()}
        latencies.append(times[min(times)])
        for all_channels, rates in hop_rates(times, min(_LARGE, max(times) // 32), len(table.hosts), base.nccl).items():
            by_channels[all_channels] += rates
    source = f"nccl-tests, {' and '.join(sorted({str(len(table.hosts)) for table in tables}))} ranks"
    collective_gb_s = {name: measured(max(rates), 0.05, source) for name, rates in collectives.items()}
    link = msgspec.structs.replace(base.same_host, collective_gb_s=base.same_host.collective_gb_s | collective_gb_s)
    if latencies:
        link = with_hops(link, median(latencies), by_channels, source)
    return msgspec.structs.replace(base, same_host=link)
