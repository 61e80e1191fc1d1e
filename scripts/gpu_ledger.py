"""Run the tests marked ``gpu``, and keep in a ledger on which code each file of them ran last, where, and how it ended.

Without options it prints which files' entries are out of date: never run, or run on other code than that of the tree.
``--run`` runs those files, the longest first and a few at a time, and writes the ledger after each of them; ``--all``
and names of files run others as well. A run ends after ``--limit`` seconds; the next one continues. ``--output FOLDER``
also writes the ledger and each file's log there, for a machine whose tree is a copy; ``--take FILE`` merges such a
ledger into this tree's. Nothing is installed: packages that this interpreter misses are named.
"""

from __future__ import annotations

import argparse
import ast
import configparser
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
AT_ONCE = 3
"""Test files that run at the same time."""
TEST_LIMIT_S, FILE_LIMIT_S, RUN_LIMIT_S = 200, 360, 480
"""Seconds after which a test fails, a file is ended, and no further file is begun or waited for."""
NEEDED = ("pytest", "pytest-timeout", "hypothesis", "torch")
"""Packages without which no test can run."""
KERNELS = ("flash-attn", "flash-attn-3", "flash-attn-4", "fla-core", "triton")
LINE = "* Tests marked `gpu`"

Entry = dict[str, Any]
Ledger = dict[str, Entry]


def gpu_test_files(root: Path = ROOT) -> list[str]:
    """List the test files that have tests marked ``gpu``."""
    files = sorted((root / "tests").rglob("test_*.py"))
    return [str(path.relative_to(root)) for path in files if re.search(r"mark\.gpu\b", path.read_text("utf-8"))]


def settings(root: Path = ROOT) -> dict[str, Any]:
    """Read the table ``tool.ringprof.gpu-tests`` of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["ringprof"]["gpu-tests"]
    return table


def sources(file: str, root: Path = ROOT) -> dict[str, str]:
    """Return a digest of each source file or folder that a test file covers, and of the tests' own modules.

    pyproject.toml lists them by test file, or by a folder of test files: the longest name that matches counts.
    """
    covers: dict[str, list[str]] = settings(root)["covers"]
    name = max((name for name in covers if file == name or file.startswith(f"{name}/")), key=len)
    digests = {cover: _digest(root, _python_files(root / cover)) for cover in covers[name]}
    return {**digests, "tests": _digest(root, sorted(_with_imports(root / file, root, set())))}


def _python_files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.exists() else []


def _with_imports(path: Path, root: Path, known: set[Path]) -> set[Path]:
    """Return a test module and the modules below ``tests`` that it imports, and those that these import."""
    if path.is_file() and path not in known:
        known.add(path)
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests"):
                _with_imports(root / f"{str(node.module).replace('.', '/')}.py", root, known)
    return known


def _digest(root: Path, files: Sequence[Path]) -> str:
    parts = (part for path in files for part in (str(path.relative_to(root)).encode(), path.read_bytes()))
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def read(path: Path) -> Ledger:
    """Read a ledger; one that does not exist is empty."""
    ledger: Ledger = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return ledger


def write(ledger: Ledger, path: Path) -> None:
    """Write a ledger, in whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(ledger, indent=1, sort_keys=True) + "\n", "utf-8")
    part.replace(path)


def why_stale(file: str, ledger: Ledger, root: Path = ROOT, gpus: int = 2) -> str | None:
    """Return why the entry of a test file does not show that it passes on the tree's code; None where it does.

    ``gpus``: GPUs that a run must have had, where tests of the file need two.
    """
    entry = ledger.get(file)
    if entry is None:
        return "never run"
    if entry["failed"] or not entry["passed"]:
        return f"{entry['failed']} failed" if entry["failed"] else "all skipped"
    if entry["gpus"] < gpus and re.search(r"needs_two_gpus|device_count\(\) < 2", (root / file).read_text("utf-8")):
        return f"ran on {entry['gpus']} GPU"
    now = sources(file, root)
    changed = sorted(
        name for name in now.keys() | entry["sources"].keys() if now.get(name) != entry["sources"].get(name)
    )
    return f"changed: {', '.join(changed)}" if changed else None


def stale(ledger: Ledger, root: Path = ROOT) -> dict[str, str]:
    """Return the test files whose entries are out of date, with the reason."""
    reasons = {file: why_stale(file, ledger, root) for file in gpu_test_files(root)}
    return {file: reason for file, reason in reasons.items() if reason}


def is_due(file: str, ledger: Ledger, where: Entry, root: Path = ROOT) -> bool:
    """Return whether a test file has not passed on the tree's code, on as many GPUs of the kind that is here."""
    entry = ledger.get(file)
    if entry is None or entry["gpu"] != where["gpu"] or entry["gpus"] < where["gpus"]:
        return True
    return why_stale(file, ledger, root, min(where["gpus"], 2)) is not None


