"""Time recurrences on GPUs of one host, and compare predicted times with measured ones that no curve is fitted to.

    torchrun --nproc-per-node 2 dev/benchmarks/recurrent_prediction.py --measure --tokens 12288,49152   # prints rows
    python dev/benchmarks/recurrent_prediction.py                                             # compares all rows

A row is timed as `ringprof record` times it: forward and backward, one iteration after another, the host included, the
median over iterations of the slowest rank's time. The rows are in data/recurrent_runs.csv.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from ringprof.iteration.recurrence import RecurrenceShard
from ringprof.prediction.calibration import Calibration, read_calibration
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import predict
from ringprof.prediction.query import Query
from ringprof.prediction.schedules import schedule_of
from ringprof.ranks.progress import SilentReporter
from ringprof.recording.measure import measure
from ringprof.strategies.recurrent.registry import create_recurrent
from ringprof.workload.recurrences import Operator
from ringprof.workload.workload import Workload

DATA = Path(__file__).parent / "data" / "recurrent_runs.csv"
COLUMNS = "machine", "operator", "strategy", "gpus", "seq", "heads", "conv_width", "ms", "peak_mib"
OPERATORS: tuple[Operator, ...] = ("gdn", "simple-gla", "gla", "mamba2")


class Score(NamedTuple):
    """Measured and predicted milliseconds of one row."""

    machine: str
    workload: Workload
    strategy: str
    gpus: int
    measured_ms: float
    interval_ms: tuple[float, float, float]
    """10th, 50th and 90th percentile of the prediction."""
    host_bound: bool
    memory_mib: tuple[float, float] | None
    """Peak memory of a rank, measured and predicted."""

    @property
    def name(self) -> str:
        """Operator, strategy and tokens per GPU."""
        width = f" conv {self.workload.conv_width}" if self.workload.conv_width else ""
        return f"{self.workload.operator} {self.strategy} {self.tokens}{width}"

    @property
    def tokens(self) -> int:
        """Tokens per GPU."""
        return self.workload.seq // self.gpus

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.interval_ms[1] / self.measured_ms - 1

    @property
    def inside(self) -> bool:
        """Whether the measured time lies in the interval."""
        return self.interval_ms[0] <= self.measured_ms <= self.interval_ms[2]


def workload_of(operator: Operator, seq: int, heads: int, conv_width: int | None = None) -> Workload:
    """Return a workload with heads of 128; Mamba-2 has one group."""
    kv_heads = 1 if operator == "mamba2" else heads
    return Workload(
        seq=seq, heads=heads, kv_heads=kv_heads, head_dim=128, operator=operator, conv_width=conv_width
    )  # fmt: skip


def scores(machine: Calibration) -> list[Score]:
    """Predict every row of the machine."""
    result = []
    for row in csv.DictReader(DATA.read_text(encoding="utf-8").splitlines()):
        if row["machine"] != machine.name:
            continue
        width = int(row["conv_width"]) if row["conv_width"] else None
        workload, gpus = workload_of(row["operator"], int(row["seq"]), int(row["heads"]), width), int(row["gpus"])  # type: ignore[arg-type]
        query = Query(row["strategy"], workload, Cluster(hosts=1, gpus_per_host=gpus))
        prediction = predict(query, machine, schedule_of, draws=5)
        memory = (float(row["peak_mib"]), prediction.peak_bytes / 2**20) if row["peak_mib"] else None
        result.append(Score(
            machine.name, workload, row["strategy"], gpus, float(row["ms"]), prediction.interval_ms,
            prediction.host_bound, memory,
        ))  # fmt: skip
    return result


def measure_rows(
    operators: list[Operator], strategies: list[str], lengths: list[int], heads: int, conv_width: int | None,
    stop: float,
) -> None:  # fmt: skip
    """Print a row for every operator, number of tokens per GPU and strategy, until ``stop`` of `time.time`."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    gpus = dist.get_world_size()
    machine = torch.cuda.get_device_name().split()[1].lower()
    writer = csv.writer(sys.stdout, lineterminator="\n")
    for tokens in lengths:
        for operator in operators:
            for strategy in strategies:
                workload = workload_of(operator, gpus * tokens, heads, conv_width)
                late = torch.tensor(float(time.time() > stop), device=device)
                dist.all_reduce(late)
                if late.item():
                    continue
                shard = RecurrenceShard.create(create_recurrent(strategy, kernel="fla"), workload, device)
                measured = measure(shard, 6, 20, SilentReporter())
                slowest = torch.tensor([*measured.iterations_ns, measured.peak_bytes or 0], device=device)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                *times_ns, peak = slowest.tolist()
                if dist.get_rank() == 0:
                    ms = round(statistics.median(times_ns) / 1e6, 3)
                    writer.writerow(
                        [
                            machine,
                            operator,
                            strategy,
                            gpus,
                            workload.seq,
                            heads,
                            conv_width or "",
                            ms,
                            round(peak / 2**20),
                        ]
                    )
                    sys.stdout.flush()
                del shard, measured
                torch.cuda.empty_cache()
    dist.destroy_process_group()


def main() -> None:
    """Measure rows, or print every row and the errors by machine and tokens per GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="under torchrun: time rows and print them as CSV")
    parser.add_argument("--operators", default=",".join(OPERATORS))
    parser.add_argument("--strategies", default="state-scan,state-ring,state-a2a")
    parser.add_argument("--tokens", default="12288,49152,98304", help="tokens per GPU")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--conv-width", type=int, help="weights of a convolution before the recurrence (default: none)")
    parser.add_argument("--seconds", type=float, default=1e6, help="begin no row after so many seconds")
    options = parser.parse_args()
    if options.measure:
        measure_rows(
            options.operators.split(","), options.strategies.split(","), [int(x) for x in options.tokens.split(",")],
            options.heads, options.conv_width, time.time() + options.seconds,
        )  # fmt: skip
        return
    for machine in ("h100", "h200"):
        every = scores(read_calibration(machine))
        for score in every:
            inside = "inside" if score.inside else "outside"
            bound = "host" if score.host_bound else "device"
            memory = ""
            if score.memory_mib:
                memory = ", memory {:.0f} MiB, predicted {:.0f}".format(*score.memory_mib)
            print(
                f"{machine} {score.name:34} measured {score.measured_ms:8.3f} ms, predicted"
                f" {score.interval_ms[1]:8.3f} ({score.error:+.1%}, {inside}, bound by the {bound}{memory})"
            )
        for tokens in sorted({score.tokens for score in every}):
            errors = [score.error for score in every if score.tokens == tokens]
            inside_count = sum(score.inside for score in every if score.tokens == tokens)
            print(
                f"{machine} {tokens} tokens per GPU: {len(errors)} rows, mean error"
                f" {statistics.fmean(map(abs, errors)):.1%}, bias {statistics.fmean(errors):+.1%}, from"
                f" {min(errors):+.1%} to {max(errors):+.1%}, {inside_count} inside"
            )


if __name__ == "__main__":
    main()
