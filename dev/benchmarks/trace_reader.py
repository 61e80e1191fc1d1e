"""Measure the time and memory of the trace reader, on a file as large as those of real training.

    python dev/benchmarks/trace_reader.py                 # builds a file of about 300 MB and 1.4 million events
    python dev/benchmarks/trace_reader.py --copies 3600   # ten times as large, to show that memory hardly grows

Each reader runs in its own process, so peak memory is that of the reader. The time is the best of several repeats,
without the start of Python and imports. HolisticTraceAnalysis is measured if this Python, or the one named by
--hta-python, can import it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "tests" / "data" / "h200x8-zigzag-131072" / "rank0.json.gz"

_SHAPES = re.compile(rb', "Concrete Inputs": .*?(?=, "Ev Idx")')
_NUMBER = re.compile(rb'("ts": |"correlation": |"External id": |"id": )(\d+)')

READERS = {
    "ringprof": """
from ringprof.trace.kineto import read_trace
def read(path):
    trace = read_trace(path)
    return trace.events_total, len(trace.activities.start_ns)
""",
    "ringprof, with its analysis": """
from ringprof.scale.pipeline import attribute
from ringprof.trace.kineto import read_trace
def read(path):
    trace = read_trace(path)
    rank, = attribute([trace]).ranks
    return trace.events_total, sum(kind.calls for kind in rank.breakdown.kinds.values())
""",
    "one typed decode": """
import msgspec
from pathlib import Path
class Args(msgspec.Struct, gc=False):
    correlation: int = -1
    external_id: int = msgspec.field(default=-1, name="External id")
    device: int = -1
    stream: int = -1
class Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0
    dur: float = 0
    pid: int | str = 0
    tid: int | str = 0
    args: Args | None = None
class File(msgspec.Struct):
    traceEvents: list[Event]
def read(path):
    events = msgspec.json.decode(Path(path).read_bytes(), type=File).traceEvents
    return len(events), sum(event.cat in ("kernel", "gpu_memcpy", "gpu_memset") for event in events)
""",
    "HTA load": """
import os, tempfile
from hta.trace_analysis import TraceAnalysis
def read(path):
    analysis = TraceAnalysis(trace_files={0: path}, trace_dir=os.path.dirname(path))
    frame = analysis.t.get_trace(0)
    return len(frame), int((frame["stream"] >= 0).sum())
""",
}

# Runs in the reader's process. VmHWM is used, since a child inherits the figure of getrusage from its parent.
MEASURE = """
import json, logging, sys, time
logging.disable(logging.CRITICAL)
start = time.perf_counter()
events, device_events = read(sys.argv[1])
seconds = time.perf_counter() - start
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"seconds": seconds, "peak_mb": peak * 1024 / 1e6, "events": events, "device": device_events}))
"""


def span_of(body: bytes) -> int:
    """Return the time from one copy of these events to the next, in microseconds."""
    times = [int(number) for key, number in _NUMBER.findall(body) if key == b'"ts": ']
    return max(times) - min(times) + 1000


def copies_of(body: bytes, copies: int, span: int) -> Iterator[bytes]:
    """Yield copies of the events, each ``span`` microseconds later than the previous and with its own ids."""
    ids = [int(number) for key, number in _NUMBER.findall(body) if key != b'"ts": ']
    most = max(ids) + 1
    for copy in range(copies):

        def shifted(match: re.Match[bytes], copy: int = copy) -> bytes:
            step = span if match.group(1) == b'"ts": ' else most
            return b"%s%d" % (match.group(1), int(match.group(2)) + copy * step)

        yield _NUMBER.sub(shifted, body)


def build(path: Path, sample: Path, copies: int, shapes: bool) -> None:
    """Write a trace with ``copies`` copies of the sample's events, in the layout of the sample."""
    text = gzip.decompress(sample.read_bytes())
    begin = text.index(b'"traceEvents": [') + len(b'"traceEvents": [')
    end = text.rindex(b"\n  ],")
    body = text[begin:end] if shapes else _SHAPES.sub(b"", text[begin:end])
    with path.open("wb") as file:
        file.write(text[:begin])
        for number, copy in enumerate(copies_of(body, copies, span_of(body))):
            file.write((b"," if number else b"") + copy)
        file.write(text[end:])


def measure(python: str, reader: str, path: Path, repeats: int) -> dict[str, float] | None:
    """Return the best of several runs of a reader; None if it cannot be imported or fails."""
    best: dict[str, float] | None = None
    for _ in range(repeats):
        program = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{READERS[reader]}\n{MEASURE}"
        done = subprocess.run([python, "-c", program, str(path)], capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{reader}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            return None
        result = json.loads(done.stdout.splitlines()[-1])
        if best is None or result["seconds"] < best["seconds"]:
            best = result
    return best


def main() -> None:
    """Build the file, run the readers, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=360, help="how often the sample is repeated (360: 1.4 M events)")
    parser.add_argument("--shapes", action="store_true", help="keep the operators' recorded shapes")
    parser.add_argument("--sample", type=Path, default=SAMPLE)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--file", type=Path, help="where to build the file, and to keep it")
    parser.add_argument("--hta-python", default=sys.executable, help="a Python that can import hta")
    parser.add_argument("--only", choices=sorted(READERS), action="append", help="these readers only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = (options.file or Path(folder) / "rank0.json").resolve()
        if not path.exists():
            build(path, options.sample, options.copies, options.shapes)
        print(f"{path.name}: {path.stat().st_size / 1e6:.0f} MB\n")
        print(f"{'reader':<18}{'time':>10}{'MB/s':>8}{'peak memory':>14}{'events':>11}{'on device':>11}")
        for reader in options.only or READERS:
            python = options.hta_python if reader == "HTA load" else sys.executable
            row = measure(python, reader, path, 1 if reader == "HTA load" else options.repeats)
            if row:
                rate = path.stat().st_size / 1e6 / row["seconds"]
                print(
                    f"{reader:<18}{row['seconds']:>8.2f} s{rate:>8.0f}{row['peak_mb']:>11.0f} MB"
                    f"{row['events']:>11.0f}{row['device']:>11.0f}"
                )


if __name__ == "__main__":
    main()
