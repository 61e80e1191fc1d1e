"""The Run and its file: written files are complete, and untrusted files name no paths outside their folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from ringprof import run as store
from ringprof.errors import InputError, RunFormatError
from ringprof.run import RankTrace, Run, Timings, read_run, slowest, write_run
from ringprof.workload.workload import Workload
from tests.analysis.recorded import recorded_run


@pytest.fixture
def recorded() -> Run:
    return recorded_run()


def test_a_run_reads_back_as_it_was_written(tmp_path: Path, recorded: Run) -> None:
    write_run(recorded, tmp_path / "run.json")
    assert read_run(tmp_path / "run.json") == recorded
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_failed_write_leaves_the_earlier_file_and_nothing_else(
    tmp_path: Path, recorded: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(recorded, tmp_path / "run.json")
    before = (tmp_path / "run.json").read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_run(msgspec.structs.replace(recorded, name="second"), tmp_path / "run.json")
    assert (tmp_path / "run.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("path", ["../rank0.json", "/etc/passwd", "a/../../b", "..", "a\\..\\b", "a\0b", ""])
def test_a_trace_outside_the_runs_folder_is_refused(tmp_path: Path, recorded: Run, path: str) -> None:
    write_run(msgspec.structs.replace(recorded, traces=[RankTrace(rank=0, path=path)]), tmp_path / "run.json")
    with pytest.raises(RunFormatError, match="leaves the run's folder"):
        read_run(tmp_path / "run.json")


def test_a_link_out_of_the_runs_folder_is_refused(tmp_path: Path, recorded: Run) -> None:
    (tmp_path / "secret.json").write_text("{}")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "rank0.json").symlink_to(tmp_path / "secret.json")
    write_run(msgspec.structs.replace(recorded, traces=[RankTrace(rank=0, path="rank0.json")]), folder / "run.json")
    with pytest.raises(RunFormatError, match="through a link"):
        read_run(folder / "run.json")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema": "ringprof.run/2"}', '{"schema": "ringprof.run/1"}', "\xff"]
)
def test_invalid_run_file_is_a_one_line_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(RunFormatError) as refusal:
        read_run(tmp_path / "run.json")
    assert "\n" not in str(refusal.value)


def test_a_missing_run_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_run(tmp_path / "run.json")


def test_unknown_fields_of_a_run_file_are_ignored(tmp_path: Path, recorded: Run) -> None:
    content = json.loads(msgspec.json.encode(recorded)) | {"weather": "fine"}
    (tmp_path / "run.json").write_text(json.dumps(content))
    assert read_run(tmp_path / "run.json") == recorded


def test_relocated_prefixes_trace_paths(recorded: Run) -> None:
    moved = store.relocated(recorded, "mine")
    assert [trace.path for trace in moved.traces] == [f"mine/{trace.path}" for trace in recorded.traces]


@pytest.mark.parametrize(
    ("causal", "backward", "pairs", "factor"),
    [(False, False, 64, 4), (True, False, 32, 4), (False, True, 64, 14), (True, True, 32, 14)],
)
def test_model_flops_count_query_key_pairs(causal: bool, backward: bool, pairs: int, factor: int) -> None:
    """Count 4 FLOPs per pair, head and dimension forward (two products of two), 10 backward; 8 tokens make 64 pairs."""
    workload = Workload(batch=3, seq=8, heads=5, kv_heads=5, head_dim=2, causal=causal, backward=backward)
    assert workload.model_flops() == factor * 3 * pairs * 5 * 2
    exact = 36 if causal else 64
    assert workload.exact_flops() == factor * 3 * exact * 5 * 2


def test_the_time_of_a_run_is_the_median_of_its_slowest_rank() -> None:
    """Take the mean of the middle two for an even number of iterations."""
    timings = Timings(warmup=1, iterations_ns=[[10, 40, 20, 30], [15, 5, 25, 35]])
    assert slowest(timings.iterations_ns) == [15, 40, 25, 35] and timings.median_ns() == 30.0
    assert Timings(warmup=0, iterations_ns=[[], []]).median_ns() is None
    # Only iterations that both ranks have count, without one that took no time.
    assert Timings(warmup=1, iterations_ns=[[10, 40, 0, 30], [15, 5, 0]]).median_ns() == 27.5


def test_the_rate_of_a_run_is_per_device(recorded: Run) -> None:
    """Count forward and backward, 3.5 · 4·S²·H·D / 2 = 3.5 · 2·1024²·8·64 FLOPs, over 4 ranks in a millisecond."""
    assert recorded.tflops(1e6) == pytest.approx(2 * 1024**2 * 8 * 64 * 3.5 / 4 / 1e9)
    assert recorded.tflops(None) is None
    assert msgspec.structs.replace(recorded, workload=None).tflops(1e6) is None
