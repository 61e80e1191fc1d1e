"""The run's folder: hidden until it is complete, its name its own, refused before the work where it cannot be."""

from __future__ import annotations

import gc
import resource
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringprof.errors import UsageError
from ringprof.recording.run_folder import discard, publish, stage
from ringprof.run import read_run
from tests.analysis.recorded import recorded_run


def named(name: str):
    import msgspec

    return msgspec.structs.replace(recorded_run(), name=name)


def test_a_complete_run_appears_at_once_and_is_the_newest(tmp_path: Path) -> None:
    output = tmp_path / "traces/run.json"
    first = stage(output, "zigzag-1024", 4)
    assert first.path.name.startswith(".") and first.name.endswith("-zigzag-1024")
    assert not output.exists()
    folder = publish(first.path, named(first.name), output)
    assert folder == tmp_path / "traces" / first.name and read_run(folder / "run.json").name == first.name
    newest = read_run(output)
    assert [trace.path for trace in newest.traces] == [f"{first.name}/{t.path}" for t in recorded_run().traces]


def test_two_runs_of_one_second_get_two_names(tmp_path: Path) -> None:
    output = tmp_path / "run.json"
    stages = [stage(output, "ring-64", 1) for _ in range(3)]
    publish(stages[0].path, named(stages[0].name), output)
    stages.append(stage(output, "ring-64", 1))
    assert len({staging.name for staging in stages}) == 4


def test_strategy_name_with_a_module_path_makes_one_plain_folder(tmp_path: Path) -> None:
    assert stage(tmp_path / "run.json", "../my.module:Class-64", 1).path.parent == tmp_path


def test_a_failed_run_leaves_nothing(tmp_path: Path) -> None:
    staging = stage(tmp_path / "run.json", "ring-64", 1)
    (staging.path / "rank0.json.gz").write_bytes(b"half")
    discard(staging.path)
    assert list(tmp_path.iterdir()) == []


def test_output_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text('{"schema": "mine"}')
    with pytest.raises(UsageError, match="not a ringprof run"):
        stage(tmp_path / "notes.json", "ring-64", 1)
    with pytest.raises(UsageError, match="a folder"):
        stage(tmp_path, "ring-64", 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write the run here"):
        stage(tmp_path / "file/run.json", "ring-64", 1)


def test_a_full_disk_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
    with pytest.raises(UsageError, match="1 MiB free"):
        stage(tmp_path / "run.json", "ring-64", 4)
    assert list(tmp_path.iterdir()) == []


def test_partial_write_on_a_full_disk_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a full disk by a limit of the file size: a write takes what fits, and the next one fails."""
    gc.collect()  # what tests before this one left
    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, before[1]))
    try:
        with pytest.raises(UsageError, match="cannot write the run here: No space left on device"):
            stage(tmp_path / "run.json", "ring-64", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    gc.collect()
    assert unraisable == [] and list(tmp_path.iterdir()) == []


def test_a_disk_that_cannot_flush_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UsageError, match="No space left on device"):
        stage(tmp_path / "run.json", "ring-64", 4)
    assert list(tmp_path.iterdir()) == []
