"""Plant hand-written bugs one at a time, and list those that the nearest tests do not notice.

``python dev/mutants/by_hand.py`` takes all sets, `first_set` to `third_set`. Each bug goes into a copy of the
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
import third_set
from fork import Watch, copy_checkout, in_fork, preload, run_pytest
from rule import Rule
from sample import ROOT

SETS = {"first": first_set.RULES, "second": second_set.RULES, "third": third_set.RULES}
LIMIT_S = 600.0
NEAREST = 3
"""Number of test files that run for each bug; with ``--wide`` all run that `tests_near` finds."""
LEFT_OUT = ("tests/page/", "tests/fuzz/", "tests/test_notebooks.py", "tests/test_mutants.py")


class Outcome(NamedTuple):
    """Result of planting one bug."""

    name: str
    """Name of its set and its number in the set, from 1, such as ``second-7``."""
    rule: Rule
    noticed: bool
    test: str
    """The first test that failed; empty where none did."""
    seconds: float


def judge(name: str, rule: Rule, tree: Path, *, wide: bool, tests: Sequence[str] = ()) -> Outcome:
    """Run ``tests``, or the tests nearest to a bug, with the bug in place."""
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
    # Exit code 5: all tests of these files belong to another tier.
    return Outcome(name, rule, code not in (0, 5), next(iter(failed), ""), time.monotonic() - began)


def _run(tree: Path, arguments: list[str], answer: Path) -> None:
    watch = Watch()
    code = run_pytest(tree, arguments, watch)
    answer.write_text(json.dumps([code, *watch.failed]))


def tests_near(file: str, *, wide: bool = False) -> list[str]:
    """List the test files nearest to a module, the nearest first.

    First come files named after the module, then files that import it, then files in its folder of tests that contain
    its name, then the rest of that folder. Among equally near files, the one with the most mentions comes first.
    """
    module = file.removeprefix("ringprof/").removesuffix(".py")
    parent, _, stem = module.rpartition("/")
    package, folder = "ringprof." + parent.replace("/", "."), _folder_of(parent)
    imported = re.compile(rf"{re.escape(package)}\.{stem}\b|from {re.escape(package)} import [^\n]*\b{stem}\b")
    ranking: list[tuple[int, int, str]] = []
    for name, text in _test_files():
        inside, count = name.startswith(f"{folder}/"), len(re.findall(rf"\b{stem}\b", text))
        named = inside and Path(name).stem.startswith((f"test_{stem}", f"test_{Path(parent).name}"))
        if named or imported.search(text) or inside:
            ranking.append((0 if named else 1 if imported.search(text) else 2 if count else 3, -count, name))
    names = [(near, name) for near, _, name in sorted(ranking)]
    related = [name for near, name in names if near < 3] or [name for _, name in names]
    return [name for _, name in names] if wide else related[:NEAREST]


def _folder_of(parent: str) -> str:
    """Return the folder of tests of a package, or of the nearest enclosing package that has one."""
    folder = Path("tests", parent)
    while not (ROOT / folder).is_dir():
        folder = folder.parent
    return str(folder)


@cache
def _test_files() -> list[tuple[str, str]]:
    names = (str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("test_*.py")))
    return [(name, (ROOT / name).read_text("utf-8")) for name in names if not name.startswith(LEFT_OUT)]


def unreliable_tests(outcomes: Sequence[Outcome], tree: Path) -> list[str]:
    """Return the tests that failed with a bug but fail without it, too."""
    tests, answer = sorted({outcome.test for outcome in outcomes if "::" in outcome.test}), tree / "answer.json"
    if not tests:
        return []
    answer.unlink(missing_ok=True)
    if not in_fork(_run, tree, ["-m", "not long", *tests], answer, limit_s=LIMIT_S):
        raise RuntimeError(f"the tests that noticed bugs do not end in time without them: {tests}")
    return list(json.loads(answer.read_text())[1:])


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the noticed share of each set, then the bugs that no test noticed."""
    lines = []
    for name in SETS:
        in_set = [outcome for outcome in outcomes if outcome.name.startswith(name) and not outcome.rule.equivalent]
        if in_set:
            count = sum(outcome.noticed for outcome in in_set)
            lines.append(f"{name} set: {count} of {len(in_set)} noticed, {100 * count / len(in_set):.0f} %")
    missed = [outcome for outcome in outcomes if not outcome.noticed and not outcome.rule.equivalent]
    lines += [f"| {outcome.name} | {outcome.rule.file} | {outcome.rule.effect} |" for outcome in missed]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="bugs such as second-7, or sets; default: all sets")
    parser.add_argument(
        "--wide", action="store_true", help="run all tests near the changed module, also those that start processes"
    )
    parser.add_argument("--tests", nargs="+", default=[], help="test files to run in place of the nearest")
    parser.add_argument(
        "--least", type=float, default=90.0, help="exit with 1 if less than this percentage of a set is noticed"
    )
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
        unreliable = unreliable_tests(outcomes, tree)
    outcomes = [outcome._replace(noticed=outcome.noticed and outcome.test not in unreliable) for outcome in outcomes]
    print(table(outcomes), f"tests that fail without a bug: {unreliable}" if unreliable else "", sep="\n")
    noticed = Counter(outcome.name.partition("-")[0] for outcome in outcomes if outcome.noticed)
    sizes = Counter(outcome.name.partition("-")[0] for outcome in outcomes)
    return int(any(100 * noticed[name] < options.least * size for name, size in sizes.items()))


if __name__ == "__main__":
    sys.exit(main())
