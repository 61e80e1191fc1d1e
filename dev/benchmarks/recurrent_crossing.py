"""Predict from which sequence length a gated delta net takes less time than attention.

    python dev/benchmarks/recurrent_crossing.py                  # the table of docs/hybrid-models.md
    python dev/benchmarks/recurrent_crossing.py --heads 32 --gpus 4

Both have as many heads of 128, forward and backward, by the curves of the bundled `h200` (one host): the gated delta
net with `state-scan`, attention (causal, flash-attn 3) with the faster of zigzag and ulysses. Projections, norms and
the short convolution are left out of both. Needs no GPU.
"""

from __future__ import annotations

import argparse
import math
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple

from ringprof.errors import RingprofError
from ringprof.prediction.calibration import Calibration, read_calibration
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import predict
from ringprof.prediction.query import Query
from ringprof.prediction.schedules import schedule_of
from ringprof.workload.workload import Workload

LENGTHS = (8192, 16384, 32768, 65536, 131072)
ATTENTION = ("zigzag", "ulysses")


class Row(NamedTuple):
    """Predicted milliseconds of one layer's attention and recurrence."""

    gpus: int
    tokens: int
    strategy: str
    """The faster strategy of attention."""
    attention_ms: float
    recurrence_ms: float


def row(machine: Calibration, gpus: int, tokens: int, heads: int) -> Row:
    """Predict one length. Raises `RingprofError` where no strategy of attention can be predicted."""
    attempts: list[tuple[float, str]] = []
    for strategy in ATTENTION:
        with suppress(RingprofError):
            attempts.append((_predict_ms(machine, strategy, gpus, tokens, heads, recurrent=False), strategy))
    if not attempts:
        raise RingprofError(f"{tokens} tokens on {gpus} GPUs: no attention can be predicted")
    attention_ms, strategy = min(attempts)
    recurrence_ms = _predict_ms(machine, "state-scan", gpus, tokens, heads, recurrent=True)
    return Row(gpus, tokens, strategy, attention_ms, recurrence_ms)


def _predict_ms(
    machine: Calibration, strategy: str, gpus: int, tokens: int, heads: int, *, recurrent: bool
) -> float:  # fmt: skip
    workload = Workload(
        seq=tokens, heads=heads, kv_heads=heads, head_dim=128, operator="gdn" if recurrent else "attention"
    )
    query = Query(strategy, workload, Cluster(hosts=1, gpus_per_host=gpus), "auto", "auto")
    return predict(query, machine, schedule_of, draws=3).median_ns / 1e6


def crossing(rows: list[Row]) -> float | None:
    """Return the length at which both take the same time, between two lengths of the table; None if there is none."""
    for before, after in pairwise(rows):
        low, high = (math.log(each.attention_ms / each.recurrence_ms) for each in (before, after))
        if low < 0 <= high:
            return float(before.tokens * (after.tokens / before.tokens) ** (low / (low - high)))
    return None


def table(machine: Calibration, counts: list[int], heads: int) -> str:
    """Return the table in Markdown, and a sentence with the crossing point for every number of GPUs."""
    lines = [
        "| GPUs | tokens | attention, ms | gated delta net, ms | ratio |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    crossings = []
    for gpus in counts:
        rows = [row(machine, gpus, tokens, heads) for tokens in LENGTHS if tokens // gpus >= 2048]
        lines += [
            f"| {each.gpus} | {each.tokens:,} | {each.attention_ms:.2f} ({each.strategy}) | {each.recurrence_ms:.2f} |"
            f" {each.attention_ms / each.recurrence_ms:.1f} |"
            for each in rows
        ]
        tokens = crossing(rows)
        shortest = rows[0].tokens
        crossings.append(
            f"about {tokens / 1024:.0f}k tokens on {gpus} GPUs" if tokens is not None
            else f"{'below' if rows[0].attention_ms > rows[0].recurrence_ms else 'not above'} {shortest / 1024:.0f}k"
            f" tokens on {gpus} GPUs"
        )  # fmt: skip
    return "\n".join([*lines, "", f"The times are equal at {', '.join(crossings)}."])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--gpus", default="2,8")
    parser.add_argument("--machine", default="h200")
    options = parser.parse_args()
    print(table(read_calibration(options.machine), [int(count) for count in options.gpus.split(",")], options.heads))


if __name__ == "__main__":
    main()
