"""Which tests pass through which line, from one run of the core tests with coverage."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import coverage
import pytest
from fork import Watch, in_fork, run_pytest
from sample import Mutant

LEFT_OUT = ("tests/page/", "tests/fuzz/", "tests/test_notebooks.py", "tests/test_mutants.py", "tests/test_sweep.py")
"""Browsers, drawn bytes and notebooks: minutes, for figures that other tests hold."""
RECORDINGS = "tests/record/"
"""Of these tests only those that start no processes run: the others make whole recordings."""
ALSO = ("tests/record/test_baselines.py", "tests/record/test_estimate.py", "tests/record/test_verify.py")
"""Files of `RECORDINGS` that run whole: they run the strategies' own code in this process and its forks."""
LIMIT_S = 20.0
"""A mutant meets as many of its tests as take this long together, in CPU time."""


class _Selection(Watch):
    """Leaves out the tests that make whole recordings."""

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept = [item for item in items if not _makes_a_recording(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def _makes_a_recording(item: pytest.Item) -> bool:
    starts_ranks = item.nodeid.startswith(RECORDINGS) and not item.nodeid.startswith(ALSO)
    return starts_ranks and item.get_closest_marker("processes") is not None


class Covering:
    """The map of one copy of the checkout."""

    def __init__(self, tree: Path, rooms: list[str]) -> None:
        self.tree = tree
        told = tree / "told.json"
        if not told.exists():
            in_fork(_measure, tree, rooms, told)
        self.seconds: dict[str, float]
        self.seconds, self.failed = json.loads(told.read_text())
        self.data = coverage.CoverageData(str(tree / ".coverage"))
        self.data.read()

    def tests(self, mutant: Mutant) -> list[str]:
        """Tests that run the mutant's statement, or its file where an import runs it.

        Those of the mutant's own room come first, then the shortest, until the limit is reached.
        """
        lines = self.data.contexts_by_lineno(str((self.tree / mutant.file).resolve()))
        first, last = statement((self.tree / mutant.file).read_text("utf-8"), mutant.line)
        found = {test for line in range(first, last + 1) for test in lines.get(line, [])} & self.seconds.keys()
        chosen, spent = [], 0.0
        own = f"tests/{mutant.file.removeprefix('ringprof/').partition('/')[0]}/"
        for test in sorted(found, key=lambda test: (not test.startswith(own), self.seconds[test])):
            spent += self.seconds[test]
            if chosen and spent > LIMIT_S:
                break
            chosen.append(test)
        return chosen


def _measure(tree: Path, rooms: list[str], told: Path) -> None:
    cover = coverage.Coverage(
        data_file=str(tree / ".coverage"),
        data_suffix=True,
        include=[f"{tree.resolve()}/{room}/*" for room in rooms],
        config_file=False,
    )
    # Tests of strategies fork their ranks, which end by os._exit.
    cover.set_option("run:patch", ["_exit"])
    watch = _Selection(cover)
    cover.start()
    every = sorted((tree / "tests").rglob("test_*.py"))
    tests = [path for path in every if not str(path.relative_to(tree)).startswith(LEFT_OUT)]
    run_pytest(tree, list(map(str, tests)), watch)
    cover.stop()
    cover.save()
    whole = coverage.Coverage(data_file=str(tree / ".coverage"), config_file=False)
    whole.combine([str(tree)])
    whole.save()
    seconds = {test: spent for test, spent in watch.seconds.items() if test not in watch.failed}
    told.write_text(json.dumps([seconds, watch.failed]))


def statement(text: str, line: int) -> tuple[int, int]:
    """First and last line of the smallest statement of a function at ``line``; of the whole file elsewhere."""
    first, last, inside = 1, text.count("\n") + 1, False
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.stmt) or not node.lineno <= line <= (node.end_lineno or 0):
            continue
        body = getattr(node, "body", None)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            inside = isinstance(node, ast.FunctionDef) and node.body[0].lineno <= line
        elif inside:
            in_header = isinstance(body, list) and line < body[0].lineno
            first, last = node.lineno, max(node.lineno, body[0].lineno - 1) if in_header else node.end_lineno or line
    return first, last
