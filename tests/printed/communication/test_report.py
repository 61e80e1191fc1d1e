"""The report of communication logs: the command, its JSON, and which files of a folder are read."""

from __future__ import annotations

import gzip
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

import ringprof
from ringprof.cli import run as run_command
from ringprof.errors import InputError
from ringprof.printed.communication.comm_log_report import load_comm_logs
from ringprof.printed.communication.read import find_comm_logs
from tests.paths import DATA, ROOT
from tests.printed.communication.strip import write_dumps
from tests.printed.communication.test_flight_recorder import OPEN, dump, entry, hop
from tests.printed.communication.test_nccl_inspector import line, text_of

Run = Callable[..., tuple[int, str]]


def dumps(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for rank in range(2):
        content = dump([*hop(rank, 1, rank), *hop(rank, 2, 5, **OPEN)][: 6 if rank == 0 else 3])
        (folder / f"trace_rank_{rank}").write_bytes(pickle.dumps(content, protocol=2))
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs ringprof and returns its exit code and what it printed."""

    def command(*arguments: str) -> tuple[int, str]:
        code = run_command([*arguments])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return command


def keys_of(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(keys_of, value))
    return set(value) | set().union(*map(keys_of, value.values())) if isinstance(value, dict) else set()


def test_the_command_reports_a_folder_of_dumps(run: Run, tmp_path: Path) -> None:
    code, text = run("report", str(dumps(tmp_path)))
    assert code == 0
    assert text.startswith("2 ranks · PyTorch Flight Recorder 2.10 · NCCL 2.28.9 · 3 operations\n")
    for part in ("where the ranks stand", "by rank", "by size", "send/recv 2", "ring.py:42 exchange", "256 bytes"):
        assert part in text


def test_every_field_of_the_json_is_documented(run: Run, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "without-a-profiler.md").read_text("utf-8")
    code, text = run("report", str(dumps(tmp_path)), "--format", "json")
    report = json.loads(text)
    assert code == 0 and report["schema"] == "ringprof.comm-logs/1"
    documented = set(re.findall(r"`([a-z_]+)`", page.partition("## As JSON")[2]))
    assert keys_of(report) - documented == {"schema"}


def test_conditions_apply_to_the_figures(run: Run, tmp_path: Path) -> None:
    folder = str(dumps(tmp_path))
    assert run("report", folder, "--fail-if", "unfinished > 0")[0] == 1
    assert run("report", folder, "--fail-if", "unfinished > 1")[0] == 0


@pytest.mark.parametrize("arguments", [["--html", "x.html"], ["--csv", "hops"]])
def test_pages_and_frames_are_refused(arguments: list[str], run: Run, tmp_path: Path) -> None:
    code, text = run("report", str(dumps(tmp_path)), *arguments)
    assert code == 2 and "not for communication logs" in text
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    "options",
    [["--show layers"], ["--window x"], ["--group cp"], ["--between 1ms,2ms"], ["--top 3", "--show idle"]],
)
def test_options_for_traces_are_refused(options: list[str], run: Run, tmp_path: Path) -> None:
    code, text = run("report", str(dumps(tmp_path)), *" ".join(options).split())
    names = ", ".join(option if "--show" in option else option.split()[0] for option in options)
    assert code == 2 and f"{names}: not for communication logs" in " ".join(text.split()) and text.count("\n") == 1


def test_other_functions_name_the_right_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"read them with 'ringprof report' or ringprof\.load_comm_logs"):
        ringprof.load(dumps(tmp_path))
    with pytest.raises(InputError, match=r"no Flight Recorder dumps and no files of NCCL Inspector"):
        load_comm_logs(DATA / "h200x8-zigzag-131072")


def test_traces_come_before_dumps_in_one_folder(tmp_path: Path) -> None:
    folder = dumps(tmp_path)
    (folder / "rank0.json.gz").write_bytes((DATA / "h200x8-zigzag-131072" / "rank0.json.gz").read_bytes())
    assert find_comm_logs([str(folder)]) == []


def test_json_and_compressed_dumps_say_the_same_as_pickles(tmp_path: Path) -> None:
    analysis = ringprof.load(DATA / "waits-nccl")
    texts = []
    for form in ("pickle", "json", "gz"):
        folder = tmp_path / form
        write_dumps(analysis, folder, Random(1), timing=True, as_json=form != "pickle")
        for path in [*folder.iterdir()] if form == "gz" else []:
            path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
        texts.append(load_comm_logs(folder).to_terminal())
    assert texts[0] == texts[1] == texts[2]


def test_a_pickle_is_read_before_its_json(tmp_path: Path) -> None:
    folder = dumps(tmp_path)
    (folder / "trace_rank_0.json").write_text(json.dumps(dump(hop(0, 1, 0))))
    assert [Path(path).name for path in load_comm_logs(folder).paths] == ["trace_rank_0", "trace_rank_1"]


def test_two_dumps_of_a_rank_are_an_error(tmp_path: Path) -> None:
    folder = dumps(tmp_path)
    (folder / "later_rank_0").write_bytes((folder / "trace_rank_0").read_bytes())
    with pytest.raises(InputError, match=r"rank 0 again, as in .*later_rank_0: give the files of one dump"):
        load_comm_logs(folder)


def test_two_files_of_a_process_of_inspector_are_an_error(tmp_path: Path) -> None:
    for name in ("a.log", "b.log"):
        (tmp_path / name).write_bytes(text_of([line(0, 1, 10)]))
    with pytest.raises(InputError, match=r"b\.log: rank 0 of communicator 0xab again, as in .*a\.log"):
        load_comm_logs(tmp_path)


def test_a_dump_without_operations_and_one_of_another_rank_are_warned_of(tmp_path: Path) -> None:
    folder = dumps(tmp_path)
    (folder / "trace_rank_1").write_bytes(pickle.dumps(dump([]), protocol=2))
    text = " ".join(load_comm_logs(folder).to_terminal().split())
    assert "rank 1: the dump holds no operation: the rank posted none, or its Flight Recorder was off" in text
    assert "Rank 1 has no record of its part of " in text and "had not posted" not in text
    (folder / "trace_rank_1").rename(folder / "trace_rank_7")
    (folder / "trace_rank_7").write_bytes(pickle.dumps(dump(hop(1, 1, 1)), protocol=2))
    codes = {notice.code: notice.message for notice in load_comm_logs(folder).warnings}
    assert "trace_rank_7: rank 7 by the file's name, but its group cp has ranks 0, 1" in codes["wrong_rank"]


def test_clocks_that_are_far_apart_may_be_two_jobs(run: Run) -> None:
    logs = DATA / "comm-logs"
    code, text = run("report", str(logs / "hang" / "timeout_rank_0"), str(logs / "flight-recorder" / "trace_rank_1"))
    text = " ".join(text.split())
    assert code == 0 and "or the logs are of different jobs" in text
    assert "No rank is judged: the logs of ranks 0 and 1 do not overlap in time." in text
    for claim in ("had not posted", "posted its part last", "more on its device", "waits for"):
        assert claim not in text


def test_a_cut_dump_is_left_out_and_named(run: Run, tmp_path: Path) -> None:
    """The other ranks' figures are those of a folder without the damaged file, which blames no rank."""
    folder, without = dumps(tmp_path / "cut"), dumps(tmp_path / "without")
    (folder / "trace_rank_1").write_bytes((folder / "trace_rank_1").read_bytes()[:-20])
    (without / "trace_rank_1").unlink()
    code, text = run("report", str(folder))
    text = " ".join(text.split())
    assert code == 0 and "trace_rank_1: " in text and ": left out [damaged]" in text
    assert "1 of 2 ranks have no log here: 1" in text and "had not posted" not in text
    left, expected = (load_comm_logs(path).findings for path in (folder, without))
    assert (left.rows, left.verdict, left.standings) == (expected.rows, expected.verdict, expected.standings)
    (folder / "trace_rank_0").write_bytes(b"\x80\x02}q\x00X\x09\x00\x00\x00pg_config")
    code, text = run("report", str(folder))
    assert code == 2 and "trace_rank_0" in text and "Traceback" not in text


def test_both_sources_in_one_folder(tmp_path: Path) -> None:
    folder = dumps(tmp_path)
    (folder / "node-pid1.log").write_bytes(text_of([line(0, 1, 10)]))
    analysis = load_comm_logs(folder)
    assert analysis.findings.source == "flight_recorder"
    assert "two_sources" in [notice.code for notice in analysis.warnings]


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    outside, folder = dumps(tmp_path / "a"), tmp_path / "b"
    folder.mkdir()
    (folder / "trace_rank_0").symlink_to(outside / "trace_rank_0")
    assert find_comm_logs([str(folder)]) == []


def test_names_from_a_dump_cannot_control_the_terminal(tmp_path: Path) -> None:
    bad = entry("all_reduce\x1b[31m", 1, 0, **OPEN)
    bad["process_group"] = ("1", "cp\x1b[2J\nx")
    bad["frames"] = [{"filename": "/a/\x1b[31m.py", "line": 1, "name": "f\x07"}]
    (tmp_path / "trace_rank_0").write_bytes(pickle.dumps(dump([bad]), protocol=2))
    text = load_comm_logs(tmp_path).to_terminal()
    assert not set(text) & {"\x1b", "\x07"}


def test_ranks_without_a_log_are_warned_of(tmp_path: Path) -> None:
    folder = dumps(tmp_path / "dumps")
    (folder / "trace_rank_1").unlink()
    assert "missing_ranks" in [notice.code for notice in load_comm_logs(folder).warnings]
    assert "1 of 2 ranks have no log here: 1" in load_comm_logs(folder).to_terminal()
    lone = tmp_path / "lone"
    lone.mkdir()
    (lone / "node-pid1.log").write_bytes(text_of([line(0, 1, 10)]))
    assert "1 of 2 ranks have no log here" in load_comm_logs(lone).to_terminal()
    whole = load_comm_logs(dumps(tmp_path / "whole")).warnings
    assert "missing_ranks" not in [notice.code for notice in whole]
