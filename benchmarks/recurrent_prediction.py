"""Compare predicted times of recurrences with measured ones (data/h200_recurrent_runs.csv), which no curve has seen.

    python benchmarks/recurrent_prediction.py

A row is a run of `ringprof record`, or of benchmarks/recurrent_speed.py, forward and backward on GPUs of one host.
"""

from __future__ import annotations

import csv
import statistics
from pathlib import Path
from typing import NamedTuple

from ringprof.prediction.calibration import Calibration, read_calibration
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import predict
from ringprof.prediction.query import Query
from ringprof.prediction.schedules import schedule_of
from ringprof.run import Workload

DATA = Path(__file__).parent / "data" / "h200_recurrent_runs.csv"


class Score(NamedTuple):
    """Measured and predicted milliseconds of one row."""

    name: str
    source: str
    measured_ms: float
    interval_ms: tuple[float, float, float]
    """10th, 50th and 90th percentile of the prediction."""
    host_bound: bool

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.interval_ms[1] / self.measured_ms - 1

    @property
    def inside(self) -> bool:
        """Whether the measured time lies in the interval."""
        return self.interval_ms[0] <= self.measured_ms <= self.interval_ms[2]


def scores(machine: Calibration) -> list[Score]:
    """Predict every row."""
    result = []
    for row in csv.DictReader(DATA.read_text(encoding="utf-8").splitlines()):
        workload = Workload(
            seq=int(row["seq"]), heads=int(row["heads"]), kv_heads=int(row["kv_heads"]), head_dim=128,
            operator=row["operator"], conv_width=int(row["conv_width"]) if row["conv_width"] else None,  # type: ignore[arg-type]
        )  # fmt: skip
        query = Query(row["strategy"], workload, Cluster(hosts=1, gpus_per_host=int(row["gpus"])))
        prediction = predict(query, machine, schedule_of, draws=5)
        name = f"{row['operator']} {row['strategy']} {row['seq']}"
        result.append(Score(name, row["source"], float(row["ms"]), prediction.interval_ms, prediction.host_bound))
    return result


def main() -> None:
    """Print every row, then the errors by source."""
    every = scores(read_calibration("h200"))
    for score in every:
        inside = "inside" if score.inside else "outside"
        bound = "host" if score.host_bound else "device"
        print(
            f"{score.source:9} {score.name:30} measured {score.measured_ms:8.3f} ms, predicted"
            f" {score.interval_ms[1]:8.3f} ({score.error:+.1%}, {inside}, bound by the {bound})"
        )
    for source in dict.fromkeys(score.source for score in every):
        own = [score for score in every if score.source == source]
        errors = [score.error for score in own]
        print(
            f"{source}: {len(own)} rows, mean error {statistics.fmean(map(abs, errors)):.1%}, bias"
            f" {statistics.fmean(errors):+.1%}, largest {max(errors, key=abs):+.1%},"
            f" {sum(score.inside for score in own)} inside"
        )


if __name__ == "__main__":
    main()
