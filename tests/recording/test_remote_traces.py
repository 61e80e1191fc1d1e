"""Traces sent through the process group arrive complete, and no rank holds more than a few pieces in memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.recording.command import TORCHRUN, run

PROGRAM = """
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from ringprof.ranks.process_group import GroupRanks
from ringprof.recording.run_folder import trace_name
from ringprof.recording.remote_traces import MESSAGE_BYTES, TraceFile, gather_traces
from ringprof.recording.measure import peak_bytes, reset_peak

dist.init_process_group("gloo")
rank, staging = dist.get_rank(), Path("staging")
# Rank 0 has its own in the folder; of the others one is large, one ends on a piece, one is empty.
sizes = [None, 12 * MESSAGE_BYTES + 7, 2 * MESSAGE_BYTES, 0]
trace = TraceFile(staging, "another folder's" if rank else "", rank)
if rank:
    with trace.path.open("wb") as file:
        for start in range(0, sizes[rank], 1 << 20):
            file.write(os.urandom(min(1 << 20, sizes[rank] - start)))
    assert trace.described(reduced=False)["remote_bytes"] == sizes[rank]
dist.barrier()
device = torch.device("cpu")
small = torch.zeros(8)
dist.all_reduce(small)
reset_peak(device)
before = peak_bytes(device)
gather_traces(trace.path, [(trace_name(sender), size) for sender, size in enumerate(sizes)], staging, GroupRanks(None))
grown = peak_bytes(device) - before


def checksum(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


sent = None if rank == 0 else checksum(trace.path)
trace.discard()
Path(f"said{rank}.json").write_text(json.dumps({"grown": grown, "sent": sent, "left": trace.path.exists()}))
dist.barrier()
if rank == 0:
    arrived = [None, *(checksum(staging / trace_name(sender)) for sender in (1, 2, 3))]
    Path("arrived.json").write_text(json.dumps(arrived))
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.processes
def test_remote_traces_arrive_complete_in_bounded_memory(tmp_path: Path) -> None:
    (tmp_path / "gather.py").write_text(PROGRAM)
    (tmp_path / "staging").mkdir()
    done = run(["gather.py"], tmp_path, [*TORCHRUN[:-1], "4"], TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    entries = [json.loads((tmp_path / f"said{rank}.json").read_text()) for rank in range(4)]
    assert json.loads((tmp_path / "arrived.json").read_text()) == [entry["sent"] for entry in entries]
    # Of 48 MiB, a few pieces of 4.
    assert all(entry["grown"] < 24 * 2**20 for entry in entries), entries
    assert not any(entry["left"] for entry in entries[1:])
