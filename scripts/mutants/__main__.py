"""Plant small bugs in the code one at a time, and list those that no test notices.

``python scripts/mutants --number 600 --seed 1`` takes a sample of the mutants that mutmut makes of the folders in
`FOLDERS`: every position in the code is equally likely, then one of its mutants. Each mutant is put into a copy of the
checkout, where the tests that execute it run, the shortest first. mutmut's own runner would leave out decorated
functions, tables, and the package whose folder lies elsewhere (``strategies/``).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from covering import Covering
from fork import Watch, copy_checkout, in_fork, preload, run_pytest
from sample import ROOT, Mutant, sample

FOLDERS = [*(f"ringprof/{name}" for name in ("analysis", "prediction", "record", "report", "trace")), "strategies"]
PAGE = ROOT / "docs" / "mutation-testing.md"
Row = dict[str, Any]


def judge(mutant: Mutant, trees: Path, tests: list[str], limit_s: float) -> Row:
    """Run the tests on a mutant, and return its outcome and the test that noticed it. Each process has its own copy."""
    tree = trees / str(os.getpid())
    if not tree.exists():
        copy_checkout(tree)
    path, answer = tree / mutant.file, tree / "answer.json"
    original, times = path.read_bytes(), path.stat()
    answer.unlink(missing_ok=True)
    try:
        path.write_text(mutant.text, "utf-8")
        in_time = in_fork(_run_until_failure, tree, tests, answer, limit_s=limit_s)
    finally:
        path.write_bytes(original)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    if not answer.exists():
        return row(mutant, "killed" if in_time else "timeout", "the process ended" if in_time else "")
    code, *failed = json.loads(answer.read_text())
    return row(mutant, "killed" if code else "survived", failed[0] if failed else "an import" if code else "")


def _run_until_failure(tree: Path, tests: list[str], answer: Path) -> None:
    watch = Watch()
    code = run_pytest(tree, ["-x", *tests], watch)
    answer.write_text(json.dumps([code, *watch.failed]))


def row(mutant: Mutant, outcome: str, killer: str = "") -> Row:
    return {**asdict(mutant), "text": "", "outcome": outcome, "killer": killer}


def key(mutant: Row) -> tuple[Any, ...]:
    return mutant["file"], mutant["line"], mutant["column"], mutant["after"]


def judge_all(mutants: list[Mutant], covering: Covering, folder: Path, jobs: int) -> list[Row]:
    """Judge all mutants and return one row each. Rows of an earlier, stopped run in the folder are reused."""
    log = folder / "rows.jsonl"
    kept = {key(old): old for old in map(json.loads, log.read_text().splitlines())} if log.exists() else {}
    rows, futures = [], []
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool, log.open("a") as stream:
        # In random order, so that a stopped run has judged a random sample.
        for mutant in random.Random(0).sample(mutants, len(mutants)):
            tests, known = covering.tests(mutant), kept.get(key(row(mutant, "")))
            if known or not tests:
                rows.append(known or row(mutant, "not covered"))
            else:
                limit_s = 60 + 10 * sum(covering.seconds[test] for test in tests)
                futures.append(pool.submit(judge, mutant, folder, tests, limit_s))
        for future in as_completed(futures):
            rows.append(future.result())
            print(f"{len(rows)}/{len(mutants)}", *(rows[-1][name] for name in ("outcome", "file", "line", "killer")))
            sys.stdout.flush()
            stream.write(json.dumps(rows[-1]) + "\n")
            stream.flush()
    return sorted(rows, key=key)


def failing_without_mutant(rows: list[Row], tree: Path) -> list[str]:
    """List the tests that noticed a mutant but fail without one, too."""
    killers = sorted({row["killer"] for row in rows if "::" in row["killer"]})
    answer = tree / "answer.json"
    answer.unlink(missing_ok=True)
    in_fork(_run_all, tree, killers, answer)
    return list(json.loads(answer.read_text())[1:])


def _run_all(tree: Path, tests: list[str], answer: Path) -> None:
    watch = Watch()
    code = run_pytest(tree, tests, watch)
    answer.write_text(json.dumps([code, *watch.failed]))


def line(mutant: Row) -> str:
    """Format a mutant as the start of a table row, without line numbers; the rest of the row says why it survived."""
    before, after = (" ".join(mutant[name].split()).replace("|", "\\|")[:110] for name in ("before", "after"))
    return f"| {mutant['file']} {mutant['function']} | `{before}` | `{after}` |"


def named_equivalent() -> list[str]:
    """Read the rows of the page's table of equivalent mutants, which no test can notice."""
    return PAGE.read_text("utf-8").partition("## Equivalent")[2].partition("\n## ")[0].splitlines()


def table(rows: list[Row]) -> str:
    """Format the mutants that no test noticed as a table."""
    notes = {"not covered": "no test runs it", "survived": ""}
    unnoticed = (f"{line(mutant)} {notes[mutant['outcome']]} |" for mutant in rows if mutant["outcome"] in notes)
    return "\n".join(["| place | before | after | |", "| --- | --- | --- | --- |", *unnoticed])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folders", "--rooms", nargs="+", default=FOLDERS, help="folders to mutate")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="keep copies and rows here, and go on where a run stopped")
    parser.add_argument("--least", type=float, default=85.0, help="exit with 1 if fewer percent are noticed")
    options = parser.parse_args()
    mutants = sample(options.folders, options.number, options.seed)
    preload()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        tree = folder / "map"
        if not tree.exists():
            copy_checkout(tree)
        covering = Covering(tree, options.folders)
        print(f"{len(mutants)} mutants; {len(covering.seconds)} tests pass, not asked: {covering.failed}", flush=True)
        rows = judge_all(mutants, covering, folder, options.jobs)
        unreliable = failing_without_mutant(rows, tree)
    equivalent = named_equivalent()
    different = [mutant for mutant in rows if not any(known.startswith(line(mutant)) for known in equivalent)]
    counts = Counter(mutant["outcome"] for mutant in different if mutant["killer"] not in unreliable)
    noticed = 100 * (counts["killed"] + counts["timeout"]) / len(different)
    unreliable_line = f"tests that fail without a mutant: {unreliable}" if unreliable else ""
    print(table(different), unreliable_line, dict(counts), sep="\n")
    print(f"{noticed:.1f} % of {len(different)} mutants noticed; {len(rows) - len(different)} are named as equivalent")
    return int(noticed < options.least)


if __name__ == "__main__":
    sys.exit(main())
