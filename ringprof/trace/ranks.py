"""Many ranks' traces: read side by side where that pays, put in order, checked to be one run."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from ringprof.errors import InputError
from ringprof.trace.columns import Trace, Warning
from ringprof.trace.kineto import read_trace
from ringprof.trace.nsys import SQLITE_MAGIC, read_nsys
from ringprof.trace.stream import GZIP_MAGIC, ZSTD_MAGIC

WORTH_A_PROCESS = 100 << 20
"""Bytes of JSON, all files together, from which further processes read faster than this one alone."""

COMPRESSION = 15
"""How many times larger than its compressed file a trace is, about."""


def read_traces(
    paths: Sequence[str | os.PathLike[str]], *, jobs: int | None = None, limit_bytes: int | None = None
) -> list[Trace]:
    """Read the traces of several ranks, sorted by rank.

    ``jobs``: processes to read in, by default as many as there are CPUs when the files are large. Where no
    trace names its rank, the order of the paths does. Several traces of one rank, or of different runs, stay
    in the list; their warnings say so. Raises as `read_trace` does.
    """
    given = [os.fspath(path) for path in paths]
    exports = [name for name in given if _is_export(name)]
    names = [name for name in given if name not in exports]
    if jobs is None:
        jobs = _cpus() if _json_bytes(names) >= WORTH_A_PROCESS else 1
    jobs = min(jobs, max(len(names), 1))
    if jobs > 1 and sys.executable:
        with ThreadPoolExecutor(jobs) as pool:
            traces = list(pool.map(lambda name: _read_elsewhere(name, limit_bytes), names))
    else:
        traces = [read_trace(name, limit_bytes=limit_bytes) for name in names]
    return checked([*traces, *(trace for name in exports for trace in read_nsys(name))])


def _is_export(name: str) -> bool:
    """Whether this is an export of Nsight Systems; not for a file that cannot be opened, which reading will report."""
    try:
        with open(name, "rb") as file:
            return file.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC
    except OSError:
        return False


def checked(traces: Sequence[Trace]) -> list[Trace]:
    """The traces sorted by rank, each with warnings about its place among the others."""
    if len(traces) < 2:
        return list(traces)
    if all(trace.rank is None for trace in traces):
        traces = [replace(trace, rank=rank) for rank, trace in enumerate(traces)]
        traces[0].warnings.append(
            Warning("assumed_ranks", "no trace names its rank: ranks are given in the order of the files")
        )
    counts = Counter(trace.rank for trace in traces)
    for trace in traces:
        trace.warnings.extend(_place_warnings(trace, counts[trace.rank]))
    traces = sorted(traces, key=lambda trace: (trace.rank is None, trace.rank or 0))
    traces[0].warnings.extend(_run_warnings(traces))
    return traces


def _place_warnings(trace: Trace, same_rank: int) -> list[Warning]:
    if trace.rank is None:
        return [Warning("unknown_rank", f"{trace.path} does not name its rank, in the file or its name")]
    if same_rank > 1:
        message = f"{trace.path} is one of {same_rank} traces of rank {trace.rank}: give the files of one run only"
        return [Warning("duplicate_rank", message, trace.rank)]
    return []


def _run_warnings(traces: Sequence[Trace]) -> list[Warning]:
    """What shows that the traces are not all the ranks of one run."""
    found = []
    sizes = {trace.world_size for trace in traces if trace.world_size is not None}
    if len(sizes) > 1:
        listed = ", ".join(str(size) for size in sorted(sizes))
        found.append(Warning("mixed_runs", f"the traces come from runs of different world sizes ({listed})"))
    elif sizes:
        size = sizes.pop()
        missing = sorted(set(range(min(size, 1 << 16))) - {trace.rank for trace in traces if trace.rank is not None})
        if missing:
            message = f"{len(missing)} of {size} ranks have no trace, the first is rank {missing[0]}"
            found.append(Warning("missing_ranks", message, count=len(missing)))
    apart = _first_apart(traces)
    if apart:
        message = f"{apart[0].path} and {apart[1].path} have no moment in common: are they of one run?"
        found.append(Warning("mixed_runs", message, apart[1].rank))
    return found


def _first_apart(traces: Sequence[Trace]) -> tuple[Trace, Trace] | None:
    """Two traces whose times do not overlap at all, such as none of one run have."""
    spans = []
    for trace in traces:
        rows = trace.activities if len(trace.activities.start_ns) else trace.operators
        if len(rows.start_ns):
            spans.append((int(rows.start_ns[0]), int(rows.end_ns.max()), trace))
    if len(spans) < 2:
        return None
    earliest_end = min(spans, key=lambda span: span[1])
    latest_start = max(spans, key=lambda span: span[0])
    if latest_start[0] <= earliest_end[1]:
        return None
    return earliest_end[2], latest_start[2]


# --- other processes ----------------------------------------------------------------------------------


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _json_bytes(names: Sequence[str]) -> int:
    """About how much JSON the files hold; 0 for those that cannot be opened, which reading will report."""
    total = 0
    for name in names:
        try:
            with open(name, "rb") as file:
                magic = file.read(4)
                size = os.fstat(file.fileno()).st_size
        except OSError:
            continue
        total += size * (COMPRESSION if magic.startswith(GZIP_MAGIC) or magic == ZSTD_MAGIC else 1)
    return total


_CHILD = "from ringprof.trace.ranks import _answer; _answer()"


def _read_elsewhere(name: str, limit_bytes: int | None) -> Trace:
    """Read one trace in a process of its own.

    Not through multiprocessing: its safe ways to start a process run the caller's main module again, and a
    script or notebook that calls this library need not guard against that.
    """
    package_parent = str(Path(__file__).resolve().parents[2])
    search = os.pathsep.join(filter(None, (package_parent, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", _CHILD],
        input=pickle.dumps((name, limit_bytes)),
        capture_output=True,
        env={**os.environ, "PYTHONPATH": search},
        check=False,
    )
    if done.returncode != 0:
        raise InputError(f"{name}: the process that read it ended with code {done.returncode} (out of memory?)")
    answer = pickle.loads(done.stdout)
    if isinstance(answer, Exception):
        raise answer
    assert isinstance(answer, Trace)
    return answer


def _answer() -> None:
    """The other process: a name and a limit come in, a trace or an error goes out."""
    name, limit_bytes = pickle.load(sys.stdin.buffer)
    answer: Trace | Exception
    try:
        answer = read_trace(name, limit_bytes=limit_bytes)
    except Exception as error:
        answer = error
    pickle.dump(answer, sys.stdout.buffer, protocol=pickle.HIGHEST_PROTOCOL)
