"""Modules that `ringprof report` of a trace loads: a report of a small trace is nearly all start-up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from tests.paths import DATA, ROOT, TRACES

HEAVY = {
    "torch", "pandas", "matplotlib", "bokeh", "jinja2", "rich", "joblib", "dask", "fsspec", "sqlite3",
    "multiprocessing", "concurrent.futures", "asyncio", "subprocess", "importlib.metadata", "numpy.ma",
    "numpy.testing", "numpy.random", "ringprof.recording", "ringprof.prediction", "ringprof.printed.tables",
    "ringprof.printed.benchmarks", "ringprof.common.process_pool", "ringprof.trace.nsys",
    "ringprof.report.page.figures", "ringprof.report.perfetto",
}  # fmt: skip
PROGRAM = """
import json, os, sys
from ringprof.cli import commands
code = commands.run(["report", sys.argv[1]])
from dataclasses import is_dataclass
ours = [vars(module).values() for name, module in sys.modules.items() if name.startswith("ringprof")]
classes = {thing for things in ours for thing in things if isinstance(thing, type) and is_dataclass(thing)}
print(json.dumps([code, list(sys.modules), len(classes), os.environ.get("OPENBLAS_NUM_THREADS")]), file=sys.stderr)
"""


def started(environment):
    trace = DATA / "h200x8-zigzag-131072" / "rank0.json.gz"
    command = [sys.executable, "-c", PROGRAM, str(trace)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stderr)


def test_report_of_a_trace_imports_no_heavy_packages_and_leaves_the_number_of_blas_threads():
    unset = {key: value for key, value in os.environ.items() if key != "OPENBLAS_NUM_THREADS"}
    code, modules, dataclasses, threads = started(unset)
    assert (code, threads) == (0, None)
    own = {"numpy.ma", "numpy.random"} if version("numpy").startswith("1.") else set()  # NumPy 1 loads them itself
    assert (HEAVY - own) & set(modules) == set()
    # A dataclass costs as much as forty msgspec Structs: its code is generated, compiled and run at every start.
    assert dataclasses < 15


def test_number_of_blas_threads_that_the_user_set_stays():
    assert started(os.environ | {"OPENBLAS_NUM_THREADS": "3"})[3] == "3"


def test_broken_package_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text('raise ImportError("libcudart.so.12: cannot open shared object file")')
    done = subprocess.run(
        [sys.executable, "-m", "ringprof", "predict", "--strategy", "ring", "--seq", "64k", "--machine", "h100"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    message = "ringprof: a package cannot be loaded: libcudart.so.12: cannot open shared object file\n"
    assert (done.returncode, done.stderr) == (2, message)


def test_repeated_commands_in_one_process_leak_no_frozen_objects() -> None:
    """Freeze only the objects of modules for the garbage collector, not those that commands leave behind."""
    program = (
        "import gc\nfrom ringprof.cli import run\n"
        f"report = ['report', {str(TRACES / 'h200x4-zigzag-65536')!r}]\n"
        "frozen = [(run(report), gc.get_freeze_count())[1] for _ in 'abc']\n"
        "assert frozen[0] == frozen[1] == frozen[2] > 0, frozen\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_logs_are_read_without_pandas() -> None:
    log = str(next((DATA / "logs").iterdir()))
    commands = [["report", log, *form] for form in ([], ["--format", "json"], ["--csv", "rows"])]
    program = (
        f"import sys\nfrom ringprof.cli import run\nsys.exit(any(map(run, {commands})) or 'pandas' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
