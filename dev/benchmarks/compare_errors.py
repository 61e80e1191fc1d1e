"""Measure false alarms and power of `ringprof compare` on simulated recordings.

    python dev/benchmarks/compare_errors.py [--cases 400]

Iteration times are drawn from four models: independent noise of 0.5 %, serially correlated noise, a spread of 1 %
between recordings, and iterations a tenth of which are slowed by outliers. Each row prints how often two sides of one
program are called different (false alarms; at most 5 % is the aim), and how often a second side that is 1, 2 or 5 %
slower is found to be slower.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ringprof.analysis.findings.comparison import combine_recordings, compare_measurements
from ringprof.analysis.findings.metric import Measurement, Metric

SETTINGS = dict.fromkeys(
    ("seq", "batch", "heads", "kv_heads", "head_dim", "causal", "dtype", "world_size", "passes"), "1"
)
"""Workload that both sides state."""
ITERATION_MS = 100.0
NOISE = 0.005
"""Standard deviation of one iteration, as a share."""
OUTLIERS = (0.1, 0.05)
"""Share of iterations that are outliers, and their mean excess as a share of the iteration time."""
SIZES = ((1, 8), (1, 10), (1, 50), (3, 10), (5, 10), (8, 10))
"""Recordings per side and iterations per recording."""
SLOWDOWNS = (1.01, 1.02, 1.05)


@dataclass(frozen=True)
class Model:
    """Model of the variation of iteration times."""

    name: str
    correlation: float = 0.0
    """Correlation of neighbouring iterations."""
    spread: float = 0.0
    """Standard deviation between recordings of one program, as a share."""
    outliers: bool = False

    def iterations(self, count: int, random: np.random.Generator) -> np.ndarray:
        """Draw the iteration times of one recording, relative to their median."""
        noise = random.normal(0, NOISE, count)
        for index in range(1, count):
            noise[index] = self.correlation * noise[index - 1] + (1 - self.correlation**2) ** 0.5 * noise[index]
        if self.outliers:
            share, length = OUTLIERS
            noise += (random.random(count) < share) * random.exponential(length, count)
        return np.asarray((1 + random.normal(0, self.spread)) * (1 + noise))


MODELS = (
    Model("independent"),
    Model("serial correlation 0.7", correlation=0.7),
    Model("spread between recordings 1 %", spread=0.01),
    Model("outliers", outliers=True),
)


def verdict(model: Model, size: tuple[int, int], slowdown: float, random: np.random.Generator) -> str:
    """Compare two simulated sides, whose recordings are interleaved; the second is slower by ``slowdown``."""
    sides = [_side(model, size, factor, turn, random) for turn, factor in enumerate((1.0, slowdown))]
    return compare_measurements(sides).differences[0].verdict


def _side(model: Model, size: tuple[int, int], factor: float, turn: int, random: np.random.Generator) -> Measurement:
    recordings, count = size
    entries = []
    for number in range(recordings):
        times = ITERATION_MS * factor * model.iterations(count, random)
        figure = Metric(float(np.median(times)), "ms", (tuple(times.tolist()),), False, depends_on_work=True)
        created = f"2026-01-01T00:{2 * number + turn:02d}:00Z"
        entries.append(Measurement(f"side {turn}", "run", SETTINGS, {"iteration_ms": figure}, created=(created,)))
    return combine_recordings(entries)


def false_alarms(model: Model, size: tuple[int, int], cases: int, random: np.random.Generator) -> float:
    """Return the share of cases in which two sides of one program are called different."""
    verdicts = Counter(verdict(model, size, 1.0, random) for _ in range(cases))
    return (verdicts["worse"] + verdicts["better"]) / cases


def power(model: Model, size: tuple[int, int], slowdown: float, cases: int, random: np.random.Generator) -> float:
    """Return the share of cases in which a slower second side is found to be slower."""
    return Counter(verdict(model, size, slowdown, random) for _ in range(cases))["worse"] / cases


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=400, help="cases per figure")
    cases = parser.parse_args(arguments).cases
    print("| recordings x iterations | model | false alarms | +1 % found | +2 % found | +5 % found |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for size in SIZES:
        for number, model in enumerate(MODELS):
            random = np.random.default_rng([*size, number])
            shares = [false_alarms(model, size, cases, random)]
            shares += [power(model, size, slowdown, cases, random) for slowdown in SLOWDOWNS]
            cells = " | ".join(f"{100 * share:.1f} %" for share in shares)
            print(f"| {size[0]} x {size[1]} | {model.name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
