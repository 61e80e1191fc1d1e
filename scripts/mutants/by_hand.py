"""Plant bugs that were written by hand one at a time, and list those that the nearest tests do not notice.

``python scripts/mutants/by_hand.py`` takes both sets, `first_set` and `second_set`. Each bug goes into a copy of the
checkout, and the test files nearest to the changed module run there, without tests that start processes. With
``--wide`` all test files that import the module or stand in its folder run, with the tests that start processes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import first_set
import second_set
from fork import Watch, copy_checkout, in_fork, preload, run_pytest
from rule import Rule
from sample import ROOT

SETS = {"first": first_set.RULES, "second": second_set.RULES}
LIMIT_S = 600.0
NEAREST = 3
"""Test files that each bug meets; with ``--wide`` it meets all that `tests_near` finds."""
LEFT_OUT = ("tests/page/", "tests/fuzz/", "tests/test_notebooks.py", "tests/test_mutants.py")


class Outcome(NamedTuple):
    """What became of one bug."""

    name: str
    """Its set and its number in it, from 1."""
    rule: Rule
    noticed: bool
    test: str
    """The first test that failed; empty where none did."""
    seconds: float


def judge(name: str, rule: Rule, tree: Path, *, wide: bool, tests: Sequence[str] = ()) -> Outcome:
    """Run ``tests``, or those nearest to a bug, with the bug in place."""
    path, answer, began = tree / rule.file, tree / "answer.json", time.monotonic()
    original = path.read_text("utf-8")
    tests = tests or [*filter(None, [rule.test]), *tests_near(rule.file, wide=wide)]
    tier = "not long" if wide else "not long and not processes"
    answer.unlink(missing_ok=True)
    try:
        path.write_text(rule.planted_in(tree), "utf-8")
        in_time = in_fork(_run, tree, ["-x", "-m", tier, *tests], answer, limit_s=LIMIT_S)
    finally:
        path.write_text(original, "utf-8")
    code, *failed = json.loads(answer.read_text()) if answer.exists() else [1, "" if in_time else "time limit"]
    # 5: every test of these files is of another tier.
    return Outcome(name, rule, code not in (0, 5), next(iter(failed), ""), time.monotonic() - began)


def _run(tree: Path, arguments: list[str], answer: Path) -> None:
    watch = Watch()
    code = run_pytest(tree, arguments, watch)
    answer.write_text(json.dumps([code, *watch.failed]))


def tests_near(file: str, *, wide: bool = False) -> list[str]:
    """List the test files nearest to a module, the nearest first.

    These are those named after it, those that import it, those in the folder of its tests that have its name in them,
    and the rest of that folder; of equally near files the one that has the name most often comes first.
    """
    module = file.removeprefix("ringprof/").removesuffix(".py")
    parent, _, stem = module.rpartition("/")
    package, folder = "ringprof." + parent.replace("/", "."), _folder_of(parent)
    imported = re.compile(rf"{re.escape(package)}\.{stem}\b|from {re.escape(package)} import [^\n]*\b{stem}\b")
    found: list[tuple[int, int, str]] = []
    for name, text in _test_files():
        inside, count = name.startswith(f"{folder}/"), len(re.findall(rf"\b{stem}\b", text))
        named = inside and Path(name).stem.startswith((f"test_{stem}", f"test_{Path(parent).name}"))
        if named or imported.search(text) or inside:
            found.append((0 if named else 1 if imported.search(text) else 2 if count else 3, -count, name))
    names = [(near, name) for near, _, name in sorted(found)]
    related = [name for near, name in names if near < 3] or [name for _, name in names]
    return [name for _, name in names] if wide else related[:NEAREST]


def _folder_of(parent: str) -> str:
    """Return the folder of tests for a package, or for the nearest package around it that has one."""
    folder = Path("tests", parent)
    while not (ROOT / folder).is_dir():
        folder = folder.parent
    return str(folder)


@cache
def _test_files() -> list[tuple[str, str]]:
    names = (str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("test_*.py")))
    return [(name, (ROOT / name).read_text("utf-8")) for name in names if not name.startswith(LEFT_OUT)]


def untrue(outcomes: Sequence[Outcome], tree: Path) -> list[str]:
    """Return the tests that are said to have noticed a bug and fail without one, too."""
    tests, answer = sorted({one.test for one in outcomes if "::" in one.test}), tree / "answer.json"
    if not tests:
        return []
    answer.unlink(missing_ok=True)
    if not in_fork(_run, tree, ["-m", "not long", *tests], answer, limit_s=LIMIT_S):
        raise RuntimeError(f"the tests that noticed bugs do not end without them: {tests}")
    return list(json.loads(answer.read_text())[1:])


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the noticed share of each set, then the bugs that no test noticed."""
    lines = []
    for name in SETS:
        mine = [one for one in outcomes if one.name.startswith(name) and not one.rule.equivalent]
        if mine:
            count = sum(one.noticed for one in mine)
            lines.append(f"{name} set: {count} of {len(mine)} noticed, {100 * count / len(mine):.0f} %")
    missed = (one for one in outcomes if not one.noticed and not one.rule.equivalent)
    return "\n".join([*lines, *(f"| {one.name} | {one.rule.file} | {one.rule.effect} |" for one in missed)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="bugs such as second-7, or sets; default: both sets")
    parser.add_argument("--wide", action="store_true", help="all tests near the changed module, and their processes")
    parser.add_argument("--tests", nargs="+", default=[], help="test files to run in place of the nearest")
    parser.add_argument("--least", type=float, default=90.0, help="exit with 1 if fewer percent of a set are noticed")
    options = parser.parse_args()
    wanted = [
        (f"{name}-{number}", rule)
        for name, rules in SETS.items()
        for number, rule in enumerate(rules, 1)
        if not {name, f"{name}-{number}"}.isdisjoint(options.names or SETS) and not rule.equivalent
    ]
    for _, rule in wanted:
        rule.planted_in(ROOT)
    preload()
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "checkout"
        copy_checkout(tree)
        for name, rule in wanted:
            outcomes.append(judge(name, rule, tree, wide=options.wide, tests=options.tests))
            word = "noticed" if outcomes[-1].noticed else "SURVIVED"
            print(f"{name} {word} {outcomes[-1].seconds:.0f} s {rule.file} {outcomes[-1].test}", flush=True)
        false = untrue(outcomes, tree)
    outcomes = [one._replace(noticed=one.noticed and one.test not in false) for one in outcomes]
    print(table(outcomes), f"tests that fail without a bug: {false}" if false else "", sep="\n")
    shares = Counter(one.name.partition("-")[0] for one in outcomes if one.noticed)
    sizes = Counter(one.name.partition("-")[0] for one in outcomes)
    return int(any(100 * shares[name] < options.least * size for name, size in sizes.items()))


if __name__ == "__main__":
    sys.exit(main())
