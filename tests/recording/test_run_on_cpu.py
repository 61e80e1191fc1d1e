"""A real recording on CPU ranks: what it writes, and that an earlier run stays."""

from __future__ import annotations

import gzip
import json
import os
import pty
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ringprof.prediction.schedules import schedule
from ringprof.run import Run, read_run
from ringprof.trace.kineto import read_trace
from ringprof.trace.reduced import read_reduced
from tests.recording.command import HANGS_S, RINGPROF, SMALL, TORCHRUN, environment, report_of, run

WORLD, SEQ, HEADS, KV_HEADS, HEAD_DIM, BF16 = 4, 512, 2, 1, 16, 2


def test_every_rank_has_a_complete_trace_of_the_marked_iteration(recorded: tuple[Path, Run, str]) -> None:
    folder, recording, _ = recorded
    assert [trace.rank for trace in recording.traces] == [0, 1, 2, 3]
    for trace in recording.traces:
        with gzip.open(folder / "traces" / trace.path) as file:
            content = json.load(file)
        assert content["distributedInfo"]["rank"] == trace.rank
        names = [event.get("name") for event in content["traceEvents"]]
        assert names.count("ringprof::iteration") == 1
        assert "ringprof::fwd/step=0/block" in names and "ringprof::bwd/step=3/block" in names


def reports_without_its_traces(folder: Path, recording: Run, aside: Path) -> bool:
    """Whether the report is the same when only what each rank reduced is left."""
    before = report_of(folder)
    for trace in recording.traces:
        (folder / "traces" / trace.path).rename(aside / f"rank{trace.rank}")
    try:
        after = report_of(folder)
    finally:
        for trace in recording.traces:
            (aside / f"rank{trace.rank}").rename(folder / "traces" / trace.path)
    return after == before


def test_every_rank_wrote_its_reduced_trace(recorded: tuple[Path, Run, str], tmp_path: Path) -> None:
    folder, recording, _ = recorded
    for trace in recording.traces:
        assert trace.reduced is not None
        reduced = read_reduced(folder / "traces" / trace.reduced)
        whole = read_trace(folder / "traces" / trace.path)
        assert (reduced.rank, reduced.names, reduced.events_total) == (trace.rank, whole.names, whole.events_total)
        assert np.array_equal(reduced.operators.end_ns, whole.operators.end_ns)
    assert reports_without_its_traces(folder, recording, tmp_path)


def test_run_file_describes_the_run(recorded: tuple[Path, Run, str]) -> None:
    _, recording, _ = recorded
    assert recording.topology.world_size == WORLD and recording.topology.ranks_per_host == 2
    assert recording.topology.local_ranks == [0, 1, 2, 3] and len(set(recording.topology.hosts)) == 1
    assert recording.strategy is not None and recording.strategy.layout == "zigzag"
    assert recording.strategy.params["double_ring"] is True and recording.strategy.params["ring_window"] == 2
    assert recording.strategy.target == "ringprof.strategies.algorithms.burst:Burst"
    assert recording.kernel == "cpu-flash" and recording.environment.versions["torch"]
    assert recording.command[:2] == ["ringprof", "record"]


def test_run_file_has_the_peers_of_each_hop(recorded: tuple[Path, Run, str]) -> None:
    """Windows of two: the inner ring's next is the other of the window, the outer ring's the same place in the next."""
    _, recording, _ = recorded
    assert recording.work is not None
    to = [{entry.channel: entry.to for entry in work.sent or []} for work in recording.work]
    assert [channels["read_inner"] for channels in to] == [1, 0, 3, 2]
    assert [channels["read_outer"] for channels in to] == [2, 3, 0, 1]


def test_every_iteration_of_every_rank_is_kept(recorded: tuple[Path, Run, str]) -> None:
    _, recording, _ = recorded
    assert recording.timings is not None and recording.profiled is not None and recording.timings.warmup == 1
    assert [len(times) for times in recording.timings.iterations_ns] == [2] * WORLD
    assert [len(times) for times in recording.profiled.iterations_ns] == [1] * WORLD
    assert all(time > 0 for times in recording.timings.iterations_ns for time in times)


