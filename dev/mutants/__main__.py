"""Plant small bugs in the code one at a time, and list those that no test notices.

``python dev/mutants --number 600 --seed 1`` takes a sample of the mutants that mutmut makes of the folders in
`PACKAGES`: every place in the code is equally likely, and one of its mutants is taken. Each is put into a copy of the
checkout, and the tests that run its line run there, the shortest first. mutmut's own runner would leave out
decorated functions, tables, and the package whose folder lies elsewhere (``strategies/``).
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
from sample import Mutant, sample

PACKAGES = [
    *(f"ringprof/{name}" for name in ("analysis", "prediction", "proof", "recording", "report", "trace")), "strategies",
]  # fmt: skip
EQUIVALENT = Path(__file__).with_name("equivalent.md")
Row = dict[str, Any]


def judge(mutant: Mutant, trees: Path, tests: list[str], limit_s: float) -> Row:
    """Run tests with a mutant in place; return its row. Each process works in its own copy of the checkout."""
    tree = trees / str(os.getpid())
    if not tree.exists():
        copy_checkout(tree)
    path, answer = tree / mutant.file, tree / "answer.json"
    original, times = path.read_bytes(), path.stat()
    answer.unlink(missing_ok=True)
    try:
        path.write_text(mutant.text, "utf-8")
        in_time = in_fork(_run, tree, tests, answer, limit_s=limit_s)
    finally:
        path.write_bytes(original)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    if not answer.exists():
        return row(mutant, "killed" if in_time else "timeout", "the process ended" if in_time else "")
    code, *failed = json.loads(answer.read_text())
    return row(mutant, "killed" if code else "survived", failed[0] if failed else "an import" if code else "")


def _run(tree: Path, tests: list[str], answer: Path) -> None:
    watch = Watch()
    code = run_pytest(tree, ["-x", *tests], watch)
    answer.write_text(json.dumps([code, *watch.failed]))


def row(mutant: Mutant, outcome: str, killer: str = "") -> Row:
    return {**asdict(mutant), "text": "", "outcome": outcome, "killer": killer}


def key(mutant_row: Row) -> tuple[Any, ...]:
    return mutant_row["file"], mutant_row["line"], mutant_row["column"], mutant_row["after"]


def judge_all(mutants: list[Mutant], covering: Covering, folder: Path, jobs: int) -> list[Row]:
    """Return one row per mutant. Rows that a stopped run left in the folder are taken from there."""
    log = folder / "rows.jsonl"
    kept = (
        {key(kept_row): kept_row for kept_row in map(json.loads, log.read_text().splitlines())} if log.exists() else {}
    )
    rows, futures = [], []
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool, log.open("a") as stream:
        # In random order, so that a stopped run has judged a sample of the sample.
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


def unreliable_tests(rows: list[Row], tree: Path) -> list[str]:
    """Return the tests that failed with a mutant but fail without it, too."""
    killers = sorted({judged["killer"] for judged in rows if "::" in judged["killer"]})
    answer = tree / "answer.json"
    answer.unlink(missing_ok=True)
    in_fork(_run_all, tree, killers, answer)
    return list(json.loads(answer.read_text())[1:])


def _run_all(tree: Path, tests: list[str], answer: Path) -> None:
    watch = Watch()
    code = run_pytest(tree, tests, watch)
    answer.write_text(json.dumps([code, *watch.failed]))


def line(judged: Row) -> str:
    """Return the start of a mutant's line in a table, without line numbers; the reason why it survived follows."""
    before, after = (" ".join(judged[name].split()).replace("|", "\\|")[:110] for name in ("before", "after"))
    return f"| {judged['file']} {judged['function']} | `{before}` | `{after}` |"


def named_equivalent() -> list[str]:
    """Return the lines of the table of mutants that no test could notice."""
    return EQUIVALENT.read_text("utf-8").splitlines()


def table(rows: list[Row]) -> str:
    """Return a table of the mutants that no test noticed."""
    notes = {"not covered": "no test runs it", "survived": ""}
    survivors = (f"{line(judged)} {notes[judged['outcome']]} |" for judged in rows if judged["outcome"] in notes)
    return "\n".join(["| place | before | after | |", "| --- | --- | --- | --- |", *survivors])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--packages", nargs="+", default=PACKAGES)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="keep copies and rows here, and continue a stopped run")
    parser.add_argument("--least", type=float, default=85.0, help="exit with 1 if less than this percentage is noticed")
    options = parser.parse_args()
    mutants = sample(options.packages, options.number, options.seed)
    preload()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        tree = folder / "map"
        if not tree.exists():
            copy_checkout(tree)
        covering = Covering(tree, options.packages)
        print(
            f"{len(mutants)} mutants; {len(covering.seconds)} tests pass, failing and left out: {covering.failed}",
            flush=True,
        )
        rows = judge_all(mutants, covering, folder, options.jobs)
        unreliable = unreliable_tests(rows, tree)
    known = named_equivalent()
    different = [judged for judged in rows if not any(text.startswith(line(judged)) for text in known)]
    counts = Counter(judged["outcome"] for judged in different if judged["killer"] not in unreliable)
    noticed = 100 * (counts["killed"] + counts["timeout"]) / len(different)
    print(
        table(different),
        f"tests that fail without a mutant: {unreliable}" if unreliable else "",
        dict(counts),
        sep="\n",
    )
    print(f"{noticed:.1f} % of {len(different)} mutants noticed; {len(rows) - len(different)} are named as equivalent")
    return int(noticed < options.least)


if __name__ == "__main__":
    sys.exit(main())
