"""Measure how far recordings of one program differ: the spread that `ringprof compare` assumes of a single recording.

    python dev/benchmarks/recording_spread.py

The pairs are all programs that the repository's data contain twice (`pairs_in_one_session`, `pairs_in_two_sessions`).
The model of one recording is a standard deviation of hypot(share, fixed / time). The share comes from pairs of
`LONG_MS` or more, the fixed part from all pairs by maximum likelihood. The upper ends of the 95 % intervals are in
`ringprof.analysis.findings.recording_spread`.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from ringprof.analysis.findings.recording_spread import OTHER_SESSION, SAME_SESSION, Spread

ROOT = Path(__file__).parents[2]
DATA = ROOT / "dev" / "benchmarks" / "data"
LONG_MS = 10.0
"""Time from which the fixed part matters little."""
BINS_MS = (0, 1, 2, 3, 5, 10, 20, 50, 1000)
Pairs = Sequence[tuple[float, float]]
"""Milliseconds of one iteration of one program, by two recordings."""


def pairs_in_one_session() -> Pairs:
    """Return 27 and 39 programs recorded twice on 2 H200, and 4 runs of 4 H200 whose iterations were timed twice."""
    again = [(float(row["median_ms"]), float(row["again_ms"])) for row in _rows("h200_shapes.csv")]
    processes = _pairs_by(("name",), "median_ms", _rows("h200_shapes_4.csv"))
    return [*again, *processes, *_timed_twice()]


def pairs_in_two_sessions() -> Pairs:
    """Return 54 cells of zigzag on 4 H200 that two sessions recorded.

    Cells of flash-attn over NCCL are left out: the first session timed them right after other kernels (docs/speed.md).
    """
    rows = [row for row in _rows("h200_grid.csv") if (row["kernel"], row["hops"]) != ("flash-attn", "nccl")]
    return _pairs_by(("kernel", "hops", "seq", "heads", "kv_heads"), "ms", rows)


def _timed_twice() -> Pairs:
    """Return the medians of the timed iterations of committed runs and of the ordinary ones among their baselines."""
    runs = (json.loads(path.read_text("utf-8")) for path in sorted((ROOT / "traces").glob("h200*/run.json")))
    parts = [(run["timings"]["iterations_ns"], run["controls"]["ordinary_ns"]) for run in runs if run.get("controls")]
    return [(_slowest_median_ms(timed), _slowest_median_ms(ordinary)) for timed, ordinary in parts]


def _slowest_median_ms(ranks: Sequence[Sequence[float]]) -> float:
    return float(np.median(np.max(np.array(ranks, dtype=float), axis=0))) / 1e6


def _rows(name: str) -> list[dict[str, str]]:
    with open(DATA / name, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _pairs_by(keys: Sequence[str], column: str, rows: Iterable[dict[str, str]]) -> Pairs:
    times: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for row in rows:
        times[tuple(row[key] for key in keys)].append(float(row[column]))
    return [(pair[0], pair[1]) for pair in times.values() if len(pair) == 2]


def lengths_and_differences(pairs: Pairs) -> tuple[np.ndarray, np.ndarray]:
    """Return each pair's geometric mean time in milliseconds, and the logarithm of its ratio."""
    first, second = np.array(pairs).T
    return np.sqrt(first * second), np.log(second / first)


def spread_of(differences: np.ndarray) -> float:
    """Return the standard deviation of one recording."""
    return float(np.sqrt(np.mean(differences**2) / 2))


def share(pairs: Pairs) -> tuple[float, float, float]:
    """Return the spread of long programs with its 95 % interval by chi-squared (Wilson and Hilferty's quantiles)."""
    lengths, differences = lengths_and_differences(pairs)
    long = differences[lengths >= LONG_MS]
    step = 2 / (9 * len(long))
    low, high = ((1 - step + z * step**0.5) ** -1.5 for z in (1.96, -1.96))
    return spread_of(long), spread_of(long) * low, spread_of(long) * high


def fixed_ms(pairs: Pairs, draws: int = 400) -> tuple[float, float, float]:
    """Return the fixed part by maximum likelihood, with its 95 % interval by the bootstrap over programs."""
    lengths, differences = lengths_and_differences(pairs)
    shares, fixed = np.linspace(0.001, 0.04, 40), np.linspace(0.02, 0.6, 117)
    variance = 2 * (shares[:, None, None] ** 2 + (fixed[None, :, None] / lengths) ** 2)
    likelihood = -0.5 * (np.log(variance) + differences**2 / variance)
    random = np.random.default_rng(0)
    counts = random.multinomial(len(pairs), np.full(len(pairs), 1 / len(pairs)), draws)
    best = [fixed[np.argmax((likelihood @ count).max(axis=0))] for count in (np.ones(len(pairs)), *counts)]
    low, high = np.quantile(best[1:], (0.025, 0.975))
    return float(best[0]), float(low), float(high)


def outside(pairs: Pairs, spread: Spread) -> float:
    """Return the share of pairs that differ by more than 1.96 of the assumed standard deviations."""
    lengths, differences = lengths_and_differences(pairs)
    limits = np.array([1.96 * 2**0.5 * spread.share_of(length) for length in lengths])
    return float(np.mean(np.abs(differences) > limits))


def main() -> None:
    for title, pairs, assumed in (
        ("one session", pairs_in_one_session(), SAME_SESSION),
        ("two sessions", pairs_in_two_sessions(), OTHER_SESSION),
    ):
        lengths, differences = lengths_and_differences(pairs)
        print(f"{title}: {len(pairs)} pairs, {np.sum(lengths >= LONG_MS)} of {LONG_MS:g} ms or more")
        for low, high in pairwise(BINS_MS):
            chosen = differences[(lengths >= low) & (lengths < high)]
            if len(chosen):
                print(f"  {low} to {high} ms: {100 * spread_of(chosen):.1f} % ({len(chosen)} pairs)")
        print("  share {:.2%} ({:.2%} to {:.2%})".format(*share(pairs)))
        print("  fixed {:.3f} ms ({:.3f} to {:.3f})".format(*fixed_ms(pairs)))
        print(f"  assumed {assumed.share:.1%} and {assumed.fixed_ms:g} ms: {outside(pairs, assumed):.1%} outside")


if __name__ == "__main__":
    main()