def test_every_control_of_every_rank_is_kept(recorded: tuple[Path, Run, str]) -> None:
    folder, recording, _ = recorded
    controls = recording.controls
    assert controls is not None and recording.work is not None and (controls.warmup, controls.rounds) == (1, 2)
    kinds = (controls.ordinary_ns, controls.solo_ns, controls.compute_only_ns, controls.communication_only_ns)
    for times in kinds:
        assert times is not None and [len(rank) for rank in times] == [2] * WORLD
        assert all(time > 0 for rank in times for time in rank)
    assert dict(enumerate(controls.solo_flops)) == recording.block_flops()
    assert "the same blocks alone" in report_of(folder)


def test_record_and_report_print_the_same_rate(recorded: tuple[Path, Run, str]) -> None:
    folder, _, printed = recorded
    (shown,) = re.findall(r"per iteration, ([\d.,]+ .FLOP/s) per device", printed)
    assert f"{shown} per device achieved" in report_of(folder)


def test_run_file_has_the_verification(recorded: tuple[Path, Run, str]) -> None:
    _, recording, _ = recorded
    assert (
        recording.verification is not None
        and recording.verification.passed
        and recording.verification.seq == 64 * WORLD
    )
    assert set(recording.verification.errors) == {"out", "dq", "dk", "dv"}
    for error in recording.verification.errors.values():
        assert 0 < error.kernel_rms < 0.01 and 0 < error.rms <= error.allowed_rms < 0.05


def test_work_equals_the_closed_formulas(recorded: tuple[Path, Run, str]) -> None:
    _, recording, _ = recorded
    assert recording.work is not None and recording.workload is not None
    assert sum((recording.block_flops() or {}).values()) == recording.workload.exact_flops()
    local = SEQ // WORLD
    q_bytes, kv_bytes = local * HEADS * HEAD_DIM * BF16, local * KV_HEADS * HEAD_DIM * BF16
    row_bytes = local * HEADS * 4
    for work in recording.work:
        sent = {(sent.channel, sent.phase): sent for sent in work.sent or []}
        # Two windows of two: each is toured by one inner hop, and one outer hop leads to the next.
        inner, outer = sent["read_inner", "forward"], sent["read_outer", "forward"]
        assert (inner.count, inner.sent_bytes, inner.link) == (2, 2 * 2 * kv_bytes, "same_host")
        assert (outer.count, outer.sent_bytes, outer.link) == (1, 2 * kv_bytes, "other_host")
        inner = sent["read_inner", "backward"]
        assert (inner.count, inner.sent_bytes) == (2, 2 * (2 * q_bytes + 2 * row_bytes))
        assert sent["dq_inner", "backward"].sent_bytes % q_bytes == 0


def test_record_prints_plan_and_result(recorded: tuple[Path, Run, str]) -> None:
    _, _, printed = recorded
    assert "burst on 4 CPU processes: sequence 512" in printed
    assert "FLOPs per iteration" in printed and "of memory" in printed
    assert (
        " ms per iteration, " in printed
        and "FLOP/s per device" in printed
        and "next: ringprof report traces/run.json" in printed
    )


@pytest.mark.processes
def test_second_run_keeps_the_first_and_becomes_the_newest(recorded: tuple[Path, Run, str], tmp_path: Path) -> None:
    recorded_folder, first, _ = recorded
    folder = Path(shutil.copytree(recorded_folder, tmp_path / "copy"))
    kept = {path: path.read_bytes() for path in (folder / "traces" / first.name).iterdir()}
    done = run(["record", "--strategy", "ring", *SMALL, "--world", "1", "--forward-only", "--dtype", "fp32"], folder)
    assert done.returncode == 0, done.stderr
    assert "nothing is communicated" in done.stderr
    newest = read_run(folder / "traces/run.json")
    assert newest.name != first.name and newest.work is not None and newest.work[0].sent == []
    assert newest.verification is not None and set(newest.verification.errors) == {"out"}
    assert {path: path.read_bytes() for path in (folder / "traces" / first.name).iterdir()} == kept
    assert sorted(path.name for path in (folder / "traces").iterdir()) == sorted([first.name, newest.name, "run.json"])


