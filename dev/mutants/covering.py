"""Find the tests that run a line, from one run of the core tests with coverage."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import coverage
import pytest
from fork import Watch, in_fork, run_pytest
from sample import Mutant

LEFT_OUT = ("tests/page/", "tests/fuzz/", "tests/test_notebooks.py", "tests/test_mutants.py", "tests/test_sweep.py")
"""Slow tests of figures that other tests check, too: browsers, fuzzing and notebooks."""
RECORDINGS = "tests/recording/"
"""Folder from which only tests without processes run; the others make whole recordings."""
ALSO = ("tests/recording/test_baselines.py", "tests/recording/test_estimate.py", "tests/recording/test_verify.py")
"""Files of `RECORDINGS` whose tests all run: they run the code of strategies in this process and its forks."""
LIMIT_S = 20.0
"""CPU time that the tests of one mutant may take together."""


class _Selection(Watch):
    """Watch that deselects the tests that make whole recordings."""

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept = [item for item in items if not _makes_a_recording(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def _makes_a_recording(item: pytest.Item) -> bool:
    starts_ranks = item.nodeid.startswith(RECORDINGS) and not item.nodeid.startswith(ALSO)
    return starts_ranks and item.get_closest_marker("processes") is not None


class Covering:
    """Map from lines to tests of one copy of the checkout."""

    def __init__(self, tree: Path, packages: list[str]) -> None:
        self.tree = tree
        results = tree / "results.json"
        if not results.exists():
            in_fork(_measure, tree, packages, results)
        self.seconds: dict[str, float]
        self.seconds, self.failed = json.loads(results.read_text())
        self.data = coverage.CoverageData(str(tree / ".coverage"))
        self.data.read()

    def tests(self, mutant: Mutant) -> list[str]:
        """Return tests that run the mutant's statement, or its file where an import runs the statement.

        Tests of the mutant's own package come first, then the shortest, until `LIMIT_S` is reached.
        """
        lines = self.data.contexts_by_lineno(str((self.tree / mutant.file).resolve()))
        first, last = statement((self.tree / mutant.file).read_text("utf-8"), mutant.line)
        covering = {test for line in range(first, last + 1) for test in lines.get(line, [])} & self.seconds.keys()
        chosen, spent = [], 0.0
        own = f"tests/{mutant.file.removeprefix('ringprof/').partition('/')[0]}/"
        for test in sorted(covering, key=lambda test: (not test.startswith(own), self.seconds[test])):
            spent += self.seconds[test]
            if chosen and spent > LIMIT_S:
                break
            chosen.append(test)
        return chosen


def _measure(tree: Path, packages: list[str], results: Path) -> None:
    cover = coverage.Coverage(
        data_file=str(tree / ".coverage"),
        data_suffix=True,
        include=[f"{tree.resolve()}/{folder}/*" for folder in packages],
        config_file=False,
    )
    # Tests of strategies fork their ranks, which end with os._exit.
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
    results.write_text(json.dumps([seconds, watch.failed]))


def statement(text: str, line: int) -> tuple[int, int]:
    """Return the first and last line of the smallest statement at ``line``; the whole file outside functions."""
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