def summary(ledger: Ledger, root: Path = ROOT) -> str:
    """Return what is out of date in one or two lines."""
    files, reasons = gpu_test_files(root), stale(ledger, root)
    if not reasons:
        return f"GPU tests: all {len(files)} files passed on this code"
    names = "; ".join(f"{Path(file).stem} ({reason})" for file, reason in reasons.items())
    return f"GPU tests: {len(reasons)} of {len(files)} files have not passed on this code (make test-gpu):\n  {names}"


def sentence(ledger: Ledger) -> str:
    """Return the line of docs/limitations.md about the last runs, which depends on the ledger alone."""
    if not ledger:
        return f"{LINE} have no recorded run yet; `python scripts/gpu_ledger.py` lists their files."
    entries = ledger.values()
    days = sorted({entry["date"][:10] for entry in entries})
    where = sorted(
        {f"{entry['gpus']} {entry['gpu']} with torch {entry['torch'].partition('+')[0]}" for entry in entries}
    )
    good = sum(bool(entry["passed"] and not entry["failed"]) for entry in entries)
    passed, skipped = (sum(entry[kind] for entry in entries) for kind in ("passed", "skipped"))
    text = (
        f"{LINE} ran last on {' to '.join(dict.fromkeys((days[0], days[-1])))}, on {'; '.join(where)}: {good} of"
        f" {len(ledger)} files passed ({passed} tests; {skipped} were skipped). `tests/gpu_ledger.json` has the commit"
        " of each, `python scripts/gpu_ledger.py` lists those whose code has changed since."
    )
    return textwrap.fill(text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def update_page(ledger: Ledger, page: Path) -> None:
    """Put the ledger's `sentence` into a page, in the place of the one there."""
    text, line = page.read_text("utf-8"), re.compile(rf"^{re.escape(LINE)}.*(?:\n  .*)*", re.MULTILINE)
    page.write_text(line.sub(lambda _: sentence(ledger), text), "utf-8")


def missing_packages(root: Path = ROOT) -> list[str]:
    """List the packages that ringprof, its recorder and the tests need and this interpreter does not have."""
    config = configparser.ConfigParser()
    config.read(root / "setup.cfg")
    lines = config["options"]["install_requires"] + config["options.extras_require"]["record"]
    names = [*NEEDED, *re.findall(r"^([\w.-]+)", lines, re.MULTILINE)]
    return [name for name in dict.fromkeys(names) if _version(name) is None]


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def environment() -> Entry:
    """Return the GPUs and the packages that decide about the results."""
    import torch

    kernels = {name: version for name in KERNELS if (version := _version(name))}
    kernels["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    names = sorted({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())})
    return {
        "gpu": ", ".join(names), "gpus": torch.cuda.device_count(), "torch": torch.__version__, "kernels": kernels,
        "commit": _commit(),
    }  # fmt: skip


def _commit() -> str:
    """Return the checked-out commit, with "+" where tracked files differ; "unknown" in a tree without git."""
    with suppress(OSError, subprocess.CalledProcessError):
        git = partial(subprocess.check_output, cwd=ROOT, text=True, stderr=subprocess.DEVNULL)
        commit: str = git(["git", "rev-parse", "--short=12", "HEAD"]).strip()
        return commit + ("+" if git(["git", "status", "--porcelain", "--untracked-files=no"]).strip() else "")
    return "unknown"


def devices(count: int, turn: int) -> str:
    """Return CUDA_VISIBLE_DEVICES of a test file: the first device, which most tests use, changes with the turn."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    names = visible.split(",")
    return ",".join(names[turn % len(names) :] + names[: turn % len(names)])


_running: set[int] = set()
"""Process groups of the files that run now."""


def _end(group: int) -> None:
    """End what is left of a file's processes: ranks would keep their GPUs."""
    _running.discard(group)
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def run_file(file: str, folder: Path, visible: str, limit_s: float, root: Path = ROOT) -> Entry:
    """Run one test file and return how it ended; its log and its results in JUnit's form go to ``folder``."""
    name = file.removesuffix(".py").replace("/", "-")
    report, log = folder / f"{name}.xml", folder / f"{name}.log"
    command = [sys.executable, "-m", "pytest", "--gpu", "-m", "not long", "-v", "-p", "no:cacheprovider"]
    command += [f"--timeout={TEST_LIMIT_S}", "--timeout-method=signal", f"--junitxml={report}", file]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    began = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=root, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": visible},
        )  # fmt: skip
        _running.add(process.pid)
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(limit_s)
        _end(process.pid)
        process.wait()
    counts = {"passed": 0, "skipped": 0, "failed": 1}
    # 0: all passed; 1: some failed; 5: no test of this file belongs here.
    if code in (0, 1, 5) and report.exists():
        suite = ElementTree.parse(report).getroot().find("testsuite")
        assert suite is not None
        tests, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
        failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
        counts = {"passed": tests - skipped - failed, "skipped": skipped, "failed": failed}
    problem = {"problem": f"not done after {limit_s:.0f} s"} if code is None else {}
    return {
        **counts, **problem, "seconds": round(time.monotonic() - began), "sources": sources(file, root),
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
    }  # fmt: skip


def run_files(
    files: Sequence[str], ledger: Ledger, where: Entry, folder: Path, limit_s: float, root: Path = ROOT
) -> Iterator[tuple[str, Entry]]:
    """Run test files, and yield each with its entry as it ends. What the time does not suffice for is left out."""
    until = time.monotonic() + limit_s
    alone = [file for file in files if file in settings(root).get("alone", ())]
    together = sorted((file for file in files if file not in alone), key=lambda file: -_expected_s(file, ledger))

    def run(file: str) -> tuple[str, Entry | None]:
        left = until - time.monotonic()
        if left < min(60.0, limit_s / 2):
            return file, None
        visible = devices(where["gpus"], files.index(file))
        entry = run_file(file, folder, visible, min(FILE_LIMIT_S, left), root)
        # A file that the end of the run cut short has not failed.
        return file, None if "problem" in entry and left < FILE_LIMIT_S else {**where, **entry}

    for group, workers in ((together, AT_ONCE), (alone, 1)):
        with ThreadPoolExecutor(workers) as pool:
            try:
                for done in as_completed([pool.submit(run, file) for file in group]):
                    file, entry = done.result()
                    if entry is None:
                        print(f"no time left for {file}", flush=True)
                    else:
                        yield file, entry
            except BaseException:
                # Such as Ctrl-C, which the files' own process groups do not receive.
                pool.shutdown(wait=False, cancel_futures=True)
                for process_group in list(_running):
                    _end(process_group)
                raise


def _expected_s(file: str, ledger: Ledger) -> float:
    return float(ledger.get(file, {}).get("seconds", FILE_LIMIT_S))


def failures(log: Path) -> list[str]:
    """Return the lines of pytest's summary that name failed tests, shortened."""
    lines = log.read_text("utf-8", "replace").splitlines()
    return [line[:300] for line in lines if line.startswith(("FAILED ", "ERROR "))] or lines[-5:]


def run_suite(options: argparse.Namespace, path: Path, page: Path) -> int:
    """Run what is out of date, or what the options name; return 1 where a test failed or a file is left."""
    missing = missing_packages()
    if missing:
        print(f"{sys.executable} misses {', '.join(missing)} (python -m pip install {' '.join(missing)})", flush=True)
    if not set(missing).isdisjoint(NEEDED):
        return 2
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        where = pool.submit(environment).result()
    if not where["gpus"]:
        print("no CUDA device: no test was run")
        return 2
    kernels = ", ".join(f"{name} {version}" for name, version in where["kernels"].items())
    print(f"{where['gpus']} {where['gpu']}, torch {where['torch']}, {kernels}", flush=True)
    absent = [name for name in KERNELS if name not in where["kernels"]]
    if absent:
        print(f"not installed, so their tests are skipped: {', '.join(absent)}", flush=True)
    ledger = read(path)

    due = [file for file in gpu_test_files() if options.all or is_due(file, ledger, where)]
    files = options.files or due
    folder = options.output or Path(tempfile.mkdtemp(prefix="gpu-tests-"))
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    left, began = set(files), time.monotonic()
    for file, entry in run_files(files, ledger, where, folder, options.limit):
        left.discard(file)
        ledger[file] = entry
        write(ledger, path)
        update_page(ledger, page)
        if options.output:
            write(ledger, folder / path.name)
        counts = ", ".join(f"{entry[kind]} {kind}" for kind in ("passed", "skipped", "failed"))
        print(f"{entry['seconds']:4d} s  {counts}  {file}  {entry.get('problem', '')}".rstrip(), flush=True)
        if entry["failed"]:
            print(*failures(folder / f"{file.removesuffix('.py').replace('/', '-')}.log"), sep="\n", flush=True)
    print(f"{len(files) - len(left)} files in {time.monotonic() - began:.0f} s; logs: {folder}\n{summary(ledger)}")
    return int(bool(left) or any(ledger[file]["failed"] for file in files))


def take(source: Path, path: Path, page: Path) -> None:
    """Merge the entries of another ledger that are newer than this tree's."""
    ledger = read(path)
    for file, entry in json.loads(source.read_text("utf-8")).items():
        if entry["date"] >= ledger.get(file, {}).get("date", ""):
            ledger[file] = entry
    write(ledger, path)
    update_page(ledger, page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="test files to run, whether or not they are out of date")
    parser.add_argument("--run", action="store_true", help="run the files that are out of date")
    parser.add_argument("--all", action="store_true", help="run all files")
    parser.add_argument(
        "--limit", type=float, default=RUN_LIMIT_S, help="seconds for the whole run (default %(default)s)"
    )
    parser.add_argument("--output", type=Path, help="folder for the logs and a copy of the ledger")
    parser.add_argument("--take", type=Path, metavar="FILE", help="merge the ledger that a run wrote elsewhere")
    options = parser.parse_args()
    path, page = ROOT / "tests" / "gpu_ledger.json", ROOT / "docs" / "limitations.md"
    if options.run or options.all or options.files:
        return run_suite(options, path, page)
    if options.take:
        take(options.take, path, page)
    print(summary(read(path)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