@pytest.mark.processes
def test_record_under_torchrun_prints_on_rank_0_only(tmp_path: Path) -> None:
    arguments = ["-m", "ringprof", "record", "--strategy", "zigzag", *SMALL, "--iters", "1"]
    done = run(arguments, tmp_path, TORCHRUN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("next: ringprof report") == 1 and done.stderr.count("plan per device") == 1
    recording = read_run(tmp_path / "traces/run.json")
    assert recording.topology.world_size == 2 and len(recording.traces) == 2
    assert reports_without_its_traces(tmp_path, recording, tmp_path)


CAPTURE = """
import os
import sys

import torch
import torch.distributed as dist

import ringprof
from ringprof.run import Workload

dist.init_process_group("gloo")
x = torch.ones(64, 64)
dist.all_reduce(x)
with ringprof.capture("traces/mine", workload=Workload(seq=64, heads=1, kv_heads=1, head_dim=64)):
    dist.all_reduce(x @ x)
try:
    with ringprof.capture("traces/mine", strict=True):
        raise AssertionError("entered")
except ringprof.errors.UsageError as error:
    print("refused:", error)
dist.destroy_process_group()
sys.stdout.flush()
# Native threads that torch leaves behind now and then abort an interpreter that shuts down.
os._exit(0)
"""


@pytest.mark.processes
def test_capture_in_a_users_own_program(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CAPTURE)
    done = run(["own.py"], tmp_path, TORCHRUN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("refused:") == 2 and "never overwrites" in done.stdout
    recording = read_run(tmp_path / "traces/mine/run.json")
    assert recording.timings is None and recording.verification is None and recording.strategy is None
    assert recording.workload is not None and recording.workload.seq == 64 and recording.topology.world_size == 2
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["mine"]
    with gzip.open(tmp_path / "traces/mine" / recording.traces[1].path) as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert "ringprof::iteration" in names and "gloo:all_reduce" in names
    assert [entry.reduced for entry in recording.traces] == ["rank0.ringprof", "rank1.ringprof"]
    assert "ringprof::iteration" in read_reduced(tmp_path / "traces/mine/rank1.ringprof").names


@pytest.mark.processes
def test_one_rank_records_on_a_terminal_and_has_no_communication_controls(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*RINGPROF, "record", "--strategy", "zigzag", *SMALL, "--world", "1", "--iters", "2", "--controls"],
        cwd=tmp_path, env=environment(TERM="xterm"), stdout=subprocess.DEVNULL, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 1 << 16):
            shown += part
    except OSError:
        pass  # how Linux says that the other side has closed
    os.close(ours)
    assert process.wait(HANGS_S) == 0
    assert b"iterations" in shown and b"2/2" in shown and b"export" in shown, "progress bars"
    controls = read_run(tmp_path / "traces/run.json").controls
    assert controls is not None and controls.compute_only_ns is None and controls.communication_only_ns is None
    assert [len(times) for times in (*controls.ordinary_ns, *controls.solo_ns)] == [2, 2]
    report = report_of(tmp_path)
    assert "the same blocks alone" in report and "communication only" not in report


@pytest.mark.processes
def test_torchs_ring_is_verified_timed_and_profiled(tmp_path: Path) -> None:
    size = ["--seq", "256", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--world", "2", "--device", "cpu"]
    ended = run(["record", "--strategy", "torch-cp", "-p", "rotate=alltoall", "--iters", "2", *size], tmp_path)
    assert ended.returncode == 0, ended.stderr
    recorded = read_run(tmp_path / "traces" / "run.json")
    assert recorded.verification is not None and recorded.verification.passed
    assert recorded.strategy is not None and recorded.strategy.params["rotate"] == "alltoall"
    assert recorded.timings is not None and [len(times) for times in recorded.timings.iterations_ns] == [2, 2]
    assert recorded.workload is not None and recorded.work is not None
    dry_run = schedule("torch-cp", recorded.workload, 2, kernel="cpu-flash", params=recorded.strategy.params)
    for work, program in zip(recorded.work, dry_run.programs, strict=True):
        assert (work.block_flops, work.block_calls) == (program.work.block_flops, program.work.block_calls)
    assert all((tmp_path / "traces" / trace.path).exists() for trace in recorded.traces)
