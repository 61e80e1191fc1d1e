"""The suite of GPU tests: what it covers, when an entry is out of date, and runs that end, hang and continue."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from tests.pairs import pairs
from tests.paths import ROOT

WHERE = {"gpu": "NVIDIA H200", "gpus": 2, "torch": "2.11.0+cu128", "kernels": {}, "commit": "unknown"}
TESTS = f"""
import time, pytest
from tests.helper import VALUE

pytestmark = pytest.mark.{"gpu"}

def test_passes(): assert VALUE

@pytest.mark.skipif(True, reason="a reason")
def test_skipped(): pass
"""


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return import_module("gpu_ledger")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a small project with one test file of GPUs, which covers one folder."""
    files = {
        "pyproject.toml": '[tool.ringprof.gpu-tests]\nalone = ["tests/test_b.py"]\n'
        '[tool.ringprof.gpu-tests.covers]\n"tests" = ["product"]\n'
        '[tool.pytest.ini_options]\npythonpath = ["."]\nmarkers = ["gpu", "long"]\n',
        "product/a.py": "", "tests/helper.py": "VALUE = 1\n", "tests/test_a.py": TESTS,
        "tests/conftest.py": 'def pytest_addoption(parser): parser.addoption("--gpu", action="store_true")\n',
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_covered_sources_exist_and_hold_what_the_test_files_import(ledger: Any) -> None:
    files = ledger.gpu_test_files()
    assert "tests/strategies/test_gpu.py" in files
    settings = ledger.settings()
    assert [name for name in (*settings["covers"], *settings["alone"]) if not (ROOT / name).exists()] == []
    for file in files:
        covers = ledger.sources(file).keys() - {"tests"}
        assert all((ROOT / cover).exists() for cover in covers), file
        nodes = [
            node for node in ast.walk(ast.parse((ROOT / file).read_text("utf-8"))) if isinstance(node, ast.ImportFrom)
        ]
        used = [match[1] for node in nodes if (match := re.match(r"ringprof\.strategies\.(\w+)\.", node.module or ""))]
        strategies = {cover.split("/")[1] for cover in covers if cover.startswith("strategies/")}
        assert "strategies" in covers or not strategies or set(used) <= strategies, file


def test_the_page_of_limitations_has_the_ledgers_sentence(ledger: Any) -> None:
    sentence = ledger.sentence(ledger.read(ROOT / "tests" / "gpu_ledger.json"))
    assert f"\n{sentence}\n" in (ROOT / "docs" / "limitations.md").read_text("utf-8")


def test_an_entry_is_out_of_date_after_a_change_of_what_it_covers(ledger: Any, tree: Path) -> None:
    assert ledger.stale({}, tree) == {"tests/test_a.py": "never run"}

    def entry(**other: Any) -> dict[str, Any]:
        return {**WHERE, "passed": 1, "failed": 0, "sources": ledger.sources("tests/test_a.py", tree), **other}

    entries = {"tests/test_a.py": entry()}
    assert ledger.stale(entries, tree) == {} and "all 1 files passed" in ledger.summary(entries, tree)
    assert ledger.stale({"tests/test_a.py": entry(failed=2)}, tree) == {"tests/test_a.py": "2 failed"}
    assert ledger.stale({"tests/test_a.py": entry(passed=0)}, tree) == {"tests/test_a.py": "all skipped"}
    assert ledger.stale({"tests/test_a.py": entry(gpus=1)}, tree) == {}
    for name, part in (("product/a.py", "product"), ("tests/helper.py", "tests"), ("tests/test_a.py", "tests")):
        before = (tree / name).read_text()
        (tree / name).write_text(before + "# changed\n")
        assert ledger.stale(entries, tree) == {"tests/test_a.py": f"changed: {part}"}
        (tree / name).write_text(before)
    (tree / "product" / "b.py").touch()
    assert ledger.stale(entries, tree) == {"tests/test_a.py": "changed: product"}


def test_a_file_is_due_on_another_gpu_or_on_more_of_them(ledger: Any, tree: Path) -> None:
    file = "tests/test_a.py"
    entries = {file: {**WHERE, "passed": 1, "failed": 0, "sources": ledger.sources(file, tree)}}
    assert ledger.is_due(file, {}, WHERE, tree)
    others: list[dict[str, Any]] = [{}, {"gpus": 1}, {"gpus": 4}, {"gpu": "NVIDIA B200"}]
    assert [ledger.is_due(file, entries, {**WHERE, **other}, tree) for other in others] == [False, False, True, True]
    entries[file]["gpus"] = 1
    (tree / file).write_text(TESTS + "# needs_two_gpus\n")
    entries[file]["sources"] = ledger.sources(file, tree)
    assert ledger.why_stale(file, entries, tree) == "ran on 1 GPU" and ledger.is_due(file, entries, WHERE, tree)
    assert not ledger.is_due(file, entries, {**WHERE, "gpus": 1}, tree), "it has run where there is no second one"
    entries[file]["failed"] = 1
    assert ledger.is_due(file, entries, WHERE, tree)


def test_a_run_counts_results_and_leaves_out_what_has_no_time(
    ledger: Any, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "tests" / "test_b.py").write_text(TESTS + "def test_fails(): assert not VALUE\n")
    (tree / "tests" / "test_c.py").write_text(TESTS)
    files = ledger.gpu_test_files(tree)
    results = dict(ledger.run_files(files, {}, WHERE, tree, 600, tree))
    counts = {name: tuple(entry[kind] for kind in ("passed", "skipped", "failed")) for name, entry in results.items()}
    assert counts == {"tests/test_a.py": (1, 1, 0), "tests/test_b.py": (1, 1, 1), "tests/test_c.py": (1, 1, 0)}
    assert list(counts)[-1] == "tests/test_b.py", "this file runs alone"
    assert ledger.failures(tree / "tests-test_b.log")[0].startswith("FAILED tests/test_b.py::test_fails")
    assert ledger.stale(results, tree) == {"tests/test_b.py": "1 failed"}
    assert list(ledger.run_files(files[:1], {}, WHERE, tree, 0, tree)) == []
    assert capsys.readouterr().out == "no time left for tests/test_a.py\n"


def test_a_file_that_hangs_is_ended_and_counts_as_failed(ledger: Any, tree: Path) -> None:
    (tree / "tests" / "test_a.py").write_text(TESTS + "def test_hangs():\n    while True: time.sleep(1)\n")
    entry = ledger.run_file("tests/test_a.py", tree, "0", 1.5, tree)
    assert (entry["passed"], entry["failed"], entry["problem"]) == (0, 1, "not done after 2 s")


def test_newer_entries_of_another_ledger_are_merged_and_said(ledger: Any, tmp_path: Path) -> None:
    old, new = (
        {**WHERE, "date": f"2026-11-{day}T10:00", "passed": 5, "skipped": 2, "failed": failed}
        for day, failed in ((20, 0), (21, 3))
    )
    own, other, page = (tmp_path / name for name in ("own.json", "other.json", "page.md"))
    ledger.write({"a": new, "b": old}, own)
    ledger.write({"a": old, "b": new, "c": old}, other)
    page.write_text(f"* before\n{ledger.sentence({})}\n* after\n\nend\n")
    for _ in range(2):
        ledger.take(other, own, page)
        assert ledger.read(own) == {"a": new, "b": new, "c": old}
        text = page.read_text()
        assert text.startswith(f"* before\n{ledger.LINE} ran last on 2026-11-20 to 2026-11-21, on 2 NVIDIA H200 with")
        assert text.endswith("\n* after\n\nend\n") and "1 of 3 files passed (15 tests; 6 were skipped)" in " ".join(
            text.split()
        )


def test_devices_of_test_files_take_turns(ledger: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [ledger.devices(2, turn) for turn in range(3)] == ["0,1", "1,0", "0,1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-x,7")
    assert ledger.devices(3, 2) == "7,5,GPU-x"


def test_every_pair_of_options_meets_in_one_of_few_combinations() -> None:
    options = [range(7), "ab", range(5), "xyz"]
    chosen = pairs(*options)
    assert len(chosen) <= 40 and chosen == sorted(chosen, key=lambda row: (row[0], row[1]))
    for i, j in combinations(range(4), 2):
        assert {(row[i], row[j]) for row in chosen} == set(product(options[i], options[j]))
