"""Traces of recorded runs, stripped to what Flight Recorder dumps and NCCL Inspector's files would say of them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from ringprof.analysis.rank import Rank
from ringprof.analysis.transfers.hops import Split
from ringprof.results.analysis import Analysis

COLLECTIVES = {
    "all_gather": ("_all_gather_base", "AllGather"), "reduce_scatter": ("_reduce_scatter_base", "ReduceScatter"),
    "all_reduce": ("all_reduce", "AllReduce"), "all_to_all": ("all_to_all", "AllReduce"),
}  # fmt: skip
"""Names by PyTorch and by NCCL. NCCL runs an all-to-all as sends and receives, so here it stands for any collective."""


class Truth(NamedTuple):
    """Exact figures of one operation, from the trace, in nanoseconds."""

    time_ns: int
    wait_ns: int

    @property
    def wire_ns(self) -> int:
        return self.time_ns - self.wait_ns


def stripped_splits(rank: Rank) -> list[Split]:
    """Return the communication kernels that are told to the logs, in the order in which they were launched."""
    kept = [split for split in rank.splits if split.transfer.group[1] and _is_told(split)]
    return sorted(kept, key=lambda split: (split.transfer.launched, split.transfer.start_ns))


def _is_told(split: Split) -> bool:
    transfer = split.transfer
    return bool(transfer.sends or transfer.receives) or transfer.kind in COLLECTIVES


def truth_of(split: Split) -> Truth | None:
    """Return the exact figures of a kernel; None where the trace does not split it."""
    transfer = split.transfer
    if split.ready_ns is None:
        return None
    return Truth(transfer.duration_ns, min(max(0, split.ready_ns - transfer.start_ns), transfer.duration_ns))


def _posted(rank: Rank, split: Split) -> int:
    launch = int(rank.classified.launch[split.transfer.activity])
    start = split.transfer.start_ns
    return min(start, int(rank.classified.trace.launches.start_ns[launch])) if launch >= 0 else start


def dump_of(rank: Rank, random: Random, *, timing: bool) -> dict[str, Any]:
    """Build the Flight Recorder dump of one rank.

    A watchdog sees beginnings and ends up to 0.2 s later; without ``timing`` it sees no beginning and no duration.
    """
    entries: list[dict[str, Any]] = []
    groups: dict[str, tuple[int, ...]] = {}
    numbers: dict[tuple[str, bool], int] = {}
    for split in stripped_splits(rank):
        transfer = split.transfer
        name, ranks = transfer.group[0] or "0", transfer.group[1]
        groups[name] = ranks
        is_hop = bool(transfer.sends or transfer.receives)
        number = numbers[name, is_hop] = numbers.get((name, is_hop), 0) + 1
        begun = transfer.start_ns + random.randrange(200_000_000)
        times: dict[str, Any] = {
            "time_discovered_started_ns": begun if timing else None,
            "time_discovered_completed_ns": max(begun, transfer.end_ns + random.randrange(200_000_000)),
            "state": "completed", "retired": True,
        }  # fmt: skip
        if timing:
            times["duration_ms"] = transfer.duration_ns / 1e6
        unknown = {"time_discovered_started_ns": None, "time_discovered_completed_ns": None, "state": "scheduled"}
        own = ranks.index(rank.rank)
        messages = [("send", f"{own}->", message) for message in transfer.sends]
        messages += [("recv", f"{own}<-", message) for message in transfer.receives]
        for direction, ends, message in messages:
            size = [[message.size_bytes or 0]]
            alone = times if len(messages) == 1 else {**unknown, "retired": False}
            entries.append(_entry(rank, split, number, name, f"nccl:{direction} {ends}{ranks.index(message.peer)}")
                           | alone | {"input_sizes": size, "output_sizes": size})  # fmt: skip
        if len(messages) > 1:
            entries.append(_entry(rank, split, number, name, "nccl:coalesced") | times)
        if not messages:
            entries.append(_entry(rank, split, number, name, f"nccl:{COLLECTIVES[transfer.kind][0]}") | times
                           | {"input_sizes": [[1024]], "output_sizes": [[1024]]})  # fmt: skip
    for record, entry in enumerate(entries):
        entry["record_id"] = record
    config = {name: {"name": name, "desc": "cp", "ranks": str([*ranks])} for name, ranks in groups.items()}
    return {"version": "2.10", "comm_lib_version": "2.28.9", "pg_config": config, "pg_status": {}, "entries": entries}


def _entry(rank: Rank, split: Split, number: int, group: str, name: str) -> dict[str, Any]:
    is_hop = bool(split.transfer.sends or split.transfer.receives)
    return {
        "pg_id": 0, "process_group": (group, "cp"), "collective_seq_id": 0 if is_hop else number,
        "p2p_seq_id": number if is_hop else 0, "op_id": 0, "profiling_name": name, "is_p2p": is_hop,
        "time_created_ns": _posted(rank, split), "timeout_ms": 600_000, "input_dtypes": ["Byte"],
        "output_dtypes": ["Byte"], "input_sizes": [], "output_sizes": [],
    }  # fmt: skip


def write_dumps(analysis: Analysis, folder: Path, random: Random, *, timing: bool, as_json: bool = False) -> None:
    """Write the dumps of all ranks into a folder, as pickles or as JSON, which has 0 for an unknown time."""
    folder.mkdir(exist_ok=True)
    for rank in analysis.attribution.ranks:
        dump = dump_of(rank, random, timing=timing)
        if as_json:
            for entry in dump["entries"]:
                for field in ("time_discovered_started_ns", "time_discovered_completed_ns"):
                    entry[field] = entry[field] or 0
            (folder / f"trace_rank_{rank.rank}.json").write_text(json.dumps(dump))
        else:
            (folder / f"trace_rank_{rank.rank}").write_bytes(pickle.dumps(dump, protocol=2))


def write_inspector_files(analysis: Analysis, folder: Path, random: Random, *, verbose: bool) -> None:
    """Write the files that NCCL's Inspector would leave: whole microseconds, and seen by a thread up to 50 µs late."""
    folder.mkdir(exist_ok=True)
    for rank in analysis.attribution.ranks:
        lines, numbers = [], dict[tuple[str, str], int]()
        for split in stripped_splits(rank):
            transfer = split.transfer
            name, ranks = transfer.group[0] or "0", transfer.group[1]
            messages: list[tuple[str, Any]] = [("Send", message) for message in transfer.sends]
            messages += [("Recv", message) for message in transfer.receives]
            for kind, message in messages or [(COLLECTIVES[transfer.kind][1], None)]:
                counter = (name, "p2p" if message else kind)
                number = numbers[counter] = numbers.get(counter, 0) + 1
                start, stop = transfer.start_ns + random.randrange(50_000), transfer.end_ns + random.randrange(50_000)
                prefix = "p2p" if message else "coll"
                perf: dict[str, Any] = {
                    prefix: kind, f"{prefix}_sn": number, f"{prefix}_timing_source": "kernel_gpu",
                    f"{prefix}_msg_size_bytes": (message.size_bytes or 0) if message else 1024,
                    f"{prefix}_exec_time_us": transfer.duration_ns // 1000,
                }  # fmt: skip
                if message:
                    perf["p2p_peer"] = ranks.index(message.peer)
                if verbose:
                    channel = {"channel_id": 0, "kernel_start_ts": start // 1000, "kernel_stop_ts": stop // 1000}
                    posted = _posted(rank, split) // 1000
                    perf["event_trace_ts"] = {f"{prefix}_start_ts": posted, "kernel_events": [channel]}
                lines.append({
                    "header": {"id": f"0x{name}", "rank": ranks.index(rank.rank), "n_ranks": len(ranks), "nnodes": 1},
                    "metadata": {"inspector_output_format_version": "v4.0", "git_rev": "", "hostname": "node",
                                 "dump_timestamp_us": 0, "pid": 100 + rank.rank},
                    f"{prefix}_perf": perf,
                })  # fmt: skip
        (folder / f"node-pid{100 + rank.rank}.log").write_text("".join(json.dumps(line) + "\n" for line in lines))
