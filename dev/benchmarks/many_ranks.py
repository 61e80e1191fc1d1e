"""Measure the time and memory of a report of many ranks, from their traces and from their reduced traces.

    python dev/benchmarks/many_ranks.py                    # 8, 64, 512 and 1,024 ranks of 50 MB each: 6 GB of disk
    python dev/benchmarks/many_ranks.py --ranks 8 64 --copies 10

The ranks are copies of those of a recorded ring of four: rank r of a ring of n is its rank r mod 4, with peers one step
round the larger ring, and with its iteration repeated. Memory is the peak of all processes of the report together,
sampled twenty times per second.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from joblib import Parallel, delayed

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "dev" / "benchmarks")]
from trace_reader import copies_of, span_of  # noqa: E402

from ringprof.trace.reduced import reduce_file  # noqa: E402

RING = ROOT / "traces" / "h200x4-zigzag-65536"
SMALL = 4
PER_HOST = 8

_PEER = re.compile(rb'"(Src|Dst) Rank": (\d+)')
_RANKS = re.compile(rb'"Process Group Ranks": "\[0, 1, 2, 3\]"')
_CONFIG = re.compile(rb'"ranks": ?\[0, 1, 2, 3\]')


def parts_of(sample: Path) -> tuple[bytes, bytes, bytes]:
    """Split the text of a trace into the parts before, in and after the list of events."""
    text = gzip.decompress(sample.read_bytes())
    begin = text.index(b'"traceEvents": [') + len(b'"traceEvents": [')
    end = text.rindex(b"\n  ],")
    return text[:begin], text[begin:end], text[end:]


def as_rank(text: bytes, own: int, rank: int, world: int) -> bytes:
    """Rewrite text of rank ``own`` of the small ring as text of ``rank`` of a ring of ``world``."""

    def peer(match: re.Match[bytes]) -> bytes:
        step = (int(match[2]) - own + SMALL // 2) % SMALL - SMALL // 2
        return b'"%s Rank": %d' % (match[1], (rank + step) % world)

    ranks = list(range(world))
    # PyTorch shortens long lists of ranks in event records, but not in the trace's description of its groups.
    shown = ranks if world <= 30 else [*ranks[:29], "...", ranks[-1]]
    text = _PEER.sub(peer, text)
    text = _RANKS.sub(b'"Process Group Ranks": "[%s]"' % ", ".join(map(str, shown)).encode(), text)
    text = _CONFIG.sub(b'"ranks": ' + json.dumps(ranks).encode(), text)
    text = text.replace(b'"Group size": %d' % SMALL, b'"Group size": %d' % world)
    return text.replace(b'"pg_size": %d' % SMALL, b'"pg_size": %d' % world)


def described(text: bytes, rank: int, world: int) -> bytes:
    """Rewrite the rank and the world size in the text around the events."""
    text = re.sub(rb'("distributedInfo": ?\{[^{}]*?"rank": ?)\d+', rb"\g<1>%d" % rank, text, count=1)
    return re.sub(rb'("world_size": ?)\d+', rb"\g<1>%d" % world, text)


def write_rank(folder: Path, rank: int, world: int, copies: int) -> int:
    """Write one rank's trace and its reduced form; returns the size of its JSON in bytes."""
    bodies = [parts_of(RING / f"rank{number}.json.gz")[1] for number in range(SMALL)]
    own = rank % SMALL
    before, body, after = parts_of(RING / f"rank{own}.json.gz")
    span = max(map(span_of, bodies))
    body = as_rank(body, own, rank, world)
    size = 0
    path = folder / "traces" / f"rank{rank}.json.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        size += file.write(described(as_rank(before, own, rank, world), rank, world))
        for number, copy in enumerate(copies_of(body, copies, span)):
            size += file.write((b"," if number else b"") + copy)
        size += file.write(described(as_rank(after, own, rank, world), rank, world))
    assert reduce_file(path, folder / "reduced" / f"rank{rank}.ringprof")
    return size


def build(folder: Path, world: int, copies: int) -> int:
    """Write a ring of ``world`` ranks; returns the total size of the JSON in bytes."""
    for name in ("traces", "reduced"):
        (folder / name).mkdir(parents=True)
    sizes = Parallel(n_jobs=-1)(delayed(write_rank)(folder, rank, world, copies) for rank in range(world))
    return sum(sizes)


def measure(folder: Path) -> tuple[float, float, str]:
    """Run a report, and return its seconds, its peak memory in MB and its text."""
    with tempfile.NamedTemporaryFile(suffix=".txt") as output:
        hosts = ["--ranks-per-node", str(PER_HOST)]
        command = [sys.executable, "-m", "ringprof", "report", str(folder), *hosts, "-o", output.name]
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
        peak = 0.0
        while process.poll() is None:
            peak = max(peak, sum(map(resident_mb, family(process.pid))))
            time.sleep(0.05)
        seconds = time.perf_counter() - start
        if process.returncode:
            raise SystemExit(process.returncode)
        # The last lines name the folder.
        return seconds, peak, Path(output.name).read_text("utf-8").partition("\nnext: ")[0]


def family(pid: int) -> list[int]:
    """List the ids of a process and all its descendants."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        threads = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return []
    unique = {int(child) for listed in (children, *threads) for child in listed}
    return [pid, *(descendant for child in unique for descendant in family(child))]


def resident_mb(pid: int) -> float:
    """Return the proportional memory of a process in MB: pages shared by several processes count once."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1000 for line in text.splitlines() if line.startswith("Pss:")), 0.0)


def main() -> None:
    """Build each ring, measure both reports, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 1024])
    parser.add_argument("--copies", type=int, default=125, help="iterations in each trace (125: 50 MB)")
    parser.add_argument("--folder", type=Path, help="where to build the rings, and to keep them")
    options = parser.parse_args()
    head = ("ranks", "JSON", "from traces", "ranks/s", "peak memory", "from reduced", "ranks/s", "peak memory")
    print("| " + " | ".join(head) + " |\n|" + " ---: |" * len(head), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        for world in options.ranks:
            folder = (options.folder or Path(scratch)) / str(world)
            size = folder / "json_bytes"
            if not size.exists():
                written = build(folder, world, options.copies)
                size.write_text(str(written))
            cells = [f"{world:,}", f"{int(size.read_text()) / 1e9:.1f} GB"]
            reports = []
            for kind in ("traces", "reduced"):
                seconds, peak, text = measure(folder / kind)
                reports.append(text)
                cells += [f"{seconds:.1f} s", f"{world / seconds:.1f}", f"{peak:,.0f} MB"]
            assert reports[0] == reports[1], "the two reports differ"
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
