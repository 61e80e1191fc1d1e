"""Logs that a training appends to: a full disk and a folder that vanishes, and the lines after them."""

from __future__ import annotations

import json
import logging
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from ringprof.training.appended_log import AppendedLog


@contextmanager
def disk_full_at(size: int) -> Iterator[None]:
    """Let writes beyond ``size`` bytes of a file fail, the first of them half-way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_lines_are_whole_and_their_chain_holds_after_a_full_disk(tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "log.jsonl"
    log = AppendedLog(path, chained=True)
    for step in range(5):
        log.add({"step": step})
    with disk_full_at(path.stat().st_size + 10), caplog.at_level(logging.WARNING, "ringprof"):
        for step in range(5, 30):
            log.add({"step": step})
    assert [record.args[2] for record in caplog.records] == [1, 10]
    log.add({"step": 30})
    log.add({"step": 31})
    written = lines(path)
    assert [line["step"] for line in written] == [0, 1, 2, 3, 4, 30, 31]
    assert [line.get("lost") for line in written] == [None] * 5 + [25, None]
    before = ""
    for line in written:
        text = json.dumps({key: value for key, value in line.items() if key != "hash"}, sort_keys=True)
        assert (line["previous"], line["hash"]) == (before, sha256(text.encode()).hexdigest())
        before = line["hash"]


def test_a_folder_that_vanished_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "log.jsonl"
    path.parent.mkdir()
    log = AppendedLog(path)
    log.add({"step": 1})
    shutil.rmtree(path.parent)
    path.parent.write_text("a file in its place")
    log.add({"step": 2})
    path.parent.unlink()
    log.add({"step": 3})
    assert lines(path) == [{"step": 3, "lost": 1}]


@pytest.mark.parametrize("left", [b"", b'{"step": 1}\n', b'{"step": 1, "ti'])
def test_a_line_begins_a_line_whatever_is_in_the_file(tmp_path: Path, left: bytes) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(left)
    AppendedLog(path).add({"step": 2})
    assert path.read_bytes().splitlines()[-1] == b'{"step": 2}'
    assert len(path.read_bytes().splitlines()) == (2 if left else 1)
